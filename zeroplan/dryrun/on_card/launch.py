"""Starts a script on real GPUs, alone or under its own launcher, and reads each rank's counts. Needs no torch."""

import json
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from zeroplan.dryrun.command import Command
from zeroplan.dryrun.launch import Process, ended, refuse, shown
from zeroplan.dryrun.on_card.task import ANSWER, ORDER, CardHere, CardTask, environment
from zeroplan.dryrun.task import DryRunTask
from zeroplan.errors import SpecError
from zeroplan.script_card import RankOnCard
from zeroplan.spec.base import read
from zeroplan.verify.failures import FailedError
from zeroplan.verify.processes.launch import how_ended
from zeroplan.verify.processes.scratch import ORDER as FILE
from zeroplan.verify.processes.scratch import scratch

_CHILD = "zeroplan.dryrun.on_card.child"
_LOOKING_S = 120.0
_MODULES = {
    "torchrun": ("torch.distributed.run", "-m"), "accelerate": ("accelerate.commands.launch", "-m"),
    "deepspeed": ("deepspeed.launcher.runner", "--module"), "torch.distributed.launch": ("torch.distributed.launch", "-m"),
}  # fmt: skip
"""Launchers as modules of this interpreter, and their flag for running a module."""


def card_here(run: DryRunTask) -> CardHere:
    """The GPU of this machine. Raises NotHereError if there is none."""
    with scratch() as folder:
        task = CardTask(run=run, folder=str(folder), looks=True)
        (found,), _ = _answers(task, (), folder, timeout_s=_LOOKING_S, quiet=True)
        return read(CardHere, found, where="answer")


def on_card(run: DryRunTask, command: Command, *, alone: bool, timeout_s: float, quiet: bool = False) -> tuple[RankOnCard, ...]:
    """Run a script on this machine's GPUs and return each rank's counts, the fullest rank first.

    ``alone`` runs it as one rank on one GPU, whatever its launcher. Its output goes where a dry run's goes. Raises SpecError if
    the script itself fails, MeasurementError without a GPU or if no step ends in time.
    """
    with scratch() as folder:
        task = CardTask(run=run if alone else replace(run, launcher=()), folder=str(folder), alone=alone)
        launcher = () if alone else command.launcher
        found, code = _answers(task, launcher, folder, timeout_s=timeout_s, quiet=quiet)
        if not found:
            raise FailedError(f"the script's process ended without an answer: {how_ended(code)}; its output may show why")
        ranks = [read(RankOnCard, one, where="answer") for one in found]
        if (gpus := ranks[0].gpus) != run.gpus:
            raise SpecError(f"the script ran on {gpus:,} GPUs, and its dry run is for {run.gpus:,}; add --gpus {gpus}")
        return tuple(sorted(ranks, key=lambda one: (one.ended != "out of memory", -one.peak_bytes)))


def _answers(
    task: CardTask, launcher: tuple[str, ...], folder: Path, *, timeout_s: float, quiet: bool
) -> tuple[list[dict[str, object]], int]:  # fmt: skip
    """The ranks' answers in order, and the exit code; raises a rank's error."""
    order = folder / FILE
    order.write_text(json.dumps(asdict(task)), encoding="utf-8")
    child = Process(_command(launcher, task.run), {ORDER: str(order), **environment(task)}, task.folder)
    steps = f"{task.run.steps} optimizer steps within {timeout_s:g} s"
    late = f"the script did not complete {steps} and was ended; allow more time with --timeout"
    with shown(folder / "printed", quiet=quiet, worked=lambda: bool(_left(folder))) as output:
        code = ended(child, output, timeout_s=timeout_s, late=late)
    found = _left(folder)
    for one in found:
        refuse(one)
    return found, code


def _left(folder: Path) -> list[dict[str, object]]:
    found = []
    for path in sorted(folder.glob(ANSWER.format("*"))):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def _command(launcher: tuple[str, ...], run: DryRunTask) -> tuple[str, ...]:
    if not launcher:
        return (sys.executable, "-m", _CHILD, *run.arguments)
    module, takes = _MODULES[launcher[0]]
    return (sys.executable, "-m", module, *launcher[1:], takes, _CHILD, *run.arguments)

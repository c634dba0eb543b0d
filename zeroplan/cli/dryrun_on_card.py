"""`zeroplan dryrun --backend cuda`: runs the script on this machine's GPUs, and compares its dry run with their memory."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import typer

from zeroplan.cli import DISAGREES, json_text, say
from zeroplan.cli.dryrun_files import Wanted, printable
from zeroplan.cli.dryrun_task import Ranks, dry_run_of
from zeroplan.dryrun.command import Command
from zeroplan.dryrun.task import DryRunTask
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.installation import not_installed
from zeroplan.units import Unit

if TYPE_CHECKING:
    from zeroplan.dryrun.on_card.task import CardHere
    from zeroplan.script_trace import SavedRun


class Limits(NamedTuple):
    """The tolerated difference between dry run and GPU, and the time limit of each. [s]"""

    tolerance: float
    seconds: float


class ScriptRun(NamedTuple):
    """A script, its rank and how to run it."""

    command: Command
    how: Ranks
    limits: Limits
    imbalance: float
    eager: bool
    quiet: bool

    @property
    def alone(self) -> bool:
        """Whether a single process runs as one rank of N: without a launcher, or with --as-rank."""
        return not self.command.launcher or self.how.rank is not None


def on_card(
    run: ScriptRun, wanted: Wanted, before: "tuple[str, SavedRun] | None", sizes: Unit, *, as_json: bool
) -> int:  # fmt: skip
    """Run a script on GPUs, compare it with its dry run and print the comparison; returns 3 if they disagree.

    ``before`` is a saved dry run with its path; without it the dry run is made first. Raises MeasurementError, in one line,
    without a GPU.
    """
    if lacking := not_installed("torch", by="--backend cuda"):
        raise MeasurementError(lacking)
    from zeroplan.dryrun.on_card.launch import card_here, on_card  # noqa: PLC0415  start-up is part of every command's time
    from zeroplan.report.dryrun_on_card import CardComparison, on_card_payload, on_card_text  # noqa: PLC0415

    task = run.how.task(run.command)
    task = replace(_for_card(task, run, card_here(task)), eager=run.eager, traced=bool(wanted.named))
    task = replace(task, imbalance=run.imbalance)
    if before is not None:
        _require_same(before, task, alone=run.alone)
        predicted = before[1]
        task = replace(task, steps=len(predicted.run.steps))
    else:
        predicted = dry_run_of(task, run.limits.seconds, quiet=run.quiet)
        wanted.write(predicted)
    if not run.quiet:
        say(f"running {task.target} on {'one GPU' if run.alone else 'the GPUs of its launcher'}")
    ranks = on_card(task, run.command, alone=run.alone, timeout_s=run.limits.seconds, quiet=run.quiet)
    found = CardComparison(ranks, predicted.run, run.limits.tolerance)
    typer.echo(json_text(on_card_payload(found)) if as_json else printable(on_card_text(found, unit=sizes)))
    return 0 if found.agrees else DISAGREES


def _for_card(task: DryRunTask, run: ScriptRun, card: "CardHere") -> DryRunTask:
    """The task with this machine's GPU if the user named none, and its number of GPUs if the launcher uses all of them."""
    from zeroplan.catalog.gpu import gpu as gpu_named  # noqa: PLC0415  see on_card

    if not run.alone and run.how.gpus is None and run.command.gpus is None:
        task = replace(task, gpus=card.count, gpus_per_node=card.count)
    if run.how.gpu is not None:
        return task
    try:
        return replace(task, gpu=gpu_named(card.name).name)
    except SpecError:
        raise SpecError(
            f"this GPU reports the name {card.name!r}, which is not in the catalogue; name a similar GPU with --gpu"
        ) from None


def _require_same(before: "tuple[str, SavedRun]", task: DryRunTask, *, alone: bool) -> None:
    from zeroplan.saved_runs.on_card import require_same  # noqa: PLC0415  see on_card

    where, saved = before
    rank = task.rank if alone else None
    require_same(saved.run, command=(task.target, *task.arguments), gpus=task.gpus, rank=rank, where=where)

"""The process of a script on a real GPU: ``python -m zeroplan.dryrun.on_card.child ARGUMENTS...``, by hand or by a launcher.

It does nothing else and ends with the script. Its answer, or one line that says why there is none, is a file of its rank in the
folder that the task names.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from zeroplan.dryrun.on_card.task import ANSWER, ORDER, CardHere, CardTask
from zeroplan.dryrun.script import run_script
from zeroplan.errors import ZeroplanError
from zeroplan.script_card import EndedOnCard, RankOnCard
from zeroplan.spec.base import Spec, read

_OTHERS_S = 60.0
"""How long a rank whose steps are taken waits for the others of its node: rank 0 may be where all of them meet. [s]"""


def main() -> None:
    """Run the script of a task as this rank, and end this process."""
    task = read(CardTask, json.loads(Path(os.environ[ORDER]).read_text(encoding="utf-8")), where="task")
    _end(task, lambda: _here() if task.looks else _answer(task))


def _end(task: CardTask, answered: Callable[[], Spec]) -> None:
    """Write the answer and end this process: with 1 where it failed, for which launchers end the other ranks."""
    code = 0
    try:
        found = answered()
    except BaseException as error:  # noqa: BLE001  whatever the script raises, the parent is told
        from zeroplan.dryrun.failures import failure, show  # noqa: PLC0415

        if not isinstance(error, (ZeroplanError, SystemExit)):
            show(error)
        found, code = failure(error), 1
    if isinstance(found, RankOnCard) and found.ended == "out of memory":
        code = 1
    _write(task, found)
    if not code:
        _await_others(task)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # threads and atexit of a script that was stopped have nothing more to do


def _write(task: CardTask, found: Spec) -> None:
    path = Path(task.folder) / ANSWER.format(os.environ.get("RANK", "0"))
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(asdict(found)), encoding="utf-8")
    beside.rename(path)


def _await_others(task: CardTask) -> None:
    ranks = 1 if task.alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    until = time.monotonic() + _OTHERS_S
    while len(list(Path(task.folder).glob(ANSWER.format("*")))) < ranks and time.monotonic() < until:
        time.sleep(0.05)


def _here() -> CardHere:
    """The GPU that is here. Raises NotHereError, in one line, where there is none."""
    import torch  # noqa: PLC0415  start-up is part of every refusal

    _refuse_without_gpus(1)
    properties = torch.cuda.get_device_properties(0)
    return CardHere(name=properties.name, total_bytes=properties.total_memory, count=torch.cuda.device_count())


def _refuse_without_gpus(ranks: int) -> None:
    from zeroplan.verify.backends.gpu_ready import refuse_without_gpus  # noqa: PLC0415  see _here

    refuse_without_gpus(ranks, otherwise="leave --backend cuda out for a dry run, which needs none")


def _answer(task: CardTask) -> Spec:
    _refuse_without_gpus(1 if task.alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    run = _Run(task)
    run.loop.end_now = lambda: _end(task, lambda: run.found("steps taken"))
    return run()


class _Run:
    """A prepared process: call it to run the script."""

    def __init__(self, task: CardTask) -> None:
        from zeroplan.dryrun import launchers  # noqa: PLC0415  see _here
        from zeroplan.dryrun.libraries import deepspeed, pipelining  # noqa: PLC0415
        from zeroplan.dryrun.loop import Loop  # noqa: PLC0415
        from zeroplan.dryrun.on_card.group import make_groups_alone  # noqa: PLC0415
        from zeroplan.dryrun.on_card.peaks import Peaks  # noqa: PLC0415
        from zeroplan.dryrun.on_card.phases import PhasesOnCard  # noqa: PLC0415
        from zeroplan.dryrun.patches import AfterImport  # noqa: PLC0415

        peaks = Peaks()
        self._task, self.phases = task, PhasesOnCard(peaks)
        self.loop = Loop(self.phases, task.run.steps)
        patches = deepspeed.on_a_card(self.loop)
        if task.alone:
            make_groups_alone()
            launchers.run_ranks_here(task.run)
            patches = patches | pipelining.ON_A_CARD
        AfterImport(patches).install()
        peaks.answer_the_script()
        self.loop.watch()

    def __call__(self) -> RankOnCard:
        """Run the script until its steps are taken, it ends, or the card is full."""
        import torch  # noqa: PLC0415  see _here

        from zeroplan.dryrun.compiling import tracing  # noqa: PLC0415

        if not self._task.run.eager:
            tracing.call_hooks_outside_of_graphs()
        try:
            run_script(self._task.run, sys.argv[1:])
        except torch.OutOfMemoryError as full:
            return self.found("out of memory", " ".join(str(full).split()))
        except BaseException as error:
            if not self.loop.stopped and not (isinstance(error, SystemExit) and not error.code):
                raise
        return self.found("steps taken" if self.loop.stopped else "script ended")

    def found(self, ended: EndedOnCard, said: str = "") -> RankOnCard:
        """What was counted. Raises MeasurementError where the script came to no optimizer step."""
        from zeroplan.dryrun.on_card.answer import rank_on_card  # noqa: PLC0415  see _here

        return rank_on_card(self._task, self.loop, self.phases, ended=ended, said=said)


if __name__ == "__main__":
    main()

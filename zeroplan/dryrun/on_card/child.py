"""Runs a script on a real GPU: ``python -m zeroplan.dryrun.on_card.child ARGUMENTS...``, started directly or by a launcher.

It writes its answer, or one line with the reason of a failure, into its rank's file in the task's folder and ends with the script.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from zeroplan.dryrun.on_card.task import ANSWER, ORDER, CardHere, CardTask
from zeroplan.dryrun.script import answer_or_failure, leave, run_script
from zeroplan.dryrun.task import Failed
from zeroplan.script_card import EndedOnCard, RankOnCard
from zeroplan.spec.base import Spec, read

_OTHERS_S = 60.0
"""How long a finished rank waits for the others of its node, which may still need rank 0's store. [s]"""


def main() -> None:
    """Run the task's script as this rank, and end this process."""
    task = read(CardTask, json.loads(Path(os.environ[ORDER]).read_text(encoding="utf-8")), where="task")
    _end(task, lambda: _here() if task.looks else _answer(task))


def _end(task: CardTask, make_answer: Callable[[], Spec]) -> None:
    """Write the answer and end this process; exit code 1 after a failure makes launchers end the other ranks."""
    found = answer_or_failure(make_answer)
    failed = isinstance(found, Failed) or (isinstance(found, RankOnCard) and found.ended == "out of memory")
    _write(task, found)
    if not failed:
        _await_others(task)
    leave(int(failed))


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
    """This machine's first GPU. Raises NotHereError if there is none."""
    import torch  # noqa: PLC0415  errors are reported only from here on

    _refuse_without_gpus(1)
    properties = torch.cuda.get_device_properties(0)
    return CardHere(name=properties.name, total_bytes=properties.total_memory, count=torch.cuda.device_count())


def _refuse_without_gpus(ranks: int) -> None:
    from zeroplan.verify.backends.gpu_ready import refuse_without_gpus  # noqa: PLC0415  see _here

    refuse_without_gpus(ranks, otherwise="leave --backend cuda out for a dry run, which needs no GPU")


def _answer(task: CardTask) -> Spec:
    _refuse_without_gpus(1 if task.alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    run = _Run(task)
    run.loop.end_now = lambda: _end(task, lambda: run.found("steps taken"))
    return run()


class _Run:
    """A prepared process; call it to run the script."""

    def __init__(self, task: CardTask) -> None:
        from zeroplan.dryrun import launchers  # noqa: PLC0415  see _here
        from zeroplan.dryrun.libraries import deepspeed, pipelining  # noqa: PLC0415
        from zeroplan.dryrun.loop import Loop  # noqa: PLC0415
        from zeroplan.dryrun.on_card.group import make_groups_alone  # noqa: PLC0415
        from zeroplan.dryrun.on_card.phases import Peaks, PhasesOnCard  # noqa: PLC0415
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
        """Run the script until its steps are done, it ends, or the GPU is out of memory."""
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
        """The counted figures. Raises MeasurementError without an optimizer step."""
        from zeroplan.dryrun.on_card.answer import rank_on_card  # noqa: PLC0415  see _here

        return rank_on_card(self._task, self.loop, self.phases, ended=ended, said=said)


if __name__ == "__main__":
    main()

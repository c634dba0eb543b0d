"""A script's run on real GPUs held against its dry run: what CUDA's allocator counted in each phase, and what was predicted."""

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.comparison import Compared
from zeroplan.errors import SpecError
from zeroplan.measurement import PhaseMeasured, StepMeasured
from zeroplan.script_card import RankOnCard
from zeroplan.script_run import DryRun

_A_THOUSANDTH = 1000


class OnCard(NamedTuple):
    """The rows of a comparison. [bytes]

    ``judged`` are the peak of every step and what is held after the last; ``phases`` are shown beside them. ``reserved`` is what
    the allocator took from the card, which the dry run has by a model of the allocator, and decides nothing.
    """

    phases: tuple[Compared, ...]
    judged: tuple[Compared, ...]
    reserved: Compared

    def beyond(self, tolerance: float) -> tuple[Compared, ...]:
        """Judged rows that differ by more than ``tolerance`` of what was measured, and by more than a thousandth of the peak."""
        matters = max((row.measured for row in self.judged), default=0) // _A_THOUSANDTH
        return tuple(row for row in self.judged if abs(row.error) > tolerance and abs(row.difference) > matters)


def held_against(measured: RankOnCard, predicted: DryRun) -> OnCard:
    """Compare a rank with a dry run. Where the card was full, rows end with the last phase that was over."""
    pairs = list(zip(predicted.steps, measured.steps, strict=False))
    phases = [Compared("before the first step", predicted.initialisation.peak_bytes, measured.initialisation.peak_bytes)]
    judged = []
    for number, (said, was) in enumerate(pairs, 1):
        phases += _phases(number, said, was)
        if number < len(measured.steps) or measured.ended != "out of memory":
            judged.append(Compared(f"peak of step {number}", _peak(said), _peak(was)))
    shown = next((one for one in predicted.allocator if one.settings == measured.settings), predicted.allocator[0])
    if pairs and measured.ended != "out of memory":
        said, was = pairs[-1]  # cuBLAS keeps its workspaces, and a dry run's steps count tensors
        judged.append(Compared(f"held after step {len(pairs)}", said.held_bytes + shown.workspace_bytes, was.held_bytes))
    return OnCard(tuple(phases), tuple(judged), Compared("reserved", shown.reserved_bytes, measured.reserved_bytes))


def _phases(number: int, said: StepMeasured, was: StepMeasured) -> Iterator[Compared]:
    predicted = {phase.phase: _counted(phase) for phase in said.phases}
    for phase in was.phases:
        if phase.phase in predicted:
            yield Compared(f"step {number}, {phase.phase}", predicted[phase.phase], phase.peak_bytes)


def _counted(phase: PhaseMeasured) -> int:
    """As the allocator counts it: in blocks, cuBLAS's workspaces among them."""
    return phase.counted_bytes or phase.peak_bytes


def _peak(step: StepMeasured) -> int:
    return max(_counted(phase) for phase in step.phases)


def require_same(predicted: DryRun, *, command: tuple[str, ...], gpus: int, rank: int | None, where: str) -> None:
    """Refuse a saved dry run of something else than what is to run here; SpecError. Without a rank any will do."""
    for what, there, here in (
        ("script", _short(predicted.command), _short(command)), ("number of GPUs", predicted.gpus, gpus),
        ("rank", predicted.rank, predicted.rank if rank is None else rank),
    ):  # fmt: skip
        if there != here:
            raise SpecError(f"{where!r} is of another {what}: {there} there, {here} here; make a dry run of the same")


def _short(command: tuple[str, ...]) -> str:
    """A command without the folder of its script: a saved run may come from another machine."""
    return " ".join((command[0].replace("\\", "/").rpartition("/")[2], *command[1:]))

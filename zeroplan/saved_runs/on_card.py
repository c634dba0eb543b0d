"""Compares a script's memory on real GPUs with its dry run, phase by phase."""

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

    ``judged``: the peak of every step, and the bytes held after the last; these decide. ``phases`` and ``reserved`` are only shown.
    The dry run has ``reserved`` from a model of the allocator.
    """

    phases: tuple[Compared, ...]
    judged: tuple[Compared, ...]
    reserved: Compared

    def beyond(self, tolerance: float) -> tuple[Compared, ...]:
        """Judged rows that differ by more than ``tolerance``, and by more than a thousandth of the peak."""
        matters = max((row.measured for row in self.judged), default=0) // _A_THOUSANDTH
        return tuple(row for row in self.judged if abs(row.error) > tolerance and abs(row.difference) > matters)


def held_against(measured: RankOnCard, predicted: DryRun) -> OnCard:
    """Compare a rank with a dry run. If the GPU ran out of memory, rows end with the last completed phase."""
    pairs = list(zip(predicted.steps, measured.steps, strict=False))
    phases = [Compared("before the first step", predicted.initialisation.peak_bytes, measured.initialisation.peak_bytes)]
    judged = []
    for number, (predicted_step, step) in enumerate(pairs, 1):
        phases += _phases(number, predicted_step, step)
        if number < len(measured.steps) or measured.ended != "out of memory":
            judged.append(Compared(f"peak of step {number}", _peak(predicted_step), _peak(step)))
    shown = next((one for one in predicted.allocator if one.settings == measured.settings), predicted.allocator[0])
    if pairs and measured.ended != "out of memory":
        last, step = pairs[-1]  # cuBLAS keeps its workspaces, and a dry run's steps count tensors only
        judged.append(Compared(f"held after step {len(pairs)}", last.held_bytes + shown.workspace_bytes, step.held_bytes))
    return OnCard(tuple(phases), tuple(judged), Compared("reserved", shown.reserved_bytes, measured.reserved_bytes))


def _phases(number: int, predicted_step: StepMeasured, step: StepMeasured) -> Iterator[Compared]:
    predicted = {phase.phase: _counted(phase) for phase in predicted_step.phases}
    for phase in step.phases:
        if phase.phase in predicted:
            yield Compared(f"step {number}, {phase.phase}", predicted[phase.phase], phase.peak_bytes)


def _counted(phase: PhaseMeasured) -> int:
    """The phase's peak as the allocator counts it: in blocks, with cuBLAS's workspaces. [bytes]"""
    return phase.counted_bytes or phase.peak_bytes


def _peak(step: StepMeasured) -> int:
    return max(_counted(phase) for phase in step.phases)


def require_same(predicted: DryRun, *, command: tuple[str, ...], gpus: int, rank: int | None, where: str) -> None:
    """Raise SpecError if a saved dry run has another script, number of GPUs or rank; ``rank`` None accepts any rank."""
    for what, there, here in (
        ("script", _short(predicted.command), _short(command)), ("number of GPUs", predicted.gpus, gpus),
        ("rank", predicted.rank, predicted.rank if rank is None else rank),
    ):  # fmt: skip
        if there != here:
            raise SpecError(f"{where!r} is of another {what}: {there} there, {here} here; make a dry run of the same {what}")


def _short(command: tuple[str, ...]) -> str:
    """The command without its script's folder, since a saved run may come from another machine."""
    return " ".join((command[0].replace("\\", "/").rpartition("/")[2], *command[1:]))

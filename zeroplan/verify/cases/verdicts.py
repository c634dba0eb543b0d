"""Does the estimate of a case agree with its result? Compares peaks if it ran, and verdicts if it ran or ran out of memory."""

from typing import NamedTuple

from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.engines.requests import not_written
from zeroplan.estimator import Estimate, estimate
from zeroplan.replay import StepReplay
from zeroplan.verify.cases.needs import needed_bytes
from zeroplan.verify.cases.results import Result

BAND = 0.02
"""Either verdict counts as right if the need differs from the GPU's capacity by less than this share."""


class Judged(NamedTuple):
    """A result and its prediction. [bytes]

    ``predicted`` and ``measured`` are peaks; ``needed`` is the peak plus the memory outside the allocator; ``fits`` is the verdict,
    None if no GPU is known; ``agrees`` is None if there is nothing to compare. ``fits_in_replay`` says whether a replay of the
    requests fits this GPU; None if the peak alone decides.
    """

    result: Result
    predicted: int
    needed: int
    capacity: int | None
    comparison: Comparison | None
    agrees: bool | None
    fits_in_replay: bool | None = None

    @property
    def measured(self) -> int | None:
        """The measured peak; None without a record. [bytes]"""
        return None if self.comparison is None else self.comparison.peak.measured

    @property
    def fits(self) -> bool | None:
        """Whether the job was predicted to fit the GPU."""
        return None if self.capacity is None else self.needed <= self.capacity and self.fits_in_replay is not False

    @property
    def at_the_edge(self) -> bool:
        """Whether the predicted need is within ``BAND`` of the GPU's capacity."""
        return self.capacity is not None and abs(self.needed / self.capacity - 1) < BAND


def judged(result: Result, *, tolerance: float) -> Judged:
    """A result compared with the estimate of its job on the GPU that ran it."""
    answer = estimate(result.task.job)
    capacity = result.card_bytes or answer.capacity_bytes
    comparison = None if result.record is None else compare_with_estimate(result.record)
    predicted = answer.peak_bytes if comparison is None else comparison.peak.predicted
    needed = needed_bytes(answer, alone=result.task.transport == "fake")
    one = Judged(result, predicted, needed, capacity, comparison, None, _fits_in_replay(answer, needed, capacity))
    return one._replace(agrees=_agrees(one, tolerance))


def _fits_in_replay(answer: Estimate, needed: int, capacity: int | None) -> bool | None:
    """Whether a replay fits the GPU; None if all memory that the allocator may reserve fits, or the peak does not."""
    if capacity is None or needed > capacity or not_written(answer.job):
        return None
    room = capacity - (needed - answer.peak_bytes)
    if int(answer.reserved.high_bytes) <= room:
        return None
    return StepReplay(answer.job, starts="built").on_card(room).fits


def _agrees(one: Judged, tolerance: float) -> bool | None:
    if one.result.outcome == "out of memory":
        return None if one.fits is None else not one.fits or one.at_the_edge
    if one.comparison is None:
        return None
    on_a_card = one.result.task.tensors == "cuda"
    verdict_is_right = not on_a_card or one.fits is not False or one.at_the_edge
    return verdict_is_right and one.comparison.agrees(tolerance)

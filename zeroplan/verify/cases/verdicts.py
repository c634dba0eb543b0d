"""Was the estimate right about a case: its numbers where it ran, and its verdict where it ran or ran out of memory?"""

from typing import NamedTuple

from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.estimator import estimate
from zeroplan.verify.cases.needs import needed_bytes
from zeroplan.verify.cases.results import Result

BAND = 0.02
"""Nearer than that to a card's capacity either verdict may be right."""


class Judged(NamedTuple):
    """A result beside its prediction. [bytes]

    ``predicted`` and ``measured`` are peaks, ``needed`` is the peak with what the card gives outside the allocator; ``fits`` is the
    verdict, None where no card is known; ``agrees`` is None where there is nothing to judge.
    """

    result: Result
    predicted: int
    needed: int
    capacity: int | None
    comparison: Comparison | None
    agrees: bool | None

    @property
    def measured(self) -> int | None:
        """The measured peak; None where there is no record."""
        return None if self.comparison is None else self.comparison.peak.measured

    @property
    def fits(self) -> bool | None:
        """Whether the job was predicted to fit the card."""
        return None if self.capacity is None else self.needed <= self.capacity

    @property
    def at_the_edge(self) -> bool:
        """Whether the prediction is so near to the capacity that either verdict may be right."""
        return self.capacity is not None and abs(self.needed / self.capacity - 1) < BAND


def judged(result: Result, *, tolerance: float) -> Judged:
    """Hold a result against the estimate of its job on the card that it ran on."""
    answer = estimate(result.task.job)
    capacity = result.card_bytes or answer.capacity_bytes
    comparison = None if result.record is None else compare_with_estimate(result.record)
    predicted = answer.peak_bytes if comparison is None else comparison.peak.predicted
    needed = needed_bytes(answer, alone=result.task.transport == "fake")
    one = Judged(result, predicted, needed, capacity, comparison, None)
    return one._replace(agrees=_agrees(one, tolerance))


def _agrees(one: Judged, tolerance: float) -> bool | None:
    if one.result.outcome == "out of memory":
        return None if one.fits is None else not one.fits or one.at_the_edge
    if one.comparison is None:
        return None
    on_a_card = one.result.task.tensors == "cuda"
    verdict_is_right = not on_a_card or one.fits is not False or one.at_the_edge
    return verdict_is_right and one.comparison.agrees(tolerance)

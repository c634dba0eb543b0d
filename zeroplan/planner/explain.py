"""Explains why the best layout is the best, and what limits it."""

from zeroplan.estimator import Estimate
from zeroplan.ledger import bytes_by_kind
from zeroplan.planner.objectives import TIE, complexity_of
from zeroplan.planner.result import Layout, More
from zeroplan.steptime import StepTime
from zeroplan.steptime.parts import Does
from zeroplan.units import GIB

#: Differences that would be 0 in the output's rounding. [bytes], [fraction]
_SMALL, _VISIBLE_SLOWDOWN = 5 * 10**6, 0.0005
#: Parts of a step that depend on the links.
_WAITING = (Does.SENDING, Does.SENDING_AT_STEP, Does.COPYING)


def why_not(rival: Layout, its: StepTime, best: Layout, winner: StepTime) -> str:
    """Return why the rival is not the best: how much slower it is and in which part, or why an equally fast one comes second."""
    slower = best.tokens_per_s / rival.tokens_per_s - 1
    if slower < TIE:
        more = rival.least_bytes - best.least_bytes
        if more > _SMALL:
            return f"as fast, but needs {more / GIB:,.2f} GiB more"
        than = f"with {-more / GIB:,.2f} GiB less" if more < -_SMALL else "and as small"
        if complexity_of(rival.job) > complexity_of(best.job):
            return f"as fast, {than}, but with a more complex recipe"
        return f"{f'{slower:.1%} slower' if slower > _VISIBLE_SLOWDOWN else 'as fast'}, {than}"
    name, seconds = _largest_excess(its, winner)
    return f"{slower:.1%} slower, most of all in {name}: {seconds:,.2f} s more per {float(its.tokens):,.0f} tokens of a GPU"


def why_larger(rival: Layout, best: Layout) -> str:
    """Return how much more memory the rival needs than the smallest layout, and its relative speed."""
    more, faster = rival.least_bytes - best.least_bytes, rival.tokens_per_s / best.tokens_per_s - 1
    speed = "as fast" if abs(faster) < TIE else f"{abs(faster):.1%} {'faster' if faster > 0 else 'slower'}"
    return f"needs {more / GIB:,.2f} GiB more; {speed}" if more > _SMALL else f"as small; {speed}, with a more complex recipe"


def largest_part(found: Estimate) -> str:
    """Return what limits the smallest layout: the largest part of its memory."""
    kinds = bytes_by_kind(found.peak.lines)
    kind = max(kinds, key=lambda one: kinds[one])
    return f"the memory that it needs: {kind.value} is {kinds[kind] / sum(kinds.values()):.0%} of it"


def _largest_excess(its: StepTime, winner: StepTime) -> tuple[str, float]:
    """Return the part of the step whose time exceeds the winner's most, for the same number of tokens, and the excess. [s]"""
    scale = float(its.tokens) / float(winner.tokens)
    before = {part.name: float(part.seconds) * scale for part in winner.parts}
    excess = {part.name: float(part.seconds) - before.get(part.name, 0.0) for part in its.parts}
    name = max(excess, key=lambda one: excess[one])
    return name, excess[name]


def binding(time: StepTime, further: More | None) -> str:
    """Return what limits the best layout: memory, if more of it would allow a faster layout, else the longest part of its step."""
    largest = max(time.parts, key=lambda part: float(part.seconds))
    share = float(largest.seconds) / float(time.seconds)
    if further is not None:
        missing = max(further.missing_bytes / GIB, 0.01)
        return f"memory: with {missing:,.2f} GiB more a layout that is {further.gain:.1%} faster would fit"
    if largest.does in _WAITING:
        return f"the links: {largest.name} takes {share:.0%} of the step"
    return f"the GPU's speed: {largest.name} takes {share:.0%} of the step"

"""Why the estimate of some jobs is off by more than a tenth of a per cent, in the order of this list.

One is entered with the note that the answer then carries, if it is too low, and goes when it has been mended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.measured.errors import Held, what

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zeroplan.spec.job import JobSpec

#: Beyond it an error has a cause. [fraction of what was measured]
TENTH_OF_A_PER_CENT = 0.001


class Cause(NamedTuple):
    """Why the estimate of some jobs is off, which they are, and how far it is off at most today. [fractions of the peak]"""

    why: str
    jobs: Callable[[JobSpec], bool]
    below: float
    above: float = TENTH_OF_A_PER_CENT


#: Today every record is within a tenth of a per cent.
CAUSES: tuple[Cause, ...] = ()


def cause_of(one: Held, causes: Sequence[Cause] = CAUSES) -> Cause | None:
    """The first that applies; a record may be of several."""
    return next((cause for cause in causes if cause.jobs(one.measured.job)), None)


def complaints(found: Sequence[Held], causes: Sequence[Cause] = CAUSES) -> Iterator[str]:
    """What is wrong with records and causes: an error without a cause, or beyond what its cause says, or a cause without one."""
    largest = dict.fromkeys((cause.why for cause in causes), 0.0)
    for one in found:
        cause = cause_of(one, causes)
        below, above = (cause.below, cause.above) if cause else (TENTH_OF_A_PER_CENT, TENTH_OF_A_PER_CENT)
        if not -below <= one.error <= above:
            yield f"{one.error:+.4%} {what(one.measured.job)} ({cause.why if cause else 'no known cause'})"
        if cause:
            largest[cause.why] = max(largest[cause.why], abs(one.error))
    yield from (f"{why}: mended, take it out of the list" for why, most in largest.items() if most <= TENTH_OF_A_PER_CENT)

"""Known causes of errors of more than 0.1 %, in order of precedence.

If the estimate is too low, a cause gets an entry together with the note that the answer then has. It is removed once fixed.
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
    """A cause: why the estimate is off, for which jobs, and by how much at most today. [fractions of the peak]"""

    why: str
    jobs: Callable[[JobSpec], bool]
    below: float
    above: float = TENTH_OF_A_PER_CENT


#: Today every record is within a tenth of a per cent.
CAUSES: tuple[Cause, ...] = ()


def cause_of(one: Held, causes: Sequence[Cause] = CAUSES) -> Cause | None:
    """Return the first cause that applies; a record may match several."""
    return next((cause for cause in causes if cause.jobs(one.measured.job)), None)


def complaints(found: Sequence[Held], causes: Sequence[Cause] = CAUSES) -> Iterator[str]:
    """Return complaints: an error without a cause, an error beyond its cause's limit, or a cause without an error."""
    largest = dict.fromkeys((cause.why for cause in causes), 0.0)
    for one in found:
        cause = cause_of(one, causes)
        below, above = (cause.below, cause.above) if cause else (TENTH_OF_A_PER_CENT, TENTH_OF_A_PER_CENT)
        if not -below <= one.error <= above:
            yield f"{one.error:+.4%} {what(one.measured.job)} ({cause.why if cause else 'no known cause'})"
        if cause:
            largest[cause.why] = max(largest[cause.why], abs(one.error))
    yield from (f"{why}: mended, take it out of the list" for why, most in largest.items() if most <= TENTH_OF_A_PER_CENT)

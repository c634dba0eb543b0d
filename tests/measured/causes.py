"""Why the estimate of some jobs is off by more than the goal, in the order of this list."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.measured.errors import EVERY, Held

if TYPE_CHECKING:
    from collections.abc import Callable

    from zeroplan.spec.job import JobSpec


class Cause(NamedTuple):
    """Why the estimate of some jobs is off, which they are, and how far it is off at most today. [fractions of the peak]"""

    why: str
    jobs: Callable[[JobSpec], bool]
    below: float
    above: float = EVERY


CAUSES: tuple[Cause, ...] = ()


def cause_of(one: Held) -> Cause | None:
    """The first that applies; a record may be of several."""
    return next((cause for cause in CAUSES if cause.jobs(one.measured.job)), None)

"""Where along a course of gradients is most alive, once activations are beside them? For one job, or for a column of jobs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from zeroplan.engines.deepspeed.gradients import Course, Held, Place, Plan, Seen, course_of
from zeroplan.numeric import Bool, Int, maximum, where


class Courses(NamedTuple):
    """A course for each pair of a share and a number of micro-batches, and which of them every job of a column has."""

    each: tuple[Course, ...]
    which: Int
    """An index of ``each``."""


def courses_of(plan: Plan, partition: Int, micro_batches: Int) -> Courses:
    """Go through ``plan`` for every share and number of micro-batches; columns of both belong together."""
    if isinstance(partition, int) and isinstance(micro_batches, int):
        return Courses((course_of(plan._replace(partition=partition, micro_batches=micro_batches)),), 0)
    import numpy as np  # noqa: PLC0415  a single job never needs it

    pairs = np.stack(np.broadcast_arrays(partition, micro_batches), axis=-1)
    distinct, which = np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)
    found = tuple(course_of(plan._replace(partition=int(share), micro_batches=int(number))) for share, number in distinct)
    return Courses(found, cast("Int", which.reshape(pairs.shape[:-1]) if len(found) > 1 else 0))


def highest(courses: Courses, place: Place, beside: Callable[[Seen], Int] = lambda _: 0) -> Seen:
    """Return what is seen at a place where most is alive, with what ``beside`` adds; the first of equals. [bytes]"""
    best, *others = _in_columns([course[place] for course in courses.each], courses.which)
    if not others:
        return best
    most = beside(best) + best.held.n_bytes
    for other in others:
        alive = beside(other) + other.held.n_bytes
        best, most = _either(alive > most, other, best), maximum(most, alive)
    return best


def _in_columns(seen: list[Sequence[Seen]], which: Int) -> Sequence[Seen]:
    """Return what is seen as columns, the last of a shorter list again."""
    if len(seen) == 1:
        return seen[0]
    length = max(map(len, seen))
    return [_column([of_one[min(at, len(of_one) - 1)] for of_one in seen], which) for at in range(length)]


def _column(seen: list[Seen], which: Int) -> Seen:
    if all(each == seen[0] for each in seen):
        return seen[0]
    import numpy as np  # noqa: PLC0415  a single job never needs it

    table = np.array([(each.block, each.made, *each.held) for each in seen], dtype=np.int64)
    block, made, *held = np.moveaxis(table[which], -1, 0)
    return Seen(block, made, Held(*held))


def _either(condition: Bool, yes: Seen, no: Seen) -> Seen:
    if isinstance(condition, bool):
        return yes if condition else no
    held = (where(condition, here, there) for here, there in zip(yes.held, no.held, strict=True))
    return Seen(where(condition, yes.block, no.block), where(condition, yes.made, no.made), Held(*held))

"""Sums and maxima over the moments of many layouts at once: what holds for a whole row or column of them is added up first."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from zeroplan.ledger import Kind, Moment
from zeroplan.numeric import Int, maximum
from zeroplan.timeline import pool_of


class Highest(NamedTuple):
    """What :func:`~zeroplan.ledger.peak_bytes` and the middle of :func:`~zeroplan.timeline.reserved` say of moments. [bytes]"""

    peak_bytes: Int
    reserved_bytes: Int


def highest(moments: Iterable[Moment], *, engine: str) -> Highest:
    """The peak, and the sum of what each pool of the allocator holds at most. [bytes]

    >>> from zeroplan.ledger import Kind, Line, Phase
    >>> gather, hold = Line(Kind.GATHER, 3, ""), Line(Kind.PARAMETERS, 4, "")
    >>> highest((Moment("a", Phase.STEP, (gather,)), Moment("b", Phase.STEP, (hold,))), engine="fsdp2")
    Highest(peak_bytes=4, reserved_bytes=7)
    """
    pool = {kind: pool_of(kind, engine) for kind in Kind}
    peak: Int = 0
    most: dict[str, Int] = {}
    for moment in moments:
        held: dict[str, list[Int]] = {}
        for line in moment.lines:
            held.setdefault(pool[line.kind], []).append(line.n_bytes)
        pools = {name: summed(values) for name, values in held.items()}
        peak = maximum(peak, summed(pools.values()))
        for name, n_bytes in pools.items():
            most[name] = maximum(most.get(name, 0), n_bytes)
    return Highest(peak, summed(most.values()))


def summed(values: Iterable[Int]) -> Int:
    """Sum of ints and of columns that broadcast: those of one shape first, the smaller ones before the larger.

    >>> summed((1, 2, 3))
    6
    """
    total: Int = 0
    by_shape: dict[tuple[int, ...], Int] = {}
    for value in values:
        if isinstance(value, int):
            total = total + value
        else:
            shape = value.shape
            by_shape[shape] = by_shape[shape] + value if shape in by_shape else value
    for shape in sorted(by_shape, key=math.prod):
        total = total + by_shape[shape]
    return total

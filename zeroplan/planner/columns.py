"""Sums and maxima over the moments of many layouts at once: what holds for a whole row or column of them is added up first."""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from zeroplan.ledger import Kind, Moment
from zeroplan.numeric import Int, maximum
from zeroplan.timeline import pool_of


class Highest(NamedTuple):
    """What :func:`~zeroplan.ledger.peak_bytes` and the middle of :func:`~zeroplan.timeline.reserved` say of moments. [bytes]"""

    peak_bytes: Int
    pools: dict[str, Int]
    """What each pool of the allocator holds at most."""

    @property
    def reserved_bytes(self) -> Int:
        """The sum of what each pool holds at most, since blocks are used again within a pool alone."""
        return summed(self.pools.values())

    def beside(self, n_bytes: int, pool: str) -> "Highest":
        """The same where so much more lies in a pool at every moment."""
        return Highest(self.peak_bytes + n_bytes, {**self.pools, pool: self.pools.get(pool, 0) + n_bytes})

    def or_of(self, other: "Highest") -> "Highest":
        """The higher of both, of the peak and of every pool."""
        pools = dict(self.pools)
        for pool, n_bytes in other.pools.items():
            pools[pool] = maximum(pools.get(pool, 0), n_bytes)
        return Highest(maximum(self.peak_bytes, other.peak_bytes), pools)


def highest(moments: Iterable[Moment], *, engine: str) -> Highest:
    """The peak, and what each pool of the allocator holds at most. [bytes]

    >>> from zeroplan.ledger import Kind, Line, Phase
    >>> gather, hold = Line(Kind.GATHER, 3, ""), Line(Kind.PARAMETERS, 4, "")
    >>> found = highest((Moment("a", Phase.STEP, (gather,)), Moment("b", Phase.STEP, (hold,))), engine="fsdp2")
    >>> found.peak_bytes, found.reserved_bytes
    (4, 7)
    """
    pool = _pools(engine)
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
    return Highest(peak, most)


@lru_cache(maxsize=16)
def _pools(engine: str) -> dict[Kind, str]:
    return {kind: pool_of(kind, engine) for kind in Kind}


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

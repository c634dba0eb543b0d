"""Sums and maxima over the moments of many layouts at once: what holds for a whole row or column of them is added up first."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from zeroplan.ledger import Moment, Phase
from zeroplan.numeric import Int, maximum
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.timeline import own_pools


class Highest(NamedTuple):
    """The peak of moments, and what :func:`~zeroplan.timeline.expected_bytes` wants to know of their blocks. [bytes]"""

    peak_bytes: Int
    pools: dict[str, Int]
    """What each pool of the allocator holds at most in a step."""

    @property
    def streams_bytes(self) -> Int:
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


def highest(moments: Iterable[Moment], recipe: RecipeSpec) -> Highest:
    """The peak, and what each pool of the allocator holds at most. [bytes]

    >>> from zeroplan.ledger import Kind, Line, Phase
    >>> gather, hold = Line(Kind.GATHER, 3, ""), Line(Kind.PARAMETERS, 4, "")
    >>> found = highest((Moment("a", Phase.STEP, (gather,)), Moment("b", Phase.STEP, (hold,))), RecipeSpec(engine="fsdp2"))
    >>> found.peak_bytes, found.streams_bytes
    (4, 7)
    """
    own = own_pools(recipe)
    peak: Int = 0
    most: dict[str, Int] = {}
    for moment in moments:
        held: dict[str, list[Int]] = {}
        for line in moment.lines:
            held.setdefault(own.get(line.kind, "compute"), []).append(line.n_bytes)
        pools = {name: summed(values) for name, values in held.items()}
        peak = maximum(peak, summed(pools.values()))
        if moment.phase is Phase.INIT:
            continue
        for name, n_bytes in pools.items():
            most[name] = maximum(most.get(name, 0), n_bytes)
    return Highest(peak, most)


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

"""What lines come to, pool by pool of the caching allocator: sums of ints, and of columns by their shape.

A figure that holds for a whole row or column of layouts is added up as such; the grid is met only in the end.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, maximum

Pools: TypeAlias = Mapping[Kind, int]
"""The kinds that are not in the pool of the stream that computes, which is pool 0, each with the number of its pool."""
#: The caching allocator has one pool for each stream; engines use these, by their numbers.
POOLS = ("compute", "gather", "reduce")
#: Everything is on one stream.
ONE_POOL: Pools = {}

Weight: TypeAlias = Sequence[Int] | dict[tuple[int, tuple[int, ...]], Int]
"""Bytes in each pool; where some are columns, the sums by pool and shape."""


_kind, _n_bytes = attrgetter("kind"), attrgetter("n_bytes")


class Highest(NamedTuple):
    """The peak of moments, and what their blocks come to in each pool of the allocator. [bytes]"""

    peak_bytes: Int
    pools: tuple[Int, ...]
    """What each pool of the allocator holds at most in a step, by its number."""

    @property
    def streams_bytes(self) -> Int:
        """The sum of what each pool holds at most, since blocks are used again within a pool alone."""
        return summed(self.pools)

    def beside(self, n_bytes: Int, pool: int) -> "Highest":
        """The same where so much more lies in a pool at every moment."""
        pools = tuple([held + n_bytes if at == pool else held for at, held in enumerate(self.pools)])
        return Highest(self.peak_bytes + n_bytes, pools)

    def or_of(self, other: "Highest") -> "Highest":
        """The higher of both, of the peak and of every pool."""
        if isinstance(self.peak_bytes, int) and isinstance(other.peak_bytes, int):
            return Highest(max(self.peak_bytes, other.peak_bytes), tuple(map(max, self.pools, other.pools)))
        pools = tuple([maximum(*both) for both in zip(self.pools, other.pools, strict=True)])
        return Highest(maximum(self.peak_bytes, other.peak_bytes), pools)


#: Of no moment.
EMPTY = Highest(0, (0,) * len(POOLS))


def weigh(lines: Sequence[Line], pools: Pools) -> Weight:
    """Add lines up. [bytes]

    >>> weigh((Line(Kind.GATHER, 3, ""), Line(Kind.PARAMETERS, 4, ""), Line(Kind.GRADIENTS, 5, "")), {Kind.GATHER: 1})
    [9, 3, 0]
    """
    if lines and isinstance(lines[0][1], int) and isinstance(lines[-1][1], int) and pools.keys().isdisjoint(map(_kind, lines)):
        at_once: Int = sum(map(_n_bytes, lines))
        if isinstance(at_once, int):
            return [at_once, 0, 0]
    ints: list[Int] = [0, 0, 0]
    columns: dict[tuple[int, tuple[int, ...]], Int] = {}
    for line in lines:
        n_bytes, pool = line[1], pools.get(line[0], 0)  # by their places, which is quicker than by name
        if isinstance(n_bytes, int):
            ints[pool] += n_bytes
        else:
            key = pool, n_bytes.shape
            columns[key] = columns[key] + n_bytes if key in columns else n_bytes
    if not columns:
        return ints
    return columns | {(pool, ()): n_bytes for pool, n_bytes in enumerate(ints) if not isinstance(n_bytes, int) or n_bytes}


def on_one_stream(lines: Sequence[Line], pools: Pools) -> bool:
    """Whether all lines are ints in the pool of the stream that computes: their sum is all that there is to know."""
    return set(map(type, map(_n_bytes, lines))) <= {int} and pools.keys().isdisjoint(map(_kind, lines))


def together(weights: Iterable[Weight]) -> Weight:
    """Add weights up. [bytes]"""
    ints: list[Int] = [0] * len(POOLS)
    columns: dict[tuple[int, tuple[int, ...]], Int] = {}
    for weight in weights:
        if isinstance(weight, dict):
            for key, n_bytes in weight.items():
                columns[key] = columns[key] + n_bytes if key in columns else n_bytes
        else:
            ints = [ints[0] + weight[0], ints[1] + weight[1], ints[2] + weight[2]]
    if not columns:
        return ints
    for pool, n_bytes in enumerate(ints):
        columns[pool, ()] = columns.get((pool, ()), 0) + n_bytes
    return columns


def in_pools(weight: Weight) -> tuple[Int, ...]:
    """What each pool holds. [bytes]"""
    if not isinstance(weight, dict):
        return tuple(weight)
    by_pool: list[list[Int]] = [[], [], []]
    for (pool, _), n_bytes in weight.items():
        by_pool[pool].append(n_bytes)
    return tuple(map(summed, by_pool))


def total(weight: Weight) -> Int:
    """What all pools hold together. [bytes]"""
    return summed(weight.values()) if isinstance(weight, dict) else weight[0] + weight[1] + weight[2]


def most(weights: Iterable[Weight]) -> Highest:
    """The highest of them, and the most in each pool. [bytes]"""
    highest: Int = 0
    computing: Int = 0
    gather: Int = 0
    reduce: Int = 0
    found = EMPTY
    for weight in weights:
        if isinstance(weight, dict):
            found = found.or_of(Highest(total(weight), in_pools(weight)))
            continue
        one, two, three = weight
        highest = maximum(highest, one + two + three)
        if one != computing:
            computing = maximum(computing, one)
        if two != gather:
            gather = maximum(gather, two)
        if three != reduce:
            reduce = maximum(reduce, three)
    return found.or_of(Highest(highest, (computing, gather, reduce)))


def summed(values: Collection[Int]) -> Int:
    """Sum of ints and of columns that broadcast: those of one shape first, the smaller ones before the larger.

    >>> summed((1, 2, 3))
    6
    """
    if len(values) == 1:
        return next(iter(values))
    of_ints: Int = 0
    by_shape: dict[tuple[int, ...], Int] = {}
    for value in values:
        if isinstance(value, int):
            of_ints = of_ints + value
        else:
            shape = value.shape
            by_shape[shape] = by_shape[shape] + value if shape in by_shape else value
    for shape in sorted(by_shape, key=math.prod):
        of_ints = of_ints + by_shape[shape]
    return of_ints

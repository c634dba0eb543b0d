"""Sums lines by pool of the caching allocator, fast: ints directly, columns by shape.

Columns of the same shape are added first, and only the last additions broadcast to the full grid of layouts. A search sums many
groups of lines at once (:class:`Table`), since adding small columns one by one takes longer than the additions themselves.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from zeroplan.ledger import Kind, Line, Role
from zeroplan.numeric import Int, maximum, where

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Pools: TypeAlias = Mapping[Kind, int]
"""The kinds of memory in a pool other than 0, with the number of their pool. Pool 0 is that of the compute stream."""
#: The caching allocator has one pool per stream. These are the pools that engines use, by number.
POOLS = ("compute", "gather", "reduce")
#: All kinds are in the pool of the compute stream.
ONE_POOL: Pools = {}

Weight: TypeAlias = Sequence[Int] | dict[tuple[int, tuple[int, ...]], Int]
"""Bytes in each pool; with columns, sums by pool and shape."""


_kind, _n_bytes = attrgetter("kind"), attrgetter("n_bytes")


class Highest(NamedTuple):
    """The peak of some moments, and the highest total of each pool. [bytes]"""

    peak_bytes: Int
    pools: tuple[Int, ...]
    """The highest total of each pool in a step, by its number."""

    @property
    def streams_bytes(self) -> Int:
        """The sum of the pools' highest totals: the allocator reuses blocks only within a pool."""
        return summed(self.pools)

    def beside(self, n_bytes: Int, pool: int) -> "Highest":
        """Return the maxima with ``n_bytes`` more in one pool at every moment."""
        pools = tuple([held + n_bytes if at == pool else held for at, held in enumerate(self.pools)])
        return Highest(self.peak_bytes + n_bytes, pools)

    def or_of(self, other: "Highest") -> "Highest":
        """Return the higher of both, for the peak and for each pool."""
        if isinstance(self.peak_bytes, int) and isinstance(other.peak_bytes, int):
            return Highest(max(self.peak_bytes, other.peak_bytes), tuple(map(max, self.pools, other.pools)))
        pools = tuple([maximum(*both) for both in zip(self.pools, other.pools, strict=True)])
        return Highest(maximum(self.peak_bytes, other.peak_bytes), pools)

    def and_of(self, other: "Highest") -> "Highest":
        """Return the maxima if both are alive together, whichever moments they are of."""
        pools = tuple([one + more for one, more in zip(self.pools, other.pools, strict=True)])
        return Highest(self.peak_bytes + other.peak_bytes, pools)

    def with_first(self, first: "Highest") -> "Highest":
        """Return the maxima of a step's moments and of the ``first`` micro-batch's.

        The pools of the first micro-batch count only where it is the peak. Recorded runs, from which reserved memory is estimated,
        were related to the pools of a later step.
        """
        above = first.peak_bytes > self.peak_bytes
        both = self.or_of(first)
        pools = tuple([where(above, *pair) for pair in zip(both.pools, self.pools, strict=True)])
        return Highest(both.peak_bytes, pools)


#: The sums of no moments.
EMPTY = Highest(0, (0,) * len(POOLS))


def pool_of(line: Line, pools: Pools) -> int:
    """Return the number of a line's pool.

    >>> from zeroplan.ledger import Tag
    >>> cast = Line(Kind.GATHER, 3, "", tag=Tag(Role.COPIED_OUT))
    >>> pool_of(Line(Kind.GATHER, 3, ""), {Kind.GATHER: 1}), pool_of(cast, {Kind.GATHER: 1})
    (1, 0)
    """
    pool = pools.get(line[0], 0)  # indexes are faster than names
    return 0 if pool and line[5].role is Role.COPIED_OUT else pool


def weigh(lines: Sequence[Line], pools: Pools) -> Weight:
    """Return the sums of lines by pool. [bytes]

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
        n_bytes, pool = line[1], pool_of(line, pools)
        if isinstance(n_bytes, int):
            ints[pool] += n_bytes
        else:
            key = pool, n_bytes.shape
            columns[key] = columns[key] + n_bytes if key in columns else n_bytes
    if not columns:
        return ints
    return columns | {(pool, ()): n_bytes for pool, n_bytes in enumerate(ints) if not isinstance(n_bytes, int) or n_bytes}


def on_one_stream(lines: Sequence[Line], pools: Pools) -> bool:
    """Whether all lines are ints in the pool of the compute stream, so that one sum is enough."""
    return set(map(type, map(_n_bytes, lines))) <= {int} and pools.keys().isdisjoint(map(_kind, lines))


def together(weights: Iterable[Weight]) -> Weight:
    """Return the sum of several sums by pool. [bytes]"""
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
    """Return the total of each pool. [bytes]"""
    if not isinstance(weight, dict):
        return tuple(weight)
    by_pool: list[list[Int]] = [[], [], []]
    for (pool, _), n_bytes in weight.items():
        by_pool[pool].append(n_bytes)
    return tuple(map(summed, by_pool))


def total(weight: Weight) -> Int:
    """Return the total of all pools. [bytes]"""
    return summed(weight.values()) if isinstance(weight, dict) else weight[0] + weight[1] + weight[2]


def most(weights: Iterable[Weight]) -> Highest:
    """Return the highest total, and the highest of each pool. [bytes]"""
    highest: Int = 0
    computing: Int = 0
    gather: Int = 0
    reduce: Int = 0
    found = EMPTY
    alike: dict[tuple[tuple[int, tuple[int, ...]], ...], list[dict[tuple[int, tuple[int, ...]], Int]]] = {}
    for weight in weights:
        if isinstance(weight, dict):
            alike.setdefault(tuple(weight), []).append(weight)
            continue
        one, two, three = weight
        highest = maximum(highest, one + two + three)
        if one != computing:
            computing = maximum(computing, one)
        if two != gather:
            gather = maximum(gather, two)
        if three != reduce:
            reduce = maximum(reduce, three)
    for columns in alike.values():
        found = found.or_of(_most_of_columns(columns))
    return found.or_of(Highest(highest, (computing, gather, reduce)))


def _most_of_columns(weights: list[dict[tuple[int, tuple[int, ...]], Int]]) -> Highest:
    """Return the same of sums with the same pools and shapes, all at once. [bytes]"""
    if len(weights) == 1:
        return Highest(total(weights[0]), in_pools(weights[0]))
    import numpy as np  # noqa: PLC0415  a single job never needs it

    axes = max(len(shape) for _, shape in weights[0])
    by_pool: list[list[Int]] = [[], [], []]
    for pool, shape in weights[0]:
        stacked = np.array([weight[pool, shape] for weight in weights], dtype=np.int64)
        by_pool[pool].append(stacked.reshape(len(weights), *(1,) * (axes - len(shape)), *shape))
    pools = [summed(stacks) if stacks else 0 for stacks in by_pool]
    highest = [pool if isinstance(pool, int) else pool.max(axis=0) for pool in (summed(pools), *pools)]
    return Highest(highest[0], tuple(highest[1:]))


def summed(values: Collection[Int]) -> Int:
    """Return the sum of ints and of columns that broadcast: columns of one shape first, small ones before large ones.

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


# --- many groups at once ------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """The bytes of many groups of lines: a row for each, in an array for each pool and shape."""

    arrays: "dict[tuple[int, tuple[int, ...]], NDArray[np.int64]]"

    def at(self, rows: Sequence[int]) -> "Table":
        """Return some of the rows."""
        return Table({key: array[rows] for key, array in self.arrays.items()})

    def summed(self, groups: Sequence[Sequence[int]]) -> "Table":
        """Return a row for each group of rows: their sum."""
        members, owners = _members(groups)
        return Table({key: _sums(array, members, owners, len(groups)) for key, array in self.arrays.items()})

    def most(self) -> Highest:
        """Return the highest total, and the highest of each pool. [bytes]"""
        axes = max((len(shape) for _, shape in self.arrays), default=0)
        by_pool: list[list[Int]] = [[] for _ in POOLS]
        for (pool, shape), array in self.arrays.items():
            by_pool[pool].append(array.reshape(len(array), *(1,) * (axes - len(shape)), *shape))
        pools = [summed(arrays) if arrays else 0 for arrays in by_pool]
        peak, *highest = map(_most_of_rows, (summed(pools), *pools))
        return Highest(peak, tuple(highest))


def _most_of_rows(rows: Int) -> Int:
    if isinstance(rows, int):
        return rows
    most = rows.max(axis=0, initial=0)
    return most if most.shape else int(most)


def weigh_each(groups: Collection[Sequence[Line]], pools: Pools) -> Table:
    """Return the sums of each group of lines by pool. [bytes]

    >>> weigh_each([(Line(Kind.GATHER, 3, ""), Line(Kind.PARAMETERS, 4, "")), ()], {Kind.GATHER: 1}).most().pools
    (4, 3, 0)
    """
    import numpy as np  # noqa: PLC0415  a single job never needs it

    lines = {id(line): line for group in groups for line in group}
    place = dict(zip(lines, range(len(lines)), strict=True))
    members = np.fromiter(map(place.__getitem__, map(id, chain.from_iterable(groups))), np.intp)
    owner = np.repeat(np.arange(len(groups)), [*map(len, groups)])
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    sizes = [line[1] for line in lines.values()]
    for at, (line, size) in enumerate(zip(lines.values(), sizes, strict=True)):
        alike.setdefault((pool_of(line, pools), () if isinstance(size, int) else size.shape), []).append(at)
    arrays = {}
    row = np.zeros(len(lines), dtype=np.intp)
    for key, some in alike.items():
        row[:] = -1
        row[some] = np.arange(len(some))
        rows = row[members]
        mine = rows >= 0
        arrays[key] = _sums(np.array([sizes[at] for at in some], dtype=np.int64), rows[mine], owner[mine], len(groups))
    return Table(arrays)


def _members(groups: Sequence[Sequence[int]]) -> "tuple[NDArray[np.intp], NDArray[np.intp]]":
    """Return the members of all groups in a row, and the group of each."""
    import numpy as np  # noqa: PLC0415  a single job never needs it

    sizes = np.fromiter(map(len, groups), np.intp, len(groups))
    return np.fromiter(chain.from_iterable(groups), np.intp, int(sizes.sum())), np.repeat(np.arange(len(groups)), sizes)


def _sums(
    array: "NDArray[np.int64]", members: "NDArray[np.intp]", owners: "NDArray[np.intp]", groups: int
) -> "NDArray[np.int64]":
    """Return the sum of the rows of each group; ``owners``: the group of each member, in order.

    Long rows are added up one by one: a copy of all members would leave the processor's cache.
    """
    import numpy as np  # noqa: PLC0415  a single job never needs it

    found = np.zeros((groups, *array.shape[1:]), dtype=np.int64)
    if math.prod(array.shape[1:]) > _LONG:
        for owner, member in zip(owners.tolist(), members.tolist(), strict=True):
            found[owner] += array[member]
    elif len(members):
        begins = np.ones(len(owners), dtype=np.bool_)
        np.not_equal(owners[1:], owners[:-1], out=begins[1:])
        starts = begins.nonzero()[0]
        found[owners[starts]] = np.add.reduceat(array[members], starts, axis=0)
    return found


#: Rows with more elements are added one by one: NumPy then takes much longer to add them than Python takes to call it.
_LONG = 1 << 10

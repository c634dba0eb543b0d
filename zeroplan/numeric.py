"""Exact arithmetic on ints and on int64 columns.

A formula accepts ``Int`` and uses only ``+ - * //`` and the functions below, so that the same source serves one job and a grid
of jobs. NumPy is imported only for columns, so that a single job starts fast.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int: TypeAlias = int | NDArray[np.int64]
    Float: TypeAlias = float | NDArray[np.floating[Any]]
    Bool: TypeAlias = bool | NDArray[np.bool_]
else:
    Int: TypeAlias = object
    Float: TypeAlias = object
    Bool: TypeAlias = object


@overload
def ceil_div(a: int, b: int) -> int: ...
@overload
def ceil_div(a: Int, b: Int) -> Int: ...
def ceil_div(a: Int, b: Int) -> Int:
    """Return the smallest integer not below ``a / b``; exact for ints and int64 columns.

    >>> ceil_div(10, 4), ceil_div(8, 4)
    (3, 2)
    """
    return -(-a // b)


@overload
def round_up(a: int, multiple: int) -> int: ...
@overload
def round_up(a: Int, multiple: Int) -> Int: ...
def round_up(a: Int, multiple: Int) -> Int:
    """Return the smallest multiple of ``multiple`` not below ``a``.

    >>> round_up(10, 4), round_up(0, 4)
    (12, 0)
    """
    return ceil_div(a, multiple) * multiple


def next_power_of_2(a: Int) -> Int:
    """Return the smallest power of two not below ``a``, which is at least 1; exact for ints and for int64 columns up to 2^62.

    >>> next_power_of_2(1), next_power_of_2(5), next_power_of_2(8)
    (1, 8, 8)
    """
    if isinstance(a, int):
        return 1 << (a - 1).bit_length()
    below = a - 1
    for shift in (1, 2, 4, 8, 16, 32):
        below = below | (below >> shift)
    return below + 1


def maximum(first: Int, *others: Int) -> Int:
    """Return the largest of several values, element by element for columns.

    >>> maximum(3, 7, 5)
    7
    """
    largest = first
    for other in others:
        if isinstance(largest, int) and isinstance(other, int):
            largest = max(largest, other)
        else:
            largest = _pairwise(largest, other, larger=True)
    return largest


def minimum(first: Int, *others: Int) -> Int:
    """Return the smallest of several values, element by element for columns.

    >>> minimum(3, 7, 5)
    3
    """
    smallest = first
    for other in others:
        if isinstance(smallest, int) and isinstance(other, int):
            smallest = min(smallest, other)
        else:
            smallest = _pairwise(smallest, other, larger=False)
    return smallest


def longest(first: Float, *others: Float) -> Float:
    """Return the largest of several times or rates, element by element for columns.

    >>> longest(0.5, 2.0), longest(1.0)
    (2.0, 1.0)
    """
    return cast("Float", maximum(cast("Int", first), *cast("tuple[Int, ...]", others)))


def log2(a: Float) -> Float:
    """Return the logarithm to base 2, element by element for columns.

    >>> log2(8.0)
    3.0
    """
    if isinstance(a, float):
        return math.log2(a)
    import numpy as np  # noqa: PLC0415  only columns need it

    return np.log2(a)


def shortest(first: Float, *others: Float) -> Float:
    """Return the smallest of several times or rates, element by element for columns.

    >>> shortest(0.5, 2.0), shortest(1.0)
    (0.5, 1.0)
    """
    return cast("Float", minimum(cast("Int", first), *cast("tuple[Int, ...]", others)))


def together(times: Iterable[Float]) -> Float:
    """Return the sum of times or rates in order. The built-in sum rounds floats differently from columns (Python 3.12).

    >>> together((0.5, 2.0)), together(())
    (2.5, 0.0)
    """
    total: Float = 0.0
    for time in times:
        total = total + time
    return total


def added_up(sizes: Iterable[Int]) -> Int:
    """Return the sum of sizes; exact for ints and for int64 columns.

    >>> added_up((3, 4))
    7
    """
    total: Int = sum(sizes)
    return total


def weighted(counts: Iterable[int], sizes: Iterable[Int]) -> Int:
    """Return the sum of sizes, each times its count.

    >>> weighted((3, 1), (10, 4))
    34
    """
    total: Int = 0
    for count, size in zip(counts, sizes, strict=True):
        total = total + count * size
    return total


def share_of(total: Int, part: Int, whole: Int) -> Int:
    """Return ``total * part // whole``, exact also where the product exceeds an int64 column.

    >>> share_of(10**12, 10**9, 10**10)
    100000000000
    """
    if isinstance(total, int) and isinstance(part, int) and isinstance(whole, int):
        return total * part // whole
    import numpy as np  # noqa: PLC0415  only columns need it

    return cast("Int", np.asarray(np.asarray(total, dtype=object) * part // whole, dtype=np.int64))


def where(condition: Bool, yes: Int, no: Int) -> Int:
    """Return ``yes`` where the condition holds, else ``no``.

    >>> where(2 > 1, 10, 20)
    10
    """
    if isinstance(condition, bool):
        return yes if condition else no
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    return cast("Int", np.where(condition, yes, no))


def for_each_value(function: Callable[[int], int], values: Int) -> Int:
    """Return a function's value for each of ``values``; it runs once per distinct element of a column.

    For functions without a formula, such as a greedy assignment.

    >>> for_each_value(lambda ranks: 10 // ranks, 3)
    3
    """
    found = distinct(values)
    if found.positions is None:
        return function(found.values[0])
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    return cast("Int", np.array([function(value) for value in found.values], dtype=np.int64)[found.positions])


def for_each_row(function: Callable[..., Sequence[Int]], *values: Int) -> tuple[Int, ...]:
    """Return the several results of a function of ints for each row of ``values``; it runs once per distinct row of columns.

    >>> for_each_row(lambda a, b: (a + b, a * b), 3, 4)
    (7, 12)
    """
    if all(isinstance(value, int) for value in values):
        return tuple(function(*values))
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    columns = np.stack(np.broadcast_arrays(*values), axis=-1)
    rows, positions = np.unique(columns.reshape(-1, len(values)), axis=0, return_inverse=True)
    found = np.array([function(*row) for row in rows.tolist()], dtype=np.int64)
    return tuple(one[positions.reshape(columns.shape[:-1])] for one in found.T)


class Distinct(NamedTuple):
    """The distinct elements of a column, and the index of each element among them. A plain number is its only element."""

    values: tuple[int, ...]
    positions: "NDArray[np.intp] | None" = None

    def each(self, function: Callable[[int], Sequence[Float]]) -> tuple[Float, ...]:
        """Return the several results of a function, each as a column with one entry per distinct value; numbers for a number."""
        if self.positions is None:
            return tuple(function(self.values[0]))
        import numpy as np  # noqa: PLC0415  keeps start-up fast

        return tuple(np.array(each) for each in zip(*map(function, self.values), strict=True))

    def at_once(self, function: Callable[["NDArray[np.int64]"], Sequence[Float]]) -> tuple[Float, ...]:
        """Return the several results of a function of a column, which runs once for all distinct values."""
        import numpy as np  # noqa: PLC0415  keeps start-up fast

        column = np.array(self.values, dtype=np.int64)
        return tuple(np.broadcast_to(each, column.shape) for each in function(column))

    def spread(self, of_distinct: Float) -> Float:
        """Expand a column with one entry per distinct value to one entry per element of the original column."""
        return of_distinct if self.positions is None or isinstance(of_distinct, float) else of_distinct[self.positions]


#: Below this maximum, `bincount` finds the distinct values faster than sorting, and its table stays small.
_SMALL = 1 << 16


def distinct(values: Int) -> Distinct:
    """Return the distinct elements of a column.

    >>> distinct(3).values
    (3,)
    """
    if isinstance(values, int):
        return Distinct((values,))
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    if values.size and values.min() >= 0 and values.max() < _SMALL:
        found = np.flatnonzero(np.bincount(values.ravel()))
        at = np.zeros(int(found[-1]) + 1, dtype=np.intp)
        at[found] = np.arange(len(found))
        return Distinct(tuple(found.tolist()), at[values])
    ordered, positions = np.unique(values, return_inverse=True)
    return Distinct(tuple(ordered.tolist()), positions.reshape(values.shape))


def _pairwise(a: Int, b: Int, *, larger: bool) -> Int:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return max(a, b) if larger else min(a, b)
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    return cast("Int", (np.maximum if larger else np.minimum)(a, b))

"""Of many combinations that hold the same promise, so few that still every two choices meet. All of them with ``EVERY_CASE=1``.

Each costs a run of a small model or more. What depends on three choices at once is named (``together``), and a night takes all.
"""

from __future__ import annotations

import os
import random
from itertools import combinations, product
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

T = TypeVar("T")
Row = tuple[int, ...]
"""Which choice of each factor, by number."""


def every_case() -> bool:
    """Whether all cases are wanted, as at night."""
    return bool(os.environ.get("EVERY_CASE"))


BY_NIGHT = pytest.mark.skipif(not every_case(), reason="run at night, with EVERY_CASE=1")
"""The mark of a case whose like runs by day."""


def by_day(names: Iterable[str], at_night: Collection[str]) -> list[str]:
    """Return the names without those of the night, or all of them at night."""
    return [name for name in names if every_case() or name not in at_night]


def combined(*factors: Collection[T], together: int = 2) -> list[tuple[T, ...]]:
    """Return combinations of a choice of each factor: all at night, else those of :func:`few`."""
    counts = [len(factor) for factor in factors]
    rows = product(*map(range, counts)) if every_case() else few(counts, together)
    choices = [tuple(factor) for factor in factors]
    return [tuple(factor[choice] for factor, choice in zip(choices, row, strict=True)) for row in rows]


def few(counts: Sequence[int], together: int) -> list[Row]:
    """Return rows in which every two choices meet, and all choices of the first ``together`` factors.

    >>> rows = few((4, 3, 2, 2), together=2)
    >>> len(rows), {row[:2] for row in rows} == set(product(range(4), range(3))), len({row[2:] for row in rows})
    (13, True, 4)
    >>> len({row[:3] for row in few((4, 3, 2, 2), together=3)})
    24
    """
    return sorted(_chosen(list(product(*map(range, counts))), together))


def _chosen(rows: list[Row], together: int) -> Iterator[Row]:
    """Take the rows in which most choices meet that have not met before, then those with one fewer, to those with one."""
    dice = random.Random(len(rows))  # noqa: S311  a sample, not a secret
    shuffled = sorted(rows, key=lambda _row: dice.random())
    met: set[tuple[tuple[int, int], ...]] = set()
    for new in range(len(set(_met(rows[0], together))), 0, -1):
        for row in shuffled:
            meets = set(_met(row, together)) - met
            if len(meets) >= new:
                met |= meets
                yield row


def _met(row: Row, together: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the choices that meet in a row: by factor, which of its choices."""
    yield from combinations(enumerate(row), 2)
    yield tuple(enumerate(row[:together]))

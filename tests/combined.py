"""Chooses the test cases of a day: few combinations that cover every pair of choices. ``EVERY_CASE=1`` runs all, as at night.

Each case runs a small model or more. ``together`` covers all combinations of the first factors, not only pairs.
"""

from __future__ import annotations

import os
import random
import tomllib
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")
_ROOT = Path(__file__).parents[1]
_TABLE = tomllib.loads((Path(__file__).parent / "by_day.toml").read_text(encoding="utf-8"))
CASES_BY_DAY: dict[str, dict[str, list[str]]] = _TABLE["by_day"]
"""By file and test, the only cases that run by day."""
CASES_AT_NIGHT: dict[str, dict[str, list[str]]] = _TABLE["at_night"]
"""By file and test, the cases that run only at night."""
ONE_IN: dict[str, dict[str, int]] = _TABLE["one_in"]
"""By file and test, a number n: by day only every n-th case runs."""
FILES_AT_NIGHT: list[str] = _TABLE["files_at_night"]
"""Files whose tests all run at night, unless the command line names them."""
RUN_BY_DAY: dict[str, list[str]] = _TABLE["run_by_day"]
"""By file, the runs of the day, in files whose tests share the runs of one process."""
CASES_WITHOUT_A_TEST = pytest.StashKey[list[str]]()
"""Key under which collection stores the cases in ``by_day.toml`` that no test has."""
Row = tuple[int, ...]
"""The index of the choice for each factor."""


def every_case() -> bool:
    """Whether all cases run, as at night."""
    return bool(os.environ.get("EVERY_CASE"))


BY_NIGHT = pytest.mark.skipif(not every_case(), reason="run at night, with EVERY_CASE=1")
"""Skips a case by day."""


def waits_whole(path: Path) -> bool:
    """Whether all tests of a file run only at night, so that a day need not import it."""
    return not every_case() and path.is_relative_to(_ROOT) and path.relative_to(_ROOT).as_posix() in FILES_AT_NIGHT


def leave_to_the_night(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Mark the cases that run only at night, and return them."""
    counted: Counter[tuple[str, str]] = Counter()
    waiting_items: list[pytest.Item] = []
    for item in items:
        file, _, test = item.nodeid.partition("::")
        name, _, case = test.partition("[")
        cases, waiting = CASES_BY_DAY.get(file, {}).get(name), CASES_AT_NIGHT.get(file, {}).get(name, [])
        case = case.removesuffix("]")
        stands_for = ONE_IN.get(file, {}).get(name, 1)
        if (cases is not None and case not in cases) or case in waiting or counted[file, name] % stands_for:
            item.add_marker(BY_NIGHT)
            waiting_items.append(item)
        counted[file, name] += 1
    return waiting_items


def of_the_day(file: str, runs: Mapping[str, T]) -> dict[str, T]:
    """Return the runs of a file: by day those that ``by_day.toml`` names, at night all."""
    name = Path(file).relative_to(_ROOT).as_posix()
    chosen = list(runs) if every_case() else RUN_BY_DAY[name]
    return {one: runs[one] for one in chosen}


def without_a_test(items: Iterable[pytest.Item]) -> list[str]:
    """Return the cases in ``by_day.toml`` that none of ``items`` has; other files do not count."""
    there = {item.nodeid for item in items}
    files = {one.partition("::")[0] for one in there}
    named = [
        f"{file}::{name}[{case}]"
        for table in (CASES_BY_DAY, CASES_AT_NIGHT) for file in files & table.keys()
        for name, cases in table[file].items() for case in cases
    ]  # fmt: skip
    tests = {one.partition("[")[0] for one in there}
    sampled = [f"{file}::{name}" for file in files & ONE_IN.keys() for name in ONE_IN[file]]
    return [one for one in named if one not in there] + [one for one in sampled if one not in tests]


def combined(*factors: Collection[T], together: int = 2) -> list[tuple[T, ...]]:
    """Return combinations of one choice per factor: all at night, else those of :func:`few`."""
    counts = [len(factor) for factor in factors]
    rows = product(*map(range, counts)) if every_case() else few(counts, together)
    choices = [tuple(factor) for factor in factors]
    return [tuple(factor[choice] for factor, choice in zip(choices, row, strict=True)) for row in rows]


def few(counts: Sequence[int], together: int) -> list[Row]:
    """Return rows that contain every pair of choices, and all combinations of the first ``together`` factors.

    >>> rows = few((4, 3, 2, 2), together=2)
    >>> len(rows), {row[:2] for row in rows} == set(product(range(4), range(3))), len({row[2:] for row in rows})
    (13, True, 4)
    >>> len({row[:3] for row in few((4, 3, 2, 2), together=3)})
    24
    """
    return sorted(_chosen(list(product(*map(range, counts))), together))


def _chosen(rows: list[Row], together: int) -> Iterator[Row]:
    """Yield rows greedily: first those with the most new pairs, then with one fewer, down to one."""
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
    """Yield the pairs of (factor, choice) in a row, and its first ``together`` choices."""
    yield from combinations(enumerate(row), 2)
    yield tuple(enumerate(row[:together]))

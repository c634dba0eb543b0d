"""What published runs of one machine share, and how well one of them calibrates the others.

A run's deviation is the logarithm of its measured over its predicted time. Its parts (:class:`zeroplan.carried.Parts`) are
estimated by maximum likelihood over the open half: those of a machine's runs are jointly normal, with a mean of 0. A machine is a
program's GPUs of one kind. Every figure compares the same pairs of rows: one row calibrates, another is predicted with it and
without it. The deviation expected of a row stretches its whole step; scaling the shares, as the command line does, moves a median
by less than 0.1 points.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha256
from math import exp, log
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.measured.published_rows import half_of, program, running_of_row
from zeroplan.carried import FITTED, Alike, Deviating, Parts, expected, of_job, of_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.measured.throughput import Scored

#: How many rows of a machine, or of one model on it, take a turn as the calibrating run. A hash orders the rows.
_CALIBRATING = 8
#: Larger deviations count as this much in the estimate of the parts, so that a few rows do not decide.
_LARGEST = 0.25
#: The first size of every part; the least one, which is less than two runs of one job differ by; and the steps in which sizes are
#: varied. [natural logarithms]
_START, _LEAST, _STEPS = 0.04, 0.005, (0.7, 0.35, 0.17, 0.08, 0.04, 0.02)


class Row(NamedTuple):
    """A scored row: what it shares with others, its deviation and its place in the order."""

    alike: Alike
    model: Alike
    deviation: float
    order: bytes


def machines(found: Sequence[Scored]) -> list[list[Row]]:
    """Return the rows of each machine, ordered by a hash of their names."""
    every: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for one in found:
        row, job = one.case.row, one.job
        alike = of_job(job, running_of_row(row, job))
        deviation = -log(1 + one.error)
        order = sha256(row["id"].encode()).digest()
        every[program(row), row["gpu"], job.recipe.engine].append(Row(alike, of_model(job.model), deviation, order))
    return [sorted(rows, key=lambda row: row.order) for rows in every.values()]


def fit(found: Sequence[Scored]) -> Parts:
    """Return the standard deviations under which the rows' deviations are most likely."""
    sets = []
    for rows in machines(found):
        sharing = [[list(one.alike.sharing(other.alike)) for other in rows] for one in rows]
        deviations = np.clip([row.deviation for row in rows], -_LARGEST, _LARGEST)
        sets.append((deviations, np.moveaxis(np.array(sharing, dtype=float), -1, 0)))
    sizes = np.full(len(Parts._fields), log(_START))
    least = _unlikely(sizes, sets)
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for at, by in ((at, by) for at in range(len(sizes)) for by in (step, -step)):
                tried = sizes.copy()
                tried[at] = max(tried[at] + by, log(_LEAST))
                if (value := _unlikely(tried, sets)) < least - 1e-9:
                    sizes, least, moved = tried, value, True
    return Parts(*(float(size) for size in np.exp(sizes)))


def _unlikely(sizes: np.ndarray, sets: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the negative logarithm of the likelihood, without its constant."""
    *shared, own = np.exp(2 * sizes)
    total = 0.0
    for deviations, sharing in sets:
        variance = np.tensordot(shared, sharing, 1) + own * np.eye(len(deviations))
        root = np.linalg.cholesky(variance)
        total += deviations @ np.linalg.solve(variance, deviations) / 2 + np.log(np.diag(root)).sum()
    return total


class Errors(NamedTuple):
    """Absolute errors of the same pairs of rows."""

    without: list[float]
    calibrated: list[float]


def errors(found: Sequence[Scored], *, runs: int = 1, same_model: bool = False, layout_known: bool = True) -> Errors:
    """Return the errors of every other row of a machine after calibration by ``runs`` of its rows.

    ``same_model``: only rows of the same model calibrate. ``layout_known``: the expectation counts what both layouts share, as
    ``zeroplan time`` does; False: only the model, as for all layouts of a plan.
    """
    result = Errors([], [])
    for rows in machines(found):
        for some in _by_model(rows) if same_model else [rows]:
            first = some[:_CALIBRATING]
            for at in range(len(first) if len(some) > runs else 0):
                chosen = [first[(at + further) % len(first)] for further in range(min(runs, len(first)))]
                known = [Deviating(row.alike, row.deviation) for row in chosen]
                for other in (row for row in some if all(row is not one for one in chosen)):
                    of = other.alike if layout_known else other.model
                    result.without.append(abs(exp(-other.deviation) - 1))
                    result.calibrated.append(abs(exp(expected(known, of) - other.deviation) - 1))
    return result


def _by_model(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.model].append(row)
    return list(found.values())


#: The ways in which rows calibrate others: what the page calls them, and the arguments of :func:`errors`.
WAYS: dict[str, Callable[[Sequence[Scored]], Errors]] = {
    "any run on the machine": errors,
    "any three": lambda found: errors(found, runs=3),
    "a run of the same model": lambda found: errors(found, same_model=True),
    "three of the same model": lambda found: errors(found, runs=3, same_model=True),
    "a run of the same model, for all layouts of a plan": lambda found: errors(found, same_model=True, layout_known=False),
}


def table(found: Sequence[Scored]) -> Iterator[tuple[str, str, int, float, float, float, float]]:
    """Yield the half, the way, the number of pairs, and medians and limits for 90 in 100, without and with calibration."""
    for half in ("open", "held"):
        rows = [one for one in found if half_of(one.case.row) == half]
        for name, way in WAYS.items() if rows else ():
            without, after = way(rows)
            yield half, name, len(after), median(without), _ninth(without), median(after), _ninth(after)


def _ninth(errors: Sequence[float]) -> float:
    return sorted(errors)[min(int(0.9 * len(errors)), len(errors) - 1)]


def lines(found: Sequence[Scored]) -> Iterator[str]:
    """Yield the estimated parts and the table as text."""
    half = [one for one in found if half_of(one.case.row) == "open"]
    if half:
        for name, size, used in zip(Parts._fields, fit(half), FITTED, strict=True):
            yield f"deviations of a {name:8} {size:6.2%}, in use {used:.2%}"
    for half_name, name, count, *figures in table(found):
        yield f"{half_name:5}{name:52}{count:6}" + "".join(f"{figure:8.1%}" for figure in figures)

"""Derives the errors of replayed predictions: ``python -m tests.measured.replayed`` from the repository's root.

Writes the figures of :mod:`zeroplan.engines.replayed_shares` from the records, in a few minutes. ``--show`` prints the errors.
Needs no torch.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from math import ceil, floor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tests.measured import stored
from zeroplan.engines import replayed_shares
from zeroplan.engines.replayed_shares import Held
from zeroplan.engines.requests import not_written
from zeroplan.measurement import SETTINGS
from zeroplan.replay import StepReplay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zeroplan.measurement import AllocatorSettings, Measurement
    from zeroplan.spec.job import JobSpec

_FILE = Path(replayed_shares.__file__)
_TABLE = re.compile(r"(?<=# derived: python -m tests\.measured\.replayed\n).*?(?=    # end)", re.DOTALL)
_NEAR = 0.02
_LEFT_OUT = 100
"""Of so many jobs one at either end is left out."""


class Seen(NamedTuple):
    """The replay of a job's recorded requests, and that of the predicted requests."""

    job: JobSpec
    settings: AllocatorSettings
    allocated: float
    """The predicted peak over the recorded one."""
    reserved: float
    """The recorded reserve over the predicted one."""
    scratch: float
    """What a kernel of attention takes for itself at most, which records on fake tensors have not, over the recorded peak."""


def records() -> Iterator[Measurement]:
    """Return all records with a replay of jobs whose requests are known."""
    every = (record for path in stored.SAMPLES for record in stored.records(path))
    return (record for record in every if record.allocator and not not_written(record.job))


def seen_in(record: Measurement) -> Iterator[Seen]:
    """Return a record's replays beside those of the prediction."""
    step = StepReplay(record.job, starts="recorded", keeps_up=True)
    scratch = max((one.n_bytes for one in step.log.requests if one.reason.startswith("scratch of")), default=0)
    for shown in record.allocator:
        predicted = step.replayed(shown.settings)
        allocated = predicted.allocated_bytes / shown.allocated_bytes
        reserved = shown.reserved_bytes / predicted.reserved_bytes
        yield Seen(record.job, shown.settings, allocated, reserved, scratch / shown.allocated_bytes)


@cache
def seen() -> dict[tuple[str, str], list[Seen]]:
    """Return all replays by engine and settings."""
    found: dict[tuple[str, str], list[Seen]] = {}
    for record in records():
        for one in seen_in(record):
            found.setdefault((record.job.recipe.engine, one.settings), []).append(one)
    return found


def held(found: list[Seen]) -> Held:
    """Return the figures of some jobs."""
    ratios, left_out = sorted(one.reserved for one in found), len(found) // _LEFT_OUT
    off = [abs(1 / one.reserved - 1) for one in found]
    return Held(
        jobs=len(found),
        low=floor(1000 * ratios[left_out]),
        high=ceil(1000 * ratios[-1 - left_out]),
        median=round(10**6 * median(off)),
        near=floor(1000 * sum(one < _NEAR for one in off) / len(off)),
    )


def main() -> None:
    """Write the figures."""
    engines = sorted({engine for engine, _ in seen()})
    rows = [f'    "{engine}": {tuple(held(seen()[engine, settings]) for settings in SETTINGS)},\n' for engine in engines]
    _FILE.write_text(_TABLE.sub(lambda _: "".join(rows), _FILE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written to {_FILE}; run `ruff format`")


def show() -> None:
    """Print the errors of the predictions."""
    for (engine, settings), found in sorted(seen().items()):
        off = sorted(abs(1 / one.reserved - 1) for one in found)
        peaks = max(abs(one.allocated - 1) for one in found)
        within = sum(one < _NEAR for one in off)
        print(
            f"{engine} {settings}: {len(found)} jobs, peak within {peaks:.2%}; reserved: median off by {median(off):.3%}, "
            f"{within / len(off):.1%} within 2 %, 95 % within {off[int(0.95 * len(off))]:.1%}, all within {off[-1]:.1%}"
        )


if __name__ == "__main__":
    show() if "--show" in sys.argv else main()

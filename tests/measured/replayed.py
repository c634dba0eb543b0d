"""Derives the errors of replayed predictions: ``python -m tests.measured.replayed`` from the repository's root.

Writes the figures of :mod:`zeroplan.engines.replayed_shares` and :mod:`tests.measured.replayed_shares` from the records, in a few
minutes. ``--show`` prints the errors. Needs no torch.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from math import ceil, floor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tests.measured import replayed_shares, stored
from tests.measured.replayed_shares import Held
from tests.on_gpus import gpu_records
from zeroplan.engines import replayed_shares as of_package
from zeroplan.engines.replayed_shares import Beyond
from zeroplan.engines.requests import not_written
from zeroplan.replay import StepReplay
from zeroplan.spec.hardware import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zeroplan.measurement import Measurement
    from zeroplan.spec.hardware import AllocatorSettings
    from zeroplan.spec.job import JobSpec

_FILES = Path(replayed_shares.__file__), Path(of_package.__file__)
_TABLE = re.compile(r"(?<=# derived: python -m tests\.measured\.replayed\n).*?(?=    # end)", re.DOTALL)
_NEAR = 0.02
_BELOW, _ABOVE = 20, 100
"""Of so many jobs one is left out below the lower end, and above the upper end. An upper end that is too low is the worse error."""
EVERY = 4
"""Of how many records one is replayed; all of FSDP1, which has few. A replay with both ends takes some seconds."""


class Seen(NamedTuple):
    """The replay of a job's recorded requests, and that of the predicted requests."""

    job: JobSpec
    settings: AllocatorSettings
    allocated: float
    """The predicted peak over the recorded one."""
    reserved: float
    """The recorded reserve over the predicted one."""
    least: float
    """The recorded reserve over the lower of the prediction's ends."""
    most: float
    """The recorded reserve over the higher one."""

    def lies_in(self, ends: Beyond) -> bool:
        """Whether the recorded reserve lies in the band with these ends."""
        return ends.low <= 1000 * self.least and 1000 * self.most <= ends.high

    def width(self, ends: Beyond) -> float:
        """The width of that band, as a share of the recorded reserve."""
        return ends.high / 1000 / self.most - ends.low / 1000 / self.least


def records(every: int = EVERY, of_fsdp1: int = 1) -> list[Measurement]:
    """Return some of the records with a replay of jobs whose requests are known: one in so many, evenly."""
    found = [record for path in stored.SAMPLES for record in stored.records(path)]
    found = [record for record in found if record.allocator and not not_written(record.job)]
    are_fsdp1 = [record for record in found if record.job.recipe.engine == "fsdp1"]
    return [*[record for record in found if record.job.recipe.engine != "fsdp1"][::every], *are_fsdp1[::of_fsdp1]]


def seen_in(record: Measurement) -> Iterator[Seen]:
    """Return a record's replays beside those of the prediction. A run on a GPU is compared with the user's prediction."""
    of_gpu = record.tensors == "cuda"
    step = StepReplay(record.job) if of_gpu else StepReplay(record.job, starts="recorded", keeps_up=True)
    for shown in record.allocator:
        predicted, ends = step.replayed(shown.settings), step.ends(shown.settings)
        allocated = predicted.allocated_bytes / shown.allocated_bytes
        of_ends = (shown.reserved_bytes / one for one in (predicted.reserved_bytes, *ends))
        yield Seen(record.job, shown.settings, allocated, *of_ends)


@cache
def seen() -> dict[tuple[str, str], list[Seen]]:
    """Return all replays by engine and settings."""
    found: dict[tuple[str, str], list[Seen]] = {}
    for record in records():
        for one in seen_in(record):
            found.setdefault((record.job.recipe.engine, one.settings), []).append(one)
    return found


@cache
def on_gpus() -> list[Seen]:
    """Return the runs on a GPU of jobs that records cover."""
    records = [one.record for one in gpu_records.seen() if one.record is not None and not not_written(one.record.job)]
    return [one for record in records if StepReplay(record.job).is_covered for one in seen_in(record)]


def beyond(found: list[Seen]) -> Beyond:
    """Return the ends that leave out a few of some jobs."""
    least, most = sorted(one.least for one in found), sorted(one.most for one in found)
    return Beyond(
        low=min(1000, floor(1000 * least[len(found) // _BELOW])),
        high=max(1000, ceil(1000 * most[-1 - len(found) // _ABOVE])),
    )


def recorded(settings: AllocatorSettings) -> Beyond:
    """Return the ends of all records with these settings."""
    return beyond([one for (_, other), found in seen().items() if other == settings for one in found])


def held(found: list[Seen], ends: Beyond) -> Held:
    """Return the figures of some jobs, in a band with these ends."""
    off = [abs(1 / one.reserved - 1) for one in found]
    return Held(
        jobs=len(found),
        inside=floor(1000 * sum(one.lies_in(ends) for one in found) / len(found)),
        median=round(10**6 * median(off)),
        near=floor(1000 * sum(one < _NEAR for one in off) / len(off)),
        width=ceil(1000 * median(one.width(ends) for one in found)),
    )


def main() -> None:
    """Write the figures."""
    of_gpus, of_records = beyond(on_gpus()), {settings: recorded(settings) for settings in SETTINGS}
    ends = {how: Beyond(min(one.low, of_gpus.low), max(one.high, of_gpus.high)) for how, one in of_records.items()}
    engines = sorted({engine for engine, _ in seen()})
    rows = [f'    "{one}": {tuple(held(seen()[one, how], ends[how]) for how in SETTINGS)},\n' for one in engines]
    tables = iter(
        (
            "".join(rows),
            "".join(f"    {one},\n" for one in of_records.values()),
            f"    low={of_gpus.low},\n    high={of_gpus.high},\n",
        )
    )
    for file in _FILES:
        file.write_text(_TABLE.sub(lambda _: next(tables), file.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"written to {file}; run `ruff format`")


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

"""Derives the reserved memory beyond the moments' sums: ``python -m tests.measured.reserved`` from the repository's root.

Writes the figures of :mod:`zeroplan.engines.reserved_shares` from the records. ``--show`` prints how many records lie in the
band, how many lie in a band derived without them, and how wide the band is. Needs no torch.
"""

from __future__ import annotations

import re
from functools import cache
from math import ceil, floor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tests.measured import stored
from zeroplan import estimate
from zeroplan.comparison import moments_as_run, moments_in_replay, stage_of
from zeroplan.engines import reserved_shares
from zeroplan.engines.reserved_shares import Pressed, Shares, measured_stage, shares_of
from zeroplan.spec.hardware import SETTINGS
from zeroplan.timeline import Sizes, band_of, measured_from, sizes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zeroplan.ledger import Band
    from zeroplan.measurement import Measurement
    from zeroplan.spec.hardware import AllocatorSettings
    from zeroplan.spec.job import JobSpec

#: All whose requests were replayed. The jobs of ``rooms.jsonl`` are the first ones of a draw like those of the matrix.
REPLAYED = (*stored.SAMPLES, stored.ROOMS, stored.STAGE3_FIRST, stored.VERSIONS, stored.MEGATRON)
FOLDS = 5
"""Parts of an engine's and stage's jobs; every part is held against the band derived from the others."""
_LEFT_OUT = 50
"""Of so many jobs the one that reserves most is left out, and none of fewer.

A further job lies below n others about once in n, and above all but k of them k + 1 times in n. Stages have 110 to 280 jobs. With
one in fifty left out, 96 to 98 in 100 of an engine's jobs lie in a band derived without them. With one in 33 it would be 95 of
DDP's, without a margin. With none, a few jobs that reserve far more than all others would make a band up to twice as wide.
"""
_FILE = Path(reserved_shares.__file__)
_TABLE = re.compile(r"(?<=# derived: python -m tests\.measured\.reserved\n).*?(?=    # end)", re.DOTALL)

Key = tuple[str, int]


class Seen(NamedTuple):
    """A job's replay with one of the allocator's settings, and the moments of its steps."""

    job: JobSpec
    settings: AllocatorSettings
    sizes: Sizes
    reserved_bytes: int
    least_room_bytes: int | None

    @property
    def key(self) -> Key:
        """Engine and stage, by which the figures differ."""
        return self.job.recipe.engine, measured_stage(self.job.recipe)

    @property
    def beyond(self) -> float:
        """The reserved memory on the scale of a band's ends. [thousandths]"""
        middle, scale = map(int, measured_from(self.sizes, self.job.recipe))
        return 1000 * (self.reserved_bytes - middle) / scale

    @property
    def of_streams(self) -> float:
        """The reserved memory as a share of the streams' sum. [thousandths]"""
        return 1000 * self.reserved_bytes / int(self.sizes.streams)

    @property
    def pressed(self) -> float | None:
        """The smallest room in which the job ran, as a share of its peak. [thousandths]"""
        return None if self.least_room_bytes is None else 1000 * self.least_room_bytes / int(self.sizes.peak)

    def lies_in(self, shares: Shares) -> bool:
        """Whether the reserved memory lies in the band of these figures."""
        low, _, high = self._band(shares)
        return low <= self.reserved_bytes <= high

    def width(self, shares: Shares) -> float:
        """The width of the band of these figures, divided by the reserved memory."""
        low, _, high = map(int, self._band(shares))
        return (high - low) / self.reserved_bytes

    def _band(self, shares: Shares) -> Band:
        return band_of(self.sizes, self.job.recipe, shares)


@cache
def seen(path: Path) -> tuple[Seen, ...]:
    """Return every replay of a file's records."""
    return tuple(one for record in stored.records(path) for one in _replays(record))


def _replays(record: Measurement) -> Iterator[Seen]:
    as_run = moments_as_run(estimate(record.job, pipeline_rank=stage_of(record)), record)
    for shown in record.allocator:
        sizes = sizes_of(moments_in_replay(as_run, shown), record.job.recipe)
        yield Seen(record.job, shown.settings, sizes, shown.reserved_bytes, shown.least_room_bytes)


def by_stage(settings: str) -> dict[Key, list[Seen]]:
    """Return all replays with these settings, by engine and stage."""
    found: dict[Key, list[Seen]] = {}
    for one in (one for path in REPLAYED for one in seen(path) if one.settings == settings):
        found.setdefault(one.key, []).append(one)
    return dict(sorted(found.items()))


def shares(found: Sequence[Seen]) -> Shares:
    """Return the figures of some replays."""
    beyond = sorted(one.beyond for one in found)
    most = beyond[-1 - len(beyond) // _LEFT_OUT]
    return Shares(floor(beyond[0]), round(median(one.of_streams for one in found)), ceil(most))


def pressed(settings: str) -> dict[str, Pressed]:
    """Return the figures of full cards with these settings, by engine."""
    found: dict[str, list[float]] = {}
    for one in seen(stored.ROOMS):
        if one.settings == settings and one.pressed is not None:
            found.setdefault(one.key[0], []).append(one.pressed)
    return {engine: Pressed(round(median(of)), ceil(max(of))) for engine, of in sorted(found.items())}


class Held(NamedTuple):
    """How many replays of an engine and stage lie in the band."""

    key: Key
    of: int
    inside: int
    cross_validated: int
    """How many lie in a band derived without them."""
    width: float
    """Of the band over what was reserved, in the middle."""


@cache
def held(settings: AllocatorSettings) -> tuple[Held, ...]:
    """Return how many replays lie in the band, by engine and stage."""
    return tuple(_held(key, found) for key, found in by_stage(settings).items())


def _held(key: Key, found: list[Seen]) -> Held:
    kept = shares_of(found[0].job.recipe, found[0].settings)
    assert kept is not None
    return Held(
        key=key,
        of=len(found),
        inside=sum(one.lies_in(kept) for one in found),
        cross_validated=cross_validated(found),
        width=median(one.width(kept) for one in found),
    )


def cross_validated(found: Sequence[Seen]) -> int:
    """Return how many replays lie in a band that is derived from the other folds. All replays of a job are in one fold."""
    fold = {job: number % FOLDS for number, job in enumerate(dict.fromkeys(one.job for one in found))}
    inside = 0
    for number in range(FOLDS):
        of_others = shares([one for one in found if fold[one.job] != number])
        inside += sum(one.lies_in(of_others) for one in found if fold[one.job] == number)
    return inside


def main() -> None:
    """Write the figures."""
    of_stages = _rows(*({key: shares(found) for key, found in by_stage(settings).items()} for settings in SETTINGS))
    tables = iter((of_stages, _rows(*map(pressed, SETTINGS))))
    _FILE.write_text(_TABLE.sub(lambda _: next(tables), _FILE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written to {_FILE}; run `ruff format`")


def _rows(default: Mapping[object, object], expandable: Mapping[object, object]) -> str:
    rows = (f"    {key!r}: ({default[key]!r}, {expandable[key]!r}),\n" for key in default)
    return "".join(rows).replace("'", '"')


def show() -> None:
    """Print how many records lie in the band, and how wide it is."""
    for settings in SETTINGS:
        for one in held(settings):
            counts = f"{one.inside} of {one.of} in the band, {one.cross_validated} in one derived without them"
            print(f"{settings} {one.key}: {counts}, width {one.width:.1%}")


if __name__ == "__main__":
    import sys

    show() if "--show" in sys.argv else main()

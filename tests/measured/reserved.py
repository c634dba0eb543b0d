"""Derive what the allocator reserves beyond what moments say: ``python -m tests.measured.reserved`` from the repository's root.

Writes the figures of :mod:`zeroplan.engines.reserved_shares` from the records, and prints how many records lie in the band and
how wide it is. Needs no torch.
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
from zeroplan.comparison import moments_as_run, moments_in_replay
from zeroplan.engines import reserved_shares
from zeroplan.engines.reserved_shares import Shares
from zeroplan.measurement import SETTINGS
from zeroplan.timeline import measured_from, reserved, sizes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zeroplan.ledger import Moment
    from zeroplan.measurement import AllocatorMeasured, Measurement
    from zeroplan.spec.recipe import RecipeSpec


class Part(NamedTuple):
    """A file of records, or every other one of them."""

    path: Path
    first: int = 0
    step: int = 1


#: What the figures are derived from, and what was not looked at for them.
DERIVED_FROM = (Part(stored.RECORDS), Part(stored.OPTIONS), *(Part(path, 0, 2) for path in stored.VARIED))
HELD_OUT = (Part(stored.FRESH), Part(stored.VERSIONS), Part(stored.ROOMS), *(Part(path, 1, 2) for path in stored.VARIED))
_LEFT_OUT = 50
"""Of so many jobs the one that reserves most is left out, and none of fewer."""
_FILE = Path(reserved_shares.__file__)
_TABLE = re.compile(r"(?<=# derived: python -m tests\.measured\.reserved\n).*?(?=    # end)", re.DOTALL)

Key = tuple[str, int]


class Seen(NamedTuple):
    """A record's replay with one of the allocator's settings, in the measures of the figures [thousandths], and in its band."""

    key: Key
    settings: str
    beyond: float
    of_streams: float
    pressed: float | None
    inside: bool
    width: float


@cache
def seen(part: Part) -> tuple[Seen, ...]:
    """Every replay of some records, held against what the moments of the job's steps say."""
    records = stored.records(part.path)[part.first :: part.step]
    return tuple(one for record in records for one in _replays(record))


def _replays(record: Measurement) -> Iterator[Seen]:
    if record.allocator:
        as_run = moments_as_run(estimate(record.job), record)
        yield from (_seen(record.job.recipe, as_run, shown) for shown in record.allocator)


def _seen(recipe: RecipeSpec, as_run: tuple[Moment, ...], shown: AllocatorMeasured) -> Seen:
    took, moments = shown.reserved_bytes, moments_in_replay(as_run, shown)
    sizes = sizes_of(moments, recipe)
    low, _, high = map(int, reserved(moments, recipe, shown.settings))
    middle, scale = map(int, measured_from(sizes, recipe))
    return Seen(
        key=(recipe.engine, recipe.zero_stage),
        settings=shown.settings,
        beyond=1000 * (took - middle) / scale,
        of_streams=1000 * took / int(sizes.streams),
        pressed=None if shown.least_room_bytes is None else 1000 * shown.least_room_bytes / int(sizes.peak),
        inside=low <= took <= high,
        width=(high - low) / took,
    )


def derived(settings: str) -> dict[Key, Shares]:
    """The figures of every engine and stage, with some settings."""
    found, rooms = _with(DERIVED_FROM, settings), _with((Part(stored.ROOMS),), settings)
    return {
        key: _shares([one for one in found if one.key == key], _alike(rooms, key)) for key in sorted({one.key for one in found})
    }


def _alike(rooms: list[Seen], key: Key) -> list[Seen]:
    """Those of an engine and stage; where they are few, those of the engine, then all."""
    of_engine = [one for one in rooms if one.key[0] == key[0]]
    of_stage = [one for one in of_engine if one.key == key]
    return next((some for some in (of_stage, of_engine) if len(some) >= _FEWEST), rooms)


_FEWEST = 8
"""Jobs that a figure rests on at the least."""


def _with(parts: Iterable[Part], settings: str) -> list[Seen]:
    return [one for part in parts for one in seen(part) if one.settings == settings]


def _shares(found: Sequence[Seen], rooms: Sequence[Seen]) -> Shares:
    beyond = [one.beyond for one in found]
    pressed = [one.pressed for one in rooms if one.pressed is not None]
    expected = median(one.of_streams for one in found)
    return Shares(floor(min(beyond)), round(expected), ceil(_most(beyond)), round(median(pressed)), ceil(_most(pressed)))


def _most(values: Sequence[float]) -> float:
    """The highest of all but one in fifty, the highest ones left out."""
    return sorted(values)[-1 - len(values) // _LEFT_OUT]


class Held(NamedTuple):
    """Records of an engine and stage beside the band."""

    key: Key
    inside: int
    of: int
    width: float
    """Of the band over what was reserved, in the middle."""


def held(parts: Iterable[Part], settings: str) -> list[Held]:
    """How many replays lie in the band, by engine and stage."""
    some = _with(parts, settings)
    return [
        Held(key, sum(one.inside for one in of), len(of), median(one.width for one in of))
        for key in sorted({one.key for one in some})
        for of in [[one for one in some if one.key == key]]
    ]


def main() -> None:
    """Write the figures, and print what they hold."""
    default, expandable = (derived(settings) for settings in SETTINGS)
    rows = "".join(f"    {key!r}: ({default[key]!r}, {expandable[key]!r}),\n".replace("'", '"') for key in default)
    _FILE.write_text(_TABLE.sub(lambda _: rows, _FILE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written to {_FILE}; run `ruff format`")


def show() -> None:
    """Print how many records lie in the band, and how wide it is."""
    for name, parts in (("derived from", DERIVED_FROM), ("held out", HELD_OUT)):
        for settings in SETTINGS:
            for one in held(parts, settings):
                print(f"{name} {settings} {one.key}: {one.inside} of {one.of}, width {one.width:.1%}")


if __name__ == "__main__":
    import sys

    show() if "--show" in sys.argv else main()

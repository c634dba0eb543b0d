"""Compares estimated with published reserved memory: ``python -m tests.measured.reserved_on_gpus``.

``tests/golden/reserved.toml`` has the figures and the settings that each source states. Needs no torch.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zeroplan import estimate, job
from zeroplan.errors import SpecError
from zeroplan.ledger import Band
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Fsdp1Options, Fsdp2Options
from zeroplan.units import GIB

if TYPE_CHECKING:
    from zeroplan.estimator import Estimate
    from zeroplan.spec.hardware import AllocatorSettings
    from zeroplan.spec.job import JobSpec

KEPT = Path(__file__).parents[1] / "golden" / "reserved.toml"


class Reserved(NamedTuple):
    """A published figure, and the bands of the estimate without and with a replay. [bytes]

    A job whose requests are not known has the same band twice.
    """

    source: str
    name: str
    measured: float
    bands: tuple[Band, Band]

    def error(self, replayed: bool) -> float:
        """The error of the expected figure, as a share of the measurement."""
        return int(self.bands[replayed].expected_bytes) / self.measured - 1

    def width(self, replayed: bool) -> float:
        """The width of the band, as a share of the measurement."""
        low, _, high = self.bands[replayed]
        return (int(high) - int(low)) / self.measured

    def inside(self, replayed: bool) -> bool:
        """Whether the figure lies in the band, to the two digits that a source prints."""
        low, _, high = self.bands[replayed]
        return int(low) - 0.005 * GIB <= self.measured <= int(high) + 0.005 * GIB


@cache
def kept() -> tuple[dict[str, Any], ...]:
    """Return the sources: ``name``, ``where``, ``counter``, ``row`` and ``refused``."""
    return tuple(_file()["source"])


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(KEPT.read_text(encoding="utf-8"))


def job_of(row: dict[str, Any], common: dict[str, Any]) -> JobSpec:
    """Return a row as a job."""
    asked = {**common, **row["job"]}
    shape = _file()["models"].get(asked["model"])
    if shape is not None:
        asked["model"] = ModelSpec(**shape)
    if "fsdp1" in row:
        asked["fsdp1"] = Fsdp1Options(**row["fsdp1"])
    if "fsdp2" in row:
        asked["fsdp2"] = Fsdp2Options(**row["fsdp2"])
    return job(**asked)


@cache
def scored() -> tuple[Reserved, ...]:
    """Return every row of every source with its estimate."""
    return tuple(
        _scored(source, row, job_of(row, source["common"])) for source in kept() for row in source["row"]
    )  # fmt: skip


def _scored(source: dict[str, Any], row: dict[str, Any], said: JobSpec) -> Reserved:
    settings = source.get("allocator", "default")
    band = estimate(said).reserved_with(settings)
    try:
        answer = estimate(said, replay=True)
    except SpecError:
        return Reserved(source["name"], row["name"], row["gib"] * GIB, (band, band))
    return Reserved(source["name"], row["name"], row["gib"] * GIB, (band, _on_card(answer, settings)))


def _on_card(answer: Estimate, settings: AllocatorSettings) -> Band:
    """Return a replay's band, or what the allocator reserves on a card that is full before it has that much."""
    band, room = answer.reserved_with(settings), answer.allocator_room_bytes
    if answer.replay is None or room is None or int(band.expected_bytes) <= room:
        return band
    most = answer.replay.on_card(room, settings).highest_bytes
    return Band(min(int(band.low_bytes), most), most, room)


def main() -> None:
    """Print every row."""
    for one in scored():
        words = (f"{one.error(way):+.1%} {'in' if one.inside(way) else 'outside'} the band" for way in (False, True))
        print(one.name, *words, sep=" | ")


if __name__ == "__main__":
    main()

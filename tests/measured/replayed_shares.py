"""The differences between replays of predicted steps and of recorded steps, by engine: a table of the documentation.

``python -m tests.measured.replayed`` writes the figures.
"""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """Predictions of many jobs compared with their records, with some settings of the allocator."""

    jobs: int
    """Number of replayed jobs."""
    inside: int
    """Share of records in the band. [thousandths]"""
    median: int
    """Median difference of the recorded reserve from the predicted one, in either direction. [millionths]"""
    near: int
    """Share of jobs within 2 %. [thousandths]"""
    width: int
    """Median width of the band, as a share of what was reserved. [thousandths]"""


MEASURED: dict[str, tuple[Held, Held]] = {
    # derived: python -m tests.measured.replayed
    "ddp": (
        Held(jobs=54, inside=981, median=24, near=981, width=51),
        Held(jobs=54, inside=981, median=477, near=962, width=44),
    ),
    "deepspeed": (
        Held(jobs=142, inside=985, median=52, near=950, width=49),
        Held(jobs=142, inside=985, median=108, near=985, width=44),
    ),
    "fsdp1": (
        Held(jobs=49, inside=1000, median=0, near=1000, width=46),
        Held(jobs=49, inside=979, median=0, near=979, width=43),
    ),
    "fsdp2": (
        Held(jobs=74, inside=1000, median=0, near=972, width=49),
        Held(jobs=74, inside=1000, median=0, near=1000, width=42),
    ),
    # end
}
"""By engine, with the allocator's default settings and with expandable segments."""

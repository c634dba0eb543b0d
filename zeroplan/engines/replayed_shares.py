"""By engine: how far reserved memory from predicted requests differs from that from recorded requests, as measured.

The requests of real engines, recorded on fake tensors, were replayed through the model of CUDA's allocator (the jobs of
``tests/measured/*.jsonl``), and so were the requests that :mod:`zeroplan.engines.requests` predicts for the same jobs. A block
of a few bytes can change where the allocator puts later blocks, so single jobs are off by up to a fourth. ``python -m
tests.measured.replayed`` derives these figures. A band leaves out one job in a hundred at either end.
"""

from typing import NamedTuple

from zeroplan.measurement import SETTINGS, AllocatorSettings
from zeroplan.spec.recipe import RecipeSpec


class Held(NamedTuple):
    """Ratio of recorded to predicted reserves over many jobs, with some settings of the allocator."""

    jobs: int
    """Number of replayed jobs."""
    low: int
    """Smallest ratio of the recorded reserve to the predicted one. [thousandths]"""
    high: int
    """Largest ratio. [thousandths]"""
    median: int
    """Median difference, in either direction. [millionths]"""
    near: int
    """Share of jobs within 2 %. [thousandths]"""


MEASURED: dict[str, tuple[Held, Held]] = {
    # derived: python -m tests.measured.replayed
    "ddp": (Held(jobs=222, low=985, high=1094, median=162, near=981), Held(jobs=222, low=964, high=1114, median=760, near=950)),
    "deepspeed": (
        Held(jobs=504, low=959, high=1035, median=243, near=954),
        Held(jobs=504, low=956, high=1020, median=159, near=956),
    ),
    "fsdp1": (Held(jobs=49, low=946, high=1086, median=0, near=836), Held(jobs=49, low=998, high=1051, median=0, near=959)),
    "fsdp2": (Held(jobs=354, low=968, high=1014, median=94, near=977), Held(jobs=354, low=941, high=1058, median=3, near=954)),
    # end
}
"""By engine, with the allocator's default settings and with expandable segments."""


def off_by(recipe: RecipeSpec, settings: AllocatorSettings) -> tuple[int, int]:
    """Return the smallest and the largest ratio of the recorded reserve to the predicted one. [thousandths]"""
    found = MEASURED[recipe.engine][SETTINGS.index(settings)]
    return found.low, found.high

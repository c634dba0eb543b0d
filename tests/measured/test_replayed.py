"""Compares replays of predicted requests with replays of the engine's recorded requests."""

from __future__ import annotations

import pytest

from tests.combined import every_case
from tests.measured import replayed
from zeroplan.engines.replayed_shares import off_by

#: Of how many records one is replayed, and of how many of FSDP1's; ``python -m tests.measured.replayed --show`` takes all.
_EVERY, _OF_FSDP1 = (9, 1) if every_case() else (27, 4)
_WITHIN = 0.02
_ENGINES = ("ddp", "deepspeed", "fsdp1", "fsdp2")


@pytest.fixture(scope="module")
def found() -> list[replayed.Seen]:
    """Return replays of some records and of their predictions."""
    every = list(replayed.records())
    of_fsdp1 = [one for one in every if one.job.recipe.engine == "fsdp1"]
    others = [one for one in every if one.job.recipe.engine != "fsdp1"]
    return [one for record in (*others[::_EVERY], *of_fsdp1[::_OF_FSDP1]) for one in replayed.seen_in(record)]


def test_the_peak_is_the_recorded_one(found: list[replayed.Seen]):
    """To 0.3 %, except with a chunked loss, whose last chunk's logits stay a little longer.

    FSDP1's to 0.5 %: in a small model the allocator may not split a block for a flat parameter. The prediction can be above the
    record by the scratch of kernels, which a record lacks.
    """
    for one in found:
        most = 0.015 if one.job.recipe.loss != "full" else 0.005 if one.job.recipe.engine == "fsdp1" else 0.003
        assert -most <= one.allocated - 1 <= most + one.scratch, one.job


@pytest.mark.parametrize("engine", _ENGINES)
def test_nine_in_ten_reserves_are_within_two_percent(found: list[replayed.Seen], engine: str):
    """For all records it is 94 to 98 in 100, for FSDP1's 91."""
    off = [abs(1 / one.reserved - 1) for one in found if one.job.recipe.engine == engine]
    assert len(off) > 30
    assert sum(one < _WITHIN for one in off) >= 0.9 * len(off)


@pytest.mark.parametrize("engine", _ENGINES)
def test_reserves_lie_in_the_band(found: list[replayed.Seen], engine: str):
    """At least 95 in 100."""
    of_engine = [one for one in found if one.job.recipe.engine == engine]
    ends = [(one, off_by(one.job.recipe, one.settings)) for one in of_engine]
    inside = sum(low <= 1000 * one.reserved <= high for one, (low, high) in ends)
    assert inside >= 0.95 * len(of_engine)

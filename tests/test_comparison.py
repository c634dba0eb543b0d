"""Compares estimates with records that contain more than an estimate: other phases, replays on a GPU."""

from dataclasses import replace

import pytest

from tests.measured.stored import records
from zeroplan import estimate
from zeroplan.catalog.gpu import gpu
from zeroplan.cli.case_table import table
from zeroplan.cli.comparing import Held
from zeroplan.comparison import compare_with_estimate
from zeroplan.measurement import Measurement, OnCardMeasured, PhaseMeasured
from zeroplan.report.comparison import comparison_payload, reserved_lines
from zeroplan.units import GIB


def test_a_phase_that_no_estimate_has_is_left_out_and_changes_nothing():
    """Another program's record with an evaluation between steps."""
    record = next(iter(records()))
    *before, last = record.steps
    phases = (*last.phases, PhaseMeasured(phase="evaluation", peak_bytes=1, kinds={}))
    longer = replace(record, steps=(*before, replace(last, phases=phases)))
    found = compare_with_estimate(longer)
    assert found == compare_with_estimate(record)
    assert {row.what for row in found.phases} == {phase.phase for phase in last.phases}


def with_card(record: Measurement, *, fits: bool, retries: int) -> Measurement:
    """The record of a job that fits an H100, with a made-up replay on a GPU with 60 GiB."""
    card = OnCardMeasured(
        room_bytes=60 * GIB, fits=fits, reserved_bytes=59 * GIB, retries=retries, retries_in_last_step=retries // 2,
        phase="" if fits else "backward",
    )  # fmt: skip
    shown = tuple(replace(one, card=card if one.settings == "default" else None) for one in record.allocator)
    return replace(record, job=replace(record.job, cluster=replace(record.job.cluster, gpu=gpu("h100"))), allocator=shown)


@pytest.fixture(scope="module")
def small() -> Measurement:
    """A record of a job that fits an H100 with room for the allocator's cache."""
    found = next(one for one in records() if one.steady.peak.peak_bytes < 20 * GIB and one.job.recipe.engine == "fsdp2")
    assert estimate(replace(found.job, cluster=replace(found.job.cluster, gpu=gpu("h100")))).verdict == "fits"
    return found


def test_what_is_reserved_outside_the_band_is_named_and_not_judged(small: Measurement):
    first, other = small.allocator
    below = replace(small, allocator=(replace(first, reserved_bytes=first.reserved_bytes // 2), other))
    found = compare_with_estimate(below)
    assert [one.settings for one in found.reserved if not one.inside] == ["default"]
    assert found.agrees(0.02)
    said, *_ = reserved_lines(found)
    assert "OUTSIDE the estimate's range" in said
    assert not any("OUTSIDE" in line for line in reserved_lines(compare_with_estimate(small)))
    payload = comparison_payload(found, below, tolerance=0.02)
    assert [one["inside"] for one in payload["reserved"]] == [False, True]  # type: ignore[index,attr-defined]


def test_a_replay_that_runs_out_of_memory_contradicts_an_estimate_that_fits(small: Measurement):
    ran, stopped = (compare_with_estimate(with_card(small, fits=fits, retries=4)) for fits in (True, False))
    assert (ran.contradicted, ran.agrees(0.02)) == (False, True)
    assert (stopped.contradicted, stopped.agrees(0.02)) == (True, False)
    assert "tries again 4 times, 2 of them in the last step. The job runs" in "\n".join(reserved_lines(ran))
    assert "still runs out of memory in the backward." in "\n".join(reserved_lines(stopped))
    enough = compare_with_estimate(with_card(small, fits=True, retries=0))
    assert "enough for all that it reserves" in "\n".join(reserved_lines(enough))


def test_a_table_of_cases_says_why_one_disagrees_and_how_many_lie_outside(small: Measurement):
    stopped = with_card(small, fits=False, retries=1)
    low = replace(stopped, allocator=tuple(replace(one, reserved_bytes=one.reserved_bytes // 2) for one in stopped.allocator))
    text = table([Held.of(low, "case").row(0.02)], tolerance=0.02)
    assert "a replay with a card of its size runs out of memory" in text
    assert "What the allocator reserves lies outside the estimate's band in 2 of 2 replays." in text

"""What the allocator reserves lies in the estimate's band: 95 in 100 replays, by engine, and of jobs it was not derived from."""

from __future__ import annotations

from statistics import median

import pytest

from tests.measured import reserved, stored
from zeroplan import estimate
from zeroplan.comparison import compare_with_estimate
from zeroplan.engines.reserved_shares import shares_of
from zeroplan.measurement import SETTINGS
from zeroplan.resolve import job
from zeroplan.spec.recipe import RecipeSpec

ENGINES = ("ddp", "fsdp2", "deepspeed")
#: Half of the bands are no wider than that, of what was reserved.
_WIDTH = {"default": 0.35, "expandable_segments": 0.22}


@pytest.fixture(scope="module", params=SETTINGS)
def bands(request: pytest.FixtureRequest) -> tuple[str, list[reserved.Held], list[reserved.Held]]:
    return request.param, reserved.held(reserved.DERIVED_FROM, request.param), reserved.held(reserved.HELD_OUT, request.param)


@pytest.mark.parametrize("engine", ENGINES)
def test_ninety_five_in_a_hundred_records_lie_in_the_band(
    bands: tuple[str, list[reserved.Held], list[reserved.Held]], engine: str
):
    """All records of an engine together, and those alone that the band was derived from."""
    _, derived, held_out = bands
    for some in (derived, [*derived, *held_out]):
        of_engine = [one for one in some if one.key[0] == engine]
        assert sum(one.inside for one in of_engine) >= 0.95 * sum(one.of for one in of_engine) > 0


def test_of_jobs_that_it_was_not_derived_from_hardly_fewer(bands: tuple[str, list[reserved.Held], list[reserved.Held]]):
    """They are a sample: 95 in 100 less two standard errors. How many they are stands on the page of limits."""
    _, _, held_out = bands
    records = sum(one.of for one in held_out)
    least = 0.95 - 2 * (0.95 * 0.05 / records) ** 0.5
    assert sum(one.inside for one in held_out) >= least * records
    assert records > 150
    assert least > 0.9


def test_the_bands_are_narrow_enough_to_say_something(bands: tuple[str, list[reserved.Held], list[reserved.Held]]):
    settings, derived, _ = bands
    assert median(one.width for one in derived) < _WIDTH[settings]
    assert all(one.width > 0 for one in derived)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_figures_are_what_the_records_say(settings: str):
    """To three hundredths: what moves an estimate moves its records' figures. `python -m tests.measured.reserved` writes them."""
    for (engine, stage), found in reserved.derived(settings).items():
        kept = shares_of(RecipeSpec(engine=engine, zero_stage=stage), settings)  # type: ignore[arg-type]
        assert kept is not None
        assert all(abs(one - other) <= 30 for one, other in zip(found, kept, strict=True)), (engine, stage, found, kept)


def test_the_verdict_of_a_job_whose_replay_reserves_more_than_the_card_says_so():
    """Llama 3.1 405B on 1,024 H100: a replay reserves 100.57 GB, of 83.96 that the card has for the allocator."""
    answer = estimate(job(model="llama-3.1-405b", gpus=1024, stage=3, recompute="full", gpu="h100"))
    low, _, high = answer.reserved
    assert low < 100_566_827_008 < high
    assert answer.verdict == "tight"
    assert (answer.allocator_room_bytes or 0) < 100_566_827_008


def test_records_of_rooms_say_in_how_little_a_job_runs():
    found = [shown for record in stored.records(stored.ROOMS) for shown in record.allocator]
    assert len(found) >= 20
    for shown in found:
        assert shown.least_room_bytes is not None
        assert shown.allocated_bytes <= shown.least_room_bytes <= shown.reserved_bytes


def test_a_comparison_says_what_lies_outside_the_band():
    record = stored.records(stored.FRESH)[0]
    found = compare_with_estimate(record)
    assert [one.settings for one in found.reserved] == list(SETTINGS)
    assert found.outside_the_band == tuple(one for one in found.reserved if not one.inside)
    low, _, high = map(int, found.reserved[0].band)
    assert found.reserved[0]._replace(measured=low).inside
    assert not found.reserved[0]._replace(measured=high + 1).inside
    assert not found.reserved[0]._replace(measured=low - 1).inside


@pytest.mark.parametrize(("recompute", "gib"), [("full", 31.02), ("selective", 59.41)])
def test_what_torchtitan_published_of_a_gpu_lies_in_the_band(recompute: str, gib: float):
    """Pull request 165 of March 2024: Llama 2 7B, FSDP2 on 8 H100, 8 x 2,048 tokens, fp32 logits; in % of 95.04 GiB."""
    answer = estimate(
        job(
            model="llama-2-7b", gpus=8, stage=3, engine="fsdp2", micro_batch=8, seq_len=2048, recompute=recompute,
            keep_logits="fp32", optimizer_impl="foreach",
        )
    )  # fmt: skip
    low, expected, high = (int(size) / 2**30 for size in answer.reserved)
    assert low < gib < high
    assert abs(expected / gib - 1) < 0.05

"""ZeRO++'s hierarchical partitioning: bytes held and sent, by hand and by the paper. tests/verify compares with the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.formulas import assert_explained
from zeroplan import Estimate, estimate, job
from zeroplan.errors import SpecError
from zeroplan.spec.recipe import DeepSpeedOptions

#: Options with which no parameter stays gathered between two uses.
STREAMED = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}


def asked(size: int, *, gpus: int = 16, **said: Any) -> Estimate:
    options = DeepSpeedOptions(zero_hpz_partition_size=size, **STREAMED)  # type: ignore[arg-type]
    return estimate(job(model="llama-2-7b", engine="deepspeed", stage=3, gpus=gpus, seq_len=1024, deepspeed=options, **said))


def across(answer: Estimate) -> float:
    """Return the elements sent between all ranks, in units of the model's parameters."""
    calls = [call for call in answer.traffic.collectives if call.group == 16]
    return sum(int(call.volume_elements) for call in calls) / answer.parameters


def test_one_of_three_volumes_stays_within_the_group():
    """ZeRO++ (arXiv:2306.10209), section 3.2: 2 M instead of 3 M elements cross nodes."""
    assert across(asked(1)) == pytest.approx(3, rel=0.01)
    assert across(asked(8)) == pytest.approx(2, rel=0.01)


def test_only_traffic_between_groups_uses_the_slowest_link():
    alone, grouped = asked(1), asked(8)
    assert alone.bytes_on_slowest_link == alone.traffic.total_bytes
    assert grouped.bytes_on_slowest_link / alone.bytes_on_slowest_link == pytest.approx(2 / 3, rel=0.01)


def test_later_micro_batches_gather_within_the_group_too():
    assert across(asked(8, grad_accum=4)) == pytest.approx(1 + 4, rel=0.01)


def test_the_second_partition_is_split_over_the_group():
    alone, grouped = asked(1), asked(8)
    last = [[moment for moment in answer.moments if moment.name == "optimizer step: update"] for answer in (alone, grouped)]
    assert last[1][0].total_bytes - last[0][0].total_bytes == 2 * alone.parameters // 8


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_every_line_is_explained(grad_accum: int):
    assert_explained(asked(8, grad_accum=grad_accum))


@pytest.mark.parametrize(
    ("stage", "options", "says"),
    [
        (2, {}, "needs ZeRO stage 3"),
        (3, {"offload_param": "cpu"}, "with offload is not modelled"),
        (3, {"zero_hpz_partition_size": 3}, "does not divide the 16 ranks"),
    ],
)
def test_impossible_options_are_refused(stage: int, options: dict[str, Any], says: str):
    chosen = DeepSpeedOptions(**{"zero_hpz_partition_size": 8, **options})
    with pytest.raises(SpecError, match=says):
        estimate(job(model="llama-2-7b", engine="deepspeed", stage=stage, gpus=16, deepspeed=chosen))

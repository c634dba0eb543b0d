"""ZeRO-Infinity: bytes in files on NVMe and in buffers, and refusals. tests/verify compares with the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.formulas import assert_explained, assert_symbols_mean_one_thing, evaluate
from zeroplan import Estimate, estimate, job
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, bytes_by_kind
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DeepSpeedOptions, RecipeSpec

BOTH: dict[str, Any] = {"offload_optimizer": "nvme", "offload_param": "nvme"}
IN_PIECES: dict[str, Any] = {"sub_group_size": 100_000_000}
NONE_STAYS: dict[str, Any] = {"offload_param_max_in_cpu": 0, "offload_param_buffer_count": 64}


def asked(*, gpus: int = 8, **options: Any) -> Estimate:
    return estimate(
        job(model="llama-2-7b", engine="deepspeed", stage=3, gpus=gpus, seq_len=1024, deepspeed=DeepSpeedOptions(**options))
    )


def test_weights_gradients_and_both_moments_are_in_files():
    answer = asked(**BOTH)
    share = answer.parameters // 8
    files = bytes_by_kind(answer.nvme)
    small = 65 * 4096 // 8  # norms stay, being under 1 MiB
    assert files[Kind.OPTIMIZER_STATE] == 12 * (share + -share % 256)
    assert files[Kind.GRADIENTS] == 4 * (share - small)
    assert files[Kind.PARAMETERS] == 2 * (share - small)
    assert sum(answer.states_by_kind.values()) == 0


def test_four_buffers_are_as_large_as_the_optimizer_unless_sub_groups_are_small():
    whole, pieces = asked(**BOTH), asked(**BOTH, **IN_PIECES)
    assert bytes_by_kind(whole.host)[Kind.OPTIMIZER_STATE] >= 16 * (whole.parameters // 8)
    assert bytes_by_kind(pieces.host)[Kind.OPTIMIZER_STATE] < 16 * 120_000_000
    assert whole.nvme_bytes == pytest.approx(pieces.nvme_bytes, rel=1e-4)


def test_weights_that_leave_host_memory_go_through_a_buffer_of_the_whole_model():
    assert asked(**BOTH, **IN_PIECES, **NONE_STAYS).host_bytes - asked(**BOTH, **IN_PIECES).host_bytes > 10**9
    written = [line for line in asked(**BOTH, **NONE_STAYS).host if line.kind is Kind.OPTIMIZER_TEMPORARY]
    assert [line.n_bytes for line in written] == [2 * asked(**BOTH).parameters]


def test_gradients_that_are_no_multiple_of_1_kib_stay_on_the_gpu():
    even, odd = asked(offload_optimizer="nvme"), asked(offload_optimizer="nvme", gpus=7)
    staying = [
        max(int(line.n_bytes) for moment in answer.moments for line in moment.lines if "stay on the GPU" in line.reason)
        for answer in (even, odd)
    ]
    assert staying[0] == 4 * 65 * 4096 // 8
    assert staying[1] > 4 * odd.parameters // 8


def test_a_node_has_the_files_of_its_ranks():
    answer = estimate(job(model="llama-2-7b", engine="deepspeed", gpus=8, gpu="h100-sxm", **BOTH))
    assert answer.nvme_bytes_per_node == 8 * answer.nvme_bytes > 0


@pytest.mark.parametrize(
    "options", [BOTH, {**BOTH, **IN_PIECES, **NONE_STAYS}, {"offload_param": "nvme", "offload_optimizer": "cpu"}]
)
def test_every_line_is_explained(options: dict[str, Any]):
    answer = asked(**options)
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)
    for line in (*answer.host, *answer.nvme):
        assert evaluate(line.formula, answer.legend) == line.n_bytes, line


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"stage": 2, "deepspeed": DeepSpeedOptions(offload_optimizer="nvme")}, "needs ZeRO stage 3; use 'cpu'"),
        ({"optimizer": "sgd", "deepspeed": DeepSpeedOptions(offload_optimizer="nvme")}, "use 'adamw' or 'adam'"),
        ({"deepspeed": DeepSpeedOptions(offload_optimizer="nvme", offload_optimizer_buffer_count=3)}, "adamw needs 4"),
        ({"deepspeed": DeepSpeedOptions(**BOTH, **IN_PIECES, offload_optimizer_pipeline_read=True)}, "use 8, or no pipeline"),
        ({"deepspeed": DeepSpeedOptions(**BOTH, offload_param_max_in_cpu=0)}, "buffer_count=5 is too few"),
        (
            {"deepspeed": DeepSpeedOptions(**BOTH, offload_param_buffer_size=10**6)},
            "buffer_size=1,000,000 elements is too small",
        ),
    ],
)
def test_what_fails_in_deepspeed_is_refused(said: dict[str, Any], says: str):
    with pytest.raises(SpecError, match=says):
        estimate(job(**{"model": "llama-2-7b", "engine": "deepspeed", "stage": 3, "gpus": 8, **said}))


def test_reading_the_head_twice_is_refused():
    """In a simulated run DeepSpeed asserts that a parameter is "already assigned swap buffer id"."""
    wide = ModelSpec(
        family="llama", hidden_size=2048, intermediate_size=5632, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, vocab_size=1000,
    )  # fmt: skip
    options = DeepSpeedOptions(
        offload_param="nvme", offload_param_buffer_size=12_000_000, offload_param_buffer_count=6,
        offload_param_max_in_cpu=9_000_000, sub_group_size=4_000_000, stage3_prefetch_bucket_size=5_000_000,
        stage3_max_live_parameters=20_000_000, stage3_max_reuse_distance=20_000_000, stage3_param_persistence_threshold=3000,
    )  # fmt: skip
    recipe = RecipeSpec(engine="deepspeed", zero_stage=3, deepspeed=options)
    with pytest.raises(SpecError, match="reads a parameter ahead that it is reading already"):
        estimate(JobSpec(model=wide, recipe=recipe, mesh=MeshSpec(dp_shard=4), batch=BatchSpec(seq_len=64)))

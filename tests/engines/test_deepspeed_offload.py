"""DeepSpeed with offload: what moves to host memory, and what is refused. tests/verify compares with the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.formulas import assert_explained, assert_symbols_mean_one_thing, evaluate
from zeroplan import Estimate, estimate, job
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.ledger import Kind, Phase, bytes_by_kind
from zeroplan.spec.recipe import DeepSpeedOptions


def asked(stage: int = 2, **said: Any) -> Estimate:
    return estimate(job(model="llama-2-7b", engine="deepspeed", stage=stage, **{"gpus": 8, "seq_len": 1024, **said}))


@pytest.mark.parametrize("stage", [1, 2])
def test_the_optimizer_is_in_host_memory_with_a_copy_of_weights_and_gradients(stage: int):
    share = asked(stage, offload_optimizer="cpu").parameters // 8
    away = asked(stage, offload_optimizer="cpu")
    assert away.states_by_kind[Kind.OPTIMIZER_STATE] == away.states_by_kind[Kind.GRADIENTS] == 0
    host = bytes_by_kind(away.host)
    largest = 2 * 32000 * 4096
    assert host[Kind.OPTIMIZER_STATE] == 12 * share
    assert host[Kind.GRADIENTS] == 4 * share + largest
    assert host[Kind.PARAMETERS] == 2 * share


@pytest.mark.parametrize("stage", [1, 2])
def test_an_offloaded_optimizer_has_contiguous_buckets_whatever_is_asked(stage: int):
    """DeepSpeed 0.19.8, stage_1_and_2.py: ``self.contiguous_gradients = contiguous_gradients or self.cpu_offload``."""
    away = DeepSpeedOptions(offload_optimizer="cpu")
    both = DeepSpeedOptions(contiguous_gradients=False, offload_optimizer="cpu")
    assert asked(stage, deepspeed=both).engine_moments == asked(stage, deepspeed=away).engine_moments


def test_pinned_memory_is_rounded_up_to_powers_of_two():
    share = asked().parameters // 8
    pinned = [4 * share, 4 * share, 2 * share, 2 * 32000 * 4096]
    rounded = sum((1 << (size - 1).bit_length()) - size for size in pinned)
    assert bytes_by_kind(asked(offload_optimizer="cpu").host)[Kind.WORKSPACE] == rounded
    pageable = DeepSpeedOptions(offload_optimizer="cpu", offload_optimizer_pin_memory=False)
    assert Kind.WORKSPACE not in bytes_by_kind(asked(deepspeed=pageable).host)


def test_at_stage_3_all_states_can_be_offloaded():
    away = asked(3, offload_optimizer="cpu", offload_param="cpu")
    assert sum(away.states_by_kind.values()) == 0
    assert away.host_bytes > 20 * away.parameters // 8
    assert [line.kind for line in away.held if line.n_bytes] == [Kind.REDUCE, Kind.GATHER]


def test_a_node_has_the_host_memory_of_its_ranks():
    away = asked(offload_optimizer="cpu", gpus=64, gpu="h100-sxm")
    assert away.host_bytes_per_node == 8 * away.host_bytes
    assert asked(offload_optimizer="cpu").host_bytes_per_node is None


def test_13b_trains_on_one_v100_of_32_gb_only_with_offload():
    """ZeRO-Offload (arXiv:2101.06840) trains 13B parameters on a V100 of 32 GB. Batch and recomputation are our choice.

    Only the training step fits: today's DeepSpeed first copies the share on the GPU, which on one GPU is all weights.
    """
    said: dict[str, Any] = {
        "gpus": 1, "gpu": "v100-sxm-32gb", "params": 13e9, "precision": "fp16-mixed", "recompute": "full", "seq_len": 1024,
    }  # fmt: skip
    said |= {"engine": "deepspeed", "stage": 2}
    away, here = estimate(job(**said, offload_optimizer="cpu")), estimate(job(**said))
    assert trains_in(away) < 32 * 10**9 < trains_in(here)
    assert away.peak.name == "initialisation: weights of the share"
    assert estimate(job(**said | {"gpus": 8}, offload_optimizer="cpu")).fits


def trains_in(answer: Estimate) -> int:
    return max(int(moment.total_bytes) for moment in answer.moments if moment.phase is not Phase.INIT)


@pytest.mark.parametrize(
    ("stage", "said", "says"),
    [
        (2, {"offload_param": "cpu"}, "offload_param needs ZeRO stage 3"),
        (0, {"offload_optimizer": "cpu"}, "needs ZeRO stage 1, 2 or 3"),
        (2, {"offload_optimizer": "cpu", "precision": "bf16"}, "use 'bf16-mixed'"),
        (2, {"offload_optimizer": "cpu", "deepspeed": DeepSpeedOptions(compute_grad_norm=False)}, "refused by DeepSpeed"),
        (3, {"offload_optimizer": "cpu", "engine": "fsdp2"}, "gradients and optimizer together"),
        (3, {"offload_optimizer": "cpu", "engine": "paper"}, "use engine 'deepspeed' or 'fsdp2'"),
    ],
)
def test_impossible_options_are_refused_in_one_line(stage: int, said: dict[str, Any], says: str):
    with pytest.raises(SpecError, match=says) as refused:
        estimate(job(**{"model": "llama-2-7b", "engine": "deepspeed", "stage": stage, "gpus": 8, **said}))
    assert "\n" not in str(refused.value)


def test_fsdp2_takes_both_flags_together():
    away = job(model="llama-2-7b", gpus=8, offload_optimizer="cpu", offload_param="cpu")
    assert (away.recipe.engine, away.recipe.fsdp2.cpu_offload) == ("fsdp2", True)


SMALL = {"reduce_bucket_size": 10**6, "stage3_prefetch_bucket_size": 10**6}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stage 1": (1, {"offload_optimizer": "cpu"}, {}),
    "stage 2, summed in fp32": (2, {"offload_optimizer": "cpu", "grad_accum_dtype": "fp32"}, SMALL),
    "stage 2, small buckets": (2, {"offload_optimizer": "cpu"}, SMALL),
    "stage 3, parameters": (3, {"offload_param": "cpu"}, SMALL),
    "stage 3, both": (3, {"offload_param": "cpu", "offload_optimizer": "cpu"}, SMALL),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grad_accum", [1, 4])
def test_every_line_is_explained(name: str, grad_accum: int):
    stage, offload, sizes = CASES[name]
    away = asked(stage, deepspeed=DeepSpeedOptions(**offload, **sizes), grad_accum=grad_accum, optimizer_impl="forloop")
    assert_explained(away)
    assert_symbols_mean_one_thing(away)
    for line in away.host:
        assert evaluate(line.formula, away.legend) == line.n_bytes, line


@pytest.mark.torch
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_offload_on_cpu_tensors_is_refused(engine: str):
    pytest.importorskip("torch")
    from zeroplan.verify.backends.cpu import measured

    away = job(model="gpt2", gpus=2, stage=3, engine=engine, offload_optimizer="cpu", offload_param="cpu")
    with pytest.raises(MeasurementError, match="use --backend simulate"):
        measured(away, None, rank=0, transport="fake", log=None, steps=1, say=print)  # type: ignore[arg-type]  # refused before

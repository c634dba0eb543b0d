"""Simulations against the estimate, and few layers extended against all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.transformer.tiny_configs import tiny_config
from tests.verify.test_tracker import FSDP2, HALF, TWICE, WEIGHTS, job
from zeroplan.catalog.config import model_from_config
from zeroplan.catalog.model import model
from zeroplan.comparison import compare
from zeroplan.errors import MeasurementError
from zeroplan.estimator import estimate
from zeroplan.measurement import Measurement
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec
from zeroplan.units import MIB

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

SEVEN_B = JobSpec(model=model("llama-2-7b"), mesh=MeshSpec(dp_shard=8), batch=BatchSpec(seq_len=4096))
TOKEN_IDS = 100_000
MIXTRAL = JobSpec(model=model("mixtral-8x7b"), mesh=MeshSpec(dp_shard=64), recipe=RecipeSpec(recompute="full"))
LARGE = {
    "llama 7B on 8": SEVEN_B,
    "llama 7B on 8, stage 2, recomputed": replace(SEVEN_B, recipe=RecipeSpec(zero_stage=2, recompute="full")),
    "llama 405B on 1024": JobSpec(
        model=model("llama-3.1-405b"), mesh=MeshSpec(dp_shard=1024), recipe=RecipeSpec(recompute="full")
    ),
    "llama 70B, 4 replicas of 64, bf16 reduction": JobSpec(
        model=model("llama-3.1-70b"), mesh=MeshSpec(dp_shard=64, dp_replicate=4), recipe=RecipeSpec(fsdp2=HALF)
    ),
    "llama 7B on 8, offloaded": replace(SEVEN_B, recipe=RecipeSpec(fsdp2=Fsdp2Options(cpu_offload=True))),
    "llama 7B on 8, offloaded, bf16, accumulation without reduction": replace(
        SEVEN_B,
        recipe=RecipeSpec(fsdp2=Fsdp2Options(cpu_offload=True), precision="bf16", sync_every_micro_batch=False),
        batch=BatchSpec(seq_len=1024, grad_accum_steps=2),
    ),
    "mixtral on 64": MIXTRAL,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_job_takes_what_is_estimated(name: str):
    from zeroplan.verify.simulate import simulate

    compared = compare(estimate(LARGE[name]), simulate(LARGE[name], all_layers=False))
    assert abs(compared.peak.error) < 0.001, compared
    assert abs(compared.held.difference) < max(0.001 * compared.held.measured, TOKEN_IDS), compared
    assert [(row.what, row.difference) for row in compared.collectives if row.difference] == []


@pytest.mark.parametrize("name", ["llama, uneven shards", "llama, accumulation without reduction", "gpt2", "mixtral"])
def test_a_small_job_takes_what_is_estimated(name: str):
    from zeroplan.verify.simulate import simulate

    compared = compare(estimate(FSDP2[name]), simulate(FSDP2[name]))
    assert compared.agrees(0.005), compared


def tiny(case: str, layers: int) -> JobSpec:
    spec = model_from_config(tiny_config(case))
    return JobSpec(
        model=replace(spec, num_hidden_layers=layers),
        mesh=MeshSpec(dp_shard=4),
        batch=BatchSpec(micro_batch_size=2, seq_len=48),
    )


def deep(made: JobSpec, layers: int) -> JobSpec:
    return replace(made, model=replace(made.model, num_hidden_layers=layers))


MANY_LAYERS = {
    "llama": deep(job(), 9),
    "llama, logits and layers compete": deep(job(vocab=6000, optimizer_impl="fused"), 24),
    "llama, recomputed": deep(job(recompute="full"), 9),
    "llama, one tensor after the other": deep(job(optimizer_impl="forloop"), 8),
    "llama, replicas, accumulation": deep(job(r=2, batch=TWICE), 8),
    "llama, no sync": deep(job(batch=TWICE, sync_every_micro_batch=False), 8),
    "llama, resharded two ways": deep(job(fsdp2=Fsdp2Options(reshard_after_forward=2), batch=WEIGHTS), 8),
    "deepseek, dense first": tiny("deepseek_v3", 9),
    "qwen3 with experts, dense first": tiny("qwen3_moe", 8),
    "gemma2, every second layer with a window": tiny("gemma2", 10),
    "gemma3, every sixth layer without a window": tiny("gemma3_text", 26),
    "gpt-oss": tiny("gpt_oss", 10),
    "gpt2": deep(job("gpt2"), 8),
}


def figures(measured: Measurement) -> object:
    steps = [
        ([(p.phase, p.peak_bytes, p.kinds, p.counted_bytes) for p in step.phases], step.held_bytes, step.held_kinds)
        for step in measured.steps
    ]
    return steps, measured.initialisation.peak_bytes, measured.allocator, sorted(map(str, measured.collectives))


@pytest.mark.parametrize("name", MANY_LAYERS)
def test_few_layers_extended_are_all_layers_to_the_byte(name: str):
    from zeroplan.verify.simulate import simulate

    extended = simulate(MANY_LAYERS[name], all_layers=False)
    assert any("extended" in remark for remark in extended.remarks)
    assert figures(extended) == figures(simulate(MANY_LAYERS[name]))


def test_the_record_says_where_all_layers_were_run():
    from zeroplan.verify.simulate import simulate

    assert not any("extended" in remark for remark in simulate(FSDP2["llama"]).remarks)


def test_the_allocator_is_asked_for_what_was_requested_and_two_workspaces():
    from zeroplan.verify.simulate import simulate

    measured = simulate(SEVEN_B, all_layers=False)
    default, expandable = measured.allocator
    requested = measured.steady.peak.peak_bytes + 2 * 32 * MIB
    assert requested < expandable.allocated_bytes < 1.0001 * requested
    assert expandable.allocated_bytes <= default.allocated_bytes < 1.003 * requested
    assert default.reserved_bytes > default.allocated_bytes
    assert measured.steady.peak.counted_bytes == default.allocated_bytes


def test_every_rank_has_its_own_share():
    from zeroplan.verify.simulate import simulate

    uneven = FSDP2["llama, uneven shards"]
    first, last = (simulate(uneven, rank=rank).steady.held_kinds["optimizer state"] for rank in (0, 2))
    assert last < first


@pytest.mark.parametrize("engine", ["ddp"])
def test_engines_that_read_real_tensors_are_refused(engine: str):
    from zeroplan.verify.simulate import simulate

    with pytest.raises(MeasurementError, match="reads real tensors"):
        simulate(replace(SEVEN_B, recipe=RecipeSpec(engine=engine, zero_stage=1)))

"""Simulated runs against the estimate, and a simulation of few layers, extended, against one of all layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.measured.errors import different_kinds
from tests.transformer.tiny_configs import tiny_config
from tests.verify.watching.test_tracker import DDP, FSDP2, HALF, TWICE, WEIGHTS, job
from zeroplan.catalog.config import model_from_config
from zeroplan.catalog.model import model
from zeroplan.comparison import compare_with_estimate
from zeroplan.engines.ddp.zero_redundancy import fullest_share
from zeroplan.engines.optimizers import implementation
from zeroplan.ledger import Kind
from zeroplan.measurement import Measurement
from zeroplan.report.series.timeline import timeline
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import DdpOptions, Fsdp2Options, RecipeSpec
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
    "llama 8B on 8 in fp32, grouped heads": JobSpec(
        model=model("llama-3.1-8b"), mesh=MeshSpec(dp_shard=8), recipe=RecipeSpec(precision="fp32")
    ),
    "llama 8B on 8 in fp32, grouped heads, recomputed": JobSpec(
        model=model("llama-3.1-8b"), mesh=MeshSpec(dp_shard=8), recipe=RecipeSpec(precision="fp32", recompute="full")
    ),
    "qwen3 8B on 8 in fp32, short sequences": JobSpec(
        model=model("qwen3-8b"), mesh=MeshSpec(dp_shard=8), recipe=RecipeSpec(precision="fp32"), batch=BatchSpec(seq_len=500)
    ),
    "llama 7B on 8 in fp32": replace(SEVEN_B, recipe=RecipeSpec(precision="fp32"), batch=BatchSpec(seq_len=1000)),
    "llama 7B, 2 replicas of 8, accumulation": replace(
        SEVEN_B, mesh=MeshSpec(dp_shard=8, dp_replicate=2), batch=BatchSpec(seq_len=512, grad_accum_steps=2)
    ),
    "llama 7B, 2 replicas of 8, offloaded": replace(
        SEVEN_B,
        recipe=RecipeSpec(fsdp2=Fsdp2Options(cpu_offload=True)),
        mesh=MeshSpec(dp_shard=8, dp_replicate=2),
        batch=BatchSpec(seq_len=512),
    ),
    "llama 3.2 1B on 8, bf16": replace(
        SEVEN_B, model=model("llama-3.2-1b"), recipe=RecipeSpec(precision="bf16"), batch=BatchSpec(seq_len=128)
    ),
    "mixtral on 64": MIXTRAL,
    "llama 7B on 8, DDP": replace(SEVEN_B, recipe=RecipeSpec(engine="ddp", zero_stage=0)),
    "llama 7B on 8, DDP and ZeroRedundancyOptimizer": replace(SEVEN_B, recipe=RecipeSpec(engine="ddp", zero_stage=1)),
    "mixtral on 64, DDP in bf16": replace(MIXTRAL, recipe=RecipeSpec(engine="ddp", zero_stage=0, precision="bf16")),
}


def steps(made: JobSpec) -> int:
    """Return the number of steps to run until the steady state."""
    return 3 if made.recipe.engine == "ddp" else 2


@pytest.mark.parametrize("name", LARGE)
def test_a_large_job_takes_what_is_estimated(name: str):
    from tests.simulated import simulate

    asked = LARGE[name]
    measured = simulate(asked, all_layers=False, steps=steps(asked))
    compared = compare_with_estimate(measured)
    assert abs(compared.peak.error) < 0.001, compared
    assert abs(compared.held.difference) < max(0.001 * compared.held.measured, TOKEN_IDS), compared
    unknown = OF_BUFFERS if asked.recipe.engine == "ddp" else 0
    assert [(row.what, row.difference) for row in compared.collectives if row.difference not in (0, -unknown)] == []
    assert different_kinds(compared) == []
    off = off_by_block(measured.job, measured)
    assert len(off) >= (4 if asked.recipe.engine == "ddp" else 10)
    assert max(map(abs, off)) < 0.003, off


#: Bytes of the rotary frequencies, which DDP broadcasts from rank 0 before every forward. The estimate leaves them out.
OF_BUFFERS = 512


#: Jobs whose peak holds tensors whose kind is known only later: parts of a tied head's gradient, gradients of attention scores.
NAMED_LATE = {
    "fp32, tied head": job(tied=True, vocab=9000, batch=WEIGHTS, precision="fp32"),
    "ddp, fp32, tied head": job(engine="ddp", zero_stage=0, tied=True, vocab=9000, batch=WEIGHTS, precision="fp32"),
    "long, eager attention": job(attention="eager", batch=BatchSpec(micro_batch_size=2, seq_len=256)),
}
SMALL = ("llama, uneven shards", "llama, accumulation without reduction", "gpt2", "mixtral", *DDP, *NAMED_LATE)


@pytest.mark.parametrize("name", SMALL)
def test_a_small_job_takes_what_is_estimated(name: str):
    from tests.simulated import simulate

    asked = (FSDP2 | DDP | NAMED_LATE)[name]
    compared = compare_with_estimate(simulate(asked, steps=steps(asked), rank=fullest(asked)))
    assert compared.agrees(0.005), compared
    assert different_kinds(compared, small=compared.peak.measured // 100) == []


def fullest(made: JobSpec) -> int:
    """Return the rank that the estimate describes, since ZeroRedundancyOptimizer's shares differ."""
    if made.recipe.zero_stage != 1:
        return 0
    impl = implementation(made.recipe.optimizer, made.recipe.optimizer_impl)
    return fullest_share(made.model, made.recipe.optimizer, impl, 4, made.mesh.dp_shard).rank


@pytest.mark.parametrize("said", [{}, {"batch": WEIGHTS}, {"recompute": "full"}])
def test_buckets_weight_casts_and_gradients_have_the_estimated_bytes(said: dict[str, object]):
    from tests.simulated import simulate

    asked = job(engine="ddp", zero_stage=0, optimizer="sgd", ffn=1024, **said)  # so that the backward is the peak
    kinds = {row.what: row for row in compare_with_estimate(simulate(asked, steps=3)).kinds}
    for kind in (Kind.REDUCE, Kind.WEIGHT_CASTS, Kind.GRADIENTS):
        assert kinds[kind].predicted == kinds[kind].measured > 0


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
#: A width of the MLP at which every layer fills buckets of its own, as in large models.
LAYERS_OF_MANY_BUCKETS = 60_000
MANY_LAYERS |= {
    "ddp": deep(job(engine="ddp", zero_stage=0, ffn=LAYERS_OF_MANY_BUCKETS), 9),
    "ddp, bucket views, accumulation": deep(
        job(engine="ddp", zero_stage=0, ffn=LAYERS_OF_MANY_BUCKETS, batch=TWICE, ddp=DdpOptions(gradient_as_bucket_view=True)), 8
    ),
    "ddp, recomputed, accumulation without reduction": deep(
        job("gpt2", engine="ddp", zero_stage=0, ffn=LAYERS_OF_MANY_BUCKETS, batch=TWICE, recompute="full",
            sync_every_micro_batch=False), 8
    ),
}  # fmt: skip
#: Jobs whose buckets or shares do not grow evenly with each layer, so that all layers are run.
NOT_BY_THE_LAYER = {
    "several layers in a bucket": deep(job(engine="ddp", zero_stage=0, ffn=2000), 20),
    "one layer in a bucket, and some": deep(job(engine="ddp", zero_stage=0, ffn=11000), 11),
    "shares of whole tensors": deep(job(engine="ddp", zero_stage=1), 9),
}


def figures(measured: Measurement) -> object:
    steps = [
        ([(p.phase, p.peak_bytes, p.kinds, p.counted_bytes, p.course) for p in step.phases], step.held_bytes, step.held_kinds)
        for step in measured.steps
    ]
    return steps, measured.initialisation.peak_bytes, measured.allocator, sorted(map(str, measured.collectives))


@pytest.mark.parametrize("name", MANY_LAYERS)
def test_few_layers_extended_are_all_layers_to_the_byte(name: str):
    from tests.simulated import simulate

    asked = MANY_LAYERS[name]
    extended = simulate(asked, all_layers=False, steps=steps(asked))
    assert any("extended" in remark for remark in extended.remarks)
    assert figures(extended) == figures(simulate(asked, steps=steps(asked)))
    forward, backward, _ = extended.steady.phases
    for phase in (forward, backward):
        assert phase.course is not None
        assert len(phase.course.blocks) == asked.model.num_hidden_layers
        assert max(phase.course.before_bytes, *phase.course.blocks, phase.course.after_bytes) == phase.peak_bytes


def off_by_block(asked: JobSpec, measured: Measurement) -> list[float]:
    """Return the relative error of the highest moment of each block, and of those before and after the blocks."""
    drawn = timeline(asked, measured)
    predicted = [max(instant.total_bytes for instant in drawn.instants[one.first : one.last + 1]) for one in drawn.levels]
    return [(n_bytes - one.n_bytes) / one.n_bytes for n_bytes, one in zip(predicted, drawn.levels, strict=True)]


@pytest.mark.parametrize("name", NOT_BY_THE_LAYER)
def test_all_layers_are_run_where_they_do_not_add_equal_amounts(name: str):
    from tests.simulated import simulate

    measured = simulate(NOT_BY_THE_LAYER[name], all_layers=False, steps=3)
    assert not any("extended" in remark for remark in measured.remarks)


def test_a_run_of_all_layers_has_no_remark_about_extension():
    from tests.simulated import simulate

    assert not any("extended" in remark for remark in simulate(FSDP2["llama"]).remarks)


def test_the_replayed_allocator_serves_all_requests_and_two_workspaces():
    from tests.simulated import simulate

    measured = simulate(SEVEN_B, all_layers=False)
    default, expandable = measured.allocator
    requested = measured.steady.peak.peak_bytes + 2 * 32 * MIB
    assert requested < expandable.allocated_bytes < 1.0001 * requested
    assert expandable.allocated_bytes <= default.allocated_bytes < 1.003 * requested
    assert default.reserved_bytes > default.allocated_bytes
    assert measured.steady.peak.counted_bytes == default.allocated_bytes


def test_every_rank_has_its_own_share():
    from tests.simulated import simulate

    uneven = FSDP2["llama, uneven shards"]
    first, last = (simulate(uneven, rank=rank).steady.held_kinds["optimizer state"] for rank in (0, 2))
    assert last < first

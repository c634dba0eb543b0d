"""Less common options, optimizers and ranks: the engine's bytes are within 0.01 % of the estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.formulas import assert_explained
from tests.measured.matrix import fullest_rank
from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec, SpecError, estimate
from zeroplan.catalog.model import model
from zeroplan.comparison import compare_with_estimate
from zeroplan.ledger import Kind
from zeroplan.spec.recipe import DdpOptions, Fsdp2Options
from zeroplan.verify.release import installed

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

EXACT = 0.0001


def job(
    name: str, layers: int, *, ranks: int = 2, accumulate: int = 1, tokens: int = 64, sequences: int = 1, **recipe: object
) -> JobSpec:  # fmt: skip
    whole = model(name)
    return JobSpec(
        model=replace(whole, num_hidden_layers=layers),
        recipe=RecipeSpec(**{"engine": "fsdp2", "optimizer": "sgd", "optimizer_impl": "foreach", **recipe}),
        mesh=MeshSpec(dp_shard=ranks),
        batch=BatchSpec(micro_batch_size=sequences, seq_len=tokens, grad_accum_steps=accumulate),
    )


def ddp(name: str = "smollm2-135m", layers: int = 2, *, stage: int = 0, **said: object) -> JobSpec:
    return job(name, layers, **{"engine": "ddp", "zero_stage": stage, "optimizer_impl": "fused", **said})


def with_replicas(alone: JobSpec) -> JobSpec:
    return replace(alone, mesh=replace(alone.mesh, dp_replicate=2))


STEPS, SHARDED_STEPS = DdpOptions(step_in_backward=True), Fsdp2Options(step_in_backward=True)
JOBS = {
    # With one rank, no variable holds the root group's last gradient any more when it is reduced.
    "fsdp2, one rank": job("pythia-160m", 2, ranks=1),
    "fsdp2, one rank, bf16": job("pythia-160m", 2, ranks=1, precision="bf16"),
    # One rank casts its parameters one by one, or with offload fetches and casts them. The forward peaks there.
    "fsdp2, one rank, wide head": job("llama-3.1-8b", 1, ranks=1, tokens=16),
    "fsdp2, one rank, offloaded": job("pythia-160m", 2, ranks=1, tokens=16, fsdp2=Fsdp2Options(cpu_offload=True)),
    # The shard that a block is resharded to lives until it is copied out. The cast for the next gather is as large.
    "fsdp2, resharded two ways, experts": job("deepseek-v3", 5, ranks=4, fsdp2=Fsdp2Options(reshard_after_forward=2)),
    "fsdp2, resharded two ways, bf16": job(
        "qwen3-30b-a3b", 3, ranks=4, precision="bf16", fsdp2=Fsdp2Options(reshard_after_forward=2)
    ),
    # ``reshard_after_forward`` equal to the number of ranks is the same as ``True``.
    "fsdp2, resharded all ways": job("qwen3-30b-a3b", 3, ranks=2, fsdp2=Fsdp2Options(reshard_after_forward=2)),
    # With several sequences attention saves a copy of the v projection's output, which selective recomputation keeps too.
    "one key head, eager attention, selective": job(
        "gemma-3-1b", 7, tokens=512, sequences=3, attention="eager", recompute="selective", precision="bf16"
    ),
    "plain loop": ddp(ranks=1),
    "ddp around one rank": ddp(ranks=1, ddp=DdpOptions(wrap_one_rank=True)),
    # Each weight is stepped as its gradient arrives: under autocast once the 16-bit one is freed, if tied once both are summed.
    "plain loop, step in the backward": ddp("llama-3.1-8b", 2, ranks=1, optimizer="adamw", optimizer_impl="foreach", ddp=STEPS),
    "plain loop, step in the backward, tied": ddp("gpt2", ranks=1, optimizer="adam", optimizer_impl="foreach", ddp=STEPS),
    # An optimizer of its own for every weight also has tables of codes of its own.
    "plain loop, step in the backward, 8 bits": ddp("llama-3.1-8b", 2, ranks=1, optimizer="adamw-8bit", ddp=STEPS),
    # Hooks step while the reduced shard, the last gradient of the root group and one parameter's temporaries are alive.
    "fsdp2, step in the backward": job("llama-3.1-8b", 2, tokens=16, optimizer="adamw", fsdp2=SHARDED_STEPS),
    "fsdp2, step in the backward, a block is the peak": job(
        "mixtral-8x7b", 2, tokens=16, optimizer="adamw", precision="fp32", fsdp2=SHARDED_STEPS
    ),
    "fsdp2, step in the backward, ends apart, fused": job(
        "llama-3.1-8b",
        3,
        ranks=4,
        precision="bf16",
        optimizer="adamw",
        optimizer_impl="fused",
        loss="chunked",
        fsdp2=replace(SHARDED_STEPS, ends_apart=True),
    ),
    "fsdp2, step in the backward, one rank, for-loop": job(
        "qwen3-30b-a3b", 2, ranks=1, optimizer="adamw", optimizer_impl="forloop", fsdp2=SHARDED_STEPS
    ),
    # An all-reduce over replicas holds its buffer until the backward ends, after the step has dropped the gradient.
    "fsdp2, step in the backward, replicas": with_replicas(
        job("smollm2-135m", 6, tokens=16, optimizer="adamw", fsdp2=SHARDED_STEPS)
    ),
    "fsdp2, step in the backward, replicas, bf16": with_replicas(
        job("llama-3.1-8b", 3, ranks=4, precision="bf16", optimizer="adamw", loss="chunked", fsdp2=SHARDED_STEPS)
    ),
    "fsdp2, step in the backward, replicas, reduced in bf16": with_replicas(
        job("llama-3.1-8b", 4, tokens=16, optimizer="adamw", fsdp2=replace(SHARDED_STEPS, reduce_dtype="param"))
    ),
    "ddp, stage 1 of one rank": ddp(ranks=1, stage=1),
    "ddp, unused parameters looked for": ddp(precision="fp32", tokens=1024, ddp=DdpOptions(find_unused_parameters=True)),
    "ddp, unused parameters looked for, logits kept": ddp(
        precision="fp32", tokens=1024, keep_logits=True, ddp=DdpOptions(find_unused_parameters=True)
    ),
    "ddp, fused adagrad": ddp(optimizer="adagrad"),
    "ddp, adafactor": ddp(optimizer="adafactor", optimizer_impl="forloop"),
    "ddp, adafactor, foreach": ddp(optimizer="adafactor", optimizer_impl="foreach"),
    "ddp, stage 1, another rank takes more in the step": ddp(
        "qwen3-30b-a3b", 1, stage=1, optimizer="adamw", optimizer_impl="forloop"
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_engine_takes_what_is_estimated(name: str):
    from tests.simulated import simulate

    asked = JOBS[name]
    if asked.recipe.engine == "fsdp2" and installed() == "2.15":
        pytest.skip("FSDP2 of torch 2.15 holds otherwise")
    found = compare_with_estimate(simulate(asked, rank=fullest_rank(asked), steps=3))
    assert abs(found.peak.error) < EXACT, found.peak
    assert all(abs(row.difference) <= EXACT * found.peak.measured for row in found.phases), found.phases
    assert not [row for row in found.collectives if row.difference]


def test_without_the_wrapper_one_rank_has_no_buckets():
    plain, wrapped = (estimate(JOBS[name]) for name in ("plain loop", "ddp around one rank"))
    assert wrapped.peak_bytes - plain.peak_bytes == 4 * plain.parameters
    (note,) = [note for note in plain.notes if "plain loop" in note]
    assert f"DDP adds {4 * plain.parameters / 2**30:.2f} GiB" in note
    assert not any("plain loop" in note for note in wrapped.notes)


def test_a_step_in_the_backward_needs_no_more_than_one_gradient_at_a_time():
    plain = estimate(replace_ddp("plain loop", DdpOptions())).peak_bytes
    stepping = estimate(replace_ddp("plain loop", STEPS))
    assert stepping.peak_bytes < plain
    assert not any(line.kind is Kind.GRADIENTS for line in stepping.states)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mesh": MeshSpec(dp_shard=2)}, "ranks in DDP is not modelled; use one GPU"),
        ({"batch": BatchSpec(seq_len=64, grad_accum_steps=2)}, "gradient accumulation is not modelled; use one micro-batch"),
        ({"recipe": RecipeSpec(engine="deepspeed", ddp=STEPS)}, "engine 'deepspeed' is not modelled; use engine 'ddp'"),
        (
            {"recipe": RecipeSpec(engine="ddp", zero_stage=0, optimizer="muon", ddp=STEPS)},
            "'muon' is not modelled; use one of",
        ),
    ],
)
def test_a_step_in_the_backward_is_refused_where_it_is_not_modelled(changed: dict[str, object], said: str):
    with pytest.raises(SpecError, match=f"ddp.step_in_backward with .*{said}"):
        replace(JOBS["plain loop, step in the backward"], **changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mesh": MeshSpec(dp_shard=2, tp=2)}, "ranks that split the model or a sequence is not modelled"),
        ({"recipe": RecipeSpec(engine="fsdp2", fsdp2=replace(SHARDED_STEPS, cpu_offload=True))}, "offload to host memory"),
        ({"recipe": RecipeSpec(engine="fsdp2", fsdp2=replace(SHARDED_STEPS, torch="2.15"))}, "torch 2.15"),
        ({"recipe": RecipeSpec(engine="fsdp2", fsdp2=SHARDED_STEPS, optimizer="muon")}, "'muon' is not modelled"),
    ],
)
def test_a_step_in_fsdp2s_backward_is_refused_where_it_is_not_modelled(changed: dict[str, object], said: str):
    with pytest.raises(SpecError, match=f"fsdp2.step_in_backward with .*{said}"):
        replace(JOBS["fsdp2, step in the backward"], **changed)


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("fsdp2, step in the backward")])
def test_a_column_of_ranks_that_step_in_the_backward_equals_its_points(name: str):
    from tests.engines.columns import Columns, assert_is_its_points
    from zeroplan.engines.fsdp2 import account

    asked = JOBS[name]
    points = [(MeshSpec(dp_shard=ranks), asked.batch) for ranks in (2, 3, 8)]
    whole = Columns(points)
    column = account(asked.model, asked.recipe, whole, whole)  # type: ignore[arg-type]
    assert_is_its_points(column, [account(asked.model, asked.recipe, *point) for point in points])
    assert_explained(estimate(asked))


def replace_ddp(name: str, options: DdpOptions) -> JobSpec:
    return replace(JOBS[name], recipe=replace(JOBS[name].recipe, ddp=options))


def test_a_note_names_the_rank_that_the_figures_describe():
    asked = JOBS["ddp, stage 1, another rank takes more in the step"]
    (note,) = [note for note in estimate(asked).notes if "whole tensors" in note]
    assert "rank 0 holds the most optimizer state, and rank 1 needs the most in the optimizer step" in note
    assert fullest_rank(asked) == 1


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_later_steps_equal_the_recorded_one(engine: str):
    """Records keep FSDP2's second step and DDP's third, which are the first of the steady state."""
    from tests.simulated import simulate

    stage, kept = (0, 2) if engine == "ddp" else (3, 1)
    asked = job(
        "smollm2-135m", 2, accumulate=3, engine=engine, zero_stage=stage, optimizer="adamw", sync_every_micro_batch=False
    )
    steps = simulate(asked, steps=5).steps
    assert len({step.peak.peak_bytes for step in steps[kept:]}) == 1
    assert len({step.held_bytes for step in steps[kept:]}) == 1

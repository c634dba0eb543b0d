"""Options, optimizers and ranks that are not the usual ones: the engine takes what is estimated, to a ten-thousandth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.measured.matrix import fullest_rank
from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec, estimate
from zeroplan.catalog.model import model
from zeroplan.comparison import compare_with_estimate
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


JOBS = {
    # With one rank nothing names the root group's last gradient any more when it is reduced.
    "fsdp2, one rank": job("pythia-160m", 2, ranks=1),
    "fsdp2, one rank, bf16": job("pythia-160m", 2, ranks=1, precision="bf16"),
    # It casts its parameters one after the other, or fetches and casts them, which is the peak of the forward.
    "fsdp2, one rank, wide head": job("llama-3.1-8b", 1, ranks=1, tokens=16),
    "fsdp2, one rank, offloaded": job("pythia-160m", 2, ranks=1, tokens=16, fsdp2=Fsdp2Options(cpu_offload=True)),
    # A block's smaller shard is there until it is copied out, and what is cast for the next gather is as large.
    "fsdp2, resharded two ways, experts": job("deepseek-v3", 5, ranks=4, fsdp2=Fsdp2Options(reshard_after_forward=2)),
    "fsdp2, resharded two ways, bf16": job(
        "deepseek-v3", 5, ranks=4, precision="bf16", fsdp2=Fsdp2Options(reshard_after_forward=2)
    ),
    # As many ways as there are ranks is ``True``.
    "fsdp2, resharded all ways": job("qwen3-30b-a3b", 3, ranks=2, fsdp2=Fsdp2Options(reshard_after_forward=2)),
    # Several sequences: selective recomputation keeps the v projection's output, of which attention saves a copy.
    "one key head, eager attention, selective": job(
        "gemma-3-1b", 7, tokens=512, sequences=3, attention="eager", recompute="selective", precision="bf16"
    ),
    "plain loop": ddp(ranks=1),
    "ddp around one rank": ddp(ranks=1, ddp=DdpOptions(wrap_one_rank=True)),
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


def test_the_rank_that_the_figures_are_of_is_named():
    asked = JOBS["ddp, stage 1, another rank takes more in the step"]
    (note,) = [note for note in estimate(asked).notes if "whole tensors" in note]
    assert "rank 0 holds the most optimizer state, and rank 1 needs the most in the optimizer step" in note
    assert fullest_rank(asked) == 1


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_later_step_is_like_the_one_that_is_kept(engine: str):
    """Records keep the second step of FSDP2 and the third of DDP: the steady state."""
    from tests.simulated import simulate

    stage, kept = (0, 2) if engine == "ddp" else (3, 1)
    asked = job(
        "smollm2-135m", 2, accumulate=3, engine=engine, zero_stage=stage, optimizer="adamw", sync_every_micro_batch=False
    )
    steps = simulate(asked, steps=5).steps
    assert len({step.peak.peak_bytes for step in steps[kept:]}) == 1
    assert len({step.held_bytes for step in steps[kept:]}) == 1

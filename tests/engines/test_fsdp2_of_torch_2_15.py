"""Estimates of FSDP2 in torch 2.15, without a run: differences from 2.13, formulas, and columns of jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.causal_models import tiny_spec
from tests.expert_jobs import JOBS
from tests.formulas import assert_explained
from zeroplan import estimate
from zeroplan.engines import fsdp2
from zeroplan.ledger import Kind, peak_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec

BUFFERS = (Kind.GATHER, Kind.UNSHARDED_PARAMETERS)
#: Recipes that take different paths through the code that torch 2.15 changed.
RECIPES = {
    "plain": RecipeSpec(),
    "stage 2, recomputed": RecipeSpec(zero_stage=2, recompute="full"),
    "resharded two ways": RecipeSpec(fsdp2=Fsdp2Options(reshard_after_forward=2)),
    "offloaded": RecipeSpec(fsdp2=Fsdp2Options(cpu_offload=True)),
    "no sync": RecipeSpec(sync_every_micro_batch=False),
    "no sync, reduced in bf16": RecipeSpec(sync_every_micro_batch=False, fsdp2=Fsdp2Options(reduce_dtype="param")),
    "loss in chunks": RecipeSpec(loss="chunked"),
    "loss in chunks, no sync": RecipeSpec(loss="chunked", sync_every_micro_batch=False),
}
MODEL = replace(tiny_spec("llama", ffn=176, vocab=250, heads=4, kv_heads=2, head_dim=16, layers=5), tie_word_embeddings=True)


def under(job: JobSpec, torch: str) -> JobSpec:
    return replace(job, recipe=replace(job.recipe, fsdp2=replace(job.recipe.fsdp2, torch=torch)))


def tiny(name: str, torch: str = "2.15", *, micro_batches: int = 1, **mesh: int) -> JobSpec:
    batch = BatchSpec(micro_batch_size=2, seq_len=64, grad_accum_steps=micro_batches)
    return under(JobSpec(model=MODEL, recipe=RECIPES[name], mesh=MeshSpec(**{"dp_shard": 4, **mesh}), batch=batch), torch)


@pytest.mark.parametrize("name", RECIPES)
def test_formulas_give_the_bytes_of_their_lines(name: str):
    for micro_batches in (1, 2, 3):
        assert_explained(estimate(tiny(name, micro_batches=micro_batches)))
    if name in ("plain", "stage 2, recomputed"):
        assert_explained(estimate(tiny(name, dp_shard=2, tp=2)))


@pytest.mark.parametrize("name", ["plain", "stage 2, recomputed", "offloaded"])
def test_formulas_of_a_pipeline_stage_give_the_bytes_of_their_lines(name: str):
    for stage in (0, 1):
        assert_explained(estimate(tiny(name, micro_batches=4, pp=2), pipeline_rank=stage))


def test_a_stage_holds_no_gradient_while_it_is_reduced():
    """In the last rank's root group torch 2.13 still holds the head's gradient, in fp32, beside the reduction's output."""

    def highest(torch: str, name: str) -> int:
        moments = estimate(tiny("plain", torch, micro_batches=4, pp=2), pipeline_rank=1).moments
        return max(int(one.total_bytes) for one in moments if one.name == name)

    head, norm, n = 250 * 64, 64, 4
    made, output = 4 * (head + norm), 4 * (63 * n * 64 + norm) // n
    assert highest("2.13", "reducing the root group") - highest("2.15", "reducing the root group") == (
        max(made, output + 4 * head) - max(made, output)
    )


@pytest.mark.parametrize("name", [name for name in JOBS if "fewer" not in name])
def test_formulas_of_experts_give_the_bytes_of_their_lines(name: str):
    assert_explained(estimate(under(JOBS[name], "2.15")))


@pytest.mark.parametrize("name", RECIPES)
def test_a_column_is_its_jobs(name: str):
    shards, micro = np.array((4, 8)), np.array((1, 3))

    def peaks(mesh: object, batch: object) -> object:
        return peak_bytes(fsdp2.account(MODEL, tiny(name).recipe, mesh, batch).moments)  # type: ignore[arg-type]

    def numbers(n: object, steps: object) -> tuple[object, object]:
        mesh, batch = MeshSpec(dp_shard=4), BatchSpec(micro_batch_size=2, seq_len=64)
        for one, field, value in ((mesh, "dp_shard", n), (batch, "grad_accum_steps", steps)):
            object.__setattr__(one, field, value)
        return mesh, batch

    whole = np.broadcast_to(peaks(*numbers(shards, micro)), 2)
    assert [int(one) for one in whole] == [peaks(*numbers(int(n), int(m))) for n, m in zip(shards, micro, strict=True)]


def test_the_block_before_is_freed_before_a_block_is_copied_out():
    """In torch 2.13 the block before stays while a block is copied out: three times its weights. In 2.15: twice and a cast."""

    def gathered(torch: str) -> int:
        moments = estimate(tiny("plain", torch)).moments
        entering = ("forward: gathering block 2 of 5", "forward: unsharding block 2 of 5")
        return max(
            sum(int(line.n_bytes) for line in one.lines if "P_dense" in line.formula and line.kind in BUFFERS)
            for one in moments
            if one.name in entering
        )

    attention, mlp, norms = 64 * 64 + 2 * 64 * 32 + 64 * 64, 3 * 64 * 176, 2 * 64
    block = 2 * (attention + mlp + norms)
    assert (gathered("2.13"), gathered("2.15")) == (3 * block, 2 * block + block // 4)
    assert estimate(tiny("plain", "2.13")).notes == estimate(replace(tiny("plain"), recipe=RecipeSpec())).notes


def test_a_resharded_block_counts_its_input_once():
    """In fp32 the first norm saves the block's input itself, in mixed precision a copy in fp32."""

    def inputs(precision: str) -> list[str]:
        job = tiny("resharded two ways")
        moments = estimate(replace(job, recipe=replace(job.recipe, precision=precision))).moments
        cut = next(one for one in moments if one.name == "forward: resharding block 5 of 5")
        names = ("block input", "norm before attention: its input in fp32")
        return [line.reason for line in cut.lines if line.reason in names]

    assert inputs("fp32") == ["block input"]
    assert inputs("bf16-mixed") == ["block input", "norm before attention: its input in fp32"]

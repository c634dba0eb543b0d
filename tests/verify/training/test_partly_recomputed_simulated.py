"""Recomputation of only the first blocks, simulated with transformers' own checkpointing: the run is as estimated."""

from __future__ import annotations

import pytest

from tests.causal_models import tiny_spec
from tests.simulated import simulate
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Engine, RecipeSpec, Recompute, Stage

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TOKENS = (2, 256)
LAYERS = 4


def asked(
    family: str, engine: Engine, stage: Stage, layers: int, recompute: Recompute = "full", *, accum: int = 1, **recipe: object
) -> JobSpec:
    return JobSpec(
        model=tiny_spec(family, heads=4, kv_heads=2, head_dim=32, ffn=352, vocab=300, layers=LAYERS),
        recipe=RecipeSpec(engine=engine, zero_stage=stage, recompute=recompute, recompute_layers=layers, **recipe),  # type: ignore[arg-type]
        mesh=MeshSpec(dp_shard=4),
        batch=BatchSpec(micro_batch_size=TOKENS[0], seq_len=TOKENS[1], grad_accum_steps=accum),
    )


JOBS = {
    "llama, FSDP2 3": asked("llama", "fsdp2", 3, 1),
    "gpt2, FSDP2 2, accumulating": asked("gpt2", "fsdp2", 2, 3, accum=2),
    "mixtral, FSDP2 3": asked("mixtral", "fsdp2", 3, 2, precision="bf16"),
    "qwen3, FSDP2 3, selective": asked("qwen3", "fsdp2", 3, 2, "selective"),
    "llama, FSDP2 3, masks written out": asked("llama", "fsdp2", 3, 2, attention="eager"),
    "llama, DDP": asked("llama", "ddp", 0, 2),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_gpu_holds_what_is_estimated(name: str):
    job = JOBS[name]
    compared = compare_with_estimate(simulate(job, steps=3 if job.recipe.engine == "ddp" else 2))
    ids_and_tables = 20 * TOKENS[0] * TOKENS[1]
    for row in (compared.peak, compared.held, *compared.phases):
        assert abs(row.difference) <= ids_and_tables, row
    assert not any(row.difference for row in compared.collectives)

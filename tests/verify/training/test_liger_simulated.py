"""Liger's own modules, simulated: the peak is as estimated. Kernel launches do nothing on fake tensors."""

from __future__ import annotations

import pytest

from tests.causal_models import tiny_spec
from tests.simulated import simulate
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Engine, RecipeSpec, Recompute, Stage

pytest.importorskip("torch")
pytest.importorskip("liger_kernel")
pytestmark = pytest.mark.torch

A_FEW_NUMBERS = 20 * 2 * 512
"""Bytes of ids and tables."""


def asked(family: str, engine: Engine, stage: Stage, recompute: Recompute, parts: str) -> JobSpec:
    shape = tiny_spec(family, heads=4, kv_heads=2, head_dim=32, ffn=352, vocab=300, layers=3)
    recipe = RecipeSpec(engine=engine, zero_stage=stage, recompute=recompute, fused_kernels=parts)
    return JobSpec(model=shape, recipe=recipe, mesh=MeshSpec(dp_shard=4), batch=BatchSpec(micro_batch_size=2, seq_len=512))


EVERY = "liger-rms-norm,liger-swiglu,rope"
JOBS = {
    "llama, FSDP2": asked("llama", "fsdp2", 3, "none", EVERY),
    "llama, DDP, norms": asked("llama", "ddp", 0, "none", "liger-rms-norm"),
    "qwen3, FSDP1, recomputed": asked("qwen3", "fsdp1", 3, "full", EVERY),
    "qwen2, DDP, gated product": asked("qwen2", "ddp", 0, "none", "liger-swiglu"),
}


@pytest.mark.parametrize("name", JOBS)
def test_ligers_modules_take_what_is_estimated(name: str):
    job = JOBS[name]
    compared = compare_with_estimate(simulate(job, steps=3 if job.recipe.engine == "ddp" else 2))
    assert abs(compared.peak.difference) <= A_FEW_NUMBERS

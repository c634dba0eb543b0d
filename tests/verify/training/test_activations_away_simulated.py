"""Activation offload, simulated with torch's own wrapper around blocks: GPU and host memory are as estimated."""

from __future__ import annotations

import pytest

from tests.causal_models import tiny_spec
from tests.simulated import simulate
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Engine, Fsdp2Options, RecipeSpec, Recompute, Stage

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

A_FEW_NUMBERS = 1024
"""Bytes of scalars and counters, on either side."""
TOKENS = (2, 512)


def asked(family: str, recipe: RecipeSpec, *, layers: int = 4, accum: int = 1) -> JobSpec:
    shape = tiny_spec(family, heads=4, kv_heads=2, head_dim=32, ffn=352, vocab=300, layers=layers)
    batch = BatchSpec(micro_batch_size=TOKENS[0], seq_len=TOKENS[1], grad_accum_steps=accum)
    return JobSpec(model=shape, recipe=recipe, mesh=MeshSpec(dp_shard=4), batch=batch)


def recipe(engine: Engine = "fsdp2", stage: Stage = 3, recompute: Recompute = "full", **others: object) -> RecipeSpec:
    return RecipeSpec(engine=engine, zero_stage=stage, recompute=recompute, offload_activations=True, **others)  # type: ignore[arg-type]


JOBS = {
    "llama, FSDP2 3": asked("llama", recipe()),
    "llama, FSDP2 2, selective, fp32": asked("llama", recipe(stage=2, recompute="selective", precision="fp32")),
    "llama, states offloaded too, accumulating": asked("llama", recipe(fsdp2=Fsdp2Options(cpu_offload=True)), accum=2),
    "qwen3, FSDP2 3, selective": asked("qwen3", recipe(recompute="selective", precision="bf16")),
    "qwen3, DDP": asked("qwen3", recipe("ddp", 0)),
    "olmo2, FSDP2 3, which casts rotary tables": asked("olmo2", recipe()),
    "ernie4_5, FSDP2 3, selective": asked("ernie4_5", recipe(recompute="selective")),
    "gpt2, FSDP2 2": asked("gpt2", recipe(stage=2)),
    "gpt2, DDP, selective, fp32": asked("gpt2", recipe("ddp", 0, "selective", precision="fp32")),
    "llama, FSDP2 3, nothing recomputed": asked("llama", recipe(recompute="none")),
    "llama, FSDP2 2, nothing recomputed, eager, fp32": asked(
        "llama", recipe(stage=2, recompute="none", attention="eager", precision="fp32")
    ),
    "olmo2, states offloaded too, nothing recomputed": asked(
        "olmo2", recipe(recompute="none", fsdp2=Fsdp2Options(cpu_offload=True)), accum=2
    ),
    "qwen3, DDP, nothing recomputed": asked("qwen3", recipe("ddp", 0, "none")),
    "gpt2, FSDP1, nothing recomputed": asked("gpt2", recipe("fsdp1", 3, "none")),
    "phi3, FSDP1 2, nothing recomputed": asked("phi3", recipe("fsdp1", 2, "none", precision="bf16")),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_gpu_and_the_host_hold_what_is_estimated(name: str):
    job = JOBS[name]
    measured = simulate(job, steps=3 if job.recipe.engine == "ddp" else 2)
    compared = compare_with_estimate(measured)
    ids_and_tables = 20 * TOKENS[0] * TOKENS[1]
    assert abs(compared.peak.difference) <= ids_and_tables
    assert abs(compared.held.difference) <= ids_and_tables
    assert compared.host is not None
    assert abs(compared.host.difference) <= A_FEW_NUMBERS


def test_few_layers_extended_give_the_host_memory_of_all_layers():
    job = asked("llama", recipe(), layers=12)
    extended, whole = simulate(job, steps=2, all_layers=False), simulate(job, steps=2)
    assert any("extended" in remark for remark in extended.remarks)
    assert extended.steady.host_bytes == whole.steady.host_bytes
    assert extended.steady.peak.peak_bytes == whole.steady.peak.peak_bytes

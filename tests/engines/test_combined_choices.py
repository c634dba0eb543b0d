"""Combinations: partial recomputation with parallelism, adapters or frozen blocks; pipeline stages with other cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.causal_models import tiny_spec
from tests.simulated import simulate
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec

pytestmark = pytest.mark.torch
TOKENS = BatchSpec(micro_batch_size=2, seq_len=64)
FOUR = replace(TOKENS, grad_accum_steps=4)
#: The random state of attention, the loss, and counters of the optimizer step. [bytes]
SCALARS_BYTES = 1700


def job(
    family: str = "llama", *, layers: int = 6, batch: BatchSpec = TOKENS, adapter: AdapterSpec | None = None,
    frozen: FrozenSpec | None = None, tied: bool = False, mesh: dict[str, int] | None = None, **recipe: object,
) -> JobSpec:  # fmt: skip
    model = tiny_spec(family, ffn=176, vocab=250, heads=4, kv_heads=2, head_dim=16, layers=layers)
    model = replace(model, tie_word_embeddings=tied, adapter=adapter, frozen=frozen)
    said = {"engine": "fsdp2", "zero_stage": 3, "recompute": "full", "recompute_layers": 3, **recipe}
    return JobSpec(model=model, recipe=RecipeSpec(**said), mesh=MeshSpec(**{"dp_shard": 4, **(mesh or {})}), batch=batch)


def staged(**said: object) -> JobSpec:
    return job(batch=FOUR, mesh={"pp": 2}, **said)  # type: ignore[arg-type]


LORA, TWO_FROZEN = AdapterSpec(rank=8), FrozenSpec(layers=2)
PLAIN = {"recompute": "none", "recompute_layers": None}
CASES = {
    "tensor parallel": job(mesh={"tp": 2}),
    "tensor parallel, by operation": job(mesh={"tp": 2}, recompute="selective"),
    "context parallel": job(mesh={"cp": 2}),
    "expert parallel": job("mixtral", mesh={"ep": 2}),
    "lora": job(adapter=LORA),
    "lora, by operation": job(adapter=LORA, recompute="selective"),
    "lora, ddp": job(adapter=LORA, engine="ddp", zero_stage=0),
    "lora, on the host, one rank": job(adapter=LORA, fsdp2=Fsdp2Options(cpu_offload=True), mesh={"dp_shard": 1}, **PLAIN),
    "frozen blocks": job(frozen=TWO_FROZEN),
    "frozen blocks, ddp": job(frozen=TWO_FROZEN, engine="ddp", zero_stage=0),
    "stages": staged(recompute_layers=2),
    "stages, by operation": staged(recompute_layers=4, recompute="selective"),
    "stages that are split": job(batch=FOUR, mesh={"pp": 2, "tp": 2}, recompute_layers=2),
    "stages, interleaved": staged(layers=8, zero_stage=2, recompute_layers=2, pipeline_schedule="interleaved-1f1b"),
    "stages with a tied head": staged(tied=True, **PLAIN),
    "stages cut by hand": staged(pipeline_layers="1,5", **PLAIN),
    "stages cut by hand, interleaved": staged(
        layers=8, zero_stage=2, pipeline_layers="1,2,2,3", pipeline_schedule="interleaved-1f1b"
    ),
    "stages cut by hand, in a v": staged(layers=8, zero_stage=2, pipeline_layers="2,2,3,1", pipeline_schedule="zbv", **PLAIN),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_takes_what_the_engine_takes(name: str) -> None:
    pytest.importorskip("transformers")
    asked = CASES[name]
    if asked.model.adapter is not None:
        pytest.importorskip("peft")
    each = asked.mesh.dp_shard * asked.mesh.cp * asked.mesh.tp
    for stage in range(asked.mesh.pp):
        which = {} if asked.mesh.pp == 1 else {"rank": stage * each}
        found = compare_with_estimate(simulate(asked, steps=3, **which))
        for row in (found.peak, *found.phases, found.held):
            assert abs(row.difference) <= SCALARS_BYTES, (stage, row)
        for row in found.collectives:
            assert row.difference == 0, (stage, row)

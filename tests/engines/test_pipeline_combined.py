"""Pipelines combined with options of FSDP2: every rank against a simulation with torch's own schedules and FSDP2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.causal_models import tiny_spec
from tests.formulas import assert_explained
from tests.simulated import simulate
from zeroplan import estimate
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec

#: The random state of attention, losses and other scalars. [bytes]
SCALARS_BYTES = 1000
TOKENS = BatchSpec(micro_batch_size=2, seq_len=64, grad_accum_steps=4)
#: So few tokens that weights and gradients take most memory.
WEIGHTS = BatchSpec(micro_batch_size=1, seq_len=4, grad_accum_steps=4)

EIGHT = replace(WEIGHTS, seq_len=8)


def job(
    family: str = "llama", *, layers: int = 6, vocab: int = 250, batch: BatchSpec = TOKENS, adapter: AdapterSpec | None = None,
    frozen: FrozenSpec | None = None, mesh: dict[str, int] | None = None, options: dict[str, object] | None = None,
    **recipe: object,
) -> JobSpec:  # fmt: skip
    model = tiny_spec(family, ffn=176, vocab=vocab, heads=4, kv_heads=2, head_dim=16, layers=layers)
    model = replace(model, tie_word_embeddings=False, adapter=adapter, frozen=frozen)
    said = {"engine": "fsdp2", "zero_stage": 3, **recipe}
    return JobSpec(
        model=model, recipe=RecipeSpec(fsdp2=Fsdp2Options(**(options or {})), **said), batch=batch,
        mesh=MeshSpec(**{"pp": 2, "dp_shard": 2, **(mesh or {})}),
    )  # fmt: skip


INTERLEAVED = {"layers": 8, "pipeline_schedule": "interleaved-1f1b"}
ON_HOST = {"options": {"cpu_offload": True}}
AWAY = {"offload_activations": True, "recompute": "full"}
APART = {"options": {"ends_apart": True}}
LORA = AdapterSpec(rank=8)
CASES = {
    "on the host": job(**ON_HOST),
    "on the host, weights": job(batch=WEIGHTS, **ON_HOST),
    "on the host, replicas": job(batch=WEIGHTS, mesh={"dp_replicate": 2}, **ON_HOST),
    "on the host, in fp32": job(batch=WEIGHTS, zero_stage=2, precision="fp32", **ON_HOST),
    "on the host, reduced in bf16": job(batch=WEIGHTS, options={"cpu_offload": True, "reduce_dtype": "param"}),
    "on the host, interleaved": job(batch=WEIGHTS, **INTERLEAVED, **ON_HOST),
    "on the host, in a v": job(layers=8, batch=WEIGHTS, zero_stage=2, pipeline_schedule="zbv", **ON_HOST),
    "inputs away": job(**AWAY),
    "inputs away, gpipe": job(pipeline_schedule="gpipe", **AWAY),
    "inputs away, interleaved": job(**INTERLEAVED, **AWAY),
    "inputs away, by operation": job(zero_stage=2, offload_activations=True, recompute="selective"),
    "inputs away, in fp32": job(precision="fp32", **AWAY),
    "inputs away, all on the host": job(**AWAY, **ON_HOST),
    "inputs away, experts": job("mixtral", **AWAY),
    "lora": job(adapter=LORA),
    "lora, stage 2": job(adapter=LORA, zero_stage=2, batch=WEIGHTS),
    "lora, recomputed": job(adapter=LORA, recompute="full"),
    "lora of some layers, interleaved": job("qwen3", adapter=AdapterSpec(rank=4, targets="q_proj,v_proj"), **INTERLEAVED),
    "lora, gpipe on the host": job(adapter=LORA, batch=WEIGHTS, pipeline_schedule="gpipe", **ON_HOST),
    "lora, inputs away": job(adapter=LORA, **AWAY),
    "lora, replicas in fp32": job(adapter=LORA, batch=WEIGHTS, precision="fp32", mesh={"dp_replicate": 2}),
    "lora, ends apart": job(adapter=LORA, vocab=3000, batch=WEIGHTS, recompute="full", **APART),
    "frozen blocks": job(frozen=FrozenSpec(layers=2)),
    "frozen blocks and embedding, stage 2": job(frozen=FrozenSpec(parts="embedding", layers=2), zero_stage=2),
    "frozen blocks and embedding, recomputed": job(frozen=FrozenSpec(parts="embedding", layers=2), recompute="full"),
    "frozen head": job(frozen=FrozenSpec(parts="head"), vocab=3000, batch=WEIGHTS),
    "frozen norm and head": job(frozen=FrozenSpec(parts="norm,head")),
    "frozen embedding": job(frozen=FrozenSpec(parts="embedding"), vocab=3000),
    "frozen head, interleaved on the host": job(
        frozen=FrozenSpec(parts="head", layers=1), batch=WEIGHTS, **INTERLEAVED, **ON_HOST
    ),
    "frozen norm, ends apart": job(frozen=FrozenSpec(parts="norm", layers=1), vocab=3000, batch=WEIGHTS, **APART),
    "ends apart": job(**APART),
    "ends apart, a large vocabulary": job(vocab=3000, batch=WEIGHTS, **APART),
    "ends apart, stage 2": job(vocab=3000, batch=WEIGHTS, zero_stage=2, **APART),
    "ends apart, gpipe in fp32": job(vocab=3000, batch=WEIGHTS, precision="fp32", pipeline_schedule="gpipe", **APART),
    "ends apart, interleaved": job(vocab=3000, batch=WEIGHTS, **INTERLEAVED, **APART),
    "ends apart, recomputed": job(recompute="full", **APART),
    "ends apart, replicas reduced in bf16": job(
        vocab=3000, batch=WEIGHTS, mesh={"dp_replicate": 2}, options={"ends_apart": True, "reduce_dtype": "param"}
    ),
    "ends apart, one rank": job(vocab=3000, batch=WEIGHTS, mesh={"dp_shard": 1}, **APART),
    "loss in chunks": job(vocab=3000, loss="chunked"),
    "loss in chunks, gpipe at stage 2": job(vocab=3000, loss="chunked", zero_stage=2, pipeline_schedule="gpipe"),
    "loss in chunks, gpipe in fp32": job(vocab=3000, batch=EIGHT, loss="chunked", precision="fp32", pipeline_schedule="gpipe"),
    "loss in chunks, gpipe reduced in bf16": job(
        vocab=3000, batch=EIGHT, loss="chunked", pipeline_schedule="gpipe", options={"reduce_dtype": "param"}
    ),
    "loss in chunks, interleaved": job(vocab=3000, batch=EIGHT, loss="chunked", **INTERLEAVED),
    "loss in chunks, experts": job("mixtral", vocab=3000, batch=EIGHT, loss="chunked", mesh={"ep": 2}),
    "loss in chunks, lora": job(adapter=LORA, vocab=3000, batch=EIGHT, loss="chunked", pipeline_schedule="gpipe"),
    "loss in chunks, frozen head": job(frozen=FrozenSpec(parts="head", layers=1), vocab=3000, batch=EIGHT, loss="chunked"),
    "loss in chunks, ends apart": job(vocab=3000, batch=EIGHT, loss="chunked", **APART),
    "loss in chunks, ends apart, gpipe": job(
        vocab=3000, batch=EIGHT, loss="chunked", pipeline_schedule="gpipe", recompute="full", **APART
    ),
    "ends apart, tensor parallel": job(vocab=3000, batch=WEIGHTS, mesh={"tp": 2}, **APART),
    "ends apart, context parallel, stage 2": job(vocab=3000, mesh={"cp": 2}, zero_stage=2, **APART),
    "ends apart, expert parallel": job("mixtral", vocab=3000, batch=WEIGHTS, mesh={"ep": 2}, **APART),
    "ends apart, on the host": job(vocab=3000, batch=WEIGHTS, options={"ends_apart": True, "cpu_offload": True}),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_every_rank_takes_what_torch_takes(name: str) -> None:
    pytest.importorskip("transformers")
    asked = CASES[name]
    if asked.model.adapter is not None:
        pytest.importorskip("peft")
    each = asked.mesh.world_size // asked.mesh.pp
    for stage in range(asked.mesh.pp):
        found = compare_with_estimate(simulate(asked, steps=3, rank=stage * each))
        for row in (found.peak, *found.phases, found.held, *found.off_gpu):
            assert abs(row.difference) <= SCALARS_BYTES, (stage, row)
        for row in found.collectives:
            assert row.difference == 0, (stage, row)


@pytest.mark.parametrize("name", CASES)
def test_formulas_give_the_bytes_of_their_lines(name: str) -> None:
    for stage in range(CASES[name].mesh.pp):
        assert_explained(estimate(CASES[name], pipeline_rank=stage))

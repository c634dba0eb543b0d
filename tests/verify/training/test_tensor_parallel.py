"""Tensor-parallel ranks, context-parallel ranks, and both at once: simulated runs against the estimate.

DTensor, torch's ring attention and FSDP2 run. The difference is only what the estimate leaves out, which is named below.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.formulas import assert_explained, assert_symbols_mean_one_thing
from zeroplan import estimate
from zeroplan.catalog.model import model
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TINY = ModelSpec(
    family="llama", hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
    head_dim=8, vocab_size=512,
)  # fmt: skip
CASES = {
    "llama, 2 x 2": JobSpec(
        model=TINY, mesh=MeshSpec(dp_shard=2, tp=2), batch=BatchSpec(micro_batch_size=2, seq_len=32)
    ),
    "mistral, wide vocabulary, replicas, stage 2, recomputed": JobSpec(
        model=replace(TINY, family="mistral", vocab_size=4800),
        mesh=MeshSpec(dp_shard=3, dp_replicate=2, tp=2),
        recipe=RecipeSpec(zero_stage=2, recompute="full", keep_logits=True),
        batch=BatchSpec(micro_batch_size=1, seq_len=16, grad_accum_steps=2),
    ),
    "qwen2, fp32, one key head a rank, selective": JobSpec(
        model=replace(TINY, family="qwen2", attention_bias=True, num_attention_heads=16),
        mesh=MeshSpec(dp_shard=2, tp=4),
        recipe=RecipeSpec(precision="fp32", recompute="selective"),
        batch=BatchSpec(micro_batch_size=1, seq_len=64),
    ),
    "qwen3, tied, bf16, long sequences": JobSpec(
        model=replace(TINY, family="qwen3", tie_word_embeddings=True, head_dim=16),
        mesh=MeshSpec(dp_shard=2, tp=4),
        recipe=RecipeSpec(precision="bf16", optimizer_impl="fused"),
        batch=BatchSpec(micro_batch_size=3, seq_len=128),
    ),
    "qwen3, tied, wide vocabulary, offloaded": JobSpec(
        model=replace(TINY, family="qwen3", tie_word_embeddings=True, vocab_size=4800),
        mesh=MeshSpec(dp_shard=2, tp=2),
        recipe=RecipeSpec(recompute="full", fsdp2=Fsdp2Options(cpu_offload=True)),
        batch=BatchSpec(micro_batch_size=1, seq_len=16),
    ),
    "llama 70B, 8 x 8": JobSpec(
        model=model("llama-3.1-70b"),
        mesh=MeshSpec(dp_shard=8, tp=8),
        recipe=RecipeSpec(recompute="full"),
        batch=BatchSpec(seq_len=8192),
    ),
}  # fmt: skip
_WHOLE = Fsdp2Options(sequence_parallel=False)
#: Every rank has whole hidden states. The estimate is at most four of them too high.
WHOLE = {
    "llama": JobSpec(
        model=replace(TINY, hidden_size=256, head_dim=32), mesh=MeshSpec(dp_shard=2, tp=4),
        recipe=RecipeSpec(fsdp2=_WHOLE, recompute="full"), batch=BatchSpec(micro_batch_size=2, seq_len=256),
    ),
    "qwen3, stage 2, selective, accumulated": JobSpec(
        model=replace(TINY, family="qwen3", head_dim=16), mesh=MeshSpec(dp_shard=2, tp=2),
        recipe=RecipeSpec(fsdp2=_WHOLE, precision="bf16", zero_stage=2, recompute="selective"),
        batch=BatchSpec(micro_batch_size=1, seq_len=512, grad_accum_steps=2),
    ),
    "llama, a pipeline": JobSpec(
        model=replace(TINY, num_hidden_layers=4), mesh=MeshSpec(dp_shard=2, tp=2, pp=2),
        recipe=RecipeSpec(fsdp2=_WHOLE, zero_stage=2), batch=BatchSpec(micro_batch_size=1, seq_len=256, grad_accum_steps=4),
    ),
}  # fmt: skip
_ADAPTED = replace(TINY, hidden_size=256, head_dim=32, adapter=AdapterSpec(rank=8))
#: Ranks split both matrices of an adapter like the weight beside them, as AutoModel does.
ADAPTED = {
    "llama, all layers": JobSpec(
        model=_ADAPTED, mesh=MeshSpec(dp_shard=2, tp=2), recipe=RecipeSpec(precision="bf16", fsdp2=_WHOLE),
        batch=BatchSpec(micro_batch_size=2, seq_len=256),
    ),
    "qwen2, q and down, accumulated": JobSpec(
        model=replace(_ADAPTED, family="qwen2", attention_bias=True, adapter=AdapterSpec(rank=16, targets="q_proj,down_proj")),
        mesh=MeshSpec(dp_shard=2, tp=4), recipe=RecipeSpec(precision="bf16", fsdp2=_WHOLE),
        batch=BatchSpec(micro_batch_size=1, seq_len=256, grad_accum_steps=2),
    ),
    "llama, few tokens": JobSpec(
        model=_ADAPTED, mesh=MeshSpec(dp_shard=2, tp=2), recipe=RecipeSpec(precision="bf16", fsdp2=_WHOLE),
        batch=BatchSpec(micro_batch_size=1, seq_len=128),
    ),
    "qwen3, fp32, stage 2, the MLP": JobSpec(
        model=replace(_ADAPTED, family="qwen3", adapter=AdapterSpec(rank=8, targets="mlp")), mesh=MeshSpec(dp_shard=2, tp=2),
        recipe=RecipeSpec(precision="fp32", zero_stage=2, fsdp2=_WHOLE), batch=BatchSpec(micro_batch_size=2, seq_len=128),
    ),
}  # fmt: skip
SHARED = {
    "llama, 2 x 4": JobSpec(
        model=TINY, mesh=MeshSpec(dp_shard=2, cp=4), batch=BatchSpec(micro_batch_size=2, seq_len=512)
    ),
    "qwen3, one key head, replicas, recomputed": JobSpec(
        model=replace(TINY, family="qwen3", num_key_value_heads=1, tie_word_embeddings=True),
        mesh=MeshSpec(dp_replicate=2, cp=3),
        recipe=RecipeSpec(precision="bf16", recompute="full", zero_stage=2),
        batch=BatchSpec(micro_batch_size=1, seq_len=192, grad_accum_steps=2),
    ),
    "qwen2, selective": JobSpec(
        model=replace(TINY, family="qwen2", attention_bias=True, num_key_value_heads=8),
        mesh=MeshSpec(dp_shard=2, cp=2),
        recipe=RecipeSpec(recompute="selective", keep_logits=True),
        batch=BatchSpec(micro_batch_size=1, seq_len=512),
    ),
    "llama 70B, sequences of 131,072 on 8 ranks": JobSpec(
        model=model("llama-3.1-70b"), mesh=MeshSpec(dp_shard=16, cp=8), recipe=RecipeSpec(recompute="full"),
        batch=BatchSpec(seq_len=131_072),
    ),
    "llama, split too, 2 x 3 x 2, three sequences, selective": JobSpec(
        model=TINY, mesh=MeshSpec(dp_shard=2, cp=3, tp=2), recipe=RecipeSpec(recompute="selective"),
        batch=BatchSpec(micro_batch_size=3, seq_len=192),
    ),
    "qwen3, tied, split to single heads, replicas, recomputed": JobSpec(
        model=replace(TINY, family="qwen3", num_attention_heads=4, tie_word_embeddings=True, vocab_size=4800),
        mesh=MeshSpec(dp_replicate=2, cp=2, tp=4),
        recipe=RecipeSpec(recompute="full", zero_stage=2),
        batch=BatchSpec(micro_batch_size=1, seq_len=64, grad_accum_steps=2),
    ),
}  # fmt: skip
ROTARY_AND_STATE = 2_000
"""Rotary frequencies, the random state of flash attention (24 bytes per layer) and scalars. [bytes]"""


@pytest.mark.parametrize("name", CASES)
def test_tensor_parallel_ranks_hold_what_the_estimate_says(name: str):
    from tests.simulated import simulate

    job = CASES[name]
    seen = compare_with_estimate(simulate(job, all_layers=False))
    tokens = 8 * job.batch.seq_len * (job.batch.micro_batch_size + 1)  # token ids and positions, which outlive a step
    for row in (seen.peak, *seen.phases):
        beside = tokens if row.what == "optimizer step" or row is seen.peak else 0
        assert abs(row.difference) <= ROTARY_AND_STATE + beside, row
    assert abs(seen.held.difference) <= ROTARY_AND_STATE + tokens
    assert all(row.predicted == row.measured for row in seen.collectives), seen.collectives
    for kind in seen.kinds:
        assert abs(kind.difference) <= ROTARY_AND_STATE + tokens, kind


@pytest.mark.parametrize("name", SHARED)
def test_context_parallel_ranks_hold_what_the_estimate_says(name: str):
    from tests.simulated import simulate

    seen = compare_with_estimate(simulate(SHARED[name], all_layers=False))
    for row in (seen.peak, *seen.phases, seen.held, *seen.kinds):
        assert abs(row.difference) <= ROTARY_AND_STATE, row
    assert all(row.predicted == row.measured for row in seen.collectives), seen.collectives


@pytest.mark.parametrize("name", WHOLE)
def test_ranks_with_whole_hidden_states_hold_at_most_what_the_estimate_says(name: str):
    """The estimate has the buffers that gather a sequence, which such ranks do not need. Every sum is exact."""
    from tests.simulated import simulate

    job = WHOLE[name]
    seen = compare_with_estimate(simulate(job))
    hidden = 4 * 2 * job.batch.micro_batch_size * job.batch.seq_len * job.model.hidden_size
    tokens = 8 * job.batch.seq_len * (job.batch.micro_batch_size + 1)
    for row in (seen.peak, *seen.phases):
        assert -ROTARY_AND_STATE - tokens <= row.difference <= hidden, row
    assert abs(seen.held.difference) <= ROTARY_AND_STATE + tokens
    assert all(row.predicted == row.measured for row in seen.collectives), seen.collectives
    split = replace(job, recipe=replace(job.recipe, fsdp2=Fsdp2Options()))
    assert estimate(split).peak_bytes < estimate(job).peak_bytes


@pytest.mark.parametrize("name", ADAPTED)
def test_split_adapters_hold_what_the_estimate_says(name: str):
    """In the forward the estimate has the buffers that gather a sequence, which such ranks do not need."""
    pytest.importorskip("peft", reason="peft is not installed, and builds the adapters that are measured here")
    from tests.simulated import simulate

    job = ADAPTED[name]
    seen = compare_with_estimate(simulate(job))
    hidden = 4 * 4 * job.batch.micro_batch_size * job.batch.seq_len * job.model.hidden_size
    small = ROTARY_AND_STATE + 8 * job.batch.seq_len * (job.batch.micro_batch_size + 1)
    for row in seen.phases:
        assert -small <= row.difference <= (hidden if row.what == "forward" else small), row
    assert abs(seen.held.difference) <= small
    assert all(row.predicted == row.measured for row in seen.collectives), seen.collectives


@pytest.mark.parametrize("name", CASES | SHARED | WHOLE | ADAPTED)
def test_formulas_give_the_bytes_of_their_lines(name: str):
    answer = estimate((CASES | SHARED | WHOLE | ADAPTED)[name])
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)
    assert answer.legend["p"] == answer.job.mesh.tp

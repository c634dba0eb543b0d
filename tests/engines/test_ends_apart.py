"""Embedding and head as FSDP2 units of their own, as in accelerate and torchtitan, against simulated FSDP2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.causal_models import tiny_spec
from tests.formulas import assert_explained
from tests.properties.columns import grid_of
from tests.simulated import simulate
from zeroplan import estimate
from zeroplan.comparison import compare_with_estimate
from zeroplan.engines.fsdp2 import account
from zeroplan.errors import SpecError
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec

NARROW = {"heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 5}
TOKENS = BatchSpec(micro_batch_size=2, seq_len=64)
WEIGHTS = BatchSpec(micro_batch_size=1, seq_len=32)
FEW = BatchSpec(micro_batch_size=1, seq_len=4)
THRICE = replace(WEIGHTS, grad_accum_steps=3)
#: The random state of attention, and the loss. [bytes]
SCALARS_BYTES = 1200


def job(family: str = "llama", *, vocab: int = 250, ffn: int = 176, batch: BatchSpec = TOKENS, n: int = 4, r: int = 1, tp: int = 1,
        options: dict[str, object] | None = None, model: dict[str, object] | None = None, **recipe: object) -> JobSpec:  # fmt: skip
    model = replace(tiny_spec(family, ffn=ffn, vocab=vocab, **NARROW), tie_word_embeddings=False, **(model or {}))
    fsdp2 = Fsdp2Options(ends_apart=True, **(options or {}))
    said = {"engine": "fsdp2", "zero_stage": 3, **recipe}
    return JobSpec(
        model=model, recipe=RecipeSpec(fsdp2=fsdp2, **said), mesh=MeshSpec(dp_shard=n, dp_replicate=r, tp=tp), batch=batch
    )


CASES = {
    "plain": job(),
    "weights dominate": job(ffn=512, batch=WEIGHTS),
    "the vocabulary dominates": job(vocab=3000, batch=WEIGHTS),
    "recomputed": job(recompute="full"),
    "recomputed by operation": job(recompute="selective"),
    "fp32": job(precision="fp32", vocab=2000, batch=WEIGHTS),
    "stage 2": job(zero_stage=2, vocab=2000, batch=WEIGHTS),
    "several micro-batches": job(batch=THRICE, vocab=2000),
    "several micro-batches, one reduction": job(batch=THRICE, vocab=2000, sync_every_micro_batch=False),
    "reduced in bf16, one reduction": job(
        batch=THRICE, vocab=2000, sync_every_micro_batch=False, options={"reduce_dtype": "param"}
    ),
    "replicas": job(r=2, vocab=2000, batch=WEIGHTS),
    "one rank": job(n=1, vocab=2000, batch=WEIGHTS),
    "mixtral": job("mixtral"),
    "a large embedding": job(vocab=3000, batch=FEW),
    "a large embedding on two ranks, one reduction": job(
        vocab=3000, n=2, batch=replace(FEW, grad_accum_steps=3), sync_every_micro_batch=False
    ),
    "a frozen head": job(vocab=3000, batch=FEW, model={"frozen": FrozenSpec(parts="head", layers=2)}),
    "a frozen embedding": job(vocab=3000, model={"frozen": FrozenSpec(parts="embedding", layers=2)}),
    "lora": job(vocab=3000, batch=FEW, model={"adapter": AdapterSpec(rank=8)}),
    "lora, recomputed": job(vocab=3000, batch=FEW, recompute="full", model={"adapter": AdapterSpec(rank=8)}),
    "tensor parallel": job(vocab=2000, n=2, tp=2, batch=WEIGHTS),
    "tensor parallel, recomputed in fp32": job(vocab=3000, n=2, tp=2, batch=WEIGHTS, recompute="full", precision="fp32"),
    "resharded two ways": job(vocab=3000, batch=FEW, options={"reshard_after_forward": 2}),
    "resharded two ways, recomputed in fp32": job(
        vocab=3000, batch=FEW, recompute="full", precision="fp32", options={"reshard_after_forward": 2}
    ),
    "loss in chunks": job(vocab=3000, batch=WEIGHTS, loss="chunked"),
    "loss in chunks, stage 2": job(vocab=3000, batch=WEIGHTS, loss="chunked", zero_stage=2),
    "loss in chunks, one reduction": job(vocab=3000, batch=THRICE, loss="chunked", sync_every_micro_batch=False),
    "on the host": job(options={"cpu_offload": True}, vocab=2000, batch=WEIGHTS),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_every_phase_is_that_of_fsdp2(name: str) -> None:
    pytest.importorskip("transformers")
    asked = CASES[name]
    found = compare_with_estimate(simulate(asked, steps=max(3, asked.batch.grad_accum_steps)))
    for row in (found.peak, *found.phases, found.held):
        assert abs(row.difference) <= SCALARS_BYTES, row
    for row in found.collectives:
        assert row.difference == 0, row


@pytest.mark.parametrize("name", CASES)
def test_formulas_give_the_bytes_of_their_lines(name: str) -> None:
    assert_explained(estimate(CASES[name]))


def test_the_embedding_is_gathered_twice_and_the_head_once() -> None:
    asked = job()
    found = account(asked.model, asked.recipe, asked.mesh, asked.batch).collectives
    assert not [one.what for one in found if "root group" in one.what]
    assert [one.calls for one in found if one.what == "parameters of the embedding"] == [1, 1]
    assert [one.calls for one in found if one.what == "parameters of final norm and head"] == [1]


def test_a_tied_head_leaves_one_unit() -> None:
    asked = job()
    tied = replace(asked, model=replace(asked.model, tie_word_embeddings=True))
    plain = replace(tied, recipe=replace(tied.recipe, fsdp2=Fsdp2Options()))
    assert estimate(tied).peak_bytes == estimate(plain).peak_bytes


def test_columns_of_ranks_have_the_peak_of_each_with_smaller_shards() -> None:
    layouts = [job(n=n, options={"reshard_after_forward": 2}, recompute="full") for n in (2, 4, 8)]
    (grid,) = grid_of(layouts)
    each = [account(one.model, one.recipe, one.mesh, one.batch).moments.highest({}).peak_bytes for one in layouts]
    assert list(grid.moments.highest({}).peak_bytes) == each


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(SpecError, match="ends_apart with loss 'fused'"):
        job(loss="fused")

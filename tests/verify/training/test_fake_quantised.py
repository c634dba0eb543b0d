"""Quantisation-aware training with torchao's own layers: the peak and each phase are as estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroplan import SpecError
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec

#: Every width is a multiple of the 256 weights that share a scale.
SHAPE = ModelSpec(
    family="qwen2", hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
    head_dim=32, vocab_size=96, attention_bias=True,
)  # fmt: skip
SOME = AdapterSpec(rank=8, targets="q_proj,v_proj,gate_proj,up_proj,down_proj")
#: Three small tensors of a step, and what torchao's modules hold beside their scales. [bytes]
SMALL = 9000


def job(engine: str = "fsdp2", ranks: int = 4, kernels: str = "int4-qat", **fields: Any) -> JobSpec:
    of_model = {name: fields.pop(name) for name in ("adapter", "vocab_size", "family", "attention_bias", "tie_word_embeddings")
                if name in fields}  # fmt: skip
    return JobSpec(
        model=replace(SHAPE, **of_model),
        recipe=RecipeSpec(engine=engine, zero_stage=3 if engine == "fsdp2" else 0, fused_kernels=kernels, **fields),
        mesh=MeshSpec(dp_shard=ranks),
        batch=BatchSpec(micro_batch_size=2, seq_len=512),
    )


JOBS = {
    "fsdp2, with biases": job(),
    "fsdp2, a head of its own, recomputed": job(recompute="full", precision="bf16", vocab_size=2048),
    "ddp in fp32": job("ddp", 1, precision="fp32", family="llama", attention_bias=False),
    "fsdp2, some layers with adapters": job(adapter=replace(SOME, dropout=True)),
    "axolotl's, fsdp2, recomputed": job(kernels="axolotl-qat", recompute="full", vocab_size=2048),
    "axolotl's, fsdp2, with biases": job(kernels="axolotl-qat"),
    "axolotl's, ddp in 16 bits": job("ddp", 1, "axolotl-qat", precision="bf16", family="llama", attention_bias=False),
}
PIECES = "int4-qat,loss-in-pieces"


@pytest.mark.torch
@pytest.mark.parametrize("name", JOBS)
def test_layers_that_torchao_rounds_take_what_is_estimated(name: str) -> None:
    compared = _measured(JOBS[name])
    assert abs(compared.peak.error) < 0.0002, compared.peak
    assert all(abs(one.error) < 0.0002 or abs(one.difference) < SMALL for one in compared.phases), compared.phases


@pytest.mark.torch
def test_a_head_that_runs_once_for_each_piece_of_tokens_takes_at_most_what_is_estimated() -> None:
    compared = _measured(job("ddp", 1, PIECES, precision="bf16", vocab_size=2048))
    assert 0 < compared.peak.error < 0.06, compared.peak


def _measured(asked: JobSpec) -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("torchao", reason="torchao is not installed, and rounds the layers that are measured here")
    if asked.model.adapter is not None:
        pytest.importorskip("peft")
    from tests.simulated import simulate

    return compare_with_estimate(simulate(asked, steps=2))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"engine": "ddp"}, "precision 'bf16-mixed' under autocast is not modelled; use precision 'bf16', or engine 'fsdp2'"),
        ({"recompute": "selective"}, "recompute 'selective' is not modelled"),
        ({"loss": "chunked"}, "loss 'chunked' is not modelled"),
        ({"family": "gemma2"}, "a gemma2 model is not modelled; use one of llama"),
        ({"adapter": AdapterSpec(rank=8, quantize="nf4")}, "quantised weights is not modelled"),
        ({"kernels": "axolotl-qat", "adapter": AdapterSpec(rank=8)}, "'axolotl-qat' with adapters is not modelled"),
        ({"kernels": "axolotl-qat", "tie_word_embeddings": True}, "a rounded embedding is not modelled; use loss 'fused'"),
        ({"kernels": "axolotl-qat", "precision": "fp32"}, "precision 'fp32' is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        job(**said)

"""Builds the transformers module that a ModelSpec describes, small enough to run on a CPU in a moment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.blocks import Compute

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from zeroplan.verify.workload import config  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Families whose config is the one that a measurement runs.
MOE = ("qwen3_moe", "deepseek_v3", "gpt_oss")


def tiny_spec(
    family: str, *, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, hidden: int | None = None, layers: int = 2
) -> ModelSpec:
    """Describe a model of a few thousand parameters; GPT-2 has no grouped heads, Mixtral gets four experts."""
    gpt2, mixtral = family == "gpt2", family == "mixtral"
    return ModelSpec(
        family=family,
        hidden_size=hidden or heads * head_dim,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if gpt2 else kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=512,
        positions=512 if gpt2 else 0,
        tie_word_embeddings=gpt2,
        attention_bias=gpt2 or family == "qwen2",
        mlp_bias=gpt2,
        moe=MoeSpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=ffn) if mixtral else None,
    )


def causal_model(spec: ModelSpec, compute: Compute, *, layers: int | None = None) -> PreTrainedModel:
    """Build the transformers module, randomly initialised, in training mode, dropout off, without a cache."""
    config = _config(spec, layers or spec.num_hidden_layers)
    config._attn_implementation = compute.attention
    if spec.moe is not None:
        config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(weight_dtype(compute))
    model.train()
    return model


def weight_dtype(compute: Compute) -> torch.dtype:
    return torch.float32 if compute.autocast or compute.element_bytes == 4 else torch.bfloat16


def _config(spec: ModelSpec, layers: int) -> PreTrainedConfig:
    if spec.family in MOE:
        return AutoConfig.for_model(**config(replace(spec, num_hidden_layers=layers)))
    common = {
        "num_hidden_layers": layers,
        "num_attention_heads": spec.num_attention_heads,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "use_cache": False,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if spec.family == "gpt2":
        no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return AutoConfig.for_model("gpt2", n_inner=spec.intermediate_size, **common, **no_dropout)
    rotary = {
        "intermediate_size": spec.intermediate_size,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
    }
    window = {} if spec.family == "llama" else {"sliding_window": spec.sliding_window}
    experts = {}
    if spec.moe is not None:
        experts = {"num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.num_experts_per_tok}
    return AutoConfig.for_model(spec.family, **common, **rotary, **window, **experts)

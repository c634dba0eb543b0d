"""Builds the transformers module of a tiny ModelSpec, which a CPU runs at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from zeroplan.spec.family import PLAIN_HEADS, WITHOUT_SDPA
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import Compute

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from zeroplan.verify.training.causal_model import config, register_causal_classes  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Longer than any sequence here; classes that always have a window do not accept None.
NO_WINDOW = 4096


def tiny_spec(
    family: str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    hidden: int | None = None,
    layers: int = 2,
    window: int | None = None,
) -> ModelSpec:
    """A ModelSpec of a few thousand parameters; GPT-2 and similar families have no grouped heads, Mixtral four experts."""
    plain, positions, mixtral = family in PLAIN_HEADS, {"gpt2": 512, "opt": 514}.get(family, 0), family == "mixtral"
    return ModelSpec(
        family=family,
        hidden_size=hidden or heads * head_dim,
        intermediate_size=4 * heads * head_dim if family == "bloom" else ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if plain else kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=512,
        positions=positions,
        tie_word_embeddings=family == "gpt2",
        attention_bias=plain or family in ("qwen2", "starcoder2"),
        mlp_bias=plain or family == "starcoder2",
        sliding_window=window,
        moe=MoeSpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=ffn) if mixtral else None,
    )


def causal_model(spec: ModelSpec, compute: Compute, *, layers: int | None = None) -> PreTrainedModel:
    """The transformers module, randomly initialised, in training mode, without dropout and cache.

    If the spec has adapters, peft adds them to weights in the compute dtype.
    """
    if spec.adapter is not None:
        return adapted_model(spec, compute, layers=layers)
    config = _config(spec, layers or spec.num_hidden_layers)
    config._attn_implementation = "eager" if spec.family in WITHOUT_SDPA else compute.attention
    if spec.moe is not None and spec.family != "llama4_text":
        config._experts_implementation = "grouped_mm"
    register_causal_classes()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(weight_dtype(compute))
    model.train()
    return model


def adapted_model(spec: ModelSpec, compute: Compute, *, layers: int | None = None) -> PreTrainedModel:
    pytest.importorskip("peft")
    from zeroplan.verify.training.adapters import with_adapters

    model = causal_model(replace(spec, adapter=None), compute._replace(autocast=False), layers=layers)
    recipe = RecipeSpec(engine="ddp", zero_stage=0, precision="bf16-mixed" if compute.autocast else "bf16")
    return with_adapters(model, spec.adapter, recipe, family=spec.family)


def weight_dtype(compute: Compute) -> torch.dtype:
    if compute.autocast or compute.element_bytes == 4:
        return torch.float32
    return torch.float16 if compute.is_fp16 else torch.bfloat16


def _config(spec: ModelSpec, layers: int) -> PreTrainedConfig:
    """The config that a measurement makes; classes that always have a window get one that no sequence fills."""
    made = config(replace(spec, num_hidden_layers=layers))
    return AutoConfig.for_model(
        **{key: NO_WINDOW if key == "sliding_window" and value is None else value for key, value in made.items()}
    )

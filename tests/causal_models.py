"""Builds the transformers module of a tiny ModelSpec, which a CPU runs at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from zeroplan.catalog.config_rest import config_keys
from zeroplan.spec.family import PLAIN_HEADS, WINDOWED_FAMILIES, WITHOUT_SDPA
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import Compute

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from zeroplan.verify.training.causal_model import config, register_causal_classes  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Families whose config is made as for a measurement.
MEASURED = (
    "qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "seed_oss", "smollm3", "hunyuan_v1_dense", "exaone4", "olmoe",
    "gemma", "glm", "starcoder2", "cohere", "cohere2", "minimax_m2", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "dots1",
    "qwen2_moe", "glm4_moe_lite", "ministral3", "granitemoe", "ernie4_5", "granitemoehybrid", "nemotron_h",
    "bamba", "gemma4_text", "falcon_h1", "hunyuan_v1_moe", "ernie4_5_moe", "phi", "llama4_text", "arcee", "deepseek_v2",
    "deepseek_v32", "glm_moe_dsa", "mistral4", "solar_open", "cwm", "jais2", "helium", "stablelm", "hy_v3", "lfm2", "lfm2_moe",
    "apertus", "falcon", "olmo3", "minimax", "kimi_linear", "exaone_moe", "olmo_hybrid", "internlm3", "youtu",
)  # fmt: skip


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
    if spec.family in MEASURED:
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
        own = {"n_inner": spec.intermediate_size, "activation_function": spec.activation}
        return AutoConfig.for_model("gpt2", **own, **common, **no_dropout)
    if spec.family in PLAIN_HEADS:
        return AutoConfig.for_model(spec.family, **common, **_two_layer_mlp(spec))
    rotary = {
        "intermediate_size": spec.intermediate_size,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        config_keys(spec.family).activation: spec.activation,
    }
    window = (
        {"sliding_window": spec.sliding_window or NO_WINDOW} if spec.family in (*WINDOWED_FAMILIES, "qwen2", "qwen3") else {}
    )
    experts = {}
    if spec.moe is not None:
        experts = {"num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.num_experts_per_tok}
    return AutoConfig.for_model(spec.family, **common, **rotary, **window, **experts)


def _two_layer_mlp(spec: ModelSpec) -> dict[str, object]:
    """Config keys of GPT-NeoX, OPT and BLOOM, without dropout."""
    if spec.family == "opt":
        own = {"ffn_dim": spec.intermediate_size, "activation_function": spec.activation}
        return own | {"word_embed_proj_dim": spec.hidden_size, "dropout": 0.0, "layerdrop": 0.0}
    if spec.family == "bloom":
        return {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    neox = {"hidden_act": spec.activation, "use_parallel_residual": spec.parallel_residual}
    return {"intermediate_size": spec.intermediate_size, "hidden_dropout": 0.0, "attention_bias": spec.attention_bias, **neox}

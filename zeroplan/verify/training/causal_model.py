"""Builds transformers' causal language model for a :class:`~zeroplan.spec.model.ModelSpec`, from a config alone.

Gradient checkpointing and attention are transformers' own. Dropout is off, as in the estimate; weights are uninitialised.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from zeroplan.catalog.config_rest import INDEX_FIELDS, LINEAR_FIELDS, config_keys
from zeroplan.engines.precisions import compute_of
from zeroplan.errors import MeasurementError
from zeroplan.numeric import ceil_div
from zeroplan.spec.family import (
    DENSE_LAYERS,
    FREE_ACTIVATION,
    INDEXED_FAMILIES,
    ONE_WIDTH_FAMILIES,
    PLAIN_HEADS,
    SOME_WINDOWED,
    TRAITS,
    WIDE_SHARED_EXPERTS,
    WINDOWED_FAMILIES,
)
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.spec.recipe import ROUNDING, Attention, RecipeSpec
from zeroplan.transformer.parameters import HANDED, SHARED, full_layers, kinds_by_indexer
from zeroplan.transformer.vision import adapted_in_tower
from zeroplan.verify.training.modules import find_blocks
from zeroplan.verify.training.recomputation import checkpoint_options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config is enough


def config(spec: ModelSpec) -> dict[str, object]:
    """The ``config.json`` of a model, without dropout, cache or special tokens.

    The reverse of :func:`zeroplan.catalog.config.model_from_config`.
    """
    if spec.unplaced_parameters:
        raise MeasurementError(
            f"a shape inferred from a parameter count leaves {spec.unplaced_parameters:,} parameters that no transformers model "
            "has; name a model instead"
        )
    keys = config_keys(spec.family).keys
    sizes = {keys.get(field, (field,))[0]: value for field, value in _fields(spec).items()}
    return {"model_type": spec.family, **sizes, **_peculiar(spec), **_PLAIN, **_OFF.get(spec.family, {})}


def _fields(spec: ModelSpec) -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(spec, name) for name in _SIZES}
    if spec.family not in PLAIN_HEADS:
        fields |= {"num_key_value_heads": spec.num_key_value_heads}
        fields |= {} if spec.mla is not None or spec.family == "falcon" else {"head_dim": spec.head_dim}
    if spec.family not in ("gpt2", "bloom", "falcon"):
        fields |= {"attention_bias": spec.attention_bias, "mlp_bias": spec.mlp_bias}
    if spec.moe is not None:
        fields |= {"num_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.num_experts_per_tok}
    return fields


def _peculiar(spec: ModelSpec) -> dict[str, object]:
    made: dict[str, object] = {}
    if spec.family in WINDOWED_FAMILIES or config_keys(spec.family).optional_window:
        made[config_keys(spec.family).keys.get("sliding_window", ("sliding_window",))[0]] = spec.sliding_window
    if config_keys(spec.family).optional_window:
        made["use_sliding_window"] = spec.sliding_window is not None
    if spec.family in SOME_WINDOWED:
        made["max_window_layers"] = spec.max_window_layers
    if spec.moe is not None and spec.family not in ONE_WIDTH_FAMILIES:
        made[config_keys(spec.family).keys.get("moe_intermediate_size", _OF_EXPERTS)[0]] = spec.moe.moe_intermediate_size
    if spec.moe is not None and spec.family == "qwen3_moe":
        made["mlp_only_layers"] = list(range(spec.moe.num_dense_layers))
        made["norm_topk_prob"] = True  # as in every published model; the class defaults to False
    if spec.family in FREE_ACTIVATION:
        made[config_keys(spec.family).activation] = spec.activation
    return made | _of_one_family(spec) | _latent(spec) | _linear(spec) | _hybrid(spec)


def _of_one_family(spec: ModelSpec) -> dict[str, object]:
    made: dict[str, object] = {}
    if spec.family == "gpt_neox":
        made["use_parallel_residual"] = spec.parallel_residual
    if spec.family == "exaone4" and spec.sliding_window is None:
        made["layer_types"] = ["full_attention"] * spec.num_hidden_layers  # the class cannot derive them
    if spec.family == "falcon":
        made["new_decoder_architecture"] = spec.num_key_value_heads > 1
    if spec.family == "phi":
        made["partial_rotary_factor"] = TRAITS["phi"].rotary_width / spec.head_dim
    if spec.family == "minimax_m2":
        made["rotary_dim"] = spec.head_dim // 2
    if spec.family == "gemma4_text":
        made |= {
            "global_head_dim": spec.global_head_dim,
            "final_logit_softcapping": 30.0,
            "enable_moe_block": spec.moe is not None,
        }
        made |= _of_each_layer(spec)
    if spec.family == "opt":
        made["word_embed_proj_dim"] = spec.hidden_size
    if spec.family in ("glm4_moe_lite", "hy_v3") and spec.moe is not None:
        dense = spec.moe.num_dense_layers
        made["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (spec.num_hidden_layers - dense)
    if TRAITS[spec.family].head_norms is None:
        made["use_qk_norm"] = spec.use_qk_norm
    return made


def _of_each_layer(spec: ModelSpec) -> dict[str, object]:
    """Keys of Gemma 4's embeddings of each layer and of its layers that share keys, or of its keys that are values."""
    own = spec.per_layer
    if own is None:
        keys_are_values = {"num_global_key_value_heads": spec.global_key_value_heads, "attention_k_eq_v": True}
        return {**keys_are_values, "hidden_size_per_layer_input": 0}
    return {
        "hidden_size_per_layer_input": own.width,
        "vocab_size_per_layer_input": own.vocab_size,
        "num_kv_shared_layers": own.shared_layers,
        "use_double_wide_mlp": own.wide_mlp,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in full_layers(spec)],
    }


def _linear(spec: ModelSpec) -> dict[str, object]:
    """Keys of linear attention and of shared experts."""
    keys = config_keys(spec.family).keys
    fields = () if spec.linear is None else (*LINEAR_FIELDS, *(("chunk_size",) if spec.layer_pattern else ()))
    named = {field: keys.get(f"linear_{field}", (f"linear_{field}",))[0] for field in fields}
    own = {name: getattr(spec.linear, field) for field, name in named.items()}
    if spec.family == "olmo_hybrid" and not spec.rotary:
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    if spec.moe is None or spec.family not in WIDE_SHARED_EXPERTS:
        return own
    (name,) = keys.get("shared_expert_intermediate_size", ("shared_expert_intermediate_size",))
    return {**own, name: spec.moe.num_shared_experts * spec.moe.moe_intermediate_size}


def _hybrid(spec: ModelSpec) -> dict[str, object]:
    """Keys with the kind of each layer, in hybrid families."""
    if spec.family == "llama4_text":
        return {
            "no_rope_layers": [int(letter != "G") for letter in spec.letters],
            "moe_layers": [layer for layer, letter in enumerate(spec.letters) if letter != "D"],
        }
    if spec.family in _OF_PATTERNS:
        return _OF_PATTERNS[spec.family](spec)
    return {} if spec.linear is None or not spec.layer_pattern else _with_states(spec)


def _with_states(spec: ModelSpec) -> dict[str, object]:
    assert spec.linear is not None  # noqa: S101  asked before
    if spec.family == "falcon_h1":
        width = spec.linear.num_value_heads * spec.linear.value_head_dim
        return {"mamba_d_ssm": width, "mamba_rms_norm": "N" in spec.letters, "mamba_norm_before_gate": False}
    kinds = [_KINDS[letter] for letter in spec.letters]
    if spec.family in ("minimax", "nemotron_h"):
        latent: dict[str, object] = {"layers_block_type": kinds, "moe_latent_size": (spec.moe and spec.moe.latent_size) or None}
        return {"layer_types": kinds} if spec.family == "minimax" else latent
    expand = {"mamba_expand": spec.linear.num_value_heads * spec.linear.value_head_dim // spec.hidden_size}
    if spec.family == "bamba":
        return {**expand, "attn_layer_indices": [layer for layer, letter in enumerate(spec.letters) if letter == "*"]}
    dense = {"num_local_experts": 0, "intermediate_size": spec.intermediate_size} if spec.moe is None else {}
    return {**expand, **dense, "layer_types": kinds, "position_embedding_type": "rope" if spec.rotary else None}


def _of_kimi(spec: ModelSpec) -> dict[str, object]:
    """Keys of the kinds of layers, of latent attention and of the router of Kimi Linear."""
    assert spec.mla is not None  # noqa: S101  the family always has it
    assert spec.moe is not None  # noqa: S101  as above
    return {
        "layer_types": ["linear_attention" if letter in "Mm" else "full_attention" for letter in spec.letters],
        "mlp_layer_types": ["dense" if letter in "mD" else "sparse" for letter in spec.letters],
        **{name: getattr(spec.mla, name) for name in ("q_lora_rank", "kv_lora_rank", *_HEAD_PARTS)},
        "num_shared_experts": spec.moe.num_shared_experts,
        "n_group": 1,
        "topk_group": 1,
    }


def _of_lfm2(spec: ModelSpec) -> dict[str, object]:
    kinds = ["conv" if letter in "Cc" else "full_attention" for letter in spec.letters]
    dense = spec.letters.count("c") + spec.letters.count("D")
    own = {"block_auto_adjust_ff_dim": False} if spec.moe is None else {"num_dense_layers": dense, "norm_topk_prob": True}
    return {"layer_types": kinds, **own}


def _of_exaone_moe(spec: ModelSpec) -> dict[str, object]:
    return {
        "layer_types": ["full_attention" if letter == "G" else "sliding_attention" for letter in spec.letters],
        "mlp_layer_types": ["dense" if letter == "D" else "sparse" for letter in spec.letters],
        "num_shared_experts": spec.moe and spec.moe.num_shared_experts,
    }


_OF_PATTERNS: dict[str, Callable[[ModelSpec], dict[str, object]]] = {
    "lfm2": _of_lfm2,
    "lfm2_moe": _of_lfm2,
    "exaone_moe": _of_exaone_moe,
    "kimi_linear": _of_kimi,
}


def _latent(spec: ModelSpec) -> dict[str, object]:
    """Keys of DeepSeek's routing and latent attention; without groups of experts if there are too few."""
    if spec.family in ("solar_open", "hy_v3") and spec.moe is not None:
        return {config_keys(spec.family).keys.get("num_shared_experts", _SHARED)[0]: spec.moe.num_shared_experts}
    if spec.family == "youtu":
        return {name: getattr(spec.mla, name) for name in ("q_lora_rank", "kv_lora_rank", *_HEAD_PARTS)}
    if spec.moe is None or spec.family not in DENSE_LAYERS or spec.family == "qwen3_moe":
        return {}
    grouped = spec.family == "deepseek_v3" and spec.moe.num_experts % 8 == 0 and spec.moe.num_experts >= 16
    index = INDEX_FIELDS if spec.family in INDEXED_FAMILIES else ()
    latent = () if spec.mla is None else ("q_lora_rank", "kv_lora_rank", *_HEAD_PARTS, *index)
    keys, kinds = config_keys(spec.family).keys, kinds_by_indexer(spec)
    return {
        **{name: getattr(spec.mla, name) for name in latent},
        **({"indexer_types": ["shared" if kind in (HANDED, SHARED) else "full" for kind in kinds]} if kinds else {}),
        "norm_topk_prob": True,
        keys["num_shared_experts"][0]: spec.moe.num_shared_experts,
        keys["num_dense_layers"][0]: spec.moe.num_dense_layers,
        **({} if grouped or spec.family == "deepseek_v2" else {"n_group": 1, "topk_group": 1}),
        **_groups(spec.moe),
    }


def _groups(moe: MoeSpec) -> dict[str, object]:
    """Keys of DeepSeek-V2's groups of experts. As few are chosen as a token's experts need."""
    if not moe.num_groups:
        return {}
    chosen = ceil_div(moe.num_experts_per_tok * moe.num_groups, moe.num_experts)
    return {"topk_method": "group_limited_greedy", "n_group": moe.num_groups, "topk_group": chosen}


def layer_period(spec: ModelSpec) -> int:
    """The number of layers after which the kinds of attention repeat; dense first layers do not count."""
    from transformers import AutoConfig  # noqa: PLC0415

    if spec.mla is not None and spec.mla.index_every > 1:
        return spec.mla.index_every
    kinds = list(getattr(AutoConfig.for_model(**config(spec)), "layer_types", None) or [])  # type: ignore[arg-type]
    return next((n for n in range(1, len(kinds)) if all(a == b for a, b in zip(kinds, kinds[n:], strict=False))), 1)


def _checkpoint_blocks(model: nn.Module, recipe: RecipeSpec, *, reentrant: bool) -> None:
    """Let blocks recompute as the recipe says; with reentrant checkpoints the input requires gradients, as the Trainer sets it."""
    if recipe.recompute == "none":
        return
    if reentrant:
        model.enable_input_require_grads()  # type: ignore[operator]
    if not recipe.fsdp1.checkpoints_units:
        options = checkpoint_options(recipe.recompute, reentrant=reentrant)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
        for block in () if recipe.recompute_layers is None else find_blocks(model)[recipe.recompute_layers :]:
            block.gradient_checkpointing = False  # type: ignore[assignment]  # a GradientCheckpointingLayer


def causal_module(spec: ModelSpec, recipe: RecipeSpec, dtype: torch.dtype, device: str) -> nn.Module:
    """The causal language model of a job, with the recipe's recomputation, adapters and frozen parts."""
    from transformers import AutoConfig  # noqa: PLC0415  takes seconds, and user workloads need none

    register_causal_classes()
    if spec.vision is None:
        made = AutoConfig.for_model(**config(spec))  # type: ignore[arg-type]  # each family has its own keys
    else:
        from zeroplan.verify.training import vision  # noqa: PLC0415  few models have images

        made = vision.whole_config(spec, config(spec))
    if spec.moe is not None and spec.family != "llama4_text":  # whose experts have one implementation
        made._experts_implementation = "grouped_mm"
    build = causal_model if spec.vision is None else vision.whole_model
    model = build(made, attention=recipe.attention, dtype=dtype, device="meta" if spec.is_quantised else device)
    _cast_decays(model, recipe)
    _checkpoint_blocks(model, recipe, reentrant=recipe.engine == "fsdp1" and spec.adapter is not None)
    for name in [one for one in ROUNDING if one in recipe.fused_parts]:
        from zeroplan.verify.training.fake_quantised import round_layers  # noqa: PLC0415  few jobs have it

        round_layers(model, spec, dtype, name)
    if spec.adapter is not None:
        from zeroplan.verify.training.adapters import with_adapters  # noqa: PLC0415  only fine-tuning needs peft

        without = () if spec.vision is None else vision.without_adapters(model, spec.vision)
        beside = adapted_in_tower(spec) if spec.adapts_tower else ()
        model = with_adapters(
            model, spec.adapter, recipe, family=spec.family, device=device, without=without, beside=beside
        )  # fmt: skip
    if spec.vision is not None and spec.adapter is None:
        vision.freeze_tower(model, spec.vision)
    if recipe.keep_logits == "fp32":
        model.register_forward_hook(_upcast)
    return _partly_frozen(model, spec.frozen)


def _cast_decays(model: nn.Module, recipe: RecipeSpec) -> None:
    """Cast the decays of lightning attention to the compute dtype: outside autocast its products refuse two dtypes.

    A user gets the same by loading the model in 16 bits and casting only its parameters to fp32, as accelerate does for FSDP2.
    """
    if compute_of(recipe).autocast:
        return
    dtype = {2: torch.bfloat16, 4: torch.float32}[compute_of(recipe).element_bytes]
    for name, decay in model.named_buffers():
        if name.endswith(("slope_rate", "_decay")):
            decay.data = decay.data.to(dtype)


def _partly_frozen(model: nn.Module, frozen: FrozenSpec | None) -> nn.Module:
    if frozen is not None:
        _freeze(cast("PreTrainedModel", model), frozen)
    return model


def register_causal_classes() -> None:
    """Tell ``AutoModelForCausalLM`` of the causal classes that it does not list: Mistral 4's."""
    from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM  # noqa: PLC0415

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def _freeze(model: "PreTrainedModel", frozen: FrozenSpec) -> None:
    """Freeze the untrained parts, as a script does before it builds engine and optimizer."""
    parts: dict[str, nn.Module] = {
        "embedding": model.get_input_embeddings(),
        "norm": model.get_decoder().norm,  # type: ignore[no-untyped-call]
        "head": model.get_output_embeddings(),  # type: ignore[no-untyped-call]
    }
    for part in (*(parts[name] for name in frozen.names), *find_blocks(model)[: frozen.layers]):
        part.requires_grad_(requires_grad=False)


def causal_model(
    made: "PreTrainedConfig", *, attention: Attention, dtype: torch.dtype, device: str, auto: str = "AutoModelForCausalLM"
) -> nn.Module:
    """A transformers model for a configuration, uninitialised, in training mode; ``auto``: the automatic class."""
    import transformers  # noqa: PLC0415
    from transformers.initialization import no_init_weights  # noqa: PLC0415

    automatic = getattr(transformers, auto)
    cls: object = automatic._model_mapping[type(made)]
    fused = getattr(cls, "_supports_sdpa", False) and attention != "eager"
    made._attn_implementation = "sdpa" if fused else "eager"
    with torch.device(device), no_init_weights():
        model: nn.Module = automatic.from_config(made, dtype=dtype)
    model.tie_weights()  # type: ignore[operator]  # left out with the initialisation
    model.train()
    return model


def _upcast(_module: nn.Module, _batch: object, output: object) -> None:
    """Cast the logits to fp32, as accelerate's ``convert_outputs_to_fp32`` does."""
    output.logits = output.logits.float()  # type: ignore[attr-defined]  # a transformers output


_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings",
)  # fmt: skip
#: Kinds of layers by the letters of a pattern.
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OF_EXPERTS = ("moe_intermediate_size",)
_SHARED = ("num_shared_experts",)
_HEAD_PARTS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PLAIN: dict[str, object] = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
#: Settings that switch dropout off, for families that train with it; and a token id that CWM's class needs.
_OFF: dict[str, dict[str, object]] = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "cwm": {"bos_token_id": 0},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}

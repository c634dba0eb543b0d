"""Checks the keys of a ``config.json`` that are not sizes of tensors: which are refused, and which need a note?

Every key is used, ignored as harmless, refused if its value has no formula, or named in a note.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import get_args

from zeroplan.catalog.config_gemma4 import period_of
from zeroplan.catalog.text import shown
from zeroplan.errors import NoFormulasError, SpecError
from zeroplan.spec.family import (
    FREE_ACTIVATION,
    GLOBAL_LAYERS,
    INDEXED_FAMILIES,
    LATENT_FAMILIES,
    LINEAR_FAMILIES,
    MOE_FAMILIES,
    PATTERNED,
    SOME_WINDOWED,
    USUAL_ACTIVATION,
    is_global,
)
from zeroplan.spec.traits import SAVES_ITS_INPUT, Activation
from zeroplan.transformer.families.definition import definition_of
from zeroplan.transformer.families.keys import ConfigKeys

Config = Mapping[str, object]
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window",
)  # fmt: skip
_EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts", "num_dense_layers")
_LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
INDEX_FIELDS = ("index_n_heads", "index_head_dim", "index_topk")
#: Fields of linear attention; in a config they have the prefix ``linear_``.
LINEAR_FIELDS = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
#: Keys that the readers of all families check in order to refuse another architecture.
_LOOKED_AT = (
    "num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "word_embed_proj_dim", "text_config", "layer_types",
)  # fmt: skip
#: Keys with the only values that the formulas cover, in all families; absent or null means the class's default.
ONLY: dict[str, tuple[object, ...]] = {
    "output_hidden_states": (False,),
    "output_attentions": (False,),
    "per_layer_config": ({},),
}
_MOST_NAMED = 12
_WAY_OUT = "`zeroplan profile --config` traces the model itself"
_OF_CAUSAL_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "LMModel")
_ROPE = ("rope_parameters", "rope_scaling")


def config_keys(family: str) -> ConfigKeys:
    """Return the description of a family's ``config.json``."""
    return definition_of(family).config


def notes_on_other_keys(config: Config, family: str) -> tuple[str, ...]:
    """Return notes on settings that are not counted; raises SpecError for settings that would be counted wrongly."""
    _refuse_values(config, family)
    _refuse_layer_types(config, family)
    _refuse_other_periods(config, family)
    notes = (
        *_dropout(config, family),
        *_counted_otherwise(config, family),
        *_another_head(config),
        *quantised(config),
        *_unknown(config, family),
    )
    return tuple(notes)


def activation_of(config: Config, family: str) -> Activation | None:
    """Return the MLP's activation function, or None for the family's usual one; raises SpecError for one without formulas."""
    key = config_keys(family).activation
    activation, usual = config.get(key), USUAL_ACTIVATION[family]
    if family in ("bloom", "gpt_oss", "apertus") or activation is None or activation == usual:
        return None
    if family not in FREE_ACTIVATION and activation in SAVES_ITS_INPUT:  # the usual one is among these
        return None
    known = get_args(Activation) if family in FREE_ACTIVATION else SAVES_ITS_INPUT
    if activation not in known:
        raise NoFormulasError(
            f"{key}={shown(activation)} in config.json has no formula: {family} may have {', '.join(known)}; {_WAY_OUT}"
        )
    return activation  # type: ignore[return-value]  # one of Activation


@cache
def harmless_keys() -> frozenset[str]:
    """Return the keys that change no tensor of a training step in any family (``harmless_keys.toml``)."""
    reasons = tomllib.loads(Path(__file__).with_name("harmless_keys.toml").read_text(encoding="utf-8"))
    return frozenset(key for keys in reasons.values() for key in keys.split())


@cache
def known_keys(family: str) -> frozenset[str]:
    """Return every key that is used, refused, named or harmless in a config of ``family``."""
    fields = (
        *_FIELDS,
        *(_EXPERT_FIELDS if family in MOE_FAMILIES else ()),
        *(_LATENT_FIELDS if family in LATENT_FAMILIES else ()),
        *(INDEX_FIELDS if family in INDEXED_FAMILIES else ()),
        *((f"linear_{field}" for field in (*LINEAR_FIELDS, "chunk_size")) if family in LINEAR_FAMILIES else ()),
    )
    own = config_keys(family)
    read = (key for field in fields for key in own.keys.get(field, (field,)))
    optional = ("use_sliding_window", "max_window_layers") if own.optional_window else ()
    return frozenset((
        *read, *optional, *own.read, *_LOOKED_AT, *own.fixed, own.activation, *own.dropout, *ONLY, *own.only, *own.not_null,
        *own.in_turn, *own.counted_as,
        *harmless_keys(), *(key for keys in own.harmless.values() for key in keys),
    ))  # fmt: skip


def unknown_keys(config: Config, family: str) -> tuple[str, ...]:
    """Return the config's keys that zeroplan does not know for this family."""
    known = known_keys(family)
    return tuple(str(key) for key in config if key not in known and config[key] is not None)


def listed(keys: Iterable[str]) -> str:
    """Return at most twelve keys as text, and the number of further ones."""
    every = list(keys)
    more = len(every) - _MOST_NAMED
    return ", ".join(shown(key)[1:-1] for key in every[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


# --- refusals -------------------------------------------------------------------------------------------------------------


def _refuse_values(config: Config, family: str) -> None:
    for key, allowed in (*ONLY.items(), *config_keys(family).only.items()):
        for value in _values(config, key):
            if value is not None and value not in allowed:
                counted = f"only {key}={allowed[0]} has" if allowed else "leave it out"
                raise NoFormulasError(
                    f"{key}={shown(value)} in config.json of a {family} model has no formula, {counted}; {_WAY_OUT}"
                )
    for key in config_keys(family).not_null:
        if key in config and not config[key]:
            raise NoFormulasError(
                f"{key}={shown(config[key])} in config.json has no formula: {family} always has one; {_WAY_OUT}"
            )


def _values(config: Config, key: str) -> Iterator[object]:
    """Yield the key's value, and that of the same key in the rotary parameters."""
    yield config.get(key)
    for name in _ROPE:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            yield inner.get(key)


def _refuse_layer_types(config: Config, family: str) -> None:
    """Raise SpecError if ``layer_types`` differs from the order that the family's class derives from its other keys."""
    types = config.get("layer_types")
    if types is None or family in PATTERNED:
        return
    if not isinstance(types, list | tuple) or not all(isinstance(kind, str) for kind in types):
        raise SpecError(f"layer_types={shown(types)} in config.json is not a list of names; correct it, or leave it out")
    if family in SOME_WINDOWED and config.get("use_sliding_window") is True:
        first = full_layers_of(config)
        if [*types] == [*first * ("full_attention",), *(len(types) - first) * ("sliding_attention",)]:
            return
    every = config_keys(family).window_every
    window = config.get("sliding_window", config_keys(family).defaults.get("sliding_window"))
    windows = ("sliding_attention",) if window is not None else ("sliding_attention", "full_attention")
    often = ("linear_attention",) if family in LINEAR_FAMILIES else windows
    for layer, kind in enumerate(types, start=1):
        local = not is_global(family, layer - 1) if family in GLOBAL_LAYERS else every is not None and layer % every
        local = bool(layer % period_of(config)) if family == "gemma4_text" else local
        full = ("indexed_attention" if family in INDEXED_FAMILIES else "full_attention",)
        if kind not in (often if local else full) and not _windowed(config, family, layer):
            raise NoFormulasError(
                f"layer_types in config.json makes layer {layer} {shown(kind)}, which has no formula in a {family}; {_WAY_OUT}"
            )


def _refuse_other_periods(config: Config, family: str) -> None:
    """Raise NoFormulasError for a list with one value per layer that does not follow the family's period."""
    for key, (often, rare) in config_keys(family).in_turn.items():
        types, every = config.get(key), GLOBAL_LAYERS[family]
        if types is not None and types != [often if layer % every else rare for layer in range(1, len(types) + 1)]:  # type: ignore[arg-type]
            raise NoFormulasError(
                f"{key}={shown(types)} in config.json has no formula: every {every}th layer of a {family} has {rare}, the others "
                f"{often}; {_WAY_OUT}"
            )


def _windowed(config: Config, family: str, layer: int) -> bool:
    """Whether other keys give a layer a window, in families where ``use_sliding_window`` turns windows on."""
    first = config.get("max_window_layers", 28)
    return (
        config_keys(family).optional_window
        and family not in SOME_WINDOWED
        and config.get("use_sliding_window") is True
        and isinstance(first, int)
        and layer > first
    )


def full_layers_of(config: Config) -> int:
    """Return how many layers of a Qwen2 or Qwen3 with a window have full attention; they come first.

    ``layer_types`` outweighs ``max_window_layers``, whose default is 28 (transformers 5.23, configuration_qwen2.py).
    """
    types, first = config.get("layer_types"), config.get("max_window_layers", 28)
    if isinstance(types, list | tuple):
        return types.count("full_attention")
    return first if isinstance(first, int) else 28


# --- notes ----------------------------------------------------------------------------------------------------------------


def _dropout(config: Config, family: str) -> Iterator[str]:
    rates = {key: config.get(key, default) for key, default in config_keys(family).dropout.items()}
    values = [f"{key}={shown(rate)}" for key, rate in rates.items() if rate]
    if values:
        yield (
            f"config.json trains with dropout ({', '.join(values)}), which is counted as off: each one keeps a mask of a byte per "
            "element, of the scores too where attention is eager"
        )


def _counted_otherwise(config: Config, family: str) -> Iterator[str]:
    own = config_keys(family)
    for key, (counted, instead) in own.counted_as.items():
        for value in (*(value for value in _values(config, key) if value is not None),) or (own.assumed.get(key, counted),):
            if value != counted:
                yield f"config.json has {key}={shown(value)}, which is counted as {counted}: {instead}"


def _another_head(config: Config) -> Iterator[str]:
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list | tuple) else ():
        if isinstance(name, str) and not name.endswith(_OF_CAUSAL_MODELS):
            yield f"config.json is of a {shown(name)[1:-1]}; a language model's head and loss are counted"


def quantised(config: Config) -> Iterator[str]:
    """Yield a note if the checkpoint is quantised, since training does not use that format."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    stored = "" if method is None else f" ({shown(method)})"
    yield (
        f"config.json has a quantization_config{stored}, which is not counted: all weights are counted as --precision trains them; "
        "for frozen weights in 4 bits under adapters, add --lora-rank 16 --quantize nf4"
    )


def _unknown(config: Config, family: str) -> Iterator[str]:
    keys = unknown_keys(config, family)
    if keys:
        yield f"config.json has keys that a {family} model has not, which are ignored: {listed(keys)}; {_WAY_OUT}"

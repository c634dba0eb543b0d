"""Keys of Gemma 4's ``config.json``: two architectures, with and without embeddings of each layer."""

from collections.abc import Mapping

from zeroplan.catalog.text import shown
from zeroplan.errors import NoFormulasError

Config = Mapping[str, object]

_WAY_OUT = "`zeroplan profile --config` traces the model itself"
#: By whether a model has embeddings of each layer: the only values of its keys that have formulas, the class's default first.
#: Source: transformers 5.23, models/gemma4/configuration_gemma4.py.
_ONLY: dict[bool, dict[str, tuple[object, ...]]] = {
    True: {"attention_k_eq_v": (False, None), "enable_moe_block": (False, None)},
    False: {"attention_k_eq_v": (True,), "num_kv_shared_layers": (0, None), "use_double_wide_mlp": (False, None)},
}
_DEFAULTS: dict[str, object] = {"attention_k_eq_v": False}


def has_own_embeddings(config: Config) -> bool:
    """Whether a Gemma 4 has embeddings of each layer (E2B, E4B), as it has by default."""
    return bool(config.get("hidden_size_per_layer_input", 256 if config.get("model_type") == "gemma4_text" else 0))


def period_of(config: Config) -> int:
    """Return how many layers there are from one of full attention to the next: six, if ``layer_types`` says nothing else."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple) and "full_attention" in kinds and has_own_embeddings(config):
        return kinds.index("full_attention") + 1
    return 6


def of_full_attention(config: Config) -> Config:
    """Return a Gemma 4's config with the keys of its checkpoint, where transformers has saved ``per_layer_config`` instead."""
    said, layers = config.get("per_layer_config"), config.get("num_hidden_layers")
    if config.get("model_type") not in ("gemma4_text", "gemma4_unified_text") or not isinstance(said, Mapping) or not said:
        return config
    own, every = next(iter(said.values())), period_of(config)
    full = [str(layer) for layer in range(every - 1, layers, every)] if isinstance(layers, int) else []
    if not isinstance(own, Mapping) or dict.fromkeys(full, own) != {
        str(layer).lstrip("0"): heads for layer, heads in said.items()
    }:
        raise NoFormulasError(
            "per_layer_config in config.json has no formula: layers of full attention alone have heads of their own, all the same; "
            f"{_WAY_OUT}"
        )
    keys = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    rest = {key: value for key, value in config.items() if key != "per_layer_config"}
    return {**rest, **{keys[key]: value for key, value in own.items() if key in keys}}


def refuse_other_gemmas(config: Config) -> None:
    """Raise NoFormulasError for a Gemma 4 that is like none of those published."""
    own = has_own_embeddings(config)
    if "final_logit_softcapping" not in config:
        raise NoFormulasError(f"config.json lacks final_logit_softcapping, which is None then, and has no formula; {_WAY_OUT}")
    for key, allowed in _ONLY[own].items():
        said = config.get(key, _DEFAULTS.get(key))
        if said not in allowed:
            beside = "with" if own else "without"
            raise NoFormulasError(
                f"{key}={shown(said)} in config.json has no formula: a gemma4_text {beside} embeddings of each layer "
                f"(hidden_size_per_layer_input) has {key}={allowed[0]}; {_WAY_OUT}"
            )

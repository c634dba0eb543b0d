"""Reads the shape of a model from a Hugging Face ``config.json``.

Keys, aliases and defaults are those of the configuration classes of transformers 5.23
(``models/<family>/configuration_<family>.py``). If a config lacks a key whose default sizes the model as no real
``config.json`` does, the reader asks for the key. It refuses what would change the parameters without a formula in zeroplan.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from zeroplan.catalog.config_gemma4 import has_own_embeddings, of_full_attention, period_of, refuse_other_gemmas
from zeroplan.catalog.config_keys import EXAONE_DEFAULTS, EXAONE_NAMES, OTHER_KINDS, SAME_AS
from zeroplan.catalog.config_parts import text_part
from zeroplan.catalog.config_rest import (
    INDEX_FIELDS,
    LINEAR_FIELDS,
    activation_of,
    config_keys,
    full_layers_of,
    listed,
    notes_on_other_keys,
    quantised,
    unknown_keys,
)
from zeroplan.catalog.text import one_line, read_text, shown, strict_json
from zeroplan.errors import NoFormulasError, SpecError, nearest, unknown_name
from zeroplan.numeric import ceil_div
from zeroplan.spec.family import (
    FAMILIES,
    INDEXED_FAMILIES,
    LATENT_FAMILIES,
    LINEAR_FAMILIES,
    MAY_BE_DENSE,
    MOE_FAMILIES,
    ONE_WIDTH_FAMILIES,
    PATTERNED,
    PLAIN_HEADS,
    SOME_WINDOWED,
    TRAITS,
    WIDE_SHARED_EXPERTS,
)
from zeroplan.spec.model import LinearSpec, MlaSpec, ModelSpec, MoeSpec, PerLayerSpec

Config: TypeAlias = Mapping[str, object]
#: Kinds of layers in a config, by its own names and those of transformers 5, and their letters in a pattern.
LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E", "conv": "C",
}  # fmt: skip
#: Keys of Kimi Linear's ``linear_attn_config``, and transformers' for the same.
_OF_LINEAR_ATTENTION = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip
_MOST_LAYERS = 10**4
_GLOBAL_HEADS = ("global_head_dim", "global_key_value_heads")
_LARGEST = 2 * 10**7
"""More than every width, vocabulary and context in use."""


def model_from_config(config: Mapping[str, object], *, name: str = "", treat_as: str | None = None) -> ModelSpec:
    """Return the shape of the model that a ``config.json`` describes.

    For a multimodal config it is the text part, with the vision tower if zeroplan knows its weights. Otherwise the name says
    "text part".
    ``treat_as``: the family whose formulas to use whatever ``model_type`` is. :func:`config_with_notes` also returns notes on what
    is not counted. Multi-token-prediction layers need no note, since transformers does not build them.

    >>> model_from_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    ...                    "vocab_size": 50257}).intermediate_size
    3072
    """
    return config_with_notes(config, name=name, treat_as=treat_as).model


class ConfigRead(NamedTuple):
    """A model's shape, and notes on parts of its ``config.json`` that are not counted."""

    model: ModelSpec
    notes: tuple[str, ...]


def config_with_notes(config: Mapping[str, object], *, name: str = "", treat_as: str | None = None) -> ConfigRead:
    """Return the shape, with notes on parts of the config that are not counted."""
    if not isinstance(config, Mapping):
        raise SpecError(f"config.json holds {shown(config)}, not a JSON object; give the model's own config.json")
    _refuse_other_kinds(config)
    part = text_part(config)
    text, is_part = _of_exaone(_of_kimi(of_full_attention(part.config))), part.is_part
    source = _Source(text, _family(text, treat_as))
    _demand_required(source)
    _refuse_other_architectures(source)
    model = replace(_spec(source, f"{name}{part.words}".lstrip()), vision=part.vision, head_rows=part.head_rows)
    beside = quantised(config) if is_part else ()
    return ConfigRead(
        model, (*part.notes, *_treated(text.get("model_type"), treat_as), *beside, *notes_on_other_keys(text, source.family))
    )


def _of_kimi(config: Config) -> Config:
    """Return a Kimi Linear's config with the keys that transformers makes of ``linear_attn_config``, and of missing lists."""
    layers, own = config.get("num_hidden_layers"), config.get("linear_attn_config")
    if config.get("model_type") != "kimi_linear" or not isinstance(layers, int) or layers > _MOST_LAYERS:
        return config
    own = own if isinstance(own, Mapping) else {}
    full, kinds = own.get("full_attn_layers"), ("linear_attention", "full_attention")
    every = [kinds[layer > 0 and layer % 4 == 0] for layer in range(layers)]
    if isinstance(full, list | tuple):
        every = [kinds[layer in full] for layer in range(1, layers + 1)]
    dense = config.get("first_k_dense_replace", 1)
    dense = dense if isinstance(dense, int) else 1
    found = {key: own[old] for old, key in _OF_LINEAR_ATTENTION.items() if old in own}
    made = {"layer_types": every, "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)]}
    return {**config, **found, **{key: value for key, value in made.items() if config.get(key) is None}}


def _of_exaone(config: Config) -> Config:
    """Return an EXAONE 3's config with Llama's keys, and the defaults of its own class."""
    if config.get("model_type") != "exaone":
        return config
    said = {key: value for key, value in config.items() if key != "embed_dropout" or value}  # of LG's own code
    return {**EXAONE_DEFAULTS, **{EXAONE_NAMES.get(key, key): value for key, value in said.items()}}


def _treated(model_type: object, treat_as: str | None) -> Iterator[str]:
    if treat_as is not None and model_type != treat_as:
        yield (
            f"model_type {shown(model_type)} is counted as a {treat_as} model, as --treat-as asks: with the parameters and "
            f"activations of a {treat_as} of its sizes, which is wrong where the architecture differs; `zeroplan profile --config` "
            "traces its own"
        )


def read_config(path: Path, *, treat_as: str | None = None, name: str = "") -> ModelSpec:
    """Return the shape of the model in the ``config.json`` at ``path`` or in the folder ``path``.

    Its name is ``name``, or the folder's, or that of file and folder if ``path`` is the file.
    """
    return read_config_with_notes(path, treat_as=treat_as, name=name).model


def read_config_with_notes(path: Path, *, treat_as: str | None = None, name: str = "") -> ConfigRead:
    """Return the shape in the ``config.json`` at ``path``, with notes on what of the file is not counted."""
    file = _config_file(path)
    config = strict_json(read_text(file, what="config.json"), f"config.json {str(file)!r}")
    return config_with_notes(config, name=name or named_after(path, file), treat_as=treat_as)  # type: ignore[arg-type]  # it refuses what is no object


def is_content(text: str) -> bool:
    """Whether the value of ``--config`` is the content of a config.json, a JSON object, rather than a path.

    >>> is_content('{"model_type": "gpt2"}'), is_content("gpt2/config.json")
    (True, False)
    """
    return text.lstrip().startswith("{")


def shape_of_config(given: str, *, treat_as: str | None = None) -> ConfigRead:
    """Return the shape and notes for the value of ``--config``: a path, or the content itself."""
    if not is_content(given):
        return read_config_with_notes(Path(given), treat_as=treat_as)
    content = strict_json(given, "the config.json given as text")
    return config_with_notes(content, name="config.json", treat_as=treat_as)  # type: ignore[arg-type]  # it refuses what is no object


def named_after(path: Path, file: Path) -> str:
    """Return a name for the model of a configuration file: the folder's, or folder and file if ``path`` is the file."""
    folder = file.resolve().parent.name
    return folder if file != path else f"{folder}/{file.name}".lstrip("/")


def _config_file(path: Path) -> Path:
    try:
        is_folder = path.is_dir()
        empty = is_folder and not (path / "config.json").exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error))
        raise SpecError(f"config.json {str(path)!r} cannot be read: {reason}; check the path and its permissions") from None
    if empty:
        raise SpecError(f"folder {str(path)!r} holds no config.json; give the folder or file of a Hugging Face model")
    return path / "config.json" if is_folder else path


class _Source(NamedTuple):
    """A config with its family, which gives the keys and defaults."""

    config: Config
    family: str

    def keys(self, field: str) -> tuple[str, ...]:
        """Return all keys that may contain ``field``."""
        return config_keys(self.family).keys.get(field, (field,))

    def key(self, field: str) -> str:
        """Return the config's key for ``field``; the usual key if the config has none."""
        return next((key for key in self.keys(field) if self.config.get(key) is not None), self.keys(field)[0])

    def states(self, field: str) -> bool:
        """Whether the config has a value for ``field``."""
        return self.config.get(self.key(field)) is not None

    def value(self, field: str) -> object:
        """Return the value of ``field``: the config's, or the class's default if the key is absent; None if it is null."""
        found = {key: self.config[key] for key in self.keys(field) if self.config.get(key) is not None}
        if len(found) > 1 and any(value != found[self.key(field)] for value in found.values()):
            pairs = " and ".join(f"{key}={shown(value)}" for key, value in found.items())
            raise SpecError(f"{pairs} disagree in config.json; keep the right one")
        if found or any(key in self.config for key in self.keys(field)):
            return found.get(self.key(field))
        return config_keys(self.family).defaults.get(field)

    def integer(self, field: str, fallback: int | None = None, *, least: int = 1) -> int:
        """Return ``field`` as an integer; ``fallback`` if neither config nor class has a value."""
        found = self.optional_integer(field, least=least)
        if found is not None:
            return found
        if fallback is None:
            key = self.key(field)
            raise SpecError(f"{key} is null in config.json; write its number" if key in self.config else f"lacks {key}; add it")
        return fallback

    def optional_integer(self, field: str, *, least: int = 1) -> int | None:
        """Return ``field`` as an integer, or None without a value."""
        value, key = self.value(field), self.key(field)
        if isinstance(value, list | tuple) and len(value) > 1 and all(one == value[0] for one in value):
            value = value[0]  # the same in every layer
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(f"{key}={shown(value)} in config.json is not a whole number; write it as one, without quotes")
        if not least <= value <= _LARGEST:
            raise SpecError(f"{key}={shown(value)} in config.json is out of range; it must be from {least} to {_LARGEST:,}")
        return value

    def flag(self, field: str) -> bool:
        """Return ``field`` as a boolean; False without a value."""
        value = self.value(field)
        if value is not None and not isinstance(value, bool):
            raise SpecError(f"{self.key(field)}={shown(value)} in config.json is neither true nor false; write one of them")
        return bool(value)


def _refuse_diffusers(config: Config) -> None:
    from zeroplan.catalog.diffusion import diffuser_of, is_diffuser  # noqa: PLC0415  few files need it

    if is_diffuser(config):
        raise NoFormulasError(
            f"{diffuser_of(config).class_name} of diffusers has no formulas; `zeroplan profile --config` traces it"
        )


def _refuse_other_kinds(config: Config) -> None:
    """Raise NoFormulasError for anything but a decoder-only transformer, also with --treat-as."""
    if "_class_name" in config:
        _refuse_diffusers(config)
    model_type = config.get("model_type")
    kinds = [f"model_type {shown(model_type)} is {kind}" for kind, types in OTHER_KINDS.items() if model_type in types]
    if config.get("is_encoder_decoder") is True:
        kinds.append("is_encoder_decoder=True in config.json")
    for kind in kinds:
        raise NoFormulasError(
            f"{kind}: zeroplan has formulas for decoder-only transformers; `zeroplan profile --config` traces others, and "
            "--workload any module"
        )


def _family(config: Config, treat_as: str | None) -> str:
    model_type = config.get("model_type")
    if treat_as is not None:
        return _known_family(treat_as)
    if model_type is None:
        raise SpecError("config.json has no model_type; add it, or name the shape with --treat-as llama")
    if not isinstance(model_type, str):
        raise SpecError(f"model_type={shown(model_type)} in config.json is not a name; write one like 'llama'")
    family = SAME_AS.get(model_type, model_type)
    if family not in FAMILIES:
        raise NoFormulasError(
            f"model_type {shown(model_type)} has no formulas ({nearest(model_type, FAMILIES) or 'none is near'}; "
            "`zeroplan models` lists all architectures that have); "
            f"`zeroplan profile --config` traces it, --treat-as llama counts a Llama of its sizes{_ignored(config)}"
        )
    return family


def _ignored(config: Config) -> str:
    keys = unknown_keys(config, "llama")
    return f" and ignores {listed(keys)}" if keys else ""


def _known_family(treat_as: str) -> str:
    if treat_as not in FAMILIES:
        raise unknown_name("architecture", treat_as, FAMILIES, "`zeroplan models` lists all")
    return treat_as


def _refuse_other_architectures(source: _Source) -> None:
    """Raise SpecError for keys that add or remove parameters that the family's class does not have."""
    config, family = source
    for key, only in config_keys(family).fixed.items():
        if config.get(key) is not None and config[key] != only:
            raise NoFormulasError(f"{key}={shown(config[key])} in config.json has no formula: {family} always has {key}={only}")
    if family == "internlm3" and source.flag("attention_bias") != source.flag("mlp_bias"):
        raise NoFormulasError("bias and qkv_bias in config.json differ, which transformers' InternLM3 refuses; set both alike")
    if family not in MOE_FAMILIES:
        for key in ("num_experts", "num_local_experts", "n_routed_experts"):
            if config.get(key) not in (None, 0, 1):
                raise NoFormulasError(f"{key}={shown(config[key])} in config.json: {family} has no experts; {_moe_way_out()}")
    if family not in LATENT_FAMILIES and config.get("kv_lora_rank") is not None:
        raise NoFormulasError(
            f"kv_lora_rank={shown(config['kv_lora_rank'])} in config.json: only {' and '.join(LATENT_FAMILIES)} have "
            "latent attention"
        )
    if family in _REFUSED:
        _REFUSED[family](source)
    width = config.get("word_embed_proj_dim")
    if width is not None and width != config.get("hidden_size"):
        raise NoFormulasError(f"word_embed_proj_dim={shown(width)} in config.json has no formula; it must equal hidden_size")


def _refuse_other_minimaxes(source: _Source) -> None:
    if 2 * source.integer("rotary_dim") != source.integer("head_dim"):
        raise NoFormulasError(
            f"rotary_dim={shown(source.config['rotary_dim'])} in config.json has no formula, only half of head_dim has; "
            "`zeroplan profile --config` traces the model itself"
        )


def _refuse_other_phis(source: _Source) -> None:
    """Raise NoFormulasError where positions rotate more or fewer elements of a head than in the published models."""
    ropes = [one for key in ("rope_parameters", "rope_scaling") if isinstance(one := source.config.get(key), Mapping)]
    factors = [one["partial_rotary_factor"] for one in (source.config, *ropes) if "partial_rotary_factor" in one] or [0.5]
    head_dim, width = source.integer("hidden_size") // source.integer("num_attention_heads"), TRAITS["phi"].rotary_width
    for factor in factors:
        if not isinstance(factor, int | float) or int(head_dim * factor) != width:
            raise NoFormulasError(
                f"partial_rotary_factor={shown(factor)} in config.json has no formula: {width} elements of a head of {head_dim} "
                "have rotary positions; `zeroplan profile --config` traces the model itself"
            )


def _refuse_other_heliums(source: _Source) -> None:
    """Raise NoFormulasError where the output projection, which reads hidden_size elements, does not fit the heads."""
    hidden, heads = source.integer("hidden_size"), source.integer("num_attention_heads")
    if heads * _head_dim(source, hidden, heads) != hidden:
        raise NoFormulasError(
            f"head_dim={shown(source.value('head_dim'))} in config.json has no formula: a helium's hidden_size is head_dim times "
            "its heads; `zeroplan profile --config` traces the model itself"
        )


def _refuse_other_falcons(source: _Source) -> None:
    """Raise NoFormulasError for a Falcon that is like none of 7B, 40B and 180B."""
    new, config = source.flag("new_decoder_architecture"), source.config
    heads, key_value_heads = source.integer("num_attention_heads"), config.get("num_kv_heads")
    keys = ("num_ln_in_parallel_attn", "multi_query", "num_kv_heads")
    norms_differ = config.get(keys[0]) not in ((None, 2) if new else (None, 1))
    if norms_differ or (key_value_heads in (None, 1, heads) if new else config.get("multi_query") is False):
        values = ", ".join(f"{key}={shown(config[key])}" for key in ("new_decoder_architecture", *keys) if key in config)
        raise NoFormulasError(
            f"{values} in config.json has no formula: a falcon model has one key/value head and one norm, or with "
            f"new_decoder_architecture several and two; `zeroplan profile --config` traces others"
        )


_REFUSED = {
    "gemma4_text": lambda source: refuse_other_gemmas(source.config),
    "minimax_m2": _refuse_other_minimaxes, "phi": _refuse_other_phis,
    "helium": _refuse_other_heliums, "falcon": _refuse_other_falcons,
}  # fmt: skip


def _moe_way_out() -> str:
    return f"--treat-as takes {', '.join(MOE_FAMILIES)} for a model with experts"


def _demand_required(source: _Source) -> None:
    fields = config_keys(source.family).required
    if source.family == "gemma4_text" and has_own_embeddings(source.config):
        fields = tuple([field for field in fields if field != "global_key_value_heads"])
    if TRAITS[source.family].one_module and "E" in _letters(source):
        fields = (*fields, "moe_intermediate_size", "shared_expert_intermediate_size")
    if source.family == "gemma4_text" and _some_layers_have_experts(source):
        fields = (*fields, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    nullable = ("q_lora_rank",)
    missing = [
        source.keys(field)[0]
        for field in fields
        if not source.states(field) and not (field in nullable and field in source.config)
    ]
    if missing:
        raise SpecError(f"config.json of a {source.family} model lacks {', '.join(missing)}; add what is missing")


def _spec(source: _Source, name: str) -> ModelSpec:
    try:
        return ModelSpec(name=name, family=source.family, **_shape(source))  # type: ignore[arg-type]  # it checks itself
    except SpecError as error:
        raise type(error)(f"config.json: {error}") from None


def _shape(source: _Source) -> dict[str, object]:
    hidden, heads = source.integer("hidden_size"), source.integer("num_attention_heads")
    head_dim, context = _head_dim(source, hidden, heads), source.integer("max_position_embeddings")
    return {
        "hidden_size": hidden,
        "intermediate_size": _intermediate_size(source, hidden),
        "num_hidden_layers": source.integer("num_hidden_layers", 1 if source.family in PATTERNED else None),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(source, heads),
        "head_dim": head_dim,
        "vocab_size": source.integer("vocab_size"),
        "max_position_embeddings": context,
        "positions": _positions(source.family, context),
        "tie_word_embeddings": source.flag("tie_word_embeddings"),
        "attention_bias": _bias(source, "attention_bias"),
        "mlp_bias": _bias(source, "mlp_bias"),
        "sliding_window": _window(source),
        **_full_layers(source),
        "hidden_act": activation_of(source.config, source.family),
        **_of_neox(source),
        **({"use_qk_norm": source.flag("use_qk_norm")} if TRAITS[source.family].head_norms is None else {}),
        "moe": _moe(source),
        "mla": _mla(source),
        "linear": _linear(source),
        **_of_layers(source),
        **(_of_gemma_4(source) if source.family == "gemma4_text" else {}),
    }


def _of_gemma_4(source: _Source) -> dict[str, object]:
    """Return the heads of layers of full attention, and the embeddings of each layer, in models with such."""
    if not has_own_embeddings(source.config):
        return {name: source.integer(name) for name in _GLOBAL_HEADS}
    shared = source.integer("num_kv_shared_layers", 0, least=0)
    own = PerLayerSpec(
        width=source.integer("hidden_size_per_layer_input", 256), vocab_size=source.integer("vocab_size_per_layer_input"),
        global_every=period_of(source.config), shared_layers=shared, wide_mlp=shared > 0 and source.flag("use_double_wide_mlp"),
    )  # fmt: skip
    heads = {
        "global_head_dim": source.integer("global_head_dim"),
        "global_key_value_heads": source.integer("num_key_value_heads"),
    }
    return {**heads, "per_layer": own}


def _intermediate_size(source: _Source, hidden: int) -> int:
    if source.family == "lfm2" and source.config.get("block_auto_adjust_ff_dim", True):
        multiple = source.integer("block_multiple_of", 256)
        return ceil_div(2 * source.integer("intermediate_size") // 3, multiple) * multiple
    if source.family not in ("gpt2", "bloom", "falcon"):
        return source.integer("intermediate_size")
    width = source.integer("intermediate_size", 4 * hidden)
    if source.family == "bloom" and width != 4 * hidden:
        raise NoFormulasError(f"n_inner={width} in config.json has no formula: bloom always has 4·hidden_size = {4 * hidden}")
    return width


def _key_value_heads(source: _Source, heads: int) -> int:
    key_value_heads = source.integer("num_key_value_heads", heads)
    if source.family == "falcon" and not source.flag("new_decoder_architecture"):
        return 1
    origin = "in config.json" if source.states("num_key_value_heads") else "(the default, config.json states none)"
    if source.family in (*PLAIN_HEADS, *LATENT_FAMILIES) and key_value_heads != heads:
        raise NoFormulasError(
            f"num_key_value_heads={key_value_heads} {origin} has no formula: "
            f"{source.family} has as many as attention heads, {heads}"
        )
    if heads % key_value_heads:
        raise SpecError(
            f"num_key_value_heads={key_value_heads} {origin} does not divide the {heads} attention heads; correct one"
        )
    return key_value_heads


def _head_dim(source: _Source, hidden: int, heads: int) -> int:
    if source.family in LATENT_FAMILIES:
        return source.integer("qk_nope_head_dim") + source.integer("qk_rope_head_dim")
    stated = source.optional_integer("head_dim")
    if stated is not None and (source.family not in PLAIN_HEADS or stated * heads == hidden):
        return stated
    if hidden % heads or stated is not None:
        found = "" if stated is None else f", head_dim={stated}"
        raise SpecError(
            f"{source.key('num_attention_heads')}={heads} does not divide {source.key('hidden_size')}={hidden}{found} "
            "in config.json; correct them or state head_dim"
        )
    return hidden // heads


def _positions(family: str, context: int) -> int:
    """Return the rows of a learned position table; OPT has two more (``OPTLearnedPositionalEmbedding.offset``)."""
    return {"gpt2": context, "opt": context + 2}.get(family, 0)


def _bias(source: _Source, field: str) -> bool:
    fixed = config_keys(source.family).fixed.get(field)
    return source.flag(field) if fixed is None else bool(fixed)


def _of_neox(source: _Source) -> dict[str, object]:
    """Return whether MLP and attention of GPT-NeoX read the same input, as a field."""
    if source.family != "gpt_neox":
        return {}
    in_parallel = source.config.get("use_parallel_residual") is None or source.flag("use_parallel_residual")
    return {"parallel_residual": in_parallel}


def _window(source: _Source) -> int | None:
    if config_keys(source.family).optional_window and not (source.flag("use_sliding_window") and _some_layers_have_it(source)):
        return None
    return source.optional_integer("sliding_window")


def _full_layers(source: _Source) -> dict[str, int]:
    """Return the number of layers of full attention before those with a window, as a field, in families that may have some."""
    if source.family not in SOME_WINDOWED or _window(source) is None:
        return {}
    return {"max_window_layers": full_layers_of(source.config)}


def _some_layers_have_it(source: _Source) -> bool:
    """Whether some layers have a window: in Qwen2 and Qwen3 those from ``max_window_layers`` on; in Qwen3-MoE all."""
    if source.family == "qwen3_moe":
        return True
    first = source.integer("max_window_layers", 28, least=0)
    return (full_layers_of(source.config) if source.family in SOME_WINDOWED else first) < source.integer("num_hidden_layers")


def _moe(source: _Source) -> MoeSpec | None:
    if source.family not in MOE_FAMILIES or (source.family in MAY_BE_DENSE and not _some_layers_have_experts(source)):
        return None
    width = "intermediate_size" if source.family in ONE_WIDTH_FAMILIES else "moe_intermediate_size"
    return MoeSpec(
        num_experts=source.integer("num_experts"),
        num_experts_per_tok=source.integer("num_experts_per_tok"),
        moe_intermediate_size=source.integer(width),
        num_shared_experts=_shared_experts(source),
        num_dense_layers=_dense_layers(source),
        latent_size=source.integer("moe_latent_size", 0, least=0) if source.family == "nemotron_h" else 0,
        num_groups=_groups(source),
    )


def _groups(source: _Source) -> int:
    """Return the groups of experts that DeepSeek-V2's router chooses from; 0 where it chooses among all experts."""
    if source.family != "deepseek_v2" or source.config.get("topk_method") != "group_limited_greedy":
        return 0
    return source.integer("n_group")


def _some_layers_have_experts(source: _Source) -> bool:
    if source.family == "gemma4_text":
        return source.flag("enable_moe_block")
    return "E" in _letters(source) if TRAITS[source.family].one_module else source.value("num_experts") != 0


def _shared_experts(source: _Source) -> int:
    """Return the number of shared experts. One wide shared expert counts as several of the routed experts' width."""
    if source.family not in WIDE_SHARED_EXPERTS:
        return source.integer("num_shared_experts", 0, least=int(source.family in LATENT_FAMILIES))
    shared, width = source.integer("shared_expert_intermediate_size"), source.integer("moe_intermediate_size")
    if shared % width:
        raise NoFormulasError(
            f"shared_expert_intermediate_size={shared} in config.json has no formula: it must be a multiple of "
            f"moe_intermediate_size={width}"
        )
    return shared // width


def _linear(source: _Source) -> LinearSpec | None:
    if source.family not in LINEAR_FAMILIES:
        return None
    if source.family == "olmo_hybrid":
        source = _with_sizes_of_olmo(source)
    sizes = {field: source.integer(f"linear_{field}") for field in LINEAR_FIELDS if field != "value_head_dim"}
    if source.family not in PATTERNED or source.family == "kimi_linear":
        return LinearSpec(value_head_dim=source.integer("linear_value_head_dim"), **sizes)
    chunk, heads = source.integer("linear_chunk_size"), sizes["num_value_heads"]
    if TRAITS[source.family].one_module or source.family == "minimax":
        return LinearSpec(value_head_dim=source.integer("linear_value_head_dim"), chunk_size=chunk, **sizes)
    inner, value_heads = (
        source.integer("mamba_expand", 2) * source.integer("hidden_size"),
        source.value("linear_value_head_dim"),
    )
    if TRAITS[source.family].one_kind:
        if source.flag("mamba_rms_norm") and source.config.get("mamba_norm_before_gate") is not False:
            raise NoFormulasError(
                "mamba_norm_before_gate=True in config.json has no formula, only False has, or mamba_rms_norm=False"
            )
        inner = source.integer("mamba_d_ssm", inner) if "mamba_d_ssm" in source.config else 1024
    width = inner // heads if value_heads in (None, "auto") else source.integer("linear_value_head_dim")
    if width * heads != inner:
        raise SpecError(
            f"mamba_n_heads={heads} does not divide the state space's width {inner} into heads of mamba_d_head={width} in "
            "config.json; correct them"
        )
    return LinearSpec(value_head_dim=width, chunk_size=chunk, **sizes)


def _with_sizes_of_olmo(source: _Source) -> _Source:
    """Return the config of an OLMo Hybrid with the sizes of linear attention that its class derives from others."""
    heads, hidden = source.integer("num_attention_heads"), source.integer("hidden_size")
    width = source.integer("linear_key_head_dim", 3 * hidden // (4 * source.integer("linear_num_key_heads", heads)))
    derived = {
        "linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_key_head_dim": width,
        "linear_value_head_dim": 2 * width,
    }  # fmt: skip
    stated = {key: value for key, value in source.config.items() if value is not None}
    return source._replace(config={**derived, **stated})


def _has_positions(source: _Source) -> bool:
    """Whether attention has rotary positions, where a config may turn them off: OLMo Hybrid's with a null ``rope_theta``."""
    rope = source.config.get("rope_parameters")
    return not isinstance(rope, Mapping) or rope.get("rope_theta", 0) is not None


def _of_layers(source: _Source) -> dict[str, object]:
    """Return the layers' letters and whether attention has rotary positions, for families whose configs contain them."""
    if source.family not in PATTERNED:
        return {"rotary": _has_positions(source)} if TRAITS[source.family].rotary_optional else {}
    letters, traits = _letters(source), TRAITS[source.family]
    rotary = not traits.rotary_optional or source.config.get("position_embedding_type") == "rope"
    layers = len(letters) if traits.one_module else source.integer("num_hidden_layers")
    if len(letters) < layers:
        raise SpecError(f"layer_types in config.json names {len(letters)} of {layers} layers; correct one")
    return {"layer_pattern": letters[:layers], "rotary": rotary, "num_hidden_layers": layers}


def _letters(source: _Source) -> str:
    pattern, layers = source.value("layer_pattern"), source.optional_integer("num_hidden_layers") or 0
    if source.family == "llama4_text":
        return _of_llama_4(source, layers)
    if source.family == "exaone_moe":
        return _of_exaone_moe(source, layers)
    if TRAITS[source.family].one_kind:
        return ("N" if source.flag("mamba_rms_norm") else "H") * layers
    often = TRAITS[source.family].pattern[0]
    if pattern is None:
        key = "full_attn_idxs" if source.family == "lfm2" else "attn_layer_indices"
        full = range(layers) if source.family == "lfm2" and source.config.get(key) is None else source.config.get(key) or ()
        if not isinstance(full, list | tuple | range):
            raise SpecError(f"{key}={shown(full)} in config.json is not a list of layers; correct it")
        return "".join("*" if layer in full else often for layer in range(layers))
    if not isinstance(pattern, str | list | tuple):
        raise SpecError(f"{source.key('layer_pattern')}={shown(pattern)} in config.json is not a list of names; correct it")
    letters = [kind if kind in LETTERS.values() else LETTERS.get(str(kind)) for kind in pattern]
    for letter, kind in zip(letters, pattern, strict=True):
        if letter is None or letter not in TRAITS[source.family].pattern:
            raise NoFormulasError(
                f"{source.key('layer_pattern')} in config.json has {shown(kind)}, which has no formula in a {source.family}; "
                "`zeroplan profile --config` traces the model itself"
            )
    return _with_dense_first(source, "".join(map(str, letters)))


def _with_dense_first(source: _Source, letters: str) -> str:
    """Return the letters of an LFM2-MoE, whose first layers have no experts, or of a Kimi Linear, whose dense layers are listed."""
    kinds = source.config.get("mlp_layer_types")
    if source.family == "kimi_linear" and isinstance(kinds, list | tuple):
        dense_of = {"M": "m", "*": "D"}
        return "".join(dense_of[one] if kind == "dense" else one for one, kind in zip(letters, kinds, strict=False))
    dense = source.integer("num_dense_layers", 2, least=0) if source.family == "lfm2_moe" else 0
    return letters[:dense].replace("C", "c").replace("*", "D") + letters[dense:]


def _of_exaone_moe(source: _Source, layers: int) -> str:
    """Return a letter for each layer of a K-EXAONE: dense layers come first; every fourth layer has no window."""
    kinds, mlps = source.config.get("layer_types"), source.config.get("mlp_layer_types")
    usual = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(1, layers + 1)]
    dense = mlps.count("dense") if isinstance(mlps, list) else source.integer("first_k_dense_replace", 1, least=0)
    if mlps not in (None, ["dense"] * dense + ["sparse"] * (layers - dense)) or kinds not in (None, usual) or dense > 3:
        raise NoFormulasError(
            f"layer_types, mlp_layer_types and first_k_dense_replace={dense} in config.json have no formula: every fourth layer "
            "alone has full attention, and at most three dense layers come first; `zeroplan profile --config` traces the model"
        )
    return "D" * min(dense, layers) + "".join("LLLG"[layer % 4] for layer in range(dense, layers))


def _of_llama_4(source: _Source, layers: int) -> str:
    """Return a letter for each layer: every fourth has full attention without positions, and experts."""
    step = source.integer("interleave_moe_layer_step", 1)
    routed = source.config.get("moe_layers") or range(step - 1, layers, step)
    rotary = source.config.get("no_rope_layers") or [int(layer % 4 != 0) for layer in range(1, layers + 1)]
    if not isinstance(routed, list | range) or not isinstance(rotary, list) or len(rotary) < layers:
        raise SpecError("moe_layers and no_rope_layers in config.json are no lists of layers; correct them")
    letters = ["L" if rotary[layer] else "G" for layer in range(layers)]
    for layer, letter in enumerate(letters):
        if layer not in routed and letter == "G":
            raise NoFormulasError(
                f"layer {layer + 1} of config.json has no formula: it has neither positions nor experts; "
                "`zeroplan profile --config` traces the model itself"
            )
    return "".join(letter if layer in routed else "D" for layer, letter in enumerate(letters))


def _dense_layers(source: _Source) -> int:
    """Return the number of layers with a dense MLP before those with experts."""
    if TRAITS[source.family].pattern:
        return 0  # the letters of its layers say so
    if source.family in ("glm4_moe_lite", "hy_v3") or source.config.get("mlp_layer_types") is not None:
        return _dense_kinds(source)
    last = source.config.get("moe_layer_end_index", -1)
    if source.family == "ernie4_5_moe" and last not in (-1, source.integer("num_hidden_layers") - 1):
        raise NoFormulasError(f"moe_layer_end_index={shown(last)} in config.json has no formula: dense layers must come first")
    if source.family != "qwen3_moe":
        return source.integer("num_dense_layers", 0, least=0)
    dense = source.config.get("mlp_only_layers")
    if dense is None:
        return 0
    if not isinstance(dense, list | tuple) or list(dense) != list(range(len(dense))):
        raise NoFormulasError(
            f"mlp_only_layers={shown(dense)} in config.json has no formula; dense layers must come first: [0, 1]"
        )
    return len(dense)


def _dense_kinds(source: _Source) -> int:
    """Return the number of dense layers from ``mlp_layer_types``; without that list, the class makes the first layer dense."""
    layers = source.config.get("mlp_layer_types")
    if layers is None:
        return 1
    number = layers.count("dense") if isinstance(layers, list | tuple) else 0
    if layers != ["dense"] * number + ["sparse"] * (source.integer("num_hidden_layers") - number):
        raise NoFormulasError(
            f"mlp_layer_types={shown(layers)} in config.json has no formula; dense layers must come first, then sparse ones"
        )
    return number


def _index_every(source: _Source) -> int:
    """Return the period of the layers behind the dense ones of which the last picks keys (GLM-5.2); 1 if all pick them."""
    layers, dense = source.integer("num_hidden_layers"), _dense_layers(source)
    types = source.config.get("indexer_types")
    if types is None:
        every, first = source.integer("index_topk_freq", 1), source.integer("index_skip_topk_offset", 2)
        types = ["shared" if layer >= first and (layer - first + 1) % every else "full" for layer in range(layers)]
    if not isinstance(types, list | tuple) or "shared" not in types:
        return 1
    rest = list(types[dense:])
    every = rest.index("full") + 1 if "full" in rest else layers
    turns = [*["full"] * dense, *["full" if (layer + 1) % every == 0 else "shared" for layer in range(layers - dense)]]
    if list(types) != turns or not dense:
        raise NoFormulasError(
            f"indexer_types={shown(types)} in config.json, or index_topk_freq with index_skip_topk_offset, has no formula: dense "
            "layers are 'full', and behind them the last of each so many; `zeroplan profile --config` traces the model itself"
        )
    return every


def _mla(source: _Source) -> MlaSpec | None:
    if source.family not in LATENT_FAMILIES:
        return None
    indexed = source.family in INDEXED_FAMILIES
    return MlaSpec(
        q_lora_rank=source.optional_integer("q_lora_rank"),
        kv_lora_rank=source.integer("kv_lora_rank"),
        qk_nope_head_dim=source.integer("qk_nope_head_dim"),
        qk_rope_head_dim=source.integer("qk_rope_head_dim"),
        v_head_dim=source.integer("v_head_dim"),
        **({name: source.integer(name) for name in INDEX_FIELDS} if indexed else {}),
        index_every=_index_every(source) if source.family == "glm_moe_dsa" else 1,
    )

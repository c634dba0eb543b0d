"""Finds the language model in a multimodal model's ``config.json``, and what counting it alone leaves out."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zeroplan.catalog.config_keys import SAME_AS
from zeroplan.catalog.text import shown
from zeroplan.catalog.towers import outside_the_text
from zeroplan.spec.family import FAMILIES
from zeroplan.units import format_gb

Config = Mapping[str, object]

#: Models whose head is tied if the language model's part of the file says so too, by their ``model_type``. Source: transformers
#: 5.23, ``models/<model>/configuration_<model>.py``.
TIED_BY_THE_TEXT = (
    "llava", "llava_next_video", "llava_onevision", "fast_vlm", "video_llama_3", "shieldgemma2", "perception_lm", "vibevoice",
)  # fmt: skip
#: Kinds of vision towers that are plain transformers, with two or three matrices in each MLP.
_TWO_MATRICES = (
    "siglip_vision_model", "clip_vision_model", "idefics2_vision", "idefics3_vision", "smolvlm_vision", "internvl_vision",
    "kimi_k25_vision",
)  # fmt: skip
_THREE_MATRICES = ("pixtral", "ovis2_vision")


class TextPart(NamedTuple):
    """Return the language model's config, and notes on what it leaves out; no notes if it is the whole model."""

    config: Config
    is_part: bool
    notes: tuple[str, ...] = ()
    outside: int | None = None
    """Parameters outside the text, where they are known."""

    @property
    def words(self) -> str:
        """What a model's name says of it, which every answer shows."""
        return "text part" if self.outside is None else f"text part, {self.outside:,} weights left out"


def text_part(config: Config) -> TextPart:
    """Return the language model's config, with the whole model's value for tied embeddings."""
    text = _text_config(config)
    if config.get("model_type") in FAMILIES or text is None:
        return TextPart(config, is_part=False)
    tied = _tied(config, text)
    found = text if tied is None else {**text, "tie_word_embeddings": tied}
    outside = outside_the_text(config, text)
    notes = (*_left_out(config, text, outside), *_tied_by_text_part(config, text, tied))
    return TextPart(found, is_part=True, notes=notes, outside=outside)


def _text_config(config: Config) -> Config | None:
    """Return the text part; older files of Qwen's models have its keys beside ``vision_config``.

    Qwen3-VL's router always divides its weights by their sum, and its class has no key that says so.
    """
    text, kind = config.get("text_config"), f"{config.get('model_type')}_text"
    if isinstance(text, Mapping):
        return {"norm_topk_prob": True, **text} if text.get("model_type") == "qwen3_vl_moe_text" else text
    if kind not in SAME_AS or "vision_config" not in config:
        return None
    return {**{key: value for key, value in config.items() if key != "vision_config"}, "model_type": kind}


def _tied(config: Config, text: Config) -> object:
    """Whether the head is tied: transformers reads the whole model's config, not its part's.

    Source: transformers 5.23, ``modeling_utils.py``, ``get_expanded_tied_weights_keys``. Without a value there, that of the
    text part or its family's default counts. Some classes assume a tied head then, but loading a checkpoint with both weights
    leaves them apart (``tie_weights``).
    """
    kind, outer, inner = config.get("model_type"), config.get("tie_word_embeddings"), text.get("tie_word_embeddings")
    if kind in TIED_BY_THE_TEXT and inner is True and outer is False:
        return True
    return inner if outer is None else outer


def _tied_by_text_part(config: Config, text: Config, tied: object) -> Iterator[str]:
    inner = text.get("tie_word_embeddings")
    if inner is None or inner == tied:
        return
    yield (
        f"config.json has tie_word_embeddings={shown(config.get('tie_word_embeddings'))} and, in text_config, {shown(inner)}: "
        f"{shown(tied)} is counted, with which transformers builds the model; where a checkpoint has both weights they stay apart"
    )


# --- what is left out -----------------------------------------------------------------------------------------------------


def _left_out(config: Config, text: Config, whole: int | None) -> Iterator[str]:
    parts = [
        f"{key}{_counted(part) if whole is None or key != 'vision_config' else _with_bytes(whole)}"
        for key, part in config.items()
        if key != "text_config" and str(key).endswith("_config") and isinstance(part, Mapping) and part
        if key not in ("quantization_config", "compression_config", "generation_config")
    ]
    beside = f": {', '.join(parts)} and what joins the parts are left out" if parts else ": other parts are left out"
    tables = ", and rotary tables of each further sequence" if text.get("model_type") in SAME_AS else ""
    yield (
        f"only the text part of this {shown(config.get('model_type'))[1:-1]} model is counted{beside}, with their weights, states "
        f"and activations{tables}: every figure is too low by them; `zeroplan profile` traces a whole model"
    )


def _with_bytes(parameters: int) -> str:
    """Return the number of parameters outside the text, with the bytes of their weights and of training them."""
    return (
        f" (with what joins it to the text {parameters:,} parameters: {format_gb(2 * parameters)} if frozen in 16 bits, "
        f"{format_gb(16 * parameters)} on all ranks together if trained in fp32 with Adam)"
    )


def _counted(part: Config) -> str:
    """Return the size of a plain transformer from the matrices of its layers; empty if a size is missing."""
    kind = part.get("model_type")
    matrices = 2 if kind in _TWO_MATRICES else 3
    sizes = [part.get(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers")]
    if kind not in (*_TWO_MATRICES, *_THREE_MATRICES) or not all(type(size) is int and 0 < size < 10**6 for size in sizes):
        return ""
    hidden, inner, layers = (int(str(size)) for size in sizes)
    return f" ({layers * hidden * (4 * hidden + matrices * inner) / 1e6:,.0f} million parameters in its layers)"

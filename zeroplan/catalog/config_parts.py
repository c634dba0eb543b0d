"""Finds the language model in a multimodal model's ``config.json``, and what counting it alone leaves out."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zeroplan.catalog.text import shown
from zeroplan.spec.family import FAMILIES

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


def text_part(config: Config) -> TextPart:
    """Return the language model's config, with the whole model's value for tied embeddings."""
    text = config.get("text_config")
    if config.get("model_type") in FAMILIES or not isinstance(text, Mapping):
        return TextPart(config, is_part=False)
    tied = _tied(config, text)
    found = text if tied is None else {**text, "tie_word_embeddings": tied}
    return TextPart(found, is_part=True, notes=(*_left_out(config), *_tied_by_text_part(config, text, tied)))


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


def _left_out(config: Config) -> Iterator[str]:
    parts = [
        f"{key}{_counted(part)}"
        for key, part in config.items()
        if key != "text_config" and str(key).endswith("_config") and isinstance(part, Mapping) and part
        if key not in ("quantization_config", "compression_config", "generation_config")
    ]
    beside = f": {', '.join(parts)} and what joins the parts are left out" if parts else ": other parts are left out"
    yield (
        f"only the text part of this {shown(config.get('model_type'))[1:-1]} model is counted{beside}, with their weights, states "
        "and activations; `zeroplan profile` traces a whole model"
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

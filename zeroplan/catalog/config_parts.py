"""Finds the language model in a multimodal model's ``config.json``, and notes the parts that are not counted."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zeroplan.catalog.config_keys import SAME_AS
from zeroplan.catalog.text import shown
from zeroplan.errors import NoFormulasError
from zeroplan.spec.family import FAMILIES
from zeroplan.spec.vision import VisionSpec

Config = Mapping[str, object]

#: Models whose head is tied if the file's text part has that, by their ``model_type``. Source: transformers
#: 5.23, ``models/<model>/configuration_<model>.py``.
TIED_BY_THE_TEXT = (
    "llava", "llava_next_video", "llava_onevision", "fast_vlm", "video_llama_3", "shieldgemma2", "perception_lm", "vibevoice",
)  # fmt: skip


class TextPart(NamedTuple):
    """The language model's config, and notes on the parts that it leaves out; no notes if it is the whole model."""

    config: Config
    is_part: bool
    notes: tuple[str, ...] = ()
    vision: VisionSpec | None = None
    """The vision tower, if zeroplan knows it."""
    head_rows: int | None = None
    """Outputs of the head, where the embedding has more rows."""

    @property
    def words(self) -> str:
        """A suffix for the model's name in every answer; empty if the whole model is counted."""
        if self.vision is None:
            return " (text part)" if self.is_part else ""
        return "" if self.vision.has_blocks else " (without its tower's activations)"


def text_part(config: Config) -> TextPart:
    """Return the language model's config, with the whole model's value for tied embeddings."""
    if isinstance(thinker := config.get("thinker_config"), Mapping):  # Qwen's Omni models, whose talker has no formulas
        part = text_part(thinker)
        return part._replace(notes=(*part.notes, _TALKER))
    text = _text_config(config)
    if config.get("model_type") in FAMILIES or text is None:
        return TextPart(config, is_part=False)
    tied = _tied(config, text)
    found = text if tied is None else {**text, "tie_word_embeddings": tied}
    from zeroplan.catalog.towers import vision_of  # noqa: PLC0415  keeps start-up fast

    vision = vision_of(config, text)
    if config.get("model_type") == "mllama":
        return _among_a_llamas(text, vision)
    notes = (*_left_out(config, text, vision), *_tied_by_text_part(config, text, tied))
    return TextPart(found, is_part=True, notes=notes, vision=vision)


_TALKER = "the parts that make speech of the thinker's hidden states are left out, and every figure is too low by their weights"
#: Rows of Llama 3.2 Vision's embedding beyond its vocabulary: transformers 5.23, modeling_mllama.py, MllamaTextModel.__init__.
_ROWS_BEYOND = 8


def _among_a_llamas(text: Config, vision: VisionSpec | None) -> TextPart:
    """Return Llama 3.2 Vision's text as a Llama, without its layers that attend to images, which belong to the tower's spec."""
    layers, rows = text.get("num_hidden_layers", 40), text.get("vocab_size", 128256)
    if vision is None or not isinstance(layers, int) or not isinstance(rows, int):
        raise NoFormulasError(
            "this mllama model has no formula: layers that attend to images at other places than every fifth, other tiles or "
            "another tower than Llama 3.2 Vision's; correct config.json"
        )
    beside = ("cross_attention_layers", "dropout")
    own = {key: value for key, value in text.items() if key not in beside}
    own |= {"model_type": "llama", "num_hidden_layers": layers - vision.cross_layers, "vocab_size": rows + _ROWS_BEYOND}
    return TextPart(own, is_part=True, vision=vision, head_rows=rows)


def _text_config(config: Config) -> Config | None:
    """Return the text part; older files of Qwen's models have its keys beside ``vision_config``.

    Qwen3-VL's router always normalises its weights; its class has no key for that.
    """
    text, kind = config.get("text_config"), f"{config.get('model_type')}_text"
    if isinstance(text, Mapping):
        return {"norm_topk_prob": True, **text} if text.get("model_type") == "qwen3_vl_moe_text" else text
    if kind not in SAME_AS or "vision_config" not in config:
        return None
    return {**{key: value for key, value in config.items() if key != "vision_config"}, "model_type": kind}


def _tied(config: Config, text: Config) -> object:
    """Whether the head is tied: transformers reads this from the whole model's config, not from the text part.

    Source: transformers 5.23, ``modeling_utils.py``, ``get_expanded_tied_weights_keys``. If the whole config has no value, the
    text part's or its family's default counts. Some classes then assume a tied head, but loading a checkpoint with both weights
    keeps them separate (``tie_weights``).
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


# --- parts left out -------------------------------------------------------------------------------------------------------


def _left_out(config: Config, text: Config, vision: VisionSpec | None) -> Iterator[str]:
    kind = shown(config.get("model_type"))[1:-1]
    if vision is not None and not vision.has_blocks:
        yield (
            f"of what is beside the text of this {kind} model, weights and states of {vision.other_parameters:,} parameters are "
            "counted; activations of its tower are not, and every figure is too low by them; `zeroplan profile` traces the whole"
        )
    known = ("text_config", "quantization_config", "compression_config", "generation_config")
    parts = [
        str(key)
        for key, part in config.items()
        if str(key).endswith("_config") and isinstance(part, Mapping) and part and key not in known
        if vision is None or (key != "vision_config" and not (key == "audio_config" and vision.has_audio))
    ]
    if vision is not None and not parts:
        return
    beside = f": {', '.join(parts)} and what joins the parts are left out" if parts else ": other parts are left out"
    tables = ", and rotary tables of each further sequence" if text.get("model_type") in SAME_AS else ""
    counted = "only the text part of this" if vision is None else "only text and images of this"
    yield (
        f"{counted} {kind} model is counted{beside}, with their weights, states and activations{tables}: every figure is too low "
        "by them; `zeroplan profile` traces a whole model"
    )

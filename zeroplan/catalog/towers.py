"""Reads the vision tower in a multimodal model's ``config.json``.

Source: transformers 5.23, ``models/<model>/configuration_<model>.py`` and ``modeling_<model>.py``; for Gemma 3 and LLaVA
``models/siglip`` and ``models/clip``. A test compares each kind with the model that transformers builds.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from zeroplan.errors import SpecError
from zeroplan.spec.vision import MLLAMA_TILES, Tower, VisionSpec
from zeroplan.transformer.vision import parameters_beside_the_text

Config = Mapping[str, object]
#: Kinds of vision towers that are plain transformers, with two or three matrices in each MLP.
_TWO_MATRICES = (
    "siglip_vision_model", "clip_vision_model", "idefics2_vision", "idefics3_vision", "smolvlm_vision", "internvl_vision",
    "kimi_k25_vision",
)  # fmt: skip
_THREE_MATRICES = ("pixtral", "ovis2_vision")


class _Sizes(NamedTuple):
    """Reads sizes from a vision config, with its class's defaults; raises KeyError for a missing or invalid size."""

    config: Config
    whole: Config
    text_width: int

    def __call__(self, key: str, default: int | None = None) -> int:
        found = self.config.get(key, default)
        if type(found) is not int or not 0 < found < 10**6:
            raise KeyError(key)
        return found


def vision_of(config: Config, text: Config) -> VisionSpec | None:
    """Return the vision tower of a multimodal model's config; None if zeroplan has no formulas or a size is missing.

    For some kinds only the number of parameters in the tower's layers is known.
    """
    vision, read = config.get("vision_config"), _TOWERS.get(str(config.get("model_type")))
    if not isinstance(vision, Mapping):
        return None
    for attempt in (read, _in_layers):
        try:
            if attempt is not None:
                return attempt(_Sizes(vision, config, _Sizes(text, config, 0)("hidden_size")))
        except (KeyError, SpecError):
            continue
    return None


def _in_layers(of: _Sizes) -> VisionSpec | None:
    """Return a tower with only the matrices of its layers, for kinds that are plain transformers."""
    kind = of.config.get("model_type")
    if kind not in (*_TWO_MATRICES, *_THREE_MATRICES):
        return None
    width, matrices = of("hidden_size"), 2 if kind in _TWO_MATRICES else 3
    return _other(of("num_hidden_layers") * width * (4 * width + matrices * of("intermediate_size")))


def _other(parameters: int) -> VisionSpec:
    return VisionSpec(tower="other", other_parameters=parameters)


def _linear(reads: int, writes: int) -> int:
    return reads * writes + writes


def _encoder_layer(width: int, inner: int) -> int:
    """Parameters of a layer of CLIP's tower: two norms, attention, an MLP of two matrices, all with biases."""
    return 4 * width + 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width)


def _gemma3(of: _Sizes) -> VisionSpec:
    width, inner, tokens = of("hidden_size"), of("intermediate_size"), of.whole.get("mm_tokens_per_image", 256)
    side = of("image_size") // of("patch_size")
    along = int(tokens**0.5) if type(tokens) is int else 0
    head = 3 * width + 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    return VisionSpec(
        tower="siglip", hidden_size=width, intermediate_size=inner, num_hidden_layers=of("num_hidden_layers"),
        num_attention_heads=of("num_attention_heads"), patch_size=of("patch_size"), patch_numbers=3 * of("patch_size") ** 2,
        merge_size=max(1, side // max(along, 1)), out_hidden_size=of.text_width, positions=side**2, fixed_size=of("image_size"),
        other_parameters=0 if of.config.get("vision_use_head") is False else head,
    )  # fmt: skip


def _llava(of: _Sizes) -> VisionSpec:
    """CLIP's tower, of which the text reads the output of one block. Later blocks and a norm are there, and get no gradient."""
    width, layers, layer = of("hidden_size"), of("num_hidden_layers"), of.whole.get("vision_feature_layer", -2)
    if type(layer) is not int or not -layers <= layer < 0 or of.whole.get("multimodal_projector_bias") is False:
        raise KeyError("vision_feature_layer")
    unread = -1 - layer
    return _with_a_class_token(
        of, "clip", of("image_size"), of("patch_size"), layers - unread,
        2 * width + unread * _encoder_layer(width, of("intermediate_size")),
    )  # fmt: skip


def _llava_next(of: _Sizes) -> VisionSpec:
    """LLaVA-NeXT has LLaVA's tower, a token for the end of a row, and tiles whose joining has no formula."""
    return _other(parameters_beside_the_text(_llava(of)) + of.text_width)


def _internvl(of: _Sizes) -> VisionSpec:
    plain = {
        "norm_type": "layer_norm",
        "use_qk_norm": False,
        "use_mean_pooling": True,
        "use_absolute_position_embeddings": True,
    }
    whole = {"vision_feature_layer": -1, "downsample_ratio": 0.5, "vision_feature_select_strategy": "default"}
    values = [(of.config, plain | {"use_mask_token": False}), (of.whole, whole)]
    if any(config.get(key, usual) != usual for config, keys in values for key, usual in keys.items()):
        raise KeyError("another tower of InternVL's")
    if of.config.get("attention_bias") is not True:
        raise KeyError("attention_bias")
    image, patch = (
        one[0] if isinstance(one, list | tuple) else one for one in map(of.config.get, ("image_size", "patch_size"))
    )
    if type(image) is not int or type(patch) is not int:
        raise KeyError("image_size")
    return replace(_with_a_class_token(of, "internvl", image, patch, of("num_hidden_layers"), 0), merge_size=2)


#: Layers of Llama 3.2 Vision's text that attend to images, and early outputs of its tower, where a config.json leaves them out.
_CROSS, _EARLY = (3, 8, 13, 18, 23, 28, 33, 38), (3, 7, 15, 23, 30)
_GRIDS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]


def cross_attention_layers(text: Config) -> int:
    """Return the number of layers that attend to images in a Llama 3.2 Vision's text; 0 unless each is the last but one of five.

    >>> cross_attention_layers({"num_hidden_layers": 10, "cross_attention_layers": [3, 8]})
    2
    """
    layers, layers_with_it = text.get("num_hidden_layers", 40), text.get("cross_attention_layers") or _CROSS
    if not isinstance(layers_with_it, list | tuple) or not isinstance(layers, int):
        return 0
    period = layers // max(1, len(layers_with_it))
    return len(layers_with_it) if period > 1 and list(layers_with_it) == list(range(period - 2, layers, period)) else 0


def _mllama(of: _Sizes) -> VisionSpec:
    text, early = of.whole.get("text_config"), of.config.get("intermediate_layers_indices") or _EARLY
    cross = cross_attention_layers(text) if isinstance(text, Mapping) else 0
    width, image, patch = of("hidden_size", 1280), of("image_size", 448), of("patch_size", 14)
    usual = {"supported_aspect_ratios": _GRIDS, "max_num_tiles": MLLAMA_TILES, "hidden_act": "gelu", "num_channels": 3}
    odd = [key for key, value in usual.items() if of.config.get(key) not in (None, value)]
    if odd or not cross or not isinstance(early, list | tuple) or of("vision_output_dim", 7680) != (1 + len(early)) * width:
        raise KeyError("another tower of Llama 3.2 Vision's")
    return VisionSpec(
        tower="mllama", hidden_size=width, intermediate_size=of("intermediate_size", 5120),
        num_hidden_layers=of("num_hidden_layers", 32), num_attention_heads=of("attention_heads", 16), patch_size=patch,
        patch_numbers=3 * patch**2, out_hidden_size=of.text_width, positions=(image // patch) ** 2 + 1, deeper=len(early),
        global_layers=of("num_global_layers", 8), cross_layers=cross, fixed_size=image,
    )  # fmt: skip


def _with_a_class_token(of: _Sizes, tower: Tower, image: int, patch: int, layers: int, other: int) -> VisionSpec:
    return VisionSpec(
        tower=tower, hidden_size=of("hidden_size"), intermediate_size=of("intermediate_size"), num_hidden_layers=layers,
        num_attention_heads=of("num_attention_heads"), patch_size=patch, patch_numbers=3 * patch**2, fixed_size=image,
        out_hidden_size=of.text_width, positions=(image // patch) ** 2 + 1, other_parameters=other,
    )  # fmt: skip


def _patch(of: _Sizes) -> int:
    """Numbers in one patch of Qwen's towers."""
    colours = of("in_channels", 3) if "in_channels" in of.config else of("in_chans", 3)
    return colours * of("temporal_patch_size", 2) * of("patch_size", 14) ** 2


def _qwen2(of: _Sizes) -> VisionSpec:
    width = of("embed_dim", 1280)
    return VisionSpec(
        tower="qwen2_vl", hidden_size=width, intermediate_size=width * of("mlp_ratio", 4), num_hidden_layers=of("depth", 32),
        num_attention_heads=of("num_heads", 16), patch_size=of("patch_size", 14), patch_numbers=_patch(of),
        merge_size=of("spatial_merge_size", 2), out_hidden_size=of("hidden_size", 3584),
    )  # fmt: skip


def _qwen2_5(of: _Sizes) -> VisionSpec:
    return VisionSpec(
        tower="qwen2_5_vl", hidden_size=of("hidden_size"), intermediate_size=of("intermediate_size"),
        num_hidden_layers=of("depth", 32), num_attention_heads=of("num_heads", 16), patch_size=of("patch_size", 14),
        patch_numbers=_patch(of), merge_size=of("spatial_merge_size", 2), out_hidden_size=of("out_hidden_size"),
    )  # fmt: skip


def _qwen3(of: _Sizes) -> VisionSpec:
    """The tower of Qwen3-VL or Qwen3.5. In Qwen3-VL some layers have their own merger."""
    deep = of.config.get("deepstack_visual_indexes", ())
    sixteen = of._replace(config={"patch_size": 16, **of.config})
    return replace(
        _qwen2_5(sixteen), tower="qwen3_vl", positions=of("num_position_embeddings"),
        deeper=len(deep) if isinstance(deep, list | tuple) else 0,
    )  # fmt: skip


def _sound(of: _Sizes) -> _Sizes:
    """Return the sizes of the encoder of sounds beside the vision tower of Qwen's Omni models."""
    audio = of.whole.get("audio_config")
    return of._replace(config=audio if isinstance(audio, Mapping) else {})


def _layers_of_sound(sound: _Sizes) -> int:
    """Parameters of the layers of Whisper's encoder, with a last norm. In Qwen2.5-Omni keys have no bias."""
    width = sound("d_model", 1280)
    return sound("encoder_layers", 32) * _encoder_layer(width, sound("encoder_ffn_dim", 5120)) + 2 * width


def _qwen2_5_omni(of: _Sizes) -> VisionSpec:
    """The thinker's vision tower, and its encoder of sounds, of which only the weights count.

    ``speech_parameters``, a key of the catalogue alone: talker and token2wav in 16 bits, where a program loads them, too.
    """
    speech_parameters = of.whole.get("speech_parameters")
    speech = speech_parameters if isinstance(speech_parameters, int) else 0
    sound, width, plain = _sound(of), _sound(of)("d_model", 1280), _qwen2_5(of)
    text = sound("output_dim", 3584)
    convolutions = 3 * width * (sound("num_mel_bins", 128) + width) + 2 * width
    inside = _layers_of_sound(sound) - sound("encoder_layers", 32) * width
    return replace(plain, other_parameters=inside + convolutions + 2 * text + _linear(width, text) + speech)


def _qwen3_omni(of: _Sizes) -> VisionSpec:
    sound, width, plain = _sound(of), _sound(of)("d_model", 1280), _qwen3(of)
    inner, mels = sound("downsample_hidden_size", 480), sound("num_mel_bins", 128)
    rows = (((mels + 1) // 2 + 1) // 2 + 1) // 2
    convolutions = 9 * inner + 2 * 9 * inner * inner + 3 * inner + inner * rows * width
    joining = _linear(width, width) + _linear(width, sound("output_dim", 3584))
    return replace(plain, other_parameters=_layers_of_sound(sound) + convolutions + joining)


_TOWERS: dict[str, Callable[[_Sizes], VisionSpec]] = {
    "gemma3": _gemma3, "internvl": _internvl, "llava": _llava, "llava_next": _llava_next, "mllama": _mllama,
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "qwen3_vl_moe": _qwen3, "qwen3_5": _qwen3, "qwen3_5_moe": _qwen3,
    "qwen2_5_omni_thinker": _qwen2_5_omni, "qwen3_omni_moe_thinker": _qwen3_omni,
}  # fmt: skip

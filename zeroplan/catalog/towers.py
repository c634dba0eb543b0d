"""How many parameters do a multimodal model's vision tower and what joins it to the text have?

Source: transformers 5.23, ``models/<model>/modeling_<model>.py``, and of the towers of Gemma 3 and LLaVA ``models/siglip`` and
``models/clip``. A test holds each kind against the model that transformers builds.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

Config = Mapping[str, object]


class _Sizes(NamedTuple):
    """The sizes in a vision config, with those that its class assumes."""

    config: Config
    text_width: int

    def __call__(self, key: str, default: int | None = None) -> int:
        found = self.config.get(key, default)
        if type(found) is not int or not 0 < found < 10**6:
            raise KeyError(key)
        return found


def outside_the_text(config: Config, text: Config) -> int | None:
    """Return the parameters of tower and projector; None for a kind of model without formulas or without its sizes."""
    vision, count = config.get("vision_config"), _TOWERS.get(str(config.get("model_type")))
    if count is None or not isinstance(vision, Mapping):
        return None
    try:
        return count(_Sizes(vision, _Sizes(text, 0)("hidden_size")))
    except KeyError:
        return None


def _linear(reads: int, writes: int) -> int:
    return reads * writes + writes


def _encoder(of: _Sizes) -> int:
    """The layers of SigLIP and CLIP: two LayerNorms, four projections, an MLP of two matrices, all with biases."""
    width, inner = of("hidden_size"), of("intermediate_size")
    return of("num_hidden_layers") * (4 * width + 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width))


def _patches(of: _Sizes) -> tuple[int, int]:
    """Return the number of patches of an image, and of numbers in one of three colours."""
    return (of("image_size") // of("patch_size")) ** 2, 3 * of("patch_size") ** 2


def _gemma3(of: _Sizes) -> int:
    width, (patches, numbers) = of("hidden_size"), _patches(of)
    joining = width * of.text_width + width
    tower = _linear(numbers, width) + patches * width + _encoder(of) + 2 * width
    if of.config.get("vision_use_head") is False:
        return tower + joining
    inner = of("intermediate_size")
    head = width + 4 * _linear(width, width) + 2 * width + _linear(width, inner) + _linear(inner, width)
    return tower + head + joining


def _llava(of: _Sizes) -> int:
    width, (patches, numbers) = of("hidden_size"), _patches(of)
    tower = width + numbers * width + (patches + 1) * width + 4 * width + _encoder(of)
    return tower + _linear(width, of.text_width) + _linear(of.text_width, of.text_width)


def _patch(of: _Sizes) -> int:
    """Return the numbers in one patch of Qwen's towers."""
    colours = of("in_channels", 3) if "in_channels" in of.config else of("in_chans", 3)
    return colours * of("temporal_patch_size", 2) * of("patch_size", 14) ** 2


def _merger(of: _Sizes, width: int, out: int) -> int:
    joined = width * of("spatial_merge_size", 2) ** 2
    return _linear(joined, joined) + _linear(joined, out)


def _qwen2(of: _Sizes) -> int:
    width = of("embed_dim")
    inner = width * of("mlp_ratio", 4)
    block = 4 * width + _linear(width, 3 * width) + _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    return _patch(of) * width + of("depth") * block + 2 * width + _merger(of, width, of("hidden_size"))


def _qwen2_5(of: _Sizes) -> int:
    width, inner = of("hidden_size"), of("intermediate_size")
    mlp = 2 * _linear(width, inner) + _linear(inner, width)
    block = 2 * width + _linear(width, 3 * width) + _linear(width, width) + mlp
    return _patch(of) * width + of("depth") * block + width + _merger(of, width, of("out_hidden_size"))


def _qwen3(of: _Sizes) -> int:
    """Of Qwen3-VL and Qwen3.5. Some layers of the first have a merger of their own, whose norm has the merged width."""
    width, inner, out = of("hidden_size"), of("intermediate_size"), of("out_hidden_size")
    block = 4 * width + _linear(width, 3 * width) + _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    deep = of.config.get("deepstack_visual_indexes", ())
    deeper = len(deep) if isinstance(deep, list | tuple) else 0
    more = deeper * (2 * width * of("spatial_merge_size", 2) ** 2 + _merger(of, width, out))
    tower = _linear(_patch(of), width) + of("num_position_embeddings") * width + of("depth") * block
    return tower + 2 * width + _merger(of, width, out) + more


_TOWERS: dict[str, Callable[[_Sizes], int]] = {
    "gemma3": _gemma3, "llava": _llava, "qwen2_vl": _qwen2, "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "qwen3_vl_moe": _qwen3,
    "qwen3_5": _qwen3, "qwen3_5_moe": _qwen3,
}  # fmt: skip

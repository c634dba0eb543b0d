"""Builds transformers' vision-language model for a ModelSpec with a vision tower, and a batch with images.

The model reads image sizes and patch positions from tensors, and fake tensors have no values. Those functions are replaced and
return what a real run returns for images of one size. The engine and the model's own modules run unmodified.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from zeroplan.errors import MeasurementError
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Attention
from zeroplan.spec.vision import WITH_CLASS_TOKEN, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")  # that check counts image tokens by their ids
_TEXTS = {"qwen3_vl": {"qwen3_moe": "qwen3_vl_moe", "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}}
_IMAGE = 1
"""The token id of images."""


def whole_config(spec: ModelSpec, text: Mapping[str, object]) -> "PreTrainedConfig":
    """The configuration of the whole model, with ``text`` as its text part. Raises MeasurementError for other towers."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  takes seconds

    vision = spec.vision
    if vision is None or not vision.has_blocks or (spec.adapter is not None and vision.tower != "mllama"):
        raise MeasurementError(
            "only a model whose tower's blocks have formulas, without adapters, can be verified with its images"
        )
    if vision.tower in WITH_CLASS_TOKEN:
        return _with_a_class_token(vision, spec, text)
    if vision.tower == "mllama":
        return _mllama(vision, spec, text)
    kind = "gemma3" if vision.tower == "siglip" else _TEXTS.get(vision.tower, {}).get(spec.family, vision.tower)
    own = {name: value for name, value in text.items() if name != "model_type"}
    shared: dict[str, object] = {
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "patch_size": vision.patch_size,
    }
    if vision.tower == "siglip":
        tower = shared | {
            "model_type": "siglip_vision_model", "num_hidden_layers": vision.num_hidden_layers, "image_size": vision.fixed_size,
            "num_attention_heads": vision.num_attention_heads, "vision_use_head": bool(vision.other_parameters),
        }  # fmt: skip
        more: dict[str, object] = {"mm_tokens_per_image": vision.tokens_per_image}
    else:
        tower = shared | {
            "depth": vision.num_hidden_layers, "num_heads": vision.num_attention_heads, "out_hidden_size": vision.out_hidden_size,
            "spatial_merge_size": vision.merge_size, "temporal_patch_size": vision.patch_numbers // (3 * vision.patch_size**2),
        }  # fmt: skip
        if vision.tower == "qwen2_vl":
            ratio = vision.intermediate_size // vision.hidden_size
            tower |= {"embed_dim": vision.hidden_size, "mlp_ratio": ratio, "hidden_size": vision.out_hidden_size}
        tower |= {"num_position_embeddings": vision.positions} if vision.tower == "qwen3_vl" else {}
        tower |= {"deepstack_visual_indexes": list(vision.read_early)} if vision.tower == "qwen3_vl" else {}
        own |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": _sections(spec.head_dim)}}
        more = {}
    build: Callable[..., PreTrainedConfig] = CONFIG_MAPPING[kind]
    return build(
        text_config=own, vision_config=tower, image_token_id=_IMAGE, tie_word_embeddings=spec.tie_word_embeddings, **more
    )


def _with_a_class_token(vision: VisionSpec, spec: ModelSpec, text: Mapping[str, object]) -> "PreTrainedConfig":
    """The configuration of a LLaVA or an InternVL. Blocks of CLIP that the text does not read are among the other parameters."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  takes seconds

    width, inner, side = vision.hidden_size, vision.intermediate_size, vision.fixed_size
    unread = vision.other_parameters // (4 * width * width + 2 * width * inner + 9 * width + inner)
    sizes = {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": vision.num_hidden_layers + unread,
        "num_attention_heads": vision.num_attention_heads,
    }  # fmt: skip
    if vision.tower == "clip":
        tower: dict[str, object] = {"model_type": "clip_vision_model", "image_size": side, "patch_size": vision.patch_size}
        kind, more = "llava", {"vision_feature_layer": -1 - unread, "image_token_index": _IMAGE}
    else:
        squares = {"image_size": [side] * 2, "patch_size": [vision.patch_size] * 2}
        tower = {"model_type": "internvl_vision", "attention_bias": True, **squares}
        kind, more = "internvl", {"image_token_id": _IMAGE}
    build: Callable[..., PreTrainedConfig] = CONFIG_MAPPING[kind]
    own = {**text, "tie_word_embeddings": spec.tie_word_embeddings}
    return build(text_config=own, vision_config={**tower, **sizes}, tie_word_embeddings=spec.tie_word_embeddings, **more)


def _sections(head_dim: int) -> list[int]:
    """``mrope_section``: rotary frequencies of a head for each of three dimensions."""
    half = head_dim // 2
    return [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]


def whole_model(made: "PreTrainedConfig", *, attention: Attention, dtype: torch.dtype, device: str) -> nn.Module:
    """A vision-language model of transformers, uninitialised, in training mode."""
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415
    from transformers.initialization import no_init_weights  # noqa: PLC0415

    made._attn_implementation = "eager" if attention == "eager" else "sdpa"
    with torch.device(device), no_init_weights():
        model: nn.Module = AutoModelForImageTextToText.from_config(made, dtype=dtype)  # type: ignore[no-untyped-call]
    model.tie_weights()  # type: ignore[operator]  # left out with the initialisation
    model.train()
    return model


def _mllama(vision: VisionSpec, spec: ModelSpec, text: Mapping[str, object]) -> "PreTrainedConfig":
    """The configuration of a Llama 3.2 Vision, whose embedding has 8 rows beyond the vocabulary."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  takes seconds

    layers = spec.num_hidden_layers + vision.cross_layers
    period = layers // vision.cross_layers
    own = {name: value for name, value in text.items() if name not in ("model_type", "head_dim")} | {
        "num_hidden_layers": layers, "cross_attention_layers": list(range(period - 2, layers, period)),
        "vocab_size": spec.vocab_size - 8, "bos_token_id": 0,
    }  # fmt: skip
    tower = {
        "hidden_size": vision.hidden_size, "intermediate_size": vision.intermediate_size, "patch_size": vision.patch_size,
        "num_hidden_layers": vision.num_hidden_layers, "num_global_layers": vision.global_layers,
        "attention_heads": vision.num_attention_heads, "image_size": vision.fixed_size,
        "vision_output_dim": (1 + vision.deeper) * vision.hidden_size, "intermediate_layers_indices": list(vision.read_early),
    }  # fmt: skip
    build: Callable[..., PreTrainedConfig] = CONFIG_MAPPING["mllama"]
    return build(text_config=own, vision_config=tower, image_token_index=_IMAGE)


def freeze_tower(model: nn.Module, vision: VisionSpec) -> None:
    """Freeze the tower's untrained parts, as a script does before it builds engine and optimizer."""
    for name, parameter in model.named_parameters():
        joins = "merger" in name or "multi_modal_projector" in name
        if vision.freeze_text and "vision_model" not in name and not joins and "cross_attn" not in name:
            parameter.requires_grad = _crosses(model, name)
        inside = joins or "visual" in name or "vision_tower" in name or "vision_model" in name
        if inside and (vision.freeze_projector if joins else vision.freeze_tower):
            parameter.requires_grad = False


def _crosses(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to a layer that attends to images."""
    layer = name.partition(".layers.")
    return bool(layer[1]) and hasattr(model.get_submodule(f"{layer[0]}.layers.{layer[2].partition('.')[0]}"), "cross_attn")


def without_adapters(model: nn.Module, vision: VisionSpec) -> tuple[str, ...]:
    """The modules of a model with adapters that have none: the tower's and, if the text is frozen, those of its own layers."""
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    inside = {name for name in names if "vision_model" in name}
    text = {name for name in names if vision.freeze_text and not _crosses(model, name)} - inside
    left_out = text if vision.adapted else inside | text
    return tuple(name for name in names if name in left_out or name.startswith("model.multi_modal"))


def tower_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """The tower's blocks, in order."""
    ends = (".blocks", ".encoder.layers", ".encoder.layer")
    found = (
        part for name, part in model.named_modules() if name.endswith(ends) and ("visual" in name or "vision_tower" in name)
    )
    stacks = [part for name, part in model.named_modules() if name.endswith("transformer.layers") and "vision_model" in name]
    return tuple(block for stack in stacks for block in stack) if stacks else tuple(next(iter(found)))


def images(model: nn.Module, vision: VisionSpec, batch: BatchSpec) -> dict[str, torch.Tensor]:
    """The batch's tensors for images; also replaces the model's functions that read image sizes."""
    sequences, patches = batch.micro_batch_size, vision.patches * vision.images
    if vision.tower == "mllama":
        return _images_of_tiles(vision, batch)
    if vision.fixed_size:
        side, squares = vision.fixed_size, sequences * vision.images * vision.tiles
        pixels = {"pixel_values": torch.randn(squares, 3, side, side)}
        kinds = {"token_type_ids": torch.zeros((sequences, batch.seq_len), dtype=torch.int64)}
        return pixels | kinds if vision.tower == "siglip" else pixels
    _tell_positions(model, vision, sequences * vision.images)
    return {
        "pixel_values": torch.randn(sequences * patches, vision.patch_numbers),
        "position_ids": torch.zeros((3, sequences, batch.seq_len), dtype=torch.int64),
    }


def _images_of_tiles(vision: VisionSpec, batch: BatchSpec) -> dict[str, torch.Tensor]:
    """The batch's tensors for images of Llama 3.2 Vision, and which tiles each token sees."""
    several, side = (batch.micro_batch_size, vision.images), vision.fixed_size
    return {
        "pixel_values": torch.randn(*several, vision.tiles, 3, side, side),
        "aspect_ratio_ids": torch.zeros(several, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones((*several, vision.tiles), dtype=torch.int64),
        "cross_attention_mask": torch.ones((several[0], batch.seq_len, vision.images, vision.tiles), dtype=torch.int64),
    }


def _tell_positions(model: nn.Module, vision: VisionSpec, count: int) -> None:
    """Replace the functions of transformers' modeling module that read image sizes from a tensor."""
    module: Any = sys.modules[type(model).__module__]
    every, tokens = count * vision.patches, count * vision.tokens_per_image
    bounds = np.arange(count + 1) * vision.patches

    def made(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=next(model.parameters()).device)

    replacements: dict[str, Callable[..., object]] = {
        "get_vision_position_ids": lambda *_, **__: made(every, 2),
        "get_vision_attention_seqlens": lambda *_, **__: (bounds, None),
        "get_vision_window_index": lambda *_, **__: (made(every // vision.merge_size**2), bounds),
        "get_max_seqlen": lambda *_, **__: None,
        "get_vision_interpolation_indices_and_weights": lambda *_, **__: (made(every, 4), made(every, 4, dtype=torch.float32)),
    }
    for name, instead in replacements.items():
        if hasattr(module, name):
            setattr(module, name, instead)

    def deepstack(_self: object, hidden: torch.Tensor, _mask: object, features: torch.Tensor) -> torch.Tensor:
        hidden, rows, columns = hidden.clone(), made(tokens), made(tokens)
        hidden[rows, columns, :] = hidden[rows, columns, :] + features.to(hidden.dtype)
        return hidden

    for part in model.modules():
        if hasattr(part, "_deepstack_process"):
            own: Any = type(part)
            own._deepstack_process = deepstack
    grid = np.array([[1, 1, vision.patches]] * count)
    forward = model.forward
    model.forward = lambda **batch: forward(**batch, image_grid_thw=grid)

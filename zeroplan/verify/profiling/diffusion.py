"""A transformer of diffusers with a batch of latents and text embeddings, and the flow-matching loss of diffusers' scripts.

A trained picture has fixed sizes, so each class's batch follows from its configuration and the picture.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from zeroplan.catalog.diffusion import Diffuser, Picture, diffuser_of, latents_of, pixels_of_a_latent, tokens_of
from zeroplan.verify.training.modules import shapes_of
from zeroplan.verify.training.workload import Workload

Config = Mapping[str, Any]
Batch = dict[str, torch.Tensor]
Places = tuple[tuple[int, ...], ...]
_FP32 = 4


class Made(NamedTuple):
    """The tensors of one forward, and the shape of its output, which the latents and their noise share."""

    batch: Batch
    shape: tuple[int, ...]


def module_of(config: Config) -> nn.Module:
    """The class of diffusers that a configuration names, with all its blocks."""
    import diffusers  # noqa: PLC0415  takes seconds

    keys = {key: value for key, value in config.items() if key != "zeroplan"}
    made: nn.Module = getattr(diffusers, diffuser_of(config).class_name).from_config(keys)
    return made.train()


def stacks_of(config: Config, module: nn.Module) -> tuple[nn.ModuleList, ...]:
    """The lists of blocks, in the order in which they run. accelerate's FSDP2 wraps each block (``_no_split_modules``)."""
    return tuple(cast("nn.ModuleList", getattr(module, name)) for name in diffuser_of(config).stacks)


def places_of(stacks: Sequence[nn.ModuleList]) -> Places:
    """The blocks of each stack to trace: the first three and the last of every run of equal ones."""
    return tuple(_places([shapes_of(block) for block in stack]) for stack in stacks)


def _places(keys: Sequence[object]) -> tuple[int, ...]:
    found, begun = list[int](), 0
    for at in range(1, len(keys) + 1):
        if at == len(keys) or keys[at] != keys[begun]:
            found += sorted({*range(begun, min(begun + 3, at)), at - 1})
            begun = at
    return tuple(found)


def flat(places: Places, counts: Sequence[int]) -> tuple[int, ...]:
    """The places among all blocks, the stacks one after the other."""
    begins = accumulate(counts, initial=0)
    return tuple(begun + at for begun, of_stack in zip(begins, places, strict=False) for at in of_stack)


def in_a_batch(config: Config, picture: Picture, sequences: int, places: Places | None = None) -> Workload:
    """The model with so many pictures. ``places``: the blocks to keep, if not all."""
    kind, module = diffuser_of(config), module_of(config)
    for name, stack, kept in zip(kind.stacks, stacks_of(config, module), places or (), strict=False):
        setattr(module, name, nn.ModuleList([stack[at] for at in kept]))
    if picture.rank:
        with_adapters(module, picture)
    last = stacks_of(config, module)[-1][-1]
    for name in kind.unused:
        last.get_submodule(name).requires_grad_(requires_grad=False)
    batch, shape = made_for(config, picture, sequences)
    module.forward = _calling(kind, module.forward, picture)
    noise, clean = torch.zeros(shape), torch.zeros(shape)  # which the scripts hold through the step

    def loss(output: object) -> torch.Tensor:
        return flow_matching(cast("tuple[torch.Tensor]", output)[0], noise, clean)

    return Workload(module, batch, loss, tuple(chain(*stacks_of(config, module))), holds_inputs=True)


def with_adapters(module: nn.Module, picture: Picture) -> None:
    """Freeze a module and add peft's adapters, as ``add_adapter`` does (diffusers 0.42.1, loaders/peft.py)."""
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415  takes seconds

    module.requires_grad_(requires_grad=False)
    config = LoraConfig(r=picture.rank, lora_alpha=picture.rank, target_modules=list(picture.targets))
    inject_adapter_in_model(config, module)


def flow_matching(predicted: torch.Tensor, noise: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """The loss of diffusers' scripts, with weights of one: examples/dreambooth/train_dreambooth_lora_flux.py, ``main``."""
    weighting = torch.ones((len(noise), *[1] * (noise.dim() - 1)), device=noise.device)
    target = noise - clean
    squares = (weighting.float() * (predicted.float() - target.float()) ** 2).reshape(target.shape[0], -1)
    return torch.mean(squares, 1).mean()


def inputs_of(config: Config, picture: Picture) -> int:
    """The bytes that the loop holds for one picture: the forward's inputs, the latents and their noise, all in fp32."""
    with torch.device("meta"):
        batch, shape = made_for(config, picture, 1)
    return sum(one.nbytes for one in batch.values()) + 2 * _FP32 * prod(shape)


def made_for(config: Config, picture: Picture, sequences: int) -> Made:
    """The inputs of the class that a configuration names, for so many pictures."""
    return _BATCHES[diffuser_of(config).class_name](config, picture, sequences)


def _flux(config: Config, picture: Picture, sequences: int) -> Made:
    tokens, channels = tokens_of(config, picture), config.get("in_channels", 64)
    axes = len(config.get("axes_dims_rope") or (0, 0, 0))
    batch = {
        "hidden_states": torch.zeros(sequences, tokens, channels),
        "encoder_hidden_states": torch.zeros(sequences, picture.text, config["joint_attention_dim"]),
        "timestep": torch.zeros(sequences),
        "img_ids": torch.zeros(tokens, axes),
        "txt_ids": torch.zeros(picture.text, axes),
    }
    if config.get("pooled_projection_dim"):
        batch["pooled_projections"] = torch.zeros(sequences, config["pooled_projection_dim"])
    if config.get("guidance_embeds"):
        batch["guidance"] = torch.zeros(sequences)
    return Made(batch, (sequences, tokens, config.get("out_channels") or channels))


def _sd3(config: Config, picture: Picture, sequences: int) -> Made:
    side = pixels_of_a_latent(config)
    shape = (sequences, config["in_channels"], picture.height // side, picture.width // side)
    batch = {
        "hidden_states": torch.zeros(shape),
        "encoder_hidden_states": torch.zeros(sequences, picture.text, config["joint_attention_dim"]),
        "pooled_projections": torch.zeros(sequences, config["pooled_projection_dim"]),
        "timestep": torch.zeros(sequences),
    }
    return Made(batch, shape)


def _qwen(config: Config, picture: Picture, sequences: int) -> Made:
    shape = (sequences, tokens_of(config, picture), config["in_channels"])
    batch = {
        "hidden_states": torch.zeros(shape),
        "encoder_hidden_states": torch.zeros(sequences, picture.text, config["joint_attention_dim"]),
        "timestep": torch.zeros(sequences),
    }
    return Made(batch, shape)


def _wan(config: Config, picture: Picture, sequences: int) -> Made:
    side, channels = pixels_of_a_latent(config), config["in_channels"]
    sizes = (latents_of(picture.frames), picture.height // side, picture.width // side)
    steps = (sequences, tokens_of(config, picture)) if side > 8 else (sequences,)  # pipeline_wan.py, expand_timesteps
    batch = {
        "hidden_states": torch.zeros(sequences, channels, *sizes),
        "timestep": torch.zeros(steps),
        "encoder_hidden_states": torch.zeros(sequences, picture.text, config["text_dim"]),
    }
    if config.get("image_dim"):
        batch["encoder_hidden_states_image"] = torch.zeros(sequences, 257, config["image_dim"])
    return Made(batch, (sequences, config.get("out_channels") or channels, *sizes))


_BATCHES: dict[str, Callable[[Config, Picture, int], Made]] = {
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux,
    "SD3Transformer2DModel": _sd3,
    "QwenImageTransformer2DModel": _qwen,
    "WanTransformer3DModel": _wan,
}


def _calling(kind: Diffuser, forward: Callable[..., object], picture: Picture) -> Callable[..., object]:
    """The forward as scripts call it: Qwen-Image also reads the sizes of its pictures."""
    if kind.class_name != "QwenImageTransformer2DModel":
        return lambda **batch: forward(**batch, return_dict=False)
    shape = (1, picture.height // 16, picture.width // 16)
    return lambda **batch: forward(**batch, img_shapes=[[shape]] * len(batch["hidden_states"]), return_dict=False)

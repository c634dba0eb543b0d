"""The parts of a module that engines and profiles need: its stack of blocks, their names, its parameters."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def find_blocks(module: nn.Module) -> tuple[nn.Module, ...]:
    """The stack of blocks: the longest list of modules; empty without one."""
    stacks = [tuple(part) for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(stacks, key=len, default=())


def shapes_of(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The names and shapes of a module's parameters, in order."""
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def prefixes_of(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    """The prefix of the names in each block."""
    names = {id(part): name for name, part in module.named_modules()}
    return tuple(f"{names[id(block)]}." for block in blocks)


def last_norm(model: nn.Module) -> nn.Module:
    """The norm before the head: the last child of the model's body whose class is a norm."""
    body = getattr(model, str(getattr(model, "base_model_prefix", "")), model)
    return [part for part in body.children() if "Norm" in type(part).__name__][-1]


def cast_inputs(blocks: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Make each block cast its floating-point inputs, as FSDP2's units do: torch 2.13, _fsdp_state.py, ``_pre_forward``."""
    for block in blocks:
        block.forward = _casting(block.forward, dtype)


def _casting(forward: Callable[..., object], dtype: torch.dtype) -> Callable[..., object]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def call(*args: object, **kwargs: object) -> object:
        given, named = tree_map_only(torch.Tensor, cast, (args, kwargs))
        del args, kwargs
        return forward(*given, **named)

    return call

"""Offloads activations of blocks to host memory by torch's ``offload_wrapper``, from the run's own device.

The wrapper is written for CUDA. Its function is called with the run's device instead, and restored tensors get a kind.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper, offload_wrapper

from zeroplan.ledger import Kind
from zeroplan.verify.replaced import replaced
from zeroplan.verify.watching.watcher import Watcher


def offload_blocks(module: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Replace each block in the module by ``offload_wrapper`` around it."""
    wrapped = {id(block): offload_wrapper(block) for block in blocks}
    for parent in [part for part in module.modules() if not isinstance(part, OffloadWrapper)]:
        for name, child in parent.named_children():
            if id(child) in wrapped:
                setattr(parent, name, wrapped[id(child)])


@contextmanager
def offloading_from(device: str, watcher: Watcher) -> Iterator[None]:
    """Inside the block, make the wrapper offload from this device."""

    def saving(*, pin_memory: bool) -> save_on_cpu:
        hooks = save_on_cpu(pin_memory=pin_memory, device_type=device)
        hooks.pack_hook = _in_order(hooks.pack_hook) if device != "cpu" else hooks.pack_hook
        hooks.unpack_hook = _claimed(hooks.unpack_hook, watcher)
        return hooks

    with replaced(checkpoint_wrapper, "save_on_cpu", saving):
        yield


def _in_order(pack: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    """Pack a tensor, after a temporary contiguous copy if it is not contiguous; CUDA's ``copy_`` makes and frees one.

    Source: torch 2.13, aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries.
    """

    def packing(tensor: torch.Tensor) -> object:
        tensor.contiguous()
        return pack(tensor)

    return packing


def _claimed(unpack: Callable[[object], torch.Tensor], watcher: Watcher) -> Callable[[object], torch.Tensor]:
    def claimed(packed: object) -> torch.Tensor:
        tensor = unpack(packed)
        watcher.claim(Kind.ACTIVATIONS, (tensor,))
        return tensor

    return claimed

"""Replaces values that DeepSpeed reads and that a simulated run lacks.

DeepSpeed's own code runs unmodified. These replacements decide which branches it takes:

- a number read from a fake tensor (overflow flag, norm, check for infinity) is that of a healthy step: no overflow, norm 1;
- rank 0's answers about its modules equal this rank's: all ranks run the same program;
- quantization kernels allocate their results and compute nothing;
- the recipe decides whether the GPU has room for flat buffers (:class:`~zeroplan.spec.recipe.DeepSpeedOptions`);
- ``module.to`` leaves a module of fake tensors unchanged.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.comm import comm
from deepspeed.ops import op_builder
from deepspeed.runtime.zero import partition_parameters, utils
from deepspeed.utils import groups
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from zeroplan.spec.recipe import DeepSpeedOptions
from zeroplan.verify.fake_parts.fake_mode import unknown_numbers
from zeroplan.verify.replaced import replaced

_PLENTY = 2**62


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Make DeepSpeed use the CPU or the fake GPU inside; restore its device afterwards."""
    before = get_accelerator()
    if before._name != device:
        set_accelerator(CUDA_Accelerator() if device == "cuda" else CPU_Accelerator())
    try:
        yield
    finally:
        set_accelerator(before)


@contextmanager
def fake_parts_of_deepspeed(options: DeepSpeedOptions) -> Iterator[None]:
    """Install the replacements for one rank of a fake process group, on fake or real tensors.

    Afterwards DeepSpeed's state is as before, so another run can begin.
    """
    room = _PLENTY if options.flatten_on_accelerator else 0
    with ExitStack() as stack:
        for answer in (
            unknown_numbers(_healthy),
            replaced(utils, "assert_lst_len_same_as_other_ranks", _as_rank_0(utils.assert_lst_len_same_as_other_ranks)),
            replaced(utils, "get_lst_from_rank0", _as_rank_0(utils.get_lst_from_rank0)),
            replaced(get_accelerator(), "available_memory", lambda _index=None: room),
            replaced(get_accelerator(), "is_fp16_supported", lambda: True),
            replaced(get_accelerator(), "_communication_backend_name", "fake"),
            replaced(op_builder, "QuantizerBuilder", QuantizerBuilder),
            *_nodes(options),
            replaced(nn.Module, "to", _to(nn.Module.to)),
            *(_restored(owner) for owner in (groups, comm, partition_parameters.Init)),
        ):
            stack.enter_context(answer)
        yield


def _nodes(options: DeepSpeedOptions) -> list[AbstractContextManager[None]]:
    """Replace the number of visible GPUs by the ranks per node, which quantized gradients read."""
    if not options.zero_quantized_gradients:
        return []
    return [replaced(get_accelerator(), "device_count", lambda: options.gpus_per_node)]


@contextmanager
def _restored(owner: object) -> Iterator[None]:
    """Restore a module's or class's attributes after the block; DeepSpeed stores groups and counts there."""
    before = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(owner).items()}
    try:
        yield
    finally:
        for name, value in before.items():
            if vars(owner)[name] is not value and not name.startswith("__"):
                setattr(owner, name, value)


def _healthy(dtype: torch.dtype) -> float | bool | int | None:
    """The number that DeepSpeed reads in a healthy step: no overflow, norm 1. None if another library reads it."""
    frame = sys._getframe(1)
    while (package := str(frame.f_globals.get("__name__")).partition(".")[0]) in ("torch", "zeroplan") and frame.f_back:
        frame = frame.f_back
    if package != "deepspeed":
        return None
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0


def _as_rank_0(compare: Callable[[list[int]], object]) -> Callable[[list[int]], object]:
    """Run DeepSpeed's comparison with rank 0 as if on rank 0, with real tensors, since it reads integers one by one."""

    def compared(mine: list[int]) -> object:
        host = replaced(utils, "get_accelerator", CPU_Accelerator)
        with unset_fake_temporarily(), host, replaced(utils.dist, "get_rank", lambda _group=None: 0):
            return compare(mine)

    return compared


def _to(move: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Skip ``to`` for modules of fake tensors: torch moves a module by swapping parameters, which fails for fake ones."""

    def to(module: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        fake = any(isinstance(parameter, FakeTensor) for parameter in module.parameters())
        return module if fake else move(module, *args, **kwargs)

    return to


class QuantizerBuilder:
    """Replaces DeepSpeed's builder, whose ``load`` compiles the kernels."""

    def load(self) -> "_Quantizer":
        """The stand-in for the compiled module."""
        return _Quantizer()


class _Quantizer:
    """The functions that ZeRO++ calls; symmetric quantization has one scale per group."""

    Symmetric = 0

    def quantize(self, values: torch.Tensor, groups: int, bits: int, _kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _scales(values, groups)
        *outer, last = values.shape
        return values.new_empty((*outer, last * bits // 8), dtype=torch.int8), scales

    def dequantize(self, values: torch.Tensor, _scales: torch.Tensor, _groups: int, bits: int, _kind: int) -> torch.Tensor:
        *outer, last = values.shape
        return values.new_empty((*outer, last * 8 // bits), dtype=torch.float16)

    def swizzle_quant(
        self, values: torch.Tensor, groups: int, bits: int, _kind: int, _pipeline: int, _nodes: int, _devices: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _scales(values, groups)
        return values.new_empty((values.numel() * bits // 8,), dtype=torch.int8), scales

    def quantized_reduction(
        self, values: torch.Tensor, _given: torch.Tensor, _groups: int, groups: int, _bits: int, _kind: int, devices: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _scales(values, groups)
        *outer, last = values.shape
        return values.new_empty((*outer, last // devices)), scales


def _scales(values: torch.Tensor, groups: int) -> torch.Tensor:
    return values.new_empty((groups, 1), dtype=torch.float32)

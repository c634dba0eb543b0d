"""What DeepSpeed reads that nobody has: numbers of fake tensors, words of other ranks, free memory of a GPU.

DeepSpeed's own code runs unmodified. Here, from outside, stand the answers to the few questions that decide which way it goes:

- a number of a fake tensor (overflow flags, norms, checks for infinity) is that of a healthy step: nothing overflows, norms are 1;
- what rank 0 says of its modules is what this rank says: all run the same program;
- kernels that quantize make the tensors that they make, and nothing in them;
- there is room on the GPU for flat buffers, or not, as the recipe has it (:class:`~zeroplan.spec.recipe.DeepSpeedOptions`);
- a module of fake tensors is where it is to be moved to.
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
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode, unset_fake_temporarily

from zeroplan.spec.recipe import DeepSpeedOptions
from zeroplan.verify.pretended.deepspeed_quantizer import QuantizerBuilder
from zeroplan.verify.replaced import replaced

_NUMBER = torch.ops.aten._local_scalar_dense.default
_PLENTY = 2**62


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Have DeepSpeed take the CPU or the fake GPU for its device; afterwards it has the one it had."""
    before = get_accelerator()
    if before._name != device:
        set_accelerator(CUDA_Accelerator() if device == "cuda" else CPU_Accelerator())
    try:
        yield
    finally:
        set_accelerator(before)


@contextmanager
def answers(options: DeepSpeedOptions) -> Iterator[None]:
    """Answer DeepSpeed as one rank of a fake process group, on fake tensors or real ones.

    Afterwards DeepSpeed knows nothing of the run, and another can begin.
    """
    room = _PLENTY if options.flatten_on_accelerator else 0
    with ExitStack() as stack:
        for answer in (
            _numbers(),
            replaced(utils, "assert_lst_len_same_as_other_ranks", _among_equals(utils.assert_lst_len_same_as_other_ranks)),
            replaced(utils, "get_lst_from_rank0", _among_equals(utils.get_lst_from_rank0)),
            replaced(get_accelerator(), "available_memory", lambda _index=None: room),
            replaced(get_accelerator(), "is_fp16_supported", lambda: True),
            replaced(get_accelerator(), "_communication_backend_name", "fake"),
            replaced(op_builder, "QuantizerBuilder", QuantizerBuilder),
            *_nodes(options),
            replaced(nn.Module, "to", _to(nn.Module.to)),
            *(_forgotten(owner) for owner in (groups, comm, partition_parameters.Init)),
        ):
            stack.enter_context(answer)
        yield


def _nodes(options: DeepSpeedOptions) -> list[AbstractContextManager[None]]:
    """Say how many GPUs a process sees where anybody asks: so many ranks share a node."""
    if not options.zero_quantized_gradients:
        return []
    return [replaced(get_accelerator(), "device_count", lambda: options.gpus_per_node)]


@contextmanager
def _forgotten(owner: object) -> Iterator[None]:
    """What DeepSpeed notes of a run in a module or class (groups, counts of persistent weights) is gone after it."""
    before = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(owner).items()}
    try:
        yield
    finally:
        for name, value in before.items():
            if vars(owner)[name] is not value and not name.startswith("__"):
                setattr(owner, name, value)


@contextmanager
def _numbers() -> Iterator[None]:
    """Where a fake tensor's number is not known, say that nothing overflowed and that the norm is 1."""
    original = fake_impls.op_implementations_dict[_NUMBER]

    def number(mode: FakeTensorMode, func: object, tensor: FakeTensor) -> object:
        try:
            return original(mode, func, tensor)
        except DataDependentOutputException:
            if not _asks_deepspeed():
                raise
            return _healthy(tensor.dtype)

    fake_impls.op_implementations_dict[_NUMBER] = number
    try:
        yield
    finally:
        fake_impls.op_implementations_dict[_NUMBER] = original


def _healthy(dtype: torch.dtype) -> float | bool | int:
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0


def _asks_deepspeed() -> bool:
    """Whether it is DeepSpeed, by way of torch, that reads, and not the model."""
    frame = sys._getframe(1)
    while (package := str(frame.f_globals.get("__name__")).partition(".")[0]) in ("torch", "zeroplan") and frame.f_back:
        frame = frame.f_back
    return package == "deepspeed"


def _among_equals(compare: Callable[[list[int]], object]) -> Callable[[list[int]], object]:
    """Compare with rank 0 as rank 0 does, on real tensors: integers that are read one by one."""

    def compared(mine: list[int]) -> object:
        host = replaced(utils, "get_accelerator", CPU_Accelerator)
        with unset_fake_temporarily(), host, replaced(utils.dist, "get_rank", lambda _group=None: 0):
            return compare(mine)

    return compared


def _to(move: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Leave fake modules where they are: torch moves them by swapping parameters, which fake ones refuse."""

    def to(module: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        fake = any(isinstance(parameter, FakeTensor) for parameter in module.parameters())
        return module if fake else move(module, *args, **kwargs)

    return to

"""A pretended GPU for fake tensors: a device of its own beside the CPU, with streams, that takes CUDA's decisions.

Fake tensors need no device to exist, only a name under which autograd and the engines find streams and guards. With it, what
an engine moves to host memory leaves the record, side streams are told apart, and operators whose results depend on the device
(statistics of a layer norm, the kernel of an attention) give what they give on CUDA.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from zeroplan.errors import MeasurementError
from zeroplan.verify.pretended.fake_mode import QuickFakes
from zeroplan.verify.replaced import replaced

CARD = "card"
"""The device's name."""

_FLASH_HEAD_DIM = 256


@cache
def install() -> str:
    """Make the device known to torch, once per process, and return its name."""
    if (other := torch._C._get_privateuse1_backend_name()) != "privateuseone":
        raise MeasurementError(
            f"this process has a device {other!r} in the place where a pretended GPU would go; run without it"
        )
    _setup_privateuseone_for_python_backend(CARD, _module())
    _own_kernels()
    torch.cpu._default_cpu_stream = torch.cpu._current_stream = _Stream()  # DeepSpeed waits for it on a single rank
    return CARD


class _Stream(torch.cpu.Stream):
    """A stream that does nothing, as the CPU's, but that has a name and whose events are there to be waited for."""

    stream_id = device_index = device_type = 0  # torch 2.15 names it to an operator that records nothing

    def record_event(self, event: torch.cpu.Event | None = None) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event() if event is None else event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def is_capturing(self) -> bool:
        """Whether a graph is recorded: never (torch 2.15 asks before it gathers)."""
        return False


def _own_kernels() -> None:
    """Have an operator of its own wherever the CPU has, and CUDA: others would be taken apart into simpler ones.

    No kernel is ever called, since fake tensors answer before.
    """
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")  # type: ignore[no-untyped-call]
    for name in torch._C._dispatch_get_all_op_names():
        taken_apart = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if name.startswith("aten::") and taken_apart and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            library.impl(name.removeprefix("aten::"), _never)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []  # kernels are there as long as their library


def _never(*_args: object, **_options: object) -> object:
    raise AssertionError("tensors on the pretended GPU are fake")


def _module() -> types.ModuleType:
    """What ``torch.card`` has: streams, one device, the precisions of autocast."""
    module = types.ModuleType(f"torch.{CARD}")
    answers: dict[str, object] = {
        "is_available": True, "is_initialized": True, "current_device": 0, "device_count": 1, "_is_in_bad_fork": False,
        "set_device": None, "manual_seed_all": None, "_lazy_init": None, "get_rng_state": None, "set_rng_state": None,
        "get_amp_supported_dtype": [torch.bfloat16, torch.float16], "synchronize": None,
    }  # fmt: skip
    for name, value in (streams() | {name: always(answer) for name, answer in answers.items()}).items():
        setattr(module, name, value)
    return module


def streams() -> dict[str, Callable[..., object]]:
    """What makes, chooses and names the card's streams: the CPU's, which remember the one that was chosen."""
    return {
        "Stream": _Stream,
        "Event": torch.cpu.Event,
        "stream": torch.cpu.stream,
        "current_stream": torch.cpu.current_stream,
        "default_stream": _first_stream,
    }


def _first_stream(*_: object) -> torch.cpu.Stream:
    return torch.cpu._default_cpu_stream


def always(answer: object) -> Callable[..., object]:
    """Make a function that gives one answer, whatever it is asked."""
    return lambda *_, **__: answer


class FakeCardMode(QuickFakes):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Fake tensors where a GPU is named that is not there: constants stay on the host until they are moved."""

    @property
    def avoid_device_init(self) -> bool:
        """Whether to keep from touching the device."""
        return True


@contextmanager
def decisions() -> Iterator[None]:
    """Choose attention's kernel as CUDA does, and let host memory be pinned, which changes nothing on the card.

    That a tensor is in use on a stream beside its own delays when its memory is used again, not when it is free.
    Backward passes run in the calling thread: a thread of the device's own would number autograd's nodes anew.
    """
    with (
        replaced(torch.nn.functional, "scaled_dot_product_attention", _attention),
        replaced(torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        replaced(torch.Tensor, "record_stream", always(None)),
        replaced(torch.accelerator, "current_stream", torch.cpu.current_stream),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


Kernel = Literal["flash", "efficient", "math"]


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Kernel:
    """Which kernel CUDA takes for these.

    Source: torch 2.13, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``: flash needs 16 bits, one head size up to 256
    and no mask; the memory-efficient one as many heads of keys as of queries (not so in later versions); each is taken in this
    order. Left out: cuDNN's, which newer libraries prefer on Hopper and Blackwell.
    """
    same_size = query.size(-1) == key.size(-1) == value.size(-1) <= _FLASH_HEAD_DIM
    if mask is None and same_size and query.dtype in (torch.float16, torch.bfloat16):
        return "flash"
    return "efficient" if query.size(1) == key.size(1) else "math"


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: FBT001, FBT002  torch's signature
) -> torch.Tensor:  # fmt: skip
    query, key, value = (_as_autocast_has_it(one) for one in (query, key, value))
    attn_mask = None if attn_mask is None else _as_autocast_has_it(attn_mask)
    chosen = kernel(query, key, value, attn_mask)
    if chosen == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if chosen == "efficient":
        bias = _bias(query, attn_mask)
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
        return out[0]  # type: ignore[no-any-return]
    out = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out[0]  # type: ignore[no-any-return]


_attention.__name__ = "scaled_dot_product_attention"  # by which others replace it in their turn


def _as_autocast_has_it(operand: torch.Tensor) -> torch.Tensor:
    """Attention is on autocast's list, and its kernel is chosen among operands that are cast."""
    if not torch.is_autocast_enabled(CARD) or not operand.is_floating_point():
        return operand
    return operand.to(torch.get_autocast_dtype(CARD))


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, scale: float | None  # noqa: FBT001
) -> torch.Tensor:  # fmt: skip
    """Pad heads to a multiple of 8, as ``scaled_dot_product_attention`` does before the kernel."""
    size = query.size(-1)
    if rest := -size % 8:
        query, key, value = (torch.nn.functional.pad(one, (0, rest)) for one in (query, key, value))
        scale = size**-0.5 if scale is None else scale
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)[0]
    return out[..., :size] if rest else out


def _bias(query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask as the memory-efficient kernel takes it: numbers to add, rows padded to 16 elements."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    rest = -mask.size(-1) % 16
    mask = torch.nn.functional.pad(mask, (0, rest))[..., : mask.size(-1)] if rest else mask
    return mask.expand(query.size(0), query.size(1), query.size(2), -1)

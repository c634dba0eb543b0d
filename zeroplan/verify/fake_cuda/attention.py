"""The kernel of scaled dot product attention that CUDA takes, and what of torch is otherwise while a run is watched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from zeroplan.verify.fake_cuda.torch_cuda import always
from zeroplan.verify.replaced import replaced

_FLASH_HEAD_DIM = 256


@contextmanager
def decisions() -> Iterator[None]:
    """Choose attention's kernel as CUDA does, and let host memory be pinned, which changes nothing on the GPU.

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
    if not torch.is_autocast_enabled("cuda") or not operand.is_floating_point():
        return operand
    return operand.to(torch.get_autocast_dtype("cuda"))


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

"""Which attention kernel would CUDA choose? Also replaces a few torch functions that behave differently on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from zeroplan.verify.replaced import always, replaced

_FLASH_HEAD_DIM = 256


@contextmanager
def decisions() -> Iterator[None]:
    """Choose the attention kernel as CUDA does, and turn off pinning of host memory.

    ``record_stream`` only delays the reuse of memory, so it does nothing here. Backward passes run in the calling thread, because
    autograd's thread per device would number its nodes from the start again.
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
    """The kernel that CUDA chooses for these operands.

    Source: torch 2.13, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``: flash needs 16 bits, one head size of 256 at
    most and no mask; the memory-efficient kernel needs as many heads of keys as of queries (not so in later versions). Flash
    has precedence. Before compute capability 8.0 there is no flash, and the memory-efficient kernel takes no bf16. Left out:
    cuDNN's kernel, which newer libraries prefer on Hopper and Blackwell.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return "efficient" if query.size(1) == key.size(1) and query.dtype != torch.bfloat16 else "math"
    same_size = query.size(-1) == key.size(-1) == value.size(-1) <= _FLASH_HEAD_DIM
    if mask is None and same_size and query.dtype in (torch.float16, torch.bfloat16):
        return "flash"
    return "efficient" if query.size(1) == key.size(1) else "math"


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: FBT001, FBT002  torch's signature
) -> torch.Tensor:  # fmt: skip
    query, key, value = (_autocast(one) for one in (query, key, value))
    attn_mask = None if attn_mask is None else _autocast(attn_mask)
    chosen = kernel(query, key, value, attn_mask)
    if chosen == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if chosen == "efficient":
        bias = _bias(query, attn_mask)
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
        return out[0]  # type: ignore[no-any-return]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _numbers(query, attn_mask)
    with torch.autocast("cuda", enabled=False):  # autocast has cast the operands, and leaves what runs inside alone
        out = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return out[0]  # type: ignore[no-any-return]


_attention.__name__ = "scaled_dot_product_attention"  # other replacements look for this name


def _autocast(operand: torch.Tensor) -> torch.Tensor:
    """The operand in autocast's dtype, since CUDA chooses the kernel after autocast."""
    if not torch.is_autocast_enabled("cuda") or not operand.is_floating_point():
        return operand
    return operand.to(torch.get_autocast_dtype("cuda"))


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, scale: float | None  # noqa: FBT001
) -> torch.Tensor:  # fmt: skip
    """Pad the head size to a multiple of 8, as ``scaled_dot_product_attention`` does before the kernel."""
    size = query.size(-1)
    if rest := -size % 8:
        query, key, value = (torch.nn.functional.pad(one, (0, rest)) for one in (query, key, value))
        scale = size**-0.5 if scale is None else scale
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)[0]
    return out[..., :size] if rest else out


def _bias(query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as the memory-efficient kernel needs it: numbers to add, rows padded to 16 elements."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = _numbers(query, mask)
    rest = -mask.size(-1) % 16
    mask = torch.nn.functional.pad(mask, (0, rest))[..., : mask.size(-1)] if rest else mask
    return mask.expand(query.size(0), query.size(1), query.size(2), -1)


def _numbers(query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask as numbers to add, in the dtype of the queries."""
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))

"""What a kernel of CUDA takes and gives back inside itself, which no operator shows: the backward of flash attention.

Source: torch 2.13, ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``mha_bwd`` and ``mha_varlen_bwd``: an fp32
accumulator of the queries' gradient and a sum per row, both filled up to blocks of 128 rows, heads to a multiple of 32; where
queries share heads of keys and values, the gradients of these for every head of the queries. Left out: the workspace of the
memory-efficient kernel, cuDNN's, and the larger accumulators of ``torch.use_deterministic_algorithms``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch._ops import OpOverload

_ROWS, _COLUMNS, _FP32 = 128, 32, 4
_QUERY, _KEY, _STARTS = 1, 2, 6
"""Where both operators have them."""
_PACKED = 3
"""Dimensions of all tokens, heads and head size."""


def flash_scratch_bytes(rows: int, heads: int, size: int, *, key_rows: int, key_heads: int, element: int) -> int:
    """What the kernel takes for so many rows, filled up already, of so many heads. [bytes]

    >>> flash_scratch_bytes(256, 4, 64, key_rows=200, key_heads=4, element=2) == 4 * 256 * 4 * (64 + 1)
    True
    """
    taken = _FP32 * rows * heads * (-(-size // _COLUMNS) * _COLUMNS + 1)
    return taken + (2 * element * key_rows * heads * size if key_heads != heads else 0)


def _of_sdpa(args: Sequence[object]) -> int:
    """Of tensors of sequences, heads, tokens and head size."""
    query, key = (cast("torch.Tensor", args[at]) for at in (_QUERY, _KEY))
    sequences, heads, length, size = query.shape
    return flash_scratch_bytes(
        sequences * -(-length // _ROWS) * _ROWS, heads, size,
        key_rows=sequences * key.size(2), key_heads=key.size(1), element=query.element_size(),
    )  # fmt: skip


def _of_flash(args: Sequence[object]) -> int:
    """Of tensors of sequences, tokens, heads and head size; or of all tokens, heads and head size, with where sequences start."""
    query, key = (cast("torch.Tensor", args[at]) for at in (_QUERY, _KEY))
    starts = cast("torch.Tensor | None", args[_STARTS])
    heads, size = query.shape[-2:]
    tokens, key_rows = (one.numel() // one.size(-1) // one.size(-2) for one in (query, key))
    if starts is not None and query.dim() == _PACKED:
        rows = tokens + _ROWS * (starts.numel() - 1)
    else:
        rows = query.size(0) * -(-query.size(1) // _ROWS) * _ROWS
    return flash_scratch_bytes(rows, heads, size, key_rows=key_rows, key_heads=key.size(-2), element=query.element_size())


SCRATCH: Mapping[OpOverload, Callable[[Sequence[object]], int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _of_sdpa,
    torch.ops.aten._flash_attention_backward.default: _of_flash,
}
"""What each operator's kernel takes beside what it returns, by its arguments. [bytes]"""

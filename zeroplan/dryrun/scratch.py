"""How much memory do CUDA's attention kernels allocate and free internally, unseen by operators?

Source of flash attention's backward: torch 2.13, ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``,
``mha_bwd`` and ``mha_varlen_bwd``: an fp32 accumulator of the queries' gradient and a sum per row, both padded to blocks of 128
rows; head sizes are padded to a multiple of 32, those over 128 to a multiple of 64. If queries share heads of keys and values,
it also has the gradients of these for every head of the queries. Before it, ``cuda/attention_backward.cu``
(``_flash_attention_backward``) copies the output and its gradient if they are not contiguous in the order of tokens, heads and
head size.

Source of the memory-efficient kernel: torch 2.13, ``cuda/mem_eff_attention/kernel_backward.h`` (``workspace_size``) and
``kernels/cutlassB.h`` (blocks by head size), ``cuda/attention_backward.cu`` (``delta``, keys split, the gradient made contiguous),
and ``kernel_forward.h`` (``kNeedsOutputAccumulatorBuffer``).

Left out: cuDNN's workspaces, which its library chooses; the larger accumulators of ``torch.use_deterministic_algorithms`` in flash
attention; block sizes of GPUs before compute capability 8.0, which are assumed to equal those of 8.0.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch._ops import OpOverload

from zeroplan.numeric import ceil_div

_ROWS, _FP32 = 128, 4
_GRADIENT, _QUERY, _KEY, _OUT, _STARTS = 0, 1, 2, 4, 6
"""Positions of these arguments in both operators."""
_PACKED = 3
"""Dimensions of a tensor of all tokens, heads and head size."""


def flash_scratch_bytes(rows: int, heads: int, size: int, *, key_rows: int, key_heads: int, element: int) -> int:
    """The kernel's scratch for padded rows and heads. [bytes]

    >>> flash_scratch_bytes(256, 4, 64, key_rows=200, key_heads=4, element=2) == 4 * 256 * 4 * (64 + 1)
    True
    """
    columns = 32 if size <= 128 else 64
    taken = _FP32 * rows * heads * (ceil_div(size, columns) * columns + 1)
    return taken + (2 * element * key_rows * heads * size if key_heads != heads else 0)


def _of_sdpa(args: Sequence[object]) -> int:
    """The scratch for tensors of sequences, heads, tokens and head size. [bytes]"""
    gradient, query, key, out = (cast("torch.Tensor", args[at]) for at in (_GRADIENT, _QUERY, _KEY, _OUT))
    sequences, heads, length, size = query.shape
    return _copied_bytes(gradient.transpose(1, 2), out.transpose(1, 2)) + flash_scratch_bytes(
        sequences * -(-length // _ROWS) * _ROWS, heads, size,
        key_rows=sequences * key.size(2), key_heads=key.size(1), element=query.element_size(),
    )  # fmt: skip


def _of_flash(args: Sequence[object]) -> int:
    """The scratch for tensors of sequences, tokens, heads and head size, or of packed tokens with sequence starts. [bytes]"""
    gradient, query, key, out = (cast("torch.Tensor", args[at]) for at in (_GRADIENT, _QUERY, _KEY, _OUT))
    starts = cast("torch.Tensor | None", args[_STARTS])
    heads, size = query.shape[-2:]
    tokens, key_rows = (one.numel() // one.size(-1) // one.size(-2) for one in (query, key))
    if starts is not None and query.dim() == _PACKED:
        rows = tokens + _ROWS * (starts.numel() - 1)
    else:
        rows = query.size(0) * -(-query.size(1) // _ROWS) * _ROWS
    return _copied_bytes(gradient, out) + flash_scratch_bytes(
        rows, heads, size, key_rows=key_rows, key_heads=key.size(-2), element=query.element_size()
    )


def _copied_bytes(*tensors: torch.Tensor) -> int:
    """The size of copies of the tensors that are not contiguous. [bytes]"""
    return sum(one.numel() * one.element_size() for one in tensors if not one.is_contiguous())


class _Blocks(NamedTuple):
    """The block sizes of queries and keys in the memory-efficient backward."""

    rows: int
    keys: int
    sums_keys: bool = False
    """Whether it sums the gradients of keys and values in memory, in fp32."""


_LITTLE_SHARED = ((8, 6), (8, 9))
"""Compute capabilities with 99 KiB of shared memory per block, which have a kernel of their own; 12.x has as little."""
_LARGEST_SPLIT = 200
_ENOUGH_BLOCKS = 256


def _blocks(size: int, *, half: bool, dropout: bool, capability: tuple[int, int]) -> _Blocks:
    """The block sizes of the first kernel of ``cutlassB.h`` for a head size that fits into the GPU's shared memory."""
    little = capability in _LITTLE_SHARED or capability[0] == 12
    if size <= 64:
        return _Blocks(64, 64)
    if size > 128:
        return _Blocks(128, 64, sums_keys=half)
    if not half:
        return _Blocks(64 if little else 128, 64)
    if size <= 96 and capability in _LITTLE_SHARED and not dropout:
        return _Blocks(128, 64)
    return _Blocks(64, 64, sums_keys=True) if little else _Blocks(128, 128)


class Heads(NamedTuple):
    """The sizes of attention: heads of all sequences, rows and keys of each, head sizes of keys and of values."""

    heads: int
    rows: int
    keys: int
    size: int
    value_size: int


def efficient_workspace_bytes(of: Heads, *, half: bool, dropout: bool, capability: tuple[int, int]) -> int:
    """The buffer in which the memory-efficient backward sums gradients. [bytes]

    A block of the queries' gradient has 16 bytes beside its fp32 numbers. It exists for 32 bits too, since blocks split the keys.

    >>> sizes = Heads(8, 1024, 1024, 64, 64)
    >>> efficient_workspace_bytes(sizes, half=True, dropout=False, capability=(9, 0)) == 8 * 16 * (4 * 64 * 64 + 16)
    True
    """
    rows, keys, sums_keys = _blocks(max(of.size, of.value_size), half=half, dropout=dropout, capability=capability)
    elements = ceil_div(of.rows, rows) * ceil_div(of.size, keys) * (rows * keys + 4)
    if sums_keys:
        few = of.heads >= _ENOUGH_BLOCKS and of.keys <= 2 * keys
        splits = 1 if few else max(1, min(ceil_div(of.keys, keys), _LARGEST_SPLIT // of.heads))
        elements += splits * keys * sum(ceil_div(size, rows) * rows for size in (of.size, of.value_size))
    return _FP32 * of.heads * elements


def efficient_backward_bytes(of: Heads, *, half: bool, dropout: bool, capability: tuple[int, int]) -> int:
    """The peak of the memory-efficient backward without its results. [bytes]

    It has a workspace and a sum per row. In 32 bits torch computes the sums first: the product of output and gradient, its
    sums, and a reordered copy of them.
    """
    sums = _FP32 * of.heads * of.rows
    taken = sums + efficient_workspace_bytes(of, half=half, dropout=dropout, capability=capability)
    return taken if half else max(taken, sums * of.value_size + 2 * sums)


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, heads_first: bool) -> Heads:
    heads, rows = (1, 2) if heads_first else (2, 1)
    return Heads(query.size(0) * query.size(heads), query.size(rows), key.size(rows), query.size(-1), value.size(-1))


def _of_efficient_backward(args: Sequence[object], *, dropout_at: int, heads_first: bool) -> int:
    gradient, query, key, value = (cast("torch.Tensor", one) for one in args[:4])
    dropout = bool(args[dropout_at]) if len(args) > dropout_at else False
    return _copied_bytes(gradient.transpose(1, 2) if heads_first else gradient) + efficient_backward_bytes(
        _heads(query, key, value, heads_first=heads_first), half=query.element_size() == 2, dropout=dropout,
        capability=torch.cuda.get_device_capability(),
    )  # fmt: skip


def _of_efficient_forward(args: Sequence[object]) -> int:
    """The forward's accumulator: half precision sums heads larger than 128 in fp32. [bytes]"""
    query, key, value = (cast("torch.Tensor", one) for one in args[:3])
    if query.element_size() != 2 or max(key.size(-1), value.size(-1)) <= 128:
        return 0
    return _FP32 * query.numel() // query.size(-1) * value.size(-1)


SCRATCH: Mapping[OpOverload, Callable[[Sequence[object]], int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _of_sdpa,
    torch.ops.aten._flash_attention_backward.default: _of_flash,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: _of_efficient_forward,
    torch.ops.aten._efficient_attention_forward.default: _of_efficient_forward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: partial(
        _of_efficient_backward, dropout_at=9, heads_first=True
    ),
    torch.ops.aten._efficient_attention_backward.default: partial(_of_efficient_backward, dropout_at=11, heads_first=False),
}
"""For each operator, a function of its arguments that gives its kernel's internal memory. [bytes]"""

"""Runs flash-attn's functions by torch's operator with the same kernels: equal results, equal tensors kept for backward.

Source: flash-attn 2.8, ``flash_attn/flash_attn_interface.py``: ``FlashAttnFunc`` keeps query, key, value, the output and one number
per row, with heads padded to a multiple of 8; ``FlashAttnQKVPackedFunc`` keeps views and returns one gradient. Memory inside the
kernels is left out, as for torch's operator.
"""

from typing import Any

import torch
from torch import nn

from zeroplan.dryrun.replacements import note

from .kernels import _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_backward, _flash_attn_varlen_forward

__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward", "flash_attn_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip
_MULTIPLE = 8
"""Head sizes are padded to a multiple of this."""
Windows = tuple[int, int]


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Windows = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,  # noqa: ARG001, FBT001, FBT002
    deterministic: bool = False, return_attn_probs: bool = False,  # noqa: ARG001, FBT001, FBT002
) -> object:  # fmt: skip
    """Attention of tensors with shape batch, sequence, heads, head size."""
    note("flash-attn", "torch's flash attention, which keeps the same tensors")
    found = _attention(q, k, v, None, None, q.size(1), k.size(1), dropout_p, causal=causal, scale=softmax_scale)
    return (*found, None) if return_attn_probs else found[0]


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,  # noqa: FBT001, FBT002
    window_size: Windows = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,  # noqa: ARG001
    deterministic: bool = False, return_attn_probs: bool = False, block_table: torch.Tensor | None = None,  # noqa: ARG001, FBT001, FBT002
) -> object:  # fmt: skip
    """Attention of packed sequences, split at the offsets: tokens, heads, head size."""
    note("flash-attn", "torch's flash attention, which keeps the same tensors")
    found = _attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), dropout_p, causal=causal, scale=softmax_scale
    )
    return (*found, None) if return_attn_probs else found[0]


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,  # noqa: FBT001, FBT002
    *_: object, return_attn_probs: bool = False, **__: object,
) -> object:  # fmt: skip
    """Attention of one tensor with shape batch, sequence, three, heads, head size."""
    note("flash-attn", "torch's flash attention, which keeps the same tensors")
    out, rows = _Packed.apply(qkv, None, qkv.size(1), dropout_p, softmax_scale, causal)  # type: ignore[no-untyped-call]
    return (out, rows, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, *_: object, return_attn_probs: bool = False, **__: object,  # noqa: FBT001, FBT002
) -> object:  # fmt: skip
    """Attention of one tensor with shape tokens, three, heads, head size."""
    note("flash-attn", "torch's flash attention, which keeps the same tensors")
    out, rows = _Packed.apply(qkv, cu_seqlens, int(max_seqlen), dropout_p, softmax_scale, causal)  # type: ignore[no-untyped-call]
    return (out, rows, None) if return_attn_probs else out


def flash_attn_with_kvcache(*_: object, **__: object) -> object:
    """Raise an error: a training step does not generate."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not supported in a dry run; leave generation out, or install flash-attn"
    )


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None, key_starts: torch.Tensor | None,
    longest: int, longest_key: int, dropout: float, *, causal: bool, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    size = query.size(-1)
    if missing := -size % _MULTIPLE:
        query, key, value = (nn.functional.pad(one, (0, missing)) for one in (query, key, value))
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, key_starts, longest, longest_key, dropout, causal, False, scale=scale
    )
    return found[0][..., :size] if missing else found[0], found[1]


class _Packed(torch.autograd.Function):
    """Attention whose query, key and value are views of one tensor; their gradients are views as well."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, starts: torch.Tensor | None, longest: int, dropout: float, scale: float | None,  # noqa: ANN401
        causal: bool,  # noqa: FBT001
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        query, key, value = qkv.unbind(-3)
        out, rows = _attention(query, key, value, starts, starts, longest, longest, dropout, causal=causal, scale=scale)
        ctx.save_for_backward(query, key, value, out, rows, starts)
        ctx.shape = qkv.shape
        ctx.mark_non_differentiable(rows)
        return out, rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _rows: object) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        return (grad.new_empty(ctx.shape), None, None, None, None, None)

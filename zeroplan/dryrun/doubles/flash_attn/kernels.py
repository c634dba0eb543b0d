"""Replaces flash-attn's kernels that libraries call directly: shapes of results, and allocations through torch.

Source: flash-attn 2.8.4, ``csrc/flash_attn/flash_api.cpp`` (``mha_fwd``, ``mha_varlen_fwd``, ``mha_bwd``, ``mha_varlen_bwd``) and
``flash_attn/flash_attn_interface.py``. Left out: the scores that attention with dropout returns, and paged keys.
"""

import torch

from zeroplan.dryrun.replacements import note

_ROWS = 128
"""Rows of queries are padded to a multiple of this."""
Optional = torch.Tensor | None


def _flash_attn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float, causal: bool,  # noqa: ARG001, FBT001
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Optional = None,  # noqa: ARG001
    return_softmax: bool = False,  # noqa: ARG001, FBT001, FBT002
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output, one number per row, no scores, and the random generator's state."""
    batch, rows, heads, _ = q.shape
    return _results(q, (batch, heads, rows))


def _flash_attn_varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,  # noqa: ARG001
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,  # noqa: ARG001, FBT001
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Optional = None, return_softmax: bool = False,  # noqa: ARG001, FBT001, FBT002
    block_table: Optional = None, leftpad_k: Optional = None, seqused_k: Optional = None, zero_tensors: bool = False,  # noqa: ARG001, FBT001, FBT002
    num_splits: int = 0,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same for packed sequences."""
    tokens, heads, _ = q.shape
    return _results(q, (heads, tokens))


def _results(query: torch.Tensor, rows: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _noted()
    out = torch.empty_like(query.contiguous())
    state = torch.empty(2, dtype=torch.int64, device=query.device)
    return out, query.new_empty(rows, dtype=torch.float32), query.new_empty(0), state


def _flash_attn_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,  # noqa: ARG001
    dq: Optional, dk: Optional, dv: Optional, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,  # noqa: ARG001, FBT001
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Optional = None, deterministic: bool = False,  # noqa: ARG001, FBT001, FBT002
    rng_state: Optional = None,  # noqa: ARG001
) -> torch.Tensor:  # fmt: skip
    """One number per row; gradients are written to ``dq``, ``dk`` and ``dv``."""
    batch, rows, heads, _ = q.shape
    rows = _up(rows, _ROWS)
    return _gradients(q, k, (batch, rows, heads), (batch, heads, rows))


def _flash_attn_varlen_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,  # noqa: ARG001
    dq: Optional, dk: Optional, dv: Optional, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,  # noqa: ARG001
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,  # noqa: ARG001, FBT001
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Optional = None, deterministic: bool = False,  # noqa: ARG001, FBT001, FBT002
    rng_state: Optional = None, zero_tensors: bool = False,  # noqa: ARG001, FBT001, FBT002
) -> torch.Tensor:  # fmt: skip
    """The same for packed sequences."""
    tokens, heads, _ = q.shape
    rows = tokens + _ROWS * (cu_seqlens_q.numel() - 1)
    return _gradients(q, k, (rows, heads), (heads, rows))


def _gradients(
    query: torch.Tensor, key: torch.Tensor, sums: tuple[int, ...], rows: tuple[int, ...]
) -> torch.Tensor:  # fmt: skip
    """The kernel's buffers: fp32 sums, and gradients of keys and values for every head of the queries."""
    _noted()
    size, heads = query.size(-1), query.size(-2)
    per_row = query.new_empty(rows, dtype=torch.float32)
    taken = [query.new_empty((*sums, _up(size, 32) if size <= 128 else _up(size, 64)), dtype=torch.float32)]
    if heads != key.size(-2):
        taken += [key.new_empty((*key.shape[:-2], heads, size)) for _ in range(2)]
    return per_row


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _noted() -> None:
    note("flash-attn", "its results' shapes, and its kernels' allocations")

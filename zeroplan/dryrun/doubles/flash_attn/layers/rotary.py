"""flash-attn's rotary embedding: one result per pass, with tables of cosines and sines kept.

Source: flash-attn 2.8, ``flash_attn/layers/rotary.py`` and ``flash_attn/ops/triton/rotary.py`` (``apply_rotary``).
"""

from typing import Any

import torch

from zeroplan.dryrun.replacements import note

Offsets = int | torch.Tensor


class ApplyRotaryEmb(torch.autograd.Function):
    """The rotation, which allocates only its result."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inplace: bool, *beside: object  # noqa: ANN401, FBT001
    ) -> torch.Tensor:  # fmt: skip
        """The rotated tensor; in place the tensor itself."""
        ctx.save_for_backward(cos, sin, *(one for one in beside if isinstance(one, torch.Tensor)))
        ctx.inplace = inplace
        return x if inplace else torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Its gradient, in place if the forward was."""
        dx = dout if ctx.inplace else torch.empty_like(dout)
        return dx, *(None for _ in ctx.needs_input_grad[1:])


def apply_rotary_emb(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, inplace: bool = False,  # noqa: ARG001, FBT001, FBT002
    seqlen_offsets: Offsets = 0, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None,  # noqa: ARG001
) -> torch.Tensor:  # fmt: skip
    """A tensor of queries or keys, rotated."""
    note("flash-attn", "its results' shapes, and its kernels' allocations")
    rotated: torch.Tensor = ApplyRotaryEmb.apply(x, cos, sin, inplace, seqlen_offsets, cu_seqlens)  # type: ignore[no-untyped-call]
    return rotated


apply_rotary_emb_func = apply_rotary_emb

"""apex's norms: tensors kept for backward, and kernels' allocations through torch.

Source: apex of July 2026, ``apex/normalization/fused_layer_norm.py`` (modules, ``save_for_backward``), ``csrc/layer_norm_cuda.cpp``
(results, fp32 statistics for 16 bits) and ``csrc/layer_norm_cuda_kernel.cu`` (``HostLayerNormGradient``, ``HostRMSNormGradient``:
sums of the weights' gradients in 16 parts).
"""

import numbers
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from zeroplan.dryrun.replacements import note

_PARTS = 16
"""The number of partial sums of a weight's gradient."""


class _Norm(torch.autograd.Function):
    """A norm over the last dimensions. ``centred`` keeps means; ``small`` keeps the output instead of the input."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, over: Sequence[int],  # noqa: ANN401
        centred: bool, small: bool, dtype: torch.dtype,  # noqa: FBT001
    ) -> torch.Tensor:  # fmt: skip
        note("apex's norms", "their results' shapes, kept tensors, and kernels' allocations")
        given = given.contiguous()
        weight, bias = (one if one is None else one.contiguous() for one in (weight, bias))
        out = torch.empty_like(given, dtype=dtype)
        rows, exact = given.numel() // prod(over), torch.float32 if given.element_size() == 2 else given.dtype
        mean = given.new_empty(rows, dtype=exact) if centred else None
        ctx.save_for_backward(
            out if small else given, weight, bias, None if small else mean, given.new_empty(rows, dtype=exact)
        )
        ctx.size, ctx.centred, ctx.exact = prod(over), centred, exact
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        kept, weight, bias, _, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_given = torch.empty_like(kept)
        of_weight, of_bias = (None if one is None else torch.empty_like(one) for one in (weight, bias))
        if weight is not None:
            parts = [kept.new_empty((_PARTS, ctx.size), dtype=ctx.exact) for _ in range(1 + ctx.centred)]
            del parts
        return of_given, of_weight, of_bias, None, None, None, None


def _cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor in autocast's dtype, in which norms run."""
    if tensor is None or not torch.is_autocast_enabled("cuda") or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cuda"))


class _Module(nn.Module):
    _centred = True
    _mixed = False

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,  # noqa: FBT001, FBT002
        memory_efficient: bool = False,  # noqa: FBT001, FBT002
    ) -> None:  # fmt: skip
        super().__init__()
        shape = (int(normalized_shape),) if isinstance(normalized_shape, numbers.Integral) else tuple(normalized_shape)  # type: ignore[arg-type]
        self.normalized_shape, self.eps, self.elementwise_affine = torch.Size(shape), eps, elementwise_affine
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.ones(shape)) if elementwise_affine else None
        if self._centred:
            self.bias = nn.Parameter(torch.zeros(shape)) if elementwise_affine else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name in apex
        """The normalized input."""
        bias = self.bias if self._centred else None
        if not input.is_cuda and self._centred:
            return nn.functional.layer_norm(input, self.normalized_shape, self.weight, bias, self.eps)
        if not input.is_cuda:
            return nn.functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        given, weight, shift = _cast(input), _cast(self.weight), _cast(bias)
        dtype = (weight if self._mixed else given).dtype  # type: ignore[union-attr]  # mixed norms always have weights
        made: torch.Tensor = _Norm.apply(  # type: ignore[no-untyped-call]
            given, weight, shift, self.normalized_shape, self._centred, self.memory_efficient, dtype
        )
        return made

    def extra_repr(self) -> str:
        """The module's settings."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_Module):
    """``apex.normalization.FusedLayerNorm``; the output has the input's dtype."""


class FusedRMSNorm(_Module):
    """``apex.normalization.FusedRMSNorm``; the output has the input's dtype."""

    _centred = False


class _Mixed(_Module):
    """A norm whose output has the weight's dtype; it always has a weight."""

    _mixed = True

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, memory_efficient: bool = False, **_: object
    ) -> None:
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """``apex.normalization.MixedFusedLayerNorm``."""


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """``apex.normalization.MixedFusedRMSNorm``."""


__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]

"""Repeats, with torch's operators, the allocations of bitsandbytes' CUDA kernels for products with eight-bit weights.

Source: bitsandbytes 0.50, ``backends/cuda/ops.py`` (``int8_vectorwise_quant``, ``int8_linear_matmul``, ``int8_mm_dequant``) and
``backends/default/ops.py`` (``int8_mixed_scaled_mm``, ``int8_scaled_mm``).

bitsandbytes multiplies columns with a value beyond the threshold in 16 bits, and keeps them for the backward. Their number depends
on values; here all columns count, the upper limit, unless :data:`BEYOND` says none.
"""

import bitsandbytes  # noqa: F401  it registers its operators with torch
import torch

from zeroplan.verify.watching.libraries import INSIDE

_ops = torch.ops.bitsandbytes
#: Whether columns are beyond the threshold: all of them, or none.
BEYOND = {"all": True}
Optional = torch.Tensor | None


def _quantized(given: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, Optional]:
    """Quantized integers, a scale per row, and the columns beyond the threshold."""
    columns = given.shape[-1]
    scales = given.new_empty(given.numel() // columns, dtype=torch.float32)
    numbers = torch.empty_like(given, dtype=torch.int8)
    if not threshold:
        return numbers, scales, None
    beyond = given.abs() >= threshold
    found = torch.arange(columns if BEYOND["all"] else 0, device=given.device)
    del beyond
    return numbers, scales, found


def _product(
    given: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, bias: Optional = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """A product in 32 bits, in fp16, and in the dtype of the activations."""
    whole = _ops.int8_linear_matmul.default(given, weight)
    return _in_16_bits(whole, rows, columns, dtype or torch.float16, bias)


def _in_16_bits(
    whole: torch.Tensor, _rows: torch.Tensor, _columns: torch.Tensor, dtype: torch.dtype | None = None, bias: Optional = None
) -> torch.Tensor:
    """The product in 16 bits; the kernel computes only in fp16, bias included."""
    made = torch.empty_like(whole, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        made.add_(bias)
    return made.to(dtype or torch.float16)


def _mixed(
    given: torch.Tensor, numbers: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor,
    beyond: Optional = None, bias: Optional = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The product of integers, plus the product of the columns beyond the threshold with dequantized weights."""
    if beyond is None or not beyond.numel():
        return _product(numbers, weight, rows, columns, bias, given.dtype), given.new_empty(0)
    kept = given[:, beyond].contiguous()
    wide = weight[:, beyond].contiguous() * columns.view(-1, 1) * (1 / 127)
    narrow = wide.to(given.dtype).t()
    del wide
    made = _product(numbers, weight, rows, columns, bias, given.dtype)
    return made.addmm(kept, narrow), kept


INSIDE.update({
    _ops.int8_vectorwise_quant.default: _quantized, _ops.int8_scaled_mm.default: _product,
    _ops.int8_mm_dequant.default: _in_16_bits, _ops.int8_mixed_scaled_mm.default: _mixed,
})  # fmt: skip

"""DeepSpeed's quantizer without its CUDA build: each function allocates what the real one does and computes nothing.

Source: DeepSpeed 0.19.8, ``csrc/quantization/pt_binding.cpp``, the function of the same name.
"""

import torch


class QuantizerBuilder:
    """Replaces DeepSpeed's builder, whose ``load`` compiles the kernels."""

    def load(self) -> "_Quantizer":
        """The stand-in for the compiled module."""
        return _Quantizer()


class _Quantizer:
    """The functions that ZeRO++ calls; symmetric quantization has one number per group, its scale."""

    Symmetric = 0

    def quantize(self, values: torch.Tensor, groups: int, bits: int, _kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _scales(values, groups)
        *outer, last = values.shape
        return values.new_empty((*outer, last * bits // 8), dtype=torch.int8), scales

    def dequantize(self, values: torch.Tensor, _scales: torch.Tensor, _groups: int, bits: int, _kind: int) -> torch.Tensor:
        *outer, last = values.shape
        return values.new_empty((*outer, last * 8 // bits), dtype=torch.float16)

    def swizzle_quant(
        self, values: torch.Tensor, groups: int, bits: int, _kind: int, _pipeline: int, _nodes: int, _devices: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _scales(values, groups)
        return values.new_empty((values.numel() * bits // 8,), dtype=torch.int8), scales

    def quantized_reduction(
        self, values: torch.Tensor, _given: torch.Tensor, _groups: int, groups: int, _bits: int, _kind: int, devices: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _scales(values, groups)
        *outer, last = values.shape
        return values.new_empty((*outer, last // devices)), scales


def _scales(values: torch.Tensor, groups: int) -> torch.Tensor:
    return values.new_empty((groups, 1), dtype=torch.float32)

"""Repeats, with torch's operators, the allocations of bitsandbytes' CUDA kernel for products with four-bit weights."""

import torch
from bitsandbytes.nn import modules
from bitsandbytes.nn.modules import Linear4bit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.verify.watching.libraries import INSIDE


def _written_out(
    given: torch.Tensor, _weight: torch.Tensor, shape: list[int], _scales: torch.Tensor, blocksize: int, _kind: str,
    bias: torch.Tensor | None = None, scales_8bit: torch.Tensor | None = None, _table: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product. Like CUDA it allocates a dequantized weight from 1,537 tokens on, or if rows are not whole blocks.

    With fewer tokens it depends on the GPU. This function allocates one for more than four tokens, the upper limit.
    Source: bitsandbytes 0.50, backends/cuda/ops.py, ``gemm_4bit`` and ``_dequant_linear_fallback``.
    """
    if given.numel() // given.shape[-1] <= _FEW_TOKENS and given.shape[-1] % blocksize == 0:
        return given.new_empty((*given.shape[:-1], shape[0]))
    wide = None if scales_8bit is None else torch.empty_like(scales_8bit, dtype=torch.float32)
    added = None if wide is None or mean is None else wide + mean
    whole = torch.empty(shape, dtype=given.dtype, device=given.device)
    made = nn.functional.linear(given, whole, bias)
    del wide, added  # the kernel frees them here
    return made


_FEW_TOKENS = 4


def _state_from_module(module: Linear4bit) -> None:
    """After an engine has replaced a weight's tensor, attach the module's scales to it, as bitsandbytes does.

    bitsandbytes makes a parameter of its own class that shares the tensor's memory, which fails for a fake tensor.
    """
    if not isinstance(module.weight, FakeTensor):
        _from_module(module)
    elif vars(module.weight).get("quant_state") is None:
        vars(module.weight)["quant_state"] = module.quant_state


_from_module = modules.fix_4bit_weight_quant_state_from_module
modules.fix_4bit_weight_quant_state_from_module = _state_from_module  # type: ignore[assignment]

INSIDE[torch.ops.bitsandbytes.gemm_4bit.default] = _written_out

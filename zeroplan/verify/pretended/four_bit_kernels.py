"""bitsandbytes' product with four-bit weights: what its CUDA kernel takes, written in torch's operators."""

import torch
from bitsandbytes.nn import modules
from bitsandbytes.nn.modules import Linear4bit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.verify.watching.inside import INSIDE


def _written_out(
    given: torch.Tensor, _weight: torch.Tensor, shape: list[int], _scales: torch.Tensor, blocksize: int, _kind: str,
    bias: torch.Tensor | None = None, scales_8bit: torch.Tensor | None = None, _table: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """What the product takes on CUDA: the weight in the compute dtype, from 1,537 tokens on, or where its rows are no whole blocks.

    With fewer tokens it depends on the GPU whether a kernel does without; the larger is taken, except for up to four tokens.
    Source: bitsandbytes 0.50, backends/cuda/ops.py, ``gemm_4bit`` and ``_dequant_linear_fallback``.
    """
    if given.numel() // given.shape[-1] <= _FEW_TOKENS and given.shape[-1] % blocksize == 0:
        return given.new_empty((*given.shape[:-1], shape[0]))
    wide = None if scales_8bit is None else torch.empty_like(scales_8bit, dtype=torch.float32)
    added = None if wide is None or mean is None else wide + mean
    whole = torch.empty(shape, dtype=given.dtype, device=given.device)
    made = nn.functional.linear(given, whole, bias)
    del wide, added  # alive until here, as there
    return made


_FEW_TOKENS = 4


def _state_from_module(module: Linear4bit) -> None:
    """Where an engine has put another tensor in a weight's place, its scales are the module's, as bitsandbytes has it.

    bitsandbytes makes a parameter of its own class of that tensor, without memory of its own, which a fake one cannot be.
    """
    if not isinstance(module.weight, FakeTensor):
        _from_module(module)
    elif vars(module.weight).get("quant_state") is None:
        vars(module.weight)["quant_state"] = module.quant_state


_from_module = modules.fix_4bit_weight_quant_state_from_module
modules.fix_4bit_weight_quant_state_from_module = _state_from_module  # type: ignore[assignment]

INSIDE[torch.ops.bitsandbytes.gemm_4bit.default] = _written_out

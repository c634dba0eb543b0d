"""Replaces linear layers of a model by those of torchao's quantisation-aware training, as torchtune and Axolotl do."""

from importlib.util import find_spec

import torch
from torch import nn

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.fake_quantised import GROUP, SMALL_GROUP
from zeroplan.verify.failures import NotHereError


def round_layers(model: nn.Module, spec: ModelSpec, dtype: torch.dtype, name: str) -> None:
    """Round the layers that have adapters, or without adapters all, a head of its own included. ``name``: of the fused kernel."""
    if find_spec("torchao") is None:
        raise NotHereError(f"fused_kernels {name!r} needs torchao, which is not installed; install torchao 0.18")
    if name == "axolotl-qat":
        _as_axolotl(model)
        return
    from torchao.quantization.qat.linear import Int8DynActInt4WeightQATLinear  # noqa: PLC0415  takes seconds

    adapted = None if spec.adapter is None else spec.adapter.layers
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            is_tied = child_name == "lm_head" and (spec.tie_word_embeddings or adapted is not None)
            if not isinstance(child, nn.Linear) or is_tied or (adapted is not None and child_name not in adapted):
                continue
            sizes, device = (child.in_features, child.out_features, child.bias is not None), child.weight.device
            rounded = Int8DynActInt4WeightQATLinear(*sizes, device=device, groupsize=GROUP, precision=dtype)
            rounded.weight, rounded.bias = child.weight, child.bias
            setattr(parent, child_name, rounded)


def _as_axolotl(model: nn.Module) -> None:
    """Round inputs to 8 bits and weights to 4 as Axolotl 0.17 does (utils/quantization.py, _make_qat_config)."""
    from torchao.quantization import quantize_  # noqa: PLC0415  as above
    from torchao.quantization.qat import QATConfig  # noqa: PLC0415  as above
    from torchao.quantization.qat.fake_quantize_config import (  # noqa: PLC0415  as above
        Int4WeightFakeQuantizeConfig,
        IntxFakeQuantizeConfig,
    )

    inputs = IntxFakeQuantizeConfig(dtype=torch.int8, granularity="per_token", is_symmetric=False)
    weights = Int4WeightFakeQuantizeConfig(group_size=SMALL_GROUP, activation_dtype=torch.bfloat16)
    quantize_(model, QATConfig(weight_config=weights, activation_config=inputs))

"""Replaces linear layers of a model by those of torchao's quantisation-aware training, as torchtune does."""

from importlib.util import find_spec

import torch
from torch import nn

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.fake_quantised import GROUP
from zeroplan.verify.failures import NotHereError


def round_layers(model: nn.Module, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Round the layers that have adapters, or without adapters all, a head of its own included."""
    if find_spec("torchao") is None:
        raise NotHereError("fused_kernels 'int4-qat' needs torchao, which is not installed; install torchao 0.18")
    from torchao.quantization.qat.linear import Int8DynActInt4WeightQATLinear  # noqa: PLC0415  takes seconds

    adapted = None if spec.adapter is None else spec.adapter.layers
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            is_tied = name == "lm_head" and (spec.tie_word_embeddings or adapted is not None)
            if not isinstance(child, nn.Linear) or is_tied or (adapted is not None and name not in adapted):
                continue
            sizes, device = (child.in_features, child.out_features, child.bias is not None), child.weight.device
            rounded = Int8DynActInt4WeightQATLinear(*sizes, device=device, groupsize=GROUP, precision=dtype)
            rounded.weight, rounded.bias = child.weight, child.bias
            setattr(parent, name, rounded)

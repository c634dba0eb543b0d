"""Norms: their sources, the names of their tensors, and where their moments are."""

from typing import NamedTuple

from zeroplan.ledger import Module, OffGpu, Role, Tag
from zeroplan.transformer.blocks import At, Place

RMS_NORM = "transformers 5.23, models/llama/modeling_llama.py, LlamaRMSNorm.forward"
LAYER_NORM = "torch 2.13, aten/src/ATen/native/cuda/layer_norm_kernel.cu, layer_norm_cuda"

#: Of LayerNorm's statistics: fp32 on CUDA, the compute dtype on a CPU.
STATISTICS = Tag(off_gpu=OffGpu.COMPUTE_DTYPE)


NORMALISED = Tag(Role.NORMALISED)
AT_ATTENTION_NORM, AT_MLP_NORM = Place(At.NORM, Module.ATTENTION_NORM), Place(At.NORM, Module.MLP_NORM)
AT_FINAL_NORM = Place(At.FINAL_NORM, Module.FINAL_NORM)


class NormNames(NamedTuple):
    """What the report calls one norm's tensors; constant text, so that a line costs nothing to name."""

    name: str
    scale: str
    place: Place = Place()
    """Of the moments of its backward."""


def _of_layer_norm(name: str) -> NormNames:
    return NormNames(name, f"{name}: mean and reciprocal standard deviation")


LAYER_BEFORE_ATTENTION = _of_layer_norm("norm before attention")._replace(place=AT_ATTENTION_NORM)
LAYER_BEFORE_MLP = _of_layer_norm("norm before the MLP")._replace(place=AT_MLP_NORM)
LAYER_FINAL = _of_layer_norm("final norm")._replace(place=AT_FINAL_NORM)

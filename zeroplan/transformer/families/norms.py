"""Norms: what they save, and how their backward peaks."""

from typing import NamedTuple

from zeroplan.ledger import PLAIN, Line, Module, OffGpu, Role, Tag
from zeroplan.transformer.blocks import At, BackwardPoint, Place
from zeroplan.transformer.families.parts import BLOCK_INPUT, GRADIENT, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths

RMS_NORM = "transformers 5.23, models/llama/modeling_llama.py, LlamaRMSNorm.forward"
HEAD_NORM = "transformers 5.23, models/qwen3/modeling_qwen3.py, Qwen3Attention.forward"
LAYER_NORM = "torch 2.13, aten/src/ATen/native/cuda/layer_norm_kernel.cu, layer_norm_cuda"

#: Of LayerNorm's statistics: fp32 on CUDA, the compute dtype on a CPU.
STATISTICS = Tag(off_gpu=OffGpu.COMPUTE_DTYPE)


NORMALISED = Tag(Role.NORMALISED)
AT_ATTENTION_NORM, AT_MLP_NORM = Place(At.NORM, Module.ATTENTION_NORM), Place(At.NORM, Module.MLP_NORM)
AT_FINAL_NORM = Place(At.FINAL_NORM, Module.FINAL_NORM)


class NormNames(NamedTuple):
    """What the report calls one norm's tensors; constant text, so that a line costs nothing to name."""

    name: str
    wide: str
    scale: str
    normalised: str
    read: Tag = PLAIN
    """Of what it reads, where that is no copy."""
    place: Place = Place()
    """Of the moments of its backward."""


class FinalNorm(NamedTuple):
    """What the norm before the head saves, and the moments of its backward, its own weight's gradients counted."""

    saved: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]


def _of_rms_norm(name: str) -> NormNames:
    return NormNames(name, f"{name}: its input in fp32", f"{name}: reciprocal root mean square", f"{name}: normalised input")


def _of_layer_norm(name: str) -> NormNames:
    return NormNames(name, f"{name}: its input", f"{name}: mean and reciprocal standard deviation", "")


BEFORE_ATTENTION = _of_rms_norm("norm before attention")._replace(read=BLOCK_INPUT, place=AT_ATTENTION_NORM)
BEFORE_MLP = _of_rms_norm("norm before the MLP")._replace(place=AT_MLP_NORM)
FINAL = _of_rms_norm("final norm")._replace(place=AT_FINAL_NORM)
LAYER_BEFORE_ATTENTION = _of_layer_norm("norm before attention")._replace(place=AT_ATTENTION_NORM)
LAYER_BEFORE_MLP = _of_layer_norm("norm before the MLP")._replace(place=AT_MLP_NORM)
LAYER_AFTER_EMBEDDING = _of_layer_norm("norm after the embedding")
LAYER_FINAL = _of_layer_norm("final norm")._replace(place=AT_FINAL_NORM)


def rms_norm(x: Widths, names: NormNames) -> Part:
    """RMSNorm as transformers writes it: computed in fp32 from single operators, scaled in the weight's dtype.

    Where the residual stream is fp32 its input is no copy but the stream itself. Its backward peaks in the derivative of
    ``pow(2)``, which makes three temporaries; the direct gradient is a tensor of its own only where the input was a copy.
    """
    elements = x.tokens * x.hidden
    tag = names.read if x.residual == 4 else PLAIN
    wide = Line(SAVED, 4 * elements, names.wide, "4·T·h", RMS_NORM, tag)
    saved = (
        wide,
        Line(SAVED, 4 * x.tokens, names.scale, "4·T", RMS_NORM),
        Line(SAVED, x.residual * elements, names.normalised, "r·T·h", RMS_NORM, NORMALISED),
    )
    square = Line(TEMPORARY, 4 * elements, "gradient of the squared input", "4·T·h", RMS_NORM)
    temporaries = Line(TEMPORARY, 12 * elements, "three temporaries of the derivative of pow", "12·T·h", RMS_NORM)
    alive: tuple[Line, ...] = (wide, square, temporaries)
    if x.residual != 4:
        alive = (*alive, Line(TEMPORARY, 4 * elements, "gradient of the input beside its square, fp32", "4·T·h", RMS_NORM))
    return Part(saved, (BackwardPoint(names.name, alive, x.hidden, 0, 0, place=names.place),), x.hidden, 0)


class HeadNorm(NamedTuple):
    """An RMSNorm over each head: what it saves, and the gradients and temporaries of its backward."""

    saved: tuple[Line, ...]
    alive: tuple[Line, ...]


def query_norm(x: Widths) -> HeadNorm:
    """Qwen3's norm over each query head."""
    elements = x.tokens * x.query
    wide = Line(SAVED, 4 * elements, "norm of the queries: its input in fp32", "4·T·q", HEAD_NORM)
    saved = (
        wide,
        Line(SAVED, 4 * x.tokens * x.heads, "norm of the queries: reciprocal root mean square", "4·T·a", HEAD_NORM),
        Line(SAVED, x.element * elements, "norm of the queries: normalised input", "e·T·q", HEAD_NORM),
    )
    gradients = Line(TEMPORARY, 20 * elements, "derivative of pow and the gradient beside it, fp32", "20·T·q", HEAD_NORM)
    return HeadNorm(saved, (wide, gradients))


def key_norm(x: Widths) -> tuple[Line, ...]:
    """Return what Qwen3's norm over each key head saves. Its backward is never higher than that of the queries."""
    elements = x.tokens * x.key
    rows = x.tokens * (x.key // x.head_dim)
    return (
        Line(SAVED, 4 * elements, "norm of the keys: its input in fp32", "4·T·k", HEAD_NORM),
        Line(SAVED, 4 * rows, "norm of the keys: reciprocal root mean square", "4·T·k/d", HEAD_NORM),
        Line(SAVED, x.element * elements, "norm of the keys: normalised input", "e·T·k", HEAD_NORM),
    )


def layer_norm(x: Widths, names: NormNames) -> Part:
    """``torch.nn.LayerNorm``, one fused operator: its input and two statistics per token.

    On a CPU the statistics have the compute dtype, on CUDA they are fp32.
    """
    elements = x.residual * x.tokens * x.hidden
    saved = (
        Line(SAVED, elements, names.wide, "r·T·h", LAYER_NORM),
        Line(SAVED, 8 * x.tokens, names.scale, "8·T", LAYER_NORM, STATISTICS),
    )
    gradients = Line(GRADIENT, 2 * elements, "gradients of the norm's output and input", "2·r·T·h", LAYER_NORM)
    point = BackwardPoint(names.name, (*saved, gradients), 2 * x.hidden, x.hidden, 0, place=names.place)
    return Part(saved, (point,), 2 * x.hidden, 0)

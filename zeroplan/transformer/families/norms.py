"""Norms over the hidden width: what they save, and how their backward peaks."""

from __future__ import annotations

from typing import NamedTuple

from zeroplan.ledger import Line
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.parts import SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths

RMS_NORM = "transformers 5.23, models/llama/modeling_llama.py, LlamaRMSNorm.forward"


class NormNames(NamedTuple):
    """What the report calls one norm's tensors; constant text, so that a line costs nothing to name."""

    name: str
    wide: str
    scale: str
    normalised: str


BEFORE_ATTENTION = NormNames(
    "norm before attention: derivative of the square",
    "norm before attention: its input in fp32",
    "norm before attention: reciprocal root mean square",
    "norm before attention: normalised input",
)
BEFORE_MLP = NormNames(
    "norm before the MLP: derivative of the square",
    "norm before the MLP: its input in fp32",
    "norm before the MLP: reciprocal root mean square",
    "norm before the MLP: normalised input",
)
FINAL = NormNames(
    "final norm: derivative of the square",
    "final norm: its input in fp32",
    "final norm: reciprocal root mean square",
    "final norm: normalised input",
)


def rms_norm(x: Widths, names: NormNames) -> Part:
    """RMSNorm as transformers writes it: computed in fp32 from single operators, scaled in the weight's dtype.

    Where the residual stream is fp32 its input is no copy but the stream itself. Its backward peaks in the derivative of
    ``pow(2)``, which makes three temporaries; the direct gradient is a tensor of its own only where the input was a copy.
    """
    elements = x.tokens * x.hidden
    wide = Line(SAVED, 4 * elements, names.wide, "4·T·h", RMS_NORM)
    saved = (
        wide,
        Line(SAVED, 4 * x.tokens, names.scale, "4·T", RMS_NORM),
        Line(SAVED, x.residual * elements, names.normalised, "r·T·h", RMS_NORM),
    )
    square = Line(TEMPORARY, 4 * elements, "gradient of the squared input", "4·T·h", RMS_NORM)
    temporaries = Line(TEMPORARY, 12 * elements, "three temporaries of the derivative of pow", "12·T·h", RMS_NORM)
    alive: tuple[Line, ...] = (wide, square, temporaries)
    if x.residual != 4:
        alive = (*alive, Line(TEMPORARY, 4 * elements, "gradient of the input beside the square, in fp32", "4·T·h", RMS_NORM))
    return Part(saved, (BackwardPoint(names.name, alive, x.hidden, x.hidden, 0),), x.hidden, 0)

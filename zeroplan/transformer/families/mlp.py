"""Dense MLPs between their norm and the residual addition."""

from __future__ import annotations

from zeroplan.ledger import Line
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.parts import GRADIENT, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths

LLAMA = "transformers 5.23, models/llama/modeling_llama.py, LlamaMLP.forward"


def gated_mlp(x: Widths, ffn: int, *, bias: bool = False) -> Part:
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""
    size, inner = x.element * x.tokens * x.hidden, x.element * x.tokens * ffn
    one_input = Line(SAVED, size, "input of the gate projection", "e·T·h", LLAMA)
    inputs = (
        Line(SAVED, 2 * size, "inputs of the gate and up projections, cast", "2·e·T·h", LLAMA)
        if x.autocast
        else Line(SAVED, size, "input of the gate and up projections", "e·T·h", LLAMA)
    )
    gate = Line(SAVED, inner, "gate projection's output", "e·T·f", LLAMA)
    kept = (
        inputs,
        gate,
        Line(SAVED, inner, "silu of the gate", "e·T·f", LLAMA),
        Line(SAVED, inner, "up projection's output", "e·T·f", LLAMA),
    )
    saved = (*kept, Line(SAVED, inner, "gated product, input of the down projection", "e·T·f", LLAMA))
    product = (*kept, Line(GRADIENT, 3 * inner, "gradients of the product, of silu and of up", "3·e·T·f", LLAMA))
    gate_gradient = Line(GRADIENT, inner, "gradient of the gate", "e·T·f", LLAMA)
    through_up = Line(GRADIENT, x.residual * x.tokens * x.hidden, "gradient through the up projection", "r·T·h", LLAMA)
    matrix = x.hidden * ffn
    down, wide = matrix + (x.hidden if bias else 0), matrix + (ffn if bias else 0)
    weights = down + 2 * wide
    at_product = BackwardPoint("gated product", product, down, down, 2 * matrix)
    if not x.autocast:
        through_gate = Line(GRADIENT, size, "gradient through the gate projection", "e·T·h", LLAMA)
        at_gate = BackwardPoint("gate projection", (inputs, gate_gradient, through_up, through_gate), weights, matrix, 0)
        return Part(saved, (at_product, at_gate), weights, 3 * matrix)
    uncast = Line(TEMPORARY, x.element * matrix, "weight gradient before it is cast", "e·h·f", LLAMA)
    silu_gradient = Line(GRADIENT, inner, "gradient of silu", "e·T·f", LLAMA)
    up_cast = (one_input, gate, silu_gradient, through_up, uncast)
    return Part(
        saved,
        (
            at_product,
            BackwardPoint("up projection: cast of the weight gradient", up_cast, down + wide, matrix, matrix),
            BackwardPoint("gate projection: cast of the weight gradient", (through_up, uncast), weights, matrix, 0),
        ),
        weights,
        3 * matrix,
    )

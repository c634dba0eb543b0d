"""Dense MLPs between their norm and the residual addition."""

from zeroplan.ledger import Line, Module, Role, Tag
from zeroplan.numeric import Int
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.parts import GRADIENT, OPERAND, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths

LLAMA = "transformers 5.23, models/llama/modeling_llama.py, LlamaMLP.forward"


def gated_mlp(x: Widths, ffn: int, *, bias: bool = False) -> Part:
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""
    if x.autocast:
        return _gated_mlp_autocast(x, ffn, bias=bias)
    size, inner = x.element * x.tokens * x.hidden, x.element * x.tokens * ffn
    made = Line(SAVED, size, "input of the gate and up projections", "e·T·h", LLAMA, OPERAND)
    kept = (made, *_gate_and_up(inner))
    matrix = x.hidden * ffn
    down, weights = _weights(x, ffn, bias=bias)
    at_gate = (
        made,
        Line(GRADIENT, inner, "gradient of the gate", "e·T·f", LLAMA),
        Line(GRADIENT, 2 * size, "gradients through the up and gate projections", "2·e·T·h", LLAMA),
    )
    product_gradient = Line(GRADIENT, inner, "gradient of the gated product", "e·T·f", LLAMA)
    up_done = (
        made,
        kept[1],
        Line(GRADIENT, inner, "gradient of silu", "e·T·f", LLAMA),
        Line(GRADIENT, size, "gradient through the up projection", "e·T·h", LLAMA),
    )
    points = (
        BackwardPoint("down projection", (*kept, _product(inner), product_gradient), down, down, 0),
        BackwardPoint("gated product", (*kept, _product_gradients(inner)), down, 0, 0, between=up_done),
        BackwardPoint("gate projection", at_gate, weights, matrix, 0),
    )
    return Part((*kept, _product(inner)), points, weights, 3 * matrix)


def gated_outputs(x: Widths, ffn: int) -> tuple[Line, Line, Line]:
    """Outputs of a gated MLP's projections, in the order they are made."""
    inner = x.element * x.tokens * ffn
    return (
        Line(SAVED, inner, "output of the gate projection", "e·T·f", LLAMA),
        Line(SAVED, inner, "output of the up projection", "e·T·f", LLAMA),
        Line(
            SAVED,
            x.element * x.tokens * x.hidden,
            "output of the down projection",
            "e·T·h",
            LLAMA,
            Tag(Role.OUTPUT, Module.DOWN),
        ),
    )


def _gated_mlp_autocast(x: Widths, ffn: int, *, bias: bool) -> Part:
    e, hidden, inner = x.element, x.tokens * x.hidden, x.element * x.tokens * ffn
    gate_and_up = _gate_and_up(inner)
    kept = (Line(SAVED, 2 * e * hidden, "inputs of the gate and up projections, cast", "2·e·T·h", LLAMA), *gate_and_up)
    saved = (*kept, _product(inner))
    matrix = x.hidden * ffn
    down, weights = _weights(x, ffn, bias=bias)
    uncast = Line(TEMPORARY, e * matrix, "weight gradient before it is cast", "e·h·f", LLAMA)
    through_up = Line(GRADIENT, 4 * hidden, "gradient through the up projection, fp32", "4·T·h", LLAMA)
    output = Line(GRADIENT, e * hidden + inner, "gradients of the output, cast, and of the product", "e·T·(h+f)", LLAMA)
    at_up = (
        Line(SAVED, e * hidden, "input of the gate projection, cast", "e·T·h", LLAMA, OPERAND),
        gate_and_up[0],
        Line(GRADIENT, inner, "gradient of silu", "e·T·f", LLAMA),
        through_up,
        uncast,
    )
    down_cast = (*kept, Line(GRADIENT, inner, "gradient of the gated product", "e·T·f", LLAMA), uncast)
    down_and_up = (down + weights) // 2
    points = (
        BackwardPoint("down projection", (*saved, output, uncast), 0, 0, 3 * matrix),
        BackwardPoint("down projection: cast of the weight gradient", down_cast, down, matrix, 2 * matrix),
        BackwardPoint("gated product", (*kept, _product_gradients(inner)), down, 0, 2 * matrix),
        BackwardPoint("up projection: cast of the weight gradient", at_up, down_and_up, matrix, matrix),
        BackwardPoint("gate projection: cast of the weight gradient", (through_up, uncast), weights, matrix, 0),
    )
    return Part(saved, points, weights, 3 * matrix)


def _gate_and_up(inner: Int) -> tuple[Line, Line, Line]:
    return (
        Line(SAVED, inner, "gate projection's output", "e·T·f", LLAMA),
        Line(SAVED, inner, "silu of the gate", "e·T·f", LLAMA),
        Line(SAVED, inner, "up projection's output", "e·T·f", LLAMA),
    )


def _product(inner: Int) -> Line:
    return Line(SAVED, inner, "gated product, input of the down projection", "e·T·f", LLAMA, OPERAND)


def _product_gradients(inner: Int) -> Line:
    return Line(GRADIENT, 3 * inner, "gradients of the product, of silu and of up", "3·e·T·f", LLAMA)


def _weights(x: Widths, ffn: int, *, bias: bool) -> tuple[int, int]:
    """Elements of the down projection, and of all three, biases included."""
    down = x.hidden * ffn + (x.hidden if bias else 0)
    return down, down + 2 * (x.hidden * ffn + (ffn if bias else 0))

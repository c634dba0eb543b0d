"""Dense MLPs between their norm and the residual addition."""

from zeroplan.ledger import Line
from zeroplan.numeric import Int
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.parts import GRADIENT, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths
from zeroplan.transformer.families.written_out import ON_CUDA

LLAMA = "transformers 5.23, models/llama/modeling_llama.py, LlamaMLP.forward"
GPT2 = "transformers 5.23, models/gpt2/modeling_gpt2.py, GPT2MLP.forward; activations.py, NewGELUActivation"

#: The end of the reason of tensors that CUDA's autocast makes fp32 (``pow`` is on its fp32 list) and a CPU's does not.
FP32_ON_CUDA = "fp32 under CUDA's autocast"


def gated_mlp(x: Widths, ffn: int, *, bias: bool = False) -> Part:
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""
    if x.autocast:
        return _gated_mlp_autocast(x, ffn, bias=bias)
    size, inner = x.element * x.tokens * x.hidden, x.element * x.tokens * ffn
    made = Line(SAVED, size, "input of the gate and up projections", "e·T·h", LLAMA)
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
        Line(SAVED, x.element * x.tokens * x.hidden, "output of the down projection", "e·T·h", LLAMA),
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
        Line(SAVED, e * hidden, "input of the gate projection, cast", "e·T·h", LLAMA),
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
    return Line(SAVED, inner, "gated product, input of the down projection", "e·T·f", LLAMA)


def _product_gradients(inner: Int) -> Line:
    return Line(GRADIENT, 3 * inner, "gradients of the product, of silu and of up", "3·e·T·f", LLAMA)


def _weights(x: Widths, ffn: int, *, bias: bool) -> tuple[int, int]:
    """Elements of the down projection, and of all three, biases included."""
    down = x.hidden * ffn + (x.hidden if bias else 0)
    return down, down + 2 * (x.hidden * ffn + (ffn if bias else 0))


def gelu_mlp(x: Widths, ffn: int) -> Part:
    """GPT-2's MLP: ``proj(gelu(fc(x)))`` with the tanh form of GELU written out in single operators.

    Under autocast the chain behind ``pow`` is fp32 on CUDA, where a CPU stays in the compute dtype.
    """
    if x.autocast:
        return _gelu_mlp_autocast(x, ffn)
    size, inner = x.element * x.tokens * x.hidden, x.element * x.tokens * ffn
    made = Line(SAVED, size, "input of the first projection", "e·T·h", GPT2)
    kept = (
        made,
        Line(SAVED, inner, "first projection's output, base of pow", "e·T·f", GPT2),
        Line(SAVED, inner, "tanh", "e·T·f", GPT2),
        Line(SAVED, inner, "half of the first projection's output", "e·T·f", GPT2),
        Line(SAVED, inner, "one plus tanh", "e·T·f", GPT2),
    )
    saved = (*kept, Line(SAVED, inner, "gelu, input of the second projection", "e·T·f", GPT2))
    product = (*kept, Line(GRADIENT, 3 * inner, "gradients of gelu and of its two factors", "3·e·T·f", GPT2))
    first = (made, Line(GRADIENT, inner + size, "gradients of the first projection's output and input", "e·T·(f+h)", GPT2))
    matrix = x.hidden * ffn
    gelu_gradient = Line(GRADIENT, inner, "gradient of gelu", "e·T·f", GPT2)
    points = (
        BackwardPoint("second MLP projection", (*saved, gelu_gradient), matrix + x.hidden, matrix, 0),
        BackwardPoint("gelu", product, matrix + x.hidden, 0, 0),
        BackwardPoint("first MLP projection", first, 2 * matrix + ffn + x.hidden, matrix, 0),
    )
    return Part(saved, points, 2 * matrix + ffn + x.hidden, 2 * matrix)


def _gelu_mlp_autocast(x: Widths, ffn: int) -> Part:
    e, hidden, inner = x.element, x.tokens * x.hidden, x.tokens * ffn
    made = Line(SAVED, e * hidden, "input of the first projection, cast", "e·T·h", GPT2)
    base = Line(SAVED, 4 * inner, f"first projection's output, base of pow, {FP32_ON_CUDA}", "4·T·f", GPT2)
    kept = (
        made,
        base,
        Line(SAVED, 4 * inner, f"tanh, {FP32_ON_CUDA}", "4·T·f", GPT2),
        Line(SAVED, e * inner, "half of the first projection's output", "e·T·f", GPT2),
        Line(SAVED, 4 * inner, f"one plus tanh, {FP32_ON_CUDA}", "4·T·f", GPT2),
    )
    saved = (*kept, Line(SAVED, e * inner, "gelu, input of the second projection", "e·T·f", GPT2))
    # A gradient is cast to the dtype of what it is of while everything its operator took is alive (torch 2.13, engine.cpp,
    # validate_outputs).
    product = (
        *kept,
        Line(GRADIENT, 12 * inner, f"gradients of gelu and of its two factors, {FP32_ON_CUDA}", "12·T·f", GPT2),
        Line(GRADIENT, e * inner, f"gradient of one factor, cast, {ON_CUDA}", "e·T·f", GPT2),
    )
    matrix = x.hidden * ffn
    uncast = Line(TEMPORARY, e * matrix, "weight gradient before it is cast", "e·h·f", GPT2)
    gradients = Line(GRADIENT, e * (inner + hidden), "gradients of the first projection's output and input", "e·T·(f+h)", GPT2)
    through = Line(GRADIENT, 4 * hidden, "gradient of the norm's output, fp32", "4·T·h", GPT2)
    second, every = matrix + x.hidden, 2 * matrix + ffn + x.hidden
    cast = (*kept, Line(GRADIENT, 4 * inner, f"gradient of gelu, {FP32_ON_CUDA}", "4·T·f", GPT2), uncast)
    output = Line(GRADIENT, e * (hidden + inner), "gradients of the output, cast, and of gelu", "e·T·(h+f)", GPT2)
    points = (
        BackwardPoint("second MLP projection", (*saved, output, uncast), 0, 0, 2 * matrix),
        BackwardPoint("second MLP projection: cast of the weight gradient", cast, second, matrix, matrix),
        BackwardPoint("gelu", product, second, 0, matrix),
        BackwardPoint("first MLP projection", (made, gradients, uncast), second, 0, matrix),
        BackwardPoint("first MLP projection: cast of the weight gradient", (through, uncast), every, matrix, 0),
    )
    return Part(saved, points, every, 2 * matrix)

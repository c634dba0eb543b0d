"""Attention between its norm and the residual addition: projections, rotary positions, and the attention itself."""

from __future__ import annotations

from zeroplan.ledger import Line
from zeroplan.numeric import ceil_div
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.parts import GRADIENT, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths

LLAMA = "transformers 5.23, models/llama/modeling_llama.py, LlamaAttention.forward"
SDPA = "transformers 5.23, integrations/sdpa_attention.py, sdpa_attention_forward"
EAGER = "transformers 5.23, models/llama/modeling_llama.py, eager_attention_forward"
FLASH_BACKWARD = "torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd"

#: The reason of the scratch that only the CUDA kernel takes; a comparison with a CPU run leaves it out by this name.
FLASH_SCRATCH = "scratch of the flash-attention backward kernel (CUDA)"


def projection_inputs(x: Widths) -> tuple[Line, ...]:
    """The norm's output, which the three projections share; autocast casts it once for each."""
    size = x.element * x.tokens * x.hidden
    if x.autocast:
        return (Line(SAVED, 3 * size, "inputs of the q, k and v projections, cast", "3·e·T·h", LLAMA),)
    return (Line(SAVED, size, "input of the q, k and v projections", "e·T·h", LLAMA),)


def grouped_query_attention(x: Widths, *, bias: bool = False, output_bias: bool = False) -> Part:
    """Attention of the Llama kind, causal, without an explicit mask."""
    inputs = projection_inputs(x)
    inward, outward = x.hidden * (x.query + x.key + x.value), x.context * x.hidden
    inward_biases, outward_bias = (x.query + x.key + x.value) if bias else 0, x.hidden if output_bias else 0
    weights = inward + outward + inward_biases + outward_bias
    attend = eager if x.attention == "eager" else sdpa
    core = attend(x, inputs, outward + outward_bias, inward)
    return Part(core.saved, core.points + query_projection(x, weights), weights, inward + outward)


def sdpa(x: Widths, inputs: tuple[Line, ...], made: int, casts: int) -> Part:
    """``scaled_dot_product_attention`` on the flash kernel: keys and values are not repeated for grouped heads.

    The random-number state (two scalars) that the CUDA kernel saves is left out. The scratch of its backward on CUDA (an
    fp32 accumulator of the query gradient, row sums, and key and value gradients repeated for grouped heads) is a line
    of its own.
    """
    e, tokens = x.element, x.tokens
    saved = (
        *inputs,
        Line(SAVED, e * tokens * x.query, "queries", "e·T·q", SDPA),
        Line(SAVED, e * tokens * x.key, "keys", "e·T·k", SDPA),
        Line(SAVED, e * tokens * x.value, "values", "e·T·v", SDPA),
        Line(SAVED, 4 * tokens * x.heads, "log-sum-exp of the scores, fp32", "4·T·a", SDPA),
        Line(SAVED, e * tokens * x.context, "attention output, input of the output projection", "e·T·c", SDPA),
    )
    alive = (
        *saved,
        Line(GRADIENT, e * tokens * x.context, "gradient of the attention output", "e·T·c", SDPA),
        Line(GRADIENT, e * tokens * (x.query + x.key + x.value), "gradients of q, k and v", "e·T·(q+k+v)", SDPA),
        _flash_scratch(x),
    )
    return Part(saved, (BackwardPoint("attention", alive, made, made, casts),), 0, 0)


def _flash_scratch(x: Widths) -> Line:
    rows = ceil_div(x.seq_len, 128) * 128 * x.micro_batch * x.heads
    columns = ceil_div(x.head_dim, 32) * 32
    accumulator = 4 * rows * (columns + 1)
    if x.key == x.query:
        return Line(TEMPORARY, accumulator, FLASH_SCRATCH, "4·b·a·128·ceil(s/128)·(32·ceil(d/32)+1)", FLASH_BACKWARD)
    repeated = 2 * x.element * x.tokens * x.query
    formula = "4·b·a·128·ceil(s/128)·(32·ceil(d/32)+1) + 2·e·T·q"
    return Line(TEMPORARY, accumulator + repeated, FLASH_SCRATCH, formula, FLASH_BACKWARD)


def eager(x: Widths, inputs: tuple[Line, ...], made: int, casts: int) -> Part:
    """Attention written out: keys and values repeated for grouped heads, scores and their softmax kept."""
    e, tokens = x.element, x.tokens
    scores = tokens * x.seq_len * x.heads
    query = Line(SAVED, e * tokens * x.query, "queries", "e·T·q", EAGER)
    key = Line(SAVED, e * tokens * x.query, "keys, repeated for each query head", "e·T·q", EAGER)
    value = Line(SAVED, e * tokens * x.context, "values, repeated for each query head", "e·T·c", EAGER)
    softmax = Line(SAVED, 4 * scores, "softmax of the scores, fp32", "4·a·T·s", EAGER)
    cast = () if e == 4 else (Line(SAVED, e * scores, "softmax of the scores, cast", "e·a·T·s", EAGER),)
    context = Line(SAVED, e * tokens * x.context, "attention output, input of the output projection", "e·T·c", EAGER)
    value_gradient = Line(GRADIENT, e * tokens * x.context, "gradient of the repeated values", "e·T·c", EAGER)
    product = (
        *inputs, query, key, value, softmax, *cast, value_gradient,
        Line(GRADIENT, e * tokens * x.context, "gradient of the attention output", "e·T·c", EAGER),
        Line(GRADIENT, e * scores, "gradient of the attention weights", "e·a·T·s", EAGER),
    )  # fmt: skip
    derivative = (
        *inputs, query, key, softmax, value_gradient,
        Line(GRADIENT, 8 * scores, "gradients of the softmax and of the scores, fp32", "8·a·T·s", EAGER),
    )  # fmt: skip
    points = (
        BackwardPoint("attention: product with the values", product, made, made, casts),
        BackwardPoint("attention: derivative of the softmax", derivative, made, 0, casts),
    )
    return Part((*inputs, query, key, value, softmax, *cast, context), points, 0, 0)


def query_projection(x: Widths, weights: int) -> tuple[BackwardPoint, ...]:
    """The backward of the first projection, the last of the three to go; under autocast also the cast of its gradient."""
    size = x.element * x.tokens * x.hidden
    matrix = x.hidden * x.query
    summed = Line(GRADIENT, x.residual * x.tokens * x.hidden, "gradient of the norm's output, summed", "r·T·h", LLAMA)
    alive = (
        Line(SAVED, size, "input of the q projection", "e·T·h", LLAMA),
        summed,
        Line(GRADIENT, x.element * x.tokens * x.query, "gradient of the queries", "e·T·q", LLAMA),
        Line(GRADIENT, size, "gradient through the q projection", "e·T·h", LLAMA),
    )
    if not x.autocast:
        return (BackwardPoint("q projection", alive, weights, matrix, 0),)
    uncast = Line(TEMPORARY, x.element * matrix, "gradient of the q weight before it is cast", "e·h·q", LLAMA)
    return (
        BackwardPoint("q projection", (*alive, uncast), weights - matrix, 0, matrix),
        BackwardPoint("q projection: cast of the weight gradient", (summed, uncast), weights, matrix, 0),
    )

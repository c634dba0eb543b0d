"""Attention between its norm and the residual addition: projections, rotary positions, and the attention itself."""

from zeroplan.ledger import Line, OffGpu, Tag
from zeroplan.numeric import ceil_div
from zeroplan.transformer.blocks import At, BackwardPoint, Place
from zeroplan.transformer.families import written_out
from zeroplan.transformer.families.norms import HeadNorm, key_norm, query_norm
from zeroplan.transformer.families.parts import GRADIENT, OPERAND, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths

LLAMA = "transformers 5.23, models/llama/modeling_llama.py, LlamaAttention.forward"
SDPA = "transformers 5.23, integrations/sdpa_attention.py, sdpa_attention_forward"
EAGER = "transformers 5.23, models/llama/modeling_llama.py, eager_attention_forward"
FLASH_BACKWARD = "torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd"

#: What only CUDA's kernels take, inside themselves; a comparison with another run leaves it out by this tag.
SCRATCH = Tag(off_gpu=OffGpu.NO_TENSOR)
FLASH_SCRATCH = "scratch of the flash-attention backward kernel (CUDA)"


def grouped_query_attention(x: Widths, *, bias: bool = False, output_bias: bool = False, head_norms: bool = False) -> Part:
    """Attention of the Llama kind, causal, without an explicit mask; ``head_norms`` as in Qwen3."""
    norm = query_norm(x) if head_norms else None
    before = _projection_inputs(x) if norm is None else (*_projection_inputs(x), *norm.saved, *key_norm(x))
    inward = x.hidden * (x.query + x.key + x.value)
    outward = x.context * x.hidden
    inward_biases, outward_bias = (x.query + x.key + x.value) if bias else 0, x.hidden if output_bias else 0
    head_scales = 2 * x.head_dim if head_norms else 0
    weights = inward + outward + inward_biases + outward_bias + head_scales
    saved, points = _sdpa(x, before, outward + outward_bias, inward)
    return Part(saved, (*points, *_query_projection(x, weights, norm)), weights, inward + outward)


def _projection_inputs(x: Widths) -> tuple[Line, ...]:
    size = x.element * x.tokens * x.hidden
    if x.autocast:
        return (Line(SAVED, 3 * size, "inputs of the q, k and v projections, cast", "3·e·T·h", LLAMA),)
    return (Line(SAVED, size, "input of the q, k and v projections", "e·T·h", LLAMA, OPERAND),)


Attended = tuple[tuple[Line, ...], tuple[BackwardPoint, ...]]


def _sdpa(x: Widths, before: tuple[Line, ...], made: int, casts: int) -> Attended:
    """``scaled_dot_product_attention`` on the flash kernel: keys and values are not repeated for grouped heads.

    In 32 bits CUDA takes other kernels (:mod:`zeroplan.transformer.families.written_out`). The random-number state (two scalars)
    that the CUDA kernel saves is left out. The scratch of its backward on CUDA (an
    fp32 accumulator of the query gradient, row sums, and key and value gradients repeated for grouped heads) is a line
    of its own.
    """
    e, tokens = x.element, x.tokens
    saved = (
        *before,
        Line(SAVED, e * tokens * x.query, "queries", "e·T·q", SDPA),
        Line(SAVED, e * tokens * x.key, "keys", "e·T·k", SDPA),
        Line(SAVED, e * tokens * x.value, "values", "e·T·v", SDPA),
        Line(SAVED, 4 * tokens * x.heads, "log-sum-exp of the scores, fp32", "4·T·a", SDPA),
        Line(SAVED, e * tokens * x.context, "attention output, input of the output projection", "e·T·c", SDPA, OPERAND),
        *written_out.saved(x),
    )
    alive = (
        *saved,
        Line(GRADIENT, e * tokens * x.context, "gradient of the attention output", "e·T·c", SDPA),
        Line(GRADIENT, e * tokens * (x.query + x.key + x.value), "gradients of q, k and v", "e·T·(q+k+v)", SDPA),
        *(() if written_out.in_32_bits(x) else (flash_scratch(x),)),
    )
    point = BackwardPoint("attention", alive, made, 0, casts)
    return saved, (point, *written_out.softmax_point(x, before, made, casts))


def flash_scratch(x: Widths) -> Line:
    """Return what CUDA's flash kernel takes in its backward: an fp32 accumulator, row sums, and what grouped heads repeat."""
    rows = ceil_div(x.seq_len, 128) * 128 * x.micro_batch * x.heads
    columns = ceil_div(x.head_dim, 32) * 32
    accumulator = 4 * rows * (columns + 1)
    if x.key == x.query:
        formula = "512·a·b·ceil(s/128)·(32·ceil(d/32)+1)"
        return Line(TEMPORARY, accumulator, FLASH_SCRATCH, formula, FLASH_BACKWARD, SCRATCH)
    repeated = 2 * x.element * x.tokens * x.query
    formula = "512·a·b·ceil(s/128)·(32·ceil(d/32)+1) + 2·e·T·q"
    return Line(TEMPORARY, accumulator + repeated, FLASH_SCRATCH, formula, FLASH_BACKWARD, SCRATCH)


def inputs(x: Widths, *, head_norms: bool) -> tuple[Line, ...]:
    """What is saved of attention before queries meet keys."""
    norms = (*query_norm(x).saved, *key_norm(x)) if head_norms else ()
    return (*_projection_inputs(x), *norms)


def _query_projection(x: Widths, weights: int, norm: HeadNorm | None) -> tuple[BackwardPoint, ...]:
    """List the backward of the first projection, the last of the three to go; under autocast also the cast of its gradient."""
    size = x.element * x.tokens * x.hidden
    matrix = x.hidden * x.query
    casts = matrix if x.autocast else 0
    summed = Line(GRADIENT, x.residual * x.tokens * x.hidden, "gradient of the norm's output, summed", "r·T·h", LLAMA)
    kept = Line(SAVED, size, "input of the q projection", "e·T·h", LLAMA, OPERAND)
    at_norm = () if norm is None else (
        BackwardPoint("norm of the queries", (kept, summed, *norm.alive), weights - matrix, 0, casts, place=Place(At.NORM)),
    )  # fmt: skip
    alive = (
        kept,
        summed,
        Line(GRADIENT, x.element * x.tokens * x.query, "gradient of the queries", "e·T·q", LLAMA),
        Line(GRADIENT, size, "gradient through the q projection", "e·T·h", LLAMA),
    )
    if not x.autocast:
        return (*at_norm, BackwardPoint("q projection", alive, weights, matrix, 0))
    uncast = Line(TEMPORARY, x.element * matrix, "gradient of the q weight before it is cast", "e·h·q", LLAMA)
    return (
        *at_norm,
        BackwardPoint("q projection", (*alive, uncast), weights - matrix, 0, casts),
        BackwardPoint("q projection: cast of the weight gradient", (summed, uncast), weights, matrix, 0),
    )

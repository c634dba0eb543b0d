"""Attention between its norm and the residual addition: projections, rotary positions, and the attention itself."""

from zeroplan.ledger import Line
from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families import written_out
from zeroplan.transformer.families.norms import HeadNorm, key_norm, query_norm
from zeroplan.transformer.families.parts import GRADIENT, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths

LLAMA = "transformers 5.23, models/llama/modeling_llama.py, LlamaAttention.forward"
GPT2 = "transformers 5.23, models/gpt2/modeling_gpt2.py, GPT2Attention.forward"
SDPA = "transformers 5.23, integrations/sdpa_attention.py, sdpa_attention_forward"
EAGER = "transformers 5.23, models/llama/modeling_llama.py, eager_attention_forward"
FLASH_BACKWARD = "torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd"

#: The reason of the scratch that only the CUDA kernel takes; a comparison with a CPU run leaves it out by this name.
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
    attend = _eager if x.attention == "eager" else _sdpa
    saved, points = attend(x, before, outward + outward_bias, inward)
    return Part(saved, (*points, *_query_projection(x, weights, norm)), weights, inward + outward)


def fused_attention(x: Widths) -> Part:
    """Attention of the GPT-2 kind: one projection makes q, k and v, whose gradients are joined again in the backward."""
    size, matrix = x.element * x.tokens * x.hidden, 3 * x.hidden * x.hidden
    made = Line(SAVED, size, "input of the joint q, k and v projection", "e·T·h", GPT2)
    outward = x.hidden * x.hidden + x.hidden
    weights = outward + matrix + 3 * x.hidden
    attend = _eager if x.attention == "eager" else _sdpa
    saved, points = attend(x, (made,), outward, matrix)
    alive = (
        made,
        Line(GRADIENT, 3 * size, "gradients of q, k and v, joined", "3·e·T·h", GPT2),
        Line(GRADIENT, size, "gradient through the joint projection", "e·T·h", GPT2),
    )
    if not x.autocast:
        last = (BackwardPoint("joint q, k and v projection", alive, weights, matrix, 0),)
        return Part(saved, (*points, *last), weights, 4 * x.hidden * x.hidden)
    uncast = Line(TEMPORARY, x.element * matrix, "gradient of the joint weight before it is cast", "3·e·h²", GPT2)
    through = Line(GRADIENT, 4 * x.tokens * x.hidden, "gradient through the joint projection, fp32", "4·T·h", GPT2)
    cast_points = (
        BackwardPoint("joint q, k and v projection", (*alive, uncast), outward, 0, matrix),
        BackwardPoint("joint q, k and v projection: cast of the weight gradient", (through, uncast), weights, matrix, 0),
    )
    return Part(saved, (*points, *cast_points), weights, 4 * x.hidden * x.hidden)


def _projection_inputs(x: Widths) -> tuple[Line, ...]:
    size = x.element * x.tokens * x.hidden
    if x.autocast and not x.fused_projection:
        return (Line(SAVED, 3 * size, "inputs of the q, k and v projections, cast", "3·e·T·h", LLAMA),)
    return (Line(SAVED, size, "input of the q, k and v projections", "e·T·h", LLAMA),)


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
        Line(SAVED, e * tokens * x.context, "attention output, input of the output projection", "e·T·c", SDPA),
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
        return Line(TEMPORARY, accumulator, FLASH_SCRATCH, "512·a·b·ceil(s/128)·(32·ceil(d/32)+1)", FLASH_BACKWARD)
    repeated = 2 * x.element * x.tokens * x.query
    formula = "512·a·b·ceil(s/128)·(32·ceil(d/32)+1) + 2·e·T·q"
    return Line(TEMPORARY, accumulator + repeated, FLASH_SCRATCH, formula, FLASH_BACKWARD)


def _softmax_bytes(x: Widths) -> int:
    """Bytes of an element of the softmax: fp32, except that GPT-2 leaves it in the dtype of the scores."""
    return x.element if x.fused_projection and not x.autocast else 4


def _eager(x: Widths, before: tuple[Line, ...], made: int, casts: int) -> Attended:
    """Attention written out: keys and values repeated for grouped heads, scores and their softmax kept."""
    e, tokens = x.element, x.tokens
    scores = tokens * x.seq_len * x.heads
    wide = _softmax_bytes(x)
    query = Line(SAVED, e * tokens * x.query, "queries", "e·T·q", EAGER)
    key, value = _repeated(x)
    softmax = Line(SAVED, wide * scores, "softmax of the scores", "4·a·T·s" if wide == 4 else "e·a·T·s", EAGER)
    cast = () if e == wide else (Line(SAVED, e * scores, "softmax of the scores, cast", "e·a·T·s", EAGER),)
    context = Line(SAVED, e * tokens * x.context, "attention output, input of the output projection", "e·T·c", EAGER)
    value_gradient = Line(GRADIENT, e * tokens * x.context, "gradient of the repeated values", "e·T·c", EAGER)
    product = (
        *before, query, key, value, softmax, *cast, value_gradient,
        Line(GRADIENT, e * tokens * x.context, "gradient of the attention output", "e·T·c", EAGER),
        Line(GRADIENT, e * scores, "gradient of the attention weights", "e·a·T·s", EAGER),
    )  # fmt: skip
    formula = "8·a·T·s" if wide == 4 else "2·e·a·T·s"
    both = Line(GRADIENT, 2 * wide * scores, "gradients of the softmax and of the scores", formula, EAGER)
    derivative: tuple[Line, ...] = (*before, query, key, softmax, value_gradient, both)
    if x.fused_projection:
        joint = e * tokens * x.context * maximum(0, 2 - x.micro_batch)
        derivative = (*derivative, Line(SAVED, joint, "values, one tensor with q and k", "e·T·c·max(0, 2-b)", GPT2))
    points = (
        BackwardPoint("attention: product with the values", product, made, 0, casts),
        BackwardPoint("attention: softmax", derivative, made, 0, casts),
    )
    return (*before, query, key, value, softmax, *cast, context), points


def _repeated(x: Widths) -> tuple[Line, Line]:
    """Keys and values for each query head; of a single key/value head and a single sequence they are views."""
    every, one = x.element * x.tokens * x.query, x.element * x.tokens * x.key
    whole = Line(SAVED, every, "keys, repeated for each query head", "e·T·q", EAGER)
    if x.query == x.key or x.key != x.head_dim:
        return whole, Line(SAVED, every, "values, repeated for each query head", "e·T·q", EAGER)
    some, formula = one + (every - one) * minimum(1, x.micro_batch - 1), "e·T·(k + (q-k)·min(1, b-1))"
    key = whole if x.autocast else Line(SAVED, some, "keys, repeated where sequences are several", formula, EAGER)
    return key, Line(SAVED, some, "values, repeated where sequences are several", formula, EAGER)


def eager_forward_bytes(x: Widths, *, head_norms: bool, recomputed: bool) -> Int:
    """Return what eager attention has alive at its softmax, beyond the first norm's saved tensors and the block input. [bytes]

    The tensors differ with the way heads are grouped: repeating a single key/value head is a view, repeating several a copy,
    and the matrix product copies what is not contiguous, which it is for a single sequence. ``recomputed``: nothing is
    saved for a backward.
    """
    scores = x.tokens * x.seq_len * x.heads
    wide = _softmax_bytes(x)
    live: Int = 2 * wide * scores
    if x.autocast:
        live = live + 4 * x.tokens * x.hidden
    elif wide != x.element:
        live = live + x.element * scores
    live = live + _eager_operands(x)
    if recomputed:
        return live if x.autocast else live + x.element * x.tokens * x.hidden
    for line in inputs(x, head_norms=head_norms):
        live = live + line.n_bytes
    return live + _eager_copies(x)


def inputs(x: Widths, *, head_norms: bool) -> tuple[Line, ...]:
    """What is saved of attention before queries meet keys."""
    norms = (*query_norm(x).saved, *key_norm(x)) if head_norms else ()
    return (*_projection_inputs(x), *norms)


def _eager_operands(x: Widths) -> Int:
    """Sum the queries, keys and values that the forward holds by name; rotary positions make q and k fp32 under autocast."""
    query, key = x.tokens * x.query, x.tokens * x.key
    if x.fused_projection:
        return 3 * x.element * query
    repeated = x.key not in (x.query, x.head_dim)
    held: Int = x.residual * (query + key) + x.element * key
    return held + (x.residual + x.element) * query if repeated else held


def _eager_copies(x: Widths) -> Int:
    """Sum the queries and keys that the matrix product copies: to cast them, or to make them contiguous."""
    query = x.element * x.tokens * x.query
    if x.autocast and not x.fused_projection:
        return 2 * query
    several = minimum(1, x.micro_batch - 1)
    return 2 * query * several if x.key in {x.query, x.head_dim} else query * several


def _query_projection(x: Widths, weights: int, norm: HeadNorm | None) -> tuple[BackwardPoint, ...]:
    """List the backward of the first projection, the last of the three to go; under autocast also the cast of its gradient."""
    size = x.element * x.tokens * x.hidden
    matrix = x.hidden * x.query
    casts = matrix if x.autocast else 0
    summed = Line(GRADIENT, x.residual * x.tokens * x.hidden, "gradient of the norm's output, summed", "r·T·h", LLAMA)
    kept = Line(SAVED, size, "input of the q projection", "e·T·h", LLAMA)
    at_norm = () if norm is None else (
        BackwardPoint("norm of the queries", (kept, summed, *norm.alive), weights - matrix, 0, casts),
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

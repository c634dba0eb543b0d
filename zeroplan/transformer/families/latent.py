"""Multi-head latent attention (DeepSeek-V2/V3): low-rank projections, heads of two sizes, one rotary key for all heads."""

from typing import NamedTuple

from zeroplan.ledger import Line, total_bytes
from zeroplan.numeric import Int, maximum, round_up
from zeroplan.spec.model import MlaSpec
from zeroplan.transformer.blocks import At, BackwardPoint, Place
from zeroplan.transformer.families.parts import GRADIENT, OPERAND, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths
from zeroplan.transformer.families.written_out import CHOICE as EFFICIENT
from zeroplan.transformer.families.written_out import MATH, ROWS

LATENT = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3Attention.forward"
EAGER = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, eager_attention_forward"


class Ranks(NamedTuple):
    """Widths of the low-rank projections; the symbol of each in formulas stands after it."""

    queries: int  # u, 0 where one matrix makes the queries
    latent: int  # w, of keys and values together
    rotary: int  # o, of the one rotary key
    joint: int  # keys without their rotary part, and values, of all heads: q - a·o + c


def ranks(x: Widths, mla: MlaSpec) -> Ranks:
    """Collect what latent attention needs beside the common widths."""
    rotary = mla.qk_rope_head_dim
    return Ranks(mla.q_lora_rank or 0, mla.kv_lora_rank, rotary, x.query - x.heads * rotary + x.context)


class _Weights(NamedTuple):
    """Elements of each projection, bias included, in the order of the backward; ``casts`` are those that autocast copies."""

    outward: int
    joint: int
    latent: int
    queries: int
    first: int
    casts: int


def latent_attention(x: Widths, mla: MlaSpec, *, bias: bool) -> Part:
    """Attention between its norm and the residual addition.

    Heads of queries and keys are wider than those of values, which flash attention refuses; CUDA's memory-efficient kernel takes
    them in every dtype, and a CPU writes attention out in fp32. The scratch inside the kernel's backward is left out.
    """
    rank, weights = ranks(x, mla), _weights(x, mla, bias=bias)
    before = _projected(x, rank)
    attend = _KERNELS[kernel(x)]
    kept, inside = attend(x, rank, before)
    points = tuple(BackwardPoint(name, lines, weights.outward, 0, _inward(x, weights)) for name, lines in inside)
    total = weights.outward + weights.joint + weights.latent + weights.queries + weights.first
    return Part((*before, *kept), (*points, *_late_points(x, rank, weights, before)), total + _norms(rank), weights.casts)


def kernel(x: Widths) -> str:
    """Which kernel computes attention: the module's own lines, CUDA's memory-efficient one, or a CPU's written-out one."""
    if x.attention == "eager":
        return "eager"
    return "math" if x.kernels == "cpu" else "efficient"


def _norms(rank: Ranks) -> int:
    return rank.queries + rank.latent


def _weights(x: Widths, mla: MlaSpec, *, bias: bool) -> _Weights:
    rank = ranks(x, mla)
    joint, latent = rank.latent * rank.joint, x.hidden * (rank.latent + rank.rotary)
    queries = rank.queries * x.query
    first = x.hidden * (rank.queries or x.query)
    outward = x.context * x.hidden
    casts = outward + joint + latent + queries + first
    if not bias:
        return _Weights(outward, joint, latent, queries, first, casts)
    return _Weights(outward + x.hidden, joint, latent + rank.latent + rank.rotary, queries, first + rank.queries, casts)


def _inward(x: Widths, weights: _Weights) -> int:
    """Elements whose autocast copy is alive while attention itself goes backward."""
    return weights.casts - x.context * x.hidden if x.autocast else 0


# --- what is saved ------------------------------------------------------------------------------------------------------


def _projected(x: Widths, rank: Ranks) -> tuple[Line, ...]:
    """List what the projections and the norms between them save, before queries meet keys."""
    size = x.element * x.tokens * x.hidden
    if x.autocast:
        made = Line(SAVED, 2 * size, "inputs of the first projections, cast", "2·e·T·h", LATENT)
    else:
        made = Line(SAVED, size, "input of the first projections", "e·T·h", LATENT, OPERAND)
    return (made, *_query_norm(x, rank), *_latent_norm(x, rank))


def _query_norm(x: Widths, rank: Ranks) -> tuple[Line, ...]:
    if not rank.queries:
        return ()
    size = x.tokens * rank.queries
    return (
        Line(SAVED, 4 * size, "norm of the compressed queries: its input in fp32", "4·T·u", LATENT),
        Line(SAVED, 4 * x.tokens, "norm of the compressed queries: reciprocal root mean square", "4·T", LATENT),
        Line(SAVED, x.element * size, "norm of the compressed queries: normalised input", "e·T·u", LATENT),
        Line(SAVED, x.element * size, "compressed queries, input of their second projection", "e·T·u", LATENT, OPERAND),
    )


def _latent_norm(x: Widths, rank: Ranks) -> tuple[Line, ...]:
    """In 32 bits the norm's input is no copy but the projection's output itself, the rotary key with it."""
    size = x.tokens * rank.latent
    name = "norm of the latent: its input in fp32"
    wide = (
        Line(SAVED, 4 * x.tokens * (rank.latent + rank.rotary), name, "4·T·(w+o)", LATENT)
        if x.element == 4
        else Line(SAVED, 4 * size, name, "4·T·w", LATENT)
    )
    return (
        wide,
        Line(SAVED, 4 * x.tokens, "norm of the latent: reciprocal root mean square", "4·T", LATENT),
        Line(SAVED, x.element * size, "norm of the latent: normalised input", "e·T·w", LATENT),
        Line(SAVED, x.element * size, "latent, input of the projection to keys and values", "e·T·w", LATENT, OPERAND),
    )


# --- the attention itself: what each kernel saves, and its moments in the backward -----------------------------------------

_Inside = tuple[tuple[Line, ...], tuple[tuple[str, tuple[Line, ...]], ...]]


def projected_outputs(x: Widths, mla: MlaSpec, *, bias: bool) -> tuple[Line, ...]:
    """Outputs of attention's projections in the order they are made, those with a bias apart: each is one plain product."""
    rank, size = ranks(x, mla), x.element * x.tokens
    compressed = Line(SAVED, size * rank.queries, "output of the first projection of the queries", "e·T·u", LATENT)
    latent = Line(
        SAVED, size * (rank.latent + rank.rotary), "output of the first projection of keys and values", "e·T·(w+o)", LATENT
    )
    return (
        *((compressed,) if rank.queries and not bias else ()),
        Line(SAVED, size * x.query, "output of the projection to queries", "e·T·q", LATENT),
        *(() if bias else (latent,)),
        Line(SAVED, size * rank.joint, "output of the projection to keys and values", "e·T·(q - a·o + c)", LATENT),
        *(() if bias else (Line(SAVED, size * x.hidden, "output of the output projection", "e·T·h", LATENT),)),
    )


def kernel_outputs(x: Widths) -> tuple[Line, ...]:
    """What the memory-efficient kernel makes: its output, and a log-sum-exp per row in rows of 32."""
    return Line(SAVED, x.element * x.tokens * x.context, "attention output", "e·T·c", EFFICIENT), _row_sums(x)


def _row_sums(x: Widths) -> Line:
    rows = round_up(x.seq_len, ROWS) * x.micro_batch * x.heads
    return Line(SAVED, 4 * rows, "log-sum-exp of the scores, fp32", "128·a·b·ceil(s/32)", EFFICIENT)


def _output(x: Widths) -> Line:
    size = x.element * x.tokens * x.context
    return Line(SAVED, size, "attention output, input of the output projection", "e·T·c", LATENT, OPERAND)


def _efficient(x: Widths, rank: Ranks, before: tuple[Line, ...]) -> _Inside:
    e, tokens = x.element, x.tokens
    kept = (
        Line(SAVED, e * tokens * x.query, "queries", "e·T·q", EFFICIENT),
        Line(SAVED, e * tokens * rank.joint, "values, one tensor with the keys' first part", "e·T·(q - a·o + c)", EFFICIENT),
        Line(SAVED, e * tokens * x.query, "keys", "e·T·q", EFFICIENT),
        _output(x),
        _row_sums(x),
    )
    alive = (
        *before,
        *kept,
        Line(GRADIENT, e * tokens * x.context, "gradient of the attention output", "e·T·c", EFFICIENT),
        Line(GRADIENT, e * tokens * (2 * x.query + x.context), "gradients of q, k and v", "e·T·(2·q+c)", EFFICIENT),
    )
    return kept, (("attention", alive),)


def _written_out(x: Widths, rank: Ranks, before: tuple[Line, ...]) -> _Inside:
    """Attention from single operators: by the module in the compute dtype, or by torch on a CPU in fp32."""
    wide, source = (4, MATH) if kernel(x) == "math" else (x.element, EAGER)
    tokens, scores = x.tokens, x.tokens * x.seq_len * x.heads
    unit = "4" if wide == 4 else "e"
    queries = Line(SAVED, wide * tokens * x.query, "queries", f"{unit}·T·q", source)
    keys = Line(SAVED, wide * tokens * x.query, "keys", f"{unit}·T·q", source)
    softmax = Line(SAVED, 4 * scores, "softmax of the scores", "4·a·T·s", source)
    cast = () if wide == 4 else (Line(SAVED, wide * scores, "softmax of the scores, cast", "e·a·T·s", source),)
    values = _values(x, rank, wide, source)
    gradient = Line(GRADIENT, wide * tokens * x.context, "gradient of the values", f"{unit}·T·c", source)
    product = (
        *before, queries, keys, values, softmax, *cast, gradient,
        Line(GRADIENT, wide * tokens * x.context, "gradient of the attention output", f"{unit}·T·c", source),
        Line(GRADIENT, wide * scores, "gradient of the attention weights", f"{unit}·a·T·s", source),
    )  # fmt: skip
    both = Line(GRADIENT, 8 * scores, "gradients of the softmax and of the scores", "8·a·T·s", source)
    derivative = (*before, queries, keys, softmax, gradient, both)
    kept = (queries, keys, values, softmax, *cast, _output(x))
    return kept, (("attention: product with the values", product), ("attention: softmax", derivative))


def _values(x: Widths, rank: Ranks, wide: int, source: str) -> Line:
    """Of one sequence the product takes values as they lie beside the keys; of several, and of a cast, it takes a copy."""
    if wide != x.element:
        return Line(SAVED, wide * x.tokens * x.context, "values", "4·T·c", source)
    beside = (rank.joint - x.context) * maximum(0, 2 - x.micro_batch)
    size = wide * x.tokens * (x.context + beside)
    return Line(SAVED, size, "values, of one sequence beside the keys", "e·T·(c + (q - a·o)·max(0, 2-b))", source)


_KERNELS = {"efficient": _efficient, "math": _written_out, "eager": _written_out}


# --- the projections in the backward ------------------------------------------------------------------------------------


def _late_points(x: Widths, rank: Ranks, w: _Weights, before: tuple[Line, ...]) -> tuple[BackwardPoint, ...]:
    """List where the backward of the projections peaks: each makes its weight's gradient beside those made before.

    The first projection of the queries goes last. Under autocast a weight's gradient is first made in 16 bits.
    """
    e, tokens = x.element, x.tokens
    queries = Line(GRADIENT, e * tokens * x.query, "gradient of the queries", "e·T·q", LATENT)
    joint = (
        queries,
        Line(GRADIENT, e * tokens * rank.joint, "gradient of values and keys, joined", "e·T·(q - a·o + c)", LATENT),
        Line(GRADIENT, e * tokens * (rank.latent + rank.rotary), "gradients of latent and rotary key", "e·T·(w+o)", LATENT),
    )
    summed = Line(GRADIENT, x.residual * tokens * x.hidden, "gradient of the norm's output, summed", "r·T·h", LATENT)
    points = _made(
        x, "projection of the latent", (*before, *joint), w.outward, w.joint, w.casts - x.context * x.hidden,
        matrix=(w.joint, "e·w·(q - a·o + c)"),
    )  # fmt: skip
    made = w.outward + w.joint + rank.latent + w.latent
    if rank.queries:
        return (*points, *_two_query_projections(x, rank, w, before[:-4], (summed, queries), made))
    through = Line(GRADIENT, e * tokens * x.hidden, "gradient through the q projection", "e·T·h", LATENT)
    alive = (before[0], summed, queries, through)
    return (*points, *_made(x, "q projection", alive, made, w.first, w.first, matrix=(w.first, "e·h·q")))


def _two_query_projections(
    x: Widths, rank: Ranks, w: _Weights, kept: tuple[Line, ...], gradients: tuple[Line, Line], made: int
) -> tuple[BackwardPoint, ...]:
    """The second projection of the queries, the norm before it and the first; ``kept`` is what these have saved."""
    (given, *norm), (summed, queries) = kept, gradients
    compressed = Line(GRADIENT, x.element * x.tokens * rank.queries, "gradient of the compressed queries", "e·T·u", LATENT)
    wide = Line(TEMPORARY, 20 * x.tokens * rank.queries, "derivative of pow and the gradient beside it, fp32", "20·T·u", LATENT)
    through = Line(
        GRADIENT, x.element * x.tokens * x.hidden, "gradient through the first projection of the queries", "e·T·h", LATENT
    )
    second, first = (given, *norm, summed, queries, compressed), (given, summed, compressed, through)
    normed = made + w.queries + rank.queries
    casts = x.hidden * rank.queries if x.autocast else 0
    return (
        *_made(x, "second projection of the queries", second, made, w.queries, casts + w.queries, matrix=(w.queries, "e·u·q")),
        BackwardPoint("norm of the compressed queries", (given, norm[0], summed, wide), normed, 0, casts, place=Place(At.NORM)),
        *_made(x, "first projection of the queries", first, normed, w.first, casts, matrix=(casts, "e·h·u")),
    )


def _made(
    x: Widths, name: str, alive: tuple[Line, ...], before: int, weight: int, casts: int, *, matrix: tuple[int, str]
) -> tuple[BackwardPoint, ...]:
    """The moment a weight's gradient is made; under autocast in 16 bits first, and then its cast."""
    if not x.autocast:
        return (BackwardPoint(name, alive, before + weight, weight, 0),)
    uncast = Line(TEMPORARY, x.element * matrix[0], "weight gradient before it is cast", matrix[1], LATENT)
    return (
        BackwardPoint(name, (*alive, uncast), before, 0, casts),
        BackwardPoint(name, (*alive[:-2], uncast), before + weight, weight, casts - matrix[0]),
    )


# --- the forward ----------------------------------------------------------------------------------------------------------


def attention_forward_bytes(x: Widths, mla: MlaSpec, *, recomputed: bool) -> Int:
    """Return what is alive at attention's own highest moment, beyond the first norm's saved tensors and the block input. [bytes]

    The forward holds by name: the projections' outputs, the rotary parts, queries and keys with and without them. ``recomputed``:
    nothing is saved for a backward.
    """
    rank = ranks(x, mla)
    narrow, wide = x.element * x.tokens, x.residual * x.tokens
    held: Int = narrow * (2 * x.query + rank.joint) + wide * (x.heads * rank.rotary + rank.rotary + x.query)
    if x.residual != 4 or x.autocast:
        held = held + narrow * (rank.latent + rank.rotary)
    if recomputed:
        held = held + wide * (x.hidden + rank.latent)
        held = held + (narrow * (rank.latent + rank.rotary) if x.residual == 4 and not x.autocast else 0)
    else:
        held = held + total_bytes(_projected(x, rank)) + (wide * x.hidden if x.autocast else 0)
    return held + _inside_forward(x)


def _inside_forward(x: Widths) -> Int:
    scores = x.tokens * x.seq_len * x.heads
    match kernel(x):
        case "efficient":
            cast = x.element * x.tokens * x.query if x.autocast else 0
            return x.element * x.tokens * (x.context + x.hidden) + cast
        case "math":
            copies: Int = 2 * 4 * x.tokens * x.query + 4 * x.seq_len * x.seq_len
            narrow = 4 * x.tokens * (2 * x.query + x.context) if x.element != 4 else 0
            return 8 * scores + copies + narrow
        case _:
            cast = x.element * x.tokens * x.query if x.autocast else 0
            return 8 * scores + cast + (x.element * scores if x.residual != 4 else 0)

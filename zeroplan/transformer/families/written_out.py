"""Attention in 32 bits on CUDA: which kernel ``scaled_dot_product_attention`` takes there, and what it has beyond the flash one.

Flash attention needs 16 bits. In 32 the memory-efficient kernel takes over, whose log-sum-exp has rows in multiples of 32; where
keys are grouped it refuses (torch 2.13; later versions do not), and attention is written out: keys and values repeated, all
scores kept. A CPU's flash kernel takes 32 bits and grouped heads. Every line here is therefore CUDA's alone, and adds to those of
the flash kernel.

Source: torch 2.13, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (``can_use_mem_efficient_attention``) and
``attention.cpp`` (``_scaled_dot_product_attention_math``), its operators watched on fake tensors.
"""

from zeroplan.ledger import Line, OffGpu, Tag, total_bytes
from zeroplan.numeric import Int, ceil_div, maximum
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.parts import GRADIENT, SAVED, TEMPORARY
from zeroplan.transformer.families.widths import Widths

CHOICE = "torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, can_use_mem_efficient_attention"
MATH = "torch 2.13, aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math"
CUDA_ALONE = Tag(off_gpu=OffGpu.NOTHING)
"""Of every line here that a CPU's kernels do not have; a comparison with those leaves it out."""
EXCESS = "attention written out, beyond the later peak, on CUDA"
"""The reason of lines that say how far its softmax is above the later moment that the other lines describe."""
ROWS = 32
"""The memory-efficient kernel's rows of log-sum-exp come in multiples of so many."""


def in_32_bits(x: Widths) -> bool:
    """Whether attention gets fp32 tensors: not under autocast, which casts them."""
    return x.attention == "sdpa" and x.element == 4 and not x.autocast and x.kernels == "cuda"


def is_written_out(x: Widths) -> bool:
    """Whether neither kernel takes it."""
    return in_32_bits(x) and x.query != x.key


def saved(x: Widths) -> tuple[Line, ...]:
    """What is saved beyond the flash kernel's tensors."""
    if not in_32_bits(x):
        return ()
    if not is_written_out(x):
        padding = 4 * x.heads * x.micro_batch * (ceil_div(x.seq_len, ROWS) * ROWS - x.seq_len)
        formula = "4·a·b·(32·ceil(s/32) - s)"
        return (Line(SAVED, padding, "rows that fill up log-sum-exp, on CUDA", formula, CHOICE, CUDA_ALONE),)
    repeated = x.element * x.tokens * (2 * x.query - x.key - x.value)
    return (
        Line(SAVED, repeated, "keys and values repeated for each query head, on CUDA", "e·T·(2·q - k - v)", MATH, CUDA_ALONE),
        Line(
            SAVED,
            _scores(x) - 4 * x.tokens * x.heads,
            "softmax of all scores, for log-sum-exp, on CUDA",
            "4·a·T·(s - 1)",
            MATH,
            CUDA_ALONE,
        ),
    )


def softmax_point(x: Widths, before: tuple[Line, ...], made: int, casts: int) -> tuple[BackwardPoint, ...]:
    """The backward of the softmax: it, its gradient and that of the scores, beside queries, keys and the values' gradient."""
    if not is_written_out(x):
        return ()
    three = x.element * x.tokens * x.query
    alive = (
        *before,
        Line(SAVED, three, "queries", "e·T·q", MATH),
        Line(SAVED, three, "keys, repeated, on CUDA", "e·T·q", MATH, CUDA_ALONE),
        Line(GRADIENT, three, "gradient of the values, repeated, on CUDA", "e·T·q", MATH, CUDA_ALONE),
        Line(SAVED, _scores(x), "softmax of all scores, on CUDA", "4·a·T·s", MATH, CUDA_ALONE),
        Line(GRADIENT, 2 * _scores(x), "gradients of the softmax and of the scores, on CUDA", "8·a·T·s", MATH, CUDA_ALONE),
    )
    return (BackwardPoint("attention: softmax", alive, made, 0, casts),)


def forward_excess(x: Widths, at_end: Int, projections: tuple[Line, ...]) -> tuple[Line, ...]:
    """What the softmax takes beyond the end of the block, where a backward will follow."""
    if not is_written_out(x):
        return ()
    named: Int = _in_use(x) + 2 * x.element * x.tokens * x.query + total_bytes(projections)
    return (Line(TEMPORARY, maximum(0, named - at_end), EXCESS, source=MATH, tag=CUDA_ALONE),)


def recompute_excess(x: Widths, at_end: Int) -> tuple[Line, ...]:
    """The same where nothing is saved; the norm's output is held by name."""
    if not is_written_out(x):
        return ()
    named = _in_use(x) + x.element * x.tokens * x.hidden
    return (Line(TEMPORARY, maximum(0, named - at_end), EXCESS, source=MATH, tag=CUDA_ALONE),)


def _in_use(x: Widths) -> Int:
    """Scores, softmax and mask; queries, keys and values as the module holds them, and four more of the size of queries. [bytes]"""
    mask: Int = 4 * x.seq_len * x.seq_len
    return 2 * _scores(x) + mask + x.element * x.tokens * (4 * x.query + x.key + x.value)


def _scores(x: Widths) -> Int:
    return 4 * x.tokens * x.seq_len * x.heads

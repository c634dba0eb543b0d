"""What does the way from the final hidden states to the loss cost: the head's multiplication, the logits, the cross-entropy?

Three ways. *full*: the logits of all tokens at once, as transformers does it. *chunked*: an eighth of the tokens at a time, each
chunk going forward and backward before the next, as torchtitan's ``ChunkedLossWrapper`` does it. *fused*: Liger's fused linear
cross-entropy, which makes the gradients in the forward pass and never holds more logits than about the hidden states' size.
"""

from typing import NamedTuple

from zeroplan.ledger import Kind, Line, Module, Role, Tag
from zeroplan.numeric import Int, ceil_div, maximum, minimum, next_power_of_2
from zeroplan.spec.recipe import Loss
from zeroplan.transformer.blocks import At, BackwardPoint, Place
from zeroplan.transformer.families.parts import GRADIENT, SAVED, TEMPORARY
from zeroplan.transformer.families.widths import Widths

HEAD = "transformers 5.23, models/llama/modeling_llama.py, LlamaForCausalLM.forward"
FULL = "transformers 5.23, loss/loss_utils.py, ForCausalLMLoss"
CAP = "transformers 5.23, models/gemma2/modeling_gemma2.py, Gemma2ForCausalLM.forward"
CHUNKED = "torchtitan, 2026-08, components/loss.py, ChunkedLossWrapper"
FUSED = "liger_kernel 0.8.5, ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward"
LOGITS, WEIGHT = Kind.LOGITS, Kind.UNSHARDED_GRADIENTS

HEAD_INPUT = Tag(Role.OPERAND, Module.HEAD)
"""What the head's product saves, and lets go of before its gradient is handed on."""
HEAD_INPUT_NAMED = Tag(Role.NAMED, Module.HEAD)
LABELS = Tag(Role.LABELS)
AT_LOSS, AT_HEAD = Place(At.LOSS), Place(At.HEAD, Module.HEAD)
CHUNKS = 8
"""torchtitan 2026-08, ChunkedLossWrapper.Config.num_chunks."""


class LossPass(NamedTuple):
    """Head and loss in one pass, beside the final norm's own tensors.

    ``saved``: the head's input, where it is kept for the backward; ``kept``: what the loss keeps from its forward to its
    backward; ``forward``: what is alive at its highest point, ``kept`` included, ``saved`` not;
    ``points``: the moments of the backward, with all of it, up to the final norm; ``output``: the logits, if they exist.
    """

    saved: tuple[Line, ...]
    kept: tuple[Line, ...]
    forward: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]
    output: tuple[Line, ...]


def full_loss(x: Widths, vocab: int, norm_saved: tuple[Line, ...]) -> LossPass:
    """All logits at once: upcast to fp32, labels shifted by padding."""
    saved = (Line(SAVED, x.element * x.tokens * x.hidden, "input of the head", "e·T·h", HEAD, HEAD_INPUT),)
    output = Line(LOGITS, x.element * x.tokens * vocab, "logits", "e·T·V", HEAD)
    kept = _kept_by_full(x, vocab)
    gradients = Line(LOGITS, 8 * x.tokens * vocab, "gradients of log-softmax and of the fp32 logits", "8·T·V", FULL)
    backward = (kept[0], gradients)
    points = _full_points(x, vocab, saved=(*norm_saved, *saved), backward=backward)
    return LossPass(saved, kept, (output, *kept, *_full_temporaries(x, vocab)), points, (output,))


def capped(way: LossPass, x: Widths, vocab: int, loss: Loss) -> LossPass:
    """Bend the logits through ``tanh`` on the way, whose result is kept until the loss's gradient has passed it.

    In chunks that is before the next chunk. The fused kernel bends them where they are.
    """
    if loss == "fused":
        return way
    tokens, formula = (x.tokens, "e·T·V") if loss == "full" else (ceil_div(x.tokens, CHUNKS), "e·ceil(T/8)·V")
    kept = Line(LOGITS, x.element * tokens * vocab, "tanh of the logits, kept by the soft cap", formula, CAP)
    at_loss, *later = way.points
    points = (at_loss._replace(lines=(*at_loss.lines, kept)), *later)
    beyond = (*way.kept, kept) if loss == "full" else way.kept
    return way._replace(kept=beyond, forward=(*way.forward, kept), points=points)


def frozen_head(way: LossPass, *, keeps_input: bool) -> LossPass:
    """The head's weight is frozen: nobody saves what it reads, which the model's forward holds by name until the loss is made."""
    points = tuple([point._replace(gradients=0, current_gradient=0) for point in way.points])
    if keeps_input:
        return way._replace(points=points)
    reason = "input of the head, held by name"
    named = tuple(line._replace(kind=TEMPORARY, reason=reason, tag=HEAD_INPUT_NAMED) for line in way.saved)
    without = tuple([point._replace(lines=tuple(one for one in point.lines if one.tag != HEAD_INPUT)) for point in points])
    return way._replace(saved=(), forward=(*way.forward, *named), points=without)


def head_in_32_bits(way: LossPass, x: Widths, vocab: int, norm_saved: tuple[Line, ...]) -> LossPass:
    """The frozen head is fp32, as peft prepares it beside quantised weights: autocast copies it in every forward.

    Autocast keeps no copy of a frozen weight for the next use, but the product saves it for the gradient of what it reads.
    """
    copy = Line(Kind.WEIGHT_CASTS, x.element * x.hidden * vocab, "16-bit copy of the frozen head", "e·h·V", HEAD)
    wide = Line(TEMPORARY, 4 * x.tokens * x.hidden, "input of the head in fp32, held by name", "4·T·h", HEAD, HEAD_INPUT_NAMED)
    forward = tuple(line for line in way.forward if line.tag != HEAD_INPUT_NAMED)
    points = tuple([point._replace(lines=(*point.lines, copy)) for point in way.points])
    through = Line(
        GRADIENT, (4 + x.element) * x.tokens * x.hidden, "gradient of the head's input, and in fp32", "(4+e)·T·h", HEAD
    )
    last = BackwardPoint("head: cast of the gradient", (*norm_saved, through), 0, 0, 0, place=AT_HEAD)
    return way._replace(saved=(copy,), forward=(*forward, wide), points=(*points, last))


def _kept_by_full(x: Widths, vocab: int) -> tuple[Line, Line]:
    return (
        Line(LOGITS, 4 * x.tokens * vocab, "log-softmax of the logits, fp32", "4·T·V", FULL),
        # With one sequence the shifted labels are a view of the padded ones, which are one longer.
        Line(LOGITS, 8 * x.tokens + 8 * maximum(0, 2 - x.micro_batch), "labels, shifted", "8·T + 8·max(0, 2-b)", FULL, LABELS),
    )


def _full_temporaries(x: Widths, vocab: int) -> tuple[Line, ...]:
    lines: tuple[Line, ...] = ()
    if x.element != 4:
        lines = (Line(LOGITS, 4 * x.tokens * vocab, "logits in fp32", "4·T·V", FULL),)
    if x.autocast:
        wide = Line(TEMPORARY, 4 * x.tokens * x.hidden, "final norm's output in fp32, held by name", "4·T·h", HEAD)
        lines = (*lines, wide)
    padded = 8 * (x.tokens + x.micro_batch) - 8 * (x.tokens + 1) * maximum(0, 2 - x.micro_batch)
    return (*lines, Line(LOGITS, padded, "labels, padded", "8·(T+b) - 8·(T+1)·max(0, 2-b)", FULL, LABELS))


def _full_points(
    x: Widths, vocab: int, *, saved: tuple[Line, ...], backward: tuple[Line, ...]
) -> tuple[BackwardPoint, ...]:  # fmt: skip
    matrix = x.hidden * vocab
    logits = Line(LOGITS, x.element * x.tokens * vocab, "gradient of the logits", "e·T·V", FULL)
    through = Line(GRADIENT, x.element * x.tokens * x.hidden, "gradient of the head's input", "e·T·h", HEAD)
    product = (*saved, logits, through)
    casts = matrix if x.autocast else 0
    at_loss = BackwardPoint("loss", saved + backward, 0, 0, casts, place=AT_LOSS)
    if not x.autocast:
        return at_loss, BackwardPoint("head", product, matrix, matrix, 0, place=AT_HEAD)
    uncast = Line(TEMPORARY, x.element * matrix, "gradient of the head's weight before it is cast", "e·h·V", HEAD)
    wide = Line(GRADIENT, 4 * x.tokens * x.hidden, "gradient of the head's input, fp32", "4·T·h", HEAD)
    return (
        at_loss,
        BackwardPoint("head", (*product, uncast), 0, 0, casts, place=AT_HEAD),
        BackwardPoint("head: cast of the weight gradient", (*saved[:-1], wide, uncast), matrix, matrix, 0, place=AT_HEAD),
    )


def chunked_loss(x: Widths, vocab: int, norm_saved: tuple[Line, ...]) -> LossPass:
    """One chunk of tokens at a time, forward and backward; the hidden gradients gather in one fp32 buffer.

    Equal to a run of it where the head is part of FSDP2's root unit. Leaves out a last chunk that is smaller than the others.
    """
    chunk = ceil_div(x.tokens, CHUNKS)
    matrix = x.hidden * vocab
    saved = (Line(SAVED, x.element * x.tokens * x.hidden, "input of the head", "e·T·h", CHUNKED, HEAD_INPUT),)
    labels = Line(LOGITS, 8 * x.tokens, "labels", "8·T", CHUNKED)
    buffer = Line(GRADIENT, 4 * x.tokens * x.hidden, "gradients of the head's input, fp32 buffer", "4·T·h", CHUNKED)
    size = x.element + (0 if x.element == 4 else 4)
    logits = Line(LOGITS, size * chunk * vocab, "logits of a chunk and their fp32 copy", f"{size}·ceil(T/8)·V", CHUNKED)
    softmax = Line(LOGITS, 4 * chunk * vocab, "log-softmax of a chunk, fp32", "4·ceil(T/8)·V", CHUNKED)
    gradients = Line(LOGITS, 8 * chunk * vocab, "gradients of a chunk's log-softmax and logits", "8·ceil(T/8)·V", CHUNKED)
    through = Line(GRADIENT, x.element * chunk * x.hidden, "gradient of a chunk's hidden states", "e·ceil(T/8)·h", CHUNKED)
    backward = (labels, buffer, softmax, gradients)
    named = Line(LOGITS, x.element * chunk * vocab, "logits of a chunk, held by name", "e·ceil(T/8)·V", CHUNKED)
    every = (*norm_saved, *saved, named)
    points = (
        BackwardPoint("loss", (*every, *backward), matrix, 0, 0, place=AT_LOSS),
        BackwardPoint(
            "head", (*every, labels, buffer, _chunk_logits(x, chunk, vocab), through), 2 * matrix, matrix, 0,
            handed_on=(*every, labels, buffer, through), place=AT_HEAD,
        ),
    )  # fmt: skip
    return LossPass(saved, (labels, buffer), (labels, buffer, logits, softmax), points, ())


def _chunk_logits(x: Widths, chunk: Int, vocab: int) -> Line:
    return Line(LOGITS, x.element * chunk * vocab, "gradient of a chunk's logits", "e·ceil(T/8)·V", CHUNKED)


def fused_loss(x: Widths, vocab: int, norm_saved: tuple[Line, ...]) -> LossPass:
    """Gradients of hidden states and of the head's weight are made in the forward pass, a chunk of logits at a time.

    A chunk has next_pow2(ceil(T / ceil(V/h))) tokens, at most T. Read in Liger's source, not run. Leaves out the fp32
    accumulation of the weight gradient that ``accum_dtype`` asks for.
    """
    matrix, weight = x.hidden * vocab, 4 if x.autocast else x.element
    chunk = minimum(x.tokens, next_power_of_2(ceil_div(x.tokens, ceil_div(vocab, x.hidden))))
    kept = (
        Line(GRADIENT, x.element * x.tokens * x.hidden, "gradient of the head's input, made in the forward", "e·T·h", FUSED),
        Line(WEIGHT, weight * matrix, "gradient of the head's weight, made in the forward", f"{weight}·h·V", FUSED),
    )
    forward = (
        *kept,
        Line(TEMPORARY, x.residual * x.tokens * x.hidden, "input of the head, held by name", "r·T·h", HEAD, HEAD_INPUT_NAMED),
        Line(LOGITS, x.element * chunk * vocab, "logits of a chunk", "e·V·min(T, pow2(ceil(T/ceil(V/h))))", FUSED),
        Line(LOGITS, 12 * x.tokens, "loss of each token, and labels", "12·T", FUSED),
    )
    points = (BackwardPoint("loss", (*norm_saved, kept[0]), matrix, 0, 0, place=AT_LOSS),)
    return LossPass((), kept, forward, points, ())

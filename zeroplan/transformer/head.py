"""What do the parts outside the blocks cost in one pass: embedding, rotary tables, final norm, head and loss?"""

from __future__ import annotations

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import maximum
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BackwardPoint, Compute, HeadPass
from zeroplan.transformer.families.norms import FINAL, rms_norm
from zeroplan.transformer.families.parts import GRADIENT, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths, widths

HEAD = "transformers 5.23, models/llama/modeling_llama.py, LlamaForCausalLM.forward"
LOSS = "transformers 5.23, loss/loss_utils.py, ForCausalLMLoss"
ROTARY = "transformers 5.23, models/llama/modeling_llama.py, LlamaRotaryEmbedding.forward"
LOGITS = Kind.LOGITS


def head_pass(model: ModelSpec, compute: Compute, batch: Batch) -> HeadPass:
    """What the model holds outside its blocks, with the causal-LM loss that transformers computes.

    The logits are upcast to fp32 and the labels shifted by padding; no chunked or fused loss. Leaves out: dropout after the
    embedding, and scalars (the loss itself, the sum of label weights).
    """
    x = widths(model, compute, batch)
    norm = rms_norm(x, FINAL)
    hidden = x.tokens * x.hidden
    head_input = Line(SAVED, x.element * hidden, "input of the head", "e·T·h", HEAD)
    saved = (*norm.saved, head_input)
    loss_forward, loss_backward = _loss(x, model.vocab_size)
    return HeadPass(
        _shared(x),
        saved,
        loss_forward,
        loss_backward,
        norm.points[0].lines,
        (Line(LOGITS, x.element * x.tokens * model.vocab_size, "logits", "e·T·V", HEAD),),
        x.residual * hidden,
        (Line(SAVED, x.residual * hidden, "embedding output", "r·T·h", HEAD),),
        _kept_by_the_loss(x, model.vocab_size),
        _points(x, model.vocab_size, saved, loss_backward, norm, head_input),
    )


def _shared(x: Widths) -> tuple[Line, ...]:
    return (
        Line(SAVED, 2 * x.residual * x.seq_len * x.head_dim, "rotary cos and sin", "2·r·s·d", ROTARY),
        Line(SAVED, 8 * x.tokens, "input ids, int64", "8·T", HEAD),
    )


def _kept_by_the_loss(x: Widths, vocab: int) -> tuple[Line, ...]:
    return (
        Line(LOGITS, 4 * x.tokens * vocab, "log-softmax of the logits, fp32", "4·T·V", LOSS),
        Line(LOGITS, 8 * x.tokens + 8 * maximum(0, 2 - x.micro_batch), "labels, shifted", "8·T + 8·max(0, 2-b)", LOSS),
    )


def _loss(x: Widths, vocab: int) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    logits = x.tokens * vocab
    output = Line(LOGITS, x.element * logits, "logits", "e·T·V", HEAD)
    upcast = () if x.element == 4 else (Line(LOGITS, 4 * logits, "logits in fp32", "4·T·V", LOSS),)
    kept = _kept_by_the_loss(x, vocab)
    padded = Line(LOGITS, 8 * (x.tokens + x.micro_batch), "labels, padded", "8·(T+b)", LOSS)
    wide = (Line(TEMPORARY, 4 * x.tokens * x.hidden, "final norm's output in fp32", "4·T·h", HEAD),) if x.autocast else ()
    gradients = Line(LOGITS, 8 * logits, "gradients of log-softmax and of the fp32 logits", "8·T·V", LOSS)
    return (output, *upcast, *kept, padded, *wide), (kept[0], gradients)


def _points(
    x: Widths, vocab: int, saved: tuple[Line, ...], loss: tuple[Line, ...], norm: Part, head_input: Line
) -> tuple[BackwardPoint, ...]:
    matrix = x.hidden * vocab
    through = Line(GRADIENT, x.element * x.tokens * x.hidden, "gradient of the head's input", "e·T·h", HEAD)
    product = (*saved, Line(LOGITS, x.element * x.tokens * vocab, "gradient of the logits", "e·T·V", LOSS), through)
    at_loss = BackwardPoint("loss", saved + loss, 0, 0, matrix)
    at_norm = BackwardPoint(norm.points[0].name, norm.points[0].lines, matrix + x.hidden, x.hidden, 0)
    if not x.autocast:
        return at_loss, BackwardPoint("head", product, matrix, matrix, 0), at_norm
    uncast = Line(TEMPORARY, x.element * matrix, "gradient of the head's weight before it is cast", "e·h·V", HEAD)
    wide = Line(GRADIENT, 4 * x.tokens * x.hidden, "gradient of the head's input in fp32", "4·T·h", HEAD)
    cast = (*norm.saved, wide, uncast)
    return (
        at_loss,
        BackwardPoint("head", (*product, uncast), 0, 0, matrix),
        BackwardPoint("head: cast of the weight gradient", cast, matrix, matrix, 0),
        at_norm,
    )

"""torchtitan's own Llama 3 (0.2.2) under FSDP2: the activations of its modules and of its loss.

Its loop computes the loss from the logits, which a variable holds, and holds ids and labels from one step to the next.

Leaves out releases from 0.3 on, with FlexAttention and a chunked loss.
"""

from typing import TypeAlias

from zeroplan.engines.formulas import sized
from zeroplan.engines.precisions import compute_of
from zeroplan.ledger import Kind, Line
from zeroplan.spec.batch import Batch
from zeroplan.spec.compiled import COMPILED_LOSS
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import At, BackwardPoint, BlockPass, HeadPass, Place
from zeroplan.transformer.families.compiled import COMPILED
from zeroplan.transformer.families.torchtitan import LAYER, NORM, rotations
from zeroplan.transformer.families.traced import torchtitan_block
from zeroplan.transformer.families.widths import Widths, widths

LOSS = "torchtitan 0.2.2, components/loss.py, cross_entropy_loss"
LOOP = "torchtitan 0.2.2, train.py, Trainer.forward_backward_step"
EARLIER = "torchtitan 0.2.2, train.py, Trainer.train_step"


def passes_of(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> tuple[BlockPass, HeadPass, Line]:
    """Return one forward and backward pass of a block, and of the part outside; and the model's table of rotations."""
    x = widths(model, compute_of(recipe), batch)
    return (
        torchtitan_block(model, x, recipe.recompute, compute_of(recipe).fused),
        _head_pass(x, model.vocab_size, batch, compiled=COMPILED_LOSS in recipe.fused_parts),
        rotations(x),
    )


def _head_pass(x: Widths, vocab: int, batch: Batch, *, compiled: bool) -> HeadPass:
    logits = _logits(x, vocab, "logits, held by name")
    forward, kept, gradients = _of_compiled_loss(x, vocab, logits) if compiled else _of_loss(x, vocab, logits)
    return HeadPass(
        shared=_held_by_the_loop(x, batch),
        saved=_saved(x),
        loss_forward=forward,
        output=(logits,),
        hidden_bytes=x.element * x.tokens * x.hidden,
        loss=kept,
        points=_points(x, vocab, (*kept, *gradients)),
        hidden_formula="e·T·h",
    )


#: What the loss's forward holds, what its backward reads, and the gradients that this makes.
_Loss: TypeAlias = tuple[tuple[Line, ...], tuple[Line, ...], tuple[Line, ...]]


def _of_loss(x: Widths, vocab: int, logits: Line) -> _Loss:
    softmax = _wide(x, vocab, "log-softmax of the logits, fp32")
    copies = () if x.element == 4 else (_wide(x, vocab, "logits in fp32"),)
    gradients = _wide(x, vocab, "gradient of log-softmax, fp32"), _wide(x, vocab, "gradient of the logits, fp32")
    return (logits, *copies, softmax), (softmax,), gradients


def _of_compiled_loss(x: Widths, vocab: int, logits: Line) -> _Loss:
    """It saves the logits, and its backward writes one gradient, of their dtype."""
    rows = sized(Kind.LOGITS, 8, x.tokens, "maximum and log-sum of each token's logits, fp32", COMPILED, "T")
    return (logits, rows), (logits, rows), (_logits(x, vocab, "gradient of the logits"),)


def _held_by_the_loop(x: Widths, batch: Batch) -> tuple[Line, Line]:
    held = sized(Kind.ACTIVATIONS, 16, x.tokens, "input ids and labels, int64", LOOP, "T")
    times = batch.grad_accum_steps - 1
    earlier = Line(Kind.ACTIVATIONS, 8 * x.tokens * times, "input ids of earlier micro-batches", f"{times}·8·T", EARLIER)
    return held, earlier


def _saved(x: Widths) -> tuple[Line, Line, Line]:
    return (
        Line(Kind.ACTIVATIONS, x.element * x.tokens * x.hidden, "final norm: its input", "e·T·h", NORM),
        sized(Kind.ACTIVATIONS, 4, x.tokens, "final norm: reciprocal root mean square", NORM, "T"),
        Line(Kind.ACTIVATIONS, x.element * x.tokens * x.hidden, "input of the head", "e·T·h", LAYER),
    )


def _points(x: Widths, vocab: int, of_loss: tuple[Line, ...]) -> tuple[BackwardPoint, BackwardPoint, BackwardPoint]:
    """Return the backward points of the loss, of the head, and of the final norm. ``of_loss``: what the loss's backward needs."""
    saved, matrix = _saved(x), x.hidden * vocab
    incoming, through = _logits(x, vocab, "gradient of the logits"), _flowing(x, "gradient of the head's input")
    norm = (*saved[:2], through, _flowing(x, "gradient that flows into the last block"))
    return (
        BackwardPoint("loss", (*saved, *of_loss), 0, 0, 0, place=Place(At.LOSS)),
        BackwardPoint("head", (*saved, incoming, through), matrix, matrix, 0, place=Place(At.HEAD), before=(*saved, incoming)),
        BackwardPoint("final norm", norm, matrix + x.hidden, x.hidden, 0, place=Place(At.FINAL_NORM)),
    )


def _flowing(x: Widths, reason: str) -> Line:
    return Line(Kind.ACTIVATION_GRADIENTS, x.element * x.tokens * x.hidden, reason, "e·T·h", LAYER)


def _logits(x: Widths, vocab: int, reason: str) -> Line:
    return Line(Kind.LOGITS, x.element * x.tokens * vocab, reason, "e·T·V", LOSS)


def _wide(x: Widths, vocab: int, reason: str) -> Line:
    return sized(Kind.LOGITS, 4, x.tokens * vocab, reason, LOSS, "T·V")

"""torchtitan's own Llama 3 (0.2.2 and 0.3.0) under FSDP2: the activations of its modules and of its loss.

The loop of 0.2 computes the loss from the logits, which a variable holds, and holds ids and labels from one step to the next.
That of 0.3 runs head and loss in eight chunks, forward and backward (:func:`run_chunks`).

Leaves out the mask of FlexAttention's blocks, 16 bytes for each pair of 128 tokens, and the masks of all pairs of tokens from which
it is made before the forward.
"""

from typing import TYPE_CHECKING, TypeAlias

from zeroplan.engines.formulas import product, sized
from zeroplan.engines.fsdp2 import buffers
from zeroplan.engines.fsdp2.plan import REDUCE
from zeroplan.engines.precisions import compute_of
from zeroplan.expr import ceil
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.numeric import minimum
from zeroplan.spec.batch import Batch
from zeroplan.spec.compiled import COMPILED_LOSS
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import At, BackwardPoint, BlockPass, HeadPass, Place
from zeroplan.transformer.families.compiled import COMPILED
from zeroplan.transformer.families.ending import CHUNKS
from zeroplan.transformer.families.torchtitan import LAYER, NORM, rotations
from zeroplan.transformer.families.traced import torchtitan_block
from zeroplan.transformer.families.widths import Widths, widths
from zeroplan.transformer.recomputed import first_recomputed
from zeroplan.transformer.symbols import T

if TYPE_CHECKING:
    from zeroplan.engines.fsdp2.runtime import Unit
    from zeroplan.engines.fsdp2.step import MicroBatch

LOSS = "torchtitan 0.2.2, components/loss.py, cross_entropy_loss"
LOOP = "torchtitan 0.2.2, train.py, Trainer.forward_backward_step"
EARLIER = "torchtitan 0.2.2, train.py, Trainer.train_step"
CHUNKED = "torchtitan 0.3.0, components/loss.py, ChunkedLossWrapper"
LOOP_SINCE_0_3 = "torchtitan 0.3.0, trainer.py, Trainer.train_step"
DOCUMENTS = "torchtitan 0.3.0, models/common/attention.py, get_efficient_causal_mask_mod_for_packed_document"
ACCUMULATED = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam.accumulate_unsharded_grad_if_needed"


def passes_of(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> tuple[tuple[BlockPass, ...], HeadPass, Line]:
    """Return one forward and backward pass of each run's block, and of the part outside; and the model's table of rotations."""
    x, fused = widths(model, compute_of(recipe), batch), compute_of(recipe).fused
    plain = tuple([one for one in fused if not one.startswith("float8-")])
    kinds = (fused,) if first_recomputed(model, recipe) is None else (fused, plain)
    blocks = tuple([torchtitan_block(model, x, recipe.recompute, one, recipe.fsdp2.modules) for one in kinds])
    compiled = COMPILED_LOSS in recipe.fused_parts
    if recipe.fsdp2.modules == "torchtitan-0.3":
        return blocks, _chunked(x, model.vocab_size, batch, compiled=compiled), rotations(x, model.num_hidden_layers)
    return blocks, _head_pass(x, model.vocab_size, batch, compiled=compiled), rotations(x)


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


# --- release 0.3 -------------------------------------------------------------------------------------------------------------


def _chunked(x: Widths, vocab: int, batch: Batch, *, compiled: bool) -> HeadPass:
    """Return norm, head and loss of 0.3. ``loss``: what lives while all chunks run; ``points``: of one chunk, then the norm."""
    one = x._replace(tokens=x.tokens // CHUNKS)
    logits = _logits(one, vocab, "logits of a chunk, held by name")
    forward, kept, gradients = _of_compiled_loss(one, vocab, logits) if compiled else _of_loss(one, vocab, logits)
    forward += (_logits(one, vocab, "logits of the chunk before, until the next ones exist"),) * compiled
    *loop, mask = _held_since_0_3(x, batch)
    incoming, through = _logits(one, vocab, "gradient of a chunk's logits"), _flowing(one, "gradient of a chunk's input")
    named: tuple[Line, ...] = () if compiled else (logits,)
    forward, named, kept, gradients, one_chunk = map(
        _of_a_chunk, (forward, named, kept, gradients, (logits, incoming, through))
    )
    norm, matrix = _saved(x)[:2], x.hidden * vocab
    flowing = _flowing(x, "gradient of the head's input, of all chunks"), _flowing(x, "gradient that flows into the last block")
    return HeadPass(
        shared=(*loop, mask),
        with_blocks=(mask,),
        saved=(*norm, _flowing(x, "output of the final norm")._replace(kind=Kind.ACTIVATIONS)),
        loss_forward=forward,
        output=(),
        hidden_bytes=x.element * x.tokens * x.hidden,
        loss=_while_chunks_run(x, batch),
        points=(
            BackwardPoint("loss", (*named, *kept, *gradients), 0, 0, 0, place=Place(At.LOSS)),
            BackwardPoint("head", one_chunk, matrix, matrix, 0, place=Place(At.HEAD)),
            BackwardPoint("final norm", (*norm, *flowing), x.hidden, x.hidden, 0, place=Place(At.FINAL_NORM)),
        ),
        hidden_formula="e·T·h",
    )


def _of_a_chunk(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return lines, whose bytes are a chunk's already, with formulas of a chunk."""
    return tuple([line._replace(formula=line.formula.replace("T", ceil(T, CHUNKS).text)) for line in lines])


def _while_chunks_run(x: Widths, batch: Batch) -> tuple[Line, ...]:
    """Chunks of several sequences are copies, those of one are views."""
    several = minimum(1, batch.micro_batch_size - 1)
    return (
        Line(
            Kind.ACTIVATIONS,
            several * x.element * x.tokens * x.hidden,
            "chunks of the head's input",
            "min(1, b-1)·e·T·h",
            CHUNKED,
        ),
        Line(Kind.LOGITS, several * 8 * x.tokens, "chunks of the labels, int64", "min(1, b-1)·8·T", CHUNKED),
        sized(Kind.ACTIVATION_GRADIENTS, 4, x.tokens * x.hidden, "gradients of the head's input, fp32 buffer", CHUNKED, "T·h"),
    )


def _held_since_0_3(x: Widths, batch: Batch) -> tuple[Line, ...]:
    held = sized(Kind.ACTIVATIONS, 24, x.tokens, "input ids, labels and positions, int64", LOOP_SINCE_0_3, "T")
    alone = 1 - minimum(1, batch.micro_batch_size - 1)
    reason, formula = "where each token's document is, int32, in the mask", "4·T·(1 + max(0, 2-b))"
    documents = Line(Kind.ACTIVATIONS, 4 * x.tokens * (1 + alone), reason, formula, DOCUMENTS)
    times = batch.grad_accum_steps - 1
    reason = "input ids and positions of earlier micro-batches"
    earlier = Line(Kind.ACTIVATIONS, 16 * x.tokens * times, reason, f"{times}·16·T", LOOP_SINCE_0_3)
    return held, earlier, documents


def run_chunks(run: "MicroBatch", unit: "Unit") -> None:
    """Run the loss of 0.3 and the final norm's backward, where norm and head are a unit of their own.

    The head's gradient adds up in fp32. It is reduced with the last chunk, before the decoder's backward, which gathers the unit
    again for the norm and then reduces the norm's gradient.
    """
    run.run.reshard(unit)
    run.trace.put("of all chunks", *run.plan.head.saved, *run.plan.head.loss)
    run.run.pre_forward(unit)
    run.run.release_parked()
    _later_chunk(run)
    _reduce_the_head(run, unit)
    _backward_of_the_norm(run, unit)


def _later_chunk(run: "MicroBatch") -> None:
    """Run a chunk that is not the first, beside the gradient that earlier ones have left."""
    plan, trace, (loss, head, _) = run.plan, run.trace, run.plan.head.points
    trace.put("head's gradient", _of_the_head(plan.reduce_bytes, head, "the head's, added up", ACCUMULATED))
    trace.at("loss, forward", Phase.LOSS, of_forward=True)
    trace.pass_by(*plan.head.loss_forward)
    trace.at("backward of the loss", Phase.LOSS)
    trace.pass_by(*loss.lines)
    trace.at("backward of the head", Phase.BACKWARD)
    trace.pass_by(*head.lines, _of_the_head(plan.width.compute, head, "the head's, of one chunk", CHUNKED))


def _of_the_head(width: int, head: BackwardPoint, reason: str, source: str) -> Line:
    return sized(Kind.UNSHARDED_GRADIENTS, width, head.gradients, reason, source)


def _reduce_the_head(run: "MicroBatch", unit: "Unit") -> None:
    plan, trace, (logits, _, through), group = run.plan, run.trace, run.plan.head.points[1].lines, unit.parts.trained_group
    trace.at("backward: reducing the head", Phase.BACKWARD)
    trace.put("reduce input of the head", buffers.reduce_input(plan, group, "reduce-scatter input of the head"))
    shard, formula = buffers.reduce_output_bytes(plan, group), f"{buffers.reduce_output_width(plan)}·P_{group.symbol}/N"
    trace.pass_by(logits, through, Line(Kind.REDUCE, shard, "reduce-scatter output of the head", formula, REDUCE))
    trace.drop("head's gradient")
    run.run.reshard(unit)
    trace.at("loss: gradient of all chunks", Phase.BACKWARD)
    trace.put("shards", plan.gradient_shards(tuple(0 for _ in plan.blocks), "of the head", plan.trained_outside[1:]))
    trace.pass_by(logits, plan.head.points[2].lines[2])
    trace.drop("of all chunks")


def _backward_of_the_norm(run: "MicroBatch", unit: "Unit") -> None:
    trace, norm, width = run.trace, run.plan.head.points[2], run.plan.reduce_bytes
    trace.hold("entering", *norm.lines[:3])
    run.run.pre_backward(unit, run.layers[-1][1])
    trace.drop("entering")
    trace.at("backward of the final norm", Phase.BACKWARD)
    trace.pass_by(*norm.lines)
    trace.drop("reduce input of the head")
    run.run.reshard(unit)
    n_bytes, formula = width * norm.gradients, product(width, norm.gradients)
    reduced = Line(Kind.REDUCE, n_bytes, "reduce-scatter input of the last norm", formula, REDUCE)
    trace.put(run.run.reduce_input(unit, 0), reduced)

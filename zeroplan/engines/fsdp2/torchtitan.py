"""torchtitan's Llama 3 under FSDP2 (0.2.2): its own modules, its own loss, and units of their own for embedding and head.

The embedding, each block, and the last norm with the head are ``fully_shard`` units. They are runs here like the blocks', so that
the forward and the blocks' backward are those of ``forward.py`` and ``backward.py``. The last unit stays unsharded until its
backward, which comes first; the embedding's comes last.

Left out: releases from 0.3 on, whose attention is FlexAttention and whose loss comes in chunks.
"""

from collections.abc import Iterator

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.fsdp2.backward import backward
from zeroplan.engines.fsdp2.buffers import (
    being_gathered,
    flowing,
    gathered,
    kept,
    reduce_input,
    reduce_output_bytes,
    unsharded,
)
from zeroplan.engines.fsdp2.forward import forward, left_by_earlier
from zeroplan.engines.fsdp2.groups import Group, group_of
from zeroplan.engines.fsdp2.plan import ACCUMULATE, REDUCE, Plan, make_plan
from zeroplan.engines.fsdp2.traffic import collectives
from zeroplan.engines.optimizers import counted, step_temporary_lines
from zeroplan.engines.positions import Position, corners
from zeroplan.engines.precisions import compute_of
from zeroplan.ledger import Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import maximum
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import BlockPass, HeadPass
from zeroplan.transformer.families.torchtitan import LAYER, NORM, rotations
from zeroplan.transformer.families.traced import torchtitan_block
from zeroplan.transformer.families.widths import Widths, widths
from zeroplan.transformer.parameters import BlockRun
from zeroplan.transformer.params import layout

LOSS = "torchtitan 0.2.2, components/loss.py, cross_entropy_loss"
LOOP = "torchtitan 0.2.2, train.py, Trainer.forward_backward_step"
EARLIER = "torchtitan 0.2.2, train.py, Trainer.train_step"

_EMBEDDING, _HEAD = 0, 2
"""Their places among the runs."""


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Memory of rank 0 and traffic per step. [bytes]"""
    x = widths(model, compute_of(recipe), batch)
    plan = _plan(model, recipe, mesh, batch)
    states = (
        *plan.persistent,
        plan.gradient_shards(plan.every_layer, "after backward"),
        *plan.head.shared,
    )
    temporaries = step_temporary_lines(
        recipe.optimizer, plan.impl, plan.local_tensors, plan.width.stored, symbol=f"{plan.trained_symbol}/N"
    )
    moments = (
        *forward(plan),
        *_loss(plan, x, model.vocab_size),
        *_head(plan, x, model.vocab_size),
        *backward(plan),
        *_embedding(plan),
        Moment("optimizer step", Phase.STEP, (*states, *temporaries)),
    )
    return Account(
        states=(*plan.persistent, plan.gradient_shards(plan.every_layer, "after backward")),
        moments=moments,
        collectives=collectives(plan, mesh, batch, model),
        symbols=(*_symbols(plan), *counted(*plan.persistent, *temporaries)),
        notes=("the modules, units and loss are those of torchtitan 0.2.2",),
        kept=tuple(
            (run.name, one.kept(again)) for run, one, again in zip(plan.runs, plan.passes, plan.recomputes, strict=True)
        ),
    )


def _plan(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Plan:
    """The plan of FSDP2, with three runs: the embedding, the blocks, and the last norm with the head."""
    plan, tree = make_plan(model, recipe, mesh, batch), layout(model)
    x, again = widths(model, compute_of(recipe), batch), recipe.recompute
    (run,), (block,) = tree.runs, plan.blocks
    runs = (BlockRun("embedding", 1, tree.embeddings), run, BlockRun("head", 1, tree.tail))
    groups = (group_of(tree.embeddings, plan.n, "embedding"), block, group_of(tree.tail, plan.n, "head"))
    passes = (_embedding_pass(x), torchtitan_block(model, x, again), _head_pass(x, model.vocab_size))
    empty = Group(0, 0, 0, "root")
    return plan._replace(
        runs=runs, every_layer=tuple(one.layers for one in runs), kinds=tuple(one.name for one in runs), root=empty,
        corners=_positions(corners(model), run.layers), blocks=groups, trained_root=empty, trained_blocks=groups,
        trained_kinds=tuple(one.symbol for one in groups), tail_elements=0, passes=passes, head=_outside(x, batch),
        recomputes=("none", again, "none"), persistent=(*plan.persistent, rotations(x)),
        kept=tuple(total_bytes(one.kept(how)) for one, how in zip(passes, ("none", again, "none"), strict=True)),
    )  # fmt: skip


def _positions(blocks: tuple[Position, ...], layers: int) -> tuple[Position, ...]:
    """The blocks' corners between the embedding and the head."""
    first = Position(0, "the embedding", _EMBEDDING, (0, 0, 0), (0, layers, 1), None, 1)
    last = Position(layers + 1, "the last norm and the head", _HEAD, (1, layers, 0), (0, 0, 0), 1, None)
    between = tuple(
        Position(
            one.layer + 1, one.name, 1, (1, *one.before, 0), (0, *one.after, 1), _EMBEDDING if one.previous_run is None else 1,
            _HEAD if one.next_run is None else 1,
        )
        for one in blocks
    )  # fmt: skip
    return first, *between, last


def _embedding_pass(x: Widths) -> BlockPass:
    made = Line(Kind.ACTIVATIONS, x.element * x.tokens * x.hidden, "token embeddings", "e·T·h", LAYER)
    return BlockPass((), (), (), (made,), (), (), 0)


def _head_pass(x: Widths, vocab: int) -> BlockPass:
    """The last norm and the head; their backward is not among the blocks'."""
    return BlockPass(_saved_by_head(x), (), (), (_logits(x, vocab, "logits"),), (), (), 0)


def _saved_by_head(x: Widths) -> tuple[Line, Line, Line]:
    return (
        Line(Kind.ACTIVATIONS, x.element * x.tokens * x.hidden, "final norm: its input", "e·T·h", NORM),
        Line(Kind.ACTIVATIONS, 4 * x.tokens, "final norm: reciprocal root mean square", "4·T", NORM),
        Line(Kind.ACTIVATIONS, x.element * x.tokens * x.hidden, "input of the head", "e·T·h", LAYER),
    )


def _logits(x: Widths, vocab: int, reason: str) -> Line:
    return Line(Kind.LOGITS, x.element * x.tokens * vocab, reason, "e·T·V", LOSS)


def _wide(x: Widths, vocab: int, reason: str) -> Line:
    return Line(Kind.LOGITS, 4 * x.tokens * vocab, reason, "4·T·V", LOSS)


def _outside(x: Widths, batch: Batch) -> HeadPass:
    """Ids and labels, which the loop holds by name from one step to the next, and the ids of a step's earlier micro-batches."""
    held = Line(Kind.ACTIVATIONS, 16 * x.tokens, "input ids and labels, int64", "16·T", LOOP)
    times = batch.grad_accum_steps - 1
    earlier = Line(Kind.ACTIVATIONS, 8 * x.tokens * times, "input ids of earlier micro-batches", f"{times}·8·T", EARLIER)
    return HeadPass((held, earlier), (), (), (), x.element * x.tokens * x.hidden, hidden_formula="e·T·h")


def _loss(plan: Plan, x: Widths, vocab: int) -> Iterator[Moment]:
    """The loss forward, and its backward before the logits' gradient reaches the head: nothing is gathered ahead yet."""
    common = _above_the_blocks(plan)
    named = (_logits(x, vocab, "logits, held by name"),)
    copies = () if x.element == 4 else (_wide(x, vocab, "logits in fp32"),)
    softmax = _wide(x, vocab, "log-softmax of the logits, fp32")
    yield Moment("loss, forward", Phase.LOSS, (*common, *named, *copies, softmax), of_forward=True)
    gradients = _wide(x, vocab, "gradient of log-softmax, fp32"), _wide(x, vocab, "gradient of the logits, fp32")
    yield Moment("backward of the loss", Phase.LOSS, (*common, softmax, *gradients))


def _above_the_blocks(plan: Plan) -> tuple[Line, ...]:
    """All that blocks keep, and the last unit, unsharded until its backward."""
    head = plan.blocks[_HEAD]
    return (*plan.persistent, *left_by_earlier(plan), *kept(plan, plan.every_layer, every=True), unsharded(plan, head))


def _head(plan: Plan, x: Widths, vocab: int) -> Iterator[Moment]:
    """The head's backward, beside the last block that is gathered ahead; the final norm's; and their reduction."""
    group, common, matrix = plan.blocks[_HEAD], _above_the_blocks(plan), x.hidden * vocab
    ahead, cast = being_gathered(plan, 1)
    incoming = _logits(x, vocab, "gradient of the logits")
    yield Moment("backward: gathering the last block", Phase.BACKWARD, (*common, ahead, cast, incoming))
    through = flowing(plan, "gradient of the head's input")
    yield Moment("backward of the head", Phase.BACKWARD, (*common, ahead, incoming, through, _made(plan, matrix)))
    before = tuple(0 if at == _HEAD else count for at, count in enumerate(plan.every_layer))
    below = (*plan.persistent, *left_by_earlier(plan), *kept(plan, before, every=True), ahead)
    norm_input, root, _ = _saved_by_head(x)
    made, flow = _made(plan, matrix + x.hidden), flowing(plan, "gradient that flows into the last block")
    norm = (*below, unsharded(plan, group), norm_input, root, through, flow, made)
    yield Moment("backward of the final norm", Phase.BACKWARD, norm)
    reducing = (*below, flow, *_reduced(plan, group))
    yield Moment("backward: reducing the last norm and the head", Phase.BACKWARD, reducing)


def _made(plan: Plan, elements: int) -> Line:
    width = plan.width.compute
    return Line(Kind.UNSHARDED_GRADIENTS, width * elements, "this unit's, made so far", f"{width * elements}", ACCUMULATE)


def _reduced(plan: Plan, group: Group) -> tuple[Line, Line]:
    """A unit's reduce-scatter input, and its gradients while copied in, or then the output."""
    width = plan.width.compute
    both = maximum(width * group.numel, reduce_output_bytes(plan, group))
    formula = f"max({width}·G_{group.symbol}, {reduce_output_bytes(plan, group)})"
    made = Line(Kind.UNSHARDED_GRADIENTS, both, "this unit's while copied in, or the reduce-scatter output", formula, REDUCE)
    return reduce_input(plan, group, "reduce-scatter input of this unit"), made


def _embedding(plan: Plan) -> Iterator[Moment]:
    """The embedding goes backward last; it is unsharded again for that."""
    group, block = plan.blocks[_EMBEDDING], plan.blocks[1]
    common = (*plan.persistent, *plan.head.shared, plan.gradient_shards((0, plan.every_layer[1], 1), "of the units above"))
    above = reduce_input(plan, block, "reduce-scatter input of the first block")
    flow = flowing(plan, "gradient that flows into the embedding")
    entering = (*common, above, flow, unsharded(plan, group), gathered(plan, group, "the embedding's, until it is copied out"))
    yield Moment("backward: unsharding the embedding", Phase.BACKWARD, entering)
    inside = (*common, above, flow, unsharded(plan, group), _made(plan, group.numel))
    yield Moment("backward of the embedding", Phase.BACKWARD, inside)
    yield Moment("backward: reducing the embedding", Phase.BACKWARD, (*common, *_reduced(plan, group)))


def _symbols(plan: Plan) -> Iterator[Symbol]:
    yield Symbol("N", plan.n, "ranks that share one copy")
    yield Symbol("M", plan.several, "1 where earlier micro-batches of the step left gradients, else 0")
    yield Symbol("P", plan.padded, "parameters, each one's dim 0 padded to a multiple of N")
    yield Symbol("R", plan.replicated, "1 with replicas, whose gradients are all-reduced on top, else 0")
    yield Symbol("P_root", plan.root.padded, "of them in the root group: none, all are in units of their own")
    for group, run, n_bytes in zip(plan.blocks, plan.runs, plan.kept, strict=True):
        one = "one block" if run is plan.runs[1] else f"the unit of the {run.name}"
        yield Symbol(f"P_{group.symbol}", group.padded, f"padded parameters of {one}")
        yield Symbol(f"G_{group.symbol}", group.numel, f"parameters of {one} without padding")
        yield Symbol(f"S_{group.symbol}", n_bytes, f"bytes that {one} keeps from its forward to its backward")

"""The lines of an FSDP2 step outside the blocks, all gradients, and the end of the backward."""

from functools import lru_cache

from zeroplan.engines.formulas import product, sized
from zeroplan.engines.fsdp2 import buffers, lines
from zeroplan.engines.fsdp2.groups import Ends, Group
from zeroplan.engines.fsdp2.plan import REDUCE, Plan, fresh, shards_formula, sum_of
from zeroplan.engines.fsdp2.runtime import Runtime
from zeroplan.engines.positions import Position
from zeroplan.engines.sources import ACCUMULATE, INPUT_BUFFER
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, where
from zeroplan.trace import Trace
from zeroplan.transformer.blocks import At, AtEmbedding, BackwardPoint

_REPLICAS = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup._all_reduce_state"
SUM_OF_TIED = "sum of the embedding's and the tied head's gradient"
_SUM = "sum of the embedding's and the tied head's"


# --- gradients of blocks ----------------------------------------------------------------------------------------------


def earlier_shards(plan: Plan) -> tuple[Line, ...]:
    """Return the gradient shards of earlier micro-batches, if each micro-batch is reduced. [bytes]"""
    if not plan.recipe.sync_every_micro_batch:
        return ()
    return (plan.gradient_shards(tuple(0 for _ in plan.blocks), "of earlier micro-batches"),)


def reduced(plan: Plan, layers: tuple[int, ...], outside: tuple[Group, ...] = ()) -> tuple[Line, ...]:
    """Return the results of reducing these layers: shards, and with replicas the tensors that their all-reduce still holds. [bytes]

    The all-reduce's own buffer lives until the backward ends. In the first micro-batch, in the shards' dtype and on the GPU, it
    is the gradient shard itself and costs nothing. Otherwise the shards are a copy of it, or it was added to them, or a step inside
    the backward has dropped them.
    """
    shards = plan.gradient_shards(layers, "reduced so far", outside)
    is_the_shard = plan.reduce_bytes == plan.width.stored and not (plan.offloaded or plan.recipe.fsdp2.step_in_backward)
    if is_the_shard and not plan.recipe.sync_every_micro_batch:
        return (shards,)
    apart = plan.replicated * (plan.several if is_the_shard else 1)
    words = "R·M" if is_the_shard else "R"
    shards_held = shards_formula(plan.reduce_bytes, layers, plan.trained_kinds, outside=sum_of("P", outside))
    alone = isinstance(apart, int) and not apart
    held = 0 if alone else apart * plan.reduce_bytes * plan.trained_shards(layers, outside)
    return (
        shards,
        Line(Kind.REDUCE, held, "all-reduces over replicas, held until backward ends", f"{words}·{shards_held}", _REPLICAS),
    )


def made_in_a_block(plan: Plan, points: tuple[BackwardPoint, ...]) -> list[tuple[Line]]:
    """Return the block's whole gradients at each point of its backward. [bytes]"""
    width, several = plan.width.compute, plan.several if plan.adds_up else 0
    if isinstance(several, int):
        return [_made_in_a_block(width, several, point.gradients, point.current_gradient) for point in points]
    return [_made_in_a_block.__wrapped__(width, several, point.gradients, point.current_gradient) for point in points]


@lru_cache(maxsize=4096)
def _made_in_a_block(width: int, several: Int, made: int, current: int) -> tuple[Line]:
    n_bytes, formula = fresh(width, several, made, current)
    return (Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "this block's, made so far", formula, ACCUMULATE),)


def resharding(plan: Plan, position: Position) -> tuple[Line, ...]:
    """Return the lines while torch 2.15 splits a finished block to its smaller shard, beside its input and its output. [bytes]

    Its first norm may have saved the input. ``fully_shard`` treats a number equal to the ranks as ``True``.
    """
    one, again = plan.passes[position.run], plan.recomputes[position.run]
    inside = (*one.checkpoint_in_backward, *one.saved) if again == "none" else one.kept(again)
    made = buffers.flowing(plan, "this block's output")._replace(kind=Kind.TEMPORARY)
    every = (*inside, made, lines.cut_to_smaller_shards(plan, position.run))
    there = where(plan.n == plan.reshard, 0, 1)
    return every if isinstance(there, int) else tuple(line._replace(n_bytes=line.n_bytes * there) for line in every)


# --- the ending's gradients -------------------------------------------------------------------------------------------


def at_the_ending(plan: Plan, point: BackwardPoint) -> Line:
    """Return the root group's gradients during the backward of loss, head and final norm. [bytes]

    Liger's loss makes the head's gradient in its forward. It reaches the parameter after the loss's backward.
    """
    waiting = plan.waiting_elements if point.gradients else 0
    if plan.recipe.loss == "fused" and point.place.at is At.LOSS:
        waiting = point.gradients
    current = 0 if waiting else point.current_gradient
    return buffers.root_gradients(plan, point.gradients - waiting, current, waiting=waiting)


def made_by_the_ending(plan: Plan) -> tuple[Line, ...]:
    """Return the output of final norm and head: logits, or for a chunked loss the norm's output, first in fp32. [bytes]"""
    if plan.recipe.loss != "chunked" or plan.chunks_apart:
        return plan.head.output
    normal = plan.head.hidden_bytes // plan.width.compute * 4
    line = buffers.flowing(plan, "output of the final norm")._replace(kind=Kind.TEMPORARY)
    wide = sized(Kind.TEMPORARY, 1, normal, "output of the final norm in fp32", line.source)
    return line, wide


def cast_of(plan: Plan, point: BackwardPoint) -> Line:
    """Return the head's gradient from one chunk of the loss, cast on arrival. [bytes]"""
    reason = "the head's gradient from a chunk, cast"
    return sized(Kind.UNSHARDED_GRADIENTS, plan.reduce_bytes, point.current_gradient, reason, buffers.CAST)


def made_before_blocks(plan: Plan) -> Line:
    """Return the root group's gradients when the blocks' backward begins. [bytes]"""
    made = plan.tail_elements + plan.tied_head_elements - plan.waiting_elements
    return buffers.root_gradients(plan, made, waiting=plan.waiting_elements)


def backward_of_the_projector(plan: Plan, trace: Trace) -> None:
    """Begin a vision tower's backward, which runs between the text's blocks and the embedding, whose output gradient waits.

    By then the projector has made its gradients, which here include the patch embedding's.
    """
    made = plan.tail_elements + plan.tied_head_elements - plan.waiting_elements + plan.projector_elements
    trace.shrink("root gradients", buffers.root_gradients(plan, made, waiting=plan.waiting_elements), *buffers.cast_early(plan))
    trace.put("waiting", buffers.flowing(plan, "gradient of the embedding's output, which waits for the vision tower's"))


# --- the embedding ----------------------------------------------------------------------------------------------------


def shared_at_embedding(plan: Plan) -> tuple[Line, ...]:
    """Return the tables of all blocks that are alive in the embedding's backward."""
    if plan.at_embedding is not None or plan.shared_sequences or plan.head.below:
        return plan.head.at_embedding
    return plan.head.shared if plan.head.below_blocks or plan.loss_in_loop else ()


def backward_of_the_embedding(plan: Plan, trace: Trace) -> None:
    """Write the embedding's gradient and, for a tied head, the sum of both gradients.

    Autograd adds in place only to a tensor that nothing else refers to. The head's gradient is a transposed view, which refers
    to its base. Liger's is no view.
    """
    flow = buffers.flowing(plan, "gradient that flows into the embedding")
    if plan.at_embedding is not None:
        of_a_split_embedding(plan, plan.at_embedding, trace, plan.trained_root.numel + plan.tied_head_elements)
        return
    above = plan.tied_head_elements - plan.waiting_elements
    moments = [
        (point.lines, plan.tail_elements + above + point.gradients, point.current_gradient) for point in plan.head.below
    ] or [((flow,), plan.trained_root.numel + above, plan.embedding_elements)]
    trace.drop("waiting")
    for passing, made, current in moments:
        trace.at("backward of the embedding", Phase.BACKWARD)
        trace.put("below", *plan.head.below_blocks)
        parts = buffers.root_gradients(plan, made, current, waiting=plan.waiting_elements)
        trace.put("root gradients", parts, *buffers.cast_early(plan))
        trace.pass_by(*passing)
    if plan.sums_tied:
        trace.at(SUM_OF_TIED, Phase.BACKWARD)
        trace.pass_by(_sum(plan))
    trace.drop("below")


def _sum(plan: Plan) -> Line:
    return sized(Kind.UNSHARDED_GRADIENTS, plan.width.compute, plan.waiting_elements, _SUM, INPUT_BUFFER)


def summed_up(at: AtEmbedding) -> tuple[Line, Line]:
    """Return a rank's part of a vocabulary-parallel embedding's output, before the reduce-scatter along the sequence. [bytes]"""
    reason = "token embeddings that this rank has, of the whole sequence"
    return at.gathered._replace(kind=Kind.TEMPORARY, reason=reason), at.by_rank._replace(kind=Kind.TEMPORARY)


def of_a_split_embedding(plan: Plan, at: AtEmbedding, trace: Trace, root: int) -> None:
    """Write a vocabulary-parallel embedding's backward: gather its output's gradient, make the whole gradient, take the shard.

    ``root``: elements of all gradients of the root group.
    """
    waiting, flow = plan.waiting_elements, buffers.flowing(plan, "gradient that flows into the embedding")
    whole = at.whole._replace(kind=Kind.TEMPORARY) if waiting else at.whole  # untied, the parameter gets it
    if root:
        made = root - waiting - plan.embedding_elements
        trace.put("root gradients", buffers.root_gradients(plan, made, waiting=waiting), *buffers.cast_early(plan))
    trace.at("backward of the embedding: gathering", Phase.BACKWARD)
    trace.put("gathered gradient", at.gathered)
    trace.pass_by(at.by_rank, flow)
    trace.at("backward of the embedding", Phase.BACKWARD)
    trace.put("whole gradient", whole)
    trace.drop("gathered gradient")
    width, own = plan.width.compute, plan.embedding_elements
    share = sized(Kind.UNSHARDED_GRADIENTS, width, own, "this rank's share of it", REDUCE)
    trace.at("backward of the embedding: this rank's share", Phase.BACKWARD)
    trace.put("share", share)
    if waiting:
        trace.at(SUM_OF_TIED, Phase.BACKWARD)
        trace.put("sum", share._replace(reason=_SUM, source=INPUT_BUFFER))
    trace.drop("share", "sum", "whole gradient")


def not_reduced(plan: Plan) -> tuple[Moment, ...]:
    """Return the embedding's backward in a micro-batch under ``no_sync``: the second or a later one, except the step's last."""
    if plan.recipe.sync_every_micro_batch or plan.at_embedding is not None:
        return ()
    last = _sum(plan) if plan.sums_tied else buffers.flowing(plan, "gradient that flows into the embedding")
    name = "backward of the embedding, gradients not to be reduced yet"
    (blocks,) = plan.left_behind(plan.every_layer)
    unsharded, held = buffers.outside_unsharded(plan), (*plan.persistent, *buffers.output(plan))
    if plan.ends is None:
        alive = (*held, *unsharded, blocks, _root_not_reduced(plan), last)
    else:
        alive = (*held, unsharded[0], blocks, _ends_not_reduced(plan, plan.ends), last)
    return (Moment(name, Phase.BACKWARD, (*alive, *plan.head.ahead.left)),)


def _root_not_reduced(plan: Plan) -> Line:
    """Return the root group's gradients at that moment: earlier micro-batches' and this one's. [bytes]"""
    width, tied = plan.width.compute, plan.tied_head_elements
    root = sum(group.numel for group in plan.trained_outside)
    if plan.cast_on_arrival:
        return _cast_not_reduced(plan, root)
    earlier = plan.embedding_elements - tied + plan.waiting_elements if plan.adds_up else root
    each = width if plan.adds_up else plan.reduce_bytes
    formula = f"{product(each, earlier)}·M_2 + {product(width, root + tied)}"
    n_bytes = plan.twice * each * earlier + width * (root + tied)
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "root group's, of this micro-batch and of earlier ones", formula, ACCUMULATE)


def _ends_not_reduced(plan: Plan, ends: Ends) -> Line:
    """Return the same for separate units: the head's accumulated, and the embedding's with its new one. [bytes]"""
    wide, width, new = plan.reduce_bytes, plan.width.compute, ends.trained_embedding.numel
    formula = f"{product(wide, ends.trained_head.numel)} + {product(wide, new)}·M_2 + {product(width, new)}"
    n_bytes = wide * ends.trained_head.numel + plan.twice * wide * new + width * new
    reason = "embedding's and head's, of this micro-batch and of earlier ones"
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, reason, formula, ACCUMULATE)


def _cast_not_reduced(plan: Plan, root: int) -> Line:
    """Return the same in the reduction's dtype, with the embedding's new gradient and the waiting one of a tied head."""
    width, wide, new = plan.width.compute, plan.reduce_bytes, plan.embedding_elements - plan.waiting_elements
    again = 2 * width * plan.waiting_elements
    formula = f"{product(wide, root)} + {product(width, new)} + {again}·M_2"
    n_bytes = wide * root + width * new + plan.twice * again
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "root group's, with the one that is being added", formula, buffers.CAST)


# --- the root group ---------------------------------------------------------------------------------------------------


def reduce_root(plan: Plan, trace: Trace, run: Runtime) -> None:
    """Write the root group's reduction, the last one. A local of ``foreach_reduce`` holds its last gradient until it returns."""
    trace.at("backward: reducing the root group", Phase.BACKWARD)
    run.drop_reduce_inputs()
    width, formula = lines.copied_width(plan)
    root, symbol = plan.trained_root, plan.trained_root.symbol
    reason = "root group's while copied in"
    copied = Line(Kind.UNSHARDED_GRADIENTS, width * root.numel, reason, f"{formula}·G_{symbol}", REDUCE)
    trace.put("made", copied, *buffers.cast_early(plan))
    trace.put("reduce input", buffers.reduce_input(plan, root, "reduce-scatter input of the root group"))
    trace.drop("made")
    trace.at("backward: root group reduced", Phase.BACKWARD)
    out = f"{buffers.reduce_output_width(plan)}·P_{symbol}/N"
    reason = "reduce-scatter output of the root group"
    trace.put("output of the root", Line(Kind.REDUCE, buffers.reduce_output_bytes(plan, root), reason, out, REDUCE))
    if not plan.of_torch_2_15:
        trace.put("still named", lines.still_named(plan, plan.last_root_elements, "root group's last one"))
    trace.put("stepping", *plan.stepping(in_block=False))

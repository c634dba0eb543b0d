"""FSDP2 going backward: the next block gathered ahead, each block's gradients reduced while the one below computes."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2.buffers import (
    CAST,
    GATHER,
    POST_FORWARD,
    cast_alone,
    cast_early,
    flowing,
    gathered,
    gathered_below,
    kept,
    last_gathered,
    output,
    reduce_input,
    reduce_output_bytes,
    reduce_output_width,
    root_gradients,
    root_unsharded,
    smaller_shard,
    still_unsharded,
    unsharded,
)
from zeroplan.engines.fsdp2.forward import left_by_earlier
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import REDUCE, Plan, shards_formula
from zeroplan.engines.positions import Position
from zeroplan.engines.sources import ACCUMULATE, INPUT_BUFFER
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, maximum, where
from zeroplan.transformer.blocks import At, BackwardPoint

IN_VAIN = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup.finalize_backward"
_REPLICAS = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup._all_reduce_state"


def after_the_loss(plan: Plan) -> Iterator[Moment]:
    """The backward of the loss, the head and the final norm; the last block is gathered ahead of its backward.

    A chunked loss goes backward by itself, before the model's own backward begins and anything is gathered.
    """
    last = plan.blocks[-1]
    common = (
        *plan.persistent,
        *left_by_earlier(plan),
        root_unsharded(plan),
        *kept(plan, plan.every_layer, every=True),
        *still_unsharded(plan, plan.every_layer),
        *output(plan),
    )
    ahead = () if plan.reshard is False else (last_gathered(plan, last, "the last block, gathered ahead of its backward"),)
    for point in plan.head.points:
        by_itself = plan.recipe.loss == "chunked" and point.place.at is not At.FINAL_NORM
        early = cast_early(plan, normed=point.place.at is At.FINAL_NORM)
        yield Moment(
            f"backward of the {point.name}",
            Phase.LOSS if point.place.at is At.LOSS else Phase.BACKWARD,
            (*common, *(() if by_itself else ahead), _at_the_head(plan, point), *early, *point.lines),
        )
        if by_itself and point.current_gradient and plan.cast_on_arrival:
            lines = (*common, _at_the_head(plan, point), *early, _cast_of(plan, point), *point.handed_on)
            yield Moment(f"backward of the {point.name}: cast of its gradient", Phase.BACKWARD, lines)


def _cast_of(plan: Plan, point: BackwardPoint) -> Line:
    n_bytes, formula = plan.reduce_bytes * point.current_gradient, product(plan.reduce_bytes, point.current_gradient)
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "the head's gradient from a chunk, cast", formula, CAST)


def _at_the_head(plan: Plan, point: BackwardPoint) -> Line:
    """The root group's gradients while loss, head and final norm go backward.

    Liger's loss has made the head's in its forward; it reaches the parameter when the loss's backward is over.
    """
    waiting = plan.waiting_elements if point.gradients else 0
    if plan.recipe.loss == "fused" and point.place.at is At.LOSS:
        waiting = point.gradients
    return root_gradients(plan, point.gradients - waiting, 0 if waiting else point.current_gradient, waiting=waiting)


def backward(plan: Plan) -> Iterator[Moment]:
    """Each block where memory can peak: while it is unsharded, at each of its points, while it is reduced."""
    always, runs = _always(plan), tuple(_of_run(plan, run) for run in range(len(plan.runs)))
    for position in reversed(plan.corners):
        here = runs[position.run]
        if not here.inside:
            continue  # no gradient reaches it
        common = (*always, *_as_far_as(plan, position))
        waiting = (*(() if position.next_run is None else (runs[position.next_run].reduced_above,)), *here.left_behind)
        below = gathered_below(plan, position)
        computing = (*common, *waiting, here.unsharded, *below, *here.checkpoint)
        yield _unsharding(plan, position, (*common, *waiting, here.unsharded))
        for point, lines in here.inside:
            yield Moment(_point_of(position.name, point), Phase.BACKWARD, (*computing, *lines))
        yield from _reducing(plan, position, (*common, *below))


class _OfRun(NamedTuple):
    """What is the same at every block of a run."""

    inside: tuple[tuple[str, tuple[Line, ...]], ...]
    """Its points, with what is alive of it there."""
    unsharded: Line
    reduced_above: Line
    """Its reduce-scatter input, while the block below goes backward."""
    left_behind: tuple[Line, ...]
    """Its gradients of earlier micro-batches."""
    checkpoint: tuple[Line, ...]


def _of_run(plan: Plan, run: int) -> _OfRun:
    group, trained, one, again = plan.blocks[run], plan.trained_blocks[run], plan.passes[run], plan.recomputes[run]
    return _OfRun(
        tuple(_inside(plan, point) for point in one.points),
        unsharded(plan, group),
        reduce_input(plan, trained, "reduce-scatter input of the block above"),
        plan.left_behind(tuple(int(other == run) for other in range(len(plan.blocks))), root=False),
        () if again == "none" else one.checkpoint_in_backward,
    )


def _always(plan: Plan) -> tuple[Line, ...]:
    """Alive during the whole backward pass of every block."""
    made = root_gradients(plan, _made_before_blocks(plan), waiting=plan.waiting_elements)
    return (*plan.persistent, root_unsharded(plan), made, *cast_early(plan), *output(plan))


def _as_far_as(plan: Plan, position: Position) -> tuple[Line, ...]:
    """Alive during the whole backward pass of one block: what the blocks above have left, and those below."""
    return (
        *_reduced(plan, position.after),
        *plan.left_behind(position.before),
        *kept(plan, position.before),
        *still_unsharded(plan, position.before),
    )


def _made_before_blocks(plan: Plan) -> int:
    """Elements of the root group's gradients that have come to their parameters when the blocks begin."""
    return plan.tail_elements + plan.tied_head_elements - plan.waiting_elements


def _reduced(plan: Plan, layers: tuple[int, ...]) -> tuple[Line, ...]:
    """What the reduction of these layers has produced: shards, and with replicas what their all-reduce still holds.

    The all-reduce's own buffer stays until the end of backward. It is the shard of the gradients itself, and costs nothing, in
    the first micro-batch, in the shards' dtype, on the GPU; elsewhere the shards are a copy of it, or it was added to them.
    """
    shards = plan.gradient_shards(layers, "of the blocks above")
    is_the_shard = plan.reduce_bytes == plan.width.stored and not plan.offloaded
    if is_the_shard and not plan.recipe.sync_every_micro_batch:
        return (shards,)
    apart = plan.replicated * (plan.several if is_the_shard else 1)
    formula = _replicas_formula("R·M" if is_the_shard else "R", plan.reduce_bytes, layers, plan.trained_kinds)
    held = apart * plan.reduce_bytes * plan.trained_shards(layers)
    return (shards, Line(Kind.REDUCE, held, "all-reduces over replicas, held until backward ends", formula, _REPLICAS))


@lru_cache(maxsize=4096)
def _replicas_formula(where_apart: str, width: int, layers: tuple[int, ...], kinds: tuple[str, ...]) -> str:
    return f"{where_apart}·{shards_formula(width, layers, kinds, root='')}"


def _unsharding(plan: Plan, position: Position, alive: tuple[Line, ...]) -> Moment:
    """Parameters are copied out of the all-gather buffer; then the all-gather of the block below is issued."""
    group, one = plan.blocks[position.run], plan.passes[position.run]
    lines = (
        *alive,
        *_own_buffer_then_the_next(plan, position, group),
        *cast_alone(plan, group),
        *one.kept(plan.recomputes[position.run]),
        flowing(plan, "gradient that flows into this block"),
    )
    return Moment(f"backward: unsharding {position.name}", Phase.BACKWARD, lines)


def _own_buffer_then_the_next(plan: Plan, position: Position, group: Group) -> tuple[Line, ...]:
    if plan.reshard is False:
        return ()
    if group.experts is not None:
        from zeroplan.engines.fsdp2 import experts  # noqa: PLC0415  the others' answers need not wait for it

        return experts.own_buffers_then_the_next(plan, position)
    buffer = gathered(plan, group, "this block's, until it is copied out")
    cut, cut_formula = _smaller_shard_of(plan, group)
    if position.previous_run is None:
        return (buffer, *_own_smaller_shard(plan, group))
    below = plan.blocks[position.previous_run]
    cast, cast_formula = _to_gather(plan, position.previous_run)
    ahead = maximum(buffer.n_bytes + cut, plan.gathers * (plan.width.compute * below.padded + cast))
    own, other = f"{plan.width.compute}·P_{group.symbol}", f"{plan.width.compute}·P_{below.symbol}"
    formula = f"max({own}{cut_formula}, {other}{cast_formula})·min(1, N-1)"
    return (Line(Kind.GATHER, ahead, "this block's, then the next one's with its cast input", formula, GATHER),)


def _smaller_shard_of(plan: Plan, group: Group) -> tuple[Int, str]:
    """Bytes of a block's smaller shard, which is there until the block is copied out, and how a sum writes them."""
    if isinstance(plan.reshard, bool):
        return 0, ""
    return plan.width.compute * smaller_shard(plan, group), f" + {plan.width.compute}·Q_{group.symbol}"


def _own_smaller_shard(plan: Plan, group: Group) -> tuple[Line, ...]:
    n_bytes, formula = _smaller_shard_of(plan, group)
    if not formula:
        return ()
    reason = "this block's smaller shard, until it is copied out"
    return (Line(Kind.UNSHARDED_PARAMETERS, n_bytes, reason, formula.removeprefix(" + "), POST_FORWARD),)


def _to_gather(plan: Plan, run: int) -> tuple[Int, str]:
    """Bytes of what goes into the all-gather of a block in backward, and how a sum writes them.

    A cast copy, or one from host memory; a smaller shard is cast already and on the GPU, but copied where dtypes are mixed.
    """
    width, copied = plan.width.compute, plan.blocks[run] if plan.cast_too else plan.trained_blocks[run]
    of_shard: Int = width * copied.shard if plan.width.mixed or plan.offloaded else 0
    if isinstance(plan.reshard, bool):
        return of_shard, f" + {width}·P_{copied.symbol}/N" if plan.width.mixed or plan.offloaded else ""
    mixed = plan.width.mixed and not plan.offloaded
    of_smaller: Int = width * smaller_shard(plan, copied) if mixed else 0
    return where(plan.n == plan.reshard, of_shard, of_smaller), f" + {width}·Q_{copied.symbol}" if mixed else ""


def _inside(plan: Plan, point: BackwardPoint) -> tuple[str, tuple[Line, ...]]:
    """A point of a block and what is alive of it there, wherever among its like the block stands."""
    n_bytes, formula = plan.fresh(point.gradients, point.current_gradient)
    made = Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "this block's, made so far", formula, ACCUMULATE)
    return point.name, (*point.lines, made)


@lru_cache(maxsize=4096)
def _point_of(block: str, point: str) -> str:
    return f"backward of {block}: {point}"


def _reducing(plan: Plan, position: Position, alive: tuple[Line, ...]) -> Iterator[Moment]:
    """Gradients are copied into the reduce-scatter input; then the output joins the input, the gradients gone."""
    group = plan.trained_blocks[position.run]
    keeps_no_input = plan.recomputes[position.run] == "none" or plan.recipe.offload_activations
    if (
        position.previous_run is None and plan.trained_root is plan.root
    ):  # what blocks alone need has gone with the last of them
        alive, keeps_no_input = tuple(line for line in alive if not any(line is one for one in plan.head.with_blocks)), True
    beside = (
        flowing(plan, "gradient that flows out of this block"),
        *(() if keeps_no_input else plan.passes[position.run].checkpoint),
    )
    if group.experts is not None:
        from zeroplan.engines.fsdp2 import experts  # noqa: PLC0415  the others' answers need not wait for it

        widths = reduce_output_width(plan), *_copied_width(plan)
        yield from experts.reducing(plan, position, (*alive, *beside), widths)
        return
    lines = (
        *alive,
        reduce_input(plan, group, "reduce-scatter input of this block"),
        _copied_in_or_reduced(plan, group),
        *beside,
    )
    yield Moment(f"backward: reducing {position.name}", Phase.BACKWARD, lines)


def _copied_in_or_reduced(plan: Plan, group: Group) -> Line:
    made = maximum(_gradients_to_copy(plan, group), reduce_output_bytes(plan, group))
    formula = _larger(_to_copy_formula(plan, group), _output_formula(plan, group))
    return Line(Kind.UNSHARDED_GRADIENTS, made, "this block's while copied in, or the reduce-scatter output", formula, REDUCE)


@lru_cache(maxsize=256)
def _larger(one: str, other: str) -> str:
    return f"max({one}, {other})"


def _output_formula(plan: Plan, group: Group) -> str:
    return _per_rank(reduce_output_width(plan), group.symbol)


@lru_cache(maxsize=256)
def _per_rank(width: int, symbol: str) -> str:
    return f"{width}·P_{symbol}/N"


def _to_copy_formula(plan: Plan, group: Group) -> str:
    accumulated = None if plan.recipe.sync_every_micro_batch else plan.reduce_bytes
    return _gradients_formula(plan.width.compute, accumulated, group.symbol)


@lru_cache(maxsize=256)
def _gradients_formula(width: int, accumulated: int | None, symbol: str) -> str:
    return f"{width}·G_{symbol}" if accumulated in (None, width) else f"({accumulated}·M + {width}·(1-M))·G_{symbol}"


def _gradients_to_copy(plan: Plan, group: Group) -> Int:
    """What the copy reads: this micro-batch's gradients, or the accumulated ones that have taken them up."""
    return _copied_width(plan)[0] * group.numel


def _copied_width(plan: Plan) -> tuple[Int, str]:
    """Bytes of an element that the copy reads, and their formula."""
    compute, reduced = plan.width.compute, plan.reduce_bytes
    if plan.recipe.sync_every_micro_batch or reduced == compute:
        return compute, f"{compute}"
    return where(plan.several > 0, reduced, compute), f"({reduced}·M + {compute}·(1-M))"


def _at_the_embedding(plan: Plan, common: tuple[Line, ...]) -> Iterator[Moment]:
    """The embedding's gradient and, where its table is the head too, the sum of both.

    Autograd adds in place only to a tensor that nothing else refers to; the head's gradient is a transposed view, which refers
    to what it is a view of. Liger's is none.
    """
    flow = flowing(plan, "gradient that flows into the embedding")
    waiting = plan.waiting_elements
    if plan.at_embedding is not None:
        from zeroplan.engines.fsdp2.split import at_the_split_embedding  # noqa: PLC0415  as all of tensor parallelism

        yield from at_the_split_embedding(plan, plan.at_embedding, common, flow)
        return
    alive = (
        *common,
        *plan.left_behind(tuple(0 for _ in plan.blocks)),
        root_unsharded(plan),
        *cast_early(plan),
        reduce_input(plan, plan.trained_blocks[_first_reached(plan)], "reduce-scatter input of the first block"),
        *((*plan.head.shared, *plan.head.below_blocks) if plan.head.below_blocks else ()),
    )
    made = plan.trained_root.numel + plan.tied_head_elements - waiting
    parts = root_gradients(plan, made, plan.embedding_elements, waiting=waiting)
    yield Moment("backward of the embedding", Phase.BACKWARD, (*alive, parts, flow))
    summed = waiting and plan.recipe.loss == "full"
    if summed:
        yield Moment("sum of the embedding's and the tied head's gradient", Phase.BACKWARD, (*alive, parts, _sum(plan)))
    if not plan.recipe.sync_every_micro_batch:
        last = _sum(plan) if summed else flow
        lines = (*plan.persistent, root_unsharded(plan), *_not_reduced(plan), last)
        yield Moment("backward of the embedding, gradients not to be reduced yet", Phase.BACKWARD, lines)


def _sum(plan: Plan) -> Line:
    n_bytes, formula = plan.width.compute * plan.waiting_elements, product(plan.width.compute, plan.waiting_elements)
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "sum of the embedding's and the tied head's", formula, INPUT_BUFFER)


def _not_reduced(plan: Plan) -> Iterator[Line]:
    """Gradients at the embedding in a micro-batch under ``no_sync``, of which a step has several: the second and later ones.

    Those of the blocks are whole and added up; of the root group there are those of earlier micro-batches and this one's.
    """
    (blocks,) = plan.left_behind(plan.every_layer, root=False)
    yield blocks
    width, root, tied = plan.width.compute, plan.trained_root.numel, plan.tied_head_elements
    if plan.cast_on_arrival:
        yield _cast_not_reduced(plan, root)
        return
    earlier = plan.embedding_elements - tied + plan.waiting_elements if plan.adds_up else root
    each = width if plan.adds_up else plan.reduce_bytes
    formula = f"{product(each, earlier)}·M_2 + {product(width, root + tied)}"
    n_bytes = plan.twice * each * earlier + width * (root + tied)
    yield Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "root group's, of this micro-batch and of earlier ones", formula, ACCUMULATE)


def _cast_not_reduced(plan: Plan, root: int) -> Line:
    """The root group's in the reduction's dtype, and the embedding's that just came, with what waits of a tied head's."""
    width, wide, new = plan.width.compute, plan.reduce_bytes, plan.embedding_elements - plan.waiting_elements
    again = 2 * width * plan.waiting_elements
    formula = f"{product(wide, root)} + {product(width, new)} + {again}·M_2"
    n_bytes = wide * root + width * new + plan.twice * again
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "root group's, with the one that is being added", formula, CAST)


def _first_reached(plan: Plan) -> int:
    """The run of the lowest block that a gradient reaches."""
    return next(at for at, one in enumerate(plan.passes) if one.points)


def _gathered_in_vain(plan: Plan) -> tuple[Line, ...]:
    """The block below the lowest that a gradient reaches: gathered ahead, it is dropped when the root group has been reduced."""
    reached = _first_reached(plan)
    if not reached or plan.reshard is False:
        return ()
    return (gathered(plan, plan.blocks[reached - 1], "a frozen block, gathered ahead of a backward that it has not", IN_VAIN),)


def end_of_backward(plan: Plan) -> Iterator[Moment]:
    """The embedding's gradient, then the reduction of the root group."""
    root = plan.trained_root
    common = (*plan.persistent, *_reduced(plan, plan.every_layer), *_gathered_in_vain(plan), *output(plan))
    if plan.shared_sequences:
        common = (*common, *plan.head.at_embedding)
    yield from _at_the_embedding(plan, common)
    if not root.numel:
        return
    copy = reduce_input(plan, root, "reduce-scatter input of the root group")
    made = Line(
        Kind.UNSHARDED_GRADIENTS,
        _gradients_to_copy(plan, root),
        "root group's while copied in",
        _to_copy_formula(plan, root),
        REDUCE,
    )
    yield Moment("backward: reducing the root group", Phase.BACKWARD, (*common, made, *cast_early(plan), copy))
    out = _output_formula(plan, root)
    reduced = Line(Kind.REDUCE, reduce_output_bytes(plan, root), "reduce-scatter output of the root group", out, REDUCE)
    still = () if plan.of_torch_2_15 else (_still_named(plan),)
    yield Moment("backward: root group reduced", Phase.BACKWARD, (*common, *still, copy, reduced))


def _still_named(plan: Plan) -> Line:
    """A local of ``foreach_reduce``, which only a loop over several ranks' chunks sets."""
    named, width = plan.last_root_elements, plan.width.compute
    formula = f"{product(width, named)}·min(1, N-1)"
    reason = "root group's last one, still named"
    return Line(Kind.UNSHARDED_GRADIENTS, plan.gathers * width * named, reason, formula, REDUCE)

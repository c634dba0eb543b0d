"""The moments of a micro-batch's backward through a stage."""

from collections.abc import Iterator

from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.pipeline.lines import (
    accumulated,
    flowing_line,
    gathered,
    in_elements,
    kept_before,
    kept_of_all,
    made_line,
    parked_line,
    plus,
    root_gradients,
    unsharded_parameters,
)
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.pipeline.tensor import at_the_split_embedding, whole_embedding
from zeroplan.engines.pipeline.waiting import Rank
from zeroplan.engines.pipeline.walk import State
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, maximum
from zeroplan.transformer.blocks import At, BackwardPoint
from zeroplan.transformer.families.norms import AT_MLP_NORM


def backward(rank: Rank, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """Every moment of the pass at which memory can be highest."""
    stage = rank.stages[state.chunk]
    plan = stage.plan._replace(several=state.earlier[state.chunk])
    if stage.stage.is_last:
        yield from _after_the_loss(stage, plan, state, common)
    insides = tuple(tuple((point, plan.fresh(point.gradients, point.current_gradient)[0]) for point in one.points)
                    for one in plan.passes)  # fmt: skip
    for position in reversed(stage.positions):
        alive = (
            *common,
            *_gradients_so_far(plan, position, earlier=bool(state.earlier[state.chunk])),
            *_in_backward(plan, position, whole=state.whole[state.chunk]),
            *kept_before(stage, position),
        )
        if plan.reshard and not state.whole[state.chunk]:
            yield _unsharding(stage, position, alive)
        recomputed = plan.passes[position.run].checkpoint_in_backward if plan.recomputed else ()
        recomputed = recomputed if position.layer else stage.at_its_beginning(recomputed)
        yield from _at_points(stage, position, (*alive, *recomputed), insides[position.run])
        yield _accumulating(stage, plan, position, alive, first=not state.earlier[state.chunk])
    yield from _end_of_backward(stage, plan, state, common)


def _gradients_so_far(plan: Plan, position: Position, *, earlier: bool) -> Iterator[Line]:
    """Whole gradients: of all micro-batches before, or of the blocks above in this first one; the head's come at the end."""
    yield accumulated(plan, plan.every_layer if earlier else position.after, root=earlier)
    yield root_gradients(plan, plan.tail_elements)


def _in_backward(plan: Plan, position: Position, *, whole: bool) -> Iterator[Line]:
    """A stage that has gone backward stays unsharded; blocks that were sharded after their forward are gathered one ahead."""
    if whole or not plan.reshard:
        yield unsharded_parameters(plan, plan.every_layer, "this stage's parameters, unsharded")
        return
    yield unsharded_parameters(
        plan, plus(position.after, position.run), "this stage's parameters, unsharded again from the last block on"
    )
    if position.previous_run is not None:
        yield gathered(plan, plan.blocks[position.previous_run], "the block below, gathered ahead of its backward")


def _unsharding(stage: StagePlan, position: Position, alive: tuple[Line, ...]) -> Moment:
    """A block's parameters are copied out of its own buffer, before the block below is gathered ahead."""
    plan = stage.plan
    own = gathered(plan, plan.blocks[position.run], "this block's, until it is copied out")
    kept_here = plan.passes[position.run].kept(plan.recipe.recompute)
    kept_here = kept_here if position.layer else stage.at_its_beginning(kept_here)
    coming_in = int(position.next_run is not None or stage.stage.is_last)
    flow = flowing_line(stage, "gradient that flows into this block", coming_in)
    others = tuple(line for line in alive if line.kind is not Kind.GATHER)
    buffer = own
    if plan.blocks[position.run].experts is not None:
        from zeroplan.engines.pipeline import experts  # noqa: PLC0415  the others' answers need not wait for it

        buffer = experts.gathered_ahead(plan, position)
    elif position.previous_run is not None:
        n_bytes = maximum(own.n_bytes, _below(plan, position.previous_run))
        buffer = in_elements(own._replace(n_bytes=n_bytes), plan.width.compute)
    return Moment(f"backward: unsharding {position.name}", Phase.BACKWARD, (*others, buffer, *kept_here, flow))


def _below(plan: Plan, run: int) -> Int:
    """The buffer of the block below, and the cast copy that goes into it. [bytes]"""
    below, width = plan.blocks[run], plan.width.compute
    return plan.gathers * (width * below.padded + (width * below.shard if plan.width.mixed else 0))


def _at_points(
    stage: StagePlan, position: Position, alive: tuple[Line, ...], inside: tuple[tuple[BackwardPoint, Int], ...]
) -> Iterator[Moment]:
    coming_in, adding = position.next_run is None, False
    for point, fresh in inside:
        coming_in = coming_in and (point.place == AT_MLP_NORM or not adding)
        adding = adding or point.place == AT_MLP_NORM
        here = stage.at_its_end(point.lines) if coming_in else point.lines
        here = here if position.layer else stage.at_its_beginning(here)
        made = made_line(stage.plan, fresh, "this block's, made so far")
        yield Moment(f"backward of {position.name}: {point.name}", Phase.BACKWARD, (*alive, *here, made))


def _accumulating(stage: StagePlan, plan: Plan, position: Position, alive: tuple[Line, ...], *, first: bool) -> Moment:
    """A block's gradients come to those of earlier micro-batches, or become the first in the reduction's dtype."""
    made = taken_up(plan, sizes_of_block(plan, position.run), first=first)
    flow = flowing_line(stage, "gradient that flows out of this block")
    checkpoint = plan.passes[position.run].checkpoint if plan.recomputed else ()
    checkpoint = checkpoint if position.layer else stage.at_its_beginning(checkpoint)
    return Moment(f"backward: gradients of {position.name}", Phase.BACKWARD, (*alive, made, flow, *checkpoint))


def sizes_of_block(plan: Plan, run: int) -> tuple[int, ...]:
    """Elements of each parameter of a block."""
    return tuple(parameter.numel for parameter in plan.runs[run].parameters)


def taken_up(plan: Plan, sizes: tuple[int, ...], *, first: bool) -> Line:
    """Gradients of one group, cast one by one where they are the first and the reduction's dtype is wider."""
    here, there = plan.width.compute, plan.reduce_bytes
    n_bytes = here * sum(sizes)
    if here == there:
        n_bytes = n_bytes if first else 0
    elif first:
        n_bytes = _highest_cast(sizes, here, there)
    return made_line(plan, n_bytes, "this micro-batch's, cast one by one or added to earlier ones")


def _highest_cast(sizes: tuple[int, ...], here: int, there: int) -> int:
    """Most bytes while tensors in one width become tensors in another, in order."""
    most, done, left = 0, 0, sum(sizes)
    for size in sizes:
        done += size
        most = max(most, there * done + here * left)
        left -= size
    return most


def _after_the_loss(stage: StagePlan, plan: Plan, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    whole = state.whole[state.chunk] or not plan.reshard
    layers = plan.every_layer if whole else tuple(0 for _ in plan.blocks)
    ahead = () if whole else (parked_line(plan, plan.blocks[-1], "the last block, gathered ahead of its backward"),)
    earlier = (accumulated(plan, plan.every_layer, root=True),) if state.earlier[state.chunk] else ()
    alive = (*common, *earlier, unsharded_parameters(plan, layers, "this stage's parameters, unsharded"), *kept_of_all(stage))
    for point in plan.head.points:
        made = root_gradients(plan, point.gradients, point.current_gradient)
        if point.place.at is At.LOSS:
            yield Moment("backward of the loss", Phase.LOSS, (*alive, made, *point.lines))
        else:
            yield Moment(f"backward of the {point.name}", Phase.BACKWARD, (*alive, *ahead, made, *point.lines))


def _end_of_backward(stage: StagePlan, plan: Plan, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """The embedding's gradient, then those of the embedding, or of final norm and head, come to earlier ones."""
    if not plan.root.numel:
        return
    earlier = bool(state.earlier[state.chunk])
    flow = flowing_line(stage, "gradient that flows out of the first block")
    unsharded = unsharded_parameters(plan, plan.every_layer, "this stage's parameters, unsharded")
    alive = (*common, accumulated(plan, plan.every_layer, root=earlier), unsharded)
    if plan.at_embedding is not None:
        yield from at_the_split_embedding(plan.at_embedding, alive, flow)
        flow = flowing_line(stage, "gradient that flows out of the first block", 0)
    elif stage.stage.is_first:
        fresh = plan.width.compute * plan.root.numel
        made = made_line(plan, fresh, "the embedding's of this micro-batch")
        yield Moment("backward of the embedding", Phase.BACKWARD, (*alive, made, flow))
        flow = flowing_line(stage, "gradient that flows out of the first block", 0)
    sizes = tuple(one.numel for one in plan.parameters if one.name in root_names(plan))
    sizes = (sizes[0] + whole_embedding(plan), *sizes[1:])
    made = taken_up(plan, sizes, first=not earlier)
    yield Moment("backward: gradients of the root group", Phase.BACKWARD, (*alive, made, flow))


def root_names(plan: Plan) -> frozenset[str]:
    """The parameters outside the blocks."""
    blocks = {parameter.name for run in plan.runs for parameter in run.parameters}
    return frozenset(parameter.name for parameter in plan.parameters) - blocks

"""The moments of a micro-batch's forward through a stage."""

from collections.abc import Iterator

from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.pipeline.lines import (
    AT_ONCE,
    accumulated,
    as_made,
    in_elements,
    kept_before,
    kept_of_all,
    parked_line,
    plus,
    unsharded_parameters,
)
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.pipeline.tensor import after_the_forward, at_the_split_head
from zeroplan.engines.pipeline.waiting import Rank, waiting_lines
from zeroplan.engines.pipeline.walk import State
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line, Module, Moment, Phase, Role, Tag
from zeroplan.numeric import Int, maximum


def forward(rank: Rank, state: State, waiting: tuple[Line, ...]) -> Iterator[Moment]:
    """Every moment of the pass at which memory can be highest."""
    stage = rank.stages[state.chunk]
    plan = stage.plan
    common = (*waiting, *earlier_gradients(plan, state))
    if state.begins and state.whole[state.chunk]:
        yield _all_at_once(plan, common)
    for position in stage.positions:
        alive = (
            *common,
            *_in_forward(plan, position, whole=state.whole[state.chunk]),
            *kept_before(stage, position),
            *plan.head.forward,
            *(plan.head.first_input if position.layer else ()),
        )
        if not state.whole[state.chunk]:
            yield from _entering(stage, position, common, alive, begins=state.begins)
        yield Moment(f"forward of {position.name}", Phase.FORWARD, (*alive, *_inside(stage, position)))
    if stage.stage.is_last:
        at_loss = _only_in_flight(state)
        yield from _head_and_loss(stage, state, (*waiting_lines(rank, at_loss), *earlier_gradients(plan, state)))


def _only_in_flight(state: State) -> State:
    """When the loss is made, the name of the output before is already the new one's."""
    outputs = tuple(min(flying, count) if at == state.chunk else count
                    for at, (flying, count) in enumerate(zip(state.flying, state.outputs, strict=True)))  # fmt: skip
    return state._replace(outputs=outputs)


def _all_at_once(plan: Plan, common: tuple[Line, ...]) -> Moment:
    """The interleaved schedules gather all groups of a stage before its first pass, which copies them out one by one."""
    together = unsharded_parameters(plan, plan.every_layer, "this stage's parameters, in all-gather buffers or copied out")
    largest = maximum(plan.root.padded, *(group.padded for group in plan.blocks))
    n_bytes: Int = plan.gathers * plan.width.compute * largest
    if plan.has_experts_apart:
        from zeroplan.engines.pipeline import experts  # noqa: PLC0415  the others' answers need not wait for it

        n_bytes = experts.while_all_are_copied_out(plan)
    one = Line(Kind.GATHER, n_bytes, "the buffer of the group that is copied out", source=AT_ONCE)
    return Moment("forward: unsharding the stage", Phase.FORWARD, (*common, together, in_elements(one, plan.width.compute)))


def earlier_gradients(plan: Plan, state: State) -> Iterator[Line]:
    """Whole gradients that micro-batches before this one have left in its stage."""
    if state.earlier[state.chunk]:
        yield accumulated(plan, plan.every_layer, root=True)
    if state.fresh and state.fresh[state.chunk]:
        yield as_made(plan, plan.every_layer, root=True)


def _in_forward(plan: Plan, position: Position, *, whole: bool) -> Iterator[Line]:
    """Parameters: those unsharded so far, or, where all are when the pass begins, those that are still."""
    before, after = (0,) * len(plan.blocks) if plan.reshard else position.before, position.after if whole else ()
    layers = plus(before, position.run)
    layers = tuple(map(sum, zip(layers, after, strict=True))) if after else layers
    yield unsharded_parameters(plan, layers, "this stage's parameters, unsharded")
    if not whole:
        yield parked_line(plan, plan.blocks[position.run], "this block's, parked until the next copy-out")


def _inside(stage: StagePlan, position: Position) -> tuple[Line, ...]:
    plan, one = stage.plan, stage.plan.passes[position.run]
    recomputed = plan.recipe.recompute
    lines = (*one.kept(recomputed), *one.forward_recompute) if plan.recomputed else (*one.saved, *one.forward)
    if recomputed == "selective" and not stage.split:
        lines = tuple(line for line in lines if line.tag != _MADE_LATER)
    return lines if position.layer else stage.at_its_beginning(lines)


#: What is not there yet at the highest point of a forward.
_MADE_LATER = Tag(Role.OUTPUT, Module.DOWN)


def _entering(
    stage: StagePlan, position: Position, common: tuple[Line, ...], alive: tuple[Line, ...], *, begins: bool
) -> Iterator[Moment]:  # fmt: skip
    """A block is copied out of its buffer; ``common`` is what of ``alive`` is no part of this pass."""
    plan = stage.plan
    below = plan.root if position.previous_run is None else plan.blocks[position.previous_run]
    there = begins or position.previous_run is not None  # what is outside the blocks is gathered once
    parked = (parked_line(plan, below, "the one before, freed at the end of the copy-out"),) if there else ()
    entered = plan.passes[position.run].checkpoint
    entered = entered if position.layer else stage.at_its_beginning(entered)
    if plan.blocks[position.run].experts is None:
        yield Moment(f"forward: unsharding {position.name}", Phase.FORWARD, (*alive, *parked, *entered))
        return
    from zeroplan.engines.pipeline import experts  # noqa: PLC0415  the others' answers need not wait for it

    layers = (0,) * len(plan.blocks) if plan.reshard else position.before
    unsharded = unsharded_parameters(plan, layers, "this stage's parameters, unsharded")
    first = plan.head.first_input if position.layer else ()
    others = (*common, unsharded, *kept_before(stage, position), *plan.head.forward, *first)
    yield from experts.entering(plan, position, others, parked, entered)


def _head_and_loss(stage: StagePlan, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """The head makes logits within the stage's forward, in which the last block's buffer is parked; the loss comes after it."""
    plan = stage.plan
    layers = tuple(0 for _ in plan.blocks) if plan.reshard else plan.every_layer
    unsharded = unsharded_parameters(plan, layers, "this stage's parameters, unsharded")
    alive = (*common, unsharded, *kept_of_all(stage), *plan.head.saved)
    parked = parked_line(plan, plan.blocks[-1], "the last block's, parked until the stage's forward ends")
    positions = tuple(line for line in plan.head.forward if line.tag.role is Role.BATCH)
    inside = (*alive, *positions, *(() if state.whole[state.chunk] else (parked,)))
    if stage.by_rank is not None:
        yield from at_the_split_head(plan, stage.by_rank, inside)
    elif not state.whole[state.chunk]:
        yield Moment("head, forward", Phase.FORWARD, (*inside, *plan.head.output))
    lines = (*alive, *after_the_forward(plan.head.loss_forward))
    yield Moment("loss, forward", Phase.LOSS, lines, of_forward=True)

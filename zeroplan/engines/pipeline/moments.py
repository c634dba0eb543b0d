"""The moments of a pipeline rank: each kind of pass through each of its stages, with everything that waits meanwhile.

Under a schedule FSDP2 reduces nothing until all micro-batches are through: whole gradients add up, and a stage that has gone
backward stays unsharded (torch 2.13, ``torch/distributed/pipelining/stage.py``, ``backward_maybe_with_nosync`` and
``perform_reduce_grad``).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from zeroplan.engines.formulas import product, several
from zeroplan.engines.fsdp2 import buffers
from zeroplan.engines.fsdp2.buffers import kept, reduce_output_bytes
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import ACCUMULATE, REDUCE, Plan
from zeroplan.engines.pipeline.stage import POSITIONS, StagePlan
from zeroplan.engines.pipeline.tensor import (
    after_the_forward,
    at_the_split_embedding,
    at_the_split_head,
    root_elements,
    taking_its_share,
    whole_embedding,
)
from zeroplan.engines.pipeline.walk import State
from zeroplan.engines.positions import Position
from zeroplan.engines.sources import FLOWING
from zeroplan.ledger import Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import Int, maximum

STAGE = "torch 2.13, torch/distributed/pipelining/stage.py, forward_one_chunk"
UNSYNCED = "torch 2.13, torch/distributed/pipelining/stage.py, backward_maybe_with_nosync"
AT_ONCE = "torch 2.13, torch/distributed/pipelining/schedules.py, _add_unshard_reshard"
HALVES = "torch 2.13, torch/distributed/pipelining/_backward.py, stage_backward_weight"
BETWEEN = "kept by micro-batches between the halves of their backward, gradients among it"
SENT = "torch 2.13, torch/distributed/pipelining/schedules.py, _batch_p2p"


class Rank(NamedTuple):
    """A pipeline rank: its stages in the order of their layers, and what is there at every moment."""

    number: int
    stages: tuple[StagePlan, ...]
    standing: tuple[Line, ...]
    """Shards, optimizer state, the step's token ids or labels, receive buffers."""
    passing: tuple[Line, ...] = ()
    """What is there as long as passes are taken, and not when the optimizer steps."""


Maker = Callable[[Rank, State, tuple[Line, ...]], Iterator[Moment]]


def moments_of(rank: Rank, states: tuple[State, ...]) -> Iterator[Moment]:
    """Every moment of a step at which the rank's memory can be highest, its optimizer's step left out."""
    makers: dict[str, Maker] = {"forward": _forward, "backward": _backward, "reducing": _reducing}
    if any(state.between for state in states):
        from zeroplan.engines.pipeline.split import first_half, second_half  # noqa: PLC0415  the other schedules' answers need not wait

        makers |= {"input": first_half, "weights": second_half}
    for state, waiting in _most_waits(rank, states):
        yield from makers[state.kind](rank, state, waiting)


def _most_waits(rank: Rank, states: tuple[State, ...]) -> list[tuple[State, tuple[Line, ...]]]:
    """What a pass takes is the same each time, so that it is highest where most waits; of columns that cannot be said."""
    sizes = tuple(map(_sizes, rank.stages))
    if not all(isinstance(size, int) for one in sizes for size in one):
        return [(state, _waiting(rank, state)) for state in states]
    highest: dict[object, tuple[int, State]] = {}
    for state in states:
        n_bytes = int(_waiting_bytes(rank, state, sizes))
        alike = (state.kind, state.chunk, state.whole[state.chunk], state.earlier[state.chunk], state.begins,
                 state.fresh and state.fresh[state.chunk])  # fmt: skip
        if alike not in highest or n_bytes > highest[alike][0]:
            highest[alike] = (n_bytes, state)
    return [(state, _waiting(rank, state)) for _, state in highest.values()]


class _Sizes(NamedTuple):
    """What a stage takes of each thing that waits. [bytes]"""

    kept: Int
    output: Int
    hidden: Int
    shards: Int
    gradients: Int
    between: Int
    fresh: Int


def _sizes(stage: StagePlan) -> _Sizes:
    plan = stage.plan
    shards = plan.width.stored * plan.shards(plan.every_layer, root=True)
    gradients = accumulated(plan, plan.every_layer, root=True).n_bytes
    fresh = plan.width.compute * plan.numel
    return _Sizes(
        stage.kept_bytes, stage.output_bytes, stage.hidden_bytes, shards, gradients, stage.between_bytes, fresh
    )  # fmt: skip


def _waiting_bytes(rank: Rank, state: State, sizes: tuple[_Sizes, ...]) -> Int:
    """The sum of what :func:`_waiting` lists, but for what is there at every moment. [bytes]"""
    n_bytes: Int = state.sent * sizes[0].hidden
    for at, one in enumerate(sizes):
        n_bytes = n_bytes + state.flying[at] * one.kept + state.outputs[at] * one.output
        if at != state.chunk:
            n_bytes = n_bytes + total_bytes(_parameters_of_another(rank.stages[at].plan, state, at))
            n_bytes = n_bytes + (one.shards if state.reduced[at] else one.gradients * state.earlier[at])
        if state.between:
            left = at != state.chunk and not state.reduced[at]
            n_bytes = n_bytes + state.between[at] * one.between + (one.fresh * state.fresh[at] if left else 0)
    return n_bytes


# --- what waits --------------------------------------------------------------------------------------------------------


def _waiting(rank: Rank, state: State) -> tuple[Line, ...]:
    """Everything that does not belong to the pass that is taken."""
    flying = tuple((count, stage.kept_bytes) for count, stage in zip(state.flying, rank.stages, strict=True))
    outputs = tuple((count, stage.output_bytes) for count, stage in zip(state.outputs, rank.stages, strict=True))
    logits = tuple(one for one, stage in zip(outputs, rank.stages, strict=True) if stage.stage.is_last)
    hidden = tuple(one for one, stage in zip(outputs, rank.stages, strict=True) if not stage.stage.is_last)
    sent = ((state.sent, rank.stages[0].hidden_bytes),)
    between = tuple((count, stage.between_bytes) for count, stage in zip(state.between, rank.stages, strict=False))
    return (
        *rank.standing,
        *rank.passing,
        _of_several(Kind.ACTIVATIONS, flying, "kept by the micro-batches in flight beside this one", STAGE),
        *([_of_several(Kind.ACTIVATIONS, between, BETWEEN, HALVES)] if between else ()),
        _of_several(Kind.ACTIVATIONS, hidden, "outputs of stages, until their backward or as long as a send holds them", STAGE),
        _of_several(Kind.LOGITS, logits, "logits, until the backward of their micro-batch has ended", STAGE),
        _of_several(Kind.ACTIVATION_GRADIENTS, sent, "gradients of inputs, as long as a send holds them", SENT),
        *_other_stages(rank, state),
    )


def _of_several(kind: Kind, terms: tuple[tuple[int, Int], ...], reason: str, source: str) -> Line:
    """So many of each size."""
    n_bytes: Int = 0
    for count, size in terms:
        n_bytes = n_bytes + count * size
    return Line(kind, n_bytes, reason, several(*terms), source)


def _other_stages(rank: Rank, state: State) -> Iterator[Line]:
    for at, stage in enumerate(rank.stages):
        if at == state.chunk:
            continue
        plan = stage.plan
        yield from _parameters_of_another(plan, state, at)
        if state.reduced[at]:
            shards = plan.width.stored * plan.shards(plan.every_layer, root=True)
            line = Line(Kind.GRADIENTS, shards, "this rank's chunk of another stage's gradients", source=REDUCE)
            yield in_elements(line, plan.width.stored)
            continue
        if state.earlier[at]:
            yield accumulated(plan, plan.every_layer, root=True, whose="another stage's")
        if state.fresh and state.fresh[at]:
            yield as_made(plan, plan.every_layer, root=True, whose="another stage's")


def _parameters_of_another(plan: Plan, state: State, at: int) -> tuple[Line, ...]:
    """Of a stage whose pass this is not: gathered before its first one, then unsharded, or at least what is outside its blocks."""
    if state.reduced[at]:
        return ()
    if not state.has_begun(at):
        n_bytes = plan.gathers * plan.width.compute * _gathered_elements(plan)
        gathered = Line(Kind.GATHER, n_bytes, "another stage's parameters, gathered ahead", source=AT_ONCE)
        return (in_elements(gathered, plan.width.compute),)
    layers = plan.every_layer if state.whole[at] else tuple(0 for _ in plan.blocks)
    return (unsharded_parameters(plan, layers, "another stage's parameters, unsharded"),)


def _gathered_elements(plan: Plan) -> Int:
    """All parameters of a stage that are gathered: experts that no other rank has are not."""
    elements: Int = plan.root.padded
    for count, group in zip(plan.every_layer, plan.blocks, strict=True):
        alone = 0 if group.experts is None else (1 - group.experts.gathers) * group.experts.padded
        elements = elements + count * (group.padded - alone)
    return elements


def unsharded_parameters(plan: Plan, layers: tuple[int, ...], reason: str) -> Line:
    """What is outside the blocks, and these layers of them."""
    elements: Int = plan.root.padded
    for count, group in zip(layers, plan.blocks, strict=True):
        elements = elements + count * group.padded
    return Line(
        Kind.UNSHARDED_PARAMETERS, plan.width.compute * elements, reason, product(plan.width.compute, elements), UNSYNCED
    )


def accumulated(plan: Plan, layers: tuple[int, ...], *, root: bool, whose: str = "this stage's") -> Line:
    """Whole gradients in the dtype in which they will be reduced."""
    elements = root_elements(plan) if root else 0
    for count, group in zip(layers, plan.blocks, strict=True):
        elements += count * group.numel
    n_bytes, formula = plan.reduce_bytes * elements, product(plan.reduce_bytes, elements)
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, f"{whose} whole gradients, not reduced yet", formula, ACCUMULATE)


def as_made(plan: Plan, layers: tuple[int, ...], *, root: bool, whose: str = "this stage's") -> Line:
    """Whole gradients of a second half, in the dtype that they were made in."""
    line = accumulated(plan._replace(reduce_bytes=plan.width.compute), layers, root=root)
    return line._replace(reason=f"{whose} whole gradients of weights, not taken up yet", source=HALVES)


def _gathered(plan: Plan, group: Group, reason: str) -> Line:
    return in_elements(buffers.gathered(plan, group, reason), plan.width.compute)


def _reduce_input(plan: Plan, group: Group) -> Line:
    return in_elements(buffers.reduce_input(plan, group, "reduce-scatter input"), plan.reduce_bytes)


def _root_gradients(plan: Plan, made: int, current: int = 0) -> Line:
    return in_elements(buffers.root_gradients(plan, made, current), plan.width.compute)


def in_elements(line: Line, width: int) -> Line:
    """Write a line as so many bytes times so many elements of this rank's stages."""
    return line._replace(formula=product(width, line.n_bytes // width))


def _made(plan: Plan, n_bytes: Int, reason: str) -> Line:
    """Whole gradients of this micro-batch, in the dtype that they are computed in."""
    return in_elements(Line(Kind.UNSHARDED_GRADIENTS, n_bytes, reason, source=ACCUMULATE), plan.width.compute)


def _flowing(stage: StagePlan, reason: str, count: int = 1) -> Line:
    """A gradient of the hidden state, where it is a tensor of its own."""
    n_bytes = count * stage.hidden_bytes
    return Line(Kind.ACTIVATION_GRADIENTS, n_bytes, reason, several((count, stage.hidden_bytes)), FLOWING)


def _plus(one: tuple[int, ...], run: int) -> tuple[int, ...]:
    return tuple(count + (at == run) for at, count in enumerate(one))


# --- forward -----------------------------------------------------------------------------------------------------------


def _forward(rank: Rank, state: State, waiting: tuple[Line, ...]) -> Iterator[Moment]:
    stage = rank.stages[state.chunk]
    plan = stage.plan
    common = (*waiting, *earlier_gradients(plan, state))
    if state.begins and state.whole[state.chunk]:
        yield _all_at_once(plan, common)
    for position in stage.positions:
        alive = (
            *common,
            *_in_forward(plan, position, whole=state.whole[state.chunk]),
            *_kept_before(stage, position),
            *plan.head.forward,
            *(plan.head.first_input if position.layer else ()),
        )
        if not state.whole[state.chunk]:
            yield from _entering(stage, position, common, alive, begins=state.begins)
        yield Moment(f"forward of {position.name}", Phase.FORWARD, (*alive, *_inside(stage, position)))
    if stage.stage.is_last:
        at_loss = _only_in_flight(state)
        yield from _head_and_loss(stage, state, (*_waiting(rank, at_loss), *earlier_gradients(plan, state)))


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
    layers = _plus(before, position.run)
    layers = tuple(map(sum, zip(layers, after, strict=True))) if after else layers
    yield unsharded_parameters(plan, layers, "this stage's parameters, unsharded")
    if not whole:
        yield _parked(plan, plan.blocks[position.run], "this block's, parked until the next copy-out")


def _kept_before(stage: StagePlan, position: Position) -> tuple[Line, ...]:
    """What this micro-batch has left in the blocks below; the lowest one's input stands in a receive buffer."""
    return _kept_of(stage, position.before, every=False)


def _kept_of(stage: StagePlan, layers: tuple[int, ...], *, every: bool) -> tuple[Line, ...]:
    line, *tables = kept(stage.plan, layers, every=every)
    formula = several(*zip(layers, stage.plan.kept, strict=True))
    if stage.takes_from_buffer and any(layers):
        line = line._replace(n_bytes=line.n_bytes - stage.hidden_bytes)
        formula = formula and f"{formula} - {stage.hidden_bytes}"
    return (line._replace(formula=formula), *tables)


def _inside(stage: StagePlan, position: Position) -> tuple[Line, ...]:
    plan, one = stage.plan, stage.plan.passes[position.run]
    recomputed = plan.recipe.recompute
    lines = (*one.kept(recomputed), *one.forward_recompute) if plan.recomputed else (*one.saved, *one.forward)
    if recomputed == "selective" and not stage.split:
        lines = tuple(line for line in lines if line.reason != _MADE_LATER)
    return lines if position.layer else stage.at_its_beginning(lines)


_MADE_LATER = "output of the down projection"
"""Of what selective recomputation keeps, what is not there yet at the highest point of a gated MLP."""


def _parked(plan: Plan, group: Group, reason: str) -> Line:
    """A buffer that stays until the next copy-out: of a block whose experts are on several ranks, theirs."""
    if group.experts is None:
        return _gathered(plan, group, reason)
    from zeroplan.engines.pipeline import experts  # noqa: PLC0415  the others' answers need not wait for it

    return experts.parked(plan, group, reason)


def _entering(
    stage: StagePlan, position: Position, common: tuple[Line, ...], alive: tuple[Line, ...], *, begins: bool
) -> Iterator[Moment]:  # fmt: skip
    """A block is copied out of its buffer; ``common`` is what of ``alive`` is no part of this pass."""
    plan = stage.plan
    below = plan.root if position.previous_run is None else plan.blocks[position.previous_run]
    there = begins or position.previous_run is not None  # what is outside the blocks is gathered once
    parked = (_parked(plan, below, "the one before, freed at the end of the copy-out"),) if there else ()
    entered = plan.passes[position.run].checkpoint
    entered = entered if position.layer else stage.at_its_beginning(entered)
    if plan.blocks[position.run].experts is None:
        yield Moment(f"forward: unsharding {position.name}", Phase.FORWARD, (*alive, *parked, *entered))
        return
    from zeroplan.engines.pipeline import experts  # noqa: PLC0415  the others' answers need not wait for it

    layers = (0,) * len(plan.blocks) if plan.reshard else position.before
    unsharded = unsharded_parameters(plan, layers, "this stage's parameters, unsharded")
    first = plan.head.first_input if position.layer else ()
    others = (*common, unsharded, *_kept_before(stage, position), *plan.head.forward, *first)
    yield from experts.entering(plan, position, others, parked, entered)


def _head_and_loss(stage: StagePlan, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """The head makes logits within the stage's forward, in which the last block's buffer is parked; the loss comes after it."""
    plan = stage.plan
    layers = tuple(0 for _ in plan.blocks) if plan.reshard else plan.every_layer
    unsharded = unsharded_parameters(plan, layers, "this stage's parameters, unsharded")
    alive = (*common, unsharded, *kept_of_all(stage), *plan.head.saved)
    parked = _parked(plan, plan.blocks[-1], "the last block's, parked until the stage's forward ends")
    positions = tuple(line for line in plan.head.forward if line.reason == POSITIONS)
    inside = (*alive, *positions, *(() if state.whole[state.chunk] else (parked,)))
    if stage.by_rank is not None:
        yield from at_the_split_head(plan, stage.by_rank, inside)
    elif not state.whole[state.chunk]:
        yield Moment("head, forward", Phase.FORWARD, (*inside, *plan.head.output))
    yield Moment("loss, forward", Phase.LOSS, (*alive, *after_the_forward(plan.head.loss_forward)))


def kept_of_all(stage: StagePlan) -> tuple[Line, ...]:
    """What this micro-batch has left in all blocks."""
    return _kept_of(stage, stage.plan.every_layer, every=True)


# --- backward ----------------------------------------------------------------------------------------------------------


def _backward(rank: Rank, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    stage = rank.stages[state.chunk]
    plan = stage.plan._replace(several=state.earlier[state.chunk])
    if stage.stage.is_last:
        yield from _after_the_loss(stage, plan, state, common)
    insides = tuple(tuple((point.name, point.lines, plan.fresh(point.gradients, point.current_gradient)[0]) for point in one.points)
                    for one in plan.passes)  # fmt: skip
    for position in reversed(stage.positions):
        alive = (
            *common,
            *_gradients_so_far(plan, position, earlier=bool(state.earlier[state.chunk])),
            *_in_backward(plan, position, whole=state.whole[state.chunk]),
            *_kept_before(stage, position),
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
    yield _root_gradients(plan, plan.tail_elements)


def _in_backward(plan: Plan, position: Position, *, whole: bool) -> Iterator[Line]:
    """A stage that has gone backward stays unsharded; blocks that were sharded after their forward are gathered one ahead."""
    if whole or not plan.reshard:
        yield unsharded_parameters(plan, plan.every_layer, "this stage's parameters, unsharded")
        return
    yield unsharded_parameters(
        plan, _plus(position.after, position.run), "this stage's parameters, unsharded again from the last block on"
    )
    if position.previous_run is not None:
        yield _gathered(plan, plan.blocks[position.previous_run], "the block below, gathered ahead of its backward")


def _unsharding(stage: StagePlan, position: Position, alive: tuple[Line, ...]) -> Moment:
    """A block's parameters are copied out of its own buffer, before the block below is gathered ahead."""
    plan = stage.plan
    own = _gathered(plan, plan.blocks[position.run], "this block's, until it is copied out")
    kept_here = plan.passes[position.run].kept(plan.recipe.recompute)
    kept_here = kept_here if position.layer else stage.at_its_beginning(kept_here)
    coming_in = int(position.next_run is not None or stage.stage.is_last)
    flow = _flowing(stage, "gradient that flows into this block", coming_in)
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
    stage: StagePlan, position: Position, alive: tuple[Line, ...], inside: tuple[tuple[str, tuple[Line, ...], Int], ...]
) -> Iterator[Moment]:
    coming_in, adding = position.next_run is None, False
    for name, lines, fresh in inside:
        coming_in = coming_in and (name == _ADDED_AFTER or not adding)
        adding = adding or name == _ADDED_AFTER
        here = stage.at_its_end(lines) if coming_in else lines
        here = here if position.layer else stage.at_its_beginning(here)
        made = _made(stage.plan, fresh, "this block's, made so far")
        yield Moment(f"backward of {position.name}: {name}", Phase.BACKWARD, (*alive, *here, made))


_ADDED_AFTER = "norm before the MLP"
"""After this the gradient that came in has been added to, and the sum is another tensor."""


def _accumulating(stage: StagePlan, plan: Plan, position: Position, alive: tuple[Line, ...], *, first: bool) -> Moment:
    """A block's gradients come to those of earlier micro-batches, or become the first in the reduction's dtype."""
    made = taken_up(plan, sizes_of_block(plan, position.run), first=first)
    flow = _flowing(stage, "gradient that flows out of this block")
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
    return _made(plan, n_bytes, "this micro-batch's, cast one by one or added to earlier ones")


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
    ahead = () if whole else (_parked(plan, plan.blocks[-1], "the last block, gathered ahead of its backward"),)
    earlier = (accumulated(plan, plan.every_layer, root=True),) if state.earlier[state.chunk] else ()
    alive = (*common, *earlier, unsharded_parameters(plan, layers, "this stage's parameters, unsharded"), *kept_of_all(stage))
    for point in plan.head.points:
        made = _root_gradients(plan, point.gradients, point.current_gradient)
        if point.name == "loss":
            yield Moment("backward of the loss", Phase.LOSS, (*alive, made, *point.lines))
        else:
            yield Moment(f"backward of the {point.name}", Phase.BACKWARD, (*alive, *ahead, made, *point.lines))


def _end_of_backward(stage: StagePlan, plan: Plan, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """The embedding's gradient, then those of the embedding, or of final norm and head, come to earlier ones."""
    if not plan.root.numel:
        return
    earlier = bool(state.earlier[state.chunk])
    flow = _flowing(stage, "gradient that flows out of the first block")
    unsharded = unsharded_parameters(plan, plan.every_layer, "this stage's parameters, unsharded")
    alive = (*common, accumulated(plan, plan.every_layer, root=earlier), unsharded)
    if plan.at_embedding is not None:
        yield from at_the_split_embedding(plan.at_embedding, alive, flow)
        flow = _flowing(stage, "gradient that flows out of the first block", 0)
    elif stage.stage.is_first:
        fresh = plan.width.compute * plan.root.numel
        made = _made(plan, fresh, "the embedding's of this micro-batch")
        yield Moment("backward of the embedding", Phase.BACKWARD, (*alive, made, flow))
        flow = _flowing(stage, "gradient that flows out of the first block", 0)
    sizes = tuple(one.numel for one in plan.parameters if one.name in root_names(plan))
    sizes = (sizes[0] + whole_embedding(plan), *sizes[1:])
    made = taken_up(plan, sizes, first=not earlier)
    yield Moment("backward: gradients of the root group", Phase.BACKWARD, (*alive, made, flow))


def root_names(plan: Plan) -> frozenset[str]:
    """The parameters outside the blocks."""
    blocks = {parameter.name for run in plan.runs for parameter in run.parameters}
    return frozenset(parameter.name for parameter in plan.parameters) - blocks


# --- reducing ----------------------------------------------------------------------------------------------------------


def _reducing(rank: Rank, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """Group after group is sharded again and its gradients are reduced: the root group, then the blocks from the first on.

    What is left falls from block to block or grows, so that the first and the last of each kind are enough.
    """
    plan = rank.stages[state.chunk].plan
    whole = plan if state.earlier[state.chunk] else plan._replace(reduce_bytes=plan.width.compute)
    fresh = bool(state.fresh and state.fresh[state.chunk] and state.earlier[state.chunk])
    if plan.root.numel:
        alive = (*common, *_left(whole, plan.every_layer, fresh=fresh), *_unsharded_blocks(plan, plan.every_layer))
        if plan.at_embedding is not None:
            yield taking_its_share(whole, alive)
        yield _reduction(plan, plan.root, whole.reduce_bytes, plan.last_root_elements, "the root group", alive)
    for run, count in enumerate(plan.every_layer):
        for block in sorted({0, count - 1}) if _may_grow(plan) else (0,):
            after = tuple(0 if at < run else here - (at == run) * (block + 1) for at, here in enumerate(plan.every_layer))
            done = tuple(here if at < run else block * (at == run) for at, here in enumerate(plan.every_layer))
            alive = (*common, *_left(whole, after, fresh=fresh), *_done(plan, done), *_unsharded_blocks(plan, after))
            yield from _reducing_block(plan, run, whole.reduce_bytes, alive, is_first=block == 0)


def _may_grow(plan: Plan) -> bool:
    """Whether what a reduction leaves can be more than what it takes: shards in a wider dtype, beside all-reduces over replicas."""
    return plan.has_experts_apart or plan.reduce_bytes < plan.width.stored


def _reducing_block(plan: Plan, run: int, width: int, alive: tuple[Line, ...], *, is_first: bool) -> Iterator[Moment]:
    last, name = sizes_of_block(plan, run)[-1], f"the {'first' if is_first else 'last'} {plan.runs[run].kind} block"
    if plan.blocks[run].experts is None:
        yield _reduction(plan, plan.blocks[run], width, last, name, alive)
        return
    from zeroplan.engines.pipeline import experts  # noqa: PLC0415  the others' answers need not wait for it

    yield from experts.reducing(plan, run, width, name, (alive, experts.waiting(plan, run, is_first=is_first)))


def _left(plan: Plan, layers: tuple[int, ...], *, fresh: bool) -> Iterator[Line]:
    yield accumulated(plan, layers, root=False)
    if fresh:
        yield as_made(plan, layers, root=False)


def _unsharded_blocks(plan: Plan, layers: tuple[int, ...]) -> tuple[Line, ...]:
    elements: Int = 0
    for count, group in zip(layers, plan.blocks, strict=True):
        elements = elements + count * group.padded
    line = Line(Kind.UNSHARDED_PARAMETERS, plan.width.compute * elements, "blocks not sharded again yet", source=UNSYNCED)
    return (in_elements(line, plan.width.compute),)


def _done(plan: Plan, layers: tuple[int, ...]) -> Iterator[Line]:
    """Shards, and what the all-reduce over replicas still holds of them where they are a copy of it."""
    shards = plan.shards(layers, root=True)
    done = Line(Kind.GRADIENTS, plan.width.stored * shards, "this rank's chunk of the gradients, reduced so far", source=REDUCE)
    yield in_elements(done, plan.width.stored)
    if plan.reduce_bytes != plan.width.stored:
        held = plan.replicated * plan.reduce_bytes * shards
        line = Line(Kind.REDUCE, held, "all-reduces over replicas, held until all are over", source=REDUCE)
        yield in_elements(line, plan.reduce_bytes)


def _reduction(plan: Plan, group: Group, width: int, last: int, name: str, alive: tuple[Line, ...]) -> Moment:
    """Gradients are copied into the input; then the output joins it, all gradients gone but the ``last``, which has a name.

    They are ``width`` bytes wide until then.
    """
    whole, named = width * group.numel, plan.gathers * width * last
    n_bytes = maximum(whole, reduce_output_bytes(plan, group) + named)
    reason = "its gradients while copied in, or the reduce-scatter output and the last of them"
    made = Line(Kind.UNSHARDED_GRADIENTS, n_bytes, reason, source=REDUCE)
    made = in_elements(made, plan.width.compute)
    return Moment(f"reducing {name}", Phase.BACKWARD, (*alive, _reduce_input(plan, group), made))

"""The moments of a backward in two halves: through a stage for gradients of inputs, later through it again for those of weights.

The first half goes from the last block to the first and frees nothing. FSDP2's hooks run in it and take up gradients that an
earlier second half has left. The second half goes through the weights from the first block to the last, with no hook;
their gradients become the parameters', or are added to those.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.pipeline.backward import root_names, sizes_of_block, taken_up
from zeroplan.engines.pipeline.forward import earlier_gradients
from zeroplan.engines.pipeline.lines import accumulated, as_made, in_elements, kept_of_all, unsharded_parameters
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.pipeline.waiting import Rank
from zeroplan.engines.pipeline.walk import State
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int
from zeroplan.transformer.families.halves import SPLIT_BACKWARD, Halves, Weights

T = TypeVar("T")
WAITING = "gradients that wait for the second half, of the blocks above"


def _halves(stage: StagePlan) -> tuple[Halves, Halves]:
    assert stage.halves is not None  # noqa: S101  made for every stage of such a schedule
    return stage.halves


# --- gradients of inputs -----------------------------------------------------------------------------------------------


def first_half(rank: Rank, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """Head and loss where they are, then block after block from the last to the first."""
    stage = rank.stages[state.chunk]
    plan, (block, head) = stage.plan, _halves(stage)
    kept = (*kept_of_all(stage), *((*plan.head.saved, *plan.head.loss) if stage.stage.is_last else ()))
    unsharded = unsharded_parameters(plan, plan.every_layer, "this stage's parameters, unsharded")
    common = (*common, unsharded, *kept)
    behind: Int = 0
    if stage.stage.is_last:
        behind = head.held
        alive = (*common, *earlier_gradients(plan, state))
        for point in head.points:
            yield Moment(f"backward of the {point.name}, inputs", Phase.BACKWARD, (*alive, _gradients(point.n_bytes)))
    for position in reversed(stage.positions):
        alive = (*common, _waits(behind + sum(position.after) * block.held))
        yield from _through(block, position, (*alive, *_gradients_left(plan, position, state, itself=True)))
        yield from _taking_up(plan, position, state, (*alive, _gradients(block.held)))
    if stage.stage.is_last and state.fresh[state.chunk]:
        yield from _taking_up_root(plan, state, (*common, _waits(behind + stage.stage.layers * block.held)))


def _waits(n_bytes: Int) -> Line:
    return Line(Kind.ACTIVATION_GRADIENTS, n_bytes, WAITING, product(1, n_bytes), SPLIT_BACKWARD)


def _gradients(n_bytes: Int) -> Line:
    reason = "gradients of this part, waiting for the second half or by the way"
    return Line(Kind.ACTIVATION_GRADIENTS, n_bytes, reason, product(1, n_bytes), SPLIT_BACKWARD)


def _through(block: Halves, position: Position, alive: tuple[Line, ...]) -> Iterator[Moment]:
    by_torch = _highest([point for point in block.points if not point.scratch], lambda point: point.n_bytes)
    for point in (*by_torch, *(point for point in block.points if point.scratch)):
        lines = (*alive, _gradients(point.n_bytes), *point.scratch)
        yield Moment(f"backward of {position.name}, inputs: {point.name}", Phase.BACKWARD, lines)


def _gradients_left(plan: Plan, position: Position, state: State, *, itself: bool) -> Iterator[Line]:
    """Whole gradients while a block goes backward: those above it have been taken up, it and those below it not yet."""
    done, fresh = state.earlier[state.chunk], state.fresh[state.chunk]
    if done or fresh:
        yield accumulated(plan, plan.every_layer if done else position.after, root=bool(done))
    if fresh:
        below = tuple(before + (itself and at == position.run) for at, before in enumerate(position.before))
        yield as_made(plan, below, root=True)


def _taking_up(plan: Plan, position: Position, state: State, alive: tuple[Line, ...]) -> Iterator[Moment]:
    """What an earlier second half has left of this block comes to what there is, or is cast to be the first."""
    if not state.fresh[state.chunk]:
        return
    made = taken_up(plan, sizes_of_block(plan, position.run), first=not state.earlier[state.chunk])
    lines = (*alive, *_gradients_left(plan, position, state, itself=False), made)
    yield Moment(f"backward: gradients of {position.name}, taken up", Phase.BACKWARD, lines)


def _taking_up_root(plan: Plan, state: State, alive: tuple[Line, ...]) -> Iterator[Moment]:
    sizes = tuple(one.numel for one in plan.parameters if one.name in root_names(plan))
    done = state.earlier[state.chunk]
    made = taken_up(plan, sizes, first=not done)
    lines = (*alive, accumulated(plan, plan.every_layer, root=bool(done)), made)
    yield Moment("backward: gradients of the root group, taken up", Phase.BACKWARD, lines)


# --- gradients of weights ----------------------------------------------------------------------------------------------


def second_half(rank: Rank, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """Block after block from the first to the last, then final norm and head where they are.

    Where earlier gradients are there in the same dtype, each new one is added and goes; else they stay.
    """
    stage = rank.stages[state.chunk]
    plan, (block, head) = stage.plan, _halves(stage)
    unsharded = unsharded_parameters(plan, plan.every_layer, "this stage's parameters, unsharded")
    alive = (*common, *earlier_gradients(plan, state), unsharded)
    added = bool(state.fresh[state.chunk] or (plan.reduce_bytes == plan.width.compute and state.earlier[state.chunk]))
    every = list(_one_by_one(stage, block, head))
    for name, one in _highest(every, lambda found: found[1].bytes_beyond(plan.width.compute, added=added)):
        yield Moment(name, Phase.BACKWARD, (*alive, *_making(stage, plan, one, added=added)))


def _highest(found: list[T], n_bytes: Callable[[T], Int]) -> list[T]:
    """The one with most bytes beside what all of them have; of columns all."""
    sizes = [n_bytes(one) for one in found]
    if not all(isinstance(size, int) for size in sizes):
        return found
    return [found[sizes.index(max(sizes))]] if found else []


class _Making(NamedTuple):
    """Weights whose gradients are being made, and what has come before them in this half."""

    weights: Weights
    last: int
    """Gradients made right before, which have a name until these are made. [elements]"""
    made: int
    """All made before. [elements]"""
    freed: Int
    """What has gone. [bytes]"""

    def gradients(self, *, added: bool) -> int:
        """Gradients that are there: all so far, or, where each is added to earlier ones, the last two. [elements]"""
        return self.weights.numel + (self.last if added else self.made)

    def bytes_beyond(self, width: int, *, added: bool) -> Int:
        """What is alive beyond what the half begins with. [bytes]"""
        return width * self.gradients(added=added) + self.weights.beside - self.freed


def _one_by_one(stage: StagePlan, block: Halves, head: Halves) -> Iterator[tuple[str, _Making]]:
    """The weights of the blocks at which a maximum can lie, and of what is behind the blocks."""
    numel, freed = _sums(block.weights)
    last = block.weights[-1].numel
    for position in stage.positions:
        below = sum(position.before)
        for one in _through_weights(block.weights, last if below else 0, below * numel, below * freed):
            yield f"backward of {position.name}, weights: {one.weights.name}", one
    if stage.stage.is_last:
        layers = stage.stage.layers
        for one in _through_weights(head.weights, last, layers * numel, layers * freed):
            yield f"backward of the {one.weights.name}, weights", one


def _through_weights(weights: tuple[Weights, ...], last: int, made: int, freed: Int) -> Iterator[_Making]:
    for one in weights:
        yield _Making(one, last, made, freed)
        last, made, freed = one.numel, made + one.numel, freed + one.freed


def _sums(weights: tuple[Weights, ...]) -> tuple[int, Int]:
    freed: Int = 0
    for one in weights:
        freed = freed + one.freed
    return sum(one.numel for one in weights), freed


def _making(stage: StagePlan, plan: Plan, now: _Making, *, added: bool) -> tuple[Line, ...]:
    """What is left of the micro-batch, and gradients of weights."""
    left, width = stage.between_bytes - now.freed, plan.width.compute
    made = width * now.gradients(added=added)
    beside = now.weights.beside
    return (
        Line(Kind.ACTIVATIONS, left, "kept between the halves, of weights still to come", product(1, left), SPLIT_BACKWARD),
        in_elements(
            Line(Kind.UNSHARDED_GRADIENTS, made, "gradients of weights, made in this half", source=SPLIT_BACKWARD), width
        ),
        Line(Kind.TEMPORARY, beside, "gradient of a norm's weight, not yet summed", product(1, beside), SPLIT_BACKWARD),
    )

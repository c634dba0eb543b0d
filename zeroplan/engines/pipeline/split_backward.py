"""The moments of a backward in two halves: input gradients through the stage first, weight gradients later.

The first half runs from the last block to the first and frees nothing. FSDP2's hooks run in it and accumulate the gradients of
an earlier second half. The second half goes through the weights from the first block to the last, without hooks. Its gradients
become the parameters' gradients, or are added to them.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from zeroplan.engines.formulas import sized
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.pipeline.lines import (
    accumulated,
    accumulated_gradients,
    as_made,
    kept_of_all,
    root_sizes,
    sizes_of_block,
    unsharded_parameters,
)
from zeroplan.engines.pipeline.passes import earlier_gradients
from zeroplan.engines.pipeline.stage import Split, StagePlan
from zeroplan.engines.pipeline.waiting import Rank
from zeroplan.engines.pipeline.walk import State
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line, Moment, OffGpu, Phase, total_bytes
from zeroplan.numeric import Int, added_up, weighted
from zeroplan.transformer.families.split_backward import SPLIT_BACKWARD, Point, SplitBackward, Weights

T = TypeVar("T")
_MADE_NOW = "gradients of weights, made in this half"
WAITING = "gradients that wait for the second half, of the blocks above"


def _split(stage: StagePlan) -> Split:
    assert stage.halves is not None  # noqa: S101  made for every stage of such a schedule
    return stage.halves


# --- gradients of inputs -----------------------------------------------------------------------------------------------


def first_half(rank: Rank, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """Yield head and loss, if they are in the stage, then each block from the last to the first."""
    stage = rank.stages[state.chunk]
    plan, split = stage.plan, _split(stage)
    kept = (*kept_of_all(stage), *((*plan.head.saved, *plan.head.loss) if stage.stage.is_last else ()))
    unsharded = unsharded_parameters(plan, plan.every_layer, "this stage's parameters, unsharded", plan.outside)
    common = (*common, unsharded, *kept)
    behind: Int = 0
    if split.head is not None:
        behind = split.head.held
        alive = (*common, *earlier_gradients(rank, state))
        for point in split.head.points:
            yield Moment(f"backward of the {point.name}, inputs", Phase.BACKWARD, (*alive, *point.lines))
    for position in reversed(stage.positions):
        block = split.blocks[position.run]
        alive = (*common, _waits(behind + split.held(position.after)))
        yield from _through(block, position, (*alive, *_gradients_left(plan, position, state, itself=True)))
        reason = "gradients of this block, waiting for the second half"
        held = sized(Kind.ACTIVATION_GRADIENTS, 1, block.held, reason, SPLIT_BACKWARD)
        yield from _taking_up(plan, position, state, (*alive, held))
    if stage.stage.is_last and state.fresh[state.chunk]:
        yield from _taking_up_root(plan, state, (*common, _waits(behind + split.held(plan.every_layer))))


def _waits(n_bytes: Int) -> Line:
    return sized(Kind.ACTIVATION_GRADIENTS, 1, n_bytes, WAITING, SPLIT_BACKWARD)


def _through(block: SplitBackward, position: Position, alive: tuple[Line, ...]) -> Iterator[Moment]:
    """Yield the highest moment of a block without CUDA kernels' workspace, and all moments with such a workspace."""
    plain = [point for point in block.points if not _has_scratch(point)]
    for point in (
        *_highest(plain, lambda point: total_bytes(point.lines)),
        *(one for one in block.points if _has_scratch(one)),
    ):
        yield Moment(f"backward of {position.name}, inputs: {point.name}", Phase.BACKWARD, (*alive, *point.lines))


def _has_scratch(point: Point) -> bool:
    return any(line.tag.off_gpu is OffGpu.NO_TENSOR for line in point.lines)


def _gradients_left(plan: Plan, position: Position, state: State, *, itself: bool) -> Iterator[Line]:
    """Yield whole gradients during a block's backward: accumulated ones of the blocks above, fresh ones of it and below."""
    done, fresh = state.earlier[state.chunk], state.fresh[state.chunk]
    if done or fresh:
        yield accumulated(plan, plan.every_layer, plan.trained_outside) if done else accumulated(plan, position.after)
    if fresh:
        below = tuple(before + (itself and at == position.run) for at, before in enumerate(position.before))
        yield as_made(plan, below, plan.trained_outside)


def _taking_up(plan: Plan, position: Position, state: State, alive: tuple[Line, ...]) -> Iterator[Moment]:
    """Yield the moment when FSDP2 accumulates a block's gradients of an earlier second half, or casts the first ones."""
    if not state.fresh[state.chunk]:
        return
    made = accumulated_gradients(plan, sizes_of_block(plan, position.run), first=not state.earlier[state.chunk])
    lines = (*alive, *_gradients_left(plan, position, state, itself=False), made)
    yield Moment(f"backward: gradients of {position.name}, taken up", Phase.BACKWARD, lines)


def _taking_up_root(plan: Plan, state: State, alive: tuple[Line, ...]) -> Iterator[Moment]:
    done = state.earlier[state.chunk]
    made = accumulated_gradients(plan, root_sizes(plan), first=not done)
    lines = (*alive, accumulated(plan, plan.every_layer, plan.trained_outside if done else ()), made)
    yield Moment("backward: gradients of the root group, taken up", Phase.BACKWARD, lines)


# --- gradients of weights ----------------------------------------------------------------------------------------------


def second_half(rank: Rank, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """Yield each block from the first to the last, then final norm and head, if they are in the stage.

    If earlier gradients have the same dtype, each new gradient is added to them and freed; else the new ones stay.
    """
    stage = rank.stages[state.chunk]
    plan, split = stage.plan, _split(stage)
    unsharded = unsharded_parameters(plan, plan.every_layer, "this stage's parameters, unsharded", plan.outside)
    alive = (*common, *earlier_gradients(rank, state), unsharded)
    added = bool(state.fresh[state.chunk] or (plan.reduce_bytes == plan.width.compute and state.earlier[state.chunk]))
    every = list(_one_by_one(stage, split))
    for name, one in _highest(every, lambda found: found[1].bytes_beyond(plan.width.compute, added=added)):
        yield Moment(name, Phase.BACKWARD, (*alive, *_making(stage, plan, one, added=added)))


def _highest(found: list[T], n_bytes: Callable[[T], Int]) -> list[T]:
    """Return the element with most bytes; all elements if sizes are columns."""
    sizes = [n_bytes(one) for one in found]
    if not all(isinstance(size, int) for size in sizes):
        return found
    return [found[sizes.index(max(sizes))]] if found else []


class _Making(NamedTuple):
    """Weights whose gradients are being made, and the gradients made before them in this half."""

    weights: Weights
    last: int
    """Elements of the gradients made right before, which a variable holds until these are made."""
    made: int
    """Elements of all gradients made before."""
    freed: Int
    """Bytes freed so far."""

    def gradients(self, *, added: bool) -> int:
        """Return the live gradients: all so far, or only the last two if each is added to earlier ones. [elements]"""
        return self.weights.numel + (self.last if added else self.made)

    def bytes_beyond(self, width: int, *, added: bool) -> Int:
        """Return the live bytes beyond those at the beginning of the half. [bytes]"""
        return width * self.gradients(added=added) + total_bytes(self.weights.beside) - self.freed


def _one_by_one(stage: StagePlan, split: Split) -> Iterator[tuple[str, _Making]]:
    """Yield the weights of the blocks at which memory can peak, and of the modules after the blocks."""
    ways = [(sum(one.numel for one in of.weights), added_up(one.freed for one in of.weights)) for of in split.blocks]
    for position in stage.positions:
        made, freed = _of_blocks(ways, position.before)
        last = 0 if position.previous_run is None else split.blocks[position.previous_run].weights[-1].numel
        for one in _through_weights(split.blocks[position.run].weights, last, made, freed):
            yield f"backward of {position.name}, weights: {one.weights.name}", one
    if split.head is not None:
        made, freed = _of_blocks(ways, stage.plan.every_layer)
        last = split.blocks[stage.positions[-1].run].weights[-1].numel
        for one in _through_weights(split.head.weights, last, made, freed):
            yield f"backward of the {one.weights.name}, weights", one


def _through_weights(weights: tuple[Weights, ...], last: int, made: int, freed: Int) -> Iterator[_Making]:
    for one in weights:
        yield _Making(one, last, made, freed)
        last, made, freed = one.numel, made + one.numel, freed + one.freed


def _of_blocks(ways: list[tuple[int, Int]], layers: tuple[int, ...]) -> tuple[int, Int]:
    elements = sum(count * numel for count, (numel, _) in zip(layers, ways, strict=True))
    return elements, weighted(layers, [freed for _, freed in ways])


def _making(stage: StagePlan, plan: Plan, now: _Making, *, added: bool) -> tuple[Line, ...]:
    left, width = stage.between_bytes - now.freed, plan.width.compute
    return (
        sized(Kind.ACTIVATIONS, 1, left, "kept between the halves, of weights still to come", SPLIT_BACKWARD),
        sized(Kind.UNSHARDED_GRADIENTS, width, now.gradients(added=added), _MADE_NOW, SPLIT_BACKWARD),
        *now.weights.beside,
    )

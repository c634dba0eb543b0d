"""The tensors that wait on a pipeline rank during a pass: micro-batches' activations, other stages' memory, and sends."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from zeroplan.engines.formulas import several, sized
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.runtime import Units
from zeroplan.engines.pipeline.lines import (
    AT_ONCE,
    HALVES,
    accumulated,
    as_made,
    made_bytes,
    made_line,
    reduced,
    stays_unsharded,
    unsharded_parameters,
)
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.pipeline.walk import State
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int, added_up, weighted
from zeroplan.weights import total


class Rank(NamedTuple):
    """A pipeline rank: its stages in layer order, and the lines that are always alive."""

    number: int
    stages: tuple[StagePlan, ...]
    standing: tuple[Line, ...]
    """Shards, optimizer state, the step's token ids or labels, receive buffers."""
    passing: tuple[Line, ...]
    """Lines that are alive during all passes, and freed before the optimizer steps."""
    units: tuple[Units, ...]
    """The FSDP2 units of every stage."""


def most_waits(rank: Rank, states: tuple[State, ...]) -> list[tuple[State, tuple[Line, ...]]]:
    """Return the states with most waiting bytes per kind of pass, which itself always takes the same; all if sizes are columns."""
    sizes = tuple(map(sizes_of, rank.stages))
    if not all(isinstance(size, int) for one in sizes for size in one):
        return [(state, waiting_lines(rank, state)) for state in states]
    most = highest_of_alike(states, lambda state: int(total(waits(state, sizes))) + int(total_bytes(of_the_head(rank, state))))
    return [(state, waiting_lines(rank, state)) for state in most]


def highest_of_alike(states: Iterable[State], waiting_bytes: Callable[[State], int]) -> list[State]:
    """Return, among states whose passes take the same, the first with most waiting bytes."""
    highest: dict[object, tuple[int, State]] = {}
    for state in states:
        n_bytes, alike = waiting_bytes(state), _alike_in(state)
        if alike not in highest or n_bytes > highest[alike][0]:
            highest[alike] = n_bytes, state
    return [state for _, state in highest.values()]


def _alike_in(state: State) -> tuple[object, ...]:
    """Return the parts of a state on which its pass depends."""
    at = state.chunk
    return state.kind, at, state.whole[at], state.earlier[at], state.begins, state.ahead, state.fresh and state.fresh[at]


class Sizes(NamedTuple):
    """The sizes of a stage's waiting tensors. [bytes]"""

    kept: Int
    output: Int
    hidden: Int
    shards: Int
    gradients: Int
    between: Int
    fresh: Int
    unsharded: Int
    """All its parameters, unsharded."""
    outside: Int
    """The parameters outside its blocks."""
    gathered: Int
    """All parameters, gathered ahead."""


def sizes_of(stage: StagePlan) -> Sizes:
    """Return the sizes of a stage's tensors that can wait. [bytes]"""
    plan = stage.plan
    shards = reduced(plan, plan.every_layer, "", plan.trained_outside).n_bytes
    gradients = accumulated(plan, plan.every_layer, plan.trained_outside).n_bytes
    fresh = as_made(plan, plan.every_layer, plan.trained_outside).n_bytes
    every, none = plan.every_layer, tuple(0 for _ in plan.blocks)
    return Sizes(
        stage.kept_bytes, stage.output_bytes, stage.hidden_bytes, shards, gradients, stage.between_bytes, fresh,
        unsharded_parameters(plan, every, "", stays_unsharded(plan, whole=True)).n_bytes,
        unsharded_parameters(plan, none, "", stays_unsharded(plan, whole=False)).n_bytes,
        plan.gathers * plan.width.compute * gathered_elements(plan),
    )  # fmt: skip


def waits(state: State, sizes: tuple[Sizes, ...]) -> list[Int]:
    """Return the sums by pool of :func:`waiting_lines`, without permanent lines and a head's gradient. [bytes]"""
    computing: Int = state.sent * sizes[0].hidden
    gather: Int = 0
    reduce: Int = 0
    for at, one in enumerate(sizes):
        computing = computing + state.in_flight[at] * one.kept + state.outputs[at] * one.output
        if state.between:
            computing = computing + state.between[at] * one.between
        if at == state.chunk:
            continue
        if state.reduced[at]:
            reduce = reduce + one.shards
            continue
        if state.begun[at]:
            computing = computing + (0 if state.sharded[at] else one.unsharded if state.whole[at] else one.outside)
        elif not state.sharded[at]:
            gather = gather + one.gathered
        computing = computing + state.earlier[at] * one.gradients + (state.fresh[at] * one.fresh if state.fresh else 0)
    return [computing, gather, reduce]


STAGE = "torch 2.13, torch/distributed/pipelining/stage.py, forward_one_chunk"
BETWEEN = "kept by micro-batches between the halves of their backward, gradients among it"
SENT = "torch 2.13, torch/distributed/pipelining/schedules.py, _batch_p2p"


def waiting_lines(rank: Rank, state: State) -> tuple[Line, ...]:
    """Return the lines that do not belong to the current pass."""
    in_flight = tuple((count, stage.kept_bytes) for count, stage in zip(state.in_flight, rank.stages, strict=True))
    outputs = tuple((count, stage.output_bytes) for count, stage in zip(state.outputs, rank.stages, strict=True))
    logits = tuple(one for one, stage in zip(outputs, rank.stages, strict=True) if stage.stage.is_last)
    hidden = tuple(one for one, stage in zip(outputs, rank.stages, strict=True) if not stage.stage.is_last)
    sent = ((state.sent, rank.stages[0].hidden_bytes),)
    between = tuple((count, stage.between_bytes) for count, stage in zip(state.between, rank.stages, strict=False))
    return (
        *rank.standing,
        *rank.passing,
        _of_several(Kind.ACTIVATIONS, in_flight, "kept by the micro-batches in flight beside this one", STAGE),
        *([_of_several(Kind.ACTIVATIONS, between, BETWEEN, HALVES)] if between else ()),
        _of_several(Kind.ACTIVATIONS, hidden, "outputs of stages, until their backward or as long as a send holds them", STAGE),
        _of_several(Kind.LOGITS, logits, "logits, until the backward of their micro-batch has ended", STAGE),
        _of_several(Kind.ACTIVATION_GRADIENTS, sent, "gradients of inputs, as long as a send holds them", SENT),
        *_other_stages(rank, state),
        *(of_the_head(rank, state) if state.chunk != len(rank.stages) - 1 else ()),
    )


def in_flight_line(stage: StagePlan) -> Line:
    """Return the tensors that one micro-batch keeps in a stage from its forward to its backward. [bytes]"""
    return _of_several(Kind.ACTIVATIONS, ((1, stage.kept_bytes),), "kept by this micro-batch", STAGE)


def of_the_head(rank: Rank, state: State) -> tuple[Line, ...]:
    """Return the head's gradient that a chunked loss has left, until the last stage's backward accumulates it. [bytes]

    If it is added to earlier micro-batches' gradient, it is no separate tensor.
    """
    stage = rank.stages[-1]
    if not (stage.is_chunked and state.ahead):
        return ()
    made = stage.head_elements
    plan = stage.plan._replace(several=state.earlier[-1])
    return (made_line(plan, made_bytes(plan, made, 0), "the head's, of a loss in chunks"),)


def _of_several(kind: Kind, terms: tuple[tuple[int, Int], ...], reason: str, source: str) -> Line:
    return Line(kind, added_up(count * size for count, size in terms), reason, several(*terms), source)


def _other_stages(rank: Rank, state: State) -> Iterator[Line]:
    for at, stage in enumerate(rank.stages):
        if at == state.chunk:
            continue
        plan = stage.plan
        yield from _parameters_of_another(plan, state, at)
        if state.reduced[at]:
            yield reduced(plan, plan.every_layer, "this rank's chunk of another stage's gradients", plan.trained_outside)
            continue
        if state.earlier[at]:
            yield accumulated(plan, plan.every_layer, plan.trained_outside, whose="another stage's")
        if state.fresh and state.fresh[at]:
            yield as_made(plan, plan.every_layer, plan.trained_outside, whose="another stage's")


def _parameters_of_another(plan: Plan, state: State, at: int) -> tuple[Line, ...]:
    """Return the unsharded parameters of a stage that does not run: all gathered ahead of its pass, later all or some."""
    if state.reduced[at] or state.sharded[at]:
        return ()
    if not state.begun[at]:
        gathered = plan.gathers * gathered_elements(plan)
        return (sized(Kind.GATHER, plan.width.compute, gathered, "another stage's parameters, gathered ahead", AT_ONCE),)
    layers = plan.every_layer if state.whole[at] else tuple(0 for _ in plan.blocks)
    outside = stays_unsharded(plan, whole=state.whole[at])
    return (unsharded_parameters(plan, layers, "another stage's parameters, unsharded", outside),)


def gathered_elements(plan: Plan) -> Int:
    """Return the gathered parameters of a stage. Experts that no other rank has are not gathered."""
    alone = [0 if one.experts is None else (1 - one.experts.gathers) * one.experts.padded for one in plan.blocks]
    inside = weighted(plan.every_layer, [one.padded - less for one, less in zip(plan.blocks, alone, strict=True)])
    return sum([group.padded for group in plan.outside]) + inside

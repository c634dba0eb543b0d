"""The host memory of a pipeline rank: its stages' states, and inputs of blocks for every micro-batch in flight."""

from collections.abc import Iterator
from operator import add

from zeroplan.engines.account import Symbol
from zeroplan.engines.formulas import several
from zeroplan.engines.fsdp2 import activations_on_host
from zeroplan.engines.pinned import beyond, beyond_symbol
from zeroplan.engines.pipeline.lines import plain
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.pipeline.walk import State
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int, added_up, maximum, weighted
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.offloaded import SAVED_ON_CPU

_REASON = "inputs of blocks, of all micro-batches between their forward and their backward"


def in_host_memory(
    recipe: RecipeSpec, stages: tuple[StagePlan, ...], states: tuple[State, ...]
) -> tuple[tuple[Line, ...], tuple[Symbol, ...]]:  # fmt: skip
    """Return the lines of a rank's host memory, and their symbols; nothing without offload. [bytes]"""
    if not recipe.offloads:
        return (), ()
    pinned = added_up(stage.plan.beyond_pinned_bytes for stage in stages)
    lines = [line for stage in stages for line in _states_of(stage)]
    if recipe.offload_activations:
        inputs, rounded = _inputs(stages, states)
        pinned, lines = pinned + rounded, [*lines, inputs]
    return (*lines, beyond(pinned)), (beyond_symbol(pinned),)


def _states_of(stage: StagePlan) -> Iterator[Line]:
    plan = stage.plan
    if plan.offloaded:
        gradients = plan.reduced_gradients(plan.every_layer, "after backward", plan.trained_outside)
        yield from map(plain, (*plan.in_host_memory, gradients))


def _inputs(stages: tuple[StagePlan, ...], states: tuple[State, ...]) -> tuple[Line, Int]:
    """Return the peak of offloaded inputs, and the extra bytes of their pinned blocks."""
    each = [activations_on_host(stage.plan) for stage in stages]
    n_bytes, rounded = (
        _most(sizes, states) for sizes in ([total_bytes(one.lines) for one in each], [one.beyond_bytes for one in each])
    )
    return Line(Kind.ACTIVATIONS, n_bytes, _REASON, several((1, n_bytes)), SAVED_ON_CPU), rounded


def _most(sizes: list[Int], states: tuple[State, ...]) -> Int:
    """Return the peak of stage-wise sizes, over every micro-batch in flight and the one whose pass runs."""

    def of(state: State) -> Int:
        running = [at == state.chunk and state.kind != "reducing" for at, _ in enumerate(sizes)]
        return weighted(map(add, state.in_flight, running), sizes)

    return maximum(0, *map(of, states))

"""Layouts that differ in how Adam steps alone: from what the step in lists of tensors has told, what the fused kernel needs.

The fused kernel makes no temporaries and keeps its step counters on the GPU; nothing else of memory or time knows how it steps.
So one account tells of both.
"""

from dataclasses import replace
from typing import NamedTuple

from zeroplan.engines.account import Account
from zeroplan.engines.optimizers import step_counters
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.planner.columns import entries_of
from zeroplan.spec.hardware import ClusterSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ADAM, RecipeSpec
from zeroplan.steptime import StepTime, stepped
from zeroplan.timeline import own_pools
from zeroplan.trace import Entry, highest_of
from zeroplan.transformer.params import trained_layout
from zeroplan.weights import Highest


class Told(NamedTuple):
    """What a structure has told of all its layouts, as far as the one whose Adam is fused needs it."""

    working: Highest
    """Forward and backward, the optimizer's states beside everything else."""
    without: Highest
    """Moments that have no states, such as those before the first step."""
    step: Highest
    """Of the optimizer's step what is no temporary of it."""
    states: tuple[Line, ...]
    time: StepTime


def lists_of(recipe: RecipeSpec) -> RecipeSpec | None:
    """The recipe that tells of this one: the same, but that Adam steps in lists; None where none does.

    Not where the optimizer's way of stepping decides which rank has most, as with ZeroRedundancyOptimizer, or where the CPU steps.
    """
    alike = (recipe.engine, recipe.zero_stage) in (("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)) and not recipe.offloads
    if not alike or recipe.optimizer not in ADAM or recipe.optimizer_impl != "fused":
        return None
    return replace(recipe, optimizer_impl="foreach")


def of_lists(account: Account, time: StepTime, recipe: RecipeSpec) -> tuple[Highest, Told]:
    """What an account with the step in lists says of its own layouts, and what it tells of those whose step is fused."""
    state, pools = next(line for line in account.states if line.kind is Kind.OPTIMIZER_STATE), own_pools(recipe)
    entries = entries_of(account.moments)
    steps = [entry for entry in entries if entry.phase is Phase.STEP]
    others = [entry for entry in entries if entry.phase is not Phase.STEP]
    has_states = [any(line is state for lines in entry.alive for line in lines) for entry in others]
    working = highest_of((one for one, has in zip(others, has_states, strict=True) if has), pools)
    without = highest_of((one for one, has in zip(others, has_states, strict=True) if not has), pools)
    step = highest_of(map(_without_temporaries, steps), pools)
    own = working.or_of(without).or_of(highest_of(steps, pools))
    return own, Told(working, without, step, account.states, time)


def _without_temporaries(step: Entry) -> Entry:
    alive = [tuple([line for line in lines if line.kind is not Kind.OPTIMIZER_TEMPORARY]) for lines in step.alive]
    return step._replace(alive=tuple(alive))


def of_fused(known: Told, model: ModelSpec, recipe: RecipeSpec, cluster: ClusterSpec) -> tuple[Highest, StepTime]:
    """Memory, library workspaces left out, and time of the layouts whose Adam is fused. [bytes, s]"""
    whole = trained_layout(model)
    tensors = len(whole.embeddings) + len(whole.tail) + sum(run.layers * len(run.parameters) for run in whole.runs)
    counters = step_counters(recipe.optimizer, "fused", tensors)
    pool, n_bytes = own_pools(recipe).get(Kind.OPTIMIZER_STATE, 0), sum(int(line.n_bytes) for line in counters)
    held = known.working.or_of(known.step).beside(n_bytes, pool).or_of(known.without)
    return held, stepped(known.time, (*known.states, *counters), recipe, cluster)

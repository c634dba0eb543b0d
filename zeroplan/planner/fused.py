"""The fused Adam's layouts, from the results for Adam in lists of tensors (``foreach``).

The fused kernel makes no temporaries and keeps its step counters on the GPU. Everything else of memory and time is equal, so
that one account serves both.
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
from zeroplan.steptime import StepTime, with_optimizer_step
from zeroplan.timeline import own_pools
from zeroplan.trace import Entry, highest_of
from zeroplan.transformer.params import trained_layout
from zeroplan.weights import Highest


class SharedResults(NamedTuple):
    """The results of a structure's layouts that the structure with the fused Adam reuses."""

    working: Highest
    """Moments of forward and backward, with the optimizer's states."""
    without: Highest
    """Moments without states, such as those before the first step."""
    step: Highest
    """Moments of the optimizer's step, without its temporaries."""
    states: tuple[Line, ...]
    time: StepTime


def recipe_in_lists(recipe: RecipeSpec) -> RecipeSpec | None:
    """Return the same recipe with Adam in lists, whose results serve the fused one; None if there is none.

    There is none where the implementation decides which rank holds most (ZeroRedundancyOptimizer), or where the CPU runs the
    step.
    """
    alike = (recipe.engine, recipe.zero_stage) in (("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)) and not recipe.offloads
    if not alike or recipe.optimizer not in ADAM or recipe.optimizer_impl != "fused":
        return None
    return replace(recipe, optimizer_impl="foreach")


def results_in_lists(account: Account, time: StepTime, recipe: RecipeSpec) -> tuple[Highest, SharedResults]:
    """Return the highest moments with Adam in lists, and the results that the fused Adam reuses."""
    state, pools = next(line for line in account.states if line.kind is Kind.OPTIMIZER_STATE), own_pools(recipe)
    entries = entries_of(account.moments)
    steps = [entry for entry in entries if entry.phase is Phase.STEP]
    others = [entry for entry in entries if entry.phase is not Phase.STEP]
    has_states = [any(line is state for lines in entry.alive for line in lines) for entry in others]
    working = highest_of((one for one, has in zip(others, has_states, strict=True) if has), pools)
    without = highest_of((one for one, has in zip(others, has_states, strict=True) if not has), pools)
    step = highest_of(map(_without_temporaries, steps), pools)
    own = working.or_of(without).or_of(highest_of(steps, pools))
    return own, SharedResults(working, without, step, account.states, time)


def _without_temporaries(step: Entry) -> Entry:
    alive = [tuple([line for line in lines if line.kind is not Kind.OPTIMIZER_TEMPORARY]) for lines in step.alive]
    return step._replace(alive=tuple(alive))


def results_of_fused(
    known: SharedResults, model: ModelSpec, recipe: RecipeSpec, cluster: ClusterSpec
) -> tuple[Highest, StepTime]:
    """Return memory, without library workspaces, and time of the layouts with the fused Adam. [bytes, s]"""
    whole = trained_layout(model)
    tensors = len(whole.embeddings) + len(whole.tail) + sum(run.layers * len(run.parameters) for run in whole.runs)
    counters = step_counters(recipe.optimizer, "fused", tensors)
    pool, n_bytes = own_pools(recipe).get(Kind.OPTIMIZER_STATE, 0), sum(int(line.n_bytes) for line in counters)
    held = known.working.or_of(known.step).beside(n_bytes, pool).or_of(known.without)
    return held, with_optimizer_step(known.time, (*known.states, *counters), recipe, cluster)

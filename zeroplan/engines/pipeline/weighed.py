"""The memory of pipeline ranks in bytes only, for searches over many layouts that share stages and passes.

A pass through a stage takes the same memory whatever waits on the rank. So each kind of pass through a stage runs once, and the
waiting bytes are added to its peak. :func:`~zeroplan.engines.pipeline.accounts` has the same moments as lines.
"""

import sys
from collections.abc import Hashable, Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from operator import le
from typing import NamedTuple

from zeroplan.engines.account import Account
from zeroplan.engines.fsdp2.runtime import Units
from zeroplan.engines.optimizers import step_temporary_lines
from zeroplan.engines.pipeline import (
    account_of_time,
    accounts_of,
    arranged,
    cut_lines,
    makers_of,
    received_lines,
    states_for,
    until_next,
)
from zeroplan.engines.pipeline.bounds import Bounds, bounds_of
from zeroplan.engines.pipeline.passes import StagePass, only_in_flight
from zeroplan.engines.pipeline.stage import StagePlan, layers_of, recipe_of, stage_plan_of
from zeroplan.engines.pipeline.waiting import Rank, highest_of_alike, sizes_of, waits
from zeroplan.engines.pipeline.walk import State
from zeroplan.engines.precisions import widths
from zeroplan.ledger import Kind, Line
from zeroplan.memo import recalled
from zeroplan.spec.batch import Batch, Numbers, of_a_rank
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import SPLIT, Stage
from zeroplan.spec.recipe import ADAM, RecipeSpec
from zeroplan.trace import Entry, beside, entry_of, highest_of
from zeroplan.weights import Highest, Pools, Weight, in_pools, together, total, weigh

#: Represents all waiting tensors of a rank.
_WAITING = (Line(Kind.ACTIVATIONS, 0, "everything that waits"),)


class Pass(NamedTuple):
    """The peak of a pass through a stage, without waiting tensors; for the last stage's forward also after the loss is made."""

    highest: Highest
    at_the_loss: Highest | None


class Worked:
    """A stage, and the memory of each kind of pass through it, computed once. [bytes]"""

    def __init__(self, plan: StagePlan, of: object, pools: Pools) -> None:
        """Compute the stage's sizes; ``of`` is the object that it was made from, which must live as long."""
        self.stage, self.of, self.pools, inner = plan, of, pools, plan.plan
        self.units = Units(inner._replace(walk=plan.walk))
        self.passes: dict[object, Pass] = {}
        self.sizes = sizes_of(plan)
        self.standing = weigh(inner.persistent, pools)
        shards = inner.gradient_shards(inner.every_layer, "after backward", inner.trained_outside)
        self.reduced = weigh((shards,), pools)

    @cached_property
    def bounds(self) -> Bounds | None:
        """Upper bounds of its passes, if they are simple to compute."""
        return bounds_of(self.stage, self.sizes)

    def taken(self, state: State) -> Pass:
        """Return the memory of a state's pass through this stage, which must be the state's current stage."""
        at = state.chunk
        fresh = state.fresh[at] if state.fresh else None
        key = state.kind, state.whole[at], state.earlier[at], state.begins, fresh
        if key not in self.passes:
            one = State(
                state.kind, 0, (0,), (0,), 0, (state.earlier[at],), (state.whole[at],), (False,), (False,), (True,), state.begins,
                (0,) if state.between else (), () if fresh is None else (fresh,),
            )  # fmt: skip
            self.passes[key] = self._run(one)
        return self.passes[key]

    def _run(self, state: State) -> Pass:
        rank = Rank(0, (self.stage,), (), (), (self.units,))
        if state.kind != "forward":
            made = makers_of(splits=bool(state.between))[state.kind](rank, state, _WAITING)
            return Pass(highest_of([one if isinstance(one, Entry) else entry_of(one) for one in made], self.pools), None)
        one = StagePass(rank, state, _WAITING)
        one.forward_through()
        entries = one.trace.finished()
        if one.output_made is None:
            return Pass(highest_of(entries, self.pools), None)
        before, after = entries[: one.output_made], entries[one.output_made :]
        return Pass(highest_of(before, self.pools), highest_of(after, self.pools))


class Weigher:
    """The ranks of a pipeline under one recipe: the memory of each, for any batch."""

    def __init__(self, model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec, pools: Pools) -> None:
        """Split the model into stages. Raises SpecError if that is not modelled."""
        self.here, self.mesh, self.pools = arranged(model, recipe, mesh), mesh, pools
        self.model, self.recipe = model, recipe
        plain = replace(self.here.recipe, pipeline_schedule=None, pipeline_stages_per_rank=None, pipeline_layers=None)
        self.is_plain = _is_plain(model, self.here.recipe)
        self._alike = recalled(lambda: (Weigher, plain), lambda: plain)  # one object for all that are equal

    def rank(self, number: int, batch: Numbers) -> "WeighedRank":
        """Return one of the ranks with a batch."""
        return recalled(lambda: (self, number, batch), lambda: WeighedRank(self, number, batch))

    def least_bytes(self, number: int) -> int:
        """Return a lower bound of a rank's peak with any batch: its shards of weights, gradients and Adam's states. [bytes]

        All of them are there when the optimizer steps, whatever is recomputed, and in whatever order the schedule runs. It needs no
        plan of a stage.
        """
        here, mesh = self.here, self.mesh
        if not self.is_plain:
            return 0
        sharing = mesh.dp_shard * mesh.cp * mesh.tp
        elements = sum(_elements(here.model, here.stages[at]) for at in here.indices(number))
        copies = 1 + (not here.recipe.fsdp2.step_in_backward) + 2 * (here.recipe.optimizer in ADAM)
        return copies * widths(here.recipe.precision).stored * elements // sharing

    def worked(self, stage: Stage, batch: Numbers) -> Worked:
        """Return a stage's sizes, shared by all equal stages."""
        here, mesh = self.here, self.mesh
        fewer, part = layers_of(here.model, stage, tp=mesh.tp, ep=mesh.ep)
        own, split = recipe_of(here.recipe, stage), here.recipe.pipeline_schedule in SPLIT
        again = own.recompute, own.recompute_layers
        local = of_a_rank(batch, here.cp)

        def key() -> Hashable:
            several = min(batch.grad_accum_steps, 3)  # a plan distinguishes only these
            numbers = batch.micro_batch_size, batch.seq_len, several, mesh
            return Worked, id(fewer), id(part), id(self._alike), again, split, stage.is_first, stage.is_last, numbers

        return recalled(key, lambda: Worked(stage_plan_of(fewer, part, own, mesh, local, stage), (fewer, part), self.pools))


@lru_cache(maxsize=4096)
def _elements(model: ModelSpec, stage: Stage) -> int:
    """Return the elements of a stage's parameters, on all ranks together."""
    tree = layers_of(model, stage)[1]
    of_blocks = sum(run.layers * one.numel for run in tree.runs for one in run.parameters)
    return of_blocks + sum(one.numel for one in (*tree.embeddings, *tree.tail))


def _is_plain(model: ModelSpec, recipe: RecipeSpec) -> bool:
    """Whether a pass takes the same memory whatever waits, without offload; else every rank's lines are summed."""
    whole = model.adapter is None and model.frozen is None and recipe.loss == "full"
    return whole and not (recipe.offloads or recipe.fsdp2.shards_ends or recipe.fsdp2.of_torch_2_15)


class WeighedRank:
    """A pipeline rank with a batch. [bytes]"""

    def __init__(self, of: Weigher, number: int, batch: Numbers) -> None:
        """Find the rank's stages and its permanent memory."""
        here = of.here
        self.number, self.whole_batch = number, batch
        self.of, self.place = of, here.place(number, batch.grad_accum_steps)
        self.batch: Batch = of_a_rank(batch, here.cp)
        self.stages = tuple([here.stages[at] for at in here.indices(number)])
        self.worked = tuple([of.worked(stage, batch) for stage in self.stages])
        self.plans = tuple([one.stage._replace(stage=stage) for one, stage in zip(self.worked, self.stages, strict=True)])
        self.sizes = tuple([one.sizes for one in self.worked])
        received = received_lines(self.plans, of.mesh, self.batch)
        self.standing = together([*[one.standing for one in self.worked], weigh(received, of.pools)])
        passing = weigh(cut_lines(self.plans, of.mesh, self.batch), of.pools)
        self.waiting = together([self.standing, passing])
        self.states = states_for(self.place, self.plans[0].plan)

    @cached_property
    def peak_bytes(self) -> int:
        """The peak of its tensors, without library workspaces."""
        return int(self._highest(pools=False).peak_bytes)

    @cached_property
    def highest(self) -> Highest:
        """The peak, and the largest size in each pool."""
        return self._highest(pools=True)

    @cached_property
    def _at_most(self) -> list[tuple[State, Weight, Weight | None]]:
        """For every kind of pass, the state with most waiting bytes, these bytes, and a bound of all live bytes."""
        if not self.of.is_plain:
            return []
        found = list[tuple[State, Weight, Weight | None]]()
        for state in highest_of_alike(self.states, lambda state: int(total(waits(state, self.sizes)))):
            bounds, waiting = self.worked[state.chunk].bounds, self._waits(state)
            most = None if bounds is None else bounds.of(state)
            found.append((state, waiting, None if most is None else together([most, waiting])))
        return found

    @cached_property
    def bound_bytes(self) -> int | None:
        """An upper bound of the peak; None if it takes as long to compute as the peak. [bytes]"""
        if not self.of.is_plain:
            return None
        most = [total(bound) for _, _, bound in self._at_most if bound is not None]
        return int(max(*most, total(self._at_the_step))) if len(most) == len(self._at_most) else None

    def waits_for_more(self, n_bytes: int) -> bool:
        """Whether the bytes that wait alone exceed this many, so that the peak does."""
        return any(total(waiting) > n_bytes for _, waiting, _ in self._at_most)

    def exceeds(self, n_bytes: int) -> bool:
        """Whether the peak exceeds this many bytes. A bound often decides this quickly, or the first pass that exceeds them."""
        if self.bound_bytes is not None and self.bound_bytes <= n_bytes:
            return False
        return bool(self._highest(pools=False, up_to=n_bytes).peak_bytes > n_bytes)

    def _highest(self, *, pools: bool, up_to: int = sys.maxsize) -> Highest:
        """Return the peak, and the pools if requested; with ``up_to`` the first peak above so many bytes.

        Skips passes whose bound is below the peak so far.
        """
        if not self.of.is_plain:
            return self._by_lines
        found = _highest(self._at_the_step)
        for state, waiting, most in sorted(self._at_most, key=_most_first):
            if found.peak_bytes > up_to:
                break
            if most is not None and _is_below(most, found, pools=pools):
                continue
            taken = self.worked[state.chunk].taken(state)
            found = found.or_of(beside(taken.highest, waiting))
            if taken.at_the_loss is not None:
                found = found.or_of(beside(taken.at_the_loss, self._waits(only_in_flight(state))))
        return found

    @cached_property
    def _by_lines(self) -> Highest:
        return highest_of(tuple(map(entry_of, self._account.moments)), self.of.pools)

    @cached_property
    def _account(self) -> Account:
        of = self.of
        return accounts_of((self.number,), of.model, of.recipe, of.mesh, self.whole_batch)[0]

    @cached_property
    def _at_the_step(self) -> Weight:
        recipe, plan, pools = self.of.here.recipe, self.plans[0].plan, self.of.pools
        tensors = tuple([tensor for one in self.plans for tensor in one.plan.local_tensors])
        made = step_temporary_lines(recipe.optimizer, plan.impl, tensors, plan.width.stored, symbol="")
        left = until_next(self.place, self.plans[0].hidden_bytes)
        return together([self.standing, *[one.reduced for one in self.worked], weigh((*made, *left), pools)])

    def _waits(self, state: State) -> Weight:
        return together([self.waiting, waits(state, self.sizes)])

    def account_of_time(self) -> Account:
        """Return the account that the step time depends on. With offload it is the whole account, since copies take time."""
        if not self.of.is_plain:
            return self._account
        return account_of_time(self.plans, self.place, self.of.mesh, self.batch, self.of.here.model)


def fullest(ranks: Iterable[WeighedRank]) -> WeighedRank:
    """Return the first rank with the highest peak. It computes other ranks' peaks only as far as their bounds require."""
    every, most, known = list(ranks), 0, list[WeighedRank]()
    for rank in sorted(every, key=lambda rank: -(rank.bound_bytes or sys.maxsize)):
        if rank.bound_bytes is None or rank.bound_bytes >= most:
            known.append(rank)
            most = max(most, rank.peak_bytes)
    return max(sorted(known, key=every.index), key=lambda rank: rank.peak_bytes)


def _most_first(one: tuple[State, Weight, Weight | None]) -> int:
    """Sort key: unknown bounds first, then the highest bound."""
    return -sys.maxsize if one[2] is None else -int(total(one[2]))


def _is_below(most: Weight, found: Highest, *, pools: bool) -> bool:
    """Whether a bound is below the peak so far, and in every pool if pools are requested."""
    return bool(total(most) <= found.peak_bytes) and (not pools or all(map(le, in_pools(most), found.pools)))


def _highest(weight: Weight) -> Highest:
    return Highest(total(weight), in_pools(weight))

"""How DDP's reducer handles gradients, from autograd's hook to the end of a backward, and their bytes beside the buckets."""

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, cast

from zeroplan.engines.collecting import Collecting, Counts, Memory, receive
from zeroplan.engines.ddp.copies import are_narrow, row_in_fp32
from zeroplan.engines.precisions import widths
from zeroplan.engines.rows import Placed, Row, numel, trained_row
from zeroplan.numeric import Int, minimum
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec


class Plan(NamedTuple):
    """The settings on which the handling of gradients depends."""

    whole: Row
    element: int
    """Bytes of an element of a gradient."""
    views: bool
    """Gradients are views of the reducer's buckets."""
    syncs: bool
    """The reducer runs after every micro-batch, not only after the last."""

    @property
    def moves_last(self) -> bool:
        """Whether only the last micro-batch moves gradients into buckets."""
        return self.views and not self.syncs

    def program(self, memory: Memory, ranks: int = 1) -> Collecting:
        """Return the reducer's program."""
        return Reducer(self, memory, ranks)


def plan_of(model: ModelSpec, recipe: RecipeSpec, *, wrapped: bool = True) -> Plan:
    """Return how DDP handles a model's gradients under a recipe. Without the wrapper no gradient is a view."""
    views = recipe.ddp.gradient_as_bucket_view and wrapped
    whole = row_in_fp32(model) if are_narrow(model, recipe) else trained_row(model)
    return Plan(whole, widths(recipe.precision).stored, views, recipe.sync_every_micro_batch)


class Reducer(Collecting):
    """``AccumulateGrad``, then the reducer's hook, which copies a gradient into its bucket.

    Source: torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, ``mark_variable_ready_dense``.
    """

    plan: Plan

    def request_earlier(self) -> None:
        """Request all gradients, unless they are in the buckets."""
        if not (self.plan.views and self.plan.syncs):
            super().request_earlier()

    def arrived(self, each: Placed, key: Hashable) -> None:
        """Give a gradient to its parameter or add it to the parameter's; a view moves into its bucket."""
        super().arrived(each, key)
        if self.plan.views and (self.last or self.plan.syncs):
            self.memory.release(self.made.pop(each.start))


class Levels(NamedTuple):
    """Bytes of gradients outside the buckets, as a function of the elements made so far in a backward."""

    plan: Plan
    of_each: tuple[tuple[tuple[int, int], ...], ...]
    """(Bytes at the start, bytes per element made) of each micro-batch that can hold the most.

    For a step of one micro-batch, of two, and of more, or for one job's step.
    """
    micro_batches: Int

    def at(self, made: int) -> Int:
        """Return these bytes when ``made`` elements have reached their parameters. [bytes]"""
        if len(self.of_each) == len(self.of_each[0]) == 1:
            ((begin, slope),) = self.of_each[0]
            return begin + slope * made
        each = [max([begin + slope * made for begin, slope in one]) for one in self.of_each]
        if each.count(each[0]) == len(each):
            return each[0]
        import numpy as np  # noqa: PLC0415  a single job never needs it

        return cast("Int", np.array(each, dtype=np.int64)[minimum(self.micro_batches, len(each)) - 1])


def levels_of(plan: Plan, micro_batches: Int) -> Levels:
    """Run the reducer over the backward of a step."""
    most = 3 if plan.moves_last else 2
    several = (min(micro_batches, most),) if isinstance(micro_batches, int) else range(1, most + 1)
    return Levels(plan, tuple([_levels(plan, each) for each in several]), micro_batches)


@lru_cache(maxsize=256)
def _levels(plan: Plan, micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Return the levels of the last micro-batch or, if only the last moves gradients, of both of two, or the second of three.

    With three, the second has all gradients, more than the last one has. The reducer treats all gradients alike, so it runs here
    with the first parameter's alone.
    """
    one, whole = plan.whole.placed[0], plan.whole.n_elements
    counts, last, found = Counts(), micro_batches - 1, list[tuple[int, int]]()
    engine = plan._replace(whole=replace(plan.whole, placed=(one,))).program(counts)
    first = max(0, last - 1) if plan.moves_last else last
    if first:
        engine.request_earlier()
    for micro in (first,) if first < last and first else range(first, last + 1):
        engine.last, begin = micro == last, counts.gradients
        receive((one,), engine)
        found.append((begin * whole // numel(one), (counts.gradients - begin) // numel(one)))
    return tuple(found)


@lru_cache(maxsize=256)
def made_above(whole: Row) -> dict[int, int]:
    """Return the elements of gradients made before a block's backward (-1: the embedding; the number of blocks: the head)."""
    made, above = dict.fromkeys(range(whole.n_blocks, -2, -1), 0), 0
    for each in whole.placed:
        made[each.block] += each.end - each.start
    for block, elements in made.items():
        made[block], above = above, above + elements
    return made

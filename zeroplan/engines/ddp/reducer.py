"""What does ``DistributedDataParallel`` do with gradients, from autograd's hook to the end of a backward?"""

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple, cast

from zeroplan.engines.collecting import Collecting, Counts, Memory, groups_of, receive
from zeroplan.engines.precisions import widths
from zeroplan.engines.rows import Placed, Row, numel, trained_row
from zeroplan.numeric import Int, minimum
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec


class Plan(NamedTuple):
    """What becomes of gradients depends on this alone."""

    whole: Row
    element: int
    """Bytes of an element of a gradient."""
    views: bool
    """Gradients are views of the reducer's buckets."""
    syncs: bool
    """Every micro-batch is reduced, not the last one alone."""

    @property
    def moves_last(self) -> bool:
        """Whether only the last micro-batch moves gradients into buckets."""
        return self.views and not self.syncs

    def program(self, memory: Memory, ranks: int = 1) -> Collecting:
        """What the reducer does with gradients."""
        return Reducer(self, memory, ranks)


def plan_of(model: ModelSpec, recipe: RecipeSpec, *, wrapped: bool = True) -> Plan:
    """What a recipe has DDP do with a model's gradients; without a wrapper nothing is a view."""
    views = recipe.ddp.gradient_as_bucket_view and wrapped
    return Plan(trained_row(model), widths(recipe.precision).stored, views, recipe.sync_every_micro_batch)


class Reducer(Collecting):
    """``AccumulateGrad``, then the reducer's hook, which copies a gradient into its bucket.

    Source: torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, ``mark_variable_ready_dense``.
    """

    plan: Plan

    def request_earlier(self) -> None:
        """All gradients, unless they are in the buckets."""
        if not (self.plan.views and self.plan.syncs):
            super().request_earlier()

    def arrived(self, each: Placed, key: Hashable) -> None:
        """A gradient becomes its parameter's, or is added to what that has; where it is a view of a bucket, it moves there."""
        super().arrived(each, key)
        if self.plan.views and (self.last or self.plan.syncs):
            self.memory.release(self.made.pop(each.start))


class Levels(NamedTuple):
    """What gradients take beside the buckets, as each block's backward begins and ends; between, as many elements as are made."""

    plan: Plan
    of_each: tuple[dict[int, "Ends"], ...]
    """For one micro-batch a step, for two, and for more; or for those of one job."""
    micro_batches: Int

    def at(self, block: int, made: int) -> Int:
        """What they take when a block (-1: embedding; the number of blocks: head) has made so many elements. [bytes]"""
        each = [_between(one[block], made) for one in self.of_each]
        if each.count(each[0]) == len(each):
            return each[0]
        import numpy as np  # noqa: PLC0415  a single job never needs it

        return cast("Int", np.array(each, dtype=np.int64)[minimum(self.micro_batches, len(each)) - 1])


class Ends(NamedTuple):
    """Bytes at the begin and at the end of a block's backward, in each micro-batch that can hold the most."""

    elements: int
    begin: tuple[int, ...]
    end: tuple[int, ...]


def _between(ends: Ends, made: int) -> int:
    """Gradients come to their parameters one by one, so that what they take grows or shrinks with their elements."""
    if not ends.elements:
        return max(ends.begin)
    return max(begin + (end - begin) * made // ends.elements for begin, end in zip(ends.begin, ends.end, strict=True))


def levels_of(plan: Plan, micro_batches: Int) -> Levels:
    """Run the reducer over the backward of a step."""
    most = 3 if plan.moves_last else 2
    several = (min(micro_batches, most),) if isinstance(micro_batches, int) else range(1, most + 1)
    return Levels(plan, tuple([_levels(plan, each) for each in several]), micro_batches)


@lru_cache(maxsize=256)
def _levels(plan: Plan, micro_batches: int) -> dict[int, Ends]:
    """Over the last of so many micro-batches and, where that alone moves gradients, over the one before it."""
    counts, last = Counts(), micro_batches - 1
    engine = plan.program(counts)
    first = max(0, last - 1) if plan.moves_last else last
    if first:
        engine.request_earlier()
    found = dict[int, Ends]()
    for one in range(first, last + 1):
        engine.last = one == last
        for block in range(plan.whole.n_blocks, -2, -1):
            begin, elements = counts.gradients, 0
            for group in groups_of(plan.whole).get(block, ()):
                receive(group, engine)
                elements += sum(map(numel, group))
            before = found.get(block, Ends(elements, (), ()))
            found[block] = Ends(elements, (*before.begin, begin), (*before.end, counts.gradients))
    return found

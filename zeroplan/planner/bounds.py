"""Upper bounds of a pipeline's speed. They spare the search the evaluation of pipelines that would be clearly too slow."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zeroplan.errors import SpecError
from zeroplan.planner.degrees import degrees
from zeroplan.planner.space import Degrees, Fixed, Grid, batches
from zeroplan.spec.job import JobSpec
from zeroplan.spec.pipeline import SPLIT, stages_per_rank
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime import least_computing

#: A pipeline is evaluated if its step may be at most this many times as long as that of the fastest layout that fits.
NEARLY = 1.1


class Bounds:
    """Upper bounds of the rates of pipelines, with a cache of the time of a micro-batch.

    The ranks of a pipeline together compute as much as one rank with all layers, and idle while the pipeline fills and drains.
    """

    def __init__(self, base: JobSpec, fixed: Fixed, mfu: float | None) -> None:
        self.base, self.fixed, self.mfu = base, fixed, mfu
        self._seconds: dict[RecipeSpec, dict[tuple[int, int, int, int], float]] = {}

    def is_near(self, recipe: RecipeSpec, grid: Grid, quickest: float, *, partly: bool = True) -> NDArray[np.bool_]:
        """Whether layouts may be nearly as fast as this rate, or as fast if they are ``partly`` recomputed. [tokens/s of a GPU]"""
        near = self.most_tokens_per_s(recipe, grid) >= quickest / NEARLY
        if recipe.recompute == "none" or not partly:
            return near
        return near | (self.most_tokens_per_s(replace(recipe, recompute="none", recompute_layers=None), grid) >= quickest)

    def most_tokens_per_s(self, recipe: RecipeSpec, grid: Grid) -> NDArray[np.float64]:
        """Return an upper bound of each layout's rate; schedules that split the backward may have no bubble. [tokens/s of a GPU]"""
        steps = grid.row(grid.grad_accum_steps)
        chunks = stages_per_rank(recipe.pipeline_schedule or "1f1b", recipe.pipeline_stages_per_rank)
        waits = 0.0 if recipe.pipeline_schedule in SPLIT else (grid.pp - 1) / (chunks * steps)
        seconds = self._of_micro_batches(recipe, grid) * steps / grid.pp * (1.0 + waits)
        rates: NDArray[np.float64] = np.divide(grid.tokens, seconds, out=np.full(grid.layouts, np.inf), where=seconds > 0)
        return rates

    def _of_micro_batches(self, recipe: RecipeSpec, grid: Grid) -> NDArray[np.float64]:
        """Return the time of one micro-batch on a rank with all layers, for each layout; 0 if the engine refuses it. [s]"""
        plain = replace(recipe, pipeline_schedule=None, pipeline_stages_per_rank=None)
        known, sizes = self._seconds.setdefault(plain, {}), grid.row(grid.micro_batch_size).tolist()
        keys = [(size, grid.tp, grid.cp, grid.ep) for size in sizes]
        if any(key not in known for key in keys):
            missing = sorted({*sizes, *self._sizes_of_pipelines(grid)})
            one = grid._replace(
                pp=1, micro_batch_size=np.array([missing]), grad_accum_steps=np.ones((1, len(missing)), np.int64)
            )
            found = np.zeros(len(missing))
            with suppress(SpecError):
                found = one.times(least_computing(self.base.model, plain, one, one, self.base.cluster, mfu=self.mfu))
            known |= {(size, grid.tp, grid.cp, grid.ep): time for size, time in zip(missing, found.tolist(), strict=True)}
        return np.array([known[key] for key in keys])

    def _sizes_of_pipelines(self, grid: Grid) -> Iterator[int]:
        """Yield the micro-batches of all pipelines of these degrees, whose times are then computed at once."""
        for one in self._degrees:
            if (one.tp, one.cp, one.ep) == (grid.tp, grid.cp, grid.ep):
                yield from batches(self.base, self.fixed, self.base.mesh.world_size // one.model_ranks)[0].tolist()

    @cached_property
    def _degrees(self) -> tuple[Degrees, ...]:
        return tuple(degrees(self.base, self.fixed))

"""Megatron's pipelines with more chunks per rank, which idle for a smaller part of the step and hold more activations.

The search interleaves with the fewest chunks, and only where 1F1B would idle for long. This tries all other numbers for the fastest
layouts that it found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from zeroplan.errors import SpecError
from zeroplan.planner.bounds import Bounds
from zeroplan.planner.degrees import is_balanced
from zeroplan.planner.objectives import TIE
from zeroplan.planner.partly import fastest, needed, only, rates_of
from zeroplan.planner.search import Found, Inexpressible, evaluated
from zeroplan.planner.space import Fixed, Grid, easy_room_of, room_of
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec

#: The number of layouts to try with other chunks. They may be slower than the fastest by an eighth: more chunks gain at most what a
#: pipeline idles, and the search interleaves all that idle for over a sixteenth of the step.
_CLOSELY, _NEAR = 8, 1 / 8


def with_more_chunks(
    base: JobSpec, found: Sequence[Found], fixed: Fixed, *, mfu: float | None = None, inexpressible: Inexpressible | None = None
) -> tuple[Found, ...]:
    """Return layouts with another number of chunks that fit and are each clearly faster than all known before.

    Returns none if the user has fixed the chunks or another schedule.
    """
    if fixed.pipeline_stages_per_rank is not None or fixed.pipeline_schedule not in (None, "interleaved-1f1b"):
        return ()
    room = easy_room_of(base, fixed)
    need = needed(found, room)
    room = room if any(bool((one.comfortable_bytes <= room).any()) for one in found) else room_of(base)
    quickest, made = fastest(found, need, room), list[Found]()
    pipelines = [one for one in found if one.recipe.engine == "megatron" and one.grid.pp > 1]
    bounds = Bounds(base, fixed, mfu)
    near = [
        (float(rates_of(one)[at]), number, int(at))
        for number, one in enumerate(pipelines)
        for at in np.flatnonzero((need(one) <= room) & (rates_of(one) >= (1 - _NEAR) * quickest))
    ]
    for _, number, at in sorted(near, reverse=True)[:_CLOSELY]:
        grid = only(pipelines[number].grid, at)
        for recipe in _in_other_chunks(base, pipelines[number].recipe, grid):
            if inexpressible is not None and inexpressible(recipe, grid.degrees):
                continue
            if float(bounds.most_tokens_per_s(recipe, grid)[0]) <= (1 + TIE) * quickest:
                continue
            one = _figures(base, recipe, grid, mfu)
            if one is not None and int(need(one)[0]) <= room and float(rates_of(one)[0]) > (1 + TIE) * quickest:
                made.append(one)
                quickest = float(rates_of(one)[0])
    return tuple(made)


def _in_other_chunks(base: JobSpec, recipe: RecipeSpec, grid: Grid) -> Iterator[RecipeSpec]:
    """Yield the recipe with every number of chunks that cuts the layers evenly, and that the micro-batches can fill."""
    layers, steps = base.model.num_hidden_layers, int(grid.grad_accum_steps.ravel()[0])
    for chunks in range(2, layers // grid.pp + 1):
        other = replace(recipe, pipeline_schedule="interleaved-1f1b", pipeline_stages_per_rank=chunks)
        if steps % grid.pp == 0 and is_balanced(layers, grid.pp * chunks) and other != recipe:
            yield other


def _figures(base: JobSpec, recipe: RecipeSpec, grid: Grid, mfu: float | None) -> Found | None:
    """Return the layout's figures; None if the engine refuses it."""
    try:
        one = evaluated(base, recipe, grid, mfu=mfu)
    except SpecError:
        return None
    return one if len(one.least_bytes) else None

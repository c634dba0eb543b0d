"""Layouts that recompute only the first blocks: some fit although the same layout without recomputation does not.

Every recomputed block saves memory and costs time, so the fewest blocks that fit are the fastest. A bisection finds that number
for the most promising layouts: those that would be the fastest so far if memory and time were linear in the number of blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroplan.errors import SpecError
from zeroplan.planner.bounds import Bounds
from zeroplan.planner.objectives import TIE
from zeroplan.planner.search import Far, Found, Inexpressible, evaluated, job_at
from zeroplan.planner.space import WHOLE, Column, Fixed, Grid, easy_room_of, room_of
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec

#: The number of layouts to bisect.
_CLOSELY = 8


class _Candidate(NamedTuple):
    """A layout that fits with all blocks recomputed, and does not fit without recomputation."""

    recipe: RecipeSpec
    """The recipe that recomputes all blocks, selectively or fully."""
    grid: Grid
    """The grid of this layout alone."""
    layers: int
    """The number of blocks that suffices if memory is linear or convex in it."""
    tokens_per_s: float
    """The rate with that many blocks, if time is linear in them."""


def partly_recomputed(
    base: JobSpec, found: Sequence[Found], fixed: Fixed, far: Far, *, mfu: float | None = None,
    inexpressible: Inexpressible | None = None,
) -> tuple[Found, ...]:  # fmt: skip
    """Return layouts that recompute as few blocks as fit, each clearly faster than all known before.

    Returns none if the user has fixed recomputation. ``far``: structures that were not evaluated without recomputation.
    """
    if fixed.recompute is not None or fixed.recompute_layers is not None or base.cluster.gpu is None:
        return ()
    room = easy_room_of(base, fixed)
    need = needed(found, room)
    room = room if any(one.quickest(base, fixed) for one in found) else room_of(base)
    quickest = fastest(found, need, room)
    found = (*found, *_worth_evaluating(base, found, fixed, far, need, room, quickest, mfu))
    chances = sorted(_candidates(base, found, need, room), key=lambda one: -one.tokens_per_s)
    made: list[Found] = []
    for chance in chances[:_CLOSELY]:
        if chance.tokens_per_s <= (1 + TIE) * quickest or (
            inexpressible is not None and inexpressible(_with(chance.recipe, 1), WHOLE)
        ):
            continue
        one = _least(base, chance, need, room, mfu)
        if one is not None and rates_of(one)[0] > (1 + TIE) * quickest:
            made.append(one)
            quickest = float(rates_of(one)[0])
    return tuple(made)


Need = Callable[[Found], Column]


def fastest(found: Sequence[Found], need: "Need", room: int) -> float:
    """Return the rate of the fastest layout that fits; 0 if none does. [tokens/s of a GPU]"""
    return max((float(rates_of(one)[need(one) <= room].max(initial=0.0)) for one in found), default=0.0)


def needed(found: Sequence[Found], room: int) -> Need:
    """Return the figure that must fit: memory with the allocator's expected cache, or without it if nothing fits with it."""
    if any(bool((one.comfortable_bytes <= room).any()) for one in found):
        return lambda one: one.comfortable_bytes
    return lambda one: one.least_bytes


def rates_of(one: Found) -> NDArray[np.float64]:
    """Return the rate of every layout. [tokens/s of a GPU]"""
    return one.grid.tokens / one.seconds


def _with(recipe: RecipeSpec, layers: int) -> RecipeSpec:
    return replace(recipe, recompute_layers=layers)


def _candidates(base: JobSpec, found: Sequence[Found], need: Need, room: int) -> Iterator[_Candidate]:
    layers = base.model.num_hidden_layers
    none = {(one.recipe, one.grid.key): one for one in found if one.recipe.recompute == "none"}
    for every in found:
        other = none.get((replace(every.recipe, recompute="none"), every.grid.key))
        if every is other or other is None or not _is_modelled(base, every):
            continue
        much, little = need(other), need(every)
        rates, slower = rates_of(other), rates_of(every)
        for at in np.flatnonzero((little <= room) & (much > room)):
            share = (int(much[at]) - room) / (int(much[at]) - int(little[at]))
            enough = min(layers, int(share * layers) + 1)
            seconds = (1 - enough / layers) / rates[at] + enough / layers / slower[at]
            yield _Candidate(every.recipe, only(every.grid, int(at)), enough, float(1 / seconds))


def _worth_evaluating(
    base: JobSpec, found: Sequence[Found], fixed: Fixed, far: Far, need: Need, room: int, quickest: float, mfu: float | None
) -> Iterator[Found]:
    """Yield the figures without recomputation of those structures that may be clearly faster if only some blocks recompute.

    A lower bound of their memory is one of the share of blocks to recompute, too.
    """
    bounds = Bounds(base, fixed, mfu)
    for every in found if far else ():
        recipe, little = replace(every.recipe, recompute="none"), need(every)
        much, fits = far.get((recipe, every.grid.key)), little <= room
        if much is None or every.recipe.recompute == "none" or not fits.any():
            continue
        share = np.minimum(1.0, (much - room)[fits] / (much - little)[fits])
        rates = bounds.most_tokens_per_s(recipe, every.grid)[fits], rates_of(every)[fits]
        if (((1 - share) / rates[0] + share / rates[1]) * (1 + TIE) * quickest < 1).any():
            yield evaluated(base, recipe, every.grid, mfu=mfu)


def _is_modelled(base: JobSpec, every: Found) -> bool:
    """Whether a job with this engine and these degrees may recompute only some blocks."""
    try:
        job_at(base, _with(every.recipe, 1), every.grid, 0)
    except SpecError:
        return False
    return True


def only(grid: Grid, at: int) -> Grid:
    """Return one layout of a grid."""
    rows, columns = grid.shape
    row, column = divmod(at, columns)
    return grid.only(np.arange(rows)[:, None] == row).with_batches(np.arange(columns)[None, :] == column)


def _least(base: JobSpec, chance: _Candidate, need: Need, room: int, mfu: float | None) -> Found | None:
    """Return the layout with the fewest recomputed blocks that fits; None if all blocks are needed."""
    low, high, layers = 1, base.model.num_hidden_layers - 1, chance.layers
    best: Found | None = None
    while low <= high:
        layers = layers if low <= layers <= high else (low + high) // 2
        one = evaluated(base, _with(chance.recipe, layers), chance.grid, mfu=mfu)
        if int(need(one)[0]) <= room:
            best, high, layers = one, layers - 1, layers - 1
        else:
            low, layers = layers + 1, layers + 1
    return best

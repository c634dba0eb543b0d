"""The planner's answer: the best layout, the best of the others, and the reasons."""

from dataclasses import dataclass, field
from typing import NamedTuple

from zeroplan.estimator import Estimate
from zeroplan.planner.objectives import Field, Objective
from zeroplan.planner.rules import Fallen
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime import StepTime


class Layout(NamedTuple):
    """One layout with its figures."""

    job: JobSpec
    least_bytes: int
    """Allocated peak and memory outside the allocator: what must fit."""
    comfortable_bytes: int
    """The same with the allocator's expected cache."""
    seconds: float
    """Time of one optimizer step."""
    tokens_per_s: float
    """Rate of one GPU."""


class Rival(NamedTuple):
    """Another layout, and why it is not the best: one of another engine and stage, or one that an expert would try first."""

    layout: Layout
    why_not: str
    usual: str = ""
    """The name of what an expert would try first; empty for other layouts."""


class More(NamedTuple):
    """What more memory would gain."""

    layout: Layout
    missing_bytes: int
    """Memory that a GPU lacks for it."""
    gain: float
    """Gain in tokens/s, as a share."""


class Ranked(NamedTuple):
    """The first layout of one ranking."""

    ranking: str
    layout: Layout
    free_bytes: int
    """What the GPU has left beside it and what the allocator is expected to cache."""


class Best(NamedTuple):
    """The best layout in full: its memory, its time, and what limits it.

    ``tight``: it fits, but not with the allocator's cache and the margin.
    """

    layout: Layout
    estimate: Estimate
    time: StepTime
    tight: bool
    binding: str
    further: More | None
    """The layout that clearly more memory would gain, with the least of it; None where no amount would gain any."""
    one_more_gib: More | None
    margin: More | None
    """What the memory that the plan keeps free would gain."""


class Cloud(NamedTuple):
    """All computed layouts as columns; ``layouts.structure`` is the index of each one's recipe."""

    recipes: tuple[RecipeSpec, ...]
    layouts: Field


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to one question; ``best`` is None where nothing fits, and ``rivals`` are then the closest layouts.

    ``considered`` counts all layouts, ``evaluated`` those whose memory and time were computed; ``fallen`` lists the rules that
    rejected the others. ``front``: the layouts that no other beats in both time and memory; ``cloud``: all computed layouts.
    """

    base: JobSpec
    objective: Objective
    best: Best | None
    rivals: tuple[Rival, ...]
    front: tuple[Layout, ...]
    considered: int
    evaluated: int
    fallen: tuple[Fallen, ...]
    notes: tuple[str, ...] = ()
    rankings: tuple[Ranked, ...] = ()
    """The fastest layout, the smallest of those nearly as fast, and, if it was searched, the cheapest."""
    cloud: Cloud | None = field(default=None, compare=False, repr=False)

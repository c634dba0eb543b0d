"""The planner's answer: the best layout, its rivals, and the reasons."""

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
    """The minimum that must fit: allocated peak plus memory outside the allocator."""
    comfortable_bytes: int
    """``least_bytes`` plus the allocator's expected cache."""
    seconds: float
    """Time of one optimizer step. [s]"""
    tokens_per_s: float
    """Rate of one GPU."""


class Rival(NamedTuple):
    """Another layout, and why it is not the best."""

    layout: Layout
    why_not: str
    usual: str = ""
    """The name of the kind, if an expert would try it first; empty for other layouts."""


class More(NamedTuple):
    """A faster layout that would fit with more memory."""

    layout: Layout
    missing_bytes: int
    """The memory that the GPU lacks for it."""
    gain: float
    """The relative gain in tokens/s."""


class Ranked(NamedTuple):
    """The first layout of one ranking."""

    ranking: str
    layout: Layout
    free_bytes: int
    """The GPU's memory minus ``comfortable_bytes``."""


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
    """The clearly faster layout that needs the least additional memory; None if there is none."""
    one_more_gib: More | None
    margin: More | None
    """The faster layout that would fit in the plan's margin."""


class Cloud(NamedTuple):
    """All computed layouts as columns; ``layouts.structure`` is the index of each one's recipe."""

    recipes: tuple[RecipeSpec, ...]
    layouts: Field


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to one question. ``best`` is None if nothing fits; ``rivals`` are then the closest layouts.

    ``considered``: the number of all layouts; ``evaluated``: of those with computed memory and time; ``fallen``: the rules that
    rejected the others; ``front``: the Pareto front of time and memory; ``cloud``: all evaluated layouts.
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
    """The fastest layout, the smallest among those nearly as fast, and the cheapest if it was searched."""
    cloud: Cloud | None = field(default=None, compare=False, repr=False)

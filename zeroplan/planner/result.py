"""What the planner answers: the best layout, the best of the others, and why."""

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
    """Allocated peak and what is outside the allocator: what must fit."""
    comfortable_bytes: int
    """The same with what the allocator caches."""
    seconds: float
    """Of one optimizer step."""
    tokens_per_s: float
    """Of one GPU."""


class Rival(NamedTuple):
    """The best layout of another engine and stage, and why it is not the best of all."""

    layout: Layout
    why_not: str


class More(NamedTuple):
    """What more memory would buy."""

    layout: Layout
    missing_bytes: int
    """How much more a GPU needs for it."""
    gain: float
    """Of tokens/s, as a share."""


class Best(NamedTuple):
    """The best layout, in full: its memory, its time, what holds it back.

    ``tight`` says that it fits only while the allocator's cache stays small.
    """

    layout: Layout
    estimate: Estimate
    time: StepTime
    tight: bool
    binding: str
    one_more_gb: More | None


class Cloud(NamedTuple):
    """Every layout that was computed, as columns; ``layouts.structure`` says which of the recipes each has."""

    recipes: tuple[RecipeSpec, ...]
    layouts: Field


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to one question; ``best`` is None where nothing fits, and ``rivals`` then are the closest.

    ``considered`` counts every layout, ``evaluated`` those whose memory and time were computed; ``fallen`` says which rule took
    the others. ``front`` are the layouts that nothing else beats in both time and memory, ``cloud`` all that were computed.
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
    cloud: Cloud | None = field(default=None, compare=False, repr=False)

"""Which layouts are fast, which need little memory, and which does the planner choose?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeroplan.estimator import Verdict, verdict
from zeroplan.planner.result import Layout, Plan
from zeroplan.report.layout import layout_words
from zeroplan.report.series.parts import Caption
from zeroplan.report.words import model_words, partly_trained, plural
from zeroplan.spec.recipe import Engine

_BEYOND = 1.3
"""Layouts that need more than this many times the GPU's memory are not drawn; if none fits, than the smallest need."""
_MOST_KNEES = 2
"""Most knees to name; readers skip more."""
_FINE = 400
"""Layouts within 1/400 of the picture's width and height share a spot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One or several layouts at a place in the picture: memory of a GPU, and speed. [bytes, tokens/s]"""

    engine: Engine
    needed_bytes: int
    tokens_per_s: float
    verdict: Verdict
    layouts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A layout in words, with its memory and speed. [bytes, tokens/s of one GPU]"""

    words: str
    needed_bytes: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoSeries:
    """All layouts, the Pareto front of those that fit (the fastest first), its knees, and the best by the objective."""

    caption: Caption
    objective: str
    spots: tuple[Spot, ...]
    front: tuple[Named, ...]
    knees: tuple[Named, ...]
    best: Named | None
    capacity_bytes: int


def pareto(plan: Plan) -> ParetoSeries:
    """A plan's computed layouts that need at most a little more than the GPU's memory; if none fits, the closest ones."""
    gpu = plan.base.cluster.gpu
    if plan.cloud is None or gpu is None:
        raise ValueError("a plan is of a GPU, and knows every layout that it has computed")
    room = int(gpu.memory_bytes.value)
    front = tuple(_named(one) for one in plan.front)
    return ParetoSeries(
        caption=_caption(plan, gpu.full_name),
        objective=plan.objective,
        spots=_spots(plan, room),
        front=front,
        knees=_knees(front, room),
        best=None if plan.best is None else _named(plan.best.layout),
        capacity_bytes=room,
    )


def _knees(front: Sequence[Named], room: int) -> tuple[Named, ...]:
    """Return the sharpest bends of the drawn front, the smallest first: less memory is much slower, more hardly faster."""
    fastest = max((one.tokens_per_s for one in front), default=0.0)

    def angle(one: Named, other: Named) -> float:
        return math.atan2((other.tokens_per_s - one.tokens_per_s) / fastest, (other.needed_bytes - one.needed_bytes) / room)

    hull: list[Named] = []
    for one in sorted(front, key=lambda named: named.needed_bytes):
        while len(hull) > 1 and angle(hull[-2], hull[-1]) <= angle(hull[-1], one):
            hull.pop()
        hull.append(one)
    bends = [angle(before, at) - angle(at, after) for before, at, after in zip(hull, hull[1:], hull[2:], strict=False)]
    most = sorted(range(len(bends)), key=lambda at: -bends[at])[:_MOST_KNEES]
    return tuple(hull[at + 1] for at in sorted(most))


def _caption(plan: Plan, gpu: str) -> Caption:
    base = plan.base
    job = f"{model_words(base)} on {base.mesh.world_size:,} x {gpu}"
    recipe = f"{base.recipe.precision}, {base.recipe.optimizer}, {plural(base.batch.seq_len, 'token')} per sequence"
    fitting = "" if plan.best is not None else "; nothing fits"
    counted = f"{plural(plan.considered, 'layout')} considered, {plan.evaluated:,} of them computed{fitting}"
    tight = "tight: the allocator's cache may not fit; of these only layouts that may be the best are replayed"
    about = "; ".join(part for part in (job, partly_trained(base.model), recipe) if part)
    return Caption(title="Speed against memory: every layout", lines=(about, counted, tight, *plan.notes))


def _named(one: Layout) -> Named:
    return Named(words=layout_words(one.job), needed_bytes=one.least_bytes, tokens_per_s=one.tokens_per_s)


def _spots(plan: Plan, room: int) -> tuple[Spot, ...]:
    assert plan.cloud is not None  # noqa: S101  see above
    recipes, layouts = plan.cloud
    reach = _BEYOND * (room if plan.best is not None else max(room, int(layouts.least_bytes.min())))
    near = np.flatnonzero(layouts.least_bytes <= reach)
    found: dict[tuple[Engine, Verdict, int, int], Spot] = {}
    most = float(layouts.tokens_per_s[near].max(initial=1.0))
    for at in near.tolist():
        needed, rate = int(layouts.least_bytes[at]), float(layouts.tokens_per_s[at])
        engine, fits = recipes[int(layouts.structure[at])].engine, verdict(needed, int(layouts.comfortable_bytes[at]), room)
        place = (engine, fits, round(needed / reach * _FINE), round(rate / most * _FINE))
        before = found.get(place)
        found[place] = Spot(engine=engine, needed_bytes=needed, tokens_per_s=rate, verdict=fits,
                            layouts=1 if before is None else before.layouts + 1)  # fmt: skip
    return tuple(found.values())

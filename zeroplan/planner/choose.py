"""From everything that was evaluated to an answer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zeroplan.engines.account import Account
from zeroplan.errors import SpecError
from zeroplan.estimator import account_of, estimate
from zeroplan.planner.explain import binding, why_not
from zeroplan.planner.objectives import Field, Objective, field, ordered, pareto
from zeroplan.planner.result import Best, Layout, More, Plan, Rival
from zeroplan.planner.rules import Fallen, Rule
from zeroplan.planner.search import Found, Unsaid, job_at, search
from zeroplan.planner.space import Column, Fixed, check_batch
from zeroplan.spec.job import JobSpec
from zeroplan.steptime import StepTime, step_time
from zeroplan.units import GB

_MOST_RIVALS = 5


def plan(
    base: JobSpec,
    fixed: Fixed,
    *,
    objective: Objective = "throughput",
    mfu: float | None = None,
    unsaid: Unsaid | None = None,
) -> Plan:
    """Return the best layout of ``base``'s model on its GPUs, and why it is the best.

    Raises :class:`~zeroplan.errors.SpecError` where what is asked for contradicts itself, or no engine takes it.
    """
    gpu = base.cluster.gpu
    if gpu is None:
        raise SpecError("a plan needs a GPU to fit; add --gpu NAME (`zeroplan gpus` lists them)")
    if base.model.profile is not None:
        raise SpecError("a plan needs to know a model's operations, which a profile does not tell; use --model or --config")
    check_batch(base.mesh.world_size, fixed)
    found, tally = search(base, fixed, mfu=mfu, unsaid=unsaid)
    if not found:
        raise SpecError(_nothing_starts(tally.fallen))
    layouts, room = field(found), int(gpu.memory_bytes.value)
    fits, easy = layouts.least_bytes <= room, layouts.comfortable_bytes <= room
    tally.cut(Rule.MEMORY, int((~fits).sum()))
    if easy.any():
        tally.cut(Rule.TIGHT, int((fits & ~easy).sum()))
    kept, order = easy if easy.any() else fits, ordered(layouts, objective)
    fits_at_all = bool(kept.any())
    best = _best(base, found, layouts, order, kept, mfu=mfu) if fits_at_all else None
    return Plan(
        base=base,
        objective=objective,
        best=best,
        rivals=_closest(base, found, layouts, room)
        if best is None
        else _rivals(base, found, layouts, order, kept, best, mfu=mfu),
        front=tuple(_layout(base, found, layouts, at) for at in pareto(layouts, kept)),
        considered=layouts.layouts + sum(one.layouts for one in tally.fallen if one.rule not in (Rule.MEMORY, Rule.TIGHT)),
        evaluated=layouts.layouts,
        fallen=tally.fallen,
    )


def _best(
    base: JobSpec, found: Sequence[Found], layouts: Field, order: Column, kept: NDArray[np.bool_], *, mfu: float | None
) -> Best:
    """The first of those that fit, computed once more as a job of its own."""
    gpu = base.cluster.gpu
    room = 0 if gpu is None else int(gpu.memory_bytes.value)
    layout = _layout(base, found, layouts, order[kept[order]][0])
    time = time_of(layout.job, mfu=mfu)
    one_more, further = _bought(base, found, layouts, order, layout, room)
    return Best(layout, estimate(layout.job), time, layout.comfortable_bytes > room, binding(time, further), one_more)


def time_of(job: JobSpec, *, mfu: float | None = None) -> StepTime:
    """The time of one job's step, part by part. [s]"""
    account: Account = account_of(job, job.batch)
    return step_time(account, job.model, job.recipe, job.mesh, job.batch, job.cluster, mfu=mfu)


def _nothing_starts(fallen: Sequence[Fallen]) -> str:
    largest = max(fallen, key=lambda one: one.layouts, default=None)
    if largest is None:
        return (
            "no engine offers what is asked for: its stage, offload or options belong to another engine; leave one of them out"
        )
    return f"no layout can be tried: {largest.example or largest.rule.value}"


def _layout(base: JobSpec, found: Sequence[Found], layouts: Field, at: np.int64) -> Layout:
    one = found[int(layouts.structure[at])]
    return Layout(
        job_at(base, one.recipe, one.grid, int(layouts.at[at])),
        int(layouts.least_bytes[at]),
        int(layouts.comfortable_bytes[at]),
        float(layouts.seconds[at]),
        float(layouts.tokens_per_s[at]),
    )


def _family(found: Sequence[Found], layouts: Field, at: np.int64) -> tuple[str, int]:
    recipe = found[int(layouts.structure[at])].recipe
    return recipe.engine, recipe.zero_stage


def _firsts(found: Sequence[Found], layouts: Field, order: Column) -> dict[tuple[str, int], np.int64]:
    """The first layout of every engine and stage, in order."""
    firsts: dict[tuple[str, int], np.int64] = {}
    for structure in dict.fromkeys(layouts.structure[order].tolist()):
        at = order[layouts.structure[order] == structure][0]
        firsts.setdefault(_family(found, layouts, at), at)
    return firsts


def _rivals(
    base: JobSpec,
    found: Sequence[Found],
    layouts: Field,
    order: Column,
    kept: NDArray[np.bool_],
    best: Best,
    *,
    mfu: float | None,
) -> tuple[Rival, ...]:
    """The second best, and the best of the other engines and stages."""
    fitting = order[kept[order]]
    chosen = [*fitting[1:2], *(at for at in _firsts(found, layouts, fitting).values() if at not in fitting[:2])]
    rivals = []
    for at in chosen[:_MOST_RIVALS]:
        layout = _layout(base, found, layouts, at)
        rivals.append(Rival(layout, why_not(layout, time_of(layout.job, mfu=mfu), best.layout, best.time)))
    return tuple(rivals)


def _closest(base: JobSpec, found: Sequence[Found], layouts: Field, room: int) -> tuple[Rival, ...]:
    """Where nothing fits: of every engine and stage what needs least."""
    order = np.argsort(layouts.least_bytes, kind="stable")
    near = [_layout(base, found, layouts, at) for at in _firsts(found, layouts, order).values()]
    near.sort(key=lambda one: one.least_bytes)
    return tuple(
        Rival(one, f"needs {(one.least_bytes - room) / GB:,.2f} GB more than the GPU has") for one in near[:_MOST_RIVALS]
    )


def _bought(
    base: JobSpec, found: Sequence[Found], layouts: Field, order: Column, best: Layout, room: int
) -> tuple[More | None, More | None]:
    """What one more GB would buy, and the least memory that buys anything, up to twice the GPU's: both in tokens/s."""
    missing = layouts.comfortable_bytes - room
    gains = layouts.tokens_per_s / best.tokens_per_s - 1
    better = order[(missing[order] > 0) & (missing[order] <= room) & (gains[order] > _WORTH)]
    if not len(better):
        return None, None

    def more(at: np.int64) -> More:
        return More(_layout(base, found, layouts, at), int(missing[at]), float(gains[at]))

    within = better[missing[better] <= GB]
    nearest = better[np.argmin(missing[better])]
    return (more(within[np.argmax(gains[within])]) if len(within) else None), more(nearest)


#: A gain below what the model can tell is none.
_WORTH = 0.01

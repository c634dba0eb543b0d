"""Chooses the best layout, its rivals and their explanations from all evaluated layouts. Start at :func:`plan`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroplan.estimator import estimate, replayed_if_tight
from zeroplan.job_time import time_of
from zeroplan.memo import recalled, remembering
from zeroplan.planner.bounds import NEARLY
from zeroplan.planner.chunked import with_more_chunks
from zeroplan.planner.degrees import degrees
from zeroplan.planner.explain import binding, largest_part, why_larger, why_not
from zeroplan.planner.objectives import Field, Objective, field, ordered, pareto
from zeroplan.planner.partly import partly_recomputed
from zeroplan.planner.result import Best, Cloud, Layout, More, Plan, Ranked, Rival
from zeroplan.planner.rules import Fallen, NoLayoutError, Rule, Tally
from zeroplan.planner.search import Found, Inexpressible, job_at, search, without_garbage_collection
from zeroplan.planner.space import WHOLE, Column, Degrees, Fixed, check_batch, easy_room_of, gpu_of
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.units import GIB

_MOST_RIVALS = 5


def layout_of(one: Found, base: JobSpec, at: int) -> Layout:
    """Return one layout of a structure with its figures."""
    least, comfortable, seconds = int(one.least_bytes[at]), int(one.comfortable_bytes[at]), float(one.seconds[at])
    return Layout(job_at(base, one.recipe, one.grid, at), least, comfortable, seconds, float(one.grid.tokens[at] / seconds))


class _Field(NamedTuple):
    """All evaluated layouts, their order, and which of them fit."""

    base: JobSpec
    found: tuple[Found, ...]
    layouts: Field
    order: Column
    """Indexes of layouts, the best first."""
    fits: NDArray[np.bool_]
    easy: NDArray[np.bool_]
    """Whether a layout fits with the allocator's cache and the margin."""
    room_bytes: int
    """The GPU's memory."""
    easy_bytes: int
    """The same without the margin."""
    mfu: float | None
    objective: Objective

    @property
    def kept(self) -> NDArray[np.bool_]:
        """The candidates: tight layouts only if no other fits."""
        return self.easy if self.easy.any() else self.fits

    def layout(self, at: np.int64) -> Layout:
        """Return one layout with its figures."""
        return layout_of(self.found[int(self.layouts.structure[at])], self.base, int(self.layouts.at[at]))

    def as_asked(self, order: Column) -> tuple[int, ...]:
        """Return the first layout in this order with the requested optimizer and precision."""
        base = self.base.recipe.optimizer, self.base.recipe.precision
        alike = [(one.recipe.optimizer, one.recipe.precision) == base for one in self.found]
        among = order[np.array(alike)[self.layouts.structure[order]]]
        return tuple(among[:1].tolist())

    def on_the_gpu(self, order: Column) -> tuple[int, ...]:
        """Return the first layout in this order without offload."""
        stays = np.array([not one.recipe.offloads for one in self.found])
        return tuple(order[stays[self.layouts.structure[order]]][:1].tolist())

    def each_once(self, chosen: Iterable[int]) -> tuple[int, ...]:
        """Return layouts without duplicates in memory and time, such as DeepSpeed's stages on one GPU."""
        alike: dict[tuple[object, ...], int] = {}
        for at in chosen:
            recipe = self.found[int(self.layouts.structure[at])].recipe
            figures = self.layouts.least_bytes[at], self.layouts.comfortable_bytes[at], self.layouts.seconds[at]
            alike.setdefault((recipe.engine, recipe.loss, *figures), at)
        return tuple(alike.values())

    def firsts(self, order: Column) -> tuple[np.int64, ...]:
        """Return the first layout of each engine and stage, in this order."""
        firsts: dict[tuple[str, int], np.int64] = {}
        for structure in dict.fromkeys(self.layouts.structure[order].tolist()):
            recipe = self.found[structure].recipe
            firsts.setdefault((recipe.engine, recipe.zero_stage), order[self.layouts.structure[order] == structure][0])
        return tuple(firsts.values())


@without_garbage_collection()
@remembering()
def plan(
    base: JobSpec,
    fixed: Fixed,
    *,
    objective: Objective = "throughput",
    mfu: float | None = None,
    inexpressible: Inexpressible | None = None,
) -> Plan:
    """Return the best layout of ``base``'s model on its GPUs, and why it is the best.

    Raises :class:`~zeroplan.errors.SpecError` for a contradiction, and its subclass
    :class:`~zeroplan.planner.rules.NoLayoutError` if no layout can be tried on this number of GPUs.
    """
    ask = partial(_answers, base, fixed, objective=objective, mfu=mfu, inexpressible=inexpressible)
    answers, tally, considered = ask()
    if not answers.fits.any() and any(one.fits(base) for one in answers.found):
        # All that fit run out of memory in a replay. The search may have left offload out, and layouts that need far more.
        answers, tally, considered = ask(offload_too=True, far_too=True)
    best = _best(answers) if answers.fits.any() else None
    return Plan(
        base=base,
        objective=objective,
        best=best,
        rivals=_closest(answers) if best is None else _rivals(answers, best),
        rankings=() if best is None else tuple(_rankings(answers)),
        front=tuple(answers.layout(at) for at in pareto(answers.layouts, answers.kept)),
        considered=considered,
        evaluated=answers.layouts.layouts,
        fallen=tally.fallen,
        cloud=Cloud(tuple(one.recipe for one in answers.found), answers.layouts),
    )


def _answers(
    base: JobSpec, fixed: Fixed, *, objective: Objective, mfu: float | None, inexpressible: Inexpressible | None,
    offload_too: bool = False, far_too: bool = False,
) -> tuple[_Field, Tally, int]:  # fmt: skip
    """Return all layouts in order with those that fit, the rejected ones, and how many were considered."""
    room, free = _rooms(base, fixed)
    slow_too = objective == "headroom"
    found, tally, far = search(
        base, fixed, mfu=mfu, inexpressible=inexpressible, slow_too=slow_too, offload_too=offload_too, far_too=far_too
    )
    if not found:
        raise NoLayoutError(_nothing_starts(tally.fallen))
    if objective != "headroom":  # fewer recomputed blocks never save memory
        found = (*found, *partly_recomputed(base, found, fixed, far, mfu=mfu, inexpressible=inexpressible))
        found = (*found, *with_more_chunks(base, found, fixed, mfu=mfu, inexpressible=inexpressible))
    layouts = field(found)
    fits, easy = layouts.least_bytes <= room, layouts.comfortable_bytes <= free
    considered = layouts.layouts + sum(one.layouts for one in tally.fallen)
    tally.cut(Rule.MEMORY, int((~fits).sum()))
    tally.cut(Rule.TIGHT, int((fits & ~easy).sum()) if easy.any() else 0)
    kept = easy if easy.any() else fits if fits.any() else np.ones_like(fits)
    order = ordered(layouts, objective, float(layouts.tokens_per_s[kept].max()))
    answers = _that_go_through(_Field(base, found, layouts, order, fits, easy, room, free, mfu, objective))
    return answers, tally, considered


def _rooms(base: JobSpec, fixed: Fixed) -> tuple[int, int]:
    """Return the GPU's memory with and without the margin; raises SpecError if no layout can be tried. [bytes]"""
    room = int(gpu_of(base).memory_bytes.value)
    if base.model.profile is not None:
        from zeroplan.transformer.profiled import check_operations, profile_of  # noqa: PLC0415  keeps start-up fast

        check_operations(profile_of(base.model))
    splits = tuple(degrees(base, fixed))
    if not splits:
        raise NoLayoutError(f"the requested degrees do not divide {base.mesh.world_size:,} GPUs; use others, or more GPUs")
    check_batch(base, fixed, splits)
    return room, easy_room_of(base, fixed)


def _that_go_through(answers: _Field) -> _Field:
    """If all layouts are tight, drop those whose replayed step runs out of memory, until one has enough.

    The fastest few are replayed first, then those with the least memory.
    """
    if answers.easy.any():
        return answers
    fits = answers.fits
    smallest = np.argsort(answers.layouts.comfortable_bytes, kind="stable")
    in_turn = (*answers.order[fits[answers.order]][:_QUICKEST].tolist(), *smallest[fits[smallest]].tolist())
    ran_out: list[int] = []
    for at in tuple(dict.fromkeys(in_turn))[:_REPLAYED]:
        if _goes_through(answers.layout(at).job):
            left = fits if len(ran_out) < _QUICKEST else np.arange(len(fits)) == at  # quicker ones were not replayed
            break
        ran_out.append(at)
    else:
        left = np.zeros_like(fits)
    left = left.copy()
    left[ran_out] = False
    return answers._replace(fits=left)


def _goes_through(job: JobSpec) -> bool:
    """Whether a job's replayed step has enough memory. A plan that asks twice replays it once."""
    return recalled(lambda: (_goes_through, job), lambda: bool(replayed_if_tight(estimate(job)).fits))


#: The most tight layouts that are replayed in the order of speed, and in total. A replay takes tenths of a second.
_QUICKEST, _REPLAYED = 5, 40


def _best(answers: _Field) -> Best:
    """Return the first layout that fits, with its full estimate as a single job."""
    layout = answers.layout(answers.order[answers.kept[answers.order]][0])
    time = time_of(layout.job, mfu=answers.mfu)
    tight, further = layout.comfortable_bytes > answers.easy_bytes, _nearest_gain(answers, layout)
    one_more, margin = (_gain(answers, layout, more) for more in (GIB, answers.room_bytes - answers.easy_bytes))
    found = estimate(layout.job)
    limits = largest_part(found) if answers.objective == "headroom" else binding(time, further)
    return Best(layout, found, time, tight, limits, further, one_more, margin)


def _rankings(answers: _Field) -> Iterator[Ranked]:
    """Yield the fastest candidate, and the candidate with the least memory among those nearly as fast."""
    layouts, kept = answers.layouts, answers.kept
    rates = np.where(kept, layouts.tokens_per_s, 0.0)
    order = ordered(layouts, "throughput", float(rates.max()))
    quickest = order[kept[order]][0]
    near = np.flatnonzero(rates >= layouts.tokens_per_s[quickest] / NEARLY)
    for name, at in (("fastest", quickest), ("most careful", near[layouts.comfortable_bytes[near].argmin()])):
        yield ranked(name, answers.layout(at), answers.room_bytes)


def ranked(name: str, layout: Layout, room: int) -> Ranked:
    """Return a layout as the first of a ranking; ``room``: the GPU's memory. [bytes]"""
    return Ranked(name, layout, room - layout.comfortable_bytes)


def _nothing_starts(fallen: Sequence[Fallen]) -> str:
    largest = max(fallen, key=lambda one: (bool(one.example), one.layouts), default=None)  # an engine's message explains most
    if largest is None:
        return "no engine has this combination: the stage, offload or options belong to another engine; leave one of them out"
    return f"no layout can be tried: {largest.example or largest.rule.value}"


def _rivals(answers: _Field, best: Best) -> tuple[Rival, ...]:
    """Return an expert's first choices, the second best, the best without training changes or offload, and other engines'."""
    fitting = answers.order[answers.kept[answers.order]]
    others = *answers.on_the_gpu(fitting), *(int(at) for at in answers.firsts(fitting))
    chosen = dict.fromkeys((*fitting[1:2].tolist(), *answers.as_asked(fitting), *others))
    usual: dict[int, str] = {} if answers.base.model.profile is not None else dict(_usual(answers))
    named = {at: usual.get(at, "") for at in answers.each_once((int(fitting[0]), *usual, *chosen))[1:]}
    rivals = ((answers.layout(np.int64(at)), name) for at, name in list(named.items())[:_MOST_RIVALS])
    return tuple(Rival(one, _why_not(one, best, answers), name) for one, name in rivals)


def _why_not(one: Layout, best: Best, answers: _Field) -> str:
    if one.least_bytes > answers.room_bytes:
        return f"does not fit: it {_too_much(one.least_bytes - answers.room_bytes)}"
    if one.comfortable_bytes > answers.easy_bytes and not best.tight:
        return f"leaves too little free: it needs {(one.comfortable_bytes - answers.easy_bytes) / GIB:,.2f} GiB more"
    if answers.objective == "headroom":
        return why_larger(one, best.layout)
    return why_not(one, time_of(one.job, mfu=answers.mfu), best.layout, best.time)


def _usual(answers: _Field) -> Iterator[tuple[int, str]]:
    """Yield for each kind that an expert would try first the best layout, or the smallest if none fits."""
    kept = answers.order[answers.kept[answers.order]]
    smallest = np.argsort(answers.layouts.least_bytes, kind="stable")
    for name, is_one in _USUAL.items():
        ones = np.array([is_one(one.recipe, one.grid.degrees) for one in answers.found])[answers.layouts.structure]
        at = next((order[ones[order]][0] for order in (kept, smallest) if ones[order].any()), None)
        if at is not None:
            yield int(at), name


_USUAL: dict[str, Callable[[RecipeSpec, Degrees], bool]] = {
    "Megatron's tensor x pipeline x data parallelism": lambda recipe, split: recipe.engine == "megatron" and split.cp == 1,
    "plain FSDP": lambda recipe, split: (
        (recipe.engine, recipe.zero_stage) == ("fsdp2", 3) and split == WHOLE and not recipe.offloads
    ),
}


def _closest(answers: _Field) -> tuple[Rival, ...]:
    """Return the smallest layout of each engine and stage, for a plan in which nothing fits."""
    order = np.argsort(answers.layouts.least_bytes, kind="stable")
    near = sorted((answers.layout(at) for at in answers.firsts(order)), key=lambda one: one.least_bytes)
    return tuple(Rival(one, _too_much(one.least_bytes - answers.room_bytes)) for one in near[:_MOST_RIVALS])


def _too_much(n_bytes: int) -> str:
    if n_bytes <= 0:
        return "its peak fits, but in a replay of its requests it runs out of memory"
    return f"needs {n_bytes / GIB:,.2f} GiB more than the GPU has"


def _gain(answers: _Field, best: Layout, missing_bytes: int) -> More | None:
    """Return the fastest layout that would fit easily with ``missing_bytes`` more memory, if it is clearly faster."""
    missing, gains = _missing_and_gained(answers, best)
    worth = np.flatnonzero((missing > 0) & (missing <= missing_bytes) & (gains > _WORTH))
    return _more(answers, worth[np.argmax(gains[worth])], best) if len(worth) else None


def _nearest_gain(answers: _Field, best: Layout) -> More | None:
    """Return the clearly faster layout that needs the least additional memory, up to twice the GPU's."""
    missing, gains = _missing_and_gained(answers, best)
    worth = (missing > 0) & (missing <= answers.easy_bytes) & (gains > _WORTH)
    better = answers.order[worth[answers.order]]
    return _more(answers, better[np.argmin(missing[better])], best) if len(better) else None


def _missing_and_gained(answers: _Field, best: Layout) -> tuple[Column, NDArray[np.float64]]:
    layouts = answers.layouts
    return layouts.comfortable_bytes - answers.easy_bytes, layouts.tokens_per_s / best.tokens_per_s - 1


def _more(answers: _Field, at: np.int64, best: Layout) -> More:
    missing, gains = _missing_and_gained(answers, best)
    return More(answers.layout(at), int(missing[at]), float(gains[at]))


#: Smaller gains are below the accuracy of the time model.
_WORTH = 0.01

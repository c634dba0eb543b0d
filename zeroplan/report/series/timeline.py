"""Which memory is alive at every named moment of a step, and how much did a run measure in each phase?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from zeroplan.comparison import moments_as_run, phase_as_run
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate, step_implementation
from zeroplan.ledger import Moment, Phase
from zeroplan.measurement import CourseMeasured, Measurement
from zeroplan.report.series.levels import Level, block_named, levels_of
from zeroplan.report.series.parts import Caption, Part, caption, parts
from zeroplan.report.words import plural, stage_words
from zeroplan.resolve import OPTIONS
from zeroplan.resolve.options import value_of
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import Loss

_PHASES = (Phase.INIT, Phase.FIRST, Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A named moment: its phase, and the memory alive then. [bytes]

    ``skipped`` counts the blocks before it that have no moments: they equal their neighbours and cannot contain the peak.
    """

    name: str
    phase: str
    parts: tuple[Part, ...]
    total_bytes: int
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run's measured peak in one phase, whose moments are ``first`` to ``last``. [bytes]"""

    phase: str
    first: int
    last: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSeries:
    """A step's moments by phase, in the estimate's order, and the index of the peak. [bytes]

    ``room_bytes`` is the GPU's memory for the allocator, ``measured`` a run's peaks by phase, and ``levels`` its peaks by block
    if the record has them.
    """

    caption: Caption
    instants: tuple[Instant, ...]
    peak: int
    room_bytes: int | None
    measured: tuple[Measured, ...] = ()
    levels: tuple[Level, ...] = ()


def timeline(
    job: JobSpec, record: Measurement | None = None, *, where: str = "the record", own: Estimate | None = None
) -> TimelineSeries:
    """The estimated moments of a step; with a record, estimated for that run, with its measured peaks.

    A run on CPU or fake tensors has no library workspaces and no scratch inside kernels, so they are left out then.
    ``own`` is the job's own estimate, if it exists already. Raises :class:`~zeroplan.errors.SpecError` if the record is of
    another job.

    >>> from zeroplan import job
    >>> found = timeline(job(model="gpt2", gpus=8, stage=3, seq_len=128))
    >>> found.instants[found.peak].total_bytes == max(instant.total_bytes for instant in found.instants)
    True
    """
    if record is None:
        answer = own or estimate(job)
        return _series(answer, answer.moments)
    _demand_same(job, record, where)
    answer = estimate(replace(job, recipe=replace(job.recipe, kernels=record.kernels)))
    found = _series(answer, moments_as_run(answer, record), _how(record))
    measured = tuple(_measured(found.instants, record))
    courses = {phase.phase: phase.course for phase in record.steady.phases if phase.course is not None}
    levels = (level for one in measured for level in _levels(found.instants, one, courses.get(one.phase)))
    return replace(found, measured=measured, levels=tuple(levels))


def _series(answer: Estimate, moments: tuple[Moment, ...], *more: str) -> TimelineSeries:
    loss = answer.job.recipe.loss
    ordered = _ordered(moments, loss)
    instants = tuple(
        Instant(
            name=moment.name,
            phase=phase_as_run(moment, loss).value,
            parts=parts(moment.lines),
            total_bytes=int(moment.total_bytes),
            skipped=_skipped(before.name, moment.name),
        )
        for before, moment in zip((ordered[0], *ordered), ordered, strict=False)
    )
    totals = [instant.total_bytes for instant in instants]
    capacity = answer.capacity_bytes
    order = (_NO_ORDER,) if answer.job.recipe.engine == "deepspeed" else ()
    return TimelineSeries(
        caption=caption(answer, f"Memory over one step, {stage_words(answer.job)}", *order, *more),
        instants=instants,
        peak=totals.index(max(totals)),
        room_bytes=None if capacity is None else capacity - int(answer.outside_band.expected_bytes),
    )


def _ordered(moments: tuple[Moment, ...], loss: Loss) -> list[Moment]:
    """The moments by phase; of moments with one name, which represent several blocks, the highest."""
    highest: dict[tuple[Phase, str], Moment] = {}
    for moment in moments:
        key = (phase_as_run(moment, loss), moment.name)
        if key not in highest or moment.total_bytes > highest[key].total_bytes:
            highest[key] = moment
    return [highest[key] for key in sorted(highest, key=lambda key: _PHASES.index(key[0]))]


_NO_ORDER = (
    "each of DeepSpeed's moments is shown at the block where it is highest, so within a phase they are not in the order of time"
)


def _skipped(before: str, name: str) -> int:
    """The number of blocks between two moments that name a block (:mod:`zeroplan.engines.positions`), else 0."""
    one, other = block_named(before), block_named(name)
    return 0 if one is None or other is None else max(abs(one - other) - 1, 0)


def _measured(instants: tuple[Instant, ...], record: Measurement) -> Iterator[Measured]:
    phases = {phase.phase: phase.peak_bytes for phase in record.steady.phases}
    if record.initialisation is not None:
        phases[Phase.INIT.value] = record.initialisation.peak_bytes
    for phase, group in groupby(range(len(instants)), key=lambda at: instants[at].phase):
        indices = list(group)
        if phase in phases:
            yield Measured(phase=phase, first=indices[0], last=indices[-1], n_bytes=phases[phase])


def _levels(instants: tuple[Instant, ...], one: Measured, course: CourseMeasured | None) -> Iterator[Level]:
    return levels_of([instant.name for instant in instants[one.first : one.last + 1]], one.first, course)


def _how(record: Measurement) -> str:
    has_course = any(phase.course is not None for phase in record.steady.phases)
    each = "of each block, and of what is before and after the blocks" if has_course else "of each phase"
    return (
        f"measured with backend {record.backend} ({record.tensors} tensors), the last of {plural(len(record.steps), 'step')}, "
        f"the highest {each}; memory that only CUDA allocates is left out of both" if record.tensors != "cuda" else
        f"measured on the GPU, the last of {plural(len(record.steps), 'step')}, the highest {each}"
    )  # fmt: skip


def _demand_same(job: JobSpec, record: Measurement, where: str) -> None:
    """Raise SpecError if the record is of another job; model name and GPU may differ."""
    ours, theirs = _sides(job), _sides(record.job)
    differing = [name for name in ours if ours[name] != theirs[name]]
    if differing:
        differences = ", ".join(f"{name} {theirs[name]} instead of {ours[name]}" for name in differing[:3] if name != "shape")
        shape = "another model" if "shape" in differing else ""
        what = "; ".join(part for part in (shape, differences) if part)
        raise SpecError(f"{where} is of another job ({what}); leave the job's flags out to draw the record's own")


def _sides(job: JobSpec) -> dict[str, object]:
    """The settings that two jobs must share, by name of flag or field."""
    recipe = job.recipe
    flags = (one for one in OPTIONS.values() if one.help and one.option.sets.startswith(("recipe.", "mesh.", "batch.")))
    return {
        "shape": replace(job.model, name=""),
        **{one.flag.removeprefix("--"): value_of(job, one) for one in flags},
        "optimizer-impl": step_implementation(recipe),
        "sync-every-micro-batch": recipe.sync_every_micro_batch or job.batch.grad_accum_steps == 1,
        "options": getattr(recipe, recipe.engine, None),
    }

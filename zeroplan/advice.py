"""What would each single change of a job free, and what would it cost in time?

Changes are those of :mod:`zeroplan.remedies` and, beside them, what takes states to host memory and what makes buffers smaller.
Each is estimated in full, and timed where a GPU is named. Nothing is heaped up: that is what ``zeroplan plan`` is for.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, account_of, estimate, replayed_if_tight
from zeroplan.remedies import Change, single_changes
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import SMALL_BUCKET
from zeroplan.steptime import StepTime, step_time

#: What frees less than this share of the peak is none, and what slows by less costs nothing: neither is known any better.
_LEAST_FREED, _FREE = 0.002, 0.005
#: What a change costs beside time, by its kind.
OTHER_COSTS = {
    "shorter_sequences": "another training: shorter sequences",
    "more_gpus": "more GPUs to pay for",
    "smaller_state": "the optimizer's state is rounded to 8 bits",
    "weights_in_four_bits": "frozen weights are rounded to 4 bits",
}
#: Kinds of which there is always a stronger one.
_ENDLESS = ("shorter_sequences", "more_gpus")


class Advice(NamedTuple):
    """One change and the result of it."""

    change: Change
    after: Estimate
    freed_bytes: int
    """Of the allocated peak and what is outside the allocator."""
    tokens_per_s: float | None
    """Of one GPU after the change; None where no GPU is named, or its time is not known."""
    slower: float | None
    """Share of tokens/s per GPU that the change costs; below 0 where it is faster."""

    @property
    def other_cost(self) -> str:
        """What it costs beside time; empty where nothing."""
        return OTHER_COSTS.get(self.change.kind, "")


class Advised(NamedTuple):
    """The job as it is, and what could be changed, the best first."""

    before: Estimate
    tokens_per_s: float | None
    changes: tuple[Advice, ...]


def advise(job: JobSpec) -> Advised:
    """Return the single changes that free memory: where the job does not fit, those first that alone make it fit.

    Among equals come those that leave training and bill as they are; of them those that cost no time, by what they free, then the
    others, by what they free per time that is lost.
    """
    before, rate = replayed_if_tight(estimate(job)), _tokens_per_s(job)
    found = [one for change in _changes(job) if (one := _advice(change, before, rate)) is not None]
    kept = [one for one in found if _worth_telling(one, [other for other in found if other.change.kind == one.change.kind])]
    return Advised(before, rate, tuple(sorted(kept, key=lambda one: _rank(one, before))))


def _changes(job: JobSpec) -> Iterator[Change]:
    yield from single_changes(job)
    for change, flags, after in _smaller_buffers(job):
        yield Change(change, flags, after, "smaller_buffers")


def _advice(change: Change, before: Estimate, rate: float | None) -> Advice | None:
    try:
        after = estimate(change.job)
    except SpecError:  # a size that the engine does not offer
        return None
    freed = before.least_bytes - after.least_bytes
    if freed < _LEAST_FREED * before.least_bytes:
        return None
    now = _tokens_per_s(change.job)
    return Advice(change, after, freed, now, None if rate is None or now is None else 1 - now / rate)


def _worth_telling(one: Advice, alike: list[Advice]) -> bool:
    """Of a kind the mildest, the first that makes the job fit, and the strongest, where there is one."""
    enough = next((other for other in alike if other.after.fits), None)
    strongest = None if one.change.kind in _ENDLESS else alike[-1]
    return any(one is other for other in (alike[0], enough, strongest))


def _rank(one: Advice, before: Estimate) -> tuple[object, ...]:
    unfit = before.fits is False and not one.after.fits
    slower = 0.0 if one.slower is None else one.slower
    return (unfit, bool(one.other_cost), slower > _FREE, -one.freed_bytes / max(slower, _FREE))


def time_of(job: JobSpec) -> StepTime | None:
    """The step's time; None where no GPU is named, or its time is not known, as of a traced module."""
    if job.cluster.gpu is None:
        return None
    try:
        return step_time(account_of(job, job.batch), job.model, job.recipe, job.mesh, job.batch, job.cluster)
    except SpecError:
        return None


def _tokens_per_s(job: JobSpec) -> float | None:
    time = time_of(job)
    return None if time is None else float(time.tokens_per_s)


_Other = Iterator[tuple[str, str, JobSpec]]


def _with(job: JobSpec, group: str, **said: object) -> JobSpec:
    options = replace(getattr(job.recipe, group), **said)
    return replace(job, recipe=replace(job.recipe, **{group: options}))


def _smaller_buffers(job: JobSpec) -> _Other:
    """What is reduced at a time, and in which dtype."""
    recipe = job.recipe
    if recipe.engine == "fsdp2" and recipe.fsdp2.reduce_dtype == "fp32" and recipe.precision == "bf16-mixed":
        flags = "--set fsdp2.reduce_dtype=param"
        yield from _tried("reduce gradients in bf16", flags, job, "fsdp2", reduce_dtype="param")
    size = recipe.deepspeed.reduce_bucket_size
    if recipe.engine == "deepspeed" and size > SMALL_BUCKET:
        flags = f"--set deepspeed.reduce_bucket_size={SMALL_BUCKET}"
        yield from _tried("reduce gradients in smaller buckets", flags, job, "deepspeed", reduce_bucket_size=SMALL_BUCKET)


def _tried(change: str, flags: str, job: JobSpec, group: str, **said: object) -> _Other:
    try:
        yield change, flags, _with(job, group, **said)
    except SpecError:  # not with adapters, say
        return

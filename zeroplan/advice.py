"""How much memory would each single change of a job free, and how much slower would the step be?

The changes are those of :mod:`zeroplan.remedies`, and smaller communication buffers. Each change gets a full estimate, and a step
time if the job names a GPU. Changes are not combined; ``zeroplan plan`` searches combinations.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan import job_time
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, judged
from zeroplan.remedies import Change, single_changes
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import SMALL_BUCKET
from zeroplan.steptime import StepTime

#: Changes that free a smaller share of the peak are dropped; a smaller slowdown counts as free. Estimates are no more accurate.
_LEAST_FREED, _FREE = 0.002, 0.005
#: The cost of a change other than time, by its kind.
OTHER_COSTS = {
    "shorter_sequences": "another training: shorter sequences",
    "more_gpus": "more GPUs to pay for",
    "smaller_state": "the optimizer's state is rounded to 8 bits",
    "weights_in_four_bits": "frozen weights are rounded to 4 bits",
}
#: Kinds without a strongest change: sequences can always be shorter, and GPUs more.
_ENDLESS = ("shorter_sequences", "more_gpus")


class Advice(NamedTuple):
    """One change, the memory it frees and its cost."""

    change: Change
    after: Estimate
    freed_bytes: int
    """The difference of the allocated peak plus memory outside the allocator. [bytes]"""
    tokens_per_s: float | None
    """Tokens/s of one GPU after the change; None if the job names no GPU or the step's time is unknown."""
    slower: float | None
    """The relative loss of tokens/s per GPU; negative if the change makes the step faster."""

    @property
    def other_cost(self) -> str:
        """The cost other than time, in words; empty if there is none."""
        return OTHER_COSTS.get(self.change.kind, "")


class Advised(NamedTuple):
    """The job as it is, and the changes that help, the best first."""

    before: Estimate
    tokens_per_s: float | None
    changes: tuple[Advice, ...]


def advise(job: JobSpec) -> Advised:
    """Return the single changes that free memory, the best first.

    Changes that alone make a job fit come first. Then those that keep training and bill the same. Then those that cost no time, by
    the freed bytes, and the others by freed bytes per lost time.
    """
    before, rate = judged(job), _tokens_per_s(job)
    found = [one for change in _changes(job) if (one := _advice(change, before, rate)) is not None]
    kept = [one for one in found if _worth_telling(one, [other for other in found if other.change.kind == one.change.kind])]
    return Advised(before, rate, tuple(sorted(kept, key=lambda one: _rank(one, before))))


def _changes(job: JobSpec) -> Iterator[Change]:
    yield from single_changes(job)
    for change, flags, after in _smaller_buffers(job):
        yield Change(change, flags, after, "smaller_buffers")


def _advice(change: Change, before: Estimate, rate: float | None) -> Advice | None:
    try:
        after = judged(change.job)
    except SpecError:  # the engine does not support the change
        return None
    freed = before.least_bytes - after.least_bytes
    if freed < _LEAST_FREED * before.least_bytes:
        return None
    now = _tokens_per_s(change.job)
    return Advice(change, after, freed, now, None if rate is None or now is None else 1 - now / rate)


def _worth_telling(one: Advice, alike: list[Advice]) -> bool:
    """Whether it is the mildest of its kind, the first that makes the job fit, or the strongest (if the kind has one)."""
    enough = next((other for other in alike if other.after.fits), None)
    strongest = None if one.change.kind in _ENDLESS else alike[-1]
    return any(one is other for other in (alike[0], enough, strongest))


def _rank(one: Advice, before: Estimate) -> tuple[object, ...]:
    unfit = before.fits is False and not one.after.fits
    slower = 0.0 if one.slower is None else one.slower
    return (unfit, bool(one.other_cost), slower > _FREE, -one.freed_bytes / max(slower, _FREE))


def time_of(job: JobSpec) -> StepTime | None:
    """The time of the job's step; None if the job names no GPU or the time is unknown, as for a traced module."""
    if job.cluster.gpu is None:
        return None
    try:
        return job_time.time_of(job)
    except SpecError:
        return None


def _tokens_per_s(job: JobSpec) -> float | None:
    time = time_of(job)
    return None if time is None else float(time.tokens_per_s)


_Other = Iterator[tuple[str, str, JobSpec]]


def _with(job: JobSpec, group: str, **value: object) -> JobSpec:
    options = replace(getattr(job.recipe, group), **value)
    return replace(job, recipe=replace(job.recipe, **{group: options}))


def _smaller_buffers(job: JobSpec) -> _Other:
    """Yield smaller buffers for gradient reduction: reduction in bf16 (FSDP2), smaller buckets (DeepSpeed)."""
    recipe = job.recipe
    if recipe.engine == "fsdp2" and recipe.fsdp2.reduce_dtype == "fp32" and recipe.precision == "bf16-mixed":
        flags = "--set fsdp2.reduce_dtype=param"
        yield from _tried("reduce gradients in bf16", flags, job, "fsdp2", reduce_dtype="param")
    size = recipe.deepspeed.reduce_bucket_size
    if recipe.engine == "deepspeed" and size > SMALL_BUCKET:
        flags = f"--set deepspeed.reduce_bucket_size={SMALL_BUCKET}"
        yield from _tried("reduce gradients in smaller buckets", flags, job, "deepspeed", reduce_bucket_size=SMALL_BUCKET)


def _tried(change: str, flags: str, job: JobSpec, group: str, **value: object) -> _Other:
    try:
        yield change, flags, _with(job, group, **value)
    except SpecError:  # for example, the option does not work with adapters
        return

"""Calibrates a GPU's rates with measured steps: which fraction of the data sheet does it really reach?

One factor scales all fitted shares until the modelled step is as long as the measured one. If the optimizer's step was timed
separately, it has its own factor. One run cannot show which operators were slow, and its factor carries that run's own slowness
to every other; the median factor of several runs does not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from zeroplan.engines.account import Account
from zeroplan.errors import SpecError
from zeroplan.estimator import account_of
from zeroplan.measurement import Measurement
from zeroplan.spec.hardware import ClusterSpec, SharesSpec
from zeroplan.spec.job import JobSpec
from zeroplan.steptime import Efficiency, Running, StepTime, shares_of, step_time
from zeroplan.steptime.efficiency import MOST
from zeroplan.steptime.parts import Does

#: Parts of a step that a record times with the optimizer, and parts that move data between GPUs.
_STEP, _SENT = (Does.STEPPING, Does.SENDING_AT_STEP), (Does.SENDING, Does.SENDING_AT_STEP)
_LEAST, _HALVINGS = 0.02, 40


class Measured(NamedTuple):
    """The duration of a step. [s]"""

    computing_s: float
    """Forward and backward; the whole step if ``stepping_s`` is None."""
    stepping_s: float | None = None
    """The optimizer's step."""
    moved_data: bool = True
    """Whether collectives moved data, as opposed to one GPU that plays one rank of many."""


class Reached(NamedTuple):
    """The rates that a step reached, as multiples of the fitted shares."""

    computing: float
    stepping: float


def middle(several: Sequence[Reached]) -> Reached:
    """The median of each factor; for an even number, the geometric mean of the two in the middle.

    >>> middle([Reached(0.5, 1.0), Reached(1.1, 1.0), Reached(1.0, 0.9)])
    Reached(computing=1.0, stepping=1.0)
    """
    if len(several) % 2:
        return Reached(*(median(factors) for factors in zip(*several, strict=True)))
    return Reached(*(math.exp(median(map(math.log, factors))) for factors in zip(*several, strict=True)))


def calibrated(records: Sequence[Measurement], cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with the shares that the recorded steps reached on its GPU, the median of several records.

    The scaled shares are those of the first record's engine. Raises :class:`~zeroplan.errors.SpecError` for a record without
    times, of another GPU, or with a duration that no share of its rates explains.
    """
    steps = [_of_record(record, cluster) for record in records]
    factor = middle([step.reached for step in steps])
    source = f"calibrated by a step of {steps[0].seconds:.3f} s" if len(steps) == 1 else f"calibrated by {len(steps)} steps"
    base = shares_of(replace(cluster, shares=None))
    return replace(cluster, shares=_spec(base.scaled(factor.computing, stepping=factor.stepping), source))


class Learnt(NamedTuple):
    """The calibration of a cluster from one measured rate of a job."""

    cluster: ClusterSpec
    """The job's cluster with the shares that the run reached."""
    measured_s: float
    """The measured duration of the step. [s]"""
    estimated_s: float
    """The duration that was estimated before calibration. [s]"""
    factor: float
    """The reached shares of all computation, as a multiple of the fitted ones."""


def learnt_from(job: JobSpec, tokens_per_s: float) -> Learnt:
    """Calibrate the job's cluster with its measured rate, in tokens per second and GPU.

    Raises :class:`~zeroplan.errors.SpecError` if no share of the GPU's rates explains that rate.
    """
    account, base = account_of(job, job.batch), shares_of(replace(job.cluster, shares=None))
    before = _time(job, account, base, None)
    seconds = float(before.tokens) / tokens_per_s
    factor = reached(replace(job, cluster=replace(job.cluster, shares=None)), Measured(seconds)).computing
    source = f"calibrated by a run at {tokens_per_s:,.0f} tokens/s per GPU"
    shares = _spec(base.scaled(factor, stepping=factor), source)
    return Learnt(replace(job.cluster, shares=shares), seconds, float(before.seconds), factor)


class _Step(NamedTuple):
    seconds: float
    reached: Reached


def _of_record(record: Measurement, cluster: ClusterSpec) -> _Step:
    steady, there = record.steady, record.job.cluster.gpu
    if steady.seconds is None or not steady.seconds:
        raise SpecError(
            f"the record is of a run without a GPU (backend {record.backend}), so it has no times to calibrate with"
        )
    if cluster.gpu is None or (there is not None and there.name != cluster.gpu.name):
        mine = "none is named" if cluster.gpu is None else f"the job's is {cluster.gpu.name}"
        raise SpecError(f"the record is of {'a GPU without a name' if there is None else there.name}, and {mine}; use one GPU")
    stepping = sum(one.blocks.seconds for one in steady.phases if one.phase == "optimizer step" and one.blocks is not None)
    job = replace(record.job, cluster=replace(record.job.cluster, gpu=cluster.gpu, shares=None))
    moved = record.process_group not in ("fake", "none")
    took = Measured(steady.seconds - stepping, stepping, moved) if stepping else Measured(steady.seconds, None, moved)
    return _Step(steady.seconds, reached(job, took))


def _spec(share: Efficiency, source: str) -> SharesSpec:
    return SharesSpec(
        matrices=share.matrices,
        attention=share.attention,
        bandwidth=share.bandwidth,
        stepping=share.stepping or share.bandwidth,
        source=source,
    )


def reached(job: JobSpec, took: Measured, running: Running | None = None, account: Account | None = None) -> Reached:
    """The multiple of the shares with which the modelled step of this job is as long as the measured one.

    ``account``: the job's, if it is at hand or differs from its engine's.

    Raises :class:`~zeroplan.errors.SpecError` if no share up to the data sheet's rates is.
    """
    base, account = shares_of(job.cluster), account or account_of(job, job.batch)
    most = 1 / min(base.matrices, base.attention, base.bandwidth)

    def computing(factor: float) -> float:
        stepping = factor if took.stepping_s is None else 1.0
        time = _time(job, account, base.scaled(factor, stepping=stepping), running)
        return _seconds(time, took, step=None if took.stepping_s is None else False)

    factor = _solved(computing, took.computing_s, most)
    if took.stepping_s is None:
        return Reached(factor, factor)

    def stepping(second: float) -> float:
        return _seconds(_time(job, account, base.scaled(factor, stepping=second), running), took, step=True)

    return Reached(factor, _solved(stepping, took.stepping_s, MOST / base.bandwidth))


def _time(job: JobSpec, account: Account, share: Efficiency, running: Running | None) -> StepTime:
    return step_time(account, job.model, job.recipe, job.mesh, job.batch, job.cluster, share=share, running=running)


def _seconds(time: StepTime, took: Measured, *, step: bool | None) -> float:
    """The modelled time of the optimizer's step (True), of the rest (False), or of both (None). [s]"""
    parts = (part for part in time.parts if took.moved_data or part.does not in _SENT)
    return sum(float(part.seconds) for part in parts if step is None or (part.does in _STEP) == step)


def _solved(seconds: Callable[[float], float], measured: float, most: float) -> float:
    """The factor at which the modelled step has the measured duration; the duration falls as rates rise."""
    if seconds(most) > measured:
        raise SpecError(
            f"a part of the step ran for {measured:.4f} s, which is quicker than the GPU's rates allow ({seconds(most):.4f} s); "
            "the record is of another job or GPU"
        )
    low, high = _LEAST * most, most
    if seconds(low) < measured:
        raise SpecError(
            f"a part of the step ran for {measured:.4f} s, which even 1/50 of the GPU's rates would not explain; the record does "
            "not show a step that only computes"
        )
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if seconds(middle) < measured else (middle, high)
    return high

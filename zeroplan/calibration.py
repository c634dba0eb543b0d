"""Calibrates a GPU's rates with measured steps: which fraction of the data sheet does it really reach?

One factor scales all fitted shares until the modelled step is as long as expected. If the optimizer's step was timed separately,
it has its own factor. For the measured job, the expected step is the measured one. For another job, the model is expected to be off
by a part of the runs' deviations alone (:mod:`zeroplan.carried`): the rest is those runs' own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from zeroplan.carried import Deviating, expected, of_job, of_model
from zeroplan.engines.account import Account
from zeroplan.errors import SpecError
from zeroplan.estimator import account_of
from zeroplan.measurement import Measurement
from zeroplan.spec.hardware import ClusterSpec, SharesSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
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


def calibrated(records: Sequence[Measurement], cluster: ClusterSpec, of: ModelSpec | JobSpec) -> ClusterSpec:
    """Return the cluster with the shares that recorded steps on its GPU let one expect of a job, or of any layout of a model.

    The scaled shares are those of the first record's engine. Raises :class:`~zeroplan.errors.SpecError` for a record without
    times, of another GPU, or with a duration that no share of its rates explains.
    """
    steps = [_of_record(record, cluster) for record in records]
    every = [_towards(one, of, steps) for one in steps]
    factor = middle([reached(one.job, took) for one, took in zip(steps, every, strict=True)])
    seconds = steps[0].took.computing_s + (steps[0].took.stepping_s or 0.0)
    source = f"calibrated by a step of {seconds:.3f} s" if len(steps) == 1 else f"calibrated by {len(steps)} steps"
    base = shares_of(replace(cluster, shares=None))
    return replace(cluster, shares=_spec(base.scaled(factor.computing, stepping=factor.stepping), source))


class Learnt(NamedTuple):
    """The calibration of a cluster from one measured rate of a job."""

    cluster: ClusterSpec
    """The job's cluster with the shares that are expected."""
    measured_s: float
    """The measured duration of the step. [s]"""
    estimated_s: float
    """The duration that was estimated before calibration. [s]"""
    factor: float
    """The expected shares of all computation, as a multiple of the fitted ones."""
    carried: float = 1.0
    """The part of the run's deviation that is expected of the other job; 1 for the run itself."""


def learnt_from(job: JobSpec, tokens_per_s: float, of: ModelSpec | JobSpec | None = None) -> Learnt:
    """Calibrate the job's cluster with its measured rate, in tokens per second and GPU.

    ``of``: what is predicted with it, if not this job: another job, or any layout of a model.

    Raises :class:`~zeroplan.errors.SpecError` if no share of the GPU's rates explains that rate.
    """
    job = replace(job, cluster=replace(job.cluster, shares=None))
    account = account_of(job, job.batch)
    before = _time(job, account, shares_of(job.cluster), None)
    seconds = float(before.tokens) / tokens_per_s
    ran = _Ran(job, Measured(seconds), Measured(float(before.seconds)))
    reached(job, ran.took, account=account)  # refuses what no share explains
    towards = _towards(ran, job if of is None else of, [ran])
    factor = reached(job, towards, account=account).computing
    source = f"calibrated by a run at {tokens_per_s:,.0f} tokens/s per GPU"
    shares = _spec(shares_of(job.cluster).scaled(factor, stepping=factor), source)
    carried = _expected([ran], [1.0], job if of is None else of)
    return Learnt(replace(job.cluster, shares=shares), seconds, ran.modelled.computing_s, factor, carried)


class _Ran(NamedTuple):
    job: JobSpec
    took: Measured
    modelled: Measured

    @property
    def computing(self) -> float:
        """The deviation of forward and backward, or of the whole step."""
        return math.log(self.took.computing_s / self.modelled.computing_s)

    @property
    def stepping(self) -> float | None:
        """The deviation of the optimizer's step, if it was timed."""
        if not self.took.stepping_s or not self.modelled.stepping_s:
            return None
        return math.log(self.took.stepping_s / self.modelled.stepping_s)


def _of_record(record: Measurement, cluster: ClusterSpec) -> _Ran:
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
    reached(job, took)  # refuses what no share explains
    time = _time(job, account_of(job, job.batch), shares_of(job.cluster), None)
    apart = (
        (_seconds(time, took, step=False), _seconds(time, took, step=True)) if stepping else (_seconds(time, took, step=None),)
    )
    return _Ran(job, took, Measured(*apart))


def _towards(one: _Ran, of: ModelSpec | JobSpec, runs: Sequence[_Ran]) -> Measured:
    """Return how long a run's step would take if it deviated as much as is expected of ``of``."""
    computing = one.modelled.computing_s * math.exp(_expected(runs, [run.computing for run in runs], of))
    timed = [(run, run.stepping) for run in runs if run.stepping is not None]
    if one.stepping is None:
        return Measured(computing, None, one.took.moved_data)
    by = _expected([run for run, _ in timed], [by for _, by in timed], of)
    return Measured(computing, (one.modelled.stepping_s or 0.0) * math.exp(by), one.took.moved_data)


def _expected(runs: Sequence[_Ran], deviations: Sequence[float], of: ModelSpec | JobSpec) -> float:
    """Return the deviation expected of a job, or of any layout of a model; a job that ran deviates as it did."""
    if isinstance(of, ModelSpec):
        alike = of_model(of)
    else:
        itself = [by for run, by in zip(runs, deviations, strict=True) if _same(run.job, of)]
        if itself:
            return median(itself)
        alike = of_job(of)
    return expected([Deviating(of_job(run.job), by) for run, by in zip(runs, deviations, strict=True)], alike)


def _same(one: JobSpec, other: JobSpec) -> bool:
    return (one.model, one.recipe, one.mesh, one.batch) == (other.model, other.recipe, other.mesh, other.batch)


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

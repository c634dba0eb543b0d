"""Run the engine's own code on fake tensors and a fake process group: any model, any number of ranks, no memory."""

import time
from dataclasses import replace

from zeroplan.measurement import Measurement
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.verify.environment import environment
from zeroplan.verify.extend import NotAlikeError, extended_collectives, extended_steps
from zeroplan.verify.run import run
from zeroplan.verify.timeline import collectives, initialisation, steps_measured
from zeroplan.verify.tracker import Tracker
from zeroplan.verify.workload import layer_period

_FEW_LAYERS = 4
"""With so many layers, and one more, every layer of a longer model has its like: a first, a last, and some between."""
_ALL_RUN = ("collectives moved no data: the process group is fake", "weights are not initialised, dropout is off")


def simulate(job: JobSpec, *, rank: int = 0, steps: int = 2, all_layers: bool = True) -> Measurement:
    """Measure a job without memory or GPU; the last step is the steady state.

    Without ``all_layers`` a few are run and the rest extended from them (:mod:`zeroplan.verify.extend`), or all after all where
    they are not alike. Raises
    :class:`~zeroplan.errors.MeasurementError` for engines whose code fake tensors cannot go through.
    """
    began = time.perf_counter()
    few = job.model.num_hidden_layers if all_layers else _few_layers(job.model)
    more = few + layer_period(job.model)
    if more >= job.model.num_hidden_layers:
        return _measured(job, _tracked(job, rank, steps), rank=rank, began=began)
    shorter, longer = (_tracked(_with_layers(job, layers), rank, steps) for layers in (few, more))
    times = (job.model.num_hidden_layers - few) // (more - few)
    try:
        return _extended(job, shorter, longer, times, rank=rank, began=began)
    except NotAlikeError:
        return _measured(job, _tracked(job, rank, steps), rank=rank, began=began)


def _few_layers(model: ModelSpec) -> int:
    """All dense first layers, a few of the others, and as many more as leave whole periods out."""
    dense, period = model.moe.num_dense_layers if model.moe is not None else 0, layer_period(model)
    least = dense + max(_FEW_LAYERS, 2 * period + 1)
    return least + (model.num_hidden_layers - least) % period


def _with_layers(job: JobSpec, layers: int) -> JobSpec:
    return replace(job, model=replace(job.model, num_hidden_layers=layers))


def _tracked(job: JobSpec, rank: int, steps: int) -> Tracker:
    tracker = Tracker()
    run(job, tracker, rank=rank, steps=steps)
    return tracker


def _extended(job: JobSpec, shorter: Tracker, longer: Tracker, times: int, *, rank: int, began: float) -> Measurement:
    measured = _measured(job, shorter, rank=rank, began=began)
    return replace(
        measured,
        initialisation=None,
        steps=extended_steps(shorter, longer, times),
        collectives=extended_collectives(shorter, longer, times),
        remarks=(*_ALL_RUN, f"few layers were run and extended to {job.model.num_hidden_layers}: layers are alike"),
        seconds=time.perf_counter() - began,
    )


def _measured(job: JobSpec, tracker: Tracker, *, rank: int, began: float) -> Measurement:
    """Put what a simulation saw into a record."""
    return Measurement(
        job=job,
        backend="simulate",
        tensors="fake",
        process_group="fake",
        rank=rank,
        environment=environment(),
        initialisation=initialisation(tracker),
        steps=steps_measured(tracker),
        collectives=collectives(tracker),
        remarks=_ALL_RUN,
        seconds=time.perf_counter() - began,
    )

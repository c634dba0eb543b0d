"""Run the engine's own code on fake tensors and a fake process group: any model, any number of ranks, no memory."""

import time

from zeroplan.measurement import Measurement
from zeroplan.spec.job import JobSpec
from zeroplan.verify.environment import environment
from zeroplan.verify.run import run
from zeroplan.verify.timeline import collectives, initialisation, steps_measured
from zeroplan.verify.tracker import Tracker


def simulate(job: JobSpec, *, rank: int = 0, steps: int = 2) -> Measurement:
    """Measure a job without memory or GPU; the last step is the steady state.

    Raises :class:`~zeroplan.errors.MeasurementError` for engines whose code fake tensors cannot go through.
    """
    began = time.perf_counter()
    tracker = Tracker()
    run(job, tracker, rank=rank, steps=steps)
    return measurement(job, tracker, rank=rank, began=began)


def measurement(job: JobSpec, tracker: Tracker, *, rank: int, began: float) -> Measurement:
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
        remarks=("collectives moved no data: the process group is fake", "weights are not initialised, dropout is off"),
        seconds=time.perf_counter() - began,
    )

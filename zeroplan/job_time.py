"""How long does one step of a job take? The whole way from a job to its step time, for callers that have a job only."""

from zeroplan.estimator import account_of_job
from zeroplan.spec.job import JobSpec
from zeroplan.steptime import StepTime, step_time


def time_of(job: JobSpec, *, mfu: float | None = None) -> StepTime:
    """Return the time of one job's step, part by part. [s]

    ``mfu``: the share of the GPU's peak that its matrix products reach, if it is known. Raises SpecError without a GPU, and for a
    model whose operators are not known.
    """
    return step_time(account_of_job(job), job.model, job.recipe, job.mesh, job.batch, job.cluster, mfu=mfu)

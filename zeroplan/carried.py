"""How much of a run's deviation from the model is expected of another job on the same machine?

A run's deviation is the logarithm of its measured time over the modelled one. It is the sum of independent parts. Jobs that are
alike in one respect share one part: the machine with its program, the model, the kernels, how ranks split the model, and the whole
layout. The rest is the run's own. The sizes of the parts are estimated from the open half of the published runs
(``python -m tests.measured.throughput --deviations``). The expected deviation of another job is the best linear prediction from the
runs' deviations (Robinson 1991, doi:10.1214/ss/1177011926).
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.steptime import Running
from zeroplan.steptime.compute import running_of


class Parts(NamedTuple):
    """Standard deviations of a deviation's parts. [natural logarithm of a time]"""

    machine: float
    """Shared by all jobs on the same GPUs, with their network, host and program."""
    model: float
    """By jobs of one model."""
    kernels: float
    """By jobs with the same kernels, precision and recomputation."""
    split: float
    """By jobs with the same tensor, pipeline, context and expert parallelism."""
    layout: float
    """By jobs that have all of these, the micro-batch and the sequence in common."""
    own: float
    """Of one run alone."""


FITTED = Parts(machine=0.012, model=0.036, kernels=0.037, split=0.032, layout=0.037, own=0.025)
SOURCE = "maximum likelihood over the open half of the published runs in tests/golden/published_throughput.jsonl"


class Alike(NamedTuple):
    """What a job shares with others, in the order of :class:`Parts`; None is unlike everything."""

    machine: Hashable = ""
    model: Hashable = None
    kernels: Hashable = None
    split: Hashable = None
    layout: Hashable = None

    def sharing(self, other: "Alike") -> Iterable[bool]:
        """Yield whether both share each part."""
        return (one is not None and one == another for one, another in zip(self, other, strict=True))


def of_model(model: ModelSpec) -> Alike:
    """Return what every layout of a model shares."""
    return Alike(model=(model.name, model.hidden_size, model.num_hidden_layers, model.adapter))


def of_job(job: JobSpec, running: Running | None = None) -> Alike:
    """Return what a job shares with others. ``running``: its kernels, if they differ from its engine's usual ones."""
    recipe, mesh, batch, model = job.recipe, job.mesh, job.batch, of_model(job.model).model
    usual = running_of(recipe, "" if job.cluster.gpu is None else job.cluster.gpu.architecture)
    kernels = running or usual, recipe.attention, recipe.recompute, recipe.recompute_layers, recipe.precision
    split = int(mesh.tp), int(mesh.pp), int(mesh.cp), int(mesh.ep)
    layout = model, kernels, split, batch.micro_batch_size, batch.seq_len, recipe.pipeline_stages_per_rank
    return Alike(model=model, kernels=kernels, split=split, layout=layout)


class Deviating(NamedTuple):
    """A measured run."""

    alike: Alike
    deviation: float
    """The logarithm of its measured time over the modelled time."""


def expected(runs: Sequence[Deviating], of: Alike, parts: Parts = FITTED) -> float:
    """Return the deviation expected of another job; 0 without runs.

    >>> one, other = Alike(model="a", layout="b"), Alike(model="a")
    >>> [round(expected(several, other), 3) for several in ([Deviating(one, 0.1)], [Deviating(one, 0.1)] * 9)]
    [0.025, 0.046]
    """
    towards = (_shared(one.alike, of, parts) for one in runs)
    return sum(shared * by for shared, by in zip(towards, _solved(tuple(runs), parts), strict=True))


@lru_cache(maxsize=16)
def _solved(runs: tuple[Deviating, ...], parts: Parts) -> tuple[float, ...]:
    """Return the runs' deviations divided by the matrix of their covariances."""
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    among = np.array([[_shared(one.alike, other.alike, parts) for other in runs] for one in runs]).reshape(len(runs), len(runs))
    among += np.diag([parts.own**2 + _unshared(one.alike, parts) for one in runs])
    return tuple(float(one) for one in np.linalg.solve(among, np.array([one.deviation for one in runs])))


def _shared(one: Alike, other: Alike, parts: Parts) -> float:
    """Return the variance of the parts that two jobs share."""
    return sum(size**2 for size, same in zip(parts, one.sharing(other), strict=False) if same)


def _unshared(one: Alike, parts: Parts) -> float:
    """Return the variance of the parts of which nothing is known."""
    return sum(size**2 for size, what in zip(parts, one, strict=False) if what is None)


def weight(run: Alike, of: Alike) -> float:
    """Return the share of one run's deviation that is expected of another job."""
    return expected([Deviating(run, 1.0)], of)

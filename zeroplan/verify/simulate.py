"""Run the engine's own code on fake tensors and a fake process group: any model, any number of ranks, no memory.

Fake tensors have shapes, dtypes and storages that say how large they are, but no bytes; the fake process group moves nothing.
"""

import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind
from zeroplan.measurement import Measurement, Tensors
from zeroplan.spec.job import JobSpec
from zeroplan.verify.engines import Fsdp2, fsdp2_labels, stored_dtype, train
from zeroplan.verify.environment import environment
from zeroplan.verify.timeline import collectives, steps_measured
from zeroplan.verify.tracker import Tracker
from zeroplan.verify.workload import workload


@contextmanager
def fake_ranks(job: JobSpec, rank: int) -> Iterator[DeviceMesh]:
    """One rank of the job's mesh under torch's fake process group."""
    replicas, shards = job.mesh.dp_replicate, job.mesh.dp_shard
    dist.init_process_group("fake", rank=rank, world_size=replicas * shards, store=FakeStore())
    try:
        if replicas == 1:
            yield init_device_mesh("cpu", (shards,))
        else:
            yield init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()


@contextmanager
def unpacked_rows() -> Iterator[None]:
    """Answer for fake tensors what transformers reads from real ones: each row of the batch is one sequence.

    Of fake position ids it cannot tell, and would build a mask for packed sequences that no real run has.
    """
    from transformers import masking_utils  # noqa: PLC0415  takes seconds, and only a run needs it

    original = masking_utils.find_packed_sequence_indices

    def one_sequence_per_row(position_ids: torch.Tensor) -> None:
        indices = original(position_ids)
        if indices is not None:
            (indices[:, -1] == 0).all()

    masking_utils.find_packed_sequence_indices = one_sequence_per_row
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make every tensor fake that is made inside."""
    with unpacked_rows(), FakeTensorMode():
        yield


def run_fsdp2(job: JobSpec, *, rank: int = 0, steps: int = 2, fake: bool = True) -> Tracker:
    """Train under FSDP2 as one rank of a fake process group, on fake or real tensors, and return what was seen."""
    tracker = Tracker()
    with warnings.catch_warnings(), fake_ranks(job, rank) as mesh, fake_tensors() if fake else nullcontext():
        warnings.simplefilter("ignore")
        with tracker, fsdp2_labels(tracker):
            work = workload(job, dtype=stored_dtype(job.recipe))
            tracker.name_modules(work.module)
            tracker.claim(Kind.ACTIVATIONS, work.batch.values())
            engine = Fsdp2(work, job.recipe, mesh)
            tracker.claim(Kind.PARAMETERS, (*work.module.parameters(), *work.module.buffers()))
            train(engine, tracker, module=work.module, steps=steps, accumulate=job.batch.grad_accum_steps)
    return tracker


def simulate(job: JobSpec, *, rank: int = 0, steps: int = 2) -> Measurement:
    """Measure a job without memory or GPU; the last step is the steady state.

    Raises :class:`~zeroplan.errors.MeasurementError` for engines whose code fake tensors cannot go through.
    """
    if job.recipe.engine != "fsdp2":
        raise MeasurementError(
            f"engine {job.recipe.engine!r} cannot run on fake tensors (its C++ reads real ones); use --backend cpu with a small model"
        )
    began = time.perf_counter()
    tracker = run_fsdp2(job, rank=rank, steps=steps)
    return Measurement(
        job=job,
        backend="simulate",
        tensors="fake",
        process_group="fake",
        rank=rank,
        environment=environment(),
        steps=steps_measured(tracker),
        collectives=collectives(tracker),
        remarks=("collectives moved no data: the process group is fake",),
        seconds=time.perf_counter() - began,
    )

"""Measures one rank on real CPU tensors under torch's profiler, in a process group that already exists."""

import time
from collections.abc import Callable
from contextlib import nullcontext

from zeroplan.errors import MeasurementError
from zeroplan.measurement import Measurement
from zeroplan.spec.job import JobSpec
from zeroplan.verify.environment import environment
from zeroplan.verify.fake_parts.engine import fake_parts_of_engine
from zeroplan.verify.task import Transport
from zeroplan.verify.training.meshes import mesh_of
from zeroplan.verify.training.run import observe
from zeroplan.verify.training.workload import Workload
from zeroplan.verify.watching.collected import collectives_of_step, only_one_process
from zeroplan.verify.watching.log import Log
from zeroplan.verify.watching.profiled import KINDS_REMARK, Profiled, ledger_of

_REMARKS = (
    ("bytes are requests to torch's CPU allocator, equal to a GPU's requests; not counted: the transport's own, copies "
    "that only CPU kernels make (inside _chunk_cat and mixed-dtype additions), and oneDNN's scratch"),
    KINDS_REMARK,
)  # fmt: skip


def measured(job: JobSpec, make: Callable[[], Workload], *, rank: int, transport: Transport, log: Log, steps: int,
             say: Callable[[str], None]) -> Measurement:  # fmt: skip
    """Run ``steps`` optimizer steps and return the measurement of this rank."""
    _refuse_what_has_no_cpu_form(job)
    if transport == "fake" and rank and job.recipe.engine == "deepspeed" and job.recipe.zero_stage == 3:
        raise MeasurementError(
            f"the fake process group fills what DeepSpeed's stage 3 gathers on rank {rank} with arbitrary values, so DeepSpeed "
            "would skip its steps; use --rank 0, --nproc, or --backend simulate"
        )
    began = time.monotonic()
    seen = Profiled(log, say)
    with fake_parts_of_engine(job.recipe) if transport == "fake" else nullcontext():
        observe(job, seen, mesh_of(job), steps=steps, make=make)
    log.require_a_steady_clock()
    ledger = ledger_of(seen, job)
    return Measurement(
        job=job,
        backend="cpu",
        tensors="cpu",
        process_group=transport,
        rank=rank,
        environment=environment(device="CPU tensors, one thread"),
        initialisation=ledger.initialisation(),
        steps=ledger.steps(),
        collectives=collectives_of_step(log, steps - 1),
        remarks=(*_REMARKS, *only_one_process(transport)),
        seconds=time.monotonic() - began,
    )


def _refuse_what_has_no_cpu_form(job: JobSpec) -> None:
    if job.recipe.engine == "fsdp1":
        raise MeasurementError("FSDP1 runs on GPUs alone; use --backend simulate")
    if job.recipe.precision == "fp16-mixed":
        raise MeasurementError("fp16-mixed needs CUDA's kernels and gradient scaler; on CPU tensors, verify it as bf16-mixed")
    if job.recipe.offloads:
        raise MeasurementError(
            "on CPU tensors, offloading to host memory cannot be measured: all tensors are there; use --backend simulate"
        )

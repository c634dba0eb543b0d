"""One rank on real CPU tensors, in a process group that is there: steps are taken under torch's profiler and made a record."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind
from zeroplan.measurement import CollectiveMeasured, Measurement
from zeroplan.spec.job import JobSpec
from zeroplan.verify.environment import environment
from zeroplan.verify.group import Log, Transport
from zeroplan.verify.profiled import Ledger, Profiled
from zeroplan.verify.run import answered, mesh_of, observe
from zeroplan.verify.workload import Workload

_REMARKS = (
    ("bytes are requests to torch's CPU allocator, which are those a GPU's would get; left out are the transport's own, copies "
    "that only the CPU's kernels make (inside _chunk_cat and mixed-dtype additions), and oneDNN's scratch"),
    ("kinds are by owner where a parameter, gradient or state owns a block, and by the function that asked elsewhere; what "
    "neither tells is counted as temporaries or, if it outlives a forward pass, activations"),
)  # fmt: skip
_FAKE_REMARK = "the process group is torch's fake one: collectives move no data, and this process is the only one"


def measured(job: JobSpec, make: Callable[[], Workload], *, rank: int, transport: Transport, log: Log, steps: int,
             say: Callable[[str], None]) -> Measurement:  # fmt: skip
    """Take ``steps`` optimizer steps and return what they took on this rank."""
    _refuse_what_has_no_cpu_form(job)
    if transport == "fake" and rank and job.recipe.engine == "deepspeed" and job.recipe.zero_stage == 3:
        raise MeasurementError(
            f"rank {rank} of a fake group finds what nobody wrote in what DeepSpeed's stage 3 gathers, and would skip its steps; "
            "use --rank 0, --nproc, or --backend simulate"
        )
    began = time.monotonic()
    seen = Profiled(log, say)
    with answered(job.recipe) if transport == "fake" else nullcontext():
        observe(job, seen, mesh_of(job), steps=steps, make=make)
    ledger = Ledger(seen, sizes=_sizes(job), standing=Kind.REDUCE if job.recipe.engine == "ddp" else Kind.TEMPORARY)
    return Measurement(
        job=job,
        backend="cpu",
        tensors="cpu",
        process_group=transport,
        rank=rank,
        environment=environment(device="CPU tensors, one thread"),
        initialisation=ledger.initialisation(),
        steps=ledger.steps(),
        collectives=_collectives(log, f"{steps - 1}:"),
        remarks=(*_REMARKS, *((_FAKE_REMARK,) if transport == "fake" else ())),
        seconds=time.monotonic() - began,
    )


def _refuse_what_has_no_cpu_form(job: JobSpec) -> None:
    if job.recipe.precision == "fp16-mixed":
        raise MeasurementError("fp16-mixed needs CUDA's kernels and scaler; on CPU tensors verify it as bf16-mixed")
    if job.recipe.offloads:
        raise MeasurementError(
            "on CPU tensors, what is offloaded to host memory is where everything else is; use --backend simulate"
        )


def _sizes(job: JobSpec) -> dict[int, Kind]:
    """Sizes that only one kind of tensor has: one number per token and entry of the vocabulary; DeepSpeed's bucket."""
    elements = job.batch.micro_batch_size * job.batch.seq_len * job.model.vocab_size
    sizes = {2 * elements: Kind.LOGITS, 4 * elements: Kind.LOGITS}
    if job.recipe.engine == "deepspeed":
        bucket = job.recipe.deepspeed.reduce_bucket_size
        sizes |= {2 * bucket: Kind.REDUCE, 4 * bucket: Kind.REDUCE}
    return sizes


def _collectives(log: Log, beginning: str) -> tuple[CollectiveMeasured, ...]:
    """Calls of one step, alike ones together; what one rank says to itself is left out."""
    calls: Counter[tuple[str, str, str, int]] = Counter()
    n_bytes: Counter[tuple[str, str, str, int]] = Counter()
    for call in log.calls:
        if call.phase.startswith(beginning) and call.group > 1:
            key = (call.operation, call.dtype, call.phase.removeprefix(beginning), call.group)
            calls[key] += 1
            n_bytes[key] += call.n_bytes
    return tuple(
        CollectiveMeasured(operation=key[0], dtype=key[1], phase=key[2], group=key[3], calls=count, n_bytes=n_bytes[key])
        for key, count in calls.items()
    )

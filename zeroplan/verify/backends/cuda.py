"""Measures one rank on a real GPU: the caching allocator's peaks, the kind of every block, the seconds.

The first steps run under torch's profiler, which gives the kinds. The last steps run without it. The record's steady state is
the last step: its peaks from ``torch.cuda.memory_stats`` and its times.
"""

import gc
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind, Phase
from zeroplan.measurement import AllocatorMeasured, BlocksMeasured, Measurement, PhaseMeasured, StepMeasured
from zeroplan.spec.hardware import AllocatorSettings
from zeroplan.spec.job import JobSpec
from zeroplan.verify.backends.gpu import Gpu
from zeroplan.verify.environment import environment
from zeroplan.verify.fake_parts.engine import fake_parts_of_engine
from zeroplan.verify.task import Transport
from zeroplan.verify.training.engine import weights_dtype
from zeroplan.verify.training.meshes import mesh_of
from zeroplan.verify.training.run import observe
from zeroplan.verify.training.workload import Workload, with_weights, workload
from zeroplan.verify.watching.collected import collectives_of_step, only_one_process
from zeroplan.verify.watching.libraries import attention_of, kept_by_products
from zeroplan.verify.watching.log import Log
from zeroplan.verify.watching.nccl import calls_of, flight_recorder_dump
from zeroplan.verify.watching.profiled import KINDS_REMARK, Profiled, ledger_of

_REMARKS = (
    ("the last step ran without the profiler: its peaks are the allocator's and its times the clock's; kinds at its peaks, and "
    "memory by block, are from the step before, which torch's profiler watched"),
    KINDS_REMARK,
)  # fmt: skip
_UNWATCHED = 3
"""Steps to run after the profiler stops. Stopping it slows the first one; the last one is the record's steady state."""
_MANY = 4096
"""Smallest difference between a watched and an unwatched step that the record mentions. [bytes]"""


def measured_on_gpu(job: JobSpec, make: Callable[[], Workload] | None, *, rank: int, transport: Transport, log: Log, steps: int,
                    say: Callable[[str], None], gpu: Gpu, snapshot: Path | None = None) -> Measurement:  # fmt: skip
    """Run ``steps`` watched optimizer steps and some unwatched ones, and return the measurement of this rank.

    ``make`` builds another workload than the job's own model. The process group must exist. ``snapshot`` is the file for the
    allocator's history, also of a run that fails. Raises ``torch.OutOfMemoryError`` if the job needs more memory than the GPU has.
    """
    began = time.monotonic()
    seen = OnGpu(log, say, gpu, watched=steps)
    build = (lambda: on_device(make, gpu.device)) if make is not None else lambda: model_for(job, gpu.device)
    parts = fake_parts_of_engine(job.recipe, gpu.device) if transport == "fake" else nullcontext()
    with parts, nullcontext() if snapshot is None else gpu.remembered(snapshot):
        observe(job, seen, mesh_of(job, gpu.device), steps=steps + _UNWATCHED, make=build)
    log.require_a_steady_clock()
    if transport == "nccl":
        log.calls += calls_of(flight_recorder_dump(), log)
    ledger = ledger_of(seen, job)
    counted = seen.with_counts(ledger.steps())
    return Measurement(
        job=job,
        backend="cuda",
        tensors="cuda",
        kernels=job.cluster.kernels,
        process_group=transport,
        rank=rank,
        environment=environment(device=gpu.words()),
        initialisation=ledger.initialisation(),
        steps=counted,
        collectives=collectives_of_step(log, steps - 1 if transport == "fake" else steps),
        allocator=(allocator_of(counted[-1], gpu.settings(), workspace_bytes=seen.workspace_bytes()),),
        card=gpu.figures(),
        attention=attention_of(seen.timeline),
        remarks=(*_REMARKS, *only_one_process(transport), *seen.remarks(ledger.steps())),
        seconds=time.monotonic() - began,
    )


def model_for(job: JobSpec, device: str) -> Workload:
    """The job's model with weights on the device; for FSDP2 on the meta device, since sharding allocates the memory.

    A four-bit model is always built on the device, because its scales are computed from its weights.
    """
    where = "meta" if job.recipe.engine == "fsdp2" and not job.model.is_quantised else device
    made = workload(job, dtype=weights_dtype(job), device=where, batch_device=device, on_gpu=True)
    return made if where == "meta" else with_weights(made)


def on_device(make: Callable[[], Workload], device: str) -> Workload:
    """A user's workload with its module and batch moved to the device."""
    with torch.device(device):
        work = make()
    work.module.to(device)
    return work._replace(batch={name: tensor.to(device) for name, tensor in work.batch.items()})


class _Entered(NamedTuple):
    step: int
    phase: Phase
    blocks: BlocksMeasured
    held_bytes: int


class OnGpu(Profiled):
    """Profiles the first ``watched`` steps, and reads the allocator's counts and the clock in every step."""

    def __init__(self, log: Log, say: Callable[[str], None], gpu: Gpu, *, watched: int) -> None:
        super().__init__(log, say, device=gpu.device)
        self.counted: list[_Entered] = []
        self._gpu, self._watched = gpu, watched
        self._watching = True
        self._now: tuple[int, Phase] = (-1, Phase.INIT)
        self._since = 0.0

    def __enter__(self) -> Self:
        super().__enter__()
        self._begin(-1, Phase.INIT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._watching:
            self._watching = False
            super().__exit__(kind, error, trace)

    def enter(self, phase: Phase, step: int) -> None:
        """Wait until the GPU has finished the previous phase, then begin a phase of a step."""
        self._end()
        if self._watching:
            super().enter(phase, step)
        else:
            gc.collect()
            self._log.phase = f"{step}:{phase.value}"
        if step == self._watched and phase is Phase.FORWARD and self._watching:
            self._say("the last steps, without the profiler")
            self.__exit__(None, None, None)
        self._begin(step, phase)

    def _end(self) -> None:
        self._gpu.synchronize()
        seconds = time.perf_counter() - self._since
        blocks, held = self._gpu.counted(seconds)
        self.counted.append(_Entered(*self._now, blocks, held))

    def _begin(self, step: int, phase: Phase) -> None:
        self._gpu.forget_peaks()
        self._now, self._since = (step, phase), time.perf_counter()

    def claim(self, kind: Kind, tensors: Iterable[torch.Tensor | None]) -> None:
        """Record the kind of these tensors' memory while the profiler runs."""
        if self._watching:
            super().claim(kind, tensors)

    def with_counts(self, watched: tuple[StepMeasured, ...]) -> tuple[StepMeasured, ...]:
        """All steps with the allocator's own peaks. Steps without the profiler get the kinds of the last profiled step."""
        steps = sorted({one.step for one in self.counted if one.step >= 0 and one.phase is not Phase.INIT})
        return tuple(self._step(step, watched[min(step, len(watched) - 1)]) for step in steps)

    def _step(self, step: int, like: StepMeasured) -> StepMeasured:
        of_step = [one for one in self.counted if one.step == step and one.phase is not Phase.INIT]
        phases = tuple(
            _phase(phase, [one.blocks for one in of_step if one.phase.value == phase.phase]) for phase in like.phases
        )
        return replace(like, phases=phases, held_bytes=of_step[-1].held_bytes)

    def workspace_bytes(self) -> int:
        """The workspaces of matrix-product libraries (cuBLAS) at the end of the last profiled step. [bytes]"""
        *_, last = self.spans()
        owned = frozenset[int]().union(*(claim.addresses for claim in self.claims))
        return kept_by_products(self.timeline.alive(self.timeline.marks[last.end]), owned)

    def remarks(self, watched: tuple[StepMeasured, ...]) -> tuple[str, ...]:
        """A remark if the first step without the profiler peaks higher or lower than the step before it; else empty."""
        alone = self._step(self._watched, watched[-1]).peak.peak_bytes
        before = self._step(self._watched - 1, watched[-1]).peak.peak_bytes
        if abs(alone - before) <= _MANY:
            return ()
        return (f"the unwatched step peaked {alone - before:+,} bytes from the one before it",)


def _phase(like: PhaseMeasured, passes: list[BlocksMeasured]) -> PhaseMeasured:
    if not passes:
        raise MeasurementError(f"the allocator's counts of phase {like.phase} are missing in the last step; run it again")
    blocks = BlocksMeasured.highest(passes)
    return replace(like, peak_bytes=blocks.allocated_bytes, counted_bytes=blocks.allocated_bytes, blocks=blocks)


def allocator_of(step: StepMeasured, settings: AllocatorSettings, *, workspace_bytes: int) -> AllocatorMeasured:
    """The allocator's peaks of a step, as a record stores them; ``--backend simulate`` stores its model's in the same form."""
    counts = [phase.blocks for phase in step.phases if phase.blocks is not None]
    return AllocatorMeasured(
        settings=settings,
        allocated_bytes=max(one.allocated_bytes for one in counts),
        reserved_bytes=max(one.reserved_bytes for one in counts),
        workspace_bytes=workspace_bytes,
        modelled=False,
    )

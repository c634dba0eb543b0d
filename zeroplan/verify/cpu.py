"""One rank on real CPU tensors: steps are taken under torch's profiler, and the timeline becomes a measurement."""

import gc
import importlib.metadata
import platform
import time
from collections.abc import Callable

import torch

from zeroplan.ledger import Phase
from zeroplan.measurement import CollectiveMeasured, Environment, Measurement, PhaseMeasured, StepMeasured
from zeroplan.spec.job import JobSpec
from zeroplan.verify.allocations import Timeline, mark, recorded
from zeroplan.verify.group import TRANSPORT, Call, Log, Transport
from zeroplan.verify.kinds import Judge, Owned, owned
from zeroplan.verify.runners import Runner, runner
from zeroplan.verify.workload import Workload

#: What the CPU's kernels request and CUDA's do not: padded and cast copies inside ``_chunk_cat``, and the cast copy of an
#: addition of two dtypes (when gradients accumulate in another dtype than they are computed in).
CPU_ONLY = ("aten::_chunk_cat", "aten::add_")
#: Kernels of oneDNN, with scratch of their own where cuBLAS has a workspace.
ONEDNN = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip

_REMARKS = (
    "bytes are requests to torch's CPU allocator, which are those a GPU's would get; left out are the transport's own and the "
    "copies that only the CPU's kernels make (inside _chunk_cat and mixed-dtype additions, scratch of matrix products)",
    "kinds are by owner, where a parameter, gradient or state owns a block, and by operator elsewhere; what neither tells is "
    "counted as temporaries or, if it outlives a forward pass, activations",
)
_FAKE_REMARK = "the process group is torch's fake one: collectives move no data, and this process is the only one"


def measured(job: JobSpec, build: Callable[[], Workload], *, rank: int, transport: Transport, log: Log, steps: int,
             say: Callable[[str], None]) -> Measurement:  # fmt: skip
    """Take ``steps`` optimizer steps and return what they took on this rank."""
    started = time.monotonic()
    gc.collect()  # whatever was dropped before would be released into the recording
    notes: list[Owned] = []
    with recorded() as everything:
        mark("start")
        run = runner(job, build())
        notes.append(_noted("built", run))
        for step in range(steps):
            say(f"step {step + 1} of {steps}")
            _step(job, run, step, (log, notes))
        logits = _logits(job)
        standing = run.standing
        mark("finished")
    timeline = everything.without(*CPU_ONLY, *TRANSPORT).without_scratch(*ONEDNN)
    micros = range(job.batch.grad_accum_steps)
    forwards = [(f"forward {step}.{micro}", f"backward {step}.{micro}") for step in range(steps) for micro in micros]
    judge = Judge(timeline, notes, forwards=forwards, logits=logits, standing=standing)
    return Measurement(
        job=job,
        backend="cpu",
        tensors="cpu",
        process_group=transport,
        rank=rank,
        environment=_environment(),
        initialisation=_phase(timeline, judge, Phase.INIT, ("start", "built")),
        steps=tuple(_step_measured(timeline, judge, step, len(micros)) for step in range(steps)),
        collectives=_collectives(log.calls, f"{steps - 1}:"),
        remarks=(*_REMARKS, *((_FAKE_REMARK,) if transport == "fake" else ())),
        seconds=time.monotonic() - started,
    )


def _step(job: JobSpec, run: Runner, step: int, seen: tuple[Log, list[Owned]]) -> None:
    log, notes = seen
    last = job.batch.grad_accum_steps - 1
    for micro in range(last + 1):
        log.phase = f"{step}:{Phase.FORWARD.value}"
        mark(f"forward {step}.{micro}")
        loss = run.forward(micro == last)
        log.phase = f"{step}:{Phase.BACKWARD.value}"
        mark(f"backward {step}.{micro}")
        run.backward(loss, micro == last)
        del loss
        notes.append(_noted(f"after {step}.{micro}", run))
        if micro < last and job.recipe.engine == "deepspeed":
            run.step()  # counts the micro-batch; the optimizer waits for the last
    log.phase = f"{step}:{Phase.STEP.value}"
    mark(f"step {step}")
    run.step()
    notes.append(_noted(f"stepped {step}", run))
    run.clear()
    notes.append(_noted(f"end {step}", run))


def _noted(name: str, run: Runner) -> Owned:
    note = owned(name, run.module, run.optimizer, run.owns())
    mark(name)
    return note


def _logits(job: JobSpec) -> set[int]:
    """Sizes of a tensor with one number per token and entry of the vocabulary, in two and four bytes."""
    elements = job.batch.micro_batch_size * job.batch.seq_len * job.model.vocab_size
    return {2 * elements, 4 * elements}


def _step_measured(timeline: Timeline, judge: Judge, step: int, micros: int) -> StepMeasured:
    forward = [(f"forward {step}.{micro}", f"backward {step}.{micro}") for micro in range(micros)]
    backward = [(f"backward {step}.{micro}", f"after {step}.{micro}") for micro in range(micros)]
    held = timeline.alive(timeline.marks[f"end {step}"])
    return StepMeasured(
        phases=(
            _phase(timeline, judge, Phase.FORWARD, *forward),
            _phase(timeline, judge, Phase.BACKWARD, *backward),
            _phase(timeline, judge, Phase.STEP, (f"step {step}", f"stepped {step}")),
        ),
        held_bytes=timeline.live_bytes(f"end {step}"),
        held_kinds=judge.ledger(held),
    )


def _phase(timeline: Timeline, judge: Judge, phase: Phase, *windows: tuple[str, str]) -> PhaseMeasured:
    window = max(windows, key=lambda window: timeline.peak_bytes(*window))
    peak_time = timeline.peak_time(*window)
    alive = timeline.alive(peak_time)
    latest = max(alive, key=lambda block: block.time_ns, default=None)
    return PhaseMeasured(
        phase=phase.value,
        peak_bytes=timeline.peak_bytes(*window),
        kinds=judge.ledger(alive),
        operation="" if latest is None else " > ".join(latest.operators[-3:]),
    )


def _collectives(calls: list[Call], beginning: str) -> tuple[CollectiveMeasured, ...]:
    """Calls of one step, alike ones together."""
    sums: dict[tuple[str, str, str, int], tuple[int, int]] = {}
    for call in calls:
        if call.phase.startswith(beginning) and call.group > 1:
            key = (call.operation, call.dtype, call.phase.removeprefix(beginning), call.group)
            count, n_bytes = sums.get(key, (0, 0))
            sums[key] = (count + 1, n_bytes + call.n_bytes)
    return tuple(
        CollectiveMeasured(operation=operation, dtype=dtype, phase=phase, group=group, calls=count, n_bytes=n_bytes)
        for (operation, dtype, phase, group), (count, n_bytes) in sums.items()
    )


def _environment() -> Environment:
    packages = {}
    for name in ("torch", "transformers", "deepspeed"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = f"CPU tensors, {torch.get_num_threads()} thread"
    return Environment(python=platform.python_version(), platform=platform.platform(), packages=packages, device=device)

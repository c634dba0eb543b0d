"""From what a script's watcher saw to the answer: steps, what is alive at the peak by module and line, the allocator."""

import os
import resource
import time
from collections import Counter

from zeroplan.catalog.gpu import gpu as gpu_named
from zeroplan.dryrun import stood_in
from zeroplan.dryrun.loop import Loop
from zeroplan.dryrun.task import DryRunTask
from zeroplan.dryrun.traced import trace_of
from zeroplan.dryrun.watcher import ScriptTracker
from zeroplan.engines.device import allocator_room, workspace_asked_for
from zeroplan.errors import MeasurementError
from zeroplan.ledger import Phase
from zeroplan.saved_runs.savings import savings
from zeroplan.script_run import DryRun, MadeUp, Part, StoodIn
from zeroplan.script_trace import SavedRun
from zeroplan.spec.mesh import MeshSpec
from zeroplan.verify.environment import environment
from zeroplan.verify.fake_cuda.stand_ins import StandIns
from zeroplan.verify.watching.recording import Block
from zeroplan.verify.watching.replay import Replays
from zeroplan.verify.watching.timeline import Timeline, collectives, initialisation, steps_measured

_REMARKS = ("collectives moved no data, and other ranks are taken to do what this one does",)


def answer(
    task: DryRunTask, tracker: ScriptTracker, loop: Loop, stand_ins: StandIns, *, began: float, target: str
) -> SavedRun:  # fmt: skip
    """What the run found; ``target`` is the script's file. Raises MeasurementError where it came to no optimizer step."""
    if not loop.completed:
        raise MeasurementError(
            "the script ended without an optimizer step; let it take at least one (more data, fewer accumulation steps)"
        )
    gpu, recording = gpu_named(task.gpu), tracker.recording
    workspace_bytes = workspace_asked_for(os.environ, gpu)
    replays = Replays.of(recording, workspace_bytes=workspace_bytes)
    timeline = Timeline(recording, counted=replays.default.allocated)
    room = allocator_room(MeshSpec(dp_shard=task.gpus), gpu)
    alive = _alive_at_peak(timeline)
    trace = trace_of(timeline, tracker.lines, target=target)
    run = DryRun(
        command=(task.target, *task.arguments),
        gpus=task.gpus,
        rank=task.rank,
        gpu=gpu.name,
        environment=environment(),
        ended="steps taken" if loop.stopped else "script ended",
        initialisation=initialisation(timeline),
        steps=steps_measured(timeline),
        modules=_parts(timeline, alive, lambda block: block.module),
        lines=_parts(timeline, alive, lambda block: tracker.lines.get(block, "")),
        collectives=collectives(recording),
        allocator=replays.measured(recording, workspace_bytes=workspace_bytes, room_bytes=room),
        made_up=tuple(
            MadeUp(read=one.read, said=one.said, line=one.line, count=n) for one, n in stand_ins.counts.most_common()
        ),
        stood_in=tuple(StoodIn(what=what, by=by, count=n) for (what, by), n in stood_in.counts.items()),
        remarks=_REMARKS,
        savings=savings(trace),
        host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        seconds=time.perf_counter() - began,
    )
    return SavedRun(run=run, trace=trace if task.traced else None)


def _alive_at_peak(timeline: Timeline) -> list[Block]:
    """The blocks alive at the highest moment of the last step."""
    spans = timeline.recording.spans
    last = max(span.step for span in spans if span.phase is Phase.STEP)
    indices = [index for index, span in enumerate(spans) if span.step == last and span.phase is not Phase.INIT]
    _, moment = max((timeline.peak(index) for index in indices), key=lambda peak: peak[0])
    return [block for block in timeline.recording.blocks if block.born <= moment < block.died]


def _parts(timeline: Timeline, alive: "list[Block]", name_of: "object") -> tuple[Part, ...]:
    found: Counter[tuple[str, str]] = Counter()
    for block in alive:
        found[name_of(block), timeline.kind(block).value] += block.n_bytes  # type: ignore[operator]
    return tuple(Part(name=name, kind=kind, n_bytes=n_bytes) for (name, kind), n_bytes in found.most_common())

"""Builds the answer of a dry run from its recording: steps, memory at the peak by module and line, allocator figures."""

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zeroplan.catalog.gpu import gpu as gpu_named
from zeroplan.dryrun import outside_buffers, replacements
from zeroplan.dryrun.loop import Loop
from zeroplan.dryrun.operators import Operator
from zeroplan.dryrun.rank_messages import wanted
from zeroplan.dryrun.task import DryRunTask
from zeroplan.dryrun.torch_patches import COMPILER
from zeroplan.dryrun.traced import operators_recorded, operators_summed, trace_of
from zeroplan.dryrun.watcher import ScriptTracker
from zeroplan.engines.device import allocator_room, configured_workspace
from zeroplan.errors import MeasurementError
from zeroplan.ledger import OF_A_STEP, Beside, Phase
from zeroplan.saved_runs.savings import savings
from zeroplan.script_run import DryRun, MadeUp, Part, PhaseOfRun, StoodIn
from zeroplan.script_trace import SavedRun, Trace
from zeroplan.spec.mesh import MeshSpec
from zeroplan.verify.environment import environment
from zeroplan.verify.fake_cuda.stand_ins import StandIns
from zeroplan.verify.watching.recording import Block
from zeroplan.verify.watching.replay import Replays
from zeroplan.verify.watching.timeline import Timeline, collectives, initialisation, phase_measured, steps_measured

_REMARKS = ("collectives moved no data, and every other rank is assumed to do what this rank does",)


def answer(
    task: DryRunTask, tracker: ScriptTracker, loop: Loop, stand_ins: StandIns, *, began: float, target: str
) -> SavedRun:  # fmt: skip
    """The result of a run; ``target`` is the script's file. Raises MeasurementError if no optimizer stepped."""
    if not loop.completed:
        raise MeasurementError(
            "the script ended without an optimizer step; let it take at least one (more data, fewer accumulation steps)"
        )
    seen = _Seen.of(task, tracker, target)
    run = DryRun(
        command=(task.target, *task.arguments),
        gpus=task.gpus,
        rank=task.rank,
        gpu=gpu_named(task.gpu).name,
        environment=environment(),
        ended=loop.ended,
        **_by_kind_and_place(seen, tracker),
        **_of_the_allocator(seen, task),
        **_assumed(task, stand_ins),
        before_capture=loop.ended == "steps taken" and _warms_up(seen.timeline),
        savings=savings(seen.trace),
        operators=operators_summed(seen.rows),
        host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        seconds=time.perf_counter() - began,
    )
    return SavedRun(run=run, trace=seen.trace if task.traced else None)


class _Seen(NamedTuple):
    timeline: Timeline
    replays: Replays
    workspace_bytes: int
    rows: Sequence[Operator]
    trace: Trace

    @classmethod
    def of(cls, task: DryRunTask, tracker: ScriptTracker, target: str) -> "_Seen":
        recording, workspace_bytes = tracker.recording, configured_workspace(os.environ, gpu_named(task.gpu))
        replays = Replays.of(recording, workspace_bytes=workspace_bytes)
        timeline = Timeline(recording, counted=replays.default.allocated)
        rows = tracker.operators.of_step(recording.last_step)
        operators = operators_recorded(rows, tracker.operators.groups)
        return cls(
            timeline, replays, workspace_bytes, rows, trace_of(timeline, tracker.lines, target=target, operators=operators)
        )


def _by_kind_and_place(seen: _Seen, tracker: ScriptTracker) -> dict[str, Any]:
    timeline, alive = seen.timeline, _alive_at_peak(seen.timeline)
    return {
        "initialisation": initialisation(timeline), "steps": steps_measured(timeline),
        "phases": tuple(_beside_steps(timeline, tracker)), "collectives": collectives(timeline.recording),
        "modules": _parts(timeline, alive, lambda block: block.module),
        "lines": _parts(timeline, alive, lambda block: tracker.lines.get(block, "")),
    }  # fmt: skip


def _of_the_allocator(seen: _Seen, task: DryRunTask) -> dict[str, Any]:
    buffers, room = outside_buffers.most(), allocator_room(MeshSpec(dp_shard=task.gpus), gpu_named(task.gpu))
    if room is not None:
        room = max(0, room - sum(one.expected_bytes for one in buffers))
    measured = seen.replays.measured(seen.timeline.recording, workspace_bytes=seen.workspace_bytes, room_bytes=room)
    shown = seen.replays.default
    kept = max(shown.taken) - max(shown.allocated)
    return {"allocator": measured, "kept_by_graphs_bytes": kept, "outside_buffers": buffers}


def _assumed(task: DryRunTask, stand_ins: StandIns) -> dict[str, Any]:
    """The answer's fields for assumed values and replaced library code."""
    made_up = stand_ins.counts.most_common()
    return {
        "made_up": tuple(MadeUp(read=one.read, said=one.said, line=one.line, count=count) for one, count in made_up),
        "stood_in": tuple(StoodIn(what=what, by=by, count=count) for (what, by), count in replacements.counts.items()),
        "remarks": _REMARKS, "companions": tuple(rank for rank in wanted(Path(task.messages)) if rank != task.rank),
        "compiler_left_out": any(what == COMPILER for what, _ in replacements.counts),
        "imbalance": task.imbalance if stand_ins.sizes_of_choices else None,
    }  # fmt: skip


def _warms_up(timeline: Timeline) -> bool:
    """Whether the last step's forward ran only on side streams and outside a capture: the warm-up of a CUDA graph."""
    blocks, spans, last = timeline.recording.blocks, timeline.recording.spans, timeline.recording.last_step
    streams = {block.stream for block in blocks if spans[block.span].step == last and spans[block.span].phase is Phase.FORWARD}
    return bool(streams) and 0 not in streams and not any(block.pool for block in blocks)


def _beside_steps(timeline: Timeline, tracker: ScriptTracker) -> Iterator[PhaseOfRun]:
    """Parts of the run outside training steps, in order; those after the training only if they requested memory."""
    spans, requesting = timeline.recording.spans, {block.span for block in timeline.recording.blocks}
    first = next(index for index, span in enumerate(spans) if span.phase in OF_A_STEP)
    found: dict[Beside, list[int]] = {}
    for index, span in enumerate(spans):
        phase = Beside.LOADING if span.phase is Phase.INIT and index < first else span.phase
        if isinstance(phase, Beside) and (phase is not Beside.AFTER or index in requesting):
            found.setdefault(phase, []).append(index)
    for phase, indices in found.items():
        _, moment = max((timeline.peak(index) for index in indices), key=lambda peak: peak[0])
        yield _beside_step(timeline, tracker, phase, indices, moment)


def _beside_step(
    timeline: Timeline, tracker: ScriptTracker, phase: Beside, indices: list[int], moment: int
) -> PhaseOfRun:  # fmt: skip
    measured, block = phase_measured(timeline, phase, indices), timeline.at(moment)
    spans = timeline.recording.spans
    highest = next(index for index in indices if moment in range(timeline.window(index).start, timeline.window(index).stop))
    done = {span.step for span in spans[:highest] if span.phase is Phase.STEP}
    return PhaseOfRun(
        phase=phase.value, peak_bytes=measured.peak_bytes, counted_bytes=max(measured.counted_bytes or 0, measured.peak_bytes),
        kinds=measured.kinds, module=measured.module, operation=measured.operation,
        line="" if block is None else tracker.lines.get(block, ""), after_step=len(done), times=len(indices),
    )  # fmt: skip


def _alive_at_peak(timeline: Timeline) -> list[Block]:
    spans, last = timeline.recording.spans, timeline.recording.last_step
    indices = [index for index, span in enumerate(spans) if span.step == last and span.phase in OF_A_STEP]
    _, moment = max((timeline.peak(index) for index in indices), key=lambda peak: peak[0])
    return [block for block in timeline.recording.blocks if block.born <= moment < block.died]


def _parts(timeline: Timeline, alive: list[Block], name_of: Callable[[Block], str]) -> tuple[Part, ...]:
    found: Counter[tuple[str, str]] = Counter()
    for block in alive:
        found[name_of(block), timeline.kind(block).value] += block.n_bytes
    return tuple(Part(name=name, kind=kind, n_bytes=n_bytes) for (name, kind), n_bytes in found.most_common())

"""Which memory was alive over time in a file: a snapshot of torch's allocator, a saved dry run, or zeroplan's trace?"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroplan.differences.perfetto import Course, course_of
from zeroplan.differences.reading import head_of, is_run_or_trace, is_snapshot, large_data
from zeroplan.differences.side import layers_together
from zeroplan.errors import SpecError
from zeroplan.ledger import NOT_TOLD_APART
from zeroplan.report.diagnosis import advised
from zeroplan.report.palette import LOOKS
from zeroplan.report.series.parts import Caption
from zeroplan.report.series.run import end_of_run, highest_of_neighbours
from zeroplan.report.series.step import MOST_COLUMNS, Place, StepCall, StepSeries, folded, joined, line_of
from zeroplan.saved_runs.files import run_of
from zeroplan.script_trace import SavedRun
from zeroplan.snapshots.diagnosis import diagnose, place
from zeroplan.snapshots.kinds import sorted_into_kinds
from zeroplan.snapshots.lives import lives_of
from zeroplan.snapshots.reading import Snapshot, read_snapshot
from zeroplan.units import GIBIBYTES


class Opened(NamedTuple):
    """The page's view of a file: a headline, advice, and the memory over time."""

    headline: str
    advice: tuple[str, ...]
    step: StepSeries


class _Block(NamedTuple):
    kind: str
    reason: str
    n_bytes: int
    born: int
    died: int


def opened(path: Path, name: str) -> Opened:
    """Return the memory over time in a file; texts call it ``name``.

    Raises :class:`~zeroplan.errors.SpecError` for a truncated or hostile file, or one of another sort.
    """
    head, where = head_of(path), f"file {name!r}"
    if is_snapshot(path, head):
        return _of_snapshot(read_snapshot(path), name)
    data = large_data(path) if is_run_or_trace(head) else None
    keys = data if isinstance(data, dict) else {}
    if "traceEvents" in keys:
        return _of_trace(course_of(keys, where), name)
    if keys.get("content") == "zeroplan dryrun":
        return _of_run(run_of(keys, where), name)
    if b"out of memory" in head:
        raise SpecError(f"{where} has torch's message about memory; `zeroplan diagnose FILE` on the command line explains it")
    raise SpecError(
        f"{where} does not say what is alive over time; open a snapshot of torch's allocator, a trace from --trace, or a run "
        "from `zeroplan dryrun --save`"
    )


def _of_snapshot(snapshot: Snapshot, name: str) -> Opened:
    lives = lives_of(snapshot)
    found = sorted_into_kinds(snapshot, lives)
    blocks = (
        _Block(kind if kind in LOOKS else NOT_TOLD_APART, place(life.stack), life.n_bytes, life.born + 1, life.died + 1)
        for life, kind in zip(lives.blocks, found.kinds, strict=True)
    )
    shown = _shown(lives.live_bytes)
    parts = ["", *(part.value for part in found.parts)]
    diagnosis = diagnose(snapshot)
    failure = diagnosis.failure
    peak = max(lives.live_bytes)
    title = f"{name}: highest {GIBIBYTES.size(peak)} in use, {GIBIBYTES.size(snapshot.reserved_bytes)} reserved in the end"
    if failure is not None:
        title = f"{name}: out of memory when {GIBIBYTES.size(failure.asked_bytes)} were requested"
    places = _changes((parts[at] or parts[min(1, len(parts) - 1)], "") for at in shown)
    return Opened(title, tuple(advised(diagnosis)), _series(title, blocks, shown, places, ()))


def _of_run(saved: SavedRun, name: str) -> Opened:
    """The whole run, loading and saving included."""
    trace = saved.trace
    if trace is None:
        raise SpecError(f"file {name!r} was kept without its blocks; run the script again with --save")
    columns = trace.blocks
    rows = zip(columns.kind, columns.module, columns.line, columns.n_bytes, columns.born, columns.died, strict=True)
    blocks = (
        _Block(trace.kinds[kind], layers_together(trace.modules[module]) or trace.lines[line], n_bytes, born, died)
        for kind, module, line, n_bytes, born, died in rows
    )
    shown = _shown(trace.live[: end_of_run(trace) + 1])
    spans = np.searchsorted([span.start for span in trace.spans], shown, side="right") - 1
    places = _changes(_named(trace.spans[max(0, int(at))].phase, trace.spans[max(0, int(at))].step) for at in spans)
    calls = _calls(shown, ((one.operation, one.moment, one.n_bytes) for one in trace.collectives))
    title = f"{name}: highest {GIBIBYTES.size(saved.run.peak_bytes)}, a dry run as rank {saved.run.rank} of {saved.run.gpus:,}"
    return Opened(title, (), _series(title, blocks, shown, places, calls))


def _named(phase: str, step: int) -> tuple[str, str]:
    return phase, f"step {step + 1}" if step >= 0 else ""


def _of_trace(course: Course, name: str) -> Opened:
    moments = sorted({0, *(moment for counter in course.kinds.values() for moment in counter.at)})
    rows = {kind: [counter.after(moment) for moment in moments] for kind, counter in course.kinds.items()}
    totals = [sum(column) for column in zip(*rows.values(), strict=True)]
    shown = _shown(totals)
    at = [moments[column] for column in shown]
    phases = [
        max((one for one in course.phases if one.start <= moment), key=lambda one: one.start, default=None) for moment in at
    ]
    title = f"{name}: highest {GIBIBYTES.size(max(totals))}"
    lines = {(kind if kind in LOOKS else NOT_TOLD_APART, ""): [row[column] for column in shown] for kind, row in rows.items()}
    places = _changes(_named(one.phase, one.step - 1) if one else ("before the step", "") for one in phases)
    return Opened(title, (), _of_rows(title, lines, places, _calls(at, course.calls)))


def _shown(live: Sequence[int]) -> list[int]:
    return [int(at) for at in highest_of_neighbours(np.asarray(live, dtype=np.int64), MOST_COLUMNS)]


def _series(
    title: str, blocks: Iterable[_Block], shown: Sequence[int], places: tuple[Place, ...], calls: tuple[StepCall, ...]
) -> StepSeries:
    """Return the series of blocks at the ``shown`` moments."""
    changes: dict[tuple[str, str], list[int]] = {}
    moments = np.asarray(shown, dtype=np.int64)
    known = list(blocks)
    begins, ends = (np.searchsorted(moments, [getattr(one, end) for one in known]) for end in ("born", "died"))
    for one, begin, end in zip(known, begins.tolist(), ends.tolist(), strict=True):
        if begin < end:
            row = changes.setdefault((one.kind, one.reason), [0] * (len(shown) + 1))
            row[begin] += one.n_bytes
            row[end] -= one.n_bytes
    rows = {key: np.cumsum(row[:-1]).tolist() for key, row in changes.items()}
    return _of_rows(title, rows, places, calls)


def _of_rows(
    title: str, rows: Mapping[tuple[str, str], list[int]], places: tuple[Place, ...], calls: tuple[StepCall, ...]
) -> StepSeries:
    totals = tuple(map(sum, zip(*rows.values(), strict=True)))
    if not totals:
        raise SpecError("nothing in this file was ever alive")
    kept = folded(dict(rows), max(totals))
    return StepSeries(
        caption=Caption(title=title, lines=()),
        requests=True,
        totals=totals,
        peak=totals.index(max(totals)),
        lines=tuple(line_of(kind, reason, row) for (kind, reason), row in kept.items()),
        calls=calls,
        places=places,
        room_bytes=None,
    )


def _changes(names: Iterable[tuple[str, str]]) -> tuple[Place, ...]:
    """Return the place of each column; neighbours at the same place share one entry."""
    found: list[Place] = []
    for column, (phase, name) in enumerate(names):
        if not found or (found[-1].phase, found[-1].name) != (phase, name):
            found.append(Place(column=column, phase=phase, name=name))
    return tuple(found)


def _calls(shown: Sequence[int], calls: Iterable[tuple[str, int, int]]) -> tuple[StepCall, ...]:
    """Return collectives by the column in which they begin, summed by operation."""
    found: dict[tuple[str, int], list[int]] = {}
    for operation, moment, n_bytes in calls:
        column = min(int(np.searchsorted(shown, moment)), len(shown) - 1)
        found.setdefault((operation, column), []).append(n_bytes)
    return tuple(joined(found))

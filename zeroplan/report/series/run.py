"""Converts a saved dry run for a picture: bytes by kind after its requests and releases, and the phases."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from zeroplan.catalog.gpu import gpu as gpu_named
from zeroplan.errors import SpecError
from zeroplan.ledger import OF_A_STEP, Beside, Phase
from zeroplan.measurement import PhaseMeasured
from zeroplan.report.palette import ORDER
from zeroplan.report.series.parts import Caption, Part
from zeroplan.report.series.step import StepSeries
from zeroplan.report.series.timeline import Instant, TimelineSeries
from zeroplan.report.words import plural
from zeroplan.script_run import DryRun, PhaseOfRun
from zeroplan.script_trace import SavedRun, Trace
from zeroplan.units import GIBIBYTES

_MOST_COLUMNS = 1500
"""Most columns of a picture; a column shows the highest of its moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A phase, with its first and last column."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeries:
    """Bytes alive along a part of a run: ``n_bytes`` has a row per kind, and a column per moment or few moments. [bytes]

    ``peak`` is the highest column; ``where`` gives its phase and line of code. ``limit`` is the name of ``capacity_bytes``,
    which is 0 if unknown. ``calls`` are the columns in which collectives begin, by operation.
    """

    caption: Caption
    kinds: tuple[str, ...]
    n_bytes: NDArray[np.int64]
    stretches: tuple[Stretch, ...]
    peak: int
    where: str
    capacity_bytes: int
    limit: str = "the GPU"
    calls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def run_of_step(step: StepSeries) -> RunSeries:
    """Return the series of a predicted step."""
    columns = len(step.totals)
    by_kind: dict[str, NDArray[np.int64]] = {}
    for line in step.lines:
        row = by_kind.setdefault(line.kind, np.zeros(columns, dtype=np.int64))
        for begin, end, n_bytes in zip(line.columns, (*line.columns[1:], columns), line.n_bytes, strict=True):
            row[begin:end] += n_bytes
    kinds = tuple(kind for kind in ORDER if kind in by_kind)
    begins = [next(places) for _, places in groupby(step.places, key=lambda place: place.phase)]
    ends = [*(place.column for place in begins[1:]), columns]
    peak = max((place for place in step.places if place.column <= step.peak), key=lambda place: place.column)
    return RunSeries(
        caption=Caption(
            title=step.caption.title,
            lines=(*step.caption.lines, "from left to right: requests and releases of memory, in order, not time"),
        ),
        kinds=kinds,
        n_bytes=np.array([by_kind[kind] for kind in kinds]),
        stretches=tuple(Stretch(name=one.phase, first=one.column, last=end) for one, end in zip(begins, ends, strict=True)),
        peak=step.peak,
        where=", ".join(part for part in (peak.phase, peak.name) if part),
        capacity_bytes=step.room_bytes or 0,
        limit="the GPU leaves to the allocator",
        calls={
            operation: tuple(one.column for one in step.calls if one.operation == operation)
            for operation in dict.fromkeys(one.operation for one in step.calls)
        },
    )


def run(saved: SavedRun, *, whole: bool = False) -> RunSeries:
    """The last step and the parts after it; with ``whole`` the run from its start. Raises SpecError without blocks."""
    if saved.trace is None:
        raise SpecError("the run was kept without its blocks; run the script again with --save")
    trace, found = saved.trace, saved.run
    moments = range(trace.moments + 1) if whole else range(trace.last_step.start, end_of_run(trace) + 1)
    by_kind = _by_kind(trace)[:, moments.start : moments.stop]
    starts = highest_of_neighbours(by_kind.sum(axis=0))
    chosen = by_kind[:, starts]
    order = [kind for kind in ORDER if kind in trace.kinds and chosen[trace.kinds.index(kind)].any()]
    n_bytes = chosen[[trace.kinds.index(kind) for kind in order]]
    peak = int(n_bytes.sum(axis=0).argmax())
    what = "the whole run" if whole else "the last step"
    return RunSeries(
        caption=_caption(found, what), kinds=tuple(order), n_bytes=n_bytes,
        stretches=tuple(_stretches(trace, moments, starts)), peak=peak, where=_where(trace, moments.start + int(starts[peak])),
        capacity_bytes=int(gpu_named(found.gpu).memory_bytes.value),
    )  # fmt: skip


def phases(saved: SavedRun) -> TimelineSeries:
    """The peak of every phase, by kind."""
    found = saved.run
    last = found.steps[-1].phases
    every: list[PhaseOfRun | PhaseMeasured] = [*found.phases, *last]
    every.sort(key=lambda one: _RANK.index(one.phase) if one.phase in _RANK else len(_RANK))
    instants = tuple(map(_instant, every))
    totals = [instant.total_bytes for instant in instants]
    return TimelineSeries(
        caption=_caption(found, "the peak of each phase"), instants=instants, peak=totals.index(max(totals)), room_bytes=None
    )


_RANK = (Beside.LOADING, *OF_A_STEP)
"""The order of the phases; all others follow."""


def _instant(one: PhaseOfRun | PhaseMeasured) -> Instant:
    parts = tuple(Part(kind, one.kinds[kind]) for kind in ORDER if one.kinds.get(kind))
    part = "the last step" if one.phase in OF_A_STEP else "beside the steps"
    return Instant(name=one.phase, phase=part, parts=parts, total_bytes=one.peak_bytes)


def _caption(found: DryRun, what: str) -> Caption:
    how = f"Dry run as rank {found.rank} of {found.gpus:,}, {gpu_named(found.gpu).full_name}, without a GPU"
    peak = f"highest of the run: {GIBIBYTES.size(found.peak_bytes)}; "
    return Caption(
        title=f"Memory over {what}: {found.command[0]}",
        lines=(
            f"{how}; {plural(len(found.steps), 'optimizer step')}",
            f"{peak}the axis counts requests and releases of memory, not time",
        ),
    )


def end_of_run(trace: Trace) -> int:
    """The last moment before the script's end frees its memory."""
    last = trace.spans[-1]
    return last.start if last.phase in (Phase.INIT, Beside.AFTER) else trace.moments


def _by_kind(trace: Trace) -> NDArray[np.int64]:
    """Bytes alive after every request and release, a row per kind."""
    blocks = trace.blocks
    changes = np.zeros((len(trace.kinds), trace.moments + 2), dtype=np.int64)
    sizes, kinds = np.asarray(blocks.n_bytes, dtype=np.int64), np.asarray(blocks.kind, dtype=np.int64)
    np.add.at(changes, (kinds, np.asarray(blocks.born, dtype=np.int64)), sizes)
    np.add.at(changes, (kinds, np.asarray(blocks.died, dtype=np.int64)), -sizes)
    return changes.cumsum(axis=1)[:, :-1]


def highest_of_neighbours(totals: NDArray[np.int64], most: int = _MOST_COLUMNS) -> NDArray[np.int64]:
    """The indices of the shown moments: the highest one of each group of neighbours."""
    parts = np.array_split(np.arange(len(totals)), min(len(totals), most))
    return np.array([int(part[totals[part].argmax()]) for part in parts])


def _stretches(trace: Trace, moments: range, starts: NDArray[np.int64]) -> list[Stretch]:
    """The phases within these moments by columns; neighbours of one name are joined."""
    found: list[Stretch] = []
    first = next(at for at, span in enumerate(trace.spans) if span.phase in OF_A_STEP)
    for at, span in enumerate(trace.spans):
        window = trace.window(at)
        begin, end = (int(np.searchsorted(starts, moment - moments.start)) for moment in (window.start, window.stop - 1))
        end = min(end, len(starts) - 1)
        if window.stop - 1 <= moments.start or begin >= end:
            continue
        name = Beside.LOADING.value if span.phase == Phase.INIT and at < first else span.phase
        if found and found[-1].name == name:
            found[-1] = Stretch(name=name, first=found[-1].first, last=end)
        else:
            found.append(Stretch(name=name, first=begin, last=end))
    return found


def _where(trace: Trace, moment: int) -> str:
    """The phase of a moment, and the line of code that requested memory then."""
    span = max((at for at, one in enumerate(trace.spans) if one.start < moment), default=0)
    block = next((at for at, born in enumerate(trace.blocks.born) if born == moment), None)
    line = "" if block is None else trace.lines[trace.blocks.line[block]]
    first = next(at for at, one in enumerate(trace.spans) if one.phase in OF_A_STEP)
    name = Beside.LOADING.value if span < first else trace.spans[span].phase
    return f"{name}, {line}" if line else name

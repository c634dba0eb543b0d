"""Which tensors are alive over one step, and when do collectives run? From every request of the step, if known."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from zeroplan.engines.requests import not_written, requests_of
from zeroplan.engines.requests.log import Log
from zeroplan.estimator import REPLAYED_MICRO_BATCHES, Estimate
from zeroplan.ledger import Kind, Phase, bytes_by_kind
from zeroplan.replay import module_of
from zeroplan.report.palette import ORDER
from zeroplan.report.series.parts import Caption, caption
from zeroplan.report.series.timeline import TimelineSeries

MOST_COLUMNS = 720
"""Most columns on a screen; a column shows the highest of its moments."""
_MOST_IN_A_PIPELINE = 128
"""Pipelines with more micro-batches are drawn by named moments: all requests would take seconds and be unreadable."""
_FEWEST_COLUMNS = 12
"""Fewest columns for embedding, head and loss, so that they stay visible beside the blocks."""
_SMALL = 1000
"""Lines that stay below 1/1000 of the peak are summed by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Tensors of one purpose: ``n_bytes`` are alive from each column in ``columns`` on. [bytes]"""

    kind: str
    reason: str
    columns: tuple[int, ...]
    n_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """Collectives of one operation that begin in one column, and the sum of their largest buffers. [bytes]"""

    operation: str
    column: int
    calls: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The phase, and the block or named moment, from this column on."""

    column: int
    phase: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """One step in columns: lines, collectives and places, each with the columns at which they change. [bytes]

    ``totals`` are the bytes alive per column; ``peak`` is the highest column. With ``requests`` a column is a moment between
    two requests to the allocator, else a named moment of the estimate.
    """

    caption: Caption
    requests: bool
    totals: tuple[int, ...]
    peak: int
    lines: tuple[StepLine, ...]
    calls: tuple[StepCall, ...]
    places: tuple[Place, ...]
    room_bytes: int | None


def step(answer: Estimate, moments: TimelineSeries) -> StepSeries:
    """Return the step of an estimate, request by request; by named moments if the requests are unknown.

    >>> from zeroplan import estimate, job
    >>> from zeroplan.report.series.timeline import timeline
    >>> answer = estimate(job(model="gpt2", gpus=8, stage=3, seq_len=128))
    >>> found = step(answer, timeline(answer.job, own=answer))
    >>> found.requests, found.places[0].phase, found.totals[found.peak] == answer.peak_bytes
    (True, 'forward', True)
    """
    batch = answer.job.batch
    if not_written(answer.job) or (answer.pipeline and batch.grad_accum_steps > _MOST_IN_A_PIPELINE):
        return _of_moments(moments)
    drawn = batch.grad_accum_steps if answer.pipeline else min(batch.grad_accum_steps, REPLAYED_MICRO_BATCHES)
    few = replace(answer.job, batch=replace(batch, grad_accum_steps=drawn))
    log = requests_of(few, pipeline_rank=answer.pipeline[0].rank if answer.pipeline else None)
    left_out = f"{drawn} of {batch.grad_accum_steps:,} micro-batches drawn; the others are like the last"
    return _of_requests(log, answer, moments, () if drawn == batch.grad_accum_steps else (left_out,))


def _of_moments(moments: TimelineSeries) -> StepSeries:
    kinds = [kind for kind in ORDER if any(part.what == kind for one in moments.instants for part in one.parts)]
    alive = [{part.what: part.n_bytes for part in one.parts} for one in moments.instants]
    return StepSeries(
        caption=moments.caption,
        requests=False,
        totals=tuple(one.total_bytes for one in moments.instants),
        peak=moments.peak,
        lines=tuple(line_of(kind, "", [now.get(kind, 0) for now in alive]) for kind in kinds),
        calls=(),
        places=tuple(Place(column=at, phase=one.phase, name=one.name) for at, one in enumerate(moments.instants)),
        room_bytes=moments.room_bytes,
    )


def _of_requests(log: Log, answer: Estimate, moments: TimelineSeries, notes: tuple[str, ...]) -> StepSeries:
    """Return the last step of these requests, plus the workspaces of libraries, which stay constant."""
    beside = int(bytes_by_kind(answer.peak.lines).get(Kind.WORKSPACE, 0))
    shown = _shown(log)
    rows = _rows(log, shown)
    rows[Kind.WORKSPACE.value, "workspaces of libraries"] = [beside] * len(shown)
    totals = tuple(map(sum, zip(*rows.values(), strict=True)))
    return StepSeries(
        caption=caption(answer, moments.caption.title, *notes),
        requests=True,
        totals=totals,
        peak=totals.index(max(totals)),
        lines=tuple(line_of(kind, reason, row) for (kind, reason), row in folded(rows, max(totals)).items() if any(row)),
        calls=tuple(_calls(log, shown)),
        places=tuple(_places(log, shown)),
        room_bytes=moments.room_bytes,
    )


def _shown(log: Log) -> list[int]:
    """Return the drawn requests and releases of the last step: in each column, the one after which most memory is alive."""
    sizes = [one.n_bytes for one in log.requests]
    live = list(accumulate(sizes[event] if event >= 0 else -sizes[-1 - event] for event in log.events))
    first = min(one.start for one in log.spans if one.step == log.spans[-1].step)
    return [
        max(range(begin, end), key=live.__getitem__)
        for stretch in _stretches(log, first)
        for begin, end in pairwise(_ends(stretch, len(live) - first))
    ]


def _stretches(log: Log, first: int) -> Iterator[tuple[range, bool]]:
    """Yield runs of requests and releases of one layer and phase, and whether the layer is a block."""
    layers, starts, begin = _layers(log), {one.start for one in log.spans}, first
    for at in range(first + 1, len(log.events) + 1):
        if at == len(log.events) or at in starts or layers[at] != layers[begin]:
            yield range(begin, at), layers[begin] >= 0
            begin = at


def _layers(log: Log) -> list[int]:
    """Return the running layer at each request and release: the last one that requested memory."""
    return list(accumulate(log.events, lambda layer, event: layer if event < 0 else log.requests[event].layer, initial=-1))[1:]


def _ends(stretch: tuple[range, bool], events: int) -> list[int]:
    """Return the column borders of a stretch. Embedding, head and loss make few but large requests, so they get a minimum."""
    at, is_block = stretch
    columns = max(MOST_COLUMNS * len(at) // events, 1 if is_block else _FEWEST_COLUMNS)
    columns = min(columns, len(at))
    return [at.start + len(at) * one // columns for one in range(columns + 1)]


def _rows(log: Log, shown: Sequence[int]) -> dict[tuple[str, str], list[int]]:
    """Return the bytes alive after each shown request or release, by kind and purpose."""
    alive: Counter[tuple[str, str]] = Counter()
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    after = iter(shown)
    coming = next(after)
    for at, event in enumerate(log.events):
        one = log.requests[event if event >= 0 else -1 - event]
        alive[one.kind.value, one.reason] += one.n_bytes if event >= 0 else -one.n_bytes
        if at == coming:
            column = len(next(iter(rows.values()), ()))
            for key, n_bytes in alive.items():
                row = rows[key]
                row += [0] * (column - len(row))
                row.append(n_bytes)
            coming = next(after, -1)
    return rows


def folded(rows: dict[tuple[str, str], list[int]], most: int) -> dict[tuple[str, str], list[int]]:
    """Return the rows of large lines, and the sum of the small ones of each kind."""
    found: dict[tuple[str, str], list[int]] = {}
    for (kind, reason), row in rows.items():
        key = (kind, reason if max(row) * _SMALL >= most else "smaller tensors")
        found[key] = [one + other for one, other in zip(found[key], row, strict=True)] if key in found else row
    return found


def line_of(kind: str, reason: str, row: Sequence[int]) -> StepLine:
    """Return a row as the columns at which it changes."""
    changes = [at for at, n_bytes in enumerate(row) if n_bytes != (row[at - 1] if at else 0)]
    return StepLine(kind=kind, reason=reason, columns=tuple(changes), n_bytes=tuple(row[at] for at in changes))


def _calls(log: Log, shown: Sequence[int]) -> Iterator[StepCall]:
    """Yield the last step's collectives, summed by operation and column."""
    before = min(one.calls for one in log.spans if one.step == log.spans[-1].step)
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for call in log.calls[before:]:
        found[call.operation, min(bisect_left(shown, call.start), len(shown) - 1)].append(call.n_bytes)
    yield from joined(found)


def joined(found: Mapping[tuple[str, int], Sequence[int]]) -> Iterator[StepCall]:
    """Yield one call per operation and column; ``found`` has the bytes of the single calls."""
    for (operation, column), sizes in found.items():
        yield StepCall(operation=operation, column=column, calls=len(sizes), n_bytes=sum(sizes))


def _places(log: Log, shown: Sequence[int]) -> Iterator[Place]:
    """Yield the place of each column; neighbours at the same place share one entry."""
    layers, starts = _layers(log), [one.start for one in log.spans]
    before = None
    for column, at in enumerate(shown):
        phase = log.spans[bisect_right(starts, at) - 1].phase
        here = (phase.value, "" if phase is Phase.STEP else module_of(layers[at]))
        if here != before:
            yield Place(column=column, phase=here[0], name=here[1])
        before = here

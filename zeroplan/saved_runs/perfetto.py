"""Exports a saved run for Perfetto (ui.perfetto.dev) and Chrome: bytes by kind as counters, phases and collectives as slices.

The axis is not time: each request and release of memory is one microsecond. The process's name says so.
Source: Trace Event Format (Google, 2016), events ``C``, ``X`` and ``M``.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from zeroplan.errors import SpecError
from zeroplan.saved_runs.files import write
from zeroplan.script_trace import SavedRun, Trace, live_bytes

_PHASES, _MODULES, _COLLECTIVES = 1, 2, 3
_TRACKS = {_PHASES: "phases", _MODULES: "modules that request memory", _COLLECTIVES: "collectives"}

_Event = dict[str, object]


def save_trace(saved: SavedRun, path: Path, *, force: bool) -> None:
    """Write a run as a trace, compressed if the name ends in ``.gz``. Raises SpecError if it cannot be written."""
    if saved.trace is None:
        raise SpecError("the run was saved without its blocks; run the script again with --save")
    run = saved.run
    save_events(saved.trace, f"{run.command[0]}, rank {run.rank} of {run.gpus}", path, force=force)


def save_events(trace: Trace, name: str, path: Path, *, force: bool) -> None:
    """Write the requests of a run, or of an estimated step, under a name."""
    events = [*_names(name), *_counters(trace), *_slices(trace), *_calls(trace)]
    write(path, json.dumps({"traceEvents": events}, separators=(",", ":")).encode(), force=force)


def _names(name: str) -> Iterator[_Event]:
    title = f"{name}; 1 us is one request or release of memory, not time"
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    for track, title in _TRACKS.items():
        yield {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": title}}


def _counters(trace: Trace) -> Iterator[_Event]:
    """Yield counters of the bytes alive, total and by kind, at each change."""
    blocks = trace.blocks
    yield from _counter("allocated", trace.live)
    for number, kind in enumerate(trace.kinds):
        mine = [block for block, one in enumerate(blocks.kind) if one == number]
        columns = ([column[block] for block in mine] for column in (blocks.n_bytes, blocks.born, blocks.died))
        yield from _counter(kind, live_bytes(trace.moments, *columns))


def _counter(name: str, live: list[int]) -> Iterator[_Event]:
    before = -1
    for moment, n_bytes in enumerate(live):
        if n_bytes != before:
            yield {"ph": "C", "pid": 0, "name": name, "ts": moment, "args": {"bytes": n_bytes}}
        before = n_bytes


def _slices(trace: Trace) -> Iterator[_Event]:
    """Yield slices for the phases, and for the modules that request memory."""
    for at, span in enumerate(trace.spans):
        window = trace.window(at)
        name = f"{span.phase}, step {span.step + 1}" if span.step >= 0 else span.phase
        yield _slice(_PHASES, name, window.start, window.stop - 1 - window.start)
    requests = zip(trace.blocks.module, trace.blocks.span, trace.blocks.born, strict=True)
    for (module, span), group in groupby(requests, key=lambda one: one[:2]):
        moments = [moment for _, _, moment in group]
        if trace.modules[module]:
            yield _slice(
                _MODULES, trace.modules[module], moments[0], moments[-1] - moments[0] + 1, phase=trace.spans[span].phase
            )


def _calls(trace: Trace) -> Iterator[_Event]:
    """Yield slices for the collectives; several between the same two requests share their microsecond."""
    for moment, calls in groupby(trace.collectives, key=lambda one: one.moment):
        together = list(calls)
        for at, one in enumerate(together):
            args = {"bytes": one.n_bytes, "dtype": one.dtype, "ranks": one.group, "among": one.among}
            yield _slice(_COLLECTIVES, one.operation, moment + at / len(together), 1 / len(together), **args)


def _slice(track: int, name: str, start: float, length: float, **args: object) -> _Event:
    return {"ph": "X", "pid": 0, "tid": track, "name": name, "ts": start, "dur": length, "args": args}

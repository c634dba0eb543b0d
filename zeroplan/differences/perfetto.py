"""Reads a Perfetto trace that zeroplan wrote: bytes by kind at the peak of the last step, and the collectives.

The file is untrusted, so every figure is checked, and the counter of the total must equal the sum of the kinds' counters.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zeroplan.differences.side import At, Held, Sent, Side
from zeroplan.errors import SpecError
from zeroplan.ledger import OF_A_STEP

_ALL = "allocated"
_PHASES, _COLLECTIVES = 1, 3
_LARGEST = 10**15


class Figure(NamedTuple):
    """A counter over time: the moments of its changes, and its values from then on. [bytes]"""

    at: list[int]
    n_bytes: list[int]

    def after(self, moment: int) -> int:
        """The counter's value after a moment; 0 before its first change."""
        place = bisect_right(self.at, moment)
        return self.n_bytes[place - 1] if place else 0


class _Phase(NamedTuple):
    """A phase of a step, from moment ``start`` to ``end``, both included."""

    phase: str
    step: int
    start: int
    end: int


class Course(NamedTuple):
    """A trace's memory over time: a counter per kind, the phases, and each collective with its moment and bytes."""

    kinds: Mapping[str, Figure]
    phases: tuple[_Phase, ...]
    calls: tuple[tuple[str, int, int], ...]


def course_of(data: object, where: str) -> Course:
    """Return the memory over time of a trace from ``--trace``. Raises SpecError, in one line, for any other file."""
    try:
        return _course(_events(data))
    except (KeyError, TypeError, ValueError) as error:
        raise _not_ours(error, where) from None


def _course(events: list[Mapping[str, object]]) -> Course:
    counters = _counters(events)
    del counters[_ALL]
    phases = [_phase(event) for event in events if event["ph"] == "X" and event["tid"] == _PHASES]
    calls = [event for event in events if event["ph"] == "X" and event["tid"] == _COLLECTIVES]
    sent = tuple((str(one["name"]), int(_time(one["ts"])), _count(_args(one)["bytes"])) for one in calls)
    return Course(counters, tuple(sorted(phases, key=lambda phase: phase.start)), sent)


def _not_ours(error: Exception, where: str) -> SpecError:
    if isinstance(error, SpecError):
        return error
    return SpecError(f"{where} is a trace, but not one that zeroplan wrote ({type(error).__name__}: {error!s:.60})")


def of_trace(data: object, where: str, name: str = "") -> Side:
    """Return the side of a trace from ``estimate --trace`` or ``dryrun --trace``. Raises SpecError, in one line, for others."""
    try:
        return _side(_events(data), where, name)
    except (KeyError, TypeError, ValueError) as error:
        raise _not_ours(error, where) from None


def _events(data: object) -> list[Mapping[str, object]]:
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TypeError("traceEvents is no list of events")
    return events


def _side(events: list[Mapping[str, object]], where: str, name: str) -> Side:
    counters = _counters(events)
    last = _last_step(events)
    every = counters.pop(_ALL)
    moments = tuple(_at(phase, counters, every) for phase in last)
    peak = max(moments, key=lambda at: at.n_bytes)
    if any(sum(line.n_bytes for line in at.lines) != at.n_bytes for at in moments):
        raise SpecError(f"{where} contradicts itself: its kinds do not add up to what is allocated")
    start, end = last[0].start, last[-1].end
    return Side(
        name=name,
        is_a="trace",
        grain="kind",
        peak=peak,
        moments=moments,
        held=_lines(counters, end),
        sent=tuple(_sent(events, start, end)),
        totals={"held between steps": every.after(end)},
    )


def _counters(events: list[Mapping[str, object]]) -> dict[str, Figure]:
    """The counters of the total and of each kind, by name."""
    found: dict[str, Figure] = {}
    for event in events:
        if event["ph"] == "C":
            counter = found.setdefault(str(event["name"]), Figure([], []))
            moment = _count(event["ts"])
            if counter.at and moment <= counter.at[-1]:
                raise ValueError("its counters are not in order")
            counter.at.append(moment)
            counter.n_bytes.append(_count(_args(event)["bytes"]))
    return found


def _last_step(events: list[Mapping[str, object]]) -> list[_Phase]:
    phases = [_phase(event) for event in events if event["ph"] == "X" and event["tid"] == _PHASES]
    steps = [phase for phase in phases if phase.step and phase.phase in OF_A_STEP]
    if not steps:
        raise ValueError("it has no step")
    last = max(phase.step for phase in steps)
    return sorted((phase for phase in steps if phase.step == last), key=lambda phase: phase.start)


def _phase(event: Mapping[str, object]) -> _Phase:
    phase, _, step = str(event["name"]).rpartition(", step ")
    start = _count(event["ts"])
    return _Phase(
        phase or str(event["name"]), int(step) if phase and step.isdecimal() else 0, start, start + _count(event["dur"])
    )


def _at(phase: _Phase, counters: Mapping[str, Figure], every: Figure) -> At:
    """The peak of a phase; the earliest of equals."""
    inside = (moment for moment in every.at if phase.start < moment <= phase.end)
    moment = max((phase.start, *inside), key=every.after)
    return At(phase.phase, phase.phase, every.after(moment), _lines(counters, moment))


def _lines(counters: Mapping[str, Figure], moment: int) -> tuple[Held, ...]:
    held = ((kind, counter.after(moment)) for kind, counter in counters.items())
    return tuple(Held(kind, "", n_bytes) for kind, n_bytes in held if n_bytes)


def _sent(events: list[Mapping[str, object]], start: int, end: int) -> Iterator[Sent]:
    sums: Counter[str] = Counter()
    for event in events:
        if event["ph"] == "X" and event["tid"] == _COLLECTIVES and start <= _time(event["ts"]) < end:
            args = _args(event)
            if _count(args["ranks"]) > 1:
                sums[str(event["name"])] += _count(args["bytes"])
    yield from (Sent(operation, "", n_bytes) for operation, n_bytes in sums.items())


def _args(event: Mapping[str, object]) -> Mapping[str, object]:
    args = event["args"]
    if not isinstance(args, dict):
        raise TypeError("an event without figures")
    return args


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise ValueError("a figure that is no number of bytes or requests")
    return value


def _time(value: object) -> float:
    if isinstance(value, float) and 0 <= value <= _LARGEST:
        return value
    return _count(value)

"""Every allocation and release on a device, in program order and to the byte, as torch's profiler records them.

The profiler records each request with size, address and the enclosing operators. The running sum is the bytes alive: on a CPU
the requested bytes, on a GPU the blocks that the allocator returned. The profiler keeps no tensor alive.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch._C._profiler import _EventType, _ExtraFields_Allocation, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile, record_function

from zeroplan.errors import MeasurementError

_MARK = "mark:"


class Allocation(NamedTuple):
    """One request (positive bytes) or release (negative bytes)."""

    time_ns: int
    n_bytes: int
    address: int
    live_bytes: int
    """Bytes alive after it, counted from the start of the recording."""
    operators: tuple[str, ...]
    """The enclosing operators, outermost first."""


class Timeline:
    """The events of a recording in time order, and the times of its marks."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.marks: dict[str, int] = {}

    def without(self, *operators: str) -> "Timeline":
        """This timeline without the blocks requested inside operators whose names begin with one of ``operators``."""
        left_out: set[int] = set()
        dropped: set[int] = set()
        for at, event in enumerate(self.allocations):
            if event.n_bytes > 0:
                left_out.discard(event.address)  # a thread that is not recorded released it
                if any(name.startswith(operators) for name in event.operators):
                    left_out.add(event.address)
                    dropped.add(at)
            elif event.address in left_out:
                left_out.discard(event.address)
                dropped.add(at)
        return self._without_events(dropped)

    def without_scratch(self, *operators: str) -> "Timeline":
        """This timeline without the scratch of these operators: blocks that one requests and releases before it returns."""
        scratch: set[int] = set()
        open_requests: dict[int, int] = {}
        for at, event in enumerate(self.allocations):
            if event.n_bytes > 0:
                open_requests[event.address] = at
                continue
            start = open_requests.pop(event.address, None)
            own = event.operators[-1] in operators if event.operators else False
            if start is not None and own and self.allocations[start].operators == event.operators:
                scratch |= {start, at}
        return self._without_events(scratch)

    def _without_events(self, dropped: set[int]) -> "Timeline":
        kept = Timeline()
        kept.marks = self.marks
        live_bytes = 0
        for at, event in enumerate(self.allocations):
            if at not in dropped:
                live_bytes += event.n_bytes
                # ``_replace`` would be several times slower
                kept.allocations.append(Allocation(event.time_ns, event.n_bytes, event.address, live_bytes, event.operators))
        return kept

    def live_bytes(self, mark: str) -> int:
        """Bytes alive at a mark, counted from the start of the recording. [bytes]"""
        before = bisect_right(self.allocations, self.marks[mark], key=_time)
        return self.allocations[before - 1].live_bytes if before else 0

    def between(self, start: str, end: str) -> list[Allocation]:
        """The events between two marks."""
        first = bisect_left(self.allocations, self.marks[start], key=_time)
        last = bisect_right(self.allocations, self.marks[end], key=_time)
        return self.allocations[first:last]

    def peak_bytes(self, start: str, end: str) -> int:
        """Most bytes alive between two marks, counted from the start of the recording. [bytes]"""
        return max((self.live_bytes(start), *(event.live_bytes for event in self.between(start, end))))

    def peak_time(self, start: str, end: str) -> int:
        """When the most bytes were alive between two marks; the start if nothing was requested. [ns]"""
        events = self.between(start, end)
        highest = max(events, key=lambda event: event.live_bytes, default=None)
        if highest is None or highest.live_bytes < self.live_bytes(start):
            return self.marks[start]
        return highest.time_ns

    def alive(self, time_ns: int) -> list[Allocation]:
        """The requests not yet released at a time."""
        found: dict[int, Allocation] = {}
        for event in self.allocations[: bisect_right(self.allocations, time_ns, key=_time)]:
            if event.n_bytes > 0:
                found[event.address] = event
            else:
                found.pop(event.address, None)
        return list(found.values())


def _time(event: Allocation) -> int:
    return event.time_ns


@contextmanager
def recorded(device: str = "cpu") -> Iterator[Timeline]:
    """Record the enclosed code's allocations on a device; the timeline is filled when the block ends."""
    timeline = Timeline()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        yield timeline
    _fill(timeline, profiler, device)


def mark(name: str) -> None:
    """Mark this moment of the recording by a name."""
    with record_function(_MARK + name):
        pass


def _fill(timeline: Timeline, profiler: profile, device: str) -> None:
    if profiler.profiler is None or profiler.profiler.kineto_results is None:
        raise MeasurementError("torch's profiler recorded nothing; this build of torch has none")
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    requests = sorted(_requests(roots, timeline.marks, device), key=lambda request: request[0])
    live_bytes = 0
    for time_ns, n_bytes, address, operators in requests:
        live_bytes += n_bytes
        timeline.allocations.append(Allocation(time_ns, n_bytes, address, live_bytes, operators))


def _requests(
    roots: list[_ProfilerEvent], marks: dict[str, int], device: str
) -> Iterator[tuple[int, int, int, tuple[str, ...]]]:
    pending: list[tuple[_ProfilerEvent, tuple[str, ...]]] = [(root, ()) for root in roots]
    while pending:
        event, operators = pending.pop()
        if event.tag == _EventType.Allocation:
            request = event.typed[1]
            if isinstance(request, _ExtraFields_Allocation) and request.device.type == device:
                yield event.start_time_ns, request.alloc_size, request.ptr, operators
            continue
        if event.name.startswith(_MARK):
            marks[event.name.removeprefix(_MARK)] = event.start_time_ns
        inside = (*operators, event.name)
        pending.extend((child, inside) for child in event.children)

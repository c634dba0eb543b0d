"""Every allocation and release that torch's CPU allocator sees, in program order and to the byte, from torch's profiler.

The profiler records each request with its size, its address and the operators it happened in; adding them up gives the
bytes alive at any moment, which is what a CUDA allocator would have been asked for. Real execution, no tracing mode, so
nothing is kept alive by being watched.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._profiler import _ProfilerEvent

_MARK = "mark:"


class Allocation(NamedTuple):
    """One request (positive) or release (negative)."""

    time_ns: int
    n_bytes: int
    address: int
    live_bytes: int
    """Bytes alive after it, counted from the start of the recording."""
    operators: tuple[str, ...]
    """The operators it happened in, outermost first."""


class Timeline:
    """What a recording saw: allocations in time order, and the moments that were marked."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.marks: dict[str, int] = {}

    def without(self, *operators: str) -> Timeline:
        """This timeline as if what was requested inside these operators had never been."""
        left_out: set[int] = set()
        kept = Timeline()
        kept.marks = self.marks
        live_bytes = 0
        for event in self.allocations:
            if event.n_bytes > 0 and set(operators) & set(event.operators):
                left_out.add(event.address)
            elif event.n_bytes < 0 and event.address in left_out:
                left_out.discard(event.address)
            else:
                live_bytes += event.n_bytes
                kept.allocations.append(event._replace(live_bytes=live_bytes))
        return kept

    def live_bytes(self, mark: str) -> int:
        """Bytes alive at a mark, counted from the start of the recording."""
        before = bisect_right(self.allocations, self.marks[mark], key=lambda event: event.time_ns)
        return self.allocations[before - 1].live_bytes if before else 0

    def between(self, start: str, end: str) -> list[Allocation]:
        """Return the allocations and releases between two marks."""
        first = bisect_left(self.allocations, self.marks[start], key=lambda event: event.time_ns)
        last = bisect_right(self.allocations, self.marks[end], key=lambda event: event.time_ns)
        return self.allocations[first:last]

    def peak_bytes(self, start: str, end: str) -> int:
        """Most bytes alive at once between two marks, counted from the start of the recording."""
        return max((self.live_bytes(start), *(event.live_bytes for event in self.between(start, end))))


@contextmanager
def recorded() -> Iterator[Timeline]:
    """Record the allocations of the enclosed code; the timeline is filled when the block ends."""
    timeline = Timeline()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        yield timeline
    _fill(timeline, profiler)


def mark(name: str) -> None:
    """Name this moment of the recording."""
    with record_function(_MARK + name):
        pass


def _fill(timeline: Timeline, profiler: profile) -> None:
    assert profiler.profiler is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    requests = sorted(_requests(roots, timeline.marks), key=lambda request: request[0])
    live_bytes = 0
    for time_ns, n_bytes, address, operators in requests:
        live_bytes += n_bytes
        timeline.allocations.append(Allocation(time_ns, n_bytes, address, live_bytes, operators))


def _requests(roots: list[_ProfilerEvent], marks: dict[str, int]) -> Iterator[tuple[int, int, int, tuple[str, ...]]]:
    pending: list[tuple[_ProfilerEvent, tuple[str, ...]]] = [(root, ()) for root in roots]
    while pending:
        event, operators = pending.pop()
        if event.tag == _EventType.Allocation:
            request = event.typed[1]
            yield event.start_time_ns, request.alloc_size, request.ptr, operators
            continue
        if event.name.startswith(_MARK):
            marks[event.name.removeprefix(_MARK)] = event.start_time_ns
        inside = (*operators, event.name)
        pending.extend((child, inside) for child in event.children)

"""The same run without a tracker: torch's profiler alone records every request and release.

A tracker's peaks must equal its peaks to the byte, once two things are left out: what a CPU kernel requests and frees inside
itself (:data:`KERNEL_INNER`), and blocks of up to 8 bytes (Python numbers wrapped as tensors, which are in host memory on a
GPU machine).
"""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from zeroplan.ledger import Phase
from zeroplan.verify.training.run import run
from zeroplan.verify.watching.recording import STILL_HELD
from zeroplan.verify.watching.timeline import Timeline
from zeroplan.verify.watching.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn
    from torch._C._profiler import _ProfilerEvent

    from zeroplan.ledger import Kind
    from zeroplan.spec.job import JobSpec
    from zeroplan.verify.training.workload import Workload

#: CPU operators whose kernel requests and frees memory inside itself, and what for.
KERNEL_INNER = {
    "aten::_chunk_cat": "padded and cast copies; CUDA's kernel has none",
    "fsdp::chunk_cat_mixed_dtype": "cast copies, in torch 2.15; CUDA's kernel casts as it reads",
    "aten::mul": "a cast copy of an operand of another dtype; CUDA's kernel casts as it reads",
    "aten::add": "a cast copy of an operand of another dtype; CUDA's kernel casts as it reads",
    "aten::add_": "a cast copy of an operand of another dtype; CUDA's kernel casts as it reads",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "blocks of scores",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "blocks of scores",
}
A_NUMBER = 8


class Marker:
    """A watcher that only marks where phases begin, under torch's profiler."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, Phase]] = [(-1, Phase.INIT)]
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Self:
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.profiler.__exit__(None, None, None)

    def enter(self, phase: Phase, step: int) -> None:
        with record_function(f"mark:{len(self.spans)}"):
            self.spans.append((step, phase))

    def name_modules(self, root: nn.Module) -> None:
        pass

    def claim(self, kind: Kind, tensors: Iterable[torch.Tensor | None]) -> None:
        pass

    def gradients_are(self, kind: Kind) -> None:
        pass

    def labelled(self, _kind: Kind) -> AbstractContextManager[None]:
        return nullcontext()

    def not_recording(self) -> AbstractContextManager[None]:
        return nullcontext()


Peaks = dict[tuple[int, Phase], int]


def unwatched_peaks(job: JobSpec, *, rank: int = 0, steps: int = 2, make: Callable[[], Workload] | None = None) -> Peaks:
    """Return the most bytes alive in each phase of each step, by the profiler."""
    marker = Marker()
    gc.collect()  # or an earlier model's reference cycles would be freed during this recording
    with plain_kernels():
        run(job, marker, rank=rank, steps=steps, fake=False, make=make)
    assert marker.profiler.profiler is not None
    changes, marks = _changes(marker.profiler.profiler.kineto_results.experimental_event_tree())
    return _peaks(changes, marks, marker.spans)


def watched_peaks(job: JobSpec, *, fake: bool, steps: int = 2) -> Peaks:
    """Return the most bytes alive in each phase of each step, by the tracker."""
    return tracked_peaks(watched(job, fake=fake, steps=steps))


def tracked_peaks(tracker: Tracker) -> Peaks:
    """Return the most bytes alive in each phase of each step of a recording."""
    changes = [(block.born, block.n_bytes) for block in tracker.blocks if block.n_bytes > A_NUMBER]
    changes += [(b.died, -b.n_bytes) for b in tracker.blocks if b.n_bytes > A_NUMBER and b.died != STILL_HELD]
    spans = [(span.step, span.phase) for span in tracker.spans]
    return _peaks(sorted(changes), {n: span.start + 0.5 for n, span in enumerate(tracker.spans)}, spans)


def watched(
    job: JobSpec, *, fake: bool, rank: int = 0, steps: int = 2, make: Callable[[], Workload] | None = None
) -> Tracker:  # fmt: skip
    """Run a job under a tracker, and return the tracker."""
    tracker = Tracker()
    gc.collect()
    with plain_kernels():
        run(job, tracker, rank=rank, steps=steps, fake=fake, make=make)
    assert Timeline(tracker.recording).live[-1] == tracker.live_bytes
    return tracker


def _peaks(changes: list[tuple[float, int]], marks: dict[int, float], spans: list[tuple[int, Phase]]) -> Peaks:
    peaks: Peaks = {}
    live, pending = 0, iter(changes)
    change = next(pending, None)
    for number, span in enumerate(spans):
        end = marks.get(number + 1, float("inf"))
        peaks[span] = max(peaks.get(span, 0), live)
        while change is not None and change[0] < end:
            live += change[1]
            peaks[span] = max(peaks[span], live)
            change = next(pending, None)
    return {span: peak for span, peak in peaks.items() if span[1] is not Phase.INIT}


class _Request(NamedTuple):
    """A request, or a release if the size is negative. ``kernel`` is the call of a ``KERNEL_INNER`` operator around it, or 0."""

    time_ns: int
    n_bytes: int
    address: int
    kernel: int


def _changes(roots: list[_ProfilerEvent]) -> tuple[list[tuple[float, int]], dict[int, float]]:
    """Return requests and releases in time order, without those inside kernels and those of numbers; and when each span began."""
    requests, marks = _seen(roots)
    requests.sort(key=lambda request: request.time_ns)
    dropped = _inner(requests)
    kept = [one for at, one in enumerate(requests) if at not in dropped and abs(one.n_bytes) > A_NUMBER]
    return [(one.time_ns, one.n_bytes) for one in kept], marks


def _seen(roots: list[_ProfilerEvent]) -> tuple[list[_Request], dict[int, float]]:
    marks: dict[int, float] = {}
    requests: list[_Request] = []
    pending: list[tuple[_ProfilerEvent, int]] = [(root, 0) for root in roots]
    while pending:
        event, kernel = pending.pop()
        if event.tag == _EventType.Allocation:
            requests.append(_Request(event.start_time_ns, event.typed[1].alloc_size, event.typed[1].ptr, kernel))
            continue
        if event.name.startswith("mark:"):
            marks[int(event.name.removeprefix("mark:"))] = event.start_time_ns
        kernel = kernel or (id(event) if event.name in KERNEL_INNER else 0)
        pending.extend((child, kernel) for child in event.children)
    return requests, marks


def _inner(requests: list[_Request]) -> set[int]:
    """Return the places of requests that a kernel also frees, and of these releases."""
    found: set[int] = set()
    open_requests: dict[int, int] = {}
    for at, one in enumerate(requests):
        if one.n_bytes > 0:
            open_requests[one.address] = at
            continue
        first = open_requests.pop(one.address, None)
        if first is not None and one.kernel and requests[first].kernel == one.kernel:
            found |= {first, at}
    return found


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Use one thread and no oneDNN, which makes reordered copies that a GPU does not have."""
    threads, one_dnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = one_dnn

"""Makes the snapshot that a notebook reads: a training run on a GPU that is too small, in the format of torch's allocator.

No GPU ran it. Requests and releases, their order and their lines of torch and transformers come from a run on fake tensors.
Our model of CUDA's allocator gives the addresses and the moment when the card is full. As a script it rewrites the file:
``python -m tests.notebooks.out_of_memory``.
"""

from __future__ import annotations

import lzma
import pickle
import sys
from typing import TYPE_CHECKING, NamedTuple

from tests.notebooks.executed import FOLDER
from zeroplan import Phase, estimate, job
from zeroplan.allocator import CachingAllocator, Chunk
from zeroplan.engines.device import workspace
from zeroplan.verify.fake_cuda.installed import CUDA, install_node
from zeroplan.verify.training.run import run
from zeroplan.verify.watching.recording import LIFTED, STILL_HELD, Block
from zeroplan.verify.watching.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zeroplan.spec.job import JobSpec
    from zeroplan.verify.watching.tracker import _Watch

SNAPSHOT = FOLDER / "out-of-memory.pickle.xz"
JOB = {"model": "llama-3.2-1b", "gpus": 1, "gpu": "rtx-4090-24gb", "seq_len": 4096, "optimizer_impl": "fused"}

Frames = list[dict[str, object]]
_LINES = {Phase.INIT: 8, Phase.FORWARD: 14, Phase.BACKWARD: 15, Phase.STEP: 16}
_NOT_THERE_ON_A_GPU = (
    "/_subclasses/",
    "/_ops.py",
    "/_prims",
    "/_refs",
    "/_meta_registrations",
    "/_python_dispatch",
    "/_decomp",
)
_SMALL, _LARGE = 0x7E00_0000_0000, 0x7F00_0000_0000


class Stacks(Tracker):
    """A tracker that keeps the stack of each request, as ``_record_memory_history(stacks="python")`` does."""

    def __init__(self) -> None:
        super().__init__(device=CUDA)
        self.frames: dict[Block, Frames] = {}
        self._kept: dict[tuple[tuple[str, int], ...], Frames] = {}

    def _request(self, watch: _Watch, n_bytes: int, func: Callable[..., object]) -> Block:
        block = super()._request(watch, n_bytes, func)
        phase = self.spans[-1].phase
        places = () if phase is Phase.BACKWARD else tuple(_places())  # autograd's thread has no Python frames
        main = {"filename": "/home/me/train.py", "name": "train", "line": _LINES[phase]}
        frames = self._kept.setdefault((*places, ("", _LINES[phase])), [_frame(*place) for place in places] + [main])
        self.frames[block] = [] if phase is Phase.BACKWARD else frames
        return block


def _places() -> Iterator[tuple[str, str, int]]:
    """Yield the frames of torch and transformers above a request, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/site-packages/t" in file and not any(part in file for part in _NOT_THERE_ON_A_GPU):
            yield file.rpartition("/site-packages/")[2], frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back


def _frame(file: str, name: str, line: int) -> dict[str, object]:
    return {"filename": f"/home/me/env/lib/python3.11/site-packages/{file}", "name": name, "line": line}


class InUse(NamedTuple):
    """A block of memory in use, and the stack of its request."""

    chunk: Chunk
    n_bytes: int
    frames: Frames


class Card:
    """A GPU with ``room_bytes`` for its allocator, and the allocator's history."""

    def __init__(self, room_bytes: int) -> None:
        self._room = room_bytes
        self._allocator = CachingAllocator()
        self.segments: dict[int, int] = {}
        self.in_use: dict[int, InUse] = {}
        self.trace: list[dict[str, object]] = []

    def ask(self, n_bytes: int, frames: Frames) -> int | None:
        """Allocate memory and return its address. If there is none left, record that in the history and return None."""
        before = self._allocator.reserved_bytes
        chunk = self._allocator.request(n_bytes)
        grown = self._allocator.reserved_bytes - before
        if grown and self.reserved_bytes + grown > self._room:
            self._give_back()
        if grown and self.reserved_bytes + grown > self._room:
            self.trace.append(self._entry("oom", n_bytes, frames) | {"device_free": self._room - self.reserved_bytes})
            return None
        if grown:
            self.segments[place(chunk)] = grown
            self.trace.append(self._entry("segment_alloc", grown, frames) | {"addr": place(chunk)})
        self.trace.append(self._entry("alloc", n_bytes, frames) | {"addr": place(chunk)})
        self.in_use[place(chunk)] = InUse(chunk, n_bytes, frames)
        return place(chunk)

    def release(self, address: int) -> None:
        """Free memory."""
        chunk, n_bytes, _ = self.in_use.pop(address)
        for action in ("free_requested", "free_completed"):
            self.trace.append(self._entry(action, n_bytes, []) | {"addr": address})
        self._allocator.release(chunk)

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that the allocator has reserved on the card."""
        return sum(self.segments.values())

    def _give_back(self) -> None:
        """Release segments that are wholly free, as the allocator does before it gives up."""
        for pool in self._allocator._pools.values():
            for chunk in [one for one in pool.free if self.segments.get(place(one)) == one.size]:
                pool.remove(chunk)
                self.trace.append(self._entry("segment_free", chunk.size, []) | {"addr": place(chunk)})
                del self.segments[place(chunk)]

    def _entry(self, action: str, n_bytes: int, frames: Frames) -> dict[str, object]:
        return {"action": action, "size": n_bytes, "stream": 0, "time_us": len(self.trace), "frames": frames}


def place(chunk: Chunk) -> int:
    """Return the address of a block."""
    return (_SMALL if chunk.pool.small else _LARGE) + chunk.address


def snapshot(asked: JobSpec) -> dict[str, object]:
    """Train two steps, or until the card runs out of memory."""
    install_node()
    seen = Stacks()
    run(asked, seen, device=CUDA)
    answer = estimate(asked)
    card = Card(int(answer.capacity_bytes or 0) - int(answer.outside_band.expected_bytes))
    workspace_bytes, _ = workspace(asked.cluster.gpu)
    addresses: dict[Block, int] = {}
    without: set[Phase] = {Phase.FORWARD, Phase.BACKWARD}
    for block, is_asked in _events(seen):
        phase, frames = seen.recording.spans[block.span].phase, seen.frames[block]
        if is_asked and phase in without and "aten.mm." in block.operation:
            without.remove(phase)
            card.ask(workspace_bytes, frames)
        if not is_asked:
            card.release(addresses.pop(block))
        elif (address := card.ask(block.n_bytes, frames)) is None:
            break
        else:
            addresses[block] = address
    return {"segments": list(_segments(card)), "device_traces": [card.trace]}


def _events(seen: Stacks) -> Iterator[tuple[Block, bool]]:
    """Return requests (True) and releases on the GPU, in order."""
    blocks = [block for block in seen.blocks if block.operation != LIFTED]
    events = [(block.born, block, True) for block in blocks]
    events += [(block.died, block, False) for block in blocks if block.died != STILL_HELD]
    return ((block, is_asked) for _, block, is_asked in sorted(events, key=lambda event: event[0]))


def _segments(card: Card) -> Iterator[dict[str, object]]:
    """Return the segments reserved at the end, with their blocks in use and free blocks."""
    for address, size in card.segments.items():
        blocks, at, end = [], address, address + size
        for start in [*sorted(one for one in card.in_use if address <= one < end), end]:
            if start > at:
                blocks.append({"address": at, "size": start - at, "requested_size": 0, "state": "inactive", "frames": []})
            if start < end:
                chunk, n_bytes, frames = card.in_use[start]
                blocks.append(
                    {
                        "address": start,
                        "size": chunk.size,
                        "requested_size": n_bytes,
                        "state": "active_allocated",
                        "frames": frames,
                    }
                )
                at = start + chunk.size
        yield {"device": 0, "address": address, "total_size": size, "stream": 0, "is_expandable": False, "blocks": blocks}


if __name__ == "__main__":
    SNAPSHOT.write_bytes(lzma.compress(pickle.dumps(snapshot(job(**JOB)))))

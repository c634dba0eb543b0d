"""Exports a saved run as a memory snapshot: the dict of ``torch.cuda.memory._snapshot``, for pytorch.org/memory_viz.

A snapshot records the history of the allocator. Here the allocator's model serves the run's requests, with default settings and
unlimited memory. cuBLAS's workspaces are left out. Each request and release is one microsecond.

Source: ``torch/cuda/memory.py`` (``_snapshot``), ``torch/csrc/cuda/memory_snapshot.cpp``, torch 2.13.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path

from zeroplan.allocator import CachingAllocator, Chunk
from zeroplan.errors import SpecError
from zeroplan.saved_runs.files import write
from zeroplan.script_trace import SavedRun, Trace
from zeroplan.snapshots.frames import KIND_OF_BLOCK, MODULE, OPERATOR, PHASE

_POOL = 2**40
"""The distance between pools in addresses; in the model each pool begins at 0. memory_viz keeps 53 bits."""
_LONGEST = 32
"""Longer lines of code are cut to this length in frames. [characters]"""

_Entry = dict[str, object]


def save_snapshot(saved: SavedRun, path: Path, *, force: bool) -> None:
    """Write a run as a snapshot. Raises SpecError if it cannot be written."""
    if saved.trace is None:
        raise SpecError("the run was saved without its blocks; run the script again with --save")
    save_requests(saved.trace, path, force=force)


def save_requests(trace: Trace, path: Path, *, force: bool) -> None:
    """Write the requests of a run, or of an estimated step."""
    write(path, pickle.dumps(snapshot(trace), protocol=4), force=force)


def snapshot(trace: Trace) -> _Entry:
    """The snapshot's dict as torch writes it, for one device."""
    return _Replay(trace).snapshot()


class _Replay:
    """Replays a trace through the allocator's model, and records the events as torch does."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._card = CachingAllocator()
        self._pools: dict[int, tuple[int, int]] = {}
        self._chunks: dict[int, Chunk] = {}
        self._frames: dict[tuple[int, ...], list[_Entry]] = {}
        self._noted: list[_Entry] = []

    def snapshot(self) -> _Entry:
        emptied = frozenset(self._trace.emptied)
        for moment, (block, is_request) in enumerate(self._events(), 1):
            self._let_go(moment - 1)
            if moment - 1 in emptied:
                self._empty(moment - 1)
            (self._request if is_request else self._release)(block, moment)
        self._let_go(self._trace.moments)
        if self._trace.moments in emptied:
            self._empty(self._trace.moments)
        return {
            "segments": list(self._segments()),
            "device_traces": [self._noted],
            "allocator_settings": {},
            "external_annotations": list(self._annotations()),
        }

    def _let_go(self, moment: int) -> None:
        """Let the allocator free the private pools that no CUDA graph uses after this moment."""
        pools = self._trace.pools
        for pool, at in () if pools is None else zip(pools.let_go, pools.let_go_at, strict=True):
            if at == moment:
                self._card.let_go(pool)

    def _pool(self, block: int) -> int:
        return 0 if self._trace.pools is None else self._trace.pools.of_block[block]

    def _events(self) -> Iterator[tuple[int, bool]]:
        """The requested (True) or released block of each moment."""
        blocks, last = self._trace.blocks, self._trace.moments
        at: list[tuple[int, bool]] = [(0, True)] * (last + 1)
        for block, (born, died) in enumerate(zip(blocks.born, blocks.died, strict=True)):
            at[born] = (block, True)
            if died <= last:
                at[died] = (block, False)
        return iter(at[1:])

    def _request(self, block: int, moment: int) -> None:
        blocks, before = self._trace.blocks, self._card.reserved_bytes
        chunk = self._chunks[block] = self._card.request(blocks.n_bytes[block], blocks.stream[block], self._pool(block))
        self._pools.setdefault(id(chunk.pool), (len(self._pools) + 1, blocks.stream[block]))
        if taken := self._card.reserved_bytes - before:
            self._note("segment_alloc", self._address(_first(chunk)), taken, block, moment)
        self._note("alloc", self._address(chunk), blocks.n_bytes[block], block, moment)

    def _release(self, block: int, moment: int) -> None:
        chunk, size = self._chunks.pop(block), self._trace.blocks.n_bytes[block]
        for action in ("free_requested", "free_completed"):
            self._note(action, self._address(chunk), size, block, moment)
        self._card.release(chunk)

    def _empty(self, moment: int) -> None:
        """Free the empty segments, as ``empty_cache`` does; these events have no frames."""
        for chunk in self._card.release_cached():
            self._noted.append({
                "action": "segment_free", "addr": self._address(chunk), "size": chunk.size, "time_us": moment, "frames": [],
                "stream": self._pools[id(chunk.pool)][1],
            })  # fmt: skip

    def _note(self, action: str, address: int, size: int, block: int, moment: int) -> None:
        stream, kind = self._trace.blocks.stream[block], self._trace.kinds[self._trace.blocks.kind[block]]
        self._noted.append({
            "action": action, "addr": address, "size": size, "stream": stream, "time_us": moment, "frames": self._stack(block),
            "category": kind,
        })  # fmt: skip

    def _address(self, chunk: Chunk) -> int:
        """A chunk's address, unique over all pools and never 0."""
        return _POOL * self._pools[id(chunk.pool)][0] + chunk.address

    def _stack(self, block: int) -> list[_Entry]:
        """Operator, module, line of code and phase as frames, the innermost first; equal stacks share one list."""
        trace, blocks = self._trace, self._trace.blocks
        key = tuple(column[block] for column in (blocks.operation, blocks.module, blocks.line, blocks.span, blocks.kind))
        if key not in self._frames:
            operation, module, line, span, kind = key
            part = trace.spans[span]
            self._frames[key] = [
                _frame(OPERATOR, trace.operations[operation]), _frame(MODULE, trace.modules[module] or "the model as a whole"),
                *_line(trace.lines[line], trace.sources[line]), _frame(KIND_OF_BLOCK, trace.kinds[kind]),
                _frame(PHASE, part.phase, max(part.step + 1, 0)),
            ]  # fmt: skip
        return self._frames[key]

    def _segments(self) -> Iterator[_Entry]:
        """Yield the segments reserved at the end, with their blocks."""
        blocks = self._trace.blocks
        held = {id(chunk): block for block, chunk in self._chunks.items()}
        for first in {id(one): one for one in map(_first, self._card.chunks(self._chunks.values()))}.values():
            parts = [self._part(chunk, held.get(id(chunk))) for chunk in _row(first)]
            used = sum(chunk.size for chunk in _row(first) if id(chunk) in held)
            requested = sum(blocks.n_bytes[held[id(chunk)]] for chunk in _row(first) if id(chunk) in held)
            yield {
                "device": 0, "address": self._address(first), "total_size": sum(chunk.size for chunk in _row(first)),
                "allocated_size": used, "active_size": used, "requested_size": requested, "stream": self._pools[id(first.pool)][1],
                "segment_type": "small" if first.pool.small else "large", "segment_pool_id": (0, first.pool.private),
                "is_expandable": False, "frames": [], "blocks": parts,
            }  # fmt: skip

    def _part(self, chunk: Chunk, block: int | None) -> _Entry:
        """A block of a segment, in use or free."""
        if block is None:
            return {"address": self._address(chunk), "size": chunk.size, "requested_size": 0, "state": "inactive", "frames": []}
        trace = self._trace
        return {
            "address": self._address(chunk), "size": chunk.size, "requested_size": trace.blocks.n_bytes[block],
            "state": "active_allocated", "frames": self._stack(block), "category": trace.kinds[trace.blocks.kind[block]],
        }  # fmt: skip

    def _annotations(self) -> Iterator[_Entry]:
        """Yield the phases of the steps in the format of torch's profiler annotations."""
        for at, span in enumerate(self._trace.spans):
            window, name = self._trace.window(at), f"{span.phase}, step {span.step + 1}" if span.step >= 0 else span.phase
            for stage, moment in (("START", window.start), ("END", window.stop - 1)):
                yield {"device": 0, "stage": stage, "name": name, "time_us": moment}


def _frame(file: str, name: str, line: int = 0) -> _Entry:
    return {"filename": file, "line": line, "name": name}


def _line(line: str, source: str) -> Iterator[_Entry]:
    """Yield a Python frame for a line of code, ``train.py:31`` or a library's ``trl.trainer.sft_trainer:412``."""
    file, _, number = line.rpartition(":")
    if file and number.isdecimal():
        name = source if len(source) <= _LONGEST else f"{source[: _LONGEST - 1]}…"
        yield _frame(file if file.endswith(".py") else f"{file.replace('.', '/')}.py", name or "a line of code", int(number))


def _first(chunk: Chunk) -> Chunk:
    while chunk.before is not None:
        chunk = chunk.before
    return chunk


def _row(chunk: Chunk | None) -> Iterator[Chunk]:
    while chunk is not None:
        yield chunk
        chunk = chunk.after

"""CUDA graphs of a GPU that is not there: which pool of memory a capture asks, and for how long that pool is kept.

Source: torch 2.13, ``torch/cuda/graphs.py`` and ``ATen/cuda/CUDAGraph.cpp`` (``capture_begin``, ``capture_end``, ``reset``), and
``c10/cuda/CUDACachingAllocator.cpp`` (``beginAllocateToPool``, ``releasePool``).
"""

from collections import Counter
from collections.abc import Callable
from itertools import count

import torch

GENERAL = 0
"""The pool that everything outside of captures shares."""
Handle = tuple[int, int]
"""A pool as scripts see it."""

listeners: list[Callable[[int], None]] = []
"""Called with every pool that no graph keeps any more."""
_numbers = count(1)
_keep: Counter[int] = Counter()
"""How many graphs keep each pool."""
_underway: list[int] = []
"""Pools of the captures that run."""


def pool_in_use() -> int:
    """Where memory is asked for now: the pool of the innermost capture, else ``GENERAL``."""
    return _underway[-1] if _underway else GENERAL


def is_capturing(*_: object) -> bool:
    """``torch.cuda.is_current_stream_capturing``."""
    return bool(_underway)


def graph_pool_handle() -> Handle:
    """``torch.cuda.graph_pool_handle``: a pool that several graphs may share."""
    return (0, next(_numbers))


class Graph:
    """``torch.cuda.CUDAGraph``. A capture runs its code once, with memory of a pool that the graph keeps."""

    _pool: int | None = None
    _captured = False

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: FBT001, FBT002  torch's own order
        """Take what a real one is made of."""

    def capture_begin(self, pool: Handle | None = None, *_: object, **__: object) -> None:
        """Ask a private pool for memory from here on. Refuses what torch refuses."""
        if self._captured:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph. Create a new one.")
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = next(_numbers) if pool is None else max(pool)
        _keep[self._pool] += 1
        _underway.append(self._pool)

    def capture_end(self) -> None:
        """Ask the general pool again."""
        if self._pool is None or self._pool not in _underway:
            raise RuntimeError("capture_end() called before capture_begin().")
        _underway.remove(self._pool)
        self._captured = True

    def replay(self) -> None:
        """Run what was captured, which asks for nothing."""
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")

    def instantiate(self) -> None:
        """Nothing to make: a capture is ready."""

    def pool(self) -> Handle:
        """Return the pool of the capture, for another graph to share."""
        if not self._captured or self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return (0, self._pool)

    def reset(self) -> None:
        """Let go of the pool. The allocator gives its segments back when it next empties its cache."""
        if not self._captured or self._pool is None:
            return
        self._captured = False
        _keep[self._pool] -= 1
        if not _keep[self._pool]:
            for listener in listeners:
                listener(self._pool)

    def register_generator_state(self, state: object) -> None:
        """Nothing to note: no size depends on random numbers."""

    def enable_debug_mode(self) -> None:
        """Nothing to show."""

    def debug_dump(self, debug_path: str) -> None:
        """Nothing to show."""

    def __del__(self) -> None:
        """Let go of the pool."""
        self.reset()

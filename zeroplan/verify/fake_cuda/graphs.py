"""CUDA graphs on a fake GPU: the memory pool of each capture, and when pools are released.

Source: torch 2.13, ``torch/cuda/graphs.py`` and ``ATen/cuda/CUDAGraph.cpp`` (``capture_begin``, ``capture_end``, ``reset``), and
``c10/cuda/CUDACachingAllocator.cpp`` (``beginAllocateToPool``, ``releasePool``).
"""

from collections import Counter
from collections.abc import Callable
from itertools import count

import torch

from zeroplan.verify.replaced import always

GENERAL = 0
"""The pool of everything outside captures."""
Handle = tuple[int, int]
"""A pool's handle in scripts."""

listeners: list[Callable[[int], None]] = []
"""Called with every pool that no graph uses any more."""
_numbers = count(1)
_keep: Counter[int] = Counter()
"""How many graphs use each pool."""
_underway: list[int] = []
"""Pools of the running captures."""


def pool_in_use() -> int:
    """The pool that serves requests now: the innermost capture's, else ``GENERAL``."""
    return _underway[-1] if _underway else GENERAL


def is_capturing(*_: object) -> bool:
    """``torch.cuda.is_current_stream_capturing``."""
    return bool(_underway)


def graph_pool_handle() -> Handle:
    """``torch.cuda.graph_pool_handle``: a pool that several graphs may share."""
    return (0, next(_numbers))


class Graph:
    """``torch.cuda.CUDAGraph``: a capture runs its code once, with memory of a pool that the graph keeps."""

    _pool: int | None = None
    _captured = False

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: FBT001, FBT002  torch's own order
        """Accept the arguments of a real graph."""

    def capture_begin(self, pool: Handle | None = None, *_: object, **__: object) -> None:
        """Serve requests from a private pool from now on. Raises torch's own errors."""
        if self._captured:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph. Create a new one.")
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = next(_numbers) if pool is None else max(pool)
        _keep[self._pool] += 1
        _underway.append(self._pool)

    def capture_end(self) -> None:
        """Serve requests from the general pool again."""
        if self._pool is None or self._pool not in _underway:
            raise RuntimeError("capture_end() called before capture_begin().")
        _underway.remove(self._pool)
        self._captured = True

    def replay(self) -> None:
        """Check that there is a capture; a replay requests no memory."""
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")

    def pool(self) -> Handle:
        """The pool of the capture, which another graph may share."""
        if not self._captured or self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return (0, self._pool)

    def reset(self) -> None:
        """Release the pool; the allocator frees its segments when it next empties its cache."""
        if not self._captured or self._pool is None:
            return
        self._captured = False
        _keep[self._pool] -= 1
        if not _keep[self._pool]:
            for listener in listeners:
                listener(self._pool)

    instantiate = register_generator_state = enable_debug_mode = debug_dump = always(None)

    def __del__(self) -> None:
        self.reset()

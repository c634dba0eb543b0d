"""Answers ``torch.cuda.memory_*``: allocated bytes from a watcher, reserved bytes from the model of CUDA's allocator."""

from collections import defaultdict
from typing import Protocol

from zeroplan.allocator import CachingAllocator


class Counted(Protocol):
    """Counts the bytes of tensors on the GPU, and is notified when the allocator frees its cache."""

    live_bytes: int

    def note_emptied(self) -> None:
        """Note that the allocator freed its cache."""


class Memory:
    """The figures of one GPU with ``total_bytes``. [bytes]

    ``counted`` counts tensors once a run is watched; ``allocator`` models CUDA's allocator with the same requests.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.counted: Counted | None = None
        self.allocator: CachingAllocator | None = None
        self._highest = self._highest_reserved = 0

    def allocated(self, *_: object, **__: object) -> int:
        """``torch.cuda.memory_allocated``. [bytes]"""
        if self.allocator is not None:
            return self.allocator.allocated_bytes
        return 0 if self.counted is None else self.counted.live_bytes

    def reserved(self, *_: object, **__: object) -> int:
        """``torch.cuda.memory_reserved``. [bytes]"""
        return self.allocated() if self.allocator is None else self.allocator.reserved_bytes

    def note(self) -> None:
        """Update the peaks."""
        self._highest = max(self._highest, self.allocated())
        self._highest_reserved = max(self._highest_reserved, self.reserved())

    def most_allocated(self, *_: object, **__: object) -> int:
        """``torch.cuda.max_memory_allocated``. [bytes]"""
        self.note()
        return self._highest

    def most_reserved(self, *_: object, **__: object) -> int:
        """``torch.cuda.max_memory_reserved``. [bytes]"""
        self.note()
        return self._highest_reserved

    def reset_peak(self, *_: object, **__: object) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        self._highest, self._highest_reserved = self.allocated(), self.reserved()

    def empty_cache(self, *_: object, **__: object) -> None:
        """``torch.cuda.empty_cache``: free cached memory."""
        if self.allocator is not None:
            self.allocator.release_cached()
        if self.counted is not None:
            self.counted.note_emptied()

    def stats(self, *_: object, **__: object) -> dict[str, int]:
        """``torch.cuda.memory_stats``: bytes allocated, active, requested and reserved; all other figures are 0."""
        found = defaultdict(int, num_ooms=0, num_alloc_retries=0)  # torch.cuda.memory_summary reads a plain copy
        for what in ("allocated_bytes", "active_bytes", "requested_bytes"):
            found |= {f"{what}.all.current": self.allocated(), f"{what}.all.peak": self.most_allocated()}
        return found | {"reserved_bytes.all.current": self.reserved(), "reserved_bytes.all.peak": self.most_reserved()}

    def info(self, *_: object, **__: object) -> tuple[int, int]:
        """``torch.cuda.mem_get_info``: free and total. [bytes]"""
        return max(0, self.total_bytes - self.reserved()), self.total_bytes

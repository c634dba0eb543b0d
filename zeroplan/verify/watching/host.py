"""How much host memory does a run hold beside the GPU's, and how much of it is pinned?

Counts tensors that operators or pinning make. It models torch's allocator of pinned memory: blocks are powers of two, are reused
for requests of the same size, and are never freed.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroplan.engines.pinned import block_bytes
from zeroplan.verify.replaced import replaced
from zeroplan.verify.watching.recording import HostSeen


class _Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage in host memory, and its size."""

    __slots__ = ("key", "n_bytes", "pinned")
    key: int
    n_bytes: int
    pinned: bool


class HostMemory:
    """Tensors in host memory, for each part of a run.

    ``highest``: the part's peak so far. ``held``: bytes at its end. ``pinned``: bytes that the pinned allocator then holds
    beyond its tensors. ``taken``: the peak of all host memory, free pinned blocks included. [bytes]
    """

    def __init__(self) -> None:
        self.highest, self.held, self.pinned, self.taken = [0], [0], [0], [0]
        self._live = self._live_pinned = self._taken = 0
        self._free: Counter[int] = Counter()
        self._watches: dict[int, _Watch] = {}
        self._pins = False

    @property
    def seen(self) -> HostSeen:
        """The figures so far."""
        return HostSeen(tuple(self.highest), tuple(self.held), tuple(self.pinned), tuple(self.taken))

    def enter(self) -> None:
        """Begin the next part of the run."""
        for column in (self.highest, self.held):
            column.append(self._live)
        self.pinned.append(self._taken - self._live_pinned)
        self.taken.append(self._in_all)

    @property
    def _in_all(self) -> int:
        return self._live - self._live_pinned + self._taken

    def see(self, tensor: torch.Tensor, *, pinned: bool = False) -> None:
        """Count a tensor in host memory; ``pinned`` if the request was for pinned memory."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._watches or not storage.nbytes():
            return
        watch = _Watch(storage, self._released)
        watch.key, watch.n_bytes, watch.pinned = storage._cdata, storage.nbytes(), pinned or self._pins
        self._watches[watch.key] = watch
        self._count(watch.n_bytes, pinned=watch.pinned)

    def _count(self, n_bytes: int, *, pinned: bool) -> None:
        self._live += n_bytes
        if pinned:
            size = block_bytes(abs(n_bytes))
            self._live_pinned += n_bytes
            if n_bytes < 0:
                self._free[size] += 1
            elif self._free[size]:
                self._free[size] -= 1
            else:
                self._taken += size
        self.highest[-1] = max(self.highest[-1], self._live)
        self.held[-1], self.pinned[-1] = self._live, self._taken - self._live_pinned
        self.taken[-1] = max(self.taken[-1], self._in_all)

    def _released(self, storage: "weakref.ref[torch.UntypedStorage]") -> None:
        assert isinstance(storage, _Watch)  # noqa: S101  every reference here is one
        del self._watches[storage.key]
        self._count(-storage.n_bytes, pinned=storage.pinned)

    @contextmanager
    def pinning(self) -> Iterator[None]:
        """Make ``pin_memory`` copy into a new tensor, as torch does with a GPU."""
        with replaced(torch.Tensor, "pin_memory", lambda tensor, *_: self._pin(tensor)):
            yield

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if (watch := self._watches.get(tensor.untyped_storage()._cdata)) is not None and watch.pinned:
            return tensor
        self._pins = True
        try:
            return tensor.detach().clone()  # some tensors of a script have values
        finally:
            self._pins = False

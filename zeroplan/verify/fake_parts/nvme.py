"""Replaces NVMe: DeepSpeed's asynchronous reads and writes move no data, and only each file's size is stored.

DeepSpeed's own code decides what to swap, when, and through which buffers. Only its C++ handle is replaced, which needs
``libaio`` and real tensors. Page-locked buffers come from the operating system, not from torch's allocator.
Source: DeepSpeed 0.19.8, ``csrc/aio/py_lib/py_ds_aio.cpp`` and ``csrc/pin_memory/deepspeed_pin_tensor.cpp``.
"""

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

import torch
from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, partitioned_param_swapper, pipelined_optimizer_swapper

from zeroplan.verify.replaced import replaced

_SWAPPERS = partitioned_optimizer_swapper, partitioned_param_swapper, pipelined_optimizer_swapper


class Disk:
    """The size of each file. [bytes]"""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: dict[str, int] = {}
        self.locked: list[torch.UntypedStorage] = []


_DISK: list[Disk] = []
_LEFT = [0]


def disk() -> Disk | None:
    """The disk of the current run, if any."""
    return _DISK[-1] if _DISK else None


def left() -> int:
    """The size of the last run's files. [bytes]"""
    return _LEFT[-1]


class _Handle:
    """``aio_handle``: every request ends at once, and is counted until ``wait``."""

    def __init__(self, **_options: object) -> None:
        self._pending = 0

    def async_pread(self, buffer: torch.Tensor, path: str, _offset: int) -> int:
        assert _DISK[-1].files[path] >= buffer.nbytes  # noqa: S101  DeepSpeed only reads files it has written
        self._pending += 1
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, _offset: int) -> int:
        files = _DISK[-1].files
        files[path] = max(files.get(path, 0), buffer.nbytes)
        self._pending += 1
        return 0

    def wait(self) -> int:
        done, self._pending = self._pending, 0
        return done

    def new_cpu_locked_tensor(self, elements: int, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty(elements, dtype=like.dtype)
        _DISK[-1].locked.append(made.untyped_storage())
        return made

    def free_cpu_locked_tensor(self, _tensor: torch.Tensor) -> bool:
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage()._cdata == storage._cdata for storage in _DISK[-1].locked)


class _Builder:
    def load(self, **_options: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(aio_handle=_Handle)


@contextmanager
def fake_nvme() -> Iterator[None]:
    """Inside the block, make DeepSpeed use the stand-in and a temporary folder."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for module in _SWAPPERS:
            stack.enter_context(replaced(module, "AsyncIOBuilder", _Builder))
        _DISK.append(Disk(folder))
        try:
            yield
        finally:
            _LEFT[0] = sum(_DISK.pop().files.values())

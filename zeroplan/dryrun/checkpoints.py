"""Loads checkpoints without their bytes: names, shapes and dtypes only.

Under a fake tensor mode ``torch.load`` reads the pickle and leaves the storages in the file. It makes tensors without any
operator (torch 2.13, ``torch/_utils.py``, ``_restore_device_fake_mode``), so this file reports their memory. It refuses a
function as ``map_location``, so this file calls the function.
"""

import concurrent.futures
import json
import struct
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch.futures import Future
from torch.serialization import default_restore_location

from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.replacements import note, noting
from zeroplan.dryrun.without_bytes import DTYPES
from zeroplan.verify.replaced import always, put

_LONGEST_HEADER = 100_000_000
"""safetensors' own limit. [bytes]"""


_by_torch: Callable[[object, str], Any] = default_restore_location


class _Stored:
    """Replaces the storage in calls of a ``map_location`` function: it has a device and can be moved."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def cuda(self, device: Any = None, **_: object) -> "_Stored":  # noqa: ANN401  as torch has it
        """A copy on a GPU, by default the current one."""
        if device is None or isinstance(device, int):
            device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        return self.to(device=device)

    def cpu(self) -> "_Stored":
        """A copy on the host."""
        return self.to(device="cpu")

    def to(self, *, device: Any, **_: object) -> "_Stored":  # noqa: ANN401
        """A copy on a device."""
        return _Stored(torch.device(device))


class _MapLocation(dict[str, str]):
    """Turns a ``map_location`` function into a mapping; the function gets each storage on the host, as in ``torch.load``."""

    def __init__(self, function: Callable[[object, str], Any]) -> None:
        super().__init__()
        self._function = function

    def get(self, location: str, default: object = None) -> str:  # noqa: ARG002
        """The device that the function returns for a location; torch's choice if it returns None."""
        stored = _Stored(torch.device("cpu"))
        found = self._function(stored, location)
        return str((_by_torch(stored, location) if found is None else found).device)


def watch_loading(see: Callable[[torch.Tensor], None]) -> None:
    """Make ``torch.load`` report every tensor it makes, and accept a function as ``map_location``.

    A checkpoint read with ``mmap`` onto the host stays in its file and is not reported.
    """
    load: Callable[..., object] = torch.load
    restore: Callable[[torch.Tensor], torch.Tensor] = torch._utils._restore_device_fake_mode
    mapped = False

    def restored(tensor: torch.Tensor) -> torch.Tensor:
        found = restore(tensor)
        if not mapped or found.device.type != "cpu":
            see(found)
        return found

    @wraps(load)
    def loads(f: object, map_location: object = None, *args: object, **kwargs: object) -> object:
        nonlocal mapped
        mapped = bool(kwargs.get("mmap"))
        note("torch.load", "names, shapes and dtypes are read, and no weights")
        return load(f, _MapLocation(map_location) if callable(map_location) else map_location, *args, **kwargs)

    put(torch._utils, _restore_device_fake_mode=restored)
    put(torch, load=loads)


_NOT_SAVED = noting("safetensors files", "nothing is written", always(None))


class _Slice:
    """A tensor in a file; only shape and dtype are read."""

    def __init__(self, entry: dict[str, object], device: object) -> None:
        self._shape, self._dtype, self._device = entry["shape"], str(entry["dtype"]), device

    def get_shape(self) -> object:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: object) -> torch.Tensor:
        whole = torch.empty(self._shape, dtype=DTYPES[self._dtype], device=self._device)  # type: ignore[call-overload]
        return whole[index]  # type: ignore[no-any-return]


class Header:
    """``safetensors.safe_open`` that reads only a file's header."""

    def __init__(self, filename: str, framework: str = "pt", device: object = "cpu", **_: object) -> None:  # noqa: ARG002
        note("safetensors files", "only their headers are read")
        with Path(filename).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"{filename!r} is not a safetensors file: its header would have {length:,} bytes")
            self._entries: dict[str, dict[str, object]] = json.loads(file.read(length))
        self._metadata, self._device = self._entries.pop("__metadata__", {}), device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def keys(self) -> list[str]:
        """The tensors' names."""
        return list(self._entries)

    offset_keys = keys

    def metadata(self) -> object:
        """The file's metadata."""
        return self._metadata

    def get_slice(self, name: str) -> _Slice:
        """A tensor to slice."""
        return _Slice(self._entries[name], self._device)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, without bytes."""
        return self.get_slice(name)[...]


def _load_file(filename: str, device: object = "cpu", **_: object) -> dict[str, torch.Tensor]:
    file = Header(filename, device=device)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping


def _distributed(module: ModuleType) -> None:
    def read_data(_reader: object, _plan: object, _planner: object) -> Future[None]:
        note("distributed checkpoints", "only their metadata is read")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    put(module.FileSystemReader, read_data=read_data)


def _saved_distributed(module: ModuleType) -> None:
    what = ("distributed checkpoints", "nothing is written")

    def begun(*_: object, **__: object) -> concurrent.futures.Future[None]:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        return done

    put(module, save=noting(*what, always(None)), async_save=noting(*what, begun))


PATCHES: dict[str, Patch] = {
    "safetensors": lambda module: put(module, safe_open=Header),
    "safetensors.torch": lambda module: put(
        module, safe_open=Header, load_file=_load_file, save_file=_NOT_SAVED, save_model=_NOT_SAVED
    ),
    "torch.distributed.checkpoint.filesystem": _distributed,
    "torch.distributed.checkpoint.state_dict_saver": _saved_distributed,
    "torch.distributed.checkpoint": _saved_distributed,
}

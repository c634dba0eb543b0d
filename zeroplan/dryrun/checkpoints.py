"""Checkpoints without their bytes: names, shapes and dtypes are read, and saving writes nothing.

Under a mode of fake tensors ``torch.load`` reads the pickle and leaves the storages in the file. It makes the tensors without any
operator (torch 2.13, ``torch/_utils.py``, ``_restore_device_fake_mode``), so their memory is reported here, and it takes no
function as ``map_location``, so the function is asked here.
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
from zeroplan.dryrun.stood_in import note, noting
from zeroplan.dryrun.without_bytes import DTYPES
from zeroplan.verify.fake_cuda.torch_cuda import always
from zeroplan.verify.replaced import put

_LONGEST_HEADER = 100_000_000
"""As safetensors has it. [bytes]"""


_by_torch: Callable[[object, str], Any] = default_restore_location


class _Stored:
    """What a function that is a ``map_location`` is given in place of a storage: it moves, and knows where it is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def cuda(self, device: Any = None, **_: object) -> "_Stored":  # noqa: ANN401  as torch has it
        """On a GPU, by default the current one."""
        if device is None or isinstance(device, int):
            device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        return self.to(device=device)

    def cpu(self) -> "_Stored":
        """On the host."""
        return self.to(device="cpu")

    def to(self, *, device: Any, **_: object) -> "_Stored":  # noqa: ANN401
        """On a device."""
        return _Stored(torch.device(device))


class _Asked(dict[str, str]):
    """A ``map_location`` for every location of a file, by a function. As in ``torch.load``, each storage comes from the host."""

    def __init__(self, function: Callable[[object, str], Any]) -> None:
        super().__init__()
        self._function = function

    def get(self, location: str, default: object = None) -> str:  # noqa: ARG002
        """The device for one location; the function may leave it to torch."""
        stored = _Stored(torch.device("cpu"))
        found = self._function(stored, location)
        return str((_by_torch(stored, location) if found is None else found).device)


def watch_loading(see: Callable[[torch.Tensor], None]) -> None:
    """Have ``torch.load`` report every tensor that it has made, and take a function as ``map_location``.

    A checkpoint that is read with ``mmap`` onto the host stays in its file, and is not reported.
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
        return load(f, _Asked(map_location) if callable(map_location) else map_location, *args, **kwargs)

    put(torch._utils, _restore_device_fake_mode=restored)
    put(torch, load=loads)


_NOT_SAVED = noting("safetensors files", "nothing is written", always(None))


class _Slice:
    """A tensor of a file of which nothing but shape and dtype is read."""

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
    """``safetensors.safe_open``: the header of a file alone."""

    def __init__(self, filename: str, framework: str = "pt", device: object = "cpu", **_: object) -> None:  # noqa: ARG002
        note("safetensors files", "only their headers are read")
        with Path(filename).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"{filename!r} is no safetensors file: its header would have {length:,} bytes")
            self._entries: dict[str, dict[str, object]] = json.loads(file.read(length))
        self._metadata, self._device = self._entries.pop("__metadata__", {}), device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def keys(self) -> list[str]:
        """The tensors' names."""
        return list(self._entries)

    offset_keys = keys

    def metadata(self) -> object:
        """What the file says beside its tensors."""
        return self._metadata

    def get_slice(self, name: str) -> _Slice:
        """A tensor to be cut from."""
        return _Slice(self._entries[name], self._device)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, without its bytes."""
        return self.get_slice(name)[...]


def _load_file(filename: str, device: object = "cpu", **_: object) -> dict[str, torch.Tensor]:
    file = Header(filename, device=device)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping


def _safetensors(module: ModuleType) -> None:
    put(module, safe_open=Header)


def _safetensors_torch(module: ModuleType) -> None:
    put(module, safe_open=Header, load_file=_load_file, save_file=_NOT_SAVED, save_model=_NOT_SAVED)


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
    "safetensors": _safetensors,
    "safetensors.torch": _safetensors_torch,
    "torch.distributed.checkpoint.filesystem": _distributed,
    "torch.distributed.checkpoint.state_dict_saver": _saved_distributed,
    "torch.distributed.checkpoint": _saved_distributed,
}

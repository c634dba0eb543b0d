"""Gives fake tensors what engines read from real ones: an address of their own, and a device that follows ``data``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.verify.replaced import replaced


@contextmanager
def addresses() -> Iterator[None]:
    """Make ``data_ptr`` of fake tensors and storages return the address of the storage object; 0 once it is freed."""
    of_tensor: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
    of_storage: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr

    def where(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return of_storage(storage)
        return storage._cdata if storage.nbytes() else 0

    def address(tensor: torch.Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return of_tensor(tensor)
        start = where(tensor.untyped_storage())
        return start and int(start + tensor.storage_offset() * tensor.element_size())

    with replaced(torch.Tensor, "data_ptr", address), replaced(torch.UntypedStorage, "data_ptr", where):
        yield


@contextmanager
def devices_follow_data() -> Iterator[None]:
    """Give a fake tensor the device of the tensor that is assigned to its ``data``, as a real one has it."""
    of_tensor: Any = torch.Tensor.data

    def put(tensor: FakeTensor, other: torch.Tensor) -> None:
        of_tensor.__set__(tensor, other)
        tensor.fake_device = other.device

    with replaced(FakeTensor, "data", property(of_tensor.__get__, put)):
        yield

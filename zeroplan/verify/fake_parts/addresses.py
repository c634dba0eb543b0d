"""Gives every fake tensor its own address, because engines tell tensors apart by ``data_ptr``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

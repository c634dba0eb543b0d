"""Addresses of fake tensors: an engine that tells tensors apart by where they lie must not take all of them for one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.verify.replaced import replaced


@contextmanager
def addresses() -> Iterator[None]:
    """Let a fake tensor lie at an address of its own, which is that of its storage's object; memory that was freed has none."""
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

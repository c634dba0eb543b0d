"""The tensors inside nested values: arguments of an operator, inputs and outputs of a module, buffers of a collective."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor


def tensors_in(held: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, and in lists, tuples, sets and mappings of such values.

    >>> [tensor.shape for tensor in tensors_in(({"a": torch.ones(2)}, 3, [torch.ones(1)]))]
    [torch.Size([2]), torch.Size([1])]
    """
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, (tuple, list, set)):
        for one in held:
            yield from tensors_in(one)
    elif isinstance(held, Mapping):
        for one in held.values():
            yield from tensors_in(one)


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor; of a fake one, the device that it reports."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def largest_of(arguments: Iterable[object]) -> list[torch.Tensor]:
    """The tensors of the argument that has the most bytes; empty without arguments."""
    return max((list(tensors_in(one)) for one in arguments), key=bytes_of, default=[])


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The total size of tensors. [bytes]"""
    return sum(tensor.nbytes for tensor in tensors)


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype as records spell it.

    >>> dtype_name(torch.ones(1))
    'float32'
    """
    return str(tensor.dtype).removeprefix("torch.")

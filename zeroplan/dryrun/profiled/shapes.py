"""Scales the tensors and numbers of a script's batch to another number of sequences and another length."""

from typing import NamedTuple

import torch
from torch.utils._mode_utils import no_dispatch

from zeroplan.verify.fake_cuda.known_values import known
from zeroplan.verify.nested import device_of
from zeroplan.verify.profiling.polynomials import Shape


class Given(NamedTuple):
    """The description of a script's tensor, from which a similar one can be made; ``values`` if known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: torch.Tensor | None
    trained: bool
    """Whether it requires gradients."""


def given(tensor: torch.Tensor) -> Given:
    """The description of a tensor, which does not keep its GPU memory alive."""
    values = None if tensor.is_floating_point() or tensor.is_complex() else known(tensor)
    if values is not None:
        with no_dispatch():
            values = values.detach().clone()
    return Given(tuple(tensor.shape), tensor.dtype, device_of(tensor), values, tensor.requires_grad)


class Scale(NamedTuple):
    """Scales the script's own batch to another shape."""

    own: Shape
    other: Shape

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The scaled shape: scales a first dimension of sequences, and every other dimension as long as a sequence."""
        return tuple(self._size(at, size) for at, size in enumerate(shape))

    def _size(self, at: int, size: int) -> int:
        if at == 0 and size == self.own.sequences:
            return self.other.sequences
        return self.other.length if at and self.own.length and size == self.own.length else size

    def number(self, number: int) -> int:
        """An integer of the script's code, scaled if it counts sequences or tokens."""
        (batch, length), (others, long) = self.own, self.other
        counts = {batch: others, batch * length: others * long, batch * (length - 1): others * (long - 1)} if batch > 1 else {}
        lengths = {length: long, length - 1: long - 1} if length > 2 else {}
        return (lengths | counts).get(number, number)

    def made(self, one: Given) -> torch.Tensor:
        """A tensor like the script's with the scaled shape; known values are repeated or cut off."""
        sizes = self.sizes(one.shape)
        if one.values is None:
            whole = not one.dtype.is_floating_point and not one.dtype.is_complex
            found = (torch.zeros if whole else torch.empty)(sizes, dtype=one.dtype).to(one.device)
        else:
            found = _repeated(one.values, sizes).to(one.device)
        return found.requires_grad_() if one.trained else found


def _repeated(values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    for at, size in enumerate(sizes):
        if size != values.size(at):
            values = values.index_select(at, torch.arange(size) % values.size(at))
    return values.clone()

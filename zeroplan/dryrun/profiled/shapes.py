"""Tensors and numbers of a script's batch, made again for another number of sequences and another length."""

from typing import NamedTuple

import torch
from torch.utils._mode_utils import no_dispatch

from zeroplan.verify.fake_cuda.half_fake import device_of
from zeroplan.verify.fake_cuda.known_values import known
from zeroplan.verify.profiling.polynomials import Shape


class Given(NamedTuple):
    """A tensor that a script made: all that is needed to make another like it. ``values`` where they are known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: torch.Tensor | None
    trained: bool
    """Whether gradients flow to it."""


def given(tensor: torch.Tensor) -> Given:
    """Describe a tensor, and hold none of its memory on the GPU."""
    values = None if tensor.is_floating_point() or tensor.is_complex() else known(tensor)
    if values is not None:
        with no_dispatch():
            values = values.detach().clone()
    return Given(tuple(tensor.shape), tensor.dtype, device_of(tensor), values, tensor.requires_grad)


class Scale(NamedTuple):
    """From the shape of the script's own batch to another."""

    own: Shape
    other: Shape

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes of a tensor: the first dimension is of sequences, any other as long as a sequence is of tokens."""
        return tuple(self._size(at, size) for at, size in enumerate(shape))

    def _size(self, at: int, size: int) -> int:
        if at == 0 and size == self.own.sequences:
            return self.other.sequences
        return self.other.length if at and self.own.length and size == self.own.length else size

    def number(self, number: int) -> int:
        """A whole number of the script's code, where it is one of sequences or tokens."""
        (batch, length), (others, long) = self.own, self.other
        counts = {batch: others, batch * length: others * long, batch * (length - 1): others * (long - 1)} if batch > 1 else {}
        lengths = {length: long, length - 1: long - 1} if length > 2 else {}
        return (lengths | counts).get(number, number)

    def made(self, one: Given) -> torch.Tensor:
        """A tensor like one of the script's: its values repeated or cut off, where they are known."""
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

"""Real whole numbers and truths beside fake tensors, and how sure they are.

Values are exact where all that they are computed from is. Where a script chooses among scores that nobody knows (``topk``,
``argmax``), the choice is assumed: every candidate is chosen as often as any other. What is computed from such a choice is assumed
too.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensor


class Sure(IntEnum):
    """How sure values are; of several, the highest holds for what is computed from them."""

    EXACT = 0
    ASSUMED = 1
    """They follow from a choice that this rank is assumed to make."""
    EXCHANGED = 2
    """They follow from choices that other ranks are assumed to make."""


_STALE: set[int] = set()
"""Addresses of values into which something unknown was written."""
_NOT_EXACT: dict[int, Sure] = {}
"""How sure values are that are not exact, by their address: views of the same memory are as sure."""
_AWAITED: dict[int, list[Callable[[], None]]] = {}
"""What fetches values that another rank sends, by the address where they will be: they are waited for when they are read."""


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real values of a tensor where they are known; a real tensor's are its own."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    values = cast("torch.Tensor | None", getattr(tensor, "known", None))
    if values is None:
        return None
    for fetch in _AWAITED.pop(_address(values), ()):
        fetch()
    return None if _address(values) in _STALE else values


def how_sure(tensor: torch.Tensor) -> Sure:
    """How sure the values of a tensor are that has some."""
    values = getattr(tensor, "known", None)
    return Sure.EXACT if values is None else _NOT_EXACT.get(_address(values), Sure.EXACT)


def keep(tensor: FakeTensor, values: torch.Tensor | None, sure: Sure | None = None) -> None:
    """Set the real values beside a fake tensor; of floating-point numbers none are kept.

    Without ``sure`` they are another tensor's, and as sure as they are there.
    """
    keeps = values is not None and not values.is_floating_point() and not values.is_complex()
    tensor.known = values if keeps else None  # type: ignore[attr-defined]
    if not keeps or values is None or sure is None:
        return
    address = _address(values)
    if values._base is None:
        _STALE.discard(address)
        _AWAITED.pop(address, None)
    if sure is Sure.EXACT:
        _NOT_EXACT.pop(address, None)
    else:
        _NOT_EXACT[address] = sure


def forget(tensor: torch.Tensor) -> None:
    """The values of a tensor, and of all that shares its memory, are not known any more."""
    values = getattr(tensor, "known", None)
    if values is not None:
        _STALE.add(_address(values))
        _AWAITED.pop(_address(values), None)
        tensor.known = None  # type: ignore[attr-defined]
    vars(tensor).pop("healthy", None)


def await_values(tensor: FakeTensor, read: Callable[[], tuple[torch.Tensor, Sure] | None]) -> None:
    """Have a tensor's values be those that ``read`` returns, which is called when they are first read; None of unknown ones."""
    values = getattr(tensor, "known", None)
    if values is None or _address(values) in _STALE:
        keep(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype), Sure.EXACT)
        values = tensor.known  # type: ignore[attr-defined]
    there = cast("torch.Tensor", values)

    def fetch() -> None:
        if (found := read()) is None:
            _STALE.add(_address(there))
            return
        there.copy_(found[0])
        if found[1] is not Sure.EXACT:
            _NOT_EXACT[_address(there)] = found[1]

    _AWAITED.setdefault(_address(there), []).append(fetch)


def _address(values: torch.Tensor) -> int:
    return values.untyped_storage().data_ptr()

"""Real integers and booleans beside fake tensors, and how certain they are.

Values computed from exact values are exact. Where a script chooses by unknown scores (``topk``, ``argmax``), the choice is assumed
to be even, and values computed from it count as assumed.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensor


class Sure(IntEnum):
    """How certain values are; a result is as uncertain as its least certain input."""

    EXACT = 0
    ASSUMED = 1
    """Computed from an assumed choice of this rank."""
    EXCHANGED = 2
    """Computed from assumed choices of other ranks."""


_STALE: set[int] = set()
"""Addresses of values that were overwritten by unknown ones."""
_NOT_EXACT: dict[int, Sure] = {}
"""Certainty of values that are not exact, by address, so that views of the same memory share it."""
_AWAITED: dict[int, list[Callable[[], None]]] = {}
"""Functions that fetch values sent by another rank, by the address to fill; called at the first read."""


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real values of a tensor: its own if it is real; None if unknown."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    values = cast("torch.Tensor | None", getattr(tensor, "known", None))
    if values is None:
        return None
    for fetch in _AWAITED.pop(_address(values), ()):
        fetch()
    return None if _address(values) in _STALE else values


def how_sure(tensor: torch.Tensor) -> Sure:
    """How certain the known values of a tensor are."""
    values = getattr(tensor, "known", None)
    return Sure.EXACT if values is None else _NOT_EXACT.get(_address(values), Sure.EXACT)


def keep(tensor: FakeTensor, values: torch.Tensor | None, sure: Sure | None = None) -> None:
    """Set the real values beside a fake tensor; floating-point values are not kept.

    Without ``sure`` they belong to another tensor and keep its certainty.
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
    """Mark the values of a tensor, and of all that shares its memory, as unknown."""
    values = getattr(tensor, "known", None)
    if values is not None:
        _STALE.add(_address(values))
        _AWAITED.pop(_address(values), None)
        tensor.known = None  # type: ignore[attr-defined]
    vars(tensor).pop("healthy", None)


def await_values(tensor: FakeTensor, read: Callable[[], tuple[torch.Tensor, Sure] | None]) -> None:
    """Call ``read`` for a tensor's values when they are first read; ``read`` returns None if they are unknown."""
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

"""Assumes even choices where a script chooses by unknown scores (a router): every candidate is chosen equally often.

The k highest of n scores are the next k candidates in turn, row after row, as torchtitan's ``debug.force_load_balance`` chooses
experts (0.3, ``models/common/moe.py``, ``_debug_force_load_balance_routing``).
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.verify.fake_cuda.known_values import known

_aten = torch.ops.aten

#: Operators that choose along one dimension: the position of the ``dim`` argument, and of the indices in the result.
_CHOOSE: dict[OpOverload, tuple[int, int]] = {
    _aten.topk.default: (2, 1), _aten.max.dim: (1, 1), _aten.min.dim: (1, 1), _aten.sort.default: (1, 1),
    _aten.sort.stable: (1, 1), _aten.argmax.default: (1, 0), _aten.argmin.default: (1, 0), _aten.multinomial.default: (9, 0),
}  # fmt: skip
_LAST = -1


def choice(
    func: OpOverload, args: Sequence[object], options: Mapping[str, object], result: object
) -> tuple[FakeTensor, Callable[[], torch.Tensor]] | None:  # fmt: skip
    """The tensor of chosen indices in a result, and a function that returns an even choice; None for other operators."""
    if func not in _CHOOSE:
        return None
    place, which = _CHOOSE[func]
    chosen = result if isinstance(result, torch.Tensor) else cast("Sequence[torch.Tensor]", result)[which]
    scores = cast("torch.Tensor", args[0])
    named = args[place] if len(args) > place else options.get("dim", None if func._opname.startswith("arg") else _LAST)
    if not isinstance(chosen, FakeTensor) or scores.dim() == 0 or scores.numel() == 0:
        return None
    if named is None:  # argmax over all elements
        return chosen, lambda: torch.zeros(chosen.shape, dtype=chosen.dtype)
    dim = cast("int", named) % scores.dim()
    keeps = chosen.dim() == scores.dim()
    shape = list(chosen.shape) if keeps else [*chosen.shape[:dim], 1, *chosen.shape[dim:]]
    start_apart = 1 if func._opname == "sort" else shape[dim]
    return chosen, lambda: _even(shape, dim, scores.shape[dim], start_apart).reshape(chosen.shape).to(chosen.dtype)


def _even(shape: Sequence[int], dim: int, candidates: int, start_apart: int) -> torch.Tensor:
    """Indices that cycle through the candidates: row r starts at ``r * start_apart``. Rows are all dimensions but ``dim``.

    >>> _even((3, 2), 1, 4, 2).tolist()
    [[0, 1], [2, 3], [0, 1]]
    """
    rest = [*shape[:dim], *shape[dim + 1 :]]
    starts = torch.arange(prod(rest)).reshape(rest).unsqueeze(dim) * start_apart
    along = [1] * len(shape)
    along[dim] = shape[dim]
    return (starts + torch.arange(shape[dim]).reshape(along)) % candidates


# --- operators whose result's shape depends on values ---------------------------------------------------------------------


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((tensor.numel(), max(tensor.dim(), 1)), dtype=torch.int64)


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    values = known(mask)
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    count = prod(shape) if values is None else int(values.count_nonzero()) * (prod(shape) // max(values.numel(), 1))
    return tensor.new_empty((count,))


#: For each operator, a function that makes its largest possible result; None if the size has no limit.
BY_VALUES: dict[OpOverload, Callable[..., torch.Tensor] | None] = {
    _aten.nonzero.default: _nonzero, _aten.masked_select.default: _masked_select, _aten.repeat_interleave.Tensor: None,
    _aten.bincount.default: None, _aten._unique2.default: None, _aten.unique_consecutive.default: None,
    _aten.unique_dim.default: None,
}  # fmt: skip


def counts(args: Sequence[object], options: Mapping[str, object]) -> torch.Tensor | None:
    """``bincount`` of unknown numbers: all ``minlength`` numbers occur equally often. None without ``minlength``."""
    least = cast("int", args[2] if len(args) > 2 else options.get("minlength", 0))
    if not least:
        return None
    each, rest = divmod(cast("torch.Tensor", args[0]).numel(), least)
    return torch.full((least,), each) + (torch.arange(least) < rest)


def _histogram(tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:  # noqa: A002  torch's names
    return torch.histc(tensor.double(), bins, min, max).to(tensor.dtype)


#: Replacements for operators that the CPU computes for floating-point numbers only.
ON_THE_HOST: dict[OpOverload, Callable[..., torch.Tensor]] = {_aten.histc.default: _histogram}

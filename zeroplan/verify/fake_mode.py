"""Fake tensors without the detour through torch's cache of answers, where the answer is quicker than the key.

Engines cut and join large buffers, one piece per rank, thousands per layer; optimizers work on lists of all parameters.
"""

from collections.abc import Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_aten = torch.ops.aten
#: Operators that return one view of their first argument and take no other tensor.
_VIEWS = frozenset({
    _aten.slice.Tensor, _aten.view.default, _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default, _aten.expand.default,
    _aten.select.int,
})  # fmt: skip
_CAT = _aten.cat.default


class QuickFakes(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """torch's mode looks up what it answered before, by a key that costs more than to cut a piece or to join many anew."""

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run an operator on fake tensors: views and joined pieces without the detour, everything else as torch does."""
        if func.namespace == "aten" and func._opname.startswith("_foreach_") and self._are_plain(args[0]):
            return self._foreach(func, args, kwargs or {})
        like = self._quick(func, args)
        if like is None or kwargs:
            return super().dispatch(func, types, args, kwargs or {})
        with in_kernel_invocation_manager(self):
            made = func(*args)
        return FakeTensor(self, made, like.fake_device)

    def _foreach(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """An operator on a list: in place there is nothing to do, else one new tensor for each."""
        if func._opname.endswith("_"):
            return None
        with in_kernel_invocation_manager(self):
            made = func(*args, **kwargs)
        return [FakeTensor(self, one, like.fake_device) for one, like in zip(made, args[0], strict=True)]  # type: ignore[call-overload]

    def _are_plain(self, tensors: object) -> bool:
        """Whether they are tensors of this mode and all on one device."""
        if not isinstance(tensors, list):
            return False
        plain = all(isinstance(one, FakeTensor) and self._is_plain(one) for one in tensors)
        return plain and len({one.fake_device for one in tensors}) == 1

    def _quick(self, func: OpOverload, args: Sequence[object]) -> FakeTensor | None:
        """The tensor whose device the result is on, where an operator can be run as it stands."""
        if func in _VIEWS:
            tensor = args[0]
            return tensor if isinstance(tensor, FakeTensor) and self._is_plain(tensor) else None
        if func is not _CAT or len(args) > 1 or not isinstance(args[0], list):
            return None
        pieces = [piece for piece in args[0] if isinstance(piece, FakeTensor) and self._is_plain(piece) and piece.dim() == 1]
        alike = len(pieces) == len(args[0]) and len({(piece.dtype, piece.fake_device) for piece in pieces}) == 1
        return pieces[0] if alike else None

    def _is_plain(self, tensor: FakeTensor) -> bool:
        """Whether it is of this mode, and no number that torch follows."""
        return tensor.constant is None and tensor.fake_mode is self

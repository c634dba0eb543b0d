"""Fake tensors without torch's cache of results where computing is faster than the cache key.

Engines cut and join large buffers, thousands of pieces per layer; optimizers work on lists of all parameters; models repeat a few
operators. Those run the operator itself on shapes, with torch's result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeGuard, cast

import torch
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
    in_kernel_invocation_manager,
)

_aten = torch.ops.aten
#: Operators whose tensors are their first argument, or their first two, and that return one new tensor.
_OF_ONE = frozenset({
    _aten.slice.Tensor, _aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.transpose.int, _aten.detach.default,
    _aten.unsqueeze.default, _aten.expand.default, _aten.select.int, _aten.as_strided.default,
})  # fmt: skip
_OF_TWO = frozenset({_aten.mm.default})
#: Operators whose result has the shape, dtype and strides of their floating-point arguments.
_ALIKE_OF_ONE = frozenset({
    _aten.neg.default, _aten.pow.Tensor_Scalar, _aten.mul.Scalar, _aten.div.Scalar, _aten.rsqrt.default, _aten.silu.default,
})  # fmt: skip
_ALIKE_OF_TWO = frozenset({_aten.mul.Tensor, _aten.add.Tensor, _aten.silu_backward.default})
_NEW = frozenset({_aten.empty.memory_format, _aten.empty_strided.default})
_CAT, _DETACH = _aten.cat.default, _aten.detach.default
_NUMBER: OpOverload = _aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_META = torch.device("meta")
_GIVEN_A_STORAGE = frozenset({_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset})
"""The cache would keep their storage alive, since its key contains it."""
_UNCHANGED = nullcontext()


@contextmanager
def unknown_numbers(answer: Callable[[torch.dtype], object]) -> Iterator[None]:
    """Make reads of a fake tensor's unknown number return ``answer``'s value; torch raises its error if that is None."""
    original = fake_impls.op_implementations_dict[_NUMBER]

    def number(mode: FakeTensorMode, func: object, tensor: FakeTensor) -> object:
        try:
            return original(mode, func, tensor)
        except DataDependentOutputException:
            if (assumed := answer(tensor.dtype)) is None:
                raise
            return assumed

    fake_impls.op_implementations_dict[_NUMBER] = number
    try:
        yield
    finally:
        fake_impls.op_implementations_dict[_NUMBER] = original


def _is_plain_meta(one: object) -> TypeGuard[torch.Tensor]:
    return isinstance(one, torch.Tensor) and not isinstance(one, FakeTensor) and one.is_meta


def _first_list(args: Sequence[object]) -> Sequence[FakeTensor]:
    """The list on which an operator computes; a number may precede it (``_foreach_pow`` of Adam with ``capturable``)."""
    return cast("Sequence[FakeTensor]", next(one for one in args if isinstance(one, list | tuple)))


class QuickFakes(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """torch's mode, without its cache for common operators: computing them is faster than the cache key."""

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run an operator on fake tensors: common ones directly, others through torch's mode."""
        options = kwargs or {}
        if func is _DETACH:  # torch.tensor makes a plain tensor on the meta device
            args = [FakeTensor(self, one, _META) if _is_plain_meta(one) else one for one in args]
        if func in _NEW and isinstance(options.get("device"), torch.device):
            return self._new(func, args, options)
        if not options and (like := self._like(func, args)) is not None:
            with in_kernel_invocation_manager(self):
                made = func(*args)
            return FakeTensor(self, made, like)
        if not options and (alike := self._alike(func, args)) is not None:
            with in_kernel_invocation_manager(self):
                made = torch.empty_strided(alike.shape, alike.stride(), dtype=alike.dtype, device=_META)
            return FakeTensor(self, made, alike.fake_device)
        if (
            func is _WAIT or func.namespace == "profiler"
        ):  # torch returns another tensor for fake ones; on real ones it returns the same
            return args[0] if func is _WAIT else func(*args, **options)
        if (
            func.namespace == "aten"
            and func._opname.startswith("_foreach_")
            and self._device_of_all(_first_list(args)) is not None
        ):
            return self._foreach(func, args, options)
        with disable_fake_tensor_cache(self) if func in _GIVEN_A_STORAGE else _UNCHANGED:
            return super().dispatch(func, types, args, options)

    def _new(self, func: OpOverload, args: Sequence[object], options: Mapping[str, object]) -> FakeTensor:
        device = cast("torch.device", options["device"])
        with in_kernel_invocation_manager(self):
            made = func(*args, **{**options, "device": _META, "pin_memory": None})
        return FakeTensor(self, made, device)

    def _like(self, func: OpOverload, args: Sequence[object]) -> torch.device | None:
        """The device of the result if the operator can run directly on shapes; else None."""
        if func in _OF_ONE:
            return self._device_of_all(args[:1])
        if func in _OF_TWO:
            return self._device_of_all(args[:2])
        if func is _CAT and len(args) == 1 and isinstance(pieces := args[0], list):
            flat = all(isinstance(one, FakeTensor) and one.dim() == 1 and one.dtype == pieces[0].dtype for one in pieces)
            return self._device_of_all(pieces) if flat else None
        return None

    def _alike(self, func: OpOverload, args: Sequence[object]) -> FakeTensor | None:
        """An argument with the shape, dtype and strides of the result; None if there is none."""
        count = 1 if func in _ALIKE_OF_ONE else 2 if func in _ALIKE_OF_TWO else 0
        if not count or self._device_of_all(args[:count]) is None:
            return None
        first = cast("FakeTensor", args[0])
        if not first.is_floating_point() or not first.is_contiguous():
            return None
        others = cast("Sequence[FakeTensor]", args[1:count])
        alike = all(other.shape == first.shape and other.dtype == first.dtype and other.is_contiguous() for other in others)
        return first if alike else None

    def __deepcopy__(self, memo: object) -> "QuickFakes":
        """This mode itself: copied tensors, as in ``nn.Transformer``, belong to the same mode."""
        return self

    def _foreach(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Run an operator on a list: return one new tensor per element, or nothing for an in-place operator."""
        if func._opname.endswith("_"):
            return None
        with in_kernel_invocation_manager(self):
            made = func(*args, **kwargs)
        return [FakeTensor(self, one, like.fake_device) for one, like in zip(made, _first_list(args), strict=True)]

    def _device_of_all(self, tensors: object) -> torch.device | None:
        """The common device of tensors of this mode; None if devices differ or torch tracks a constant value of one."""
        found: torch.device | None = None
        for tensor in cast("Sequence[object]", tensors):
            if not isinstance(tensor, FakeTensor) or tensor.constant is not None or tensor.fake_mode is not self:
                return None
            if found is not None and tensor.fake_device != found:
                return None
            found = tensor.fake_device
        return found

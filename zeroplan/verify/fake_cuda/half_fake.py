"""Tensors without bytes on the GPU, and real ones on the host where a script reads them.

On the host, integers and booleans are real (token ids, indices, seeds, masks), so that data sets, samplers and collators work as
usual. Floating-point tensors from factories are weights and therefore fake; those made from data are real. All tensors on the GPU
are fake. An integer or boolean tensor there keeps a real copy beside it as long as all its inputs have one, so a script reads
exact values.

A read of an unknown value returns that of a healthy step, and is listed (:mod:`zeroplan.verify.fake_cuda.stand_ins`): 1 for a
number, true for health checks (``isfinite``, ``all``), else false; a mask selects everything. Choices among scores are even
(:mod:`zeroplan.verify.fake_cuda.choices`), and other ranks send what this rank sends
(:mod:`zeroplan.verify.fake_cuda.exchanged`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zeroplan.verify.fake_cuda.choices import BY_VALUES, ON_THE_HOST, choice, counts
from zeroplan.verify.fake_cuda.exchanged import NAMESPACES, exchange
from zeroplan.verify.fake_cuda.known_values import Sure, forget, how_sure, keep, known
from zeroplan.verify.fake_cuda.sent_values import Messages, carry
from zeroplan.verify.fake_cuda.stand_ins import StandIns
from zeroplan.verify.fake_parts.fake_mode import QuickFakes
from zeroplan.verify.nested import device_of

_aten = torch.ops.aten
_NUMBER = _aten._local_scalar_dense.default
_HOST = torch.device("cpu")
_MOST_ELEMENTS, _MOST_OF_CHOICES = 1 << 22, 1 << 25
"""Most elements whose values are computed; more would be slow. Choices of experts decide sizes, so their limit is higher."""
_WHOLE_BY_DEFAULT = {"randint", "randint_like", "randperm", "tril_indices", "triu_indices"}
_WHOLE_FOR_WHOLE = {"arange", "full", "scalar_tensor"}
#: Comparisons that are true in a healthy step.
_TRUE = {"all", "_is_all_true", "isfinite", "eq", "ge", "le", "equal"}
#: Operators that keep a flag's meaning on its way to the host.
_KEEP_FLAGS = frozenset(
    ["_to_copy", "clone", "detach", "select", "view", "_unsafe_view", "slice", "squeeze", "unsqueeze", "max", "amax"]
)
#: These write 1 into their second argument if a value is not finite.
_FINITE_CHECKS = {
    _aten._amp_foreach_non_finite_check_and_unscale_.default, _aten._amp_foreach_non_finite_check_and_unscale.default,
}  # fmt: skip
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index.Tensor}
#: The number that fills a tensor made like another, or its negative index among the arguments.
_FILLED = {
    _aten.zeros_like.default: 0, _aten.new_zeros.default: 0, _aten.ones_like.default: 1, _aten.new_ones.default: 1,
    _aten.full_like.default: -1, _aten.new_full.default: -1,
}  # fmt: skip
_NOT_COMPUTED_ALONG = {"one_hot", "embedding"}

Options = dict[str, object]
Worst = Callable[..., torch.Tensor]


class _Values(NamedTuple):
    args: Sequence[object]
    options: Options
    sure: Sure


class HalfFakes(QuickFakes):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """The mode of a script's process: fake on the GPU, half fake on the host."""

    def __init__(self, stand_ins: StandIns, *, imbalance: float = 1.0, messages: Messages[Any] | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._stand_ins, self._imbalance, self._messages = stand_ins, imbalance, messages

    @property
    def avoid_device_init(self) -> bool:
        """True: the device cannot be touched."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: ``torch.compile`` compiles with its own fake tensors, and its result runs with these."""
        return True

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run an operator on real host tensors if that is exact, else on shapes only."""
        options = _cleaned(kwargs or {})
        tensors = [one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor)]
        fake = any(isinstance(one, FakeTensor) for one in tensors)
        device = _device_in(options)
        if (read := _READ.get(func)) is not None:
            return read(self, *args[:2])
        if not fake and _is_host(device) and _runs_for_real(func, args, options, tensors):
            if self._messages is not None:
                carry(self._messages, func, args)
            return func(*args, **options)
        if not tensors and device is not None and device.type == "cuda" and _is_whole(func, args, options):
            return self._made_on_the_gpu(func, types, args, options)
        if func.namespace in NAMESPACES:
            return self._exchanged(func, types, args, options)
        if "generator" in options and (fake or not _is_host(device)):
            options["generator"] = None
        return self._with_fakes(func, types, args, options, tensors)

    def _with_fakes(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object], options: Options, tensors: list[torch.Tensor]
    ) -> object:  # fmt: skip
        values = _values(func, args, options, tensors) if tensors else None
        if values is None or (values.sure and _compares_a_choice(func, tensors)):
            return self._unknown(func, types, args, options)
        return self._with_values(func, types, args, options, values)

    def _plain(self, func: OpOverload, types: Sequence[type], args: Sequence[object], options: Options) -> object:
        return super().dispatch(func, types, args, options)

    # --- values that are known ------------------------------------------------------------------------------------------

    def _made_on_the_gpu(self, func: OpOverload, types: Sequence[type], args: Sequence[object], options: Options) -> object:
        result = self._plain(func, types, args, {**options, "generator": None} if "generator" in options else options)
        if isinstance(result, FakeTensor) and result.numel() <= _MOST_ELEMENTS and not func._opname.startswith("empty"):
            keep(result, func(*args, **{**options, "device": _HOST}), Sure.EXACT)
        return result

    def _with_values(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object], options: Options,
        values: "_Values",
    ) -> object:  # fmt: skip
        """Run an operator on shapes, and on the known values beside them."""
        sure = values.sure
        device = _device_in(options)
        if func is _aten._to_copy.default and device is not None and device.type == "cpu":
            self._stand_ins.note_choice(sure, sized=cast("torch.Tensor", args[0]).numel() > 1)
            return func(*values.args, **values.options)  # a copy to the host is real again
        if _is_floating(options.get("dtype")):
            return self._plain(func, types, args, options)
        if func in BY_VALUES:
            self._stand_ins.note_choice(sure, sized=True)
            like = next(one for one in tree_leaves(args) if isinstance(one, FakeTensor))
            made = func(*values.args, **values.options)
            return tree_map_only(torch.Tensor, lambda one: self._beside(one, like.fake_device, sure), made)
        args = self._places(args) if func in _INDEXED and len(args) > 1 else args
        result = self._plain(func, types, args, options)
        if isinstance(result, FakeTensor) and (result.numel() > _most(sure) or result.is_floating_point()):
            return result
        try:
            run: Callable[..., object] = ON_THE_HOST.get(func, func)
            made = run(*values.args, **values.options)
        except RuntimeError:  # the host has no kernel for it: the values stay unknown
            return result
        for out, real in zip(tree_leaves(result), tree_leaves(made), strict=False):
            if isinstance(out, FakeTensor) and isinstance(real, torch.Tensor):
                keep(out, real, sure)
        return result

    def _beside(self, real: torch.Tensor, device: torch.device, sure: Sure) -> FakeTensor:
        """A fake tensor shaped like a real one, which becomes its values."""
        out = cast(
            "FakeTensor",
            self._plain(_aten.empty.memory_format, (), (list(real.shape),), {"dtype": real.dtype, "device": device}),
        )
        keep(out, real, sure)
        return out

    def _exchanged(self, func: OpOverload, types: Sequence[type], args: Sequence[object], options: Options) -> object:
        """Run a collective on shapes, and set the integers that it fills."""
        result = self._plain(func, types, args, options)
        if self._messages is not None and carry(self._messages, func, args):
            return result
        if exchange(func, args, result, self._imbalance):
            self._stand_ins.note_choice(Sure.EXCHANGED, sized=True)
        return result

    # --- values that are unknown ----------------------------------------------------------------------------------------

    def _unknown(self, func: OpOverload, types: Sequence[type], args: Sequence[object], options: Options) -> object:
        """Run an operator on shapes. If the result's shape depends on unknown values, assume that everything is selected."""
        if func._schema.is_mutable:
            for one in tree_leaves(args[:1]):
                if isinstance(one, FakeTensor):
                    forget(one)
        if (made := self._assumed_result(func, args, options)) is not None:
            return made
        result = self._plain(func, types, self._places(args) if func in _INDEXED and len(args) > 1 else args, options)
        self._set_known_values(func, args, options, result)
        if func in _FINITE_CHECKS:
            cast("FakeTensor", args[1]).healthy = False  # type: ignore[attr-defined]
        return result

    def _assumed_result(self, func: OpOverload, args: Sequence[object], options: Options) -> torch.Tensor | None:
        """The assumed result of an operator that needs values; None if there is none."""
        if func is _aten._to_copy.default and _to_the_host(args, options):
            return self._on_the_host(cast("FakeTensor", args[0]), options)
        if (worst := BY_VALUES.get(func)) is not None:
            return self._largest(func, worst, args, options)
        if func is _aten.bincount.default and (even := counts(args, options)) is not None:
            self._stand_ins.note_choice(Sure.ASSUMED, sized=True)
            return self._beside(even, cast("FakeTensor", args[0]).fake_device, Sure.ASSUMED)
        return None

    def _set_known_values(self, func: OpOverload, args: Sequence[object], options: Options, result: object) -> None:
        """Set result values that need no unknown input: a fill, an assumed choice, a boolean."""
        if isinstance(result, FakeTensor) and (number := _filled_with(func, args, result)) is not None:
            keep(result, torch.full(result.shape, number, dtype=result.dtype), Sure.EXACT)
            return
        found = choice(func, args, options, result)
        if found is not None and found[0].numel() <= _MOST_OF_CHOICES:
            keep(found[0], found[1](), Sure.ASSUMED)
        if isinstance(result, FakeTensor) and (truth := _assumed_truth(func, args, result)) is not None:
            result.healthy = truth  # type: ignore[attr-defined]

    def _on_the_host(self, tensor: FakeTensor, options: Options) -> torch.Tensor:
        """Unknown integers or booleans copied to the host: each element is its assumed value."""
        dtype = cast("torch.dtype", options.get("dtype") or tensor.dtype)
        assumed = getattr(tensor, "healthy", dtype is not torch.bool)
        self._stand_ins.note(str(dtype).removeprefix("torch."), str(assumed if dtype is torch.bool else int(assumed)))
        return torch.full(tensor.shape, assumed, dtype=dtype)

    def _largest(self, func: OpOverload, worst: Worst, args: Sequence[object], options: Options) -> torch.Tensor:
        """The largest possible result of an operator; with a known mask, the actual one."""
        masks = [one for one in args[1:2] if isinstance(one, torch.Tensor) and known(one) is not None]
        if masks:
            self._stand_ins.note_choice(how_sure(masks[0]), sized=True)
        else:
            self._stand_ins.note(func._opname, "everything is selected")
        return worst(*args, **options)

    def number(self, tensor: torch.Tensor) -> object:
        """The number that a script reads from a tensor of one element."""
        values = known(tensor)
        if values is not None:
            self._stand_ins.note_choice(how_sure(tensor), sized=False)
            return values.item()
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            return tensor.constant.item()
        truth = getattr(tensor, "healthy", tensor.dtype is not torch.bool)
        assumed = truth if tensor.dtype is torch.bool else float(truth) if tensor.dtype.is_floating_point else int(truth)
        self._stand_ins.note(str(tensor.dtype).removeprefix("torch."), str(assumed))
        return assumed

    def equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors are equal; true if unknown."""
        first, second = known(one), known(other)
        if first is not None and second is not None:
            return torch.equal(first, second)
        self._stand_ins.note("equal", "True")
        return True

    def _places(self, args: Sequence[object]) -> Sequence[object]:
        """The indices with each mask replaced by the places where it is true; by all places if unknown."""
        first, indices, *rest = args
        found: list[torch.Tensor | None] = []
        for one in cast("Sequence[torch.Tensor | None]", indices):
            if one is None or one.dtype not in (torch.bool, torch.uint8):
                found.append(one)
                continue
            values = known(one)
            if values is None:
                self._stand_ins.note("a mask as an index", "everything is selected")
            else:
                self._stand_ins.note_choice(how_sure(one), sized=True)
            count = one.numel() if values is None else int(values.count_nonzero())
            device = device_of(one)
            found.extend(
                FakeTensor(self, torch.empty(count, dtype=torch.int64, device="meta"), device) for _ in range(one.dim())
            )
        return (first, found, *rest)


def _assumed_truth(func: OpOverload, args: Sequence[object], result: FakeTensor) -> bool | None:
    """The value in a healthy step of a boolean, or of a number computed from one; None for other numbers."""
    if func._opname in _KEEP_FLAGS and (truth := getattr(args[0], "healthy", None)) is not None:
        return bool(truth)
    return func._opname in _TRUE if result.dtype is torch.bool else None


def _to_the_host(args: Sequence[object], options: Options) -> bool:
    """Whether integers or booleans are copied from the GPU to the host."""
    tensor, device = args[0], _device_in(options)
    if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "cpu" or device is None or device.type != "cpu":
        return False
    return not _is_floating(options.get("dtype") or tensor.dtype)


def _filled_with(func: OpOverload, args: Sequence[object], result: FakeTensor) -> float | None:
    """The number that fills a new tensor made like another; None for other operators and for floating-point numbers."""
    place = _FILLED.get(func)
    if place is None or result.is_floating_point() or result.is_complex() or result.numel() > _MOST_ELEMENTS:
        return None
    return cast("float", args[place]) if place < 0 else place


def _cleaned(given: Mapping[str, object]) -> Options:
    """The options without pinning, which fake memory does not support."""
    options = dict(given)
    if options.get("pin_memory"):
        options["pin_memory"] = None
    return options


def _runs_for_real(func: OpOverload, args: Sequence[object], options: Options, tensors: list[torch.Tensor]) -> bool:
    if tensors:
        return all(one.device.type == "cpu" for one in tensors)
    return _is_whole(func, args, options)


def _device_in(options: Options) -> torch.device | None:
    device = options.get("device")
    return None if device is None else torch.device(cast("torch.device", device))


def _is_host(device: torch.device | None) -> bool:
    return device is None or device.type == "cpu"


def _is_floating(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)


def _is_whole(func: OpOverload, args: Sequence[object], options: Options) -> bool:
    """Whether a factory makes integers or booleans."""
    if options.get("dtype") is not None:
        return not _is_floating(options["dtype"])
    if func._opname in _WHOLE_BY_DEFAULT:
        return True
    return func._opname in _WHOLE_FOR_WHOLE and not any(isinstance(one, float) for one in tree_leaves(args))


def _values(
    func: OpOverload, args: Sequence[object], options: Options, tensors: list[torch.Tensor]
) -> "_Values | None":  # fmt: skip
    """The arguments with values instead of fake tensors; None if one is unknown, or if nothing needs the result."""
    if func.namespace != "aten" or "rand" in func._opname or func._opname in _NOT_COMPUTED_ALONG:
        return None
    for one in tensors:
        values = known(one)
        if values is None or values.numel() > _most(how_sure(one)) or values.is_floating_point() or values.is_complex():
            return None
    given: tuple[Sequence[object], Options] = tree_map_only(torch.Tensor, known, (args, options))
    there = {**given[1], "device": _HOST} if "device" in given[1] else given[1]
    return _Values(given[0], there, max(map(how_sure, tensors)))


def _most(sure: Sure) -> int:
    return _MOST_OF_CHOICES if sure else _MOST_ELEMENTS


def _compares_a_choice(func: OpOverload, tensors: list[torch.Tensor]) -> bool:
    """Whether assumed choices are compared with exact values (predicted tokens with labels): the result is unknown."""
    alike = len(tensors) == 2 and tensors[0].shape == tensors[1].shape
    return alike and func._opname in ("eq", "ne") and any(how_sure(one) is Sure.EXACT for one in tensors)


#: Operators that return no tensor.
_READ: dict[OpOverload, Callable[..., object]] = {
    _NUMBER: HalfFakes.number,
    _aten.equal.default: HalfFakes.equal,
    _aten.is_pinned.default: lambda _, tensor, *__: device_of(tensor).type == "cpu",
}

"""Records FLOPs, bytes and stream of every operator in a step, and the waits between streams.

FLOPs follow torch's own formulas (``torch.utils.flop_counter``) for matrix products, convolutions and attention; other operators
count 0. An operator reads its inputs and writes its results. Views and empty tensors move no bytes, and a look-up (``embedding``,
``gather``) reads as much as it returns. A collective counts its largest buffer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import FakeWork, _resolve_process_group
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from zeroplan.verify.fake_cuda import streams
from zeroplan.verify.nested import device_of, tensors_in
from zeroplan.verify.watching.collectives import COLLECTIVES
from zeroplan.verify.watching.libraries import INSIDE

_MOVES_NOTHING = {
    "detach", "alias", "lift_fresh", "_local_scalar_dense", "is_pinned", "equal", "empty_like", "new_empty", "new_empty_strided",
    "_unsafe_view", "_reshape_alias", "record_stream", "set_",
}  # fmt: skip
_LOOKS_UP = {"embedding", "gather", "index", "index_select", "_unsafe_index", "nll_loss_forward"}
_ONLY_WRITTEN = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "_foreach_zero_", "_foreach_copy_"}
WAIT = "_c10d_functional.wait_tensor.default"


class Operator(NamedTuple):
    """One operator, collective, or synchronisation of streams. [operations], [bytes]

    ``other`` is a collective's group, or the event or stream waited for; 0 for none.
    """

    name: str
    module: str
    line: str
    moment: int
    span: int
    stream: int
    flops: int
    read_bytes: int
    written_bytes: int
    recomputed: bool
    other: int = 0


class _Known(NamedTuple):
    """Properties of an operator that its schema gives."""

    name: str
    flops: Callable[..., int] | None
    moves_nothing: bool
    looks_up: bool
    only_written: bool
    mutated: tuple[int, ...]
    out: tuple[str, ...]
    collective: bool


@cache
def properties_of(func: OpOverload) -> _Known:
    """An operator's properties, read from its schema."""
    name, schema = func._opname, func._schema
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    return _Known(
        name=str(func),
        flops=flop_registry.get(func._overloadpacket),
        moves_nothing=func.namespace == "prim" or func.is_view or name in _MOVES_NOTHING or name.startswith("empty")
        or func in INSIDE,
        looks_up=name in _LOOKS_UP,
        only_written=name in _ONLY_WRITTEN,
        mutated=tuple(at for at, one in enumerate(written) if one and not schema.arguments[at].kwarg_only),
        out=tuple(argument.name for argument, one in zip(schema.arguments, written, strict=True) if one and argument.kwarg_only),
        collective=func in COLLECTIVES,
    )  # fmt: skip


def moved(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> tuple[int, int]:
    """The bytes that an operator reads and writes. [bytes]"""
    what = properties_of(func)
    out = [tensor for name in what.out for tensor in _tensors(kwargs.get(name))]
    mutated = [tensor for at in what.mutated if at < len(args) for tensor in _tensors(args[at])]
    given = [
        tensor for at, one in enumerate(args) for tensor in _tensors(one) if not (what.only_written and at in what.mutated)
    ]
    given += [tensor for name, one in kwargs.items() if name not in what.out for tensor in _tensors(one)]
    written = _bytes(mutated) + _bytes(out) if mutated or out else _bytes(_tensors(result))
    if what.looks_up:
        return written + _bytes(given[1:]), written
    return _bytes(given), written


def _tensors(one: object) -> Iterator[torch.Tensor]:
    """The GPU tensors in an argument or result."""
    return (tensor for tensor in tensors_in(one) if device_of(tensor).type == "cuda")


def _bytes(tensors: "Iterator[torch.Tensor] | Sequence[torch.Tensor]") -> int:
    """The size of tensors; expanded ones count once. [bytes]"""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


class Operators:
    """The operators of the last two steps, since the last step may not end."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, ...], int] = {}
        self._by_step: dict[int, list[Operator]] = {}
        self._events: dict[int, int] = {}

    def of_step(self, step: int) -> list[Operator]:
        """The operators of a step; empty if they were dropped."""
        return self._by_step.get(step, [])

    def note(self, step: int, operator: Operator) -> None:
        """Record an operator of a step."""
        rows = self._by_step.get(step)
        if rows is None:
            self._by_step = {number: kept for number, kept in self._by_step.items() if number == step - 1}
            rows = self._by_step[step] = []
        rows.append(operator)

    def group(self, args: Sequence[object]) -> int:
        """The number of a collective's group, counted from 1 in order of appearance; 0 for none."""
        found = next((ranks for ranks in map(_ranks, args) if ranks), None)
        return 0 if found is None else self.groups.setdefault(found, len(self.groups) + 1)

    def event(self, event: object, *, recorded: bool) -> int:
        """The number of an event; each recording of it gets a new one."""
        if recorded:
            self._events[id(event)] = len(self._events) + 1 if id(event) not in self._events else max(self._events.values()) + 1
        return self._events.get(id(event), 0)

    def listen(self, notify: Callable[[str, object, object], None]) -> None:
        """Call ``notify`` at every synchronisation of streams and every wait for a collective."""
        streams.listeners.append(notify)
        wait = FakeWork.wait

        def waited(work: FakeWork, *args: object) -> object:
            notify("wait for a collective", None, None)
            return wait(work, *args)  # type: ignore[arg-type]

        FakeWork.wait = waited  # type: ignore[method-assign,assignment]


@cache
def _ranks_of(name: str) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(_resolve_process_group(name)))  # type: ignore[arg-type]


def _ranks(argument: object) -> tuple[int, ...]:
    """The ranks of a process group argument; empty for other arguments."""
    if isinstance(argument, str):
        try:
            return _ranks_of(argument)
        except (RuntimeError, ValueError, KeyError):  # the string names a reduction, not a group
            return ()
    if isinstance(argument, torch.ScriptObject):
        try:
            return tuple(torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(argument)))
        except RuntimeError:  # a reduce operation
            return ()
    if isinstance(argument, torch.distributed.ProcessGroup):
        return tuple(torch.distributed.get_process_group_ranks(argument))
    return ()


def flops(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> int:
    """An operator's operations by torch's formula; 0 without one."""
    formula = properties_of(func).flops
    if formula is None:
        return 0
    others = [one for one in args if not isinstance(one, torch.dtype)]  # addmm's formula takes a dtype for its result's shape
    return int(formula(*others, **kwargs, out_val=result))

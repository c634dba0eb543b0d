"""Records and replays the script's operations that compute the loss from the model's output."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zeroplan.dryrun.profiled.shapes import Given, Scale, given
from zeroplan.errors import MeasurementError


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of the tape, by number: the model's outputs first, then results."""

    number: int


@dataclass(frozen=True, slots=True)
class Beside:
    """A tensor from elsewhere, such as labels, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the model, by its place among the arguments."""

    number: int


Name = Slot | Beside | Argument


class Step(NamedTuple):
    """One call of a torch function: its arguments with tensors named, its results, and the tensors alive then."""

    function: Callable[..., object]
    leaves: tuple[object, ...]
    form: TreeSpec
    results: tuple[int | None, ...]
    alive: frozenset[int]


def tensors_within(held: object, *, depth: int = 8) -> Iterator[torch.Tensor]:
    """The tensors in a model's output: in mappings, sequences, and attributes of objects such as a key-value cache.

    >>> [tensor.shape for tensor in tensors_within({"a": [torch.ones(2)], "b": slice(1)})]
    [torch.Size([2])]
    """
    if isinstance(held, torch.Tensor):
        yield held
    elif depth and isinstance(held, Mapping | list | tuple | set):
        for one in held.values() if isinstance(held, Mapping) else held:
            yield from tensors_within(one, depth=depth - 1)
    elif depth and hasattr(held, "__dict__") and not isinstance(held, nn.Module | type | ModuleType):
        yield from tensors_within(vars(held), depth=depth - 1)


class Tape(TorchFunctionMode):
    """Records calls on the model's output and on tensors computed from it; holds only weak references."""

    def __init__(self, output: Sequence[torch.Tensor], arguments: Mapping[int, weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self.open = True
        self.steps: list[Step] = []
        self.beside: list[Given] = []
        self.loss: int | None = None
        self.held: tuple[int, ...] = ()
        """Tensors that the script holds when its backward begins."""
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Name]] = {
            id(tensor): (one, Argument(at)) for at, one in arguments.items() if (tensor := one()) is not None
        }
        self._count = 0
        for tensor in output:
            self._slot(tensor)
        self.outputs = self._count

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        """Run a function, and record it if it makes tensors."""
        del types
        if not self.open:
            return func(*args, **(kwargs or {}))
        leaves, form = tree_flatten((args, kwargs or {}))
        before = [self._find(one) for one in leaves]
        result = func(*args, **(kwargs or {}))
        if self.open:
            self._note(func, leaves, before, form, result)
        return result

    def close(self, loss: torch.Tensor) -> None:
        """End the recording: the backward begins from this loss."""
        self.open = False
        name = self._find(loss)
        self.loss = name.number if isinstance(name, Slot) else None
        self.held = tuple(
            name.number
            for tensor, name in self._known.values()
            if isinstance(name, Slot) and name.number != self.loss and tensor() is not None
        )
        self._known.clear()
        self._drop_unused()

    def _note(
        self, func: Callable[..., object], leaves: list[object], before: list[Name | None], form: TreeSpec, result: object
    ) -> None:  # fmt: skip
        made = tree_flatten(result)[0]
        if not any(isinstance(one, torch.Tensor) for one in made):
            return
        named = tuple(
            (name or self._other(one)) if isinstance(one, torch.Tensor) else one
            for one, name in zip(leaves, before, strict=True)
        )
        results = tuple(self._slot(one) if isinstance(one, torch.Tensor) else None for one in made)
        alive = (name.number for tensor, name in self._known.values() if isinstance(name, Slot) and tensor() is not None)
        self.steps.append(Step(func, named, form, results, frozenset(alive)))

    def _find(self, one: object) -> Name | None:
        known = self._known.get(id(one))
        return None if known is None or known[0]() is not one else known[1]

    def _slot(self, tensor: torch.Tensor) -> int:
        self._known[id(tensor)] = weakref.ref(tensor), Slot(self._count)
        self._count += 1
        return self._count - 1

    def _other(self, tensor: torch.Tensor) -> Beside:
        name = Beside(len(self.beside))
        self.beside.append(given(tensor))
        self._known[id(tensor)] = weakref.ref(tensor), name
        return name

    def _drop_unused(self) -> None:
        """Drop calls that contribute neither to the loss nor to held tensors, such as logging."""
        wanted, kept = {self.loss, *self.held}, list[Step]()
        for step in reversed(self.steps):
            if wanted.isdisjoint(step.results):
                continue
            wanted |= {one.number for one in step.leaves if isinstance(one, Slot)}
            kept.append(step)
        self.steps = kept[::-1]


class Replay:
    """Maps the model's output to the loss by a tape's calls, for another batch.

    ``made`` has the batch's other tensors, by name.
    """

    def __init__(self, tape: Tape, scale: Scale, made: Mapping[Name, torch.Tensor]) -> None:
        self._tape, self._scale, self._made = tape, scale, made
        self._held: list[torch.Tensor] = []

    def __call__(self, output: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of the replayed calls."""
        tape = self._tape
        tensors: dict[int | None, torch.Tensor] = dict(enumerate(output))
        for step in tape.steps:
            args, kwargs = tree_unflatten([self._leaf(one, tensors) for one in step.leaves], step.form)
            made = tree_flatten(step.function(*args, **kwargs))[0]
            tensors |= {number: one for number, one in zip(step.results, made, strict=True) if isinstance(one, torch.Tensor)}
            del args, kwargs, made
            for number in tensors.keys() - step.alive:
                del tensors[number]
        self._held = [tensors[number] for number in tape.held]
        return tensors[tape.loss]

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that the script holds beside the loss, and release them."""
        held, self._held = self._held, []
        return held

    def _leaf(self, one: object, tensors: dict[int | None, torch.Tensor]) -> object:
        if isinstance(one, Slot):
            return tensors[one.number]
        if isinstance(one, Beside | Argument):
            return self._made[one]
        if isinstance(one, int) and not isinstance(one, bool):
            return self._scale.number(one)
        return one


def check(tape: Tape) -> None:
    """Raise MeasurementError if the loss cannot be replayed."""
    if tape.loss is None:
        raise MeasurementError(
            "its loss does not come from the model's output by torch's functions alone (a function has its own backward, or "
            "there are several models)"
        )
    wanted = {one.number for step in tape.steps for one in step.leaves if isinstance(one, Beside)}
    if any(tape.beside[number].trained for number in wanted):
        raise MeasurementError(
            "its loss uses tensors with gradients that are not the model's output, such as the head's weight"
        )

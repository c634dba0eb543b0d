"""Reruns a script's model and loss with any batch on the run's fake tensors, for the profiler of ``verify``."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._pytree import tree_unflatten

from zeroplan.dryrun.profiled.observer import Call
from zeroplan.dryrun.profiled.shapes import Given, Scale
from zeroplan.dryrun.profiled.tape import Argument, Beside, Name, Replay, Tape, tensors_within
from zeroplan.errors import MeasurementError
from zeroplan.spec.recipe import Recompute
from zeroplan.verify.profiling.anatomy import Anatomy, Manner
from zeroplan.verify.profiling.cutting import watched
from zeroplan.verify.profiling.polynomials import Shape
from zeroplan.verify.profiling.subject import Subject, configured_length, layer_kinds
from zeroplan.verify.profiling.watched import PassWatcher
from zeroplan.verify.training.modules import find_blocks
from zeroplan.verify.training.recomputation import recompute_blocks
from zeroplan.verify.training.workload import Workload, store_as


class Ran(NamedTuple):
    """The script's call of the model, its loss, and its recomputation."""

    call: Call
    tape: Tape
    recompute: Recompute


def own_shape(call: Call) -> Shape:
    """Sequences and tokens of the script's own batch: the first two dimensions of its integers, else of its first tensor.

    Length 0 means a batch without a length, as of vectors or pictures.
    """
    tensors = [one for _, one in call.tensors if one.shape]
    if not tensors:
        raise MeasurementError("its model is called without a tensor, so no batch can be varied")
    ids = [one for one in tensors if len(one.shape) == 2 and not one.dtype.is_floating_point]
    first = (ids or tensors)[0]
    has_length = bool(ids) or (len(first.shape) == 3 and first.shape[1] > 1)
    return Shape(first.shape[0], first.shape[1] if has_length else 0)


def varied(call: Call) -> tuple[str, ...]:
    """The names of scaled tensors, with the script's own shapes."""
    own = own_shape(call)
    probe = Scale(own, Shape(own.sequences + 1, own.length + 1 if own.length else 0))
    changed = [(name, one.shape) for name, one in call.tensors if probe.sizes(one.shape) != one.shape]
    return tuple(f"{name} {' x '.join(map(str, shape))}" for name, shape in changed)


class ScriptSubject:
    """Passes of a model without its engine, at other shapes."""

    def __init__(self, model: nn.Module, ran: Ran) -> None:
        self._model, self._ran, self._own = model, ran, own_shape(ran.call)
        self._checkpoints = list(_checkpoints(model))
        self._blocks = find_blocks(model)
        self._forwards = [vars(block).get("forward") for block in self._blocks]
        self._list = next(
            (part for part in model.modules() if isinstance(part, nn.ModuleList) and tuple(part) == self._blocks), None
        )
        self._layers = len(self._blocks)
        self.longest = 0
        """The longest sequence that a pass ran with. [tokens]"""
        self.too_long: int | None = None
        """The shortest length that the model refused, among those longer than the script's. [tokens]"""

    @property
    def can_recompute_otherwise(self) -> bool:
        """Whether zeroplan can turn the script's activation checkpointing off, or there is none."""
        return self._ran.recompute == "none" or bool(self._checkpoints)

    def subject(self, source: str) -> Subject:
        """The model as a subject for the profile."""
        config = getattr(self._model, "config", None)
        longest = configured_length(config)
        return Subject(
            name=type(self._model).__name__,
            source=source,
            whole=lambda: self._work(self._own, {}),
            make=lambda shape: self._work(shape, self._batch(shape)),
            layer_kinds=layer_kinds(config, len(self._blocks)),
            longest=longest if self._own.length else 1,
            has_batch=True,
            taken_apart=self._taken_apart,
            shorten=partial(setattr, self, "_layers"),
        )

    def _taken_apart(self, shape: Shape, manner: Manner) -> Anatomy:
        with self._as_executed(manner):
            if self._layers < len(self._blocks):
                try:
                    with self._fewer():
                        return self._pass(shape, manner)
                except Exception:  # noqa: BLE001  a model that counts its blocks needs all of them
                    self._layers = len(self._blocks)
            return self._pass(shape, manner)

    def _pass(self, shape: Shape, manner: Manner) -> Anatomy:
        watcher = PassWatcher(device="cuda")
        shape = Shape(shape.sequences, shape.length or self._own.length)
        self._model.zero_grad(set_to_none=True)
        try:
            with watcher:
                found = watched(self._work(shape, self._batch(shape)), watcher, self._autocast(manner))
                self.longest = max(self.longest, shape.length)
                return found
        except Exception:
            if shape.length > self._own.length > 0:
                self.too_long = min(shape.length, self.too_long or shape.length)
            raise
        finally:
            self._model.zero_grad(set_to_none=True)

    def _autocast(self, manner: Manner) -> AbstractContextManager[object]:
        """The script's own autocast around its call, else the manner's."""
        own = self._ran.call.autocast
        if own is None and not manner.autocast:
            return nullcontext()
        return torch.autocast("cuda", dtype=own or torch.bfloat16)

    @contextmanager
    def _as_executed(self, manner: Manner) -> Iterator[None]:
        """Inside the block, give the weights the manner's dtype and the model its recomputation."""
        store_as(self._model, manner.dtype)
        own = manner.recompute == self._ran.recompute
        for one in self._checkpoints:
            one.turn(on=own)
        if not own:
            recompute_blocks(self._blocks, manner.recompute)
        try:
            yield
        finally:
            for block, forward in zip(self._blocks, self._forwards, strict=True):
                vars(block).pop("forward", None)
                if forward is not None:
                    vars(block)["forward"] = forward
            for one in self._checkpoints:
                one.turn(on=True)

    @contextmanager
    def _fewer(self) -> Iterator[None]:
        """Inside the block, keep only the first blocks of the model's list."""
        if self._list is None:
            raise MeasurementError("the blocks are not in a list of their own")
        every = self._list._modules
        self._list._modules = dict(list(every.items())[: self._layers])
        try:
            yield
        finally:
            self._list._modules = every

    def _batch(self, shape: Shape) -> dict[str, torch.Tensor]:
        scale, ran = Scale(self._own, shape), self._ran
        made: dict[Name, Given] = {Argument(at): one for at, one in enumerate(ran.call.leaves) if isinstance(one, Given)}
        made |= {Beside(at): one for at, one in enumerate(ran.tape.beside)}
        return {_key(name): scale.made(one) for name, one in made.items()}

    def _work(self, shape: Shape, batch: Mapping[str, torch.Tensor]) -> Workload:
        ran = self._ran
        places = {at: one.number if isinstance(one, Argument) else at for at, one in enumerate(ran.call.leaves)}
        names: list[Name] = [*map(Argument, places), *map(Beside, range(len(ran.tape.beside)))]
        keys = {name: _key(Argument(places[name.number])) if isinstance(name, Argument) else _key(name) for name in names}
        replay = Replay(ran.tape, Scale(self._own, shape), {name: batch[key] for name, key in keys.items() if key in batch})

        def forward(made: Mapping[str, torch.Tensor]) -> object:
            leaves = [made.get(_key(Argument(places[at])), one) for at, one in enumerate(ran.call.leaves)]
            args, kwargs = tree_unflatten(leaves, ran.call.form)
            return self._model(*args, **kwargs)

        def loss(output: object) -> torch.Tensor:
            return replay(list(tensors_within(output)))

        blocks = self._blocks if self._list is None else tuple(self._list)
        return Workload(self._model, batch, loss, blocks, forward=forward, held=replay.held if ran.tape.held else None)


def _key(name: Name) -> str:
    return f"{type(name).__name__} {name.number}"


# --- the script's own checkpointing -------------------------------------------------------------------------------------


class _Checkpoint(NamedTuple):
    """One place where the script recomputes, which can be turned off and on."""

    switch: Callable[[bool], None]

    def turn(self, *, on: bool) -> None:
        """Turn recomputation here on or off."""
        self.switch(on)


def _checkpoints(model: nn.Module) -> Iterator[_Checkpoint]:
    """The script's checkpointing: flags of transformers' layers, and torch's wrappers, which this removes from module names."""
    for module in list(model.modules()):
        if getattr(module, "gradient_checkpointing", False) is True:
            yield _Checkpoint(partial(setattr, module, "gradient_checkpointing"))
        for name, part in list(module._modules.items()):
            if isinstance(part, CheckpointWrapper):
                inner = part._checkpoint_wrapped_module
                module._modules[name] = inner
                yield _Checkpoint(partial(_recomputed, inner, part.checkpoint_fn))


def _recomputed(module: nn.Module, checkpoint: Callable[..., object], on: bool) -> None:  # noqa: FBT001  called through functools.partial
    vars(module).pop("forward", None)
    if on:
        vars(module)["forward"] = partial(checkpoint, module.forward)

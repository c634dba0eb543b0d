"""Divides one pass of a module on fake tensors into its parts (:mod:`zeroplan.verify.profiling.anatomy`).

The pass runs without an engine: zeroplan models each engine's parameters, gradients and weight casts; this measures the rest.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import NamedTuple

import torch

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
from zeroplan.verify.fake_cuda.installed import CUDA, install_node
from zeroplan.verify.profiling.anatomy import Anatomy, BlockAnatomy, Called, GradientReady, Instant, Manner, Operations, Piece
from zeroplan.verify.profiling.watched import PassWatcher
from zeroplan.verify.training.modules import cast_inputs, prefixes_of
from zeroplan.verify.training.recomputation import recompute_blocks
from zeroplan.verify.training.workload import Workload, placed, store_as
from zeroplan.verify.watching.recording import STILL_HELD, Block, live

_NUMBER = 8
"""Requests of this size or less without dimensions are single numbers (a loss, a count) and do not count. [bytes]"""
_RANDOM_STATE = "aten._scaled_dot_product_flash_attention.default", 16
"""The operator that leaves the random generator's state, and its size, which does not count either. [bytes]"""


def anatomy(make: Callable[[], Workload], manner: Manner) -> Anatomy:
    """The parts of one pass of a module on fake tensors; ``make`` builds it."""
    device = CUDA if manner.kernels == "cuda" else "cpu"
    if device == CUDA:
        install_node()
    watcher = PassWatcher(device=device)
    with fake_tensors(watcher, device), watcher:
        work = placed(make, device)
        _prepare(work, manner)
        return watched(work, watcher, torch.autocast(device, dtype=torch.bfloat16) if manner.autocast else nullcontext())


def watched(work: Workload, watcher: PassWatcher, autocast: AbstractContextManager[object]) -> Anatomy:
    """The parts of one pass of a workload on the watcher's device, executed as an engine would."""
    watcher.name_modules(work.module)
    watcher.observe(work, autocast)
    return _Cut(work, watcher).anatomy()


def _prepare(work: Workload, manner: Manner) -> None:
    if not work.blocks:
        raise MeasurementError("the workload has no list of blocks (an nn.ModuleList), so it cannot be profiled block by block")
    store_as(work.module, manner.dtype)
    recompute_blocks(work.blocks, manner.recompute)
    if manner.casts_inputs:
        cast_inputs(work.blocks, manner.dtype)


_OUTSIDE = -1


class _Cut:
    """The parts of one pass: every request with its owner, a block's number, the head after the last, or none."""

    def __init__(self, work: Workload, watcher: PassWatcher) -> None:
        self._work, self._seen = work, watcher
        self._count = self._head = len(work.blocks)
        self._names = prefixes_of(work.module, work.blocks)
        self._weight_bytes = next(parameter.element_size() for parameter in work.module.parameters())
        self._check_order()
        counted = [one for one in work.batch.values() if not (work.holds_inputs and one.is_floating_point())]
        self._batch = {id(watcher.memory(tensor)) for tensor in counted}
        self._gradients = self._weight_gradients()
        self._requests = [one for one in watcher.blocks if not _is_number(one, watcher)]
        self._inputs = [self._inputs_of(at) for at in range(self._count + 1)]
        self._owner = {id(one): self._owner_of(one) for one in self._requests}
        self._starts = self._backward_starts()
        self._waiting = self._tied_gradient()
        self._shared = [one for one in self._requests if self._is_outside(one) and self._is_kept(one)]
        last = watcher.before[self._count - 1]
        self._beside = [
            one for one in self._requests if self._is_outside(one) and not self._is_kept(one) and one.born <= last < one.died
        ]
        self._first = self._first_input()
        self._unowned = (
            {id(one) for one in (*self._shared, *self._beside, *self._first)} | self._gradients.keys() | self._waiting
        )

    def anatomy(self) -> Anatomy:
        """All parts of the pass."""
        seen, last = self._seen, self._seen.after[self._count - 1]
        returned = {id(one): one for one in seen.returned}.values()
        return Anatomy(
            names=self._names,
            blocks=tuple(self._block(at) for at in range(self._count)),
            shared=_pieces(self._shared, ""),
            beside=_pieces(self._beside, ""),
            first_input_bytes=sum(one.n_bytes for one in self._first),
            loss=tuple(
                n_bytes
                for _, n_bytes in self._curve([*self._of(self._head), *self._held_by_name(self._head)], last, seen.backward)
            ),
            output_bytes=sum(one.n_bytes for one in returned if not self._is_kept(one)),
            head=self._instants(self._head, seen.backward, self._starts[-1] - 1),
            head_handed=self._handed(self._head, lambda name: seen.handed[name] < self._starts[-1]),
            last_handed=self._handed(_OUTSIDE, lambda name: not self._inside(name) and seen.handed[name] > self._starts[-1]),
            last=tuple(n_bytes for _, n_bytes in self._curve(self._of(_OUTSIDE), self._ends(), seen.end)),
            cast=frozenset(seen.casts.values()),
            called=self._called(),
            tail=frozenset(name for name, time in seen.handed.items() if not self._inside(name) and time < self._starts[-1]),
            operations=self._operations(lambda name: not self._inside(f"{name}.")),
        )

    def _block(self, at: int) -> BlockAnatomy:
        seen = self._seen
        kept = [one for one in self._requests if self._owner[id(one)] == at and self._is_kept(one) and self._counts(one)]
        end = seen.before[at + 1] if at + 1 < self._count else seen.after[at]
        below = self._starts[at - 1] - 1 if at else self._ends()
        casts = [one for one in seen.blocks if self._is_kept(one) and seen.casts.get(id(one), "").startswith(self._names[at])]
        return BlockAnatomy(
            input_bytes=sum(one.n_bytes for one in self._inputs[at]),
            kept=_pieces(kept, self._names[at]),
            forward=tuple(
                n_bytes for _, n_bytes in self._curve([*self._of(at), *self._held_by_name(at)], seen.before[at], end)
            ),
            backward=self._instants(at, self._starts[at] - 1, below),
            handed=self._handed(at, lambda name: name.startswith(self._names[at])),
            cast_elements=sum(one.n_bytes for one in casts) // 2,
            operations=self._operations(lambda name: f"{name}.".startswith(self._names[at])),
        )

    def _operations(self, is_its: Callable[[str], bool]) -> Operations:
        found = [one for name, one in self._seen.operations.items() if is_its(name)]
        return Operations(sum(one.matrices for one in found), sum(one.attention for one in found))

    # --- the owners of requests

    def _check_order(self) -> None:
        self._entered = entered = [self._seen.before.get(at, -1) for at in range(self._count)]
        if -1 in entered or entered != sorted(entered):
            raise MeasurementError(
                "the blocks of the workload do not run one after the other, so one block cannot represent the others"
            )

    def _weight_gradients(self) -> dict[int, tuple[str, Block]]:
        found: dict[int, tuple[str, Block]] = {}
        for name, parameter in self._work.module.named_parameters():
            block = self._seen.memory(parameter.grad)
            if block is not None:
                found[id(block)] = (name, block)
            elif parameter.requires_grad:
                raise MeasurementError(f"parameter {name!r} gets no gradient; a profile needs one of every trained parameter")
        return found

    def _inputs_of(self, at: int) -> list[Block]:
        """A block's input tensors, without tables that are made before the first block and shared by blocks."""
        going_in = self._seen.outputs if at == self._count else self._seen.inputs[at]
        distinct = list({id(one): one for one in going_in if one.born > self._seen.began}.values())
        if at == self._count:  # a block may also return tensors of its own, such as attention weights
            sizes = {one.n_bytes for one in self._inputs_of(at - 1)}
            return [one for one in distinct if one.n_bytes in sizes and one.born > self._seen.before[0]]
        if at:
            return [one for one in distinct if one.born > self._seen.before[0]]
        others = {id(one) for one in self._seen.inputs.get(1, ())}
        return [one for one in distinct if id(one) not in others]

    def _owner_of(self, one: Block) -> int:
        seen = self._seen
        if one.born > seen.backward or one.born > seen.after[self._count - 1]:
            return self._head
        at = bisect_left(self._entered, one.born) - 1
        return at + 1 if any(one is other for other in self._inputs[at + 1]) else at

    def _is_kept(self, one: Block) -> bool:
        return one.born <= self._seen.backward < one.died

    def _is_fixed(self, one: Block) -> bool:
        return one.born <= self._seen.began and id(one) not in self._batch

    def _is_outside(self, one: Block) -> bool:
        return self._owner[id(one)] == _OUTSIDE and not self._is_fixed(one) and one.kind is not Kind.WEIGHT_CASTS

    def _first_input(self) -> list[Block]:
        if self._count == 1:
            return []
        return [one for one in self._inputs[0] if not self._is_kept(one) and one.died > self._seen.before[1]]

    def _inside(self, name: str) -> bool:
        return any(name.startswith(prefix) for prefix in self._names)

    def _tied_gradient(self) -> set[int]:
        """The head's gradient of a tied weight, which waits for the embedding's; found by its shape."""
        parameters: dict[int, tuple[int, torch.Size]] = {}
        for _, parameter in self._work.module.named_parameters(remove_duplicate=False):
            times, shape = parameters.get(id(parameter), (0, parameter.shape))
            parameters[id(parameter)] = times + 1, shape
        shapes = [tuple(sorted(shape)) for times, shape in parameters.values() if times > 1 and len(shape) > 1]
        first, seen = self._starts[0], self._seen
        made = [one for one in self._requests if seen.backward < one.born < self._starts[-1] and one.died > first]
        waiting = [
            one for one in made if tuple(sorted(seen.shapes.get(id(one), ()))) in shapes and id(one) not in self._gradients
        ]
        return {id(one) for one in waiting[:1]}

    # --- the backward

    def _at_work(self, one: Block) -> int:
        requesting = f"{one.module}."
        return next((at for at, name in enumerate(self._names) if requesting.startswith(name)), _OUTSIDE)

    def _backward_starts(self) -> list[int]:
        """When each block's backward begins: at the first request of one of its modules."""
        first: dict[int, int] = {}
        for one in self._seen.blocks:
            if one.born > self._seen.backward and (at := self._at_work(one)) != _OUTSIDE:
                first.setdefault(at, one.born)
        starts = [first.get(at, -1) for at in range(self._count)]
        if -1 in starts or starts != sorted(starts, reverse=True):
            raise MeasurementError("the blocks of the workload do not go backward one after the other, the last one first")
        return starts

    def _ends(self) -> int:
        """When the first block makes its last request of the backward."""
        return max(one.born for one in self._seen.blocks if one.born > self._seen.backward and self._at_work(one) == 0)

    # --- bytes alive

    def _counts(self, one: Block) -> bool:
        return not self._is_fixed(one) and id(one) not in self._unowned and one.kind is not Kind.WEIGHT_CASTS

    def _of(self, at: int) -> list[Block]:
        """Requests of this part and of later parts that count."""
        return [one for one in self._requests if self._owner[id(one)] >= at and self._counts(one)]

    def _held_by_name(self, at: int) -> list[Block]:
        """Requests of earlier blocks that a variable holds and no operator saves, such as an encoder's output in the decoder."""
        begun = self._seen.before[at] if at < self._count else self._seen.after[self._count - 1]
        return [
            one
            for one in self._requests
            if 0 <= self._owner[id(one)] < at and one.born < begun < one.died and not self._is_kept(one) and self._counts(one)
            if not any(one is other for other in self._inputs[at])
        ]

    def _curve(self, alive: Sequence[Block], start: int, end: int) -> list[tuple[Block, int]]:
        """Each request after ``start`` up to ``end``, with the bytes of the blocks ``alive`` that exist then."""
        total = live(alive, self._seen.now)
        return [(one, total[one.born]) for one in self._requests if start < one.born <= end]

    def _instants(self, at: int, start: int, end: int) -> tuple[Instant, ...]:
        """Every request of a part with its figures. Gradients and casts outside all blocks count for the head."""
        of_it = self._of(at)
        kept = [one for one in of_it if self._is_kept(one) and self._owner[id(one)] == at]
        mine = self._names[at] if at < self._count else ""
        casts = [one for one in self._seen.blocks if self._casts_of(one, mine)]
        curves = (self._curve(alive, start, end) for alive in (of_it, kept, casts))
        made = self._made(mine)
        return tuple(
            self._instant(one, mine, (n_bytes, saved, cast), made)
            for (one, n_bytes), (_, saved), (_, cast) in zip(*curves, strict=True)
        )

    def _called(self) -> tuple[Called, ...]:
        seen = self._seen
        begun, ended = seen.called[self._names[0][:-1]][0], seen.returning[self._names[-1][:-1]][0]
        first = {name.rpartition(".")[0] for name, _ in self._work.module.named_parameters()}
        shared = {name.rpartition(".")[0] for name, _ in self._work.module.named_parameters(remove_duplicate=False)} - first
        found = []
        for name, (time, noticed) in sorted(seen.called.items(), key=lambda pair: pair[1][0]):
            until, follows = seen.returning[name]
            found.append(Called(name, time < begun and until > ended, time > ended, follows, noticed, name in shared))
        return tuple(found)

    def _handed(self, at: int, is_its: Callable[[str], bool]) -> tuple[GradientReady, ...]:
        """Bytes alive when each gradient of a part is ready, in that order."""
        alive = self._of(at)
        kept = [one for one in alive if self._is_kept(one) and self._owner[id(one)] == at]
        mine = self._names[at] if 0 <= at < self._count else ""
        found = list[GradientReady]()
        for name, time in sorted(
            self._seen.handed.items(), key=lambda pair: pair[1]
        ):  # the sort is stable, so equals keep their order
            if is_its(name):
                saved = _alive_at(time, kept)
                found.append(GradientReady(name.removeprefix(mine), saved, _alive_at(time, alive) - saved))
        return tuple(found)

    def _made(self, mine: str) -> "_Made":
        own = [one for name, one in self._gradients.values() if (name.startswith(mine) if mine else not self._inside(name))]
        own += [] if mine else [one for one in self._requests if id(one) in self._waiting]
        own.sort(key=lambda one: one.born)
        names = {key: name for key, (name, _) in self._gradients.items()}
        until = {id(one): self._seen.handed.get(names.get(id(one), ""), one.born) for one in own}
        return _Made([one.born for one in own], [0, *accumulate(one.n_bytes for one in own)], own, until)

    def _instant(self, one: Block, mine: str, sizes: tuple[int, int, int], made: "_Made") -> Instant:
        n_bytes, saved, casts = sizes
        return Instant(
            name=f"{_inner(one.module, mine)}{_short(one.operation)}",
            saved=saved,
            working=n_bytes - saved,
            gradients=made.n_bytes[bisect_right(made.born, one.born)] // self._weight_bytes,
            current=made.not_passed_on(one) // self._weight_bytes,
            casts=casts // 2,
            flash=self._seen.flash.get(id(one)),
        )

    def _casts_of(self, cast: Block, mine: str) -> bool:
        name = self._seen.casts.get(id(cast))
        return name is not None and (name.startswith(mine) if mine else not self._inside(name))


class _Made(NamedTuple):
    """Weight gradients: when each is requested, cumulated bytes, the requests, and when autograd passes each on."""

    born: list[int]
    n_bytes: list[int]
    which: list[Block]
    until: dict[int, int]

    def not_passed_on(self, request: Block) -> int:
        """Bytes of gradients that exist at a request and that autograd has not yet passed on, the request included."""
        made = self.which[: bisect_right(self.born, request.born)]
        return sum(one.n_bytes for one in made if one is request or self.until[id(one)] > request.born)


def _alive_at(time: int, blocks: Sequence[Block]) -> int:
    return sum(one.n_bytes for one in blocks if one.born <= time and (one.died == STILL_HELD or one.died > time))


def _is_number(one: Block, seen: PassWatcher) -> bool:
    operation, n_bytes = _RANDOM_STATE
    number = one.n_bytes <= _NUMBER and seen.numbers.get(id(one), True)
    return number or (one.operation == operation and one.n_bytes <= n_bytes)


def _pieces(kept: Sequence[Block], mine: str) -> tuple[Piece, ...]:
    """Kept tensors, summed by the module and operator that made them."""
    sizes: dict[str, int] = {}
    for one in kept:
        reason = f"{_inner(one.module, mine)}{_short(one.operation)}"
        sizes[reason] = sizes.get(reason, 0) + one.n_bytes
    return tuple(Piece(reason, n_bytes) for reason, n_bytes in sizes.items())


def _inner(module: str, mine: str) -> str:
    """The module's name within its block; ``input`` for tensors that another part made."""
    requesting = f"{module}."
    if mine and not requesting.startswith(mine):
        return "input: "
    name = requesting.removeprefix(mine).rstrip(".")
    return f"{name}: " if name else ""


def _short(operation: str) -> str:
    """``aten.mm.default`` as ``mm``."""
    return operation.removeprefix("aten.").partition(".")[0]

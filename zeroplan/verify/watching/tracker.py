"""Records the memory that a training step requests and releases: by which module, when, of which kind.

A :class:`Tracker` sees every operator on a device. It holds no tensor: it keeps a weak reference to each storage, and a block ends
when its storage dies or is resized. Memory that a kernel allocates and frees internally is not seen.

Autograd adds and scatters gradients in place, but not while a dispatch mode is active. The record shows the in-place case of a
real run: the result reuses the block of the operand.

A gradient is known only when autograd passes it to its parameter. It then gets its kind from its birth on, as do the terms summed
into it.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Protocol, Self, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from zeroplan.ledger import Beside, Kind, Phase
from zeroplan.verify.nested import device_of
from zeroplan.verify.replaced import replaced
from zeroplan.verify.watching.collectives import COLLECTIVES, call
from zeroplan.verify.watching.cycles import manual_garbage_collection
from zeroplan.verify.watching.host import HostMemory
from zeroplan.verify.watching.libraries import INSIDE
from zeroplan.verify.watching.modules_at_work import ModulesAtWork
from zeroplan.verify.watching.recording import LIFTED, Block, Call, Recording, Span
from zeroplan.verify.watching.timeline import is_of_the_loss


@lru_cache
def _unwraps(kind: type) -> bool:
    """Whether tensors of this class run operators on the tensors inside them, which are those with memory."""
    return issubclass(kind, DTensor) or kind.__module__.startswith("torchao.float8.")


class Holder(Protocol):
    """The owner of a block of memory, while it owns it."""

    block: Block | None


class _Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, and the block that is its memory now, if any."""

    __slots__ = ("block", "key")
    block: Block | None
    key: int


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Records blocks, spans and collectives of the enclosed code.

    ``blocks`` are in program order; ``live_bytes`` is alive now. Memory of other devices than ``device`` is ignored.
    ``say`` receives the progress; ``host``, if given, records host memory beside another device.
    """

    def __init__(
        self, *, device: str = "cpu", say: Callable[[str], None] | None = None, host: HostMemory | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._say, self._host = device, say, host
        self.blocks: list[Block] = []
        self.spans: list[Span] = [Span(-1, Phase.INIT, 0)]
        self.calls: list[Call] = []
        self.now = 0
        self.live_bytes = 0
        self._watches: dict[int, _Watch] = {}
        self._label: Kind | None = None
        self._gradient_kind = Kind.GRADIENTS
        self._terms: dict[Block, tuple[Block, ...]] = {}
        self._paused = False
        self._modules = ModulesAtWork()
        self._hooks = ExitStack()
        self._streams = {_place(torch.cpu.current_stream()): 0}

    @property
    def recording(self) -> Recording:
        """The recording so far."""
        return Recording(self.blocks, self.spans, self.calls, self.now, None if self._host is None else self._host.seen)

    def finished(self) -> Recording:
        """The recording, which later releases do not change: Python may collect a model at any time after its run."""
        self._watches.clear()
        return self.recording

    # --- called by the training loop ------------------------------------------------------------------------------------

    def enter(self, phase: Phase | Beside, step: int, *, collect: bool = True) -> None:
        """Begin a phase of a step. Unreachable memory is collected before, unless ``collect`` is false."""
        if self._say is not None and phase is not Phase.INIT:
            self._say(f"step {step + 1}: {phase.value}")
        if collect:
            gc.collect()
        if self.spans[-1].phase is Phase.FORWARD:
            self._settle_forward()
        self.spans.append(Span(step, phase, self.now))
        if self._host is not None:
            self._host.enter()

    def name_modules(self, root: nn.Module) -> None:
        """Note the fully qualified names of a module's parts."""
        self._modules.names = {id(module): name for name, module in root.named_modules()}

    def claim(self, kind: Kind, tensors: Iterable[torch.Tensor | None], *, over: bool = True) -> None:
        """Give tensors a kind, from their birth on; ``over=False`` keeps a kind they already have."""
        for tensor in tensors:
            block = None if tensor is None else self._block_of(tensor)
            if block is not None and (over or block.kind is None):
                block.kind = kind

    def gradients_are(self, kind: Kind) -> None:
        """Set the kind of gradients that autograd passes to parameters."""
        self._gradient_kind = kind

    @contextmanager
    def labelled(self, kind: Kind) -> Iterator[None]:
        """Give all requests inside the block this kind."""
        outer, self._label = self._label, kind
        try:
            yield
        finally:
            self._label = outer

    @contextmanager
    def not_recording(self) -> Iterator[None]:
        """Do not record requests inside the block."""
        outer, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = outer

    def _block_of(self, tensor: torch.Tensor) -> Block | None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        local = getattr(local, "_tensor", local)  # torchao's weight that ranks gather in float8
        try:
            watch = self._watches.get(local.untyped_storage()._cdata)
        except NotImplementedError:  # torch.func wraps tensors, and its wrappers have no storage
            return None
        return None if watch is None else watch.block

    def _settle_forward(self) -> None:
        """Mark blocks that a forward leaves for the backward as activations or logits."""
        span = len(self.spans) - 1
        for watch in self._watches.values():
            block = watch.block
            if block is not None and block.kind is None and block.span == span:
                block.kind = Kind.LOGITS if is_of_the_loss(block, Phase.FORWARD) else Kind.ACTIVATIONS

    # --- called by torch ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._hooks.enter_context(manual_garbage_collection())
        self._hooks.enter_context(self._modules)
        self._hooks.enter_context(self._resizes())
        self._hooks.enter_context(self._ignoring_dtensor_trials())
        if self._host is not None:
            self._hooks.enter_context(self._host.pinning())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hooks.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the dispatch unwrapped, which is faster; nothing here is compiled."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run the operator and record the storages it returns."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a frequent query, so skip the modes
        if any(map(_unwraps, types)):
            return NotImplemented
        if self._paused:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in COLLECTIVES:
            self.calls.append(call(func, args, len(self.spans) - 1)._replace(moment=self.now))
        if func in _AT_A_PARAMETER:
            self._note_gradient(args)
        in_place = func in _DONE_IN_PLACE and not torch.is_grad_enabled() and self._unwatched_in_place(func, args)
        run = self._watched_inside(func) if func in INSIDE else func
        result = run(*args, **kwargs) if kwargs else run(*args)
        if isinstance(result, torch.Tensor):
            self._see_one(func, result, args, in_place=in_place, pinned=kwargs and kwargs.get("pin_memory"))
        elif isinstance(result, (tuple, list)):
            for one in result:
                if isinstance(one, torch.Tensor):
                    self._see(func, one)
        return result

    def _watched_inside(self, func: OpOverload) -> Callable[..., object]:
        """A function that runs and records this operator's GPU allocations; modes above this one do not see them."""
        if self._device == "cpu":
            return func

        def run(*args: object, **kwargs: object) -> object:
            super(Tracker, self).__enter__()  # type: ignore[no-untyped-call]
            try:
                return INSIDE[func](*args, **kwargs)
            finally:
                super(Tracker, self).__exit__(None, None, None)  # type: ignore[no-untyped-call]

        return run

    def _see_one(
        self, func: OpOverload, result: torch.Tensor, args: tuple[object, ...], *, in_place: bool, pinned: object = None
    ) -> None:
        if pinned and self._host is not None:
            self._host.see(result, pinned=True)
        if in_place:
            self._take_over(args[0], result)  # type: ignore[arg-type]  # these operators begin with a tensor
        else:
            self._see(func, result, args[0] if func is _CAST else None, args)
        if func is _ADD and not torch.is_grad_enabled():
            self._note_terms(result, args)

    def _see(
        self, func: OpOverload, tensor: torch.Tensor, cast_from: object = None, args: tuple[object, ...] = ()
    ) -> None:  # fmt: skip
        device = device_of(tensor).type
        if device != self._device:
            if device == "cpu" and self._host is not None and (not func.is_view or func is _LIFTED):
                self._host.see(tensor)
            return
        storage = tensor.untyped_storage()
        watch = self._watches.get(storage._cdata)
        if watch is None:
            if func.is_view and func is not _LIFTED and not _is_a_copy(tensor, args):
                return  # a view of memory from before the recording
            watch = self._watch(storage)
            if n_bytes := storage.nbytes():
                block = self._request(watch, n_bytes, func)
                if isinstance(cast_from, nn.Parameter) and block.kind is None and n_bytes < cast_from.nbytes:
                    block.kind = Kind.WEIGHT_CASTS  # a wider copy is made by the model, not by autocast
        elif (n_bytes := storage.nbytes()) != (watch.block.n_bytes if watch.block is not None else 0):
            self._resized(watch, n_bytes, func)

    def _note_gradient(self, args: tuple[object, ...]) -> None:
        """Give the gradient kind to the block that ``AccumulateGrad`` keeps, copies or adds, and to its summed terms."""
        if not isinstance(getattr(torch._C._current_autograd_node(), "variable", None), nn.Parameter):
            return
        found = [block for block in map(self._block_of, _tensors(args)) if block is not None]
        for block in found:
            if block.kind is None:
                block.kind = self._gradient_kind
                found += self._terms.get(block, ())  # the list grows during the loop

    def _note_terms(self, result: torch.Tensor, args: tuple[object, ...]) -> None:
        """Remember which blocks autograd summed into this one."""
        block = self._block_of(result)
        if block is not None and torch._C._current_autograd_node() is not None:
            terms = (term for term in map(self._block_of, _tensors(args)) if term is not None and term is not block)
            self._terms[block] = (*self._terms.get(block, ()), *terms)

    def _watch(self, storage: torch.UntypedStorage) -> _Watch:
        watch = _Watch(storage, self._released)
        watch.block, watch.key = None, storage._cdata
        self._watches[watch.key] = watch
        return watch

    def _request(self, watch: Holder, n_bytes: int, func: Callable[..., object]) -> Block:
        self.now += 1
        self.live_bytes += n_bytes
        block = Block(n_bytes, self.now, str(func), self._modules.current(), len(self.spans) - 1, self._stream())
        block.kind = self._label
        block.recomputed = torch.is_grad_enabled() or self._modules.is_called  # a custom function runs without gradients
        watch.block = block
        self.blocks.append(block)
        return block

    def _stream(self) -> int:
        """The number of the engine's current stream; torch's CPU module stores it."""
        return self._number(torch.cpu.current_stream())

    def _number(self, stream: object) -> int:
        return self._streams.setdefault(_place(stream), len(self._streams))

    def _release(self, block: Block) -> None:
        self.now += 1
        self.live_bytes -= block.n_bytes
        block.died = self.now

    def _released(self, watch: "weakref.ref[torch.UntypedStorage]") -> None:
        gone = cast("_Watch", watch)
        del self._watches[gone.key]
        if gone.block is not None:
            self._release(gone.block)

    def _resized(self, watch: _Watch, n_bytes: int, func: Callable[..., object]) -> None:
        """Record a resize: torch requests the new memory before it releases the old."""
        old = watch.block
        watch.block = None
        if n_bytes:
            new = self._request(watch, n_bytes, func)
            if old is not None and new.kind is None:
                new.kind = old.kind
        if old is not None:
            self._release(old)

    def _resizes(self) -> AbstractContextManager[None]:
        """Record ``resize_`` of storages, which is no operator."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            watch = self._watches.get(storage._cdata) or self._watch(storage)
            if storage.nbytes() != (watch.block.n_bytes if watch.block is not None else 0):
                self._resized(watch, storage.nbytes(), original)

        return replaced(torch.UntypedStorage, "resize_", resize_)

    def _ignoring_dtensor_trials(self) -> AbstractContextManager[None]:
        """Ignore the operators that DTensor runs on fake tensors of the global shape to infer the result's shape."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(propagator: ShardingPropagator, schema: OpSchema) -> object:
            with self.not_recording():
                return original(propagator, schema)

        return replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen)

    def _take_over(self, operand: torch.Tensor, result: torch.Tensor) -> None:
        old, new = self._watches[operand.untyped_storage()._cdata], self._watch(result.untyped_storage())
        old.block, new.block = None, old.block

    def _unwatched_in_place(self, func: OpOverload, args: tuple[object, ...]) -> bool:
        """Whether autograd would do this in place without a dispatch mode.

        ``input_buffer.cpp can_accumulate_inplace`` needs a dense operand whose tensor and storage have no other owner. The
        tensor's use count includes the references of this call.
        """
        operand = args[0]
        if not isinstance(operand, torch.Tensor) or not isinstance(args[1], torch.Tensor | int | tuple | list):
            return False
        storage = operand.untyped_storage()
        watch = self._watches.get(storage._cdata)
        if watch is None or watch.block is None or torch._C._current_autograd_node() is None:
            return False
        if func is not _ADD:
            return watch.block.operation in _ZEROS
        alone = torch._C._storage_Use_Count(storage._cdata) == _STORAGE_AND_PYTHON
        users: int = operand._use_count()  # type: ignore[attr-defined]  # torch leaves it out of its stubs
        return (
            alone and users == _BUFFER_STACK_AND_PYTHON and torch._prims_common.is_non_overlapping_and_dense_or_false(operand)
        )


def _tensors(args: tuple[object, ...]) -> Iterator[torch.Tensor]:
    return (argument for argument in args if isinstance(argument, torch.Tensor))


def _is_a_copy(tensor: torch.Tensor, args: tuple[object, ...]) -> bool:
    """Whether an operator that may return a view made a copy: ``to`` or ``contiguous``, not decomposed by autograd."""
    given = [argument.untyped_storage()._cdata for argument in _tensors(args)]
    return bool(given) and tensor.untyped_storage()._cdata not in given


_ADD = torch.ops.aten.add.Tensor
_CAST = torch.ops.aten._to_copy.default
_DEVICE = torch.ops.prim.device.default
#: This operator makes tensors of Python numbers, and counts as a view.
_LIFTED = torch.ops.aten.lift_fresh.default
assert str(_LIFTED) == LIFTED  # noqa: S101  the replay compares this name
#: Operators that autograd runs in place without a mode: sums of gradients, and gradients scattered into zeros.
_DONE_IN_PLACE = frozenset({
    _ADD, torch.ops.aten.scatter.src, torch.ops.aten.scatter.value, torch.ops.aten.scatter_add.default,
    torch.ops.aten.index_put.default, torch.ops.aten.index_add.default,
})  # fmt: skip
#: The operators of ``AccumulateGrad``: it keeps a gradient, copies it, or adds it (accumulate_grad.h).
_AT_A_PARAMETER = frozenset({
    torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default,
    torch.ops.aten.add.Tensor,
})  # fmt: skip
_ZEROS = ("aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default")
_STORAGE_AND_PYTHON = 2
_BUFFER_STACK_AND_PYTHON = 4


def _place(stream: object) -> int:
    """The identity of a stream. Python's ``id`` is not enough: a later object may reuse it."""
    return int(getattr(stream, "place", id(stream)))

"""Records a script's run like ``verify``'s tracker, with the user's line of every request, and drives the modelled allocator."""

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.fsdp import FullyShardedDataParallel

from zeroplan.allocator import CachingAllocator, Chunk
from zeroplan.dryrun.compiling.origins import Origins, within
from zeroplan.dryrun.operators import WAIT, Operator, Operators, flops, moved, properties_of
from zeroplan.dryrun.scratch import SCRATCH
from zeroplan.ledger import OF_A_STEP, Kind, Phase
from zeroplan.verify.fake_cuda import graphs
from zeroplan.verify.fake_cuda.memory import Memory
from zeroplan.verify.fake_cuda.stand_ins import frame_to_name, line_of
from zeroplan.verify.watching.host import HostMemory
from zeroplan.verify.watching.recording import LIFTED, Block, Recording
from zeroplan.verify.watching.replay import MULTIPLICATIONS
from zeroplan.verify.watching.tracker import Holder, Tracker

_LONGEST_WAIT_S = 5.0
"""How long to wait for another thread's operator to end. [s]"""
_LOADED = torch.ops.aten.set_.source_Storage_storage_offset
"""The operator by which ``torch.load`` gives a tensor its storage."""


class _Kernel:
    """Holds the block of a running kernel's internal memory."""

    block: Block | None = None


class ScriptTracker(Tracker):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Records a script's run on the fake GPU.

    ``lines`` has the user's source line of every block; in backward, the line that made the autograd node. A modelled
    allocator serves the counters that a script reads. It also allocates cuBLAS workspaces of ``workspace_bytes``: one for the
    script's thread and one for autograd's, each at its first matrix product on a stream.
    """

    def __init__(self, memory: Memory, *, expandable_segments: bool, workspace_bytes: int = 0) -> None:
        super().__init__(device="cuda", host=HostMemory())
        self._one_at_a_time = threading.RLock()
        self.lines: dict[Block, str] = {}
        self._memory = memory
        self._allocator = memory.allocator = CachingAllocator(expandable_segments=expandable_segments)
        self._workspace_bytes = workspace_bytes
        self._multiplied: dict[tuple[bool, int], int] = {}
        """The moment of the first matrix product in autograd's thread (True) and in the script's (False), by stream."""
        self._chunks: dict[Block, Chunk] = {}
        self._with_gradients: set[Block] = set()
        """Blocks of tensors that received a gradient from autograd."""
        self._numbers: list[int] = []
        self._made_by: list[str] = []
        self._origins = Origins()
        self._closed = False
        self.operators = Operators()
        self.operators.listen(self._note_synchronisation)
        self._emptied: list[int] = []
        self._let_go: list[tuple[int, int]] = []
        graphs.listeners.append(self._note_let_go)
        memory.counted = self

    @property
    def recording(self) -> Recording:
        """The recording so far, including the loading phase and the moments of ``empty_cache``."""
        elsewhere = frozenset(moment for (_, stream), moment in self._multiplied.items() if stream)
        return replace(
            super().recording,
            emptied=tuple(self._emptied),
            let_go=tuple(self._let_go),
            workspaces=elsewhere,
            from_the_start=True,
        )

    def see_loaded(self, tensor: torch.Tensor) -> None:
        """Record a tensor that torch read from a file, which runs no operator."""
        if not self._paused and not self._closed:
            with self._one_at_a_time:
                self._see(_LOADED, tensor)

    def note_emptied(self) -> None:
        """Record that the script emptied the allocator's cache."""
        if not self._closed:
            self._emptied.append(self.now)

    def _note_let_go(self, pool: int) -> None:
        """Record that no CUDA graph uses a private pool any more. Right after ``empty_cache`` it counts from the next request."""
        if not self._closed:
            self._let_go.append((self.now + (self._emptied[-1:] == [self.now]), pool))
            self._allocator.let_go(pool)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: ``torch.compile`` compiles unwatched, and this mode watches what runs."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run an operator and record it, one thread at a time."""
        with self._one_at_a_time:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if func in SCRATCH and result is not NotImplemented and not self._paused:
                self._allocate_and_free(SCRATCH[func](args), func)
            if result is not NotImplemented and self.spans[-1].phase in OF_A_STEP and not self._paused:
                self._note(func, args, kwargs or {}, result)
            return result

    def _allocate_and_free(self, n_bytes: int, func: OpOverload) -> None:
        """Record memory that a kernel allocates and frees internally."""
        if not n_bytes:
            return
        self._release(block := self._request(_Kernel(), n_bytes, func))
        block.kind = Kind.TEMPORARY

    def _note(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> None:
        what = properties_of(func)
        if what.moves_nothing or self._closed:
            return
        if what.collective:
            read, written, group = 0, self.calls[-1].n_bytes, self.operators.group(args)
        else:
            read, written = (0, 0) if what.name == WAIT else moved(func, args, kwargs, result)
            group = 0
            if not read and not written and what.name != WAIT:
                return  # on the host
        span = self.spans[-1]
        again = span.phase is Phase.BACKWARD and self._modules.is_called
        self.operators.note(span.step, Operator(
            what.name, self._modules.current(), self._line(), self.now, len(self.spans) - 1, self._stream(),
            flops(func, args, kwargs, result), read, written, again, group,
        ))  # fmt: skip

    def _note_synchronisation(self, event: str, stream: object, other: object) -> None:
        span = self.spans[-1]
        if self._closed or span.phase not in OF_A_STEP:
            return
        about = 0
        if isinstance(other, torch.cpu.Stream):
            about = self._number(other)
        elif other is not None:
            about = self.operators.event(other, recorded=event.startswith("record"))
        mine = self._stream() if stream is None else self._number(stream)
        self.operators.note(span.step, Operator(
            event, self._modules.current(), self._line(), self.now, len(self.spans) - 1, mine, 0, 0, 0, False, about,
        ))  # fmt: skip

    def learn_modules(self, root: nn.Module) -> None:
        """Remember the names of a model's modules; wrappers get no name."""
        model = root
        while (inside := _wrapped(model)) is not None:
            self._modules.names.setdefault(id(model), "")
            model = inside
        for name, module in model.named_modules():
            self._modules.names.setdefault(id(module), name)

    def learn_program(self, path: str, lines: Sequence[tuple[int, Any]]) -> None:
        """Store the graph nodes of a program that inductor has written, by line."""
        self._origins.learn(path, lines, self._modules.names, self._modules.current())

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Label a model's tensors as parameters, including weight casts that now belong to the model."""
        for tensor in tensors:
            block = self._block_of(tensor)
            if block is not None and block.kind in (None, Kind.WEIGHT_CASTS):
                block.kind = Kind.PARAMETERS

    def updated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Label tensors that an optimizer updated: as parameters if autograd gave them a gradient, else as optimizer state."""
        for tensor in tensors:
            block = self._block_of(tensor)
            if block is not None and block.kind is None:
                block.kind = Kind.PARAMETERS if block in self._with_gradients else Kind.OPTIMIZER_STATE

    def _note_gradient(self, args: tuple[object, ...]) -> None:
        super()._note_gradient(args)
        variable = getattr(torch._C._current_autograd_node(), "variable", None)
        if isinstance(variable, torch.Tensor) and (block := self._block_of(variable)) is not None:
            self._with_gradients.add(block)

    def _request(self, watch: Holder, n_bytes: int, func: Callable[..., object]) -> Block:
        block = super()._request(watch, n_bytes, func)
        block.pool = graphs.pool_in_use()
        origin = self._origins.behind(sys._getframe(1))
        self.lines[block] = (origin.line if origin is not None else "") or self._line()
        if origin is not None:
            block.module, block.operation = within(block.module, origin), origin.operation
        if block.operation.startswith(MULTIPLICATIONS):
            self._allocate_workspace(block)
        if block.operation != LIFTED:
            self._chunks[block] = self._allocator.request(n_bytes, block.stream, block.pool)
            self._memory.note()
        return block

    def _allocate_workspace(self, block: Block) -> None:
        """Allocate a cuBLAS workspace at a thread's first product on a stream, in the pool of a running capture."""
        key = torch._C._current_autograd_node() is not None, block.stream
        if self._workspace_bytes and key not in self._multiplied:
            self._multiplied[key] = block.born
            self._allocator.request(self._workspace_bytes, block.stream, block.pool)

    def close(self) -> None:
        """Stop recording, so that releases after the script do not count; other threads wait from now on."""
        self._one_at_a_time.acquire(timeout=_LONGEST_WAIT_S)
        self._closed = True

    def _release(self, block: Block) -> None:
        with self._one_at_a_time:  # any thread may free tensors
            if self._closed:
                return
            super()._release(block)
            if (chunk := self._chunks.pop(block, None)) is not None:
                self._allocator.release(chunk)

    def _line(self) -> str:
        node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
        if self._numbers and node is not None:
            return self._made_by[max(0, bisect_right(self._numbers, node._sequence_nr()) - 1)]
        line = line_of(frame_to_name(sys._getframe(2)))
        if torch.is_grad_enabled() and (not self._made_by or self._made_by[-1] != line):
            self._numbers.append(torch._C._autograd._get_sequence_nr())
            self._made_by.append(line)
        return line


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper wraps: its only child with parameters, if it has none itself. None for other modules."""
    if isinstance(module, FullyShardedDataParallel):
        return module.module
    parts = [part for part in module.children() if next(part.parameters(), None) is not None]
    if (
        len(parts) != 1
        or isinstance(module, nn.Sequential | nn.ModuleList)
        or next(module.parameters(recurse=False), None) is not None
    ):
        return None
    return parts[0]

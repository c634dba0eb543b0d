"""Watches one forward and backward pass: requests, where each block begins and ends, and the tensors that enter it."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from zeroplan.verify.nested import tensors_in
from zeroplan.verify.profiling.anatomy import Operations
from zeroplan.verify.training.workload import Workload, in_16_bits
from zeroplan.verify.watching.recording import Block
from zeroplan.verify.watching.tracker import Tracker

_FLASH_BACKWARD = "aten._scaled_dot_product_flash_attention_backward.default"


class PassWatcher(Tracker):
    """Also records where the passes of blocks begin and end, and the tensors that enter them."""

    def __init__(self, *, device: str) -> None:
        super().__init__(device=device)
        self.before: dict[int, int] = {}
        self.after: dict[int, int] = {}
        self.inputs: dict[int, list[Block]] = {}
        self.outputs: list[Block] = []
        """The outputs of the last block that ran."""
        self.returned: list[Block] = []
        self.casts: dict[int, str] = {}
        self.flash: dict[int, tuple[int, int, int, int]] = {}
        self.called: dict[str, tuple[int, bool]] = {}
        """For each module, when it was first called, and whether gradients flow to its input."""
        self.returning: dict[str, tuple[int, bool]] = {}
        """When it returned, and whether gradients flow to its output."""
        self.handed: dict[str, int] = {}
        """When each weight's gradient was ready."""
        self.shapes: dict[int, torch.Size] = {}
        """Shapes of tensors made in backward."""
        self.operations: dict[str, Operations] = {}
        """The operations of every module's own forward, by name."""
        self.numbers: dict[int, bool] = {}
        """Whether a request was made for a tensor without dimensions."""
        self.began = self.backward = self.end = 0
        self._parameters: dict[int, str] = {}
        self._heads: list[torch.Size] = []

    def observe(self, work: Workload, autocast: AbstractContextManager[object]) -> None:
        """Run one forward and backward pass."""
        self._parameters = {id(parameter): name for name, parameter in work.module.named_parameters()}
        handles = [handle for at, block in enumerate(work.blocks) for handle in self._hooked(at, block)]
        handles += [
            self._noted(name, parameter) for name, parameter in work.module.named_parameters() if parameter.requires_grad
        ]
        handles += [handle for name, module in work.module.named_modules() for handle in self._watched(name, module)]
        gc.collect()
        self.began = self.now
        with autocast:
            output = work.module(**_computing(work)) if work.forward is None else work.forward(work.batch)
            loss = work.loss(output)
        held = tensors_in(output) if work.held is None else work.held()
        self.returned = [block for block in map(self._block_of, held) if block is not None]
        del output, held
        gc.collect()
        self.backward = self.now
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        gc.collect()
        self.end = self.now
        for handle in handles:
            handle.remove()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run an operator, record it, and count the forward's operations."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None and self.began and not self.backward:
            self._multiplied(func, count(*args, **(kwargs or {}), out_val=result), args)
        return result

    def _multiplied(self, func: OpOverload, flops: int, args: tuple[object, ...]) -> None:
        """Add up operations; torch counts a causal mask's hidden half, which a kernel skips."""
        name = self._modules.current()
        before = self.operations.get(name, Operations())
        if "attention" not in func._opname:
            self.operations[name] = before._replace(matrices=before.matrices + flops)
            return
        if _is_causal(func, args):
            keys = cast("torch.Tensor", args[1]).shape[2]
            flops = flops // (2 * keys) * (keys + 1)
        self.operations[name] = before._replace(attention=before.attention + flops)

    def memory(self, tensor: torch.Tensor | None) -> Block | None:
        """The request that holds a tensor's memory."""
        return None if tensor is None else self._block_of(tensor)

    def _watched(self, name: str, module: nn.Module) -> Iterator["torch.utils.hooks.RemovableHandle"]:
        def called(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self.called.setdefault(name, (len(self.called) + len(self.returning), _has_gradient((args, kwargs))))

        def returned(_module: nn.Module, _args: object, output: object) -> None:
            self.returning.setdefault(name, (len(self.called) + len(self.returning), _has_gradient(output)))

        yield module.register_forward_pre_hook(called, with_kwargs=True)
        yield module.register_forward_hook(returned)

    def _noted(self, name: str, parameter: nn.Parameter) -> "torch.utils.hooks.RemovableHandle":
        def handed(_parameter: torch.Tensor) -> None:
            self.handed[name] = self.now

        hook: torch.utils.hooks.RemovableHandle = parameter.register_post_accumulate_grad_hook(handed)  # type: ignore[no-untyped-call]
        return hook

    def _hooked(self, at: int, block: nn.Module) -> Iterator["torch.utils.hooks.RemovableHandle"]:
        def entered(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if at not in self.before:
                self.before[at] = self.now
                self.inputs[at] = [one for one in map(self._block_of, tensors_in((args, kwargs))) if one is not None]

        def left(_module: nn.Module, _args: object, output: object) -> None:
            if at not in self.after:
                self.after[at] = self.now
                self.outputs = [one for one in map(self._block_of, tensors_in(output)) if one is not None]

        yield block.register_forward_pre_hook(entered, with_kwargs=True)
        yield block.register_forward_hook(left)

    def _see(
        self, func: OpOverload, tensor: torch.Tensor, cast_from: object = None, args: tuple[object, ...] = ()
    ) -> None:  # fmt: skip
        super()._see(func, tensor, cast_from, args)
        if isinstance(cast_from, nn.Parameter) and (cast := self._block_of(tensor)) is not None:
            self.casts[id(cast)] = self._parameters.get(id(cast_from), "")
        if (block := self._block_of(tensor)) is not None:
            self.numbers.setdefault(id(block), tensor.dim() == 0)
        if self.backward and (made := self._block_of(tensor)) is not None:
            self.shapes.setdefault(id(made), tensor.shape)
        if str(func) == _FLASH_BACKWARD:
            self._heads.append(tensor.shape)
            if len(self._heads) == 3 and (last := self._block_of(tensor)) is not None:
                (_, heads, queries, size), (_, grouped, _, _), _ = self._heads
                self.flash[id(last)] = (heads, size, grouped, queries)
                self._heads = []


def _is_causal(func: OpOverload, args: tuple[object, ...]) -> bool:
    at = next((at for at, one in enumerate(func._schema.arguments) if one.name == "is_causal"), len(args))
    return at < len(args) and bool(args[at])


def _computing(work: Workload) -> dict[str, torch.Tensor]:
    """The batch as an engine passes it: cast to 16 bits if all weights are."""
    dtypes = {parameter.dtype for parameter in work.module.parameters() if parameter.is_floating_point()}
    narrow = dtypes == {torch.bfloat16}
    return in_16_bits(work.batch) if narrow else dict(work.batch)


def _has_gradient(held: object) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(held))

"""Runs a small model on a CPU and reports what autograd keeps, and what is alive at named moments."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from tests.causal_models import causal_model  # noqa: E402
from tests.verify.watching.unwatched import plain_kernels  # noqa: E402
from zeroplan.verify.watching.allocations import Timeline, mark, recorded  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from zeroplan.spec.batch import BatchSpec
    from zeroplan.spec.model import ModelSpec
    from zeroplan.transformer.blocks import Compute

    Hook = Callable[..., object]


def saved_bytes(spec: ModelSpec, compute: Compute, batch: BatchSpec, *, layers: int) -> int:
    """Return the bytes of the distinct storages that autograd keeps after one forward with loss, without parameters and ids.

    Tensors saved for nodes that no output reaches are already freed by then.
    """
    model, ids = causal_model(spec, compute, layers=layers), _ids(spec, batch)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), ids)}
    kept: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def keep(tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        kept.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved.tensor):
        loss = _loss(model, ids, compute)
    storages = {saved.tensor.untyped_storage().data_ptr(): saved.tensor.untyped_storage().nbytes() for saved in kept}
    assert loss.requires_grad
    return sum(n_bytes for address, n_bytes in storages.items() if address not in known)


class _Saved:
    """The object that a graph node saves instead of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def step_timeline(
    spec: ModelSpec, compute: Compute, batch: BatchSpec, *, keep_logits: bool = False, recompute: bool = False
) -> Timeline:
    """Return the allocations of the second forward and backward, in which nothing is allocated for the first time.

    Marks: ``forward i`` and ``forward i end`` around block i, ``loss end`` before the backward, ``backward i`` when the
    gradient reaches block i's output, and ``backward i end`` when it reaches its input.
    """
    model, ids = causal_model(spec, compute), _ids(spec, batch)
    if recompute:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    _mark_blocks(model)
    with plain_kernels():
        _step(model, ids, compute, keep_logits=keep_logits)
        model.zero_grad(set_to_none=True)
        with recorded() as timeline:
            _step(model, ids, compute, keep_logits=keep_logits)
    return timeline


def _step(model: PreTrainedModel, ids: torch.Tensor, compute: Compute, *, keep_logits: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute.autocast):
        output = model(input_ids=ids, labels=ids)
    mark("loss end")
    loss = output.loss
    if not keep_logits:
        del output
    mark("backward")
    loss.backward()


def _loss(model: PreTrainedModel, ids: torch.Tensor, compute: Compute) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute.autocast):
        return model(input_ids=ids, labels=ids).loss


def _ids(spec: ModelSpec, batch: BatchSpec) -> torch.Tensor:
    return torch.randint(0, spec.vocab_size, (batch.micro_batch_size, batch.seq_len))


class _Passage(torch.autograd.Function):
    """Marks when the gradient arrives; allocates nothing."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        mark(ctx.name)
        return gradient, None


def _mark_blocks(model: PreTrainedModel) -> None:
    decoder = model.get_decoder()
    for index, block in enumerate(decoder.h if hasattr(decoder, "h") else decoder.layers):
        block.register_forward_pre_hook(_before(index))
        block.register_forward_hook(_after(index))


def _before(index: int) -> Hook:
    def hook(_block: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        mark(f"forward {index}")
        return (_Passage.apply(inputs[0], f"backward {index} end"), *inputs[1:])

    return hook


def _after(index: int) -> Hook:
    def hook(
        _block: torch.nn.Module, _inputs: tuple[torch.Tensor, ...], output: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> object:
        mark(f"forward {index} end")
        if isinstance(output, tuple):
            return (_Passage.apply(output[0], f"backward {index}"), *output[1:])
        return _Passage.apply(output, f"backward {index}")

    return hook

"""Losses that are not transformers' own: in chunks, as torchtitan's ``ChunkedLossWrapper`` takes it.

The model hands on hidden states instead of logits. An eighth of the tokens at a time goes through the head to the loss and back,
before the next; the gradients of the hidden states gather in one fp32 buffer, from which the model's own backward then starts.

Source: torchtitan, 2026-08, ``components/loss.py``, ``ChunkedLossWrapper``, ``GradAccumulator``. Left out: a head that is a unit
of FSDP2 by itself; here it belongs to the root, as in transformers.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from zeroplan.errors import MeasurementError
from zeroplan.transformer.families.ending import CHUNKS


def chunked_loss(module: nn.Module, labels: torch.Tensor) -> Callable[[object], torch.Tensor]:
    """Take the head out of a causal language model's forward, and return the loss that goes through it in chunks."""
    _check_chunks(labels)
    loss = loss_of_hidden(module)
    return lambda output: loss(output.logits, labels)  # type: ignore[attr-defined]  # a transformers output


def loss_of_hidden(module: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Do so, and return the loss of hidden states and labels, as a pipeline's schedule asks for it."""
    head: nn.Linear = module.get_output_embeddings()  # type: ignore[operator]  # a transformers model
    head.forward = _as_it_is  # type: ignore[method-assign, assignment]
    cap: float | None = getattr(module.config, "final_logit_softcapping", None)
    if cap is not None:  # what the model's forward hands on are hidden states, which it must not bend
        module.config.final_logit_softcapping = None  # type: ignore[union-attr]  # the same
    scaling: float | None = getattr(module.config, "logits_scaling", None)
    if scaling is not None:  # the same: the forward divides hidden states by one instead
        module.config.logits_scaling = 1.0  # type: ignore[union-attr]  # the same
    return lambda hidden, labels: _in_chunks(hidden, head, labels, _Bend(cap, scaling))


def _as_it_is(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


class _Bend(NamedTuple):
    """What comes between the head's product and the loss."""

    cap: float | None
    """Of ``tanh``, as transformers' Gemma2ForCausalLM puts it on all logits at once."""
    scaling: float | None
    """What logits are divided by, as GraniteForCausalLM does."""

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits that the loss takes."""
        divided = logits if self.scaling is None else logits / self.scaling
        return divided if self.cap is None else torch.tanh(divided / self.cap) * self.cap


def _check_chunks(labels: torch.Tensor) -> None:
    if labels.numel() % CHUNKS:
        raise MeasurementError(f"{labels.numel():,} tokens cannot be cut into the {CHUNKS} equal chunks of loss 'chunked'")


def _in_chunks(hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor, bend: _Bend) -> torch.Tensor:
    _check_chunks(labels)
    hidden = hidden.flatten(0, 1)
    size = hidden.shape[0] // CHUNKS
    chunks = [chunk.detach().requires_grad_() for chunk in torch.split(hidden, size)]
    gradient = torch.zeros_like(hidden, dtype=torch.float32)
    total = hidden.new_zeros((), dtype=torch.float32)
    for number, (chunk, wanted) in enumerate(zip(chunks, torch.split(labels.flatten(), size), strict=True)):
        logits = bend.of(functional.linear(chunk, head.weight, head.bias))
        loss = functional.cross_entropy(logits.float(), wanted, reduction="sum") / labels.numel()
        total = total + loss.detach()
        loss.backward()  # type: ignore[no-untyped-call]
        assert chunk.grad is not None  # noqa: S101  it requires one
        gradient[number * size : (number + 1) * size] = chunk.grad.to(gradient.dtype)
        chunk.grad = None
    joined: torch.Tensor = _FromHere.apply(hidden, gradient.to(hidden.dtype), total)  # type: ignore[no-untyped-call]
    return joined


class _FromHere(torch.autograd.Function):
    """The loss, whose backward hands the model the gradient that the chunks have made."""

    @staticmethod
    def forward(context: FunctionCtx, _hidden: torch.Tensor, gradient: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(context: FunctionCtx, _gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = context.saved_tensors  # type: ignore[attr-defined]
        return gradient, None, None

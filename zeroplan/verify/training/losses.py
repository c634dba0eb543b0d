"""Builds the chunked loss of torchtitan's ``ChunkedLossWrapper`` and Liger's fused loss; transformers has the full loss.

The model returns hidden states instead of logits. Each eighth of the tokens passes through the head and the loss, forward and
backward, before the next. One fp32 buffer collects the gradients of the hidden states, from which the model's backward starts.

Source: torchtitan, 2026-08, ``components/loss.py``, ``ChunkedLossWrapper``, ``GradAccumulator``. Left out: a head that is its own
FSDP2 unit; here it belongs to the root, as in transformers.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from zeroplan.errors import MeasurementError
from zeroplan.spec.recipe import ROUNDING
from zeroplan.transformer.families.ending import CHUNKS
from zeroplan.verify.failures import NotHereError
from zeroplan.verify.replaced import replaced


def chunked_loss(module: nn.Module, labels: torch.Tensor) -> Callable[[object], torch.Tensor]:
    """Remove the head from a causal language model's forward, and return a loss that applies it in chunks."""
    _check_chunks(labels)
    loss = loss_of_hidden(module)
    return lambda output: loss(output.logits, labels)  # type: ignore[attr-defined]  # a transformers output


def fuse_loss(module: nn.Module) -> None:
    """Make a causal language model compute head and loss in Liger's fused kernel, one of those of ``use_liger_kernel``.

    Raises NotHereError without liger-kernel, and MeasurementError for a family that Liger does not support.
    """
    _by_liger(module, {"fused_linear_cross_entropy"})


#: Our names of Liger's kernels, and Liger's own.
_OF_LIGER = {"liger-rms-norm": "rms_norm", "liger-swiglu": "swiglu"}


def fuse_kernels(module: nn.Module, parts: Sequence[str]) -> None:
    """Make a model use Liger's kernels. On fake tensors a launch does nothing; torch allocates the results.

    Raises what :func:`fuse_loss` raises.
    """
    if liger := [part for part in parts if part not in ("loss-in-pieces", *ROUNDING)]:
        _by_liger(module, {_OF_LIGER[part] for part in liger if part != "rope"})
    for one in module.modules() if "rope" in parts else ():
        if type(one).__name__.endswith("Attention"):
            one.forward = _rotated_by_liger(one)
    if liger and any(isinstance(one, FakeTensor) for one in module.parameters()):
        from triton.runtime import jit  # noqa: PLC0415  Liger has imported it

        jit.JITFunction.run = lambda *_, **__: None


def _rotated_by_liger(attention: nn.Module) -> Callable[..., object]:
    """The attention's forward with Liger's rotary function; Liger itself would replace it for the whole process."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb  # noqa: PLC0415  it needs triton

    own, modeling = attention.forward, sys.modules[type(attention).__module__]

    def forward(*args: object, **kwargs: object) -> object:
        with replaced(modeling, "apply_rotary_pos_emb", liger_rotary_pos_emb):
            return own(*args, **kwargs)

    return forward


def _by_liger(module: nn.Module, switches: Collection[str]) -> None:
    try:
        from liger_kernel.transformers import monkey_patch  # noqa: PLC0415  it needs triton
    except ImportError:
        raise NotHereError("loss and kernels of Liger's need it; install liger-kernel 0.8 or later") from None
    module = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]  # peft's
    family = module.config.model_type  # type: ignore[union-attr]  # a transformers model
    if family not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise MeasurementError(f"Liger has no kernels for {family}; use others")
    every = ("rope", "rms_norm", "swiglu", "geglu", "layer_norm", "cross_entropy", "fused_linear_cross_entropy")
    switched = {name: name in switches for name in every}
    names = vars(sys.modules[type(module).__module__])
    before = dict(names)
    monkey_patch._apply_liger_kernel_to_instance(module, **switched)
    names.update(before)  # Liger also replaces classes, for all models of this process


def loss_in_pieces(module: nn.Module, labels: torch.Tensor) -> Callable[[object], torch.Tensor]:
    """Remove the head from a causal language model's forward, and return torchtune's loss, which applies it to pieces of tokens."""
    head: nn.Linear = module.get_output_embeddings()  # type: ignore[operator]  # a transformers model
    project, head.forward = head.forward, lambda hidden: hidden  # type: ignore[method-assign, assignment]

    def loss(output: object) -> torch.Tensor:
        counting = torch.arange(labels.numel(), device=labels.device)
        hidden = output.logits.flatten(0, 1).index_select(0, counting)  # type: ignore[attr-defined]  # a transformers output
        wanted = labels.flatten().index_select(0, counting)
        total = torch.zeros((), device=labels.device)
        for piece, of_piece in zip(hidden.tensor_split(CHUNKS), wanted.tensor_split(CHUNKS), strict=True):
            total += _of_piece(project, piece, of_piece)
        return total / labels.numel()

    return loss


def _of_piece(project: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = project(hidden)
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def loss_of_hidden(module: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Remove the head like ``chunked_loss``; return a loss of hidden states and labels, which a pipeline's schedule needs."""
    head: nn.Linear = module.get_output_embeddings()  # type: ignore[operator]  # a transformers model
    head.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    cap: float | None = getattr(module.config, "final_logit_softcapping", None)
    if cap is not None:  # the forward now returns hidden states, which must stay uncapped
        module.config.final_logit_softcapping = None  # type: ignore[union-attr]  # the same
    scaling: float | None = getattr(module.config, "logits_scaling", None)
    if scaling is not None:  # likewise, they must stay unscaled
        module.config.logits_scaling = 1.0  # type: ignore[union-attr]  # the same
    return lambda hidden, labels: _in_chunks(hidden, head, labels, _Bend(cap, scaling))


class _Bend(NamedTuple):
    """Cap and scaling of logits, between the head's product and the loss."""

    cap: float | None
    """The cap of ``tanh`` on logits, as in transformers' Gemma2ForCausalLM."""
    scaling: float | None
    """The divisor of logits, as in GraniteForCausalLM."""

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """The capped and scaled logits."""
        divided = logits if self.scaling is None else logits / self.scaling
        return divided if self.cap is None else torch.tanh(divided / self.cap) * self.cap


def _check_chunks(labels: torch.Tensor) -> None:
    if labels.numel() % CHUNKS:
        raise MeasurementError(
            f"{labels.numel():,} tokens do not divide into {CHUNKS} chunks; change the batch, or use loss 'full'"
        )


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
    """The total loss, whose backward returns the gradient that the chunks have computed."""

    @staticmethod
    def forward(context: FunctionCtx, _hidden: torch.Tensor, gradient: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(context: FunctionCtx, _gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = context.saved_tensors  # type: ignore[attr-defined]
        return gradient, None, None

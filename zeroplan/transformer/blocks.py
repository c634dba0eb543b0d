"""The types that activations.py and head.py fill in: what one block, and the part outside the blocks, costs in one pass.

An engine combines these with its own states and buffers; nothing here knows about ranks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from zeroplan.ledger import Line
from zeroplan.numeric import Int


class Compute(NamedTuple):
    """How a module is executed: structure that formulas branch on."""

    element_bytes: int
    """Bytes of an activation in the compute dtype: 2 for bf16 and fp16, 4 for fp32."""
    autocast: bool
    """The weights are fp32 and each matrix multiplication casts its operands (DDP under ``torch.autocast``)."""
    attention: Literal["sdpa", "flash", "eager"]


class BackwardPoint(NamedTuple):
    """A moment inside the backward pass of one block where memory can peak.

    ``lines`` holds what is alive of this block's activations then: the tensors still saved, the gradients that flow, and
    temporaries, including the gradient that came in from the block above. It holds no weight gradient and no weight cast,
    since their lifetime is the engine's: ``gradients`` counts the elements of this block's weight gradients made so far
    (the current one included), ``current_gradient`` the elements of the latest of them, and ``live_casts`` the elements of
    the block's weights whose autocast copy is still alive.
    """

    name: str
    lines: tuple[Line, ...]
    gradients: int
    current_gradient: int
    live_casts: int


class BlockPass(NamedTuple):
    """What one block costs in one forward and backward pass.

    ``saved``: tensors autograd keeps from its forward to its backward, in program order, without recomputation and without
    weight casts; ``checkpoint``: what remains of it under full recomputation (its input); ``selective``: what remains under
    per-operation selective recomputation; ``forward``: what is alive beyond ``saved`` at the highest point of its forward;
    ``forward_recompute``: what is alive beyond ``checkpoint`` then, under full recomputation; ``cast_elements``: elements
    of the weights that autocast copies.
    """

    saved: tuple[Line, ...]
    checkpoint: tuple[Line, ...]
    selective: tuple[Line, ...]
    forward: tuple[Line, ...]
    forward_recompute: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]
    cast_elements: int


class HeadPass(NamedTuple):
    """What the part outside the blocks costs: embedding, rotary tables, final norm, head, loss.

    ``saved``: kept from the forward of the final norm and head until their backward, the loss included;
    ``shared``: tables alive through the whole pass (rotary cos and sin, attention masks, input ids and labels);
    ``loss_forward`` and ``loss_backward``: logits and the loss's own tensors at the highest point of each, beyond ``saved``
    of the norm and the head input; ``norm_backward``: what is alive beyond the blocks while the final norm goes backward;
    ``output``: bytes of logits that stay alive if the training loop keeps the model's output.
    """

    shared: tuple[Line, ...]
    saved: tuple[Line, ...]
    loss_forward: tuple[Line, ...]
    loss_backward: tuple[Line, ...]
    norm_backward: tuple[Line, ...]
    output: tuple[Line, ...]
    hidden_bytes: Int
    """Bytes of one hidden-state tensor (b, s, h), the gradient that flows between blocks."""

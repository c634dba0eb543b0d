"""The types that activations.py and head.py fill in: what one block, and the part outside the blocks, costs in one pass.

An engine combines these with its own states and buffers; nothing here knows about ranks.
"""

from enum import StrEnum
from typing import NamedTuple

from zeroplan.ledger import Line, Module
from zeroplan.numeric import Int
from zeroplan.spec.recipe import Attention, Kernels, Recompute
from zeroplan.spec.releases import NOW, Release


class Compute(NamedTuple):
    """How a module is executed: structure that formulas branch on."""

    element_bytes: int
    """Bytes of an activation in the compute dtype: 2 for bf16 and fp16, 4 for fp32."""
    autocast: bool
    """The weights are fp32 and each matrix multiplication casts its operands (DDP under ``torch.autocast``)."""
    attention: Attention
    kernels: Kernels = "cuda"
    """Whose attention kernels: a CPU's flash kernel takes what CUDA's refuses, but writes heads of two sizes out."""
    recompute: Recompute = "none"
    """What the backward runs again; formulas answer for each kind at once, a profile for one."""
    keeps_inputs: bool = False
    """A linear layer saves its input, though its weight is frozen, as DeepSpeed's own for stage 3 does."""
    offloaded: bool = False
    """What blocks keep for their backward goes to host memory (:mod:`zeroplan.transformer.offloaded`)."""
    expert_ranks: int = 1
    """Ranks that share the experts out; tokens go to the rank of their expert and come back."""
    tp: int = 1
    """Ranks that split matrices and, between them, the sequence (:mod:`zeroplan.transformer.families.sharded`)."""
    cp: int = 1
    """Ranks that share a sequence; the batch that is asked about is one rank's (:mod:`zeroplan.transformer.families.ring`)."""
    casts_inputs: bool = False
    """Whatever a block is given is cast to the compute dtype first, tables of positions too, as FSDP2 does."""
    release: Release = NOW
    """What the release of transformers does otherwise than the one that the formulas follow."""


class At(StrEnum):
    """What runs at a point of a backward, where an engine has to know."""

    ANYWHERE = ""
    LOSS = "loss"
    HEAD = "head"
    FINAL_NORM = "final norm"
    NORM = "norm"
    """A norm within a block."""
    LINEAR = "linear layer"
    """One without the adapter that it may have."""
    ADAPTER_A = "adapter, A"
    ADAPTER_B = "adapter, B"
    ADAPTED = "layer with an adapter"
    """What such a layer does beside its linear layers."""
    MODULE = "module"
    """Another module, without a weight."""
    BETWEEN = "between modules"
    """No module's operator; the place names the linear layer that has gone backward before."""
    WEIGHTING = "weighting of the experts"
    """The product of the experts' outputs and routing weights, before any gradient of the experts' weights is made."""
    RUN_AGAIN = "run again"
    """A block that was checkpointed is being recomputed, where that may be higher than its backward."""


class Place(NamedTuple):
    """Where in the model a point of a backward is."""

    at: At = At.ANYWHERE
    module: Module = Module.NONE
    """Whose operator runs; of a recomputation whose output has just been made."""


class BackwardPoint(NamedTuple):
    """A moment inside the backward pass of one block where memory can peak.

    ``lines`` holds what is alive of this block's activations then: the tensors still saved, the gradients that flow, and
    temporaries, including the gradient that came in from the block above. It holds no weight gradient and no weight cast,
    since their lifetime is the engine's: ``gradients`` counts the elements of this block's weight gradients made so far
    (the current one included), ``current_gradient`` the elements of those being made at this very moment, which the engine has
    not yet added to others or moved (0 between two), and ``live_casts`` the elements of the block's weights whose autocast
    copy is still alive. Under autocast a weight gradient is made in the compute dtype and then cast to fp32: the short-lived
    first one is a line, the second counts in ``gradients``. ``place`` is what engines may know of the point, whose name is for
    people alone. ``handed_on``, at the chunked loss alone, is what is alive when the gradient made here is handed on: the operator
    is done, and what it read and saved is gone. ``before`` is what is alive before the operator makes anything, where its module is
    gathered then: at linear layers that are frozen, and at the weighting of experts.
    """

    name: str
    lines: tuple[Line, ...]
    gradients: int
    current_gradient: int
    live_casts: int
    handed_on: tuple[Line, ...] = ()
    place: Place = Place()
    before: tuple[Line, ...] = ()


class HandedOn(NamedTuple):
    """When autograd hands on the gradients of an operator's weights: those made so far, and what is alive beside them.

    Outside the blocks only a profile says so.
    """

    gradients: int
    lines: tuple[Line, ...]


class BlockPass(NamedTuple):
    """What one block costs in one forward and backward pass.

    ``saved``: tensors autograd keeps from its forward to its backward, in program order, without recomputation and without
    weight casts; ``checkpoint``: what remains of it under full recomputation (its input); ``selective``: what remains under
    per-operation selective recomputation; ``forward``: what is alive beyond ``saved`` at the highest point of its forward;
    ``forward_recompute``: what is alive beyond what is kept then, under recomputation; ``cast_elements``: elements
    of the weights whose autocast copy is kept until their backward (matrices; the copies of biases die with the forward);
    ``away``: what is in host memory from its forward to its backward, where activations are offloaded.

    An engine adds, for block i (counted from 0), beside its own memory and what ``HeadPass`` says:

    - without recomputation, forward: ``saved`` of blocks 0..i, plus ``forward``; backward at a point p: ``saved`` of blocks
      0..i-1, plus ``p.lines``;
    - under full recomputation, forward: ``checkpoint`` of blocks 0..i, plus ``forward_recompute``; backward at p:
      ``checkpoint`` of blocks 0..i-1, plus ``checkpoint_in_backward``, plus ``p.lines``. The recomputation itself is never
      higher than the highest point. ``checkpoint_in_backward`` is the block's input, or nothing where the first norm saves
      that very tensor, so that ``p.lines`` has it already;
    - under selective recomputation, as under full with ``selective`` in place of ``checkpoint`` and of blocks 0..i-1 only.

    In a backward come the weight gradients that p counts, and under autocast ``p.live_casts`` and the ``cast_elements`` of
    blocks 0..i-1, at 2 bytes; in a forward the ``cast_elements`` of blocks 0..i, also under recomputation, since autocast
    drops its copies only when its context ends (then full recomputation keeps none of them for the backward). The gradient
    that came in from the block above is one of ``p.lines``.
    """

    saved: tuple[Line, ...]
    checkpoint: tuple[Line, ...]
    selective: tuple[Line, ...]
    forward: tuple[Line, ...]
    forward_recompute: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]
    cast_elements: int
    checkpoint_in_backward: tuple[Line, ...] = ()
    away: tuple[Line, ...] = ()
    handed: tuple[HandedOn, ...] = ()
    before_experts: tuple[Line, ...] = ()
    """What is alive in the forward when the experts begin, where a block has any."""

    @property
    def entered(self) -> tuple[Line, ...]:
        """What is alive in the block's own forward beside what it keeps: its input, where that is offloaded."""
        return self.checkpoint if self.away else ()

    def kept(self, recompute: Recompute) -> tuple[Line, ...]:
        """Return what the block keeps on the GPU from its forward to its backward under this kind of recomputation."""
        if recompute == "none":
            return self.saved
        if recompute == "selective":
            return self.selective
        return () if self.away else self.checkpoint


class HeadPass(NamedTuple):
    """What the part outside the blocks costs: embedding, rotary tables, final norm, head, loss.

    ``shared``: tables alive through the whole pass (rotary cos and sin, input ids; an eager attention mask where blocks are
    recomputed);
    ``forward``: alive beside the blocks while they run forward, gone before the loss (an eager attention mask, embeddings
    that the model's forward holds by name and that are no block's input);
    ``first_input``: held by name likewise, but block 0's input: it counts from block 1 on;
    ``saved``: kept from the forward of the final norm and head until their backward, the loss's own tensors apart;
    ``loss``: what the loss keeps from its forward to its backward;
    ``loss_forward``: logits and the loss's own tensors at its highest point, beyond ``saved`` (``loss`` is part of them);
    ``points``: every moment of the backward outside the blocks where memory can peak, with all that is alive beyond the
    blocks and ``shared``, and the weight gradients made (the loss, the head's multiplication, the final norm);
    ``output``: bytes of logits that stay alive if the training loop keeps the model's output;
    ``below_blocks``: what the backward of the part before the blocks takes at its highest, beyond ``shared`` and the gradient that
    flows into it; empty where that part is a mere table.
    """

    shared: tuple[Line, ...]
    saved: tuple[Line, ...]
    loss_forward: tuple[Line, ...]
    output: tuple[Line, ...]
    hidden_bytes: Int
    """Bytes of one hidden-state tensor (b, s, h), the gradient that flows between blocks."""
    forward: tuple[Line, ...] = ()
    first_input: tuple[Line, ...] = ()
    loss: tuple[Line, ...] = ()
    points: tuple[BackwardPoint, ...] = ()
    below_blocks: tuple[Line, ...] = ()
    hidden_formula: str = "r·T·h"
    with_blocks: tuple[Line, ...] = ()
    """The last ones of ``shared``, which blocks alone need, so that they go with the first block's backward."""
    norm_forward: tuple[tuple[Line, ...], ...] = ()
    """Moments of the final norm's forward, for engines that gather the head meanwhile; none of a profile."""
    handed: tuple[HandedOn, ...] = ()
    """Of the weights after the blocks."""
    handed_below: tuple[HandedOn, ...] = ()
    """Of those before them."""

    @property
    def at_embedding(self) -> tuple[Line, ...]:
        """What of ``shared`` is alive when the embedding goes backward."""
        return self.shared[: len(self.shared) - len(self.with_blocks)]


class AtEmbedding(NamedTuple):
    """What the backward of an embedding takes that is split over tensor-parallel ranks.

    The gradient of its output before and after it is put in order, and that of the whole embedding.
    """

    gathered: Line
    by_rank: Line
    whole: Line

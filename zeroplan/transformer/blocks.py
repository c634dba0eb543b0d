"""The types that activations.py and head.py return: the memory of one block, and of the part outside the blocks, in one pass.

Engines combine these with their own states and buffers.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from zeroplan.ledger import Line, Module, Role
from zeroplan.numeric import Int
from zeroplan.spec.hardware import Kernels
from zeroplan.spec.recipe import EVEN, Attention, LogProbs, Recompute
from zeroplan.spec.releases import NOW, Release


class Compute(NamedTuple):
    """How a module computes: the settings that decide which operators run and in which dtype."""

    element_bytes: int
    """Bytes of an activation in the compute dtype: 2 for bf16 and fp16, 4 for fp32."""
    autocast: bool
    """The weights are fp32, and ``torch.autocast`` casts the operands of each matrix product (DDP)."""
    attention: Attention
    kernels: Kernels = "cuda"
    """The device that runs attention. On a CPU torch runs flash kernels where CUDA cannot, except for heads of two sizes."""
    recompute: Recompute = "none"
    """The recomputation. A family's formulas cover all kinds together; a traced profile has one variant per kind."""
    keeps_inputs: bool = False
    """Linear layers with frozen weights save their inputs, as DeepSpeed's stage-3 layer does."""
    offloaded: bool = False
    """Blocks' saved tensors are in host memory until the backward (:mod:`zeroplan.transformer.offloaded`)."""
    expert_ranks: int = 1
    """Ranks that split the experts. Tokens go to the rank of their expert and come back."""
    tp: int = 1
    """Ranks that split matrices and, between them, the sequence (:mod:`zeroplan.transformer.families.sharded`)."""
    cp: int = 1
    """Ranks that split a sequence (:mod:`zeroplan.transformer.families.ring`). The batch is one rank's share."""
    casts_inputs: bool = False
    """The engine casts a block's inputs to the compute dtype before the forward, position tables included, as FSDP2 does."""
    release: Release = NOW
    """Differences between the job's release of transformers and the release that the formulas follow."""
    is_fp16: bool = False
    """The compute dtype is fp16, on a GPU."""
    fused: tuple[str, ...] = ()
    """Parts of the model that fused kernels replace (``RecipeSpec.fused_parts``)."""
    imbalance: int = EVEN
    """(token, expert) pairs that this rank receives for its experts, in thousandths of the pairs that it sends."""
    prompt_len: int = 1
    """Tokens of each sequence that loss ``log-probs`` does not score."""
    log_probs: LogProbs = "tiles"
    """How loss ``log-probs`` computes its log-probabilities."""
    padded: bool = False
    """Some sequences of the batch end in padding, so attention gets a mask."""
    whole_sequences: bool = False
    """Ranks that split matrices have whole hidden states between them."""


class At(StrEnum):
    """The operator that runs at a point of the backward, where engines need to know it."""

    ANYWHERE = ""
    LOSS = "loss"
    HEAD = "head"
    FINAL_NORM = "final norm"
    NORM = "norm"
    """A norm within a block."""
    LINEAR = "linear layer"
    """The linear layer itself, without its adapter."""
    ADAPTER_A = "adapter, A"
    ADAPTER_B = "adapter, B"
    ADAPTED = "layer with an adapter"
    """Other operators of a layer with an adapter."""
    MODULE = "module"
    """Another module without a weight."""
    BETWEEN = "between modules"
    """An operator outside those modules. ``Place.module`` is the linear layer whose backward ran last."""
    WEIGHTING = "weighting of the experts"
    """The product of the experts' outputs and routing weights. Its backward runs before any expert's weight gradient exists."""
    RUN_AGAIN = "run again"
    """The recomputation of a checkpointed block."""


class Place(NamedTuple):
    """The operator and module of a point of the backward."""

    at: At = At.ANYWHERE
    module: Module = Module.NONE
    """The module whose operator runs; in a recomputation, the module that has just allocated its output."""


class BackwardPoint(NamedTuple):
    """A moment inside the backward pass of one block where memory can peak.

    ``lines``: the block's live activations: tensors still saved, gradients of activations including the one from the block
    above, and temporaries. Engines decide how long weight gradients and weight casts live, so these are counts of elements:
    ``gradients``: weight gradients of this block made so far, including the current one; ``current_gradient``: those being made
    now, which the engine has not yet added or moved; ``live_casts``: weights whose autocast copy is still alive. Under autocast
    a weight gradient is made in the compute dtype and then cast to fp32. The first, short-lived tensor is a line, the second
    counts in ``gradients``. ``place``: its position in the model; ``name`` is for readers only. ``handed_on``, only in the
    chunked loss: the live tensors when the gradient reaches its weight, after the operator's inputs are freed. ``before``: the
    live tensors before the operator allocates anything, at places where an engine gathers its module: frozen linear layers, the
    weighting of experts, the head and the final norm.
    """

    name: str
    lines: tuple[Line, ...]
    gradients: int
    current_gradient: int
    live_casts: int
    handed_on: tuple[Line, ...] = ()
    place: Place = Place()
    before: tuple[Line, ...] = ()


class GradientArrivals(NamedTuple):
    """When weight gradients reach their weights: elements of gradients made so far, and the other live tensors.

    Outside the blocks only profiles contain these.
    """

    gradients: int
    lines: tuple[Line, ...]


class BlockPass(NamedTuple):
    """The memory of one block in one forward and backward pass.

    ``saved``: tensors that autograd saves from its forward to its backward, in program order, without recomputation and without
    weight casts; ``checkpoint``: tensors kept under full recomputation (its input); ``selective``: tensors kept under
    per-operation selective recomputation; ``forward``: live tensors beyond ``saved`` at the peak of its forward;
    ``forward_recompute``: the same beyond the kept ones, under recomputation, else empty; ``cast_elements``: elements of weights
    whose autocast copy lives until their backward (matrices; copies of biases live until the end of the forward); ``on_host``:
    tensors in host memory between its forward and its backward, with offloaded activations.

    For block i (counted from 0) an engine adds to its own memory and to ``HeadPass``:

    - without recomputation, forward: ``saved`` of blocks 0..i, plus ``forward``; backward at a point p: ``saved`` of blocks
      0..i-1, plus ``p.lines``;
    - under full recomputation, forward: ``checkpoint`` of blocks 0..i, plus ``forward_recompute``; backward at p:
      ``checkpoint`` of blocks 0..i-1, plus ``checkpoint_in_backward``, plus ``p.lines``. The recomputation itself is never
      higher than the highest point. ``checkpoint_in_backward`` is the block's input, or nothing where the first norm saves
      that tensor itself, so that ``p.lines`` contains it;
    - under selective recomputation, as under full with ``selective`` instead of ``checkpoint`` and of blocks 0..i-1 only.

    A backward adds the weight gradients that p counts, and under autocast ``p.live_casts`` and the ``cast_elements`` of blocks
    0..i-1, at 2 bytes. A forward adds the ``cast_elements`` of blocks 0..i, also under recomputation: autocast drops its copies
    only when its context ends. Full recomputation keeps none of them for the backward. The gradient from the block above is one
    of ``p.lines``.
    """

    saved: tuple[Line, ...]
    checkpoint: tuple[Line, ...]
    selective: tuple[Line, ...]
    forward: tuple[Line, ...]
    forward_recompute: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]
    cast_elements: int
    checkpoint_in_backward: tuple[Line, ...] = ()
    on_host: tuple[Line, ...] = ()
    handed: tuple[GradientArrivals, ...] = ()
    before_experts: tuple[Line, ...] = ()
    """Tensors alive in the forward when the experts begin, in blocks with experts."""
    named: tuple[Line, ...] = ()
    """Tensors that layers above read too, if nothing but a variable of the model's forward keeps them."""
    arriving: tuple[Line, ...] = ()
    """What is alive when its backward begins, and that no block keeps: gradients of tensors that several layers read, and what
    recomputations above have left. The points contain it."""
    leaving: tuple[Line, ...] = ()
    """The same when its backward ends, without the gradient of its input."""

    @property
    def entered(self) -> tuple[Line, ...]:
        """Return the tensors that are alive in the block's own forward beside the kept ones: the input, if it is offloaded."""
        return tuple(filter(is_input, self.checkpoint)) if self.on_host else ()

    def kept(self, recompute: Recompute) -> tuple[Line, ...]:
        """Return the tensors that the block keeps on the GPU from its forward to its backward under this recomputation."""
        if recompute == "none":
            return self.saved
        if recompute == "selective":
            return self.selective
        return without_input(self.checkpoint) if self.on_host else self.checkpoint

    def with_lines(self, made_of: Callable[[Line], Line]) -> "BlockPass":
        """Return the same with other lines: ``made_of`` each of them."""

        def lines(some: tuple[Line, ...]) -> tuple[Line, ...]:
            return tuple(map(made_of, some))

        groups: dict[str, Any] = {name: lines(getattr(self, name)) for name in _GROUPS}
        points = tuple([one._replace(lines=lines(one.lines), before=lines(one.before)) for one in self.points])
        return self._replace(
            points=points, handed=tuple([one._replace(lines=lines(one.lines)) for one in self.handed]), **groups
        )


#: The fields of a block's pass that are lines.
_GROUPS = (
    "saved", "checkpoint", "selective", "forward", "forward_recompute", "checkpoint_in_backward", "on_host", "before_experts",
    "named", "arriving", "leaving",
)  # fmt: skip


def is_input(line: Line) -> bool:
    """Whether a line is a block's input, which autograd saves. Offloading leaves other lines of a checkpoint on the GPU."""
    return line.tag.role is Role.BLOCK_INPUT


def without_input(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return lines without a block's input."""
    return tuple([line for line in lines if not is_input(line)])


class Ahead(NamedTuple):
    """What multi-token prediction holds outside its blocks (:mod:`zeroplan.transformer.predictions`).

    ``beside``: from the forward of its first block to the end of that block's backward; ``forward``: at the losses' forward;
    ``backward``: in the backward of losses, head and final norm; ``left``: from its blocks' backward to the end.
    """

    beside: tuple[Line, ...] = ()
    forward: tuple[Line, ...] = ()
    backward: tuple[Line, ...] = ()
    left: tuple[Line, ...] = ()


class HeadPass(NamedTuple):
    """The memory of the part outside the blocks: embedding, rotary tables, final norm, head, loss.

    ``shared``: alive in the whole pass: rotary cos and sin, input ids; with recomputation an eager attention mask; ``forward``:
    alive while the blocks run forward and freed before the loss: an eager attention mask, and embeddings that variables of the
    model's forward hold, except block 0's input; ``first_input``: block 0's input, if a variable holds it; it counts from block
    1 on; ``saved``: tensors that final norm and head keep until their backward, without the loss's own; ``loss``: tensors that
    the loss keeps from its forward to its backward; ``loss_forward``: logits and the loss's own tensors at its peak, beyond
    ``saved``, with ``loss``; ``points``: every moment of the backward outside the blocks where memory can peak (the loss, the
    head's product, the final norm): all live tensors beyond the blocks and ``shared``, and the weight gradients made;
    ``output``: logits that stay alive if the training loop keeps the model's output; ``below_blocks``: the tensors that the
    backward of the part before the blocks adds at its peak to ``shared`` and its incoming gradient; empty if that part is a
    plain embedding.
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
    """The last lines of ``shared``. Only blocks need them, and they are freed after the first block's backward."""
    norm_forward: tuple[tuple[Line, ...], ...] = ()
    """Points of the final norm's forward, for engines that all-gather the head meanwhile; profiles have none."""
    handed: tuple[GradientArrivals, ...] = ()
    """Moments when the weights after the blocks receive their gradients."""
    handed_below: tuple[GradientArrivals, ...] = ()
    """Moments when the weights before the blocks receive their gradients."""
    before: tuple[Line, ...] = ()
    """What the part before the blocks needs for its backward, in models whose points of that backward are known. It is among
    ``with_blocks``, or block 0 keeps it, too."""
    looked_up: tuple[Line, ...] = ()
    """In these models: tensors alive while its tables are looked up."""
    below: tuple[BackwardPoint, ...] = ()
    """These points: complete, beside ``at_embedding``."""
    tower_bytes: Int = 0
    """Bytes of the residual stream in a vision tower's blocks, which run before the text's blocks."""
    ahead: Ahead = Ahead()
    """What multi-token prediction adds."""

    @property
    def at_embedding(self) -> tuple[Line, ...]:
        """The lines of ``shared`` that are alive in the embedding's backward."""
        return self.shared[: len(self.shared) - len(self.with_blocks)]


class AtEmbedding(NamedTuple):
    """Tensors that the backward of an embedding allocates when tensor-parallel ranks split its vocabulary.

    ``gathered`` and ``by_rank``: the gradient of its output, in order and rank by rank; ``whole``: the gradient of all rows.
    """

    gathered: Line
    by_rank: Line
    whole: Line

"""The result types: a line of bytes with its reason, a named moment of the step, a collective.

Every formula returns :class:`Line`. Totals, peaks, tables, plots and the comparison with a measurement read the same lines, so
that each sum is computed in one place.
"""

from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from zeroplan.numeric import Int, maximum


class Kind(StrEnum):
    """The kind of a line of memory, from its allocation to its release. Estimates and measurements use the same kinds.

    A tensor that changes its purpose has the kind of its last one.
    """

    PARAMETERS = "parameters"
    """The weights that this rank keeps from step to step, in the engine's dtype."""
    GRADIENTS = "gradients"
    """The gradients that the optimizer's step reads on this rank, and their accumulation: its share, or all without sharding."""
    OPTIMIZER_STATE = "optimizer state"
    """The optimizer's states between steps, including the copy of the weights that it updates."""
    WEIGHT_CASTS = "weight casts"
    """Autocast's 16-bit copies of weights."""
    ACTIVATIONS = "activations"
    """What a forward, or its recomputation, saves for the backward, including the batch and the tables that all layers share."""
    ACTIVATION_GRADIENTS = "activation gradients"
    """Gradients of activations in the backward. A measurement cannot distinguish them from temporaries."""
    LOGITS = "logits and loss"
    """Logits, the loss's tensors in the forward, and the gradients of both; not those of the head's weight and input."""
    GATHER = "all-gather buffers"
    """The output buffer of an all-gather, until it becomes the parameters of the layer that computes."""
    UNSHARDED_PARAMETERS = "unsharded parameters"
    """Gathered weights while a layer can compute with them."""
    UNSHARDED_GRADIENTS = "unsharded gradients"
    """Whole gradients where the optimizer reads something else: a share of them, or the bucket into which they are moved."""
    REDUCE = "reduce buffers"
    """Input of a gradient reduction, and its output until that becomes the rank's own."""
    OPTIMIZER_TEMPORARY = "optimizer temporaries"
    """Temporaries of the optimizer's step, including the norm and the casts before the update."""
    TEMPORARY = "temporaries"
    """Temporaries of a pass: held by a variable in the forward, inside an operator, or before a cast."""
    WORKSPACE = "library workspaces"
    """What libraries request from torch and keep: cuBLAS's workspaces."""


NOT_TOLD_APART = "not told apart"
"""The kind of bytes whose purpose a file does not record."""


class Phase(StrEnum):
    """The part of the step, or of the script, that a moment belongs to."""

    INIT = "initialisation"
    FIRST = "first micro-batches"
    """Forward and backward of the first micro-batches of all, where an engine treats them otherwise and they can be the peak.

    ``Moment.of_forward`` distinguishes both passes.
    """
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    STEP = "optimizer step"


OF_A_STEP = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.STEP)
"""The phases that every training step has."""


class Beside(StrEnum):
    """The phases of a training script outside its steps."""

    LOADING = "loading"
    """From the start of the process to the first training forward: building, loading, wrapping and moving the model."""
    EVALUATION = "evaluation"
    """Forwards of the trained model in evaluation mode, and what the script computes from their results."""
    NO_GRAD = "forward without gradients"
    """Forwards of the trained model in training mode with gradients off: scoring in reinforcement learning, a GAN's samples."""
    GENERATION = "generation"
    """``generate`` of transformers."""
    SAVING = "saving"
    """Building and writing state dicts."""
    AFTER = "after training"
    """After the script has freed its model or optimizer."""


class Role(StrEnum):
    """The role of a tensor in the model's pass, where engines need it. Most lines have none."""

    NONE = ""
    BLOCK_INPUT = "block input"
    """The hidden states that a block reads, also where the first norm saves that tensor itself."""
    INCOMING = "incoming gradient"
    """The gradient of a block's output."""
    OPERAND = "operand"
    """The input of a matrix product, saved for the gradient of its weight."""
    NORMALISED = "normalised input"
    """The input of a norm's product with its weight, saved for the gradient of that weight."""
    OUTPUT = "output"
    """The output of a linear layer."""
    NAMED = "held by name"
    """Held only by a local variable of the model's forward, until the forward returns."""
    BATCH = "batch"
    """Token ids and positions."""
    COPIED_OUT = "copied out"
    """A parameter's cast or copy, on the compute stream; other gathers are on a stream of their own."""
    LABELS = "labels"
    """Labels as the loss prepares them."""
    UNTIL_NEXT_STEP = "until the next step"
    """Alive after the optimizer's step, and freed at the start of the next step, before its first moment."""


class Module(StrEnum):
    """The module of a tensor or operator, where engines need it, under Llama's names."""

    NONE = ""
    Q = "self_attn.q_proj"
    K = "self_attn.k_proj"
    V = "self_attn.v_proj"
    O = "self_attn.o_proj"  # noqa: E741  as the layer is called
    GATE = "mlp.gate_proj"
    UP = "mlp.up_proj"
    DOWN = "mlp.down_proj"
    ACTIVATION = "mlp.act_fn"
    EXPERTS = "mlp.experts"
    ATTENTION_NORM = "input_layernorm"
    MLP_NORM = "post_attention_layernorm"
    AFTER_ATTENTION_NORM = "post_attention_layernorm"
    """The same name, in families with norms after attention and MLP."""
    BEFORE_MLP_NORM = "pre_feedforward_layernorm"
    AFTER_MLP_NORM = "post_feedforward_layernorm"
    Q_NORM = "self_attn.q_norm"
    K_NORM = "self_attn.k_norm"
    FINAL_NORM = "norm"
    HEAD = "lm_head"


class OffGpu(StrEnum):
    """How a tensor differs in a run without a GPU: on fake tensors, or with CPU kernels."""

    SAME = ""
    NO_TENSOR = "no tensor"
    """A CUDA kernel's internal memory, which does not exist on fake tensors or on a CPU."""
    NOTHING = "nothing"
    """CPU kernels do not allocate it."""
    TWICE = "twice"
    """CPU kernels keep a second copy, unless a selective checkpoint keeps the kernel's output."""
    HALF = "half"
    """CPU kernels use 16 bits, CUDA's autocast uses 32."""
    COMPUTE_DTYPE = "compute dtype"
    """CPU kernels use the compute dtype, CUDA uses 32 bits."""
    KEPT = "kept"
    """The engine makes the tensor once and keeps it in any run. A library's workspace exists on CUDA only."""


class Tag(NamedTuple):
    """Properties of a tensor that code may read. A line's ``reason`` is text for people; code never reads it."""

    role: Role = Role.NONE
    module: Module = Module.NONE
    off_gpu: OffGpu = OffGpu.SAME
    blocks: tuple[tuple[str, int], ...] = ()
    """The number of blocks of each kind whose saved tensors the line sums."""


#: The tag of most tensors.
PLAIN = Tag()


class Line(NamedTuple):
    """A number of bytes with the reason why they are allocated, a formula and a source."""

    kind: Kind
    """The kind of memory."""
    n_bytes: Int
    """How many bytes."""
    reason: str
    """What the bytes are, in words for people."""
    formula: str = ""
    """The arithmetic, in the symbols of the estimate's legend (``4·P/N``). A test evaluates it and expects ``n_bytes``."""
    source: str = ""
    """The paper and equation, or the file and symbol of the engine."""
    tag: Tag = PLAIN
    """Properties that code may read."""


class Band(NamedTuple):
    """A range for a figure that cannot be known to the byte: lowest, expected and highest value. [bytes]"""

    low_bytes: Int
    """The lowest value."""
    expected_bytes: Int
    """The expected value."""
    high_bytes: Int
    """The highest value."""

    def plus(self, n_bytes: Int) -> "Band":
        """Return the band shifted by ``n_bytes``.

        >>> Band(1, 2, 3).plus(10)
        Band(low_bytes=11, expected_bytes=12, high_bytes=13)
        """
        return Band(self.low_bytes + n_bytes, self.expected_bytes + n_bytes, self.high_bytes + n_bytes)


class Moment(NamedTuple):
    """A named point of the training step, and the lines alive at that point."""

    name: str
    """What happens."""
    phase: Phase
    """The phase of the step."""
    lines: tuple[Line, ...]
    """Everything that is alive."""
    of_forward: bool = False
    """Whether it belongs to the forward pass. Moments of the loss and of the first micro-batches may belong to either pass."""

    @property
    def total_bytes(self) -> Int:
        """The sum of the lines. [bytes]"""
        return total_bytes(self.lines)

    def beside(self, lines: tuple[Line, ...]) -> "Moment":
        """Return the moment with ``lines`` before its own."""
        return self._replace(lines=lines + self.lines)


class Among(StrEnum):
    """Which ranks of the mesh are in a collective."""

    SHARDS = "shards"
    """The ranks that shard parameters, gradients or states: by default the data-parallel ranks."""
    REPLICAS = "replicas"
    """The ranks that hold the same shard."""
    SHARDS_OF_EXPERTS = "shards of experts"
    """The ranks that shard the same experts."""
    EXPERTS = "experts"
    """The ranks that hold different experts and exchange tokens."""
    SEQUENCE = "sequence"
    """The ranks that split a sequence."""
    TENSOR = "tensor"
    """The ranks that split matrices."""
    STAGES = "stages"
    """Two stages of a pipeline."""


class Collective(NamedTuple):
    """One kind of collective call in a training step, in one group of ranks."""

    operation: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ..."""
    what: str
    """What the ranks exchange."""
    when: str
    """The part of the step, in words."""
    group: Int
    """Ranks in the group."""
    calls: Int
    """Calls per step."""
    n_bytes: Int
    """Payload of one call: the bytes of the operation's largest buffer (the gathered, the to-be-scattered or the reduced
    tensor); the average where calls differ."""
    sent_bytes: Int
    """What one GPU sends in the whole step with a ring: (group - 1)/group of the payload per pass."""
    volume_elements: Int
    """Payload in elements times calls and passes, the ZeRO paper's unit of volume."""
    source: str = ""
    """The file and symbol of the engine."""
    of_all: Int | None = None
    """Payload of all calls, to the byte, where calls differ."""
    near: bool = False
    """The ranks of the group may share a node; those of other groups do not."""
    phase: Phase = Phase.BACKWARD
    """The part of the step, for code; ``when`` is for people."""
    among: Among = Among.SHARDS
    """Which ranks are in it, for code; ``what`` is for people."""
    is_root: bool = False
    """Whether it transfers parameters or gradients outside the blocks. No computation overlaps these collectives."""

    @property
    def payload_bytes(self) -> Int:
        """Payload of all calls of a step. [bytes]"""
        return self.calls * self.n_bytes if self.of_all is None else self.of_all


def total_bytes(lines: tuple[Line, ...]) -> Int:
    """Return the sum of the lines. [bytes]

    >>> total_bytes((Line(Kind.PARAMETERS, 2, "a"), Line(Kind.GRADIENTS, 3, "b")))
    5
    """
    total: Int = sum(map(_n_bytes, lines))
    return total


_n_bytes = attrgetter("n_bytes")


def bytes_by_kind(lines: tuple[Line, ...]) -> dict[Kind, Int]:
    """Return the sum of each kind's lines, in order of first occurrence. [bytes]"""
    by_kind: dict[Kind, Int] = {}
    for line in lines:
        by_kind[line.kind] = by_kind.get(line.kind, 0) + line.n_bytes
    return by_kind


def peak_bytes(moments: tuple[Moment, ...]) -> Int:
    """Return the largest total among the moments; a column where a line is one. [bytes]"""
    return maximum(0, *(moment.total_bytes for moment in moments))

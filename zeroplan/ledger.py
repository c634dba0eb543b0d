"""The result types: a line of bytes with its reason, a named moment of the step, a collective.

Every formula ends as a :class:`Line`. Totals, peaks, tables, plots and the comparison with a measurement are views of the
same lines, so nothing is added up twice.
"""

from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from zeroplan.numeric import Int, maximum


class Kind(StrEnum):
    """What a line of memory is for, from its birth to its end; estimates and measurements name the same bytes alike.

    Where a tensor is one thing first and another later, it is named after what it becomes.
    """

    PARAMETERS = "parameters"
    """The weights that this rank keeps from step to step, as wide as the engine keeps them."""
    GRADIENTS = "gradients"
    """What the optimizer's step reads on this rank, and what is added up to it: its share, or all where nothing is sharded."""
    OPTIMIZER_STATE = "optimizer state"
    """What the optimizer keeps between steps, the copy of the weights that it updates included."""
    WEIGHT_CASTS = "weight casts"
    """Autocast's 16-bit copies of weights."""
    ACTIVATIONS = "activations"
    """What a forward, or its recomputation, leaves for the backward, the batch and tables for all layers among it."""
    ACTIVATION_GRADIENTS = "activation gradients"
    """Gradients of activations on their way back; a measurement cannot tell them from temporaries."""
    LOGITS = "logits and loss"
    """Logits, what the loss makes of them in forward, and the gradients of both; not those of the head's weight and input."""
    GATHER = "all-gather buffers"
    """What a gather fills, as long as it is not yet the parameters of the layer that computes."""
    UNSHARDED_PARAMETERS = "unsharded parameters"
    """Gathered weights while, or as long as, they can be computed with."""
    UNSHARDED_GRADIENTS = "unsharded gradients"
    """Whole gradients where the optimizer takes something else: a share of them, or the view of a bucket they are moved to."""
    REDUCE = "reduce buffers"
    """What gradients are copied into to be reduced, and what comes out until it is the rank's own."""
    OPTIMIZER_TEMPORARY = "optimizer temporaries"
    """What the optimizer's step makes and drops, the norm and the casts before the update included."""
    TEMPORARY = "temporaries"
    """What a pass makes by the way and drops before its end: held by a name in forward, within an operator, before a cast."""
    WORKSPACE = "library workspaces"
    """What libraries ask torch for and keep, cuBLAS's workspaces."""


class Phase(StrEnum):
    """Which part of the step a moment belongs to."""

    INIT = "initialisation"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    STEP = "optimizer step"


OF_A_STEP = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.STEP)
"""The phases that every training step has."""


class Beside(StrEnum):
    """What a training script does beside its steps."""

    LOADING = "loading"
    """From the start of the process to the first training forward: the model is built, loaded, wrapped and moved."""
    EVALUATION = "evaluation"
    """Forwards of the trained model in evaluation mode, and what the script makes of their results."""
    NO_GRAD = "forward without gradients"
    """Forwards of the trained model in training mode with gradients off: scoring in reinforcement learning, a GAN's samples."""
    GENERATION = "generation"
    """``generate`` of transformers."""
    SAVING = "saving"
    """State dicts and what writes them."""
    AFTER = "after training"
    """What follows once the script has let go of its model or optimizer."""


class Role(StrEnum):
    """What a tensor is in the model's pass, where an engine has to know; most lines have no role."""

    NONE = ""
    BLOCK_INPUT = "block input"
    """The hidden states that a block reads, or the very same tensor under its first norm's name."""
    INCOMING = "incoming gradient"
    """The gradient that comes in at the end of a block."""
    OPERAND = "operand"
    """What a matrix product read and keeps for the gradient of its weight."""
    NORMALISED = "normalised input"
    """What a norm multiplied with its weight and keeps for that weight's gradient."""
    OUTPUT = "output"
    """What a linear layer returned."""
    NAMED = "held by name"
    """Held by a name in the model's forward alone, and gone when that is over."""
    BATCH = "batch"
    """Token ids and positions."""
    LABELS = "labels"
    """Labels as the loss makes them ready."""
    UNTIL_NEXT_STEP = "until the next step"
    """It outlives the optimizer's step, and goes when the next step begins, before any moment of it."""


class Module(StrEnum):
    """The module that a tensor or an operator belongs to, where an engine has to know; by the names that Llama gives them."""

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
    """The same name, where norms stand after attention and MLP."""
    BEFORE_MLP_NORM = "pre_feedforward_layernorm"
    AFTER_MLP_NORM = "post_feedforward_layernorm"
    Q_NORM = "self_attn.q_norm"
    K_NORM = "self_attn.k_norm"
    FINAL_NORM = "norm"
    HEAD = "lm_head"


class OffGpu(StrEnum):
    """What a run without a GPU takes in the place of a tensor on one."""

    SAME = ""
    NO_TENSOR = "no tensor"
    """Nothing on fake tensors either: a CUDA kernel takes it inside itself."""
    NOTHING = "nothing"
    """Nothing where a CPU's kernels run; so for the others."""
    TWICE = "twice"
    """A copy more, but where a selective checkpoint keeps what the kernel returned."""
    HALF = "half"
    """16 bits, where CUDA's autocast has 32."""
    COMPUTE_DTYPE = "compute dtype"
    """The compute dtype, where CUDA has 32 bits."""


class Tag(NamedTuple):
    """What code may know of a tensor beyond its kind; the words of a line are for people alone."""

    role: Role = Role.NONE
    module: Module = Module.NONE
    off_gpu: OffGpu = OffGpu.SAME
    blocks: tuple[tuple[str, int], ...] = ()
    """How many blocks of each kind a line sums up, of which it is what they keep for their backward."""


#: The tag of most tensors.
PLAIN = Tag()


class Line(NamedTuple):
    """A number of bytes and why they are there."""

    kind: Kind
    """What the memory is for."""
    n_bytes: Int
    """How much of it."""
    reason: str
    """What lies there, in words."""
    formula: str = ""
    """The arithmetic, in the symbols of the estimate's legend (``4·P/N``); a test evaluates it and demands ``n_bytes``."""
    source: str = ""
    """The paper and equation, or the file and symbol of the engine."""
    tag: Tag = PLAIN
    """What code may know of it."""


class Band(NamedTuple):
    """A figure that cannot be known to the byte: the least, the expected and the most it may be. [bytes]"""

    low_bytes: Int
    """The least."""
    expected_bytes: Int
    """The expected."""
    high_bytes: Int
    """The most."""

    def plus(self, n_bytes: Int) -> "Band":
        """Shift the whole band.

        >>> Band(1, 2, 3).plus(10)
        Band(low_bytes=11, expected_bytes=12, high_bytes=13)
        """
        return Band(self.low_bytes + n_bytes, self.expected_bytes + n_bytes, self.high_bytes + n_bytes)


class Moment(NamedTuple):
    """A named moment of the training step and everything alive then."""

    name: str
    """What goes on."""
    phase: Phase
    """In which part of the step."""
    lines: tuple[Line, ...]
    """Everything that is alive."""
    of_forward: bool = False
    """It belongs to the forward, as code may have to know of a moment of the loss."""

    @property
    def total_bytes(self) -> Int:
        """Sum of the lines. [bytes]"""
        return total_bytes(self.lines)

    def beside(self, lines: tuple[Line, ...]) -> "Moment":
        """Put lines that are alive as well before its own."""
        return self._replace(lines=lines + self.lines)


class Among(StrEnum):
    """Which ranks of the mesh take part in a collective."""

    SHARDS = "shards"
    """Those that share out parameters, gradients or states: the data-parallel ranks, where nothing else is said."""
    REPLICAS = "replicas"
    """Those that hold the same share."""
    SHARDS_OF_EXPERTS = "shards of experts"
    """Those that share out the same experts."""
    EXPERTS = "experts"
    """Those that each have experts of their own, and send tokens to each other."""
    SEQUENCE = "sequence"
    """Those that share a sequence."""
    TENSOR = "tensor"
    """Those that split matrices."""
    STAGES = "stages"
    """Two stages of a pipeline."""


class Collective(NamedTuple):
    """One kind of collective call in a training step, on one group of ranks."""

    operation: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ..."""
    what: str
    """What is sent."""
    when: str
    """In which part of the step."""
    group: Int
    """Ranks that take part."""
    calls: Int
    """How often per step."""
    n_bytes: Int
    """Payload of one call, in the sense of the operation's largest buffer (the gathered, the to-be-scattered or the reduced
    tensor); of an average one where calls are not alike."""
    sent_bytes: Int
    """What one GPU sends in the whole step with a ring: (group - 1)/group of the payload per pass."""
    volume_elements: Int
    """Payload in elements times calls and passes, the ZeRO paper's unit of volume."""
    source: str = ""
    """The file and symbol of the engine."""
    of_all: Int | None = None
    """Payload of all calls, to the byte, where they are not alike."""
    near: bool = False
    """The group is of ranks that may share a node, among others that do not."""
    phase: Phase = Phase.BACKWARD
    """In which part of the step, for code: ``when`` is for people."""
    among: Among = Among.SHARDS
    """Which ranks take part, for code: ``what`` is for people."""
    is_root: bool = False
    """Of what is outside the blocks, beside whose collectives nothing is computed."""

    @property
    def payload_bytes(self) -> Int:
        """Payload of all calls of a step. [bytes]"""
        return self.calls * self.n_bytes if self.of_all is None else self.of_all


def total_bytes(lines: tuple[Line, ...]) -> Int:
    """Sum of the lines. [bytes]

    >>> total_bytes((Line(Kind.PARAMETERS, 2, "a"), Line(Kind.GRADIENTS, 3, "b")))
    5
    """
    total: Int = sum(map(_n_bytes, lines))
    return total


_n_bytes = attrgetter("n_bytes")


def bytes_by_kind(lines: tuple[Line, ...]) -> dict[Kind, Int]:
    """Sum of the lines of each kind that occurs, in order of first occurrence. [bytes]"""
    by_kind: dict[Kind, Int] = {}
    for line in lines:
        by_kind[line.kind] = by_kind.get(line.kind, 0) + line.n_bytes
    return by_kind


def peak_bytes(moments: tuple[Moment, ...]) -> Int:
    """Largest total among the moments; a column where any line is one. [bytes]"""
    return maximum(0, *(moment.total_bytes for moment in moments))

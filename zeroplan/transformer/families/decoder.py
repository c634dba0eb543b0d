"""The parts that decoder layers of several families share: the layer with its two branches, attention, and the MLPs.

Read it like transformers' ``modeling_*.py``. Each operator (``operators.py``) allocates its output and records the tensors that
autograd saves. ``tape.release`` marks the line where a Python variable of the ``forward`` goes out of scope or is reassigned,
which frees a tensor that no operator has saved.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.definition import Block, Program
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.sharded import gathered, norm
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.symbols import T, a, c, d, d_4, f, h, k, k_4, k_d, q, q_4, v

FLEX = "NeMo AutoModel 36044ad3, components/attention/flex_attention.py, FlexAttention.forward"
LLAMA_NORM = Norm("cast, then weighted", "transformers 5.23, models/llama/modeling_llama.py, LlamaRMSNorm.forward")
LAYER_NORM = Norm("layer", "torch 2.13, aten/src/ATen/native/cuda/layer_norm_kernel.cu, layer_norm_cuda")


class Layer(NamedTuple):
    """A decoder layer: attention and MLP each read a norm's output, and their outputs are added to the residual stream."""

    norm: Norm
    attention: Callable[[Tape, Value, Block], Attended]
    mlp: Callable[[Tape, Value, Block], Value | Attended]
    source: str
    multiplied: bool = False
    """The layer multiplies a branch's output by a constant before the addition (Granite)."""
    before: tuple[Place, Place] | None = (AT_ATTENTION_NORM, AT_MLP_NORM)
    """Places of the norms before attention and before the MLP; None: the branches read the residual stream directly (OLMo 2)."""
    after: tuple[Place, Place] | None = None
    """Places of norms of the branches' outputs, in families that have them."""
    mlp_frees_input: bool = False
    """The layer assigns the MLP's first product to the variable of its input (OPT)."""

    def run(self, tape: Tape, given: Value, block: Block) -> Value:
        """Run the layer on ``given``; return its output. Attention weights, if any, live until it returns."""
        attended, weights = self._attention_branch(tape, given, block)
        middle = self._added(tape, given, attended, "residual stream between attention and MLP")
        tape.kernel_output(middle.store, of="inputs-kept")
        branch, beside = self._mlp_branch(tape, middle, block)
        made = self._added(tape, middle, branch, "block output")
        tape.release(middle, weights, beside)
        return made

    def _attention_branch(self, tape: Tape, given: Value, block: Block) -> Attended:
        normal = self._norm_before(tape, given, "norm before attention", 0)
        whole = gathered(tape, normal, "input of attention")
        attended, weights = self.attention(tape, whole, block)
        tape.release(whole, normal)
        return Attended(self._norm_after(tape, attended, "norm after attention", 0), weights)

    def _mlp_branch(self, tape: Tape, middle: Value, block: Block) -> Attended:
        """Return the MLP's output, and the tensors that the layer holds until it returns."""
        normal = self._norm_before(tape, middle, "norm before the MLP", 1)
        if self.mlp_frees_input:
            return _with_kept(self.mlp(tape, normal, block))
        whole = gathered(tape, normal, "input of the MLP", alike=block.routed)
        branch, beside = _with_kept(self.mlp(tape, whole, block))
        tape.release(whole, normal)
        return Attended(self._norm_after(tape, branch, "norm after the MLP", 1), beside)

    def _norm_before(self, tape: Tape, given: Value, name: str, branch: int) -> Value:
        if self.before is None:
            tape.hold(given.store)
            return given
        normal = norm(tape, given, name, self.norm, self.before[branch])
        tape.kernel_output(normal.store, of="inputs-kept")
        return normal

    def _norm_after(self, tape: Tape, made: Value, name: str, branch: int) -> Value:
        if self.after is None:
            return made
        normal = op.norm(tape, made, name, self.norm, place=self.after[branch])
        tape.release(made)
        return normal

    def _added(self, tape: Tape, given: Value, branch: Value, reason: str) -> Value:
        """Return the residual stream plus the branch's output, whose variable lives until the sum exists."""
        name = "branch times its multiplier"
        term = op.multiplied(tape, branch, name, self.source) if self.multiplied else branch
        made = op.add(tape, given, term, reason, self.source)
        tape.release(*((term, branch) if self.multiplied else (branch,)))
        return made


def _with_kept(made: Value | Attended) -> Attended:
    return made if isinstance(made, Attended) else Attended(made)


def layer(parts: Layer) -> Program:
    """Return the program of a family whose every layer is ``parts``."""
    return Program(parts.run, parts.source, parts.norm)


def layer_of(
    classes: str, norm: Norm, attention: Callable[[Tape, Value, Block], Attended], mlp: Callable[..., Value],
    names: tuple[str, str] = ("MLP", "DecoderLayer"),
) -> Layer:  # fmt: skip
    """Return a layer that runs ``mlp``. ``classes``: where its classes are, and how their names begin; ``names``: how they end."""
    of_mlp, whole = names
    return Layer(norm, attention, partial(mlp, source=f"{classes}{of_mlp}.forward"), f"{classes}{whole}.forward")


# --- attention ---------------------------------------------------------------------------------------------------------------

Rotated = tuple[Value, Value]
#: Elements of half of the queries, of the keys, and of one head.
HALF = (2 * T * q_4, 2 * T * k_4, 2 * d_4)


def rotated(
    tape: Tape, query: Value, key: Value, _block: Block, *, source: str, partly: tuple[Size, Size, Size] | None = None
) -> Rotated:  # fmt: skip
    """Return queries and keys with rotary positions, on whole heads or on the elements ``partly``.

    ``partly``: these elements of the queries, of the keys, and of one head.
    """
    parts = (None, None, d) if partly is None else partly
    return (
        op.rotary(tape, query, Site("queries", source), part=parts[0], per_token=parts[2]),
        op.rotary(tape, key, Site("keys", source), part=parts[1], per_token=parts[2]),
    )


def _without_the_sinks_share(tape: Tape, attended: Value) -> Value:
    """Multiply a kernel's output by the share of the scores that no sink takes, in fp32. It releases ``attended``.

    Autograd saves both factors; the share is a number per query and head.
    """
    share = tape.make(op.TENSOR, "share of the scores that no sink takes, fp32", 4 * T * a, FLEX)
    name = "attention output without the sinks' share"
    wide = op.run(
        tape, attended, f"{name}, fp32", FLEX, dtype=4, saved=(attended, share),
        gradient="gradient of the kernel's output", beside=("gradient of the share, not yet summed", 4 * T * c),
    )  # fmt: skip
    made = op.cast(tape, wide, attended.dtype, Site(name, FLEX))
    tape.drop(share)
    tape.release(wide, attended)
    return made


class Attention(NamedTuple):
    """Attention whose queries, keys and values are three projections of the layer's normalised input."""

    source: str
    norm: Norm | None = None
    """The norm of queries and keys, in families that have one."""
    norm_at_once: bool = False
    """The module normalises queries before it projects keys; otherwise it normalises after all three projections."""
    norm_over_heads: bool = False
    """One norm over all heads together (OLMo 2), else over each head by itself."""
    own_weights: bool = False
    """In a norm over each head, each head has its own weights (Command R+)."""
    norm_last: bool = False
    """The module normalises queries and keys after the rotary positions (Hunyuan)."""
    scaled_keys: bool = False
    """The keys are multiplied by a constant (Falcon-H1)."""
    rotated: Callable[[Tape, Value, Value, Block], Rotated] | None = None
    """The family's rotary positions; None: Llama's."""
    joined: bool = False
    """Rotary positions copy queries and keys into head order."""
    output: str = ""
    """The name of the output projection, where it is not ``o_proj``."""

    def run(self, tape: Tape, normal: Value, block: Block) -> Attended:
        """Return the output projection's result, and the attention weights if the kernel returns them."""
        query, key, value = self._projections(tape, normal, block)
        query = op.heads_of(tape, query, "queries", self.source)
        if not block.one_key:
            key, value = (op.heads_of(tape, one, name, self.source) for one, name in ((key, "keys"), (value, "values")))
        with_positions = self._with_positions(tape, query, key, block)
        context, weights = block.attend(tape, Heads(*with_positions, value, block.grouped, block.one_key, self.joined))
        if "output-scaled" in tape.mode.fused:
            context = _without_the_sinks_share(tape, context)
        if "output-copied" in tape.mode.fused:
            kernels, name = context, "attention output in the order of tokens"
            context = op.run(tape, kernels, name, self.source, gradient="gradient of the attention's output")
            tape.release(kernels)
        site = Site("output projection", self.source, Module.O, layer=self.output)
        made = op.linear(tape, context, h, site, reads=c, bias=block.output_bias)
        tape.release(value, *with_positions, context)
        return Attended(made, weights)

    def _with_positions(self, tape: Tape, query: Value, key: Value, block: Block) -> Rotated:
        """Return queries and keys with rotary positions, in layers that have them; release the unrotated ones."""
        if block.without_rotary:
            return query, key
        rotate = self.rotated or partial(rotated, source=self.source)
        made = rotate(tape, query, key, block)
        tape.release(query, key)
        return (self._normed_queries(tape, made[0]), self._normed_keys(tape, made[1])) if self.norm_last else made

    def _projections(self, tape: Tape, normal: Value, block: Block) -> tuple[Value, Value, Value]:
        if tape.mode.projections is not None:
            query, key, value = tape.mode.projections(tape, normal)
            return query, key, value

        def project(width: Size, name: str, module: Module) -> Value:
            return op.linear(tape, normal, width, Site(name, self.source, module), bias=block.attention_bias)

        query = project(q, "q projection", Module.Q)
        query = self._normed_queries(tape, query) if self.norm_at_once else query
        key = project(k, "k projection", Module.K)
        key = self._normed_keys(tape, key) if self.norm_at_once else key
        key = op.scaled(tape, key, "keys, scaled", self.source) if self.scaled_keys else key
        value = project(v, "v projection", Module.V)
        if not (self.norm_at_once or self.norm_last):
            query, key = self._normed_queries(tape, query), self._normed_keys(tape, key)
        return query, key, value

    def _normed_queries(self, tape: Tape, bare: Value) -> Value:
        return self._normed(tape, bare, "norm of the queries", (q, T * a), Module.Q_NORM)

    def _normed_keys(self, tape: Tape, bare: Value) -> Value:
        return self._normed(tape, bare, "norm of the keys", (k, T * k_d), Module.K_NORM)

    def _normed(self, tape: Tape, bare: Value, name: str, of: tuple[Size, Size], module: Module) -> Value:
        """Normalise queries or keys. ``of``: the width of all heads together, and the rows of a norm over each head."""
        if self.norm is None:
            return bare
        weight = of[0] if self.norm_over_heads or self.own_weights else d
        rows = T if self.norm_over_heads else of[1]
        made = op.norm(tape, bare, name, self.norm, weight=weight, rows=rows, place=Place(At.NORM, module))
        tape.release(bare)
        return made


# --- MLPs --------------------------------------------------------------------------------------------------------------------


def gated_mlp(
    tape: Tape, normal: Value, block: Block, source: str, *, width: Size = f, prefix: str = "",
    layers: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Value:  # fmt: skip
    """Return ``down(act(gate(x)) * up(x))``. Autograd saves x, the gate, the activated gate, up(x) and their product.

    ``prefix`` begins the names of its moments if a layer has several MLPs. ``layers``: the names of its linear layers.
    """
    if tape.mode.mlp is not None and block.activation == "silu" and not prefix:
        return tape.mode.mlp(tape, normal)
    bias, modules = block.mlp_bias, (Module.NONE,) * 3 if prefix else (Module.GATE, Module.UP, Module.DOWN)
    gate = op.linear(tape, normal, width, Site(f"{prefix}gate projection", source, modules[0], layer=layers[0]), bias=bias)
    in_one = op.gated_by_liger if "liger-swiglu" in tape.mode.fused and block.activation == "silu" else tape.mode.gate
    active = gate
    if in_one is None:
        active = activated(tape, gate, block.activation, f"{prefix}{block.activation} of the gate", source)
        tape.release(gate)
    site = Site(f"{prefix}up projection", source, modules[1], layer=layers[1])
    up = op.linear(tape, normal, width, site, bias=bias)
    reason = f"{prefix}gated product, input of the down projection"
    site = Site(f"{prefix}gated product", source)
    inner = in_one(tape, gate, up, reason) if in_one else op.product(tape, active, up, reason, site)
    tape.release(active, up)
    site = Site(f"{prefix}down projection", source, modules[2], layer=layers[2])
    made = op.linear(tape, inner, h, site, reads=width, bias=bias)
    tape.release(inner)
    return made


def joint_mlp(tape: Tape, normal: Value, block: Block, source: str) -> Value:
    """Return the same for a gated MLP whose gate and up projections are one matrix. The gate's variable lives until it returns."""
    both = op.linear(tape, normal, (f + f), Site("joint gate and up projection", source, layer="gate_up_proj"))
    gate, up = op.chunk(tape, both, (T * f, T * f), Site("gate and up", source))
    tape.release(both)
    active = activated(tape, gate, block.activation, f"{block.activation} of the gate", source)
    inner = op.product(tape, up, active, "gated product, input of the down projection", source)
    tape.release(active, up)
    made = op.linear(tape, inner, h, Site("down projection", source, Module.DOWN), reads=f)
    tape.release(inner, gate)
    return made


def ungated_mlp(tape: Tape, normal: Value, block: Block, source: str) -> Value:
    """Return ``down(act(up(x)))``. Autograd saves x, what the activation function saves, and the second layer's input."""
    inner = op.linear(tape, normal, f, Site("up projection", source, Module.UP), bias=block.mlp_bias)
    active = activated(
        tape, inner, block.activation, f"{block.activation} of the up projection, input of the down projection", source
    )
    tape.release(inner)
    made = op.linear(tape, active, h, Site("down projection", source, Module.DOWN), reads=f, bias=block.mlp_bias)
    tape.release(active)
    return made


def two_layer_mlp(
    tape: Tape, normal: Value, block: Block, source: str, *, addmm: bool = False, frees_input: bool = False,
    layers: tuple[str, str] = ("", ""), bias: bool = True,
) -> Value:  # fmt: skip
    """Return ``second(act(first(x)))``. Autograd saves x, first(x) if the activation reads it, and the second layer's input.

    ``layers``: the names of both linear layers.
    """
    inner = op.linear(tape, normal, f, Site("first MLP projection", source, layer=layers[0]), bias=bias, addmm=addmm)
    if frees_input:
        tape.release(normal)
    active = activated(tape, inner, block.activation, "activation, input of the second projection", source)
    active.is_matrix = normal.is_matrix
    tape.release(inner)
    site = Site("second MLP projection", source, layer=layers[1])
    made = op.linear(tape, active, h, site, reads=f, bias=bias, addmm=addmm)
    tape.release(active)
    return made

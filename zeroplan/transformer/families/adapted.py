"""Blocks of the Llama kind with peft's low-rank adapters: frozen weights save nothing for gradients of their own.

A frozen linear layer needs its weight alone to hand a gradient on; what it read is saved only where an adapter reads it too.
Nothing is saved, nor goes backward, before the first adapter, unless autograd is made to follow the embedding's output.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from zeroplan.expr import Size
from zeroplan.ledger import Kind, Module, Role, Tag
from zeroplan.spec.adapter import Quantize
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Recompute
from zeroplan.transformer.blocks import At, BlockPass, Compute, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families import traced
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.attention import LLAMA as ATTENTION
from zeroplan.transformer.families.dense import MLP
from zeroplan.transformer.families.gated import LLAMA_NORM as NORM
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.norms import AT_FINAL_NORM, FinalNorm
from zeroplan.transformer.families.operators import Site
from zeroplan.transformer.families.parts import INCOMING, LAYER
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.quantised import quantised_linear
from zeroplan.transformer.families.tape import Alive, Store, Tape, Value
from zeroplan.transformer.families.widths import Widths, beyond_the_window, quantities
from zeroplan.transformer.symbols import T, a, c, d, e, f, h, k, k_d, q, r, v, z

AUTOCAST = "torch 2.13, aten/src/ATen/autocast_mode.cpp, cached_cast"
LORA = "peft 0.21, tuners/lora/layer.py, Linear.forward"

_NAMES = {
    Module.Q: "q projection", Module.K: "k projection", Module.V: "v projection", Module.O: "output projection",
    Module.GATE: "gate projection", Module.UP: "up projection", Module.DOWN: "down projection",
}  # fmt: skip
_NORMS = {
    Module.ATTENTION_NORM: "norm before attention", Module.MLP_NORM: "norm before the MLP",
    Module.Q_NORM: "norm of the queries", Module.K_NORM: "norm of the keys",
}  # fmt: skip


class Structure(NamedTuple):
    """Everything the program branches on."""

    block: Block
    adapted: tuple[str, ...]
    """Linear layers that have adapters."""
    tracked: bool
    """Autograd follows the block's input: of the first block's only where blocks are recomputed, as peft arranges it."""
    keeps_inputs: bool
    """Frozen linear layers save their inputs."""
    recompute: Recompute
    quantize: Quantize = "none"
    without: Literal["adapters frozen", "adapters trained"] | None = None
    """There are no adapters, and the block is frozen, its weights as wide as trained ones, or trained as a whole."""

    @property
    def wide_residual(self) -> bool:
        """Norms and embeddings are fp32, and so is what they make: as peft prepares a quantised model for autocast."""
        return self.block.autocast and (self.quantize != "none" or self.without is not None)

    @property
    def trained(self) -> bool:
        """Every weight of the block gets a gradient."""
        return self.without == "adapters trained"


def adapted_block(model: ModelSpec, kind: str, compute: Compute, x: Widths) -> BlockPass:
    """One block with adapters; ``kind`` is ``first`` where no other block is before it."""
    adapter, tracked = model.adapter, kind != "first" or compute.recompute != "none"
    assert adapter is not None  # noqa: S101  block_pass comes here with adapters only
    structure = structure_of(model, compute, x, tracked=tracked)._replace(adapted=adapter.layers, quantize=adapter.quantize)
    return by_structure(model, structure, x, recompute=compute.recompute)


def by_structure(model: ModelSpec, structure: Structure, x: Widths, *, recompute: Recompute) -> BlockPass:
    """One block, whose attention is given a mask where a sequence reaches beyond its window."""
    return traced.by_mask(beyond_the_window(model, x), lambda masked: _pass(model, structure, x, recompute, masked=masked))


def _pass(model: ModelSpec, structure: Structure, x: Widths, recompute: Recompute, *, masked: bool) -> BlockPass:
    values = quantities(x, model.intermediate_size)
    plan = _plan(structure._replace(block=structure.block._replace(masked=masked)))
    return traced.pass_of(traced.Sizes(plan, values), autocast=structure.block.autocast, recompute=recompute)


def final_norm(model: ModelSpec, x: Widths) -> FinalNorm:
    """The frozen norm before the head."""
    plan = _final_plan(wide=x.element == 4, wide_residual=x.residual == 4)
    return traced.Sizes(plan, quantities(x, model.intermediate_size)).norm()


def structure_of(model: ModelSpec, compute: Compute, x: Widths, *, tracked: bool) -> Structure:
    """What a block's program branches on, but for what is adapted or frozen of it."""
    bias, grouped, one_key = model.attention_bias, x.key != x.query, x.key == x.head_dim
    attention = Block(
        model.family, x.element == 4, compute.autocast, x.attention, False, grouped, one_key, bias, x.kernels,
        activation=model.activation, output_bias=bias and model.family != "qwen2", mlp_bias=model.mlp_bias,
    )  # fmt: skip
    return Structure(
        attention,
        (),
        tracked,
        compute.keeps_inputs,
        compute.recompute,
    )


@lru_cache(maxsize=256)
def _plan(structure: Structure) -> traced.Plan:
    index = traced.Index()
    dtypes = {"wide": structure.block.wide, "autocast": structure.block.autocast}
    tape, given, output = _run(structure, saving=True)
    forward, casts = index.forward(tape, tape.saved, dtypes), index.elements(tape.casts)
    arriving = Store(Kind.ACTIVATION_GRADIENTS, "gradient of the residual stream", r * output.shape, LAYER, INCOMING)
    again_first = _again(tape, structure, given.store, arriving) if structure.recompute != "none" else []
    tape.release(output, given)
    tape.run_backward(output, arriving)
    points = index.moments(highest([*again_first, *tape.moments], **dtypes))
    selective = index.of(tape.kept())
    places = index.of((given.store,))
    made = traced.forwards(
        index,
        forward,
        given.store,
        lambda keeping: _run(structure, saving=False, given=given.store, keeping=keeping)[0],
        dtypes,
    )
    handed, stores, weights = index.handed(tape.handed), tuple(index.stores), tuple(index.weights)
    return traced.Plan(stores, weights, made, points, casts, selective, places, LAYER, {}, handed)


def _above_recomputation(structure: Structure, arriving: Store) -> tuple[Store, ...]:
    """What has gone backward when something saved is first needed: the scaling of the last adapter needs nothing."""
    if structure.without is not None:
        return (arriving,)
    if "down_proj" not in structure.adapted:
        through = Store(Kind.ACTIVATION_GRADIENTS, "gradient through the down projection", r * T * f, LAYER)
        return (arriving,) if structure.quantize == "none" else (arriving, through)
    scaled = Store(Kind.ACTIVATION_GRADIENTS, "gradient of the down projection's adapter, scaled", e * T * h, LORA)
    return (arriving, scaled)


def _again(tape: Tape, structure: Structure, given: Store, arriving: Store) -> list[Alive]:
    """The moments of recomputing the block; its input is counted as a checkpoint.

    In full, up to the last tensor that it saves; selectively, to the end. DeepSpeed's own linear layer saves when it is done.
    """
    checkpoint, above = () if given in tape.saved else (given,), _above_recomputation(structure, arriving)
    until = tape.moments if structure.recompute == "selective" else tape.until_last_saved(done=structure.keeps_inputs)
    return [
        moment._replace(
            name=f"recomputed: {moment.stores[-1].reason}",
            place=Place(At.RUN_AGAIN, moment.stores[-1].tag.module),
            stores=(*(one for one in moment.stores if one not in checkpoint), *above),
        )
        for moment in until
    ]


def _run(
    structure: Structure, *, saving: bool, given: Store | None = None, keeping: bool = False
) -> tuple[Tape, Value, Value]:  # fmt: skip
    """Run the block forward, over an input that another run has had, or over one of its own."""
    dtypes = {"wide": structure.block.wide, "autocast": structure.block.autocast, "frozen": not structure.wide_residual}
    tape = Tape(saving=saving, keeping=keeping, **dtypes)
    value = traced.block_input(tape, given, (r, T * h), LAYER)
    if not structure.tracked:
        tape.constants.add(value)
    return tape, value, _layer(tape, value, structure)


@lru_cache(maxsize=8)
def _final_plan(*, wide: bool, wide_residual: bool) -> traced.Plan:
    tape = Tape(wide=wide, autocast=wide_residual, saving=True)
    return traced.norm_plan(
        tape,
        (r, T * h),
        lambda tape, given: op.rms_norm(tape, given, "final norm", NORM, frozen=True, place=AT_FINAL_NORM),
        LAYER,
    )


# --- the program -------------------------------------------------------------------------------------------------------


def _layer(tape: Tape, given: Value, structure: Structure) -> Value:
    normal = _norm(tape, given, Module.ATTENTION_NORM, structure)
    attended, weights = _attention(tape, normal, structure)
    tape.release(normal)
    middle = _sum(tape, given, attended, "residual stream between attention and MLP")
    tape.release(attended)
    normal = _norm(tape, middle, Module.MLP_NORM, structure)
    branch = _mlp(tape, normal, structure)
    tape.release(normal)
    made = _sum(tape, middle, branch, "block output")
    tape.release(branch, middle)
    if weights is not None:
        tape.release(weights)
    return made


def _sum(tape: Tape, first: Value, second: Value, reason: str) -> Value:
    with tape.unless_constant(first, second):
        return op.add(tape, first, second, reason, Site("residual addition", LAYER))


def _norm(tape: Tape, given: Value, module: Module, structure: Structure, *, weight: Size = h, rows: Size = T) -> Value:
    name, place = _NORMS[module], Place(At.NORM, module)
    if structure.trained:
        return op.rms_norm(tape, given, name, NORM, weight=weight, rows=rows, place=place)
    with tape.unless_constant(given):
        return op.rms_norm(tape, given, name, NORM, weight=weight, rows=rows, frozen=True, place=place)


def _attention(tape: Tape, normal: Value, structure: Structure) -> Attended:
    bias = structure.block.attention_bias
    query, key, value = (
        _linear(tape, normal, name, structure, width=width, bias=bias)
        for name, width in ((Module.Q, q), (Module.K, k), (Module.V, v))
    )
    if structure.block.head_norms:
        bare = query, key
        query = _norm(tape, query, Module.Q_NORM, structure, weight=d, rows=T * a)
        key = _norm(tape, key, Module.K_NORM, structure, weight=d, rows=T * k_d)
        tape.release(*bare)
    turned = _rotary(tape, query, "queries"), _rotary(tape, key, "keys")
    tape.release(query, key)
    with tape.unless_constant(*turned, value):
        context, weights = structure.block.attend(tape, Heads(*turned, value, structure.block.grouped, structure.block.one_key))
    made = _linear(tape, context, Module.O, structure, width=h, reads=c, bias=structure.block.output_bias)
    tape.release(value, *turned, context)
    return Attended(made, weights)


def _rotary(tape: Tape, value: Value, name: str) -> Value:
    with tape.unless_constant(value):
        return op.rotary(tape, value, Site(name, ATTENTION))


def _mlp(tape: Tape, normal: Value, structure: Structure) -> Value:
    block, bias = structure.block, structure.block.mlp_bias
    gate = _linear(tape, normal, Module.GATE, structure, width=f, bias=bias)
    with tape.unless_constant(gate):
        active = activated(tape, gate, block.activation, f"{block.activation} of the gate", MLP)
    tape.release(gate)
    up = _linear(tape, normal, Module.UP, structure, width=f, bias=bias)
    with tape.unless_constant(active, up):
        reason = "gated product, input of the down projection"
        inner = op.product(tape, active, up, reason, Site("gated product", MLP))
    tape.release(active, up)
    made = _linear(tape, inner, Module.DOWN, structure, width=h, reads=f, bias=bias)
    tape.release(inner)
    return made


def _linear(
    tape: Tape, value: Value, module: Module, structure: Structure, *, width: Size, reads: Size = h, bias: bool = False
) -> Value:  # fmt: skip
    """A linear layer, frozen or not, and what is around it."""
    site = Site(_NAMES[module], LAYER, module, At.LINEAR)
    if structure.trained:
        return op.linear(tape, value, width, site, reads=reads, bias=bias)
    if structure.without is not None and structure.block.autocast:
        return _copied_linear(tape, value, width, site, reads=reads, bias=bias)
    if structure.quantize != "none":
        return _quantised(tape, value, module, structure, width=width, reads=reads)
    with tape.inside(module):
        return _adapted(tape, value, site, structure, width=width, reads=reads, bias=bias)


def _adapted(tape: Tape, value: Value, site: Site, structure: Structure, *, width: Size, reads: Size, bias: bool) -> Value:
    """A frozen linear layer and, where it has one, its adapter; peft adds up, scales and casts in operators of their own."""
    with tape.unless_constant(value):
        made = _frozen_linear(tape, value, width, site, bias=bias, keeps_input=structure.keeps_inputs)
    if not _has_adapter(site.module, structure):
        return made
    with tape.unless_constant(value):
        read = Site(f"input of the {site.name}'s adapter", LORA, site.module, At.ADAPTED)
        given = op.cast(tape, value, 4 if structure.block.autocast else e, read)
    return _plus_adapter(tape, given, made, site.module, width=width, reads=reads)


def _has_adapter(module: Module, structure: Structure) -> bool:
    return module.rpartition(".")[2] in structure.adapted


def _copied_linear(tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool) -> Value:
    """Autocast copies a frozen weight for every product, which saves the copy where a gradient has to pass."""
    wanted = (width, reads * width) if bias else (reads * width,)
    copies = [tape.make(Kind.WEIGHT_CASTS, f"16-bit copy of the frozen {site.name}", e * one, AUTOCAST) for one in wanted]
    with tape.unless_constant(value):
        given = op.cast(tape, value, e, Site(f"input of the {site.name}", site.source))
        made = op.tensor(tape, f"output of the {site.name}", e, T * width, site.source)
        if not bias:
            tape.products.append(made.store)

        tape.add(site.name, (made,), (copies[-1],), op.makes(f"gradient through the {site.name}", site.source, given))
    tape.drop(*copies)
    tape.release(given)
    return made


def _quantised(tape: Tape, value: Value, module: Module, structure: Structure, *, width: Size, reads: Size) -> Value:
    """A layer in four bits; peft leaves it to autocast to cast what its adapter reads."""
    adapted = _has_adapter(module, structure)
    made = quantised_linear(tape, value, _NAMES[module], structure.quantize, width=width, reads=reads, clone=adapted)
    if not adapted:
        return made
    tape.hold(value.store)
    return _plus_adapter(tape, value, made, module, width=width, reads=reads)


def _plus_adapter(tape: Tape, given: Value, made: Value, module: Module, *, width: Size, reads: Size) -> Value:
    name = _NAMES[module]
    inner = op.linear(tape, given, z, Site(f"{name}'s adapter, A", LORA, module, At.ADAPTER_A), reads=reads)
    outer = op.linear(tape, inner, width, Site(f"{name}'s adapter, B", LORA, module, At.ADAPTER_B), reads=z)
    tape.release(inner)
    site = Site(f"{name}'s adapter: scale", LORA, module, At.ADAPTED)
    scaled = op.scaled(tape, outer, f"output of the {name}'s adapter, scaled", site)
    total = op.add(tape, made, scaled, f"output of the {name} and its adapter", site._replace(name=f"{name} and its adapter"))
    tape.release(made, scaled, given)
    return total


def _frozen_linear(tape: Tape, value: Value, width: Size, site: Site, *, bias: bool, keeps_input: bool) -> Value:
    tape.save_weight()
    made = op.tensor(tape, f"output of the {site.name}", e, T * width, site.source, Tag(Role.OUTPUT, site.module))
    if not bias:
        tape.product(made.store)

    backward = op.makes(f"gradient through the {site.name}", site.source, value)
    tape.add(site.name, (made,), (value.store,) if keeps_input else (), backward, place=site.place)
    return made

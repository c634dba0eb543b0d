"""Blocks of gpt-oss: attention written out with a sink per head, and routed experts with biases and a clamped gate."""

from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.definition import SIZES, Around, ConfigKeys, Definition, Tables
from zeroplan.transformer.families.dispatched import dispatched, nought, returned_pairs, sorted_pairs
from zeroplan.transformer.families.norms import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.pairs import (
    EXPERTS,
    back_in_order,
    grouped_product,
    picked,
    sorted_experts,
    summed,
    weighted_outputs,
)
from zeroplan.transformer.families.parts import ATTENTION_MODULES, before_and_after
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params_gated import attention_of, of_experts, with_experts
from zeroplan.transformer.params_modules import Parameters, linear
from zeroplan.transformer.symbols import E, T, c, d, h, k, m, q, r, s, t, v, x

LAYER = "transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, GptOssDecoderLayer.forward"
ATTENTION = "transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, GptOssAttention.forward"
ROTARY = "transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, GptOssRotaryEmbedding.forward"
ROUTER = "transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, GptOssTopKRouter.forward"
GATE = "transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, GptOssExperts._apply_gate"
NORM = NormAs(one_plus=False, wide=True, source="transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, GptOssRMSNorm.forward")


def gpt_oss(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer; it holds the attention's weights by name until the experts are done."""
    normal = op.rms_norm(tape, given, "norm before attention", NORM, place=AT_ATTENTION_NORM)
    with tape.owning():  # of its sinks
        attended, weights = _attention(tape, normal, block)
    tape.release(normal)
    middle = op.add(tape, given, attended, "residual stream between attention and MLP", Site("residual addition", LAYER))
    tape.release(attended)
    normal = op.rms_norm(tape, middle, "norm before the MLP", NORM, place=AT_MLP_NORM)
    branch, scores = _routed(tape, normal, dispatch=block.dispatched)
    tape.release(normal)
    if weights is not None:
        tape.release(weights)
    made = op.add(tape, middle, branch, "block output", Site("residual addition", LAYER))
    tape.release(branch, middle, scores)
    return made


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    bias = block.attention_bias
    names = ((q, "q projection"), (k, "k projection"), (v, "v projection"))
    query, key, value = (op.linear(tape, normal, width, Site(name, ATTENTION), bias=bias) for width, name in names)
    turned = _turned(tape, query, "queries"), _turned(tape, key, "keys")
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*turned, value, block.grouped, block.one_key, joined=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION), reads=c, bias=bias)
    tape.release(value, *turned, context)
    return Attended(made, weights)


def _turned(tape: Tape, value: Value, name: str) -> Value:
    """Rotary positions half by half, which are then joined head by head; saves nothing of the block's."""
    dtype = op.wider(tape, value.dtype, r)
    halves = tape.make(op.TEMPORARY, f"{name}: both halves turned", dtype * value.shape, ATTENTION)
    made = op.tensor(tape, name, dtype, value.shape, ATTENTION)
    tape.drop(halves)
    beside = (f"gradients of the halves of the {name}", value.dtype * value.shape)
    backward = op.makes(f"gradient of the {name}", ATTENTION, value, beside=beside)
    tape.add(f"rotary positions of the {name}", (made,), (), backward, of=(value,))
    return made


# --- router and experts -------------------------------------------------------------------------------------------------


class _Routing(NamedTuple):
    """What says which token goes where."""

    indices: Store
    experts: Store
    """The expert of every pair of a token and one of its experts, sorted."""
    order: Store
    ends: Store
    """Where each expert's pairs end."""


def _routed(tape: Tape, normal: Value, *, dispatch: bool) -> tuple[Value, Value]:
    """Router and experts; returns the routing weights too, as the module does."""
    logits = op.linear(tape, normal, E, Site("router", ROUTER), bias=True)
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    chosen = picked(tape, logits, ("router: top-k logits", T * t), indices, ROUTER)
    scores = op.pointwise(
        tape, chosen, "router: softmax of the top-k logits", Site("router: softmax", ROUTER), saves_result=True
    )
    tape.release(chosen)
    with tape.inside(Module.EXPERTS), tape.owning():
        made = dispatched(tape, normal, scores, _own_experts) if dispatch else _experts(tape, normal, scores, indices)
    tape.drop(indices)
    tape.release(logits)
    return made, scores


def _experts(tape: Tape, normal: Value, scores: Value, indices: Store) -> Value:
    routing = _sorted(tape, indices)
    rows = tape.make(op.TENSOR, "token of each pair, int64", 8 * T * t, EXPERTS)
    selected = picked(tape, normal, ("tokens sorted by expert, input of the experts", T * t * h), rows, EXPERTS)
    tape.drop(rows)
    weights = picked(tape, scores, ("routing weights sorted by expert", T * t), routing.order, EXPERTS)
    counted = tape.make(op.TEMPORARY, "sorted experts as 32-bit numbers, and counts", 4 * T * t + 4 * E, EXPERTS)
    bias = _bias(tape, "gate and up", (m + m), routing)
    both = _grouped(tape, selected, bias, ("experts: gate and up projections", h, (m + m)), routing)
    gated = _gated(tape, both)
    tape.release(both)
    second_bias = _bias(tape, "down", h, routing)
    tape.release(bias)
    outputs = _grouped(tape, gated, second_bias, ("experts: down projection", m, h), routing)
    tape.release(gated)
    weighted = weighted_outputs(tape, outputs, weights, EXPERTS)
    unsorted = back_in_order(tape, weighted, "experts: weighted outputs in the order of tokens")
    made = summed(tape, unsorted)
    tape.drop(counted, routing.experts, routing.order, routing.ends)
    tape.release(second_bias, unsorted, outputs, weights, selected)
    return made


def _own_experts(tape: Tape, received: Value) -> Value:
    """Those of this rank, on the pairs that came for them."""
    selected, sorting = sorted_pairs(tape, received)
    routing = _Routing(sorting.order, sorting.theirs, sorting.order, sorting.ends)
    bias = _bias(tape, "gate and up", (m + m), routing, experts=x)
    masked = nought(tape, selected, sorting, "input of the experts", in_place=True)
    both = _grouped(tape, masked, bias, ("experts: gate and up projections", h, (m + m)), routing, experts=x)
    both = nought(tape, both, sorting, "output of experts: gate and up projections")
    gated = _gated(tape, both)
    tape.release(both)
    second_bias = _bias(tape, "down", h, routing, experts=x)
    tape.release(bias)
    outputs = _grouped(tape, gated, second_bias, ("experts: down projection", m, h), routing, experts=x)
    tape.release(gated)
    outputs = nought(tape, outputs, sorting, "output of experts: down projection")
    return returned_pairs(tape, outputs, selected, sorting, second_bias)


def _sorted(tape: Tape, indices: Store) -> _Routing:
    experts, order = sorted_experts(tape)
    return _Routing(indices, experts, order, tape.make(op.TENSOR, "ends of the experts' groups", 4 * E, EXPERTS))


def _bias(tape: Tape, name: str, width: Size, routing: _Routing, *, experts: Size = E) -> Value:
    """The bias of each pair's expert, a row for each pair."""
    made = op.tensor(tape, f"experts: bias of the {name} projection for each pair", r, T * t * width, EXPERTS)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.weight_gradient(experts * width, waits=experts == x)
        return []

    tape.add(f"experts: bias of the {name} projection", (made,), (routing.experts,), backward, of=None)
    return made


def _grouped(
    tape: Tape, value: Value, bias: Value, site: tuple[str, Size, Size], routing: _Routing, *, experts: Size = E
) -> Value:  # fmt: skip
    """``grouped_mm``, and a bias that is added in place."""
    product = grouped_product(tape, value, site, routing.ends, experts=experts)
    made = Value(product.store, product.dtype, product.shape)
    tape.add(f"{site[0]}: bias", (made,), (), op.passes(bias, product), of=(bias, product))
    return made


def _gated(tape: Tape, both: Value) -> Value:
    """``(clamp(up) + 1) * gate * sigmoid(alpha * gate)``, every second element a gate's."""
    gate, up = op.slices(tape, both, (T * t * m, T * t * m), Site("experts: gates and ups", GATE))
    limited = (
        _clamped(tape, gate, "experts: clamped gate", masks=1),
        _clamped(tape, up, "experts: clamped up", masks=2),
    )
    tape.hold(limited[0].store)
    steep = op.scaled(tape, limited[0], "experts: gate times alpha", Site("experts: alpha", GATE))
    open_ = op.pointwise(tape, steep, "experts: sigmoid of the gate", Site("experts: sigmoid", GATE), saves_result=True)
    tape.release(steep)
    glu = op.product(tape, limited[0], open_, "experts: gate times its sigmoid", Site("experts: gate", GATE))
    tape.release(open_)
    plus = op.raised(tape, limited[1], "experts: clamped up and one", Site("experts: one more", GATE))
    made = op.product(
        tape, plus, glu, "experts: gated product, input of the down projection", Site("experts: gated product", GATE)
    )
    tape.release(plus, *limited, glu, gate, up)
    return made


def _clamped(tape: Tape, value: Value, reason: str, *, masks: int) -> Value:
    """``clamp``; its backward says with booleans, one for each limit, where the value was between them."""
    made = op.tensor(tape, reason, value.dtype, value.shape, GATE)

    backward = op.makes(f"gradient through the {reason}", GATE, value, beside=("where no limit was met", masks * value.shape))
    tape.add(reason, (made,), (value.store,), backward, of=(value,))
    return made


# --- tensors, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    """One learned logit per head, which comes before the parameters of its children; experts as (experts, in, out), with biases."""
    hidden = model.hidden_size
    sinks = Parameter("self_attn.sinks", (model.num_attention_heads,))

    def routed(moe: MoeSpec) -> Parameters:
        width = moe.moe_intermediate_size
        return (
            *linear("mlp.router", hidden, moe.num_experts, bias=True),
            of_experts("mlp.experts.gate_up_proj", moe, hidden, 2 * width),
            of_experts("mlp.experts.gate_up_proj_bias", moe, 2 * width),
            of_experts("mlp.experts.down_proj", moe, width, hidden),
            of_experts("mlp.experts.down_proj_bias", moe, hidden),
        )

    return with_experts(model, (sinks, *attention_of(model, bias=model.attention_bias)), routed)


_CONFIG = ConfigKeys(
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "attention_bias": True,
    },
    window_every=2,
    fixed={"mlp_bias": True},
    required=(*SIZES, "num_experts", "num_experts_per_tok"),
    keys={"num_experts": ("num_local_experts", "num_experts")},
    counted_as={
        "output_router_logits": (False, "the loss of the router and its logits take some bytes per token and expert more"),
    },
    harmless={
        "numbers in a formula, which change no tensor": ("swiglu_alpha", "swiglu_limit"),
        "the loss of the router, which output_router_logits switches on": ("router_aux_loss_coef",),
        "its experts have an activation of their own": ("hidden_act",),
        "another name of num_experts_per_tok": ("experts_per_token",),
    },
)  # fmt: skip


def _tables(_model: ModelSpec) -> Tables:
    return Tables(r * s * d, "rotary cos and sin, of half a head", ROTARY)


_MODULES = before_and_after(ATTENTION_MODULES, ("mlp", "mlp.router", "mlp.experts"))
FAMILIES = {
    "gpt_oss": Definition(
        Program(gpt_oss, LAYER, NORM), _tensors, _CONFIG, expert_modules=_MODULES, tables=_tables, around=Around(masks=2)
    )
}

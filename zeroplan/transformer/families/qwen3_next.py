"""Qwen3-Next and Qwen3.5: three linear-attention blocks per gated full-attention block; routed experts, a gated shared expert.

Qwen2-MoE has the same experts behind Qwen2's attention.

Qwen3.5 has a matrix for each input of linear attention, and models with a plain MLP. ``delta_rule.py`` has the recurrence of
linear attention.
"""

from contextlib import nullcontext
from functools import partial

from zeroplan.expr import NOTHING
from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import LLAMA_NORM, Layer, gated_mlp, layer, rotated
from zeroplan.transformer.families.definition import Block, Definition, Program, Tables
from zeroplan.transformer.families.delta_rule import Given, gated_delta_rule
from zeroplan.transformer.families.experts import routed_experts, router
from zeroplan.transformer.families.keys import DIVIDED, SIZES, WITH_EXPERTS, WITH_NUM_EXPERTS, ConfigKeys
from zeroplan.transformer.families.linear_kernels import convolution
from zeroplan.transformer.families.linear_kernels import gated_delta_rule as gated_delta_rule_of_fla
from zeroplan.transformer.families.llama import attention
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, before_and_after, gated_modules
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Site, Store, Tape, Value
from zeroplan.transformer.parameters import KINDS_IN_TURN, Layout, Parameter
from zeroplan.transformer.params_gated import (
    alternating,
    attention_of,
    fused_experts,
    gated,
    head_norms,
    key_width,
    query_width,
    two_norms,
    with_experts,
)
from zeroplan.transformer.params_modules import Parameters, linear, rms_norm
from zeroplan.transformer.symbols import A, D, I, J, T, a, c, d, d_4, e, h, k, k_4, k_d, l, m, n, q, q_4, r, s, v

QWEN3_NEXT = "transformers 5.23, models/qwen3_next/modeling_qwen3_next.py"
LAYER = f"{QWEN3_NEXT}, Qwen3NextDecoderLayer.forward"
LINEAR = f"{QWEN3_NEXT}, Qwen3NextGatedDeltaNet.forward"
ATTENTION = f"{QWEN3_NEXT}, Qwen3NextAttention.forward"
MOE = f"{QWEN3_NEXT}, Qwen3NextSparseMoeBlock.forward"
QWEN3_5 = "transformers 5.23, models/qwen3_5/modeling_qwen3_5.py"
LINEAR_3_5 = f"{QWEN3_5}, Qwen3_5GatedDeltaNet.forward"
MLP = f"{QWEN3_5}, Qwen3_5MLP.forward"
QWEN2_MOE = "transformers 5.23, models/qwen2_moe/modeling_qwen2_moe.py"
ROTARY = f"{QWEN3_NEXT}, Qwen3NextRotaryEmbedding.forward"
NORM = Norm("one plus weight", f"{QWEN3_NEXT}, Qwen3NextRMSNorm.forward")
GATED_NORM = Norm("cast, then weighted", f"{QWEN3_NEXT}, Qwen3NextRMSNormGated.forward")
_ONE = NOTHING + 1


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    return (_LINEAR if block.chunks != "none" else _FULL).run(tape, given, block)


# --- linear attention --------------------------------------------------------------------------------------------------------


def _linear_attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run ``Qwen3NextGatedDeltaNet`` or Qwen3.5's. Variables hold the tokens without padding until it returns."""
    given = op.without_padding(tape, normal, LINEAR, padded=block.padded)
    made = (_of_two_projections if block.family == "qwen3_next" else _of_four_projections)(tape, given, block)
    tape.release(given)
    return made


def _of_two_projections(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run ``Qwen3NextGatedDeltaNet``. Its variables hold its projections until it returns."""
    wide = 2 * J * D + 2 * A * I
    joint = op.linear(tape, normal, wide, Site("joint projection of q, k, v and z", LINEAR, layer="in_proj_qkvz"))
    rates = op.linear(tape, normal, 2 * A, Site("joint projection of beta and decay", LINEAR, layer="in_proj_ba"))
    heads, keys = T * A * I, T * J * D
    query, key, value, gate = op.chunk(tape, joint, (keys, keys, heads, heads), Site("parts q, k, v and z", LINEAR))
    beta, decay = op.chunk(tape, rates, (T * A, T * A), Site("parts beta and decay", LINEAR))
    if block.grouped and not block.one_key:  # value heads that share one of several key heads are not contiguous
        together = (gate, "z"), (beta, "beta"), (decay, "decay")
        apart, (gate, beta, decay) = (gate, beta, decay), [_in_order(tape, one, name) for one, name in together]
        tape.release(*apart)
    flat = [_in_order(tape, one, name) for one, name in ((value, "values"), (query, "queries"), (key, "keys"))]
    tape.release(query, key, value)
    mixed = _mixed(tape, (flat[1], flat[2], flat[0]), block)
    tape.release(*flat)
    out = _by_the_rule(tape, mixed, beta, decay, gate, block)
    tape.release(joint, rates, gate, beta, decay)
    return Attended(out)


def _of_four_projections(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run ``Qwen3_5GatedDeltaNet``."""
    site = Site("joint projection of q, k and v", LINEAR_3_5, layer="in_proj_qkv")
    joint = op.linear(tape, normal, 2 * J * D + A * I, site)
    gate = op.linear(tape, normal, A * I, Site("projection to z", LINEAR_3_5, layer="in_proj_z"))
    beta, decay = (
        op.linear(tape, normal, A, Site(f"projection to {name}", LINEAR_3_5, layer=layer))
        for name, layer in (("beta", "in_proj_b"), ("decay", "in_proj_a"))
    )
    mixed = convolved(tape, joint, block)
    out = _by_the_rule(tape, mixed, beta, decay, gate, block)
    tape.release(gate, beta, decay)
    return Attended(out)


def _by_the_rule(tape: Tape, mixed: Value, beta: Value, decay: Value, gate: Value, block: Block) -> Value:
    """Run the recurrence, the gated norm and the output projection. It releases ``mixed``."""
    learnt, logarithm = learning_rate(tape, beta), decay_of(tape, decay)
    made, given = recurrence(tape, mixed, learnt, logarithm, block)
    flat = _flat(tape, gate, block)
    normed = gated_norm(tape, made, flat)
    tape.release(made, learnt, flat)
    out = op.linear(tape, normed, h, Site("output projection", LINEAR, layer="out_proj"), reads=A * I)
    tape.release(normed, mixed, *given, logarithm)
    return out


def learning_rate(tape: Tape, beta: Value) -> Value:
    """Return the sigmoid of beta, a number per token and head."""
    return op.pointwise(tape, beta, "beta", LINEAR, saves_result=True)


def recurrence(
    tape: Tape, mixed: Value, learnt: Value, logarithm: Value, block: Block
) -> tuple[Value, tuple[Value, ...]]:  # fmt: skip
    """Run the gated delta rule on the convolution's output; return its output, and the views of queries, keys and values."""
    given = op.chunk(tape, mixed, (T * J * D, T * J * D, T * A * I), Site("parts q, k and v", LINEAR))
    run = gated_delta_rule_of_fla if block.by_kernels else gated_delta_rule
    query, key, value = given
    return run(tape, Given(query, key, value, learnt, logarithm), block), tuple(given)


def _flat(tape: Tape, gate: Value, block: Block) -> Value:
    """Return the gate with a row per head: of several heads beside a single key in one projection a copy, else a view."""
    if block.family == "qwen3_next" and block.grouped and block.one_key:
        return _in_order(tape, gate, "z")
    tape.hold(gate.store)
    return gate


def _in_order(tape: Tape, value: Value, name: str) -> Value:
    """Return a contiguous copy, whose gradient is a view."""
    return op.run(tape, value, f"{name} of linear attention", LINEAR, dtype=e)


def _mixed(tape: Tape, parts: tuple[Value, ...], block: Block) -> Value:
    """Join queries, keys and values, then run the convolution."""
    wide = 2 * J * D + A * I
    joined = op.joined(tape, parts, "queries, keys and values, joined", T * wide, LINEAR)
    return convolved(tape, joined, block)


def convolved(tape: Tape, joined: Value, block: Block) -> Value:
    """Run the convolution and SiLU. It releases ``joined``."""
    if block.by_kernels:
        made = convolution(tape, joined, 2 * J * D + A * I, l, Site("convolution", LINEAR))
        tape.release(joined)
        return made
    bare = op.convolution(tape, joined, 2 * J * D + A * I, l, Site("convolution", LINEAR))
    made = op.pointwise(tape, bare, "silu of the convolution", LINEAR)
    tape.release(bare, joined)
    return made


def decay_of(tape: Tape, given: Value) -> Value:
    """Return ``-exp(A) * softplus(a + bias)`` in fp32: the logarithms of the states' decay rates."""
    wide = op.cast(tape, given, 4, Site("decay", LINEAR))
    raised = op.plus_bias(tape, wide, A, "decay and its bias", LINEAR, dtype=4)
    tape.release(wide)
    frozen = tape.mode.weights_frozen  # then autograd saves the negative rates alone
    words, size = ("rates of decay, negative", 4 * A) if frozen else ("rates of decay, and the negative", 8 * A)
    rates = tape.make(op.TENSOR, words, size, LINEAR)
    soft = op.pointwise(tape, raised, "softplus of the decay", LINEAR)
    tape.release(raised)
    saved = (rates,) if frozen else (soft.store, rates)
    unsummed = "gradient of the rates of decay, not yet summed", 4 * T * A, LINEAR
    backward = op.in_turn(op.trains(A, beside=unsummed), op.makes("gradient of the softplus", LINEAR, soft))
    made = op.run(tape, soft, "logarithm of the decay", LINEAR, saved=saved, backward=backward, weights="own")
    tape.drop(rates)
    tape.release(soft)
    return made


def gated_norm(tape: Tape, value: Value, gate: Value) -> Value:
    """Normalise each head, and multiply by SiLU of the gate in fp32. A variable holds the means until the module returns."""
    means = list[Store]()
    normal = op.norm(tape, value, "norm of linear attention", GATED_NORM, weight=I, rows=T * A, means=means)
    wide = op.cast(tape, gate, 4, Site("z of linear attention", LINEAR))
    active = op.pointwise(tape, wide, "silu of z", LINEAR)
    tape.release(wide)
    made = op.product(tape, normal, active, "norm of linear attention times its gate", LINEAR)
    tape.release(normal, active)
    narrow = op.cast(tape, made, e, Site("gated output of linear attention", LINEAR))
    tape.release(made)
    tape.drop(*means)
    return narrow


# --- full attention ----------------------------------------------------------------------------------------------------------


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    bias = block.attention_bias
    joint = op.linear(tape, normal, 2 * q, Site("joint projection of queries and gate", ATTENTION, Module.Q), bias=bias)
    bare, behind = op.chunk(tape, joint, (T * q, T * q), Site("queries and gate", ATTENTION))
    gate = _in_order(tape, behind, "gate")
    query = op.norm(tape, bare, "norm of the queries", NORM, weight=d, rows=T * a, place=Place(At.NORM, Module.Q_NORM))
    tape.release(joint, bare, behind)
    bare = op.linear(tape, normal, k, Site("k projection", ATTENTION, Module.K), bias=bias)
    key = op.norm(tape, bare, "norm of the keys", NORM, weight=d, rows=T * k_d, place=Place(At.NORM, Module.K_NORM))
    tape.release(bare)
    value = op.linear(tape, normal, v, Site("v projection", ATTENTION, Module.V), bias=bias)
    with_positions = rotated(tape, query, key, block, source=ATTENTION, partly=(T * q_4, T * k_4, d_4))
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*with_positions, value, block.grouped, block.one_key, joined=True))
    opened = op.pointwise(tape, gate, "sigmoid of the gate", ATTENTION, saves_result=True)
    gated_context = op.product(tape, context, opened, "gated attention, input of the output projection", ATTENTION)
    tape.release(context, opened)
    site = Site("output projection", ATTENTION, Module.O)
    made = op.linear(tape, gated_context, h, site, reads=c, bias=block.output_bias)
    tape.release(gated_context, gate, value, *with_positions)
    return Attended(made, weights)


# --- experts -----------------------------------------------------------------------------------------------------------------


def _moe(tape: Tape, normal: Value, block: Block) -> Value:
    """Run the MLP, or the module of the shared and the routed experts, which DeepSpeed gathers as one in Qwen2-MoE."""
    if not block.routed:
        return gated_mlp(tape, normal, block, MLP)
    with tape.owning(leaf=True) if block.family == "qwen2_moe" else nullcontext():
        return _routed_and_shared(tape, normal, block)


def _routed_and_shared(tape: Tape, normal: Value, block: Block) -> Value:
    """Run the gated shared expert and the routed experts. The routing tensors live until the module returns."""
    flat = op.view(tape, normal, Site("experts: their input", MOE))
    shared = gated_mlp(tape, flat, block, MOE, width=n * m, prefix="shared expert: ")
    routing = router(tape, flat, narrowed=True, divided=block.family != "qwen2_moe")
    routed = routed_experts(tape, flat, routing.weights, block)
    bare = op.linear(tape, flat, _ONE, Site("gate of the shared expert", MOE, layer="shared_expert_gate"))
    gate = op.pointwise(tape, bare, "gate of the shared expert", MOE, saves_result=True)
    tape.release(bare, flat)
    weighted = _weighted(tape, shared, gate)
    tape.release(shared, gate)
    made = op.add(tape, routed, weighted, "output of routed and shared experts", MOE)
    tape.drop(routing.indices)
    tape.release(routed, weighted, routing.weights, routing.logits)
    return made


def _weighted(tape: Tape, shared: Value, gate: Value) -> Value:
    """Multiply the shared expert's output by its gate, one number per token. Autograd saves both."""
    return op.times_per_row(tape, shared, gate, "output of the shared expert, gated", e, MOE)


_LINEAR = Layer(NORM, _linear_attention, _moe, LAYER)
_FULL = Layer(NORM, _attention, _moe, LAYER)

# --- parameters, and the keys of config.json ------------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    mlp = gated("mlp", model, model.intermediate_size) if model.moe is None else _with_shared_expert(model, model.moe)
    after = (*mlp, *two_norms(model))
    return alternating(model, KINDS_IN_TURN[1], (*_of_linear(model), *after), (*_of_full(model), *after))


def _of_qwen2(model: ModelSpec) -> Layout:
    attention = attention_of(model, bias=model.attention_bias, output_bias=False)
    return with_experts(model, attention, partial(_with_shared_expert, model))


def _with_shared_expert(model: ModelSpec, moe: MoeSpec) -> Parameters:
    return (
        *linear("mlp.gate", model.hidden_size, moe.num_experts),
        *fused_experts(model, moe),
        *gated("mlp.shared_expert", model, moe.num_shared_experts * moe.moe_intermediate_size),
        *linear("mlp.shared_expert_gate", model.hidden_size, 1),
    )


def _of_linear(model: ModelSpec) -> Parameters:
    assert model.linear is not None  # noqa: S101  the family always has it
    own, hidden = model.linear, model.hidden_size
    keys, values = own.num_key_heads * own.key_head_dim, own.num_value_heads * own.value_head_dim
    q_k_v, z, rates = 2 * keys + values, values, own.num_value_heads
    joint = {"in_proj_qkvz": q_k_v + z, "in_proj_ba": 2 * rates}
    apart = {"in_proj_qkv": q_k_v, "in_proj_z": z, "in_proj_b": rates, "in_proj_a": rates}
    matrices = (joint if model.family == "qwen3_next" else apart).items()
    before = tuple([one for name, width in matrices for one in linear(f"linear_attn.{name}", hidden, width)])
    after = (*rms_norm("linear_attn.norm", own.value_head_dim), *linear("linear_attn.out_proj", values, hidden))
    return (
        Parameter("linear_attn.dt_bias", (own.num_value_heads,)),
        Parameter("linear_attn.A_log", (own.num_value_heads,)),
        Parameter("linear_attn.conv1d.weight", (q_k_v, 1, own.conv_kernel_dim), autocast=True),
        *(before if model.family == "qwen3_next" else after),
        *(after if model.family == "qwen3_next" else before),
    )


def _of_full(model: ModelSpec) -> Parameters:
    """Return the parameters of full attention. The projection of the queries also makes the gate."""
    hidden, query, key, bias = model.hidden_size, query_width(model), key_width(model), model.attention_bias
    return (
        *linear("self_attn.q_proj", hidden, 2 * query, bias=bias),
        *linear("self_attn.k_proj", hidden, key, bias=bias),
        *linear("self_attn.v_proj", hidden, key, bias=bias),
        *linear("self_attn.o_proj", query, hidden, bias=bias),
        *head_norms(model),
    )


_TABLES = Tables(2 * r * s * d_4, "rotary cos and sin, of a quarter of each head", ROTARY)
_TABLES_OF_3_5 = Tables(
    2 * r * T * d_4,
    "rotary cos and sin of each sequence, of a quarter of each head",
    f"{QWEN3_5}, Qwen3_5TextRotaryEmbedding.forward",
)
_LINEAR_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_QWEN2 = WITH_NUM_EXPERTS._replace(
    required=(*WITH_EXPERTS.required, "moe_intermediate_size", "shared_expert_intermediate_size"),
    read=("shared_expert_intermediate_size",),
    optional_window=True,
).plus(
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 16, "attention_bias": True},
    fixed={"decoder_sparse_step": 1, "mlp_bias": False},
    keys={"attention_bias": ("qkv_bias",)},
    only={"mlp_only_layers": ([],), "norm_topk_prob": (False,), "use_sliding_window": (False,)},
)
_CONFIG = _QWEN2._replace(
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4},
    required=(*_QWEN2.required, *_LINEAR_SIZES),
    keys=WITH_NUM_EXPERTS.keys,
    only={"mlp_only_layers": ([],), "full_attention_interval": (4,), "partial_rotary_factor": (0.25,)},
    optional_window=False,
).plus(counted_as=DIVIDED)
_OF_3_5 = ConfigKeys(
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "head_dim": 256, "linear_conv_kernel_dim": 4},
    fixed={"mlp_bias": False},
    required=(*SIZES, *_LINEAR_SIZES),
    only={
        "full_attention_interval": (4,), "partial_rotary_factor": (0.25,), "attn_output_gate": (True,), "mlp_only_layers": ([],),
    },
    harmless={
        "multi-token prediction, which transformers does not build": (
            "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_mtp_layers", "num_nextn_predict_layers",
        ),
        "of the inference engine's states": ("mamba_ssm_dtype",),
    },
)  # fmt: skip
_MOE_OF_3_5 = _OF_3_5._replace(
    required=(*WITH_EXPERTS.required, *_LINEAR_SIZES, "shared_expert_intermediate_size"),
    counted_as=WITH_EXPERTS.counted_as,
    read=("shared_expert_intermediate_size",),
).plus(
    defaults={"num_key_value_heads": 2},
    keys={**WITH_NUM_EXPERTS.keys, "intermediate_size": ("moe_intermediate_size",)},
    harmless=WITH_EXPERTS.harmless,
)
_FULL_MODULES = (
    "self_attn", "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_proj", "self_attn.k_norm", "self_attn.v_proj",
    "self_attn.o_proj",
)  # fmt: skip
_MODULES = (
    "linear_attn", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.norm", "linear_attn.out_proj", *_FULL_MODULES,
)  # fmt: skip
_MODULES_OF_3_5 = (
    "linear_attn", *(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")), "linear_attn.norm", "linear_attn.out_proj",
    *_FULL_MODULES,
)  # fmt: skip
_EXPERTS = (
    "mlp", *gated_modules("mlp.shared_expert"), "mlp.gate", "mlp.experts", "mlp.experts.act_fn", "mlp.shared_expert_gate",
)  # fmt: skip
_PROGRAM = Program(_layer, LAYER, NORM)
_AFTER = "post_attention_layernorm"
FAMILIES = {
    "qwen2_moe": Definition(
        layer(Layer(LLAMA_NORM, attention, _moe, f"{QWEN2_MOE}, Qwen2MoeDecoderLayer.forward")), _of_qwen2, _QWEN2,
        expert_modules=before_and_after(ATTENTION_MODULES, _EXPERTS),
    ),
    "qwen3_next": Definition(
        _PROGRAM, _tensors, _CONFIG, expert_modules=("input_layernorm", *_MODULES, _AFTER, *_EXPERTS), tables=_TABLES
    ),
    "qwen3_5_text": Definition(
        _PROGRAM, _tensors, _OF_3_5, ("input_layernorm", *_MODULES_OF_3_5, _AFTER, *gated_modules("mlp")), tables=_TABLES_OF_3_5
    ),
    "qwen3_5_moe_text": Definition(
        _PROGRAM, _tensors, _MOE_OF_3_5, expert_modules=("input_layernorm", *_MODULES_OF_3_5, _AFTER, *_EXPERTS),
        tables=_TABLES_OF_3_5,
    ),
}  # fmt: skip

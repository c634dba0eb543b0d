"""Kimi Linear: blocks of Kimi Delta Attention, and of latent attention without positions; DeepSeek-V3's MLP and experts.

``kimi_delta.py`` has the recurrence, ``deepseek.py`` the rest of latent attention.
"""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import LLAMA_NORM, Layer, layer
from zeroplan.transformer.families.deepseek import (
    CONFIG,
    EXPERT_MODULES,
    LATENT_MODULES,
    attend_of,
    attention_parameters,
    expanded,
    mlp,
    norm_of,
    queries_of,
    routed_and_shared,
)
from zeroplan.transformer.families.definition import Block, Definition
from zeroplan.transformer.families.delta_rule import Given
from zeroplan.transformer.families.keys import SIZES
from zeroplan.transformer.families.kimi_delta import kimi_delta_rule
from zeroplan.transformer.families.kimi_kernels import kimi_delta_rule as kimi_delta_rule_of_fla
from zeroplan.transformer.families.linear_kernels import convolution
from zeroplan.transformer.families.module_names import gated_modules
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params_gated import gated, patterned, two_norms
from zeroplan.transformer.params_modules import Parameters, linear, rms_norm
from zeroplan.transformer.symbols import A, D, T, c, e, h, l, o, w

KIMI = "transformers 5.23, models/kimi_linear/modeling_kimi_linear.py"
DELTA = f"{KIMI}, KimiLinearDeltaAttention.forward"
GATE = f"{KIMI}, KimiLinearForgetGate.forward"
LATENT = f"{KIMI}, KimiLinearAttention.forward"
GATED_NORM = Norm("copied weight, then cast", f"{KIMI}, KimiLinearRMSNormGated.forward")

#: Width, and elements, of all heads of linear attention.
INNER, ROWS = A * D, T * A * D


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    return _latent_attention(tape, normal, block) if block.chunks == "none" else Attended(_delta_attention(tape, normal, block))


# --- Kimi Delta Attention ----------------------------------------------------------------------------------------------------


def _delta_attention(tape: Tape, normal: Value, block: Block) -> Value:
    """Run ``KimiLinearDeltaAttention``. Variables hold what goes into the recurrence until it returns."""
    given = op.without_padding(tape, normal, DELTA, padded=block.padded)
    mixed = _mixed(tape, given, block)
    query, key, value = op.chunk(tape, mixed, (ROWS,) * 3, Site("parts q, k and v", DELTA))
    decay = _decay(tape, given)
    bare = op.linear(tape, given, A, Site("projection to beta", DELTA, layer="b_proj"))
    beta = op.pointwise(tape, bare, "beta", DELTA, saves_result=True)
    tape.release(bare)
    inputs = Given(query, key, value, beta, decay)
    made = kimi_delta_rule_of_fla(tape, inputs) if block.by_kernels else kimi_delta_rule(tape, inputs, block)
    narrow = op.linear(tape, given, D, Site("first projection to the gate", DELTA, layer="g_a_proj"))
    gate = op.linear(tape, narrow, INNER, Site("second projection to the gate", DELTA, layer="g_b_proj"), reads=D)
    tape.release(narrow)
    normed = _gated_norm(tape, made, gate)
    out = op.linear(tape, normed, h, Site("output projection", DELTA, layer="o_proj"), reads=INNER)
    tape.release(normed, made, gate, beta, decay, query, key, value, mixed, given)
    return out


def _mixed(tape: Tape, given: Value, block: Block) -> Value:
    """Join queries, keys and values, run the convolution and SiLU, and cut the result, which changes nothing."""
    parts = tuple(
        op.linear(tape, given, INNER, Site(f"{name} projection of linear attention", DELTA, layer=f"{name}_proj"))
        for name in "qkv"
    )
    joined = op.joined(tape, parts, "queries, keys and values, joined", T * (INNER + INNER + INNER), DELTA)
    tape.release(*parts)
    made = _convolved(tape, joined, block)
    (cut,) = op.slices(tape, made, (made.shape,), Site("silu of the convolution, cut", DELTA))
    tape.release(made)
    return cut


def _convolved(tape: Tape, joined: Value, block: Block) -> Value:
    """Run the convolution and SiLU. It releases ``joined``."""
    width, site = INNER + INNER + INNER, Site("convolution", DELTA)
    if block.by_kernels:  # the gradient is that of a cut, zeros in the order of dimensions
        made = convolution(tape, joined, width, l, site, in_order=False)
    else:
        bare = op.convolution(tape, joined, width, l, site)
        made = op.pointwise(tape, bare, "silu of the convolution", DELTA)
        tape.release(bare)
    tape.release(joined)
    return made


def _decay(tape: Tape, given: Value) -> Value:
    """Return ``-exp(A) * softplus(a + bias)`` in fp32: the logarithm of each channel's decay."""
    narrow = op.linear(tape, given, D, Site("first projection to the decay", GATE, layer="f_a_proj"))
    bare = op.linear(tape, narrow, INNER, Site("second projection to the decay", GATE, layer="f_b_proj"), reads=D)
    tape.release(narrow)
    wide = op.cast(tape, bare, 4, Site("decay", GATE))
    raised = op.plus_bias(tape, wide, INNER, "decay and its bias", GATE, dtype=4)
    tape.release(wide)
    soft = _softplus(tape, raised)
    rates = tape.make(op.TENSOR, "rates of decay, and the negative", 8 * A, GATE)
    unsummed = "gradient of the rates of decay, not yet summed", 4 * ROWS, GATE
    backward = op.in_turn(op.trains(A, beside=unsummed), op.makes("gradient of the softplus", GATE, soft))
    made = op.run(tape, soft, "logarithm of the decay", GATE, saved=(soft.store, rates), backward=backward, weights="own")
    tape.drop(rates)
    tape.release(soft, raised, bare)
    return made


def _softplus(tape: Tape, value: Value) -> Value:
    """``where(x > 20, x, log(1 + exp(x)))``."""
    large = tape.make(op.TENSOR, "where the decay is large, booleans", ROWS, GATE)
    grown = op.pointwise(tape, value, "exponential of the decay", GATE, saves_result=True)
    raised = op.plus_constant(tape, grown, "exponential of the decay, plus one", GATE)
    tape.release(grown)
    small = op.pointwise(tape, raised, "logarithm of that", GATE)
    tape.release(raised)
    made = op.run(
        tape, (value, small), "softplus of the decay", GATE, saved=(large,),
        gradient="gradient of one side of the softplus",
    )  # fmt: skip
    tape.release(small)
    tape.drop(large)
    return made


def _gated_norm(tape: Tape, value: Value, gate: Value) -> Value:
    """Normalise each head, and multiply by the sigmoid of the gate, all in fp32."""
    wide = op.cast(tape, value, 4, Site("output of linear attention", DELTA))
    normal = op.norm(tape, wide, "norm of linear attention", GATED_NORM, weight=D, rows=T * A)
    tape.release(wide)
    wide = op.cast(tape, gate, 4, Site("gate of linear attention", DELTA))
    opened = op.pointwise(tape, wide, "sigmoid of the gate", DELTA, saves_result=True)
    made = op.product(tape, normal, opened, "norm of linear attention times its gate", DELTA)
    tape.release(normal, wide, opened)
    narrow = op.cast(tape, made, e, Site("gated output of linear attention", DELTA))
    tape.release(made)
    return narrow


# --- latent attention without positions --------------------------------------------------------------------------------------


def _latent_attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run ``KimiLinearAttention``. Its variables keep every intermediate tensor to its end."""
    query, latent_queries = queries_of(tape, normal, block)
    tape.release(*latent_queries)
    name = "first projection of keys and values"
    compressed = op.linear(tape, normal, w + o, Site(name, LATENT, layer="kv_a_proj_with_mqa"), bias=block.attention_bias)
    latent, shared_key = op.chunk(tape, compressed, (T * w, T * o), Site("latent and shared part of the keys", LATENT))
    latent_norm = norm_of(tape, latent, "norm of the latent", w)
    tape.release(latent)
    key, value = expanded(tape, latent_norm, shared_key)
    attend = attend_of(block, queries_joined=False)
    context, weights = attend(tape, Heads(query, key, value, grouped=False, one_key=False, joint=True))
    made = op.linear(tape, context, h, Site("output projection", LATENT, layer="o_proj"), reads=c, bias=block.attention_bias)
    tape.release(compressed, shared_key, latent_norm, query, key, value, context)
    return Attended(made, weights)


# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    assert model.moe is not None  # noqa: S101  the family always has it
    delta, latent, both = _of_delta(model), attention_parameters(model), two_norms(model)
    routed, dense = routed_and_shared(model, model.moe), gated("mlp", model, model.intermediate_size)
    return patterned(
        model,
        {
            "linear": (*delta, *routed, *both), "dense_linear": (*delta, *dense, *both),
            "full": (*latent, *routed, *both), "dense": (*latent, *dense, *both),
        },
    )  # fmt: skip


def _of_delta(model: ModelSpec) -> Parameters:
    assert model.linear is not None  # noqa: S101  the family always has it
    own, hidden = model.linear, model.hidden_size
    heads, width = own.num_value_heads, own.value_head_dim
    inner = heads * width
    return (
        *(one for name in "qkv" for one in linear(f"self_attn.{name}_proj", hidden, inner)),
        Parameter("self_attn.conv1d.weight", (3 * inner, 1, own.conv_kernel_dim), autocast=True),
        Parameter("self_attn.forget_gate.dt_bias", (inner,)),
        Parameter("self_attn.forget_gate.A_log", (1, 1, heads, 1)),
        *linear("self_attn.forget_gate.f_a_proj", hidden, width),
        *linear("self_attn.forget_gate.f_b_proj", width, inner),
        *linear("self_attn.b_proj", hidden, heads),
        *linear("self_attn.g_a_proj", hidden, width),
        *linear("self_attn.g_b_proj", width, inner),
        *rms_norm("self_attn.o_norm", width),
        *linear("self_attn.o_proj", inner, hidden),
    )


_CONFIG = CONFIG._replace(
    defaults={"max_position_embeddings": 1048576, "num_key_value_heads": 32, "linear_conv_kernel_dim": 4},
    fixed={**CONFIG.fixed, "tie_word_embeddings": False},
    required=(
        *SIZES, "num_experts", "num_experts_per_tok", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "moe_intermediate_size", "num_shared_experts",
    ),
    keys={
        "num_experts": ("num_experts", "num_local_experts"),
        "num_experts_per_tok": ("num_experts_per_token", "num_experts_per_tok"),
        "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
        "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
        "num_dense_layers": ("first_k_dense_replace",),
        "layer_pattern": ("layer_types",),
        "linear_num_key_heads": ("linear_num_heads",), "linear_num_value_heads": ("linear_num_heads",),
        "linear_key_head_dim": ("linear_head_dim",), "linear_value_head_dim": ("linear_head_dim",),
    },
    only={
        "moe_router_activation_func": ("sigmoid",), "moe_renormalize": (True,), "norm_topk_prob": (True,), "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
    },
    read=("linear_attn_config", "mlp_layer_types", "linear_num_heads", "linear_head_dim"),
    harmless={
        **{why: keys for why, keys in CONFIG.harmless.items() if "own code" not in why},
        "groups of experts, which mask scores of some bytes per token": (
            "num_expert_group", "n_group", "topk_group", "use_grouped_topk",
        ),
        "read by no code of the class": ("pretraining_tp", "attn_type", "moe_router_enable_expert_bias", "q_head_dim"),
    },
)  # fmt: skip
_DELTA_MODULES = (
    *(f"self_attn.{name}_proj" for name in "qkv"), "self_attn.forget_gate", "self_attn.forget_gate.f_a_proj",
    "self_attn.forget_gate.f_b_proj", "self_attn.b_proj", "self_attn.g_a_proj", "self_attn.g_b_proj", "self_attn.o_norm",
)  # fmt: skip
_BEFORE = (
    "input_layernorm", "self_attn", *_DELTA_MODULES, *(name for name in LATENT_MODULES if name not in _DELTA_MODULES),
    "post_attention_layernorm",
)  # fmt: skip
FAMILIES = {
    "kimi_linear": Definition(
        layer(Layer(LLAMA_NORM, _attention, mlp, f"{KIMI}, KimiLinearDecoderLayer.forward")), _tensors, _CONFIG,
        (*_BEFORE, *gated_modules("mlp")), (*_BEFORE, *EXPERT_MODULES), tables=None,
    )
}  # fmt: skip

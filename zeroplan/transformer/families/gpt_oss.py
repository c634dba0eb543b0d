"""gpt-oss: eager attention with a learned sink score per head, and routed experts with biases and a clamped gate."""

from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import Attention, Rotated
from zeroplan.transformer.families.definition import Around, Block, Definition, Program, Tables
from zeroplan.transformer.families.experts import Computing, picked, routed_experts
from zeroplan.transformer.families.keys import WITH_EXPERTS
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, before_and_after
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.tape import P_own, Site, Tape, Value
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params_gated import attention_of, of_experts, with_experts
from zeroplan.transformer.params_modules import Parameters, linear
from zeroplan.transformer.symbols import E, T, d, m, r, s, t

GPT_OSS = "transformers 5.23, models/gpt_oss/modeling_gpt_oss.py"
LAYER = f"{GPT_OSS}, GptOssDecoderLayer.forward"
ATTENTION = f"{GPT_OSS}, GptOssAttention.forward"
ROTARY = f"{GPT_OSS}, GptOssRotaryEmbedding.forward"
ROUTER = f"{GPT_OSS}, GptOssTopKRouter.forward"
GATE = f"{GPT_OSS}, GptOssExperts._apply_gate"
NORM = Norm("weighted, then cast", f"{GPT_OSS}, GptOssRMSNorm.forward")


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one decoder layer. The attention weights live until the experts are done, the routing weights until the layer returns."""
    normal = op.norm(tape, given, "norm before attention", NORM, place=AT_ATTENTION_NORM)
    tape.kernel_output(normal.store, of="inputs-kept")
    with tape.owning():  # the module of its sinks
        attended, weights = _ATTENTION.run(tape, normal, block)
    tape.release(normal)
    middle = op.add(tape, given, attended, "residual stream between attention and MLP", LAYER)
    tape.release(attended)
    normal = op.norm(tape, middle, "norm before the MLP", NORM, place=AT_MLP_NORM)
    tape.kernel_output(middle.store, normal.store, of="inputs-kept")
    branch, scores = _routed(tape, normal, block)
    tape.release(normal, weights)
    made = op.add(tape, middle, branch, "block output", LAYER)
    tape.release(branch, middle, scores)
    return made


def _rotated(tape: Tape, query: Value, key: Value, _block: Block) -> Rotated:
    return _one_rotated(tape, query, "queries"), _one_rotated(tape, key, "keys")


def _one_rotated(tape: Tape, value: Value, name: str) -> Value:
    """Apply rotary positions to each half, and join the halves head by head. Autograd saves nothing of the block."""
    dtype = op.wider(tape, value.dtype, r)
    return op.run(
        tape, value, name, ATTENTION, dtype=dtype,
        passing=((f"{name}: both halves rotated", dtype * value.shape),), gradient=f"gradient of the {name}",
        beside=(f"gradients of the halves of the {name}", value.dtype * value.shape),
    )  # fmt: skip


_ATTENTION = Attention(ATTENTION, rotated=_rotated, joined=True)

# --- router and experts ------------------------------------------------------------------------------------------------------


def _routed(tape: Tape, normal: Value, block: Block) -> tuple[Value, Value]:
    """Run router and experts. Return their output and the routing weights, as the module does."""
    logits = op.linear(tape, normal, E, Site("router", ROUTER), bias=True)
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    chosen = picked(tape, logits, ("router: top-k logits", T * t), indices, ROUTER)
    tape.kernel_output(logits.store, chosen.store, indices, of="router-kept")
    reason = "router: softmax of the top-k logits"
    scores = op.pointwise(tape, chosen, reason, ROUTER, saves_result=True)
    tape.release(chosen)
    made = routed_experts(tape, normal, scores, block, _COMPUTING)
    tape.drop(indices)
    tape.release(logits)
    return made, scores


def _gate(tape: Tape, both: Value) -> Value:
    """``(clamp(up) + 1) * gate * sigmoid(alpha * gate)``. Gates are every second element of ``both``, which it releases."""
    gate, up = op.slices(tape, both, (P_own * m, P_own * m), Site("experts: gates and ups", GATE))
    gate_in_limits = _clamped(tape, gate, "experts: clamped gate", masks=1)
    up_in_limits = _clamped(tape, up, "experts: clamped up", masks=2)
    steep = op.multiplied(tape, gate_in_limits, "experts: gate times alpha", GATE)
    open_ = op.pointwise(tape, steep, "experts: sigmoid of the gate", GATE, saves_result=True)
    tape.release(steep)
    glu = op.product(tape, gate_in_limits, open_, "experts: gate times its sigmoid", GATE)
    tape.release(open_)
    plus = op.plus_constant(tape, up_in_limits, "experts: clamped up and one", GATE)
    reason = "experts: gated product, input of the down projection"
    made = op.product(tape, plus, glu, reason, GATE)
    tape.release(plus, gate_in_limits, up_in_limits, glu, gate, up, both)
    return made


def _clamped(tape: Tape, value: Value, reason: str, *, masks: int) -> Value:
    """``clamp``. Autograd saves its input; its backward makes a boolean mask for each limit."""
    beside = ("where no limit was met", masks * value.shape)
    return op.run(tape, value, reason, GATE, saved=(value.store,), gradient=f"gradient through the {reason}", beside=beside)


_COMPUTING = Computing(_gate, biases=True, transposed=True)

# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    """Return the layout. Sinks precede attention's projections; experts are (experts, in, out), with biases."""
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


_CONFIG = WITH_EXPERTS._replace(window_every=2).plus(
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "attention_bias": True,
    },
    fixed={"mlp_bias": True},
    harmless={
        "numbers in a formula, which change no tensor": ("swiglu_alpha", "swiglu_limit"),
        "its experts have an activation of their own": ("hidden_act",),
        "another name of num_experts_per_tok": ("experts_per_token",),
    },
)  # fmt: skip


_MODULES = before_and_after(ATTENTION_MODULES, ("mlp", "mlp.router", "mlp.experts"))
FAMILIES = {
    "gpt_oss": Definition(
        Program(_layer, LAYER, NORM), _tensors, _CONFIG, expert_modules=_MODULES,
        tables=Tables(r * s * d, "rotary cos and sin, of half a head", ROTARY), around=Around(masks=2),
    )
}  # fmt: skip

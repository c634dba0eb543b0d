"""ERNIE 4.5: Llama with rotary positions on neighbouring elements, in fp32. Larger models have experts, with a router in fp32.

The bias by which the router chooses experts is a parameter without a gradient. It counts as a trained one: 12 bytes per expert and
layer too many with AdamW.
"""

from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import LLAMA_NORM, Attention, Rotated, gated_mlp, layer, layer_of
from zeroplan.transformer.families.deepseek import EXPERT_MODULES
from zeroplan.transformer.families.definition import Block, Definition, Tables
from zeroplan.transformer.families.experts import Routing, logits_in_32_bits, picked, routed_experts
from zeroplan.transformer.families.glm4 import Half, exchanged_pairs, times_table
from zeroplan.transformer.families.keys import WITH_EXPERTS, ConfigKeys
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, before_and_after
from zeroplan.transformer.families.olmo2 import CAST
from zeroplan.transformer.families.tape import Site, Store, Tape, Value, Width
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params_gated import attention_of, dense, fused_experts, gated, with_experts
from zeroplan.transformer.params_modules import Parameters
from zeroplan.transformer.symbols import E, T, d, e, h, k_2, m, n, q_2, r, s, t

ERNIE = "transformers 5.23, models/ernie4_5/modeling_ernie4_5.py"
ROTARY = f"{ERNIE}, apply_rotary_pos_emb"
MODEL = "transformers 5.23, models/ernie4_5_moe/modeling_ernie4_5_moe.py"
MOE = f"{MODEL}, Ernie4_5_MoeSparseMoeBlock.forward"
ROUTER = f"{MODEL}, Ernie4_5_MoeTopKRouter.forward"


def _rotated(tape: Tape, query: Value, key: Value, block: Block) -> Rotated:
    """Return rotated queries and keys. The tables are copied, each angle twice, and autograd saves the copies."""
    tables: Width = e if block.casts_inputs else 4
    if block.casts_inputs:
        tape.history.input_copies += (tape.make(op.TENSOR, "rotary cos and sin, cast", 2 * e * s * d, CAST),)
    cos, sin = (tape.make(op.TENSOR, f"{name} of each pair", tables * s * d, ROTARY) for name in ("cos", "sin"))
    halves = (query, Half("queries", q_2)), (key, Half("keys", k_2))
    with_positions = [_with_positions(tape, one, cos, sin, half) for one, half in halves]
    made = [
        op.cast(tape, wide, bare.dtype, Site(f"rotated {half.name}", ROTARY))
        for wide, (bare, half) in zip(with_positions, halves, strict=True)
    ]
    tape.drop(cos, sin)
    tape.release(*with_positions)
    return made[0], made[1]


def _with_positions(tape: Tape, value: Value, cos: Store, sin: Store, of: Half) -> Value:
    """``x·cos + rotate_half(x)·sin`` of whole heads, with both factors cast to fp32."""
    wide = op.cast(tape, value, 4, Site(of.name, ROTARY))
    direct = times_table(tape, wide, cos, f"{of.name} times cos")
    tape.release(wide)
    bare = exchanged_pairs(tape, value, of)
    exchanged = op.cast(tape, bare, 4, Site(f"{of.name}, pairs exchanged", ROTARY))
    tape.release(bare)
    times_sin = times_table(tape, exchanged, sin, f"{of.name} times sin")
    tape.release(exchanged)
    made = op.add(tape, direct, times_sin, f"{of.name}, rotated", ROTARY)
    tape.release(direct, times_sin)
    return made


# --- experts -----------------------------------------------------------------------------------------------------------------


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    """Run the gated MLP of the first layers, or shared experts and then routed ones."""
    if not block.routed:
        return gated_mlp(tape, normal, block, f"{MODEL}, Ernie4_5_MoeMLP.forward")
    flat = op.view(tape, normal, Site("experts: their input", MOE))
    shared = gated_mlp(tape, flat, block, MOE, width=n * m, prefix="shared experts: ") if block.shares else None
    with tape.owning(leaf=True):
        routing = _router(tape, flat, block)
    made = routed = routed_experts(tape, flat, routing.weights, block)
    if shared is not None:
        made = op.add(tape, routed, shared, "output of routed and shared experts", MOE)
        tape.release(routed, shared)
    tape.drop(routing.indices)
    tape.release(flat, routing.weights, routing.logits)
    return made


def _router(tape: Tape, flat: Value, block: Block) -> Routing:
    """Run the router in fp32, outside autocast. The weights of a token's experts are divided by their sum, in a new tensor."""
    if block.wide or block.autocast:
        logits = op.wide_linear(tape, flat, E, Site("router", ROUTER), reads=h)
    else:
        logits = logits_in_32_bits(tape, flat)
    scores = op.pointwise(tape, logits, "router: scores of all experts", ROUTER, saves_result=True)
    biased = tape.make(op.TEMPORARY, "router: scores and bias, fp32", 4 * T * E, ROUTER)
    best = tape.make(op.TEMPORARY, "router: highest scores and bias, fp32", 4 * T * t, ROUTER)
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    tape.drop(biased)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, ROUTER)
    tape.release(scores)
    shares = _divided(tape, chosen)
    weights = op.cast(tape, shares, r, Site("router: weights", ROUTER))
    tape.release(chosen, shares)
    tape.drop(best)
    return Routing(logits, weights, indices)


def _divided(tape: Tape, chosen: Value) -> Value:
    """``weights / clamp(weights.sum())``. Autograd saves the weights, their sum and the clamped sum."""
    total = op.run(
        tape, chosen, "router: sum of the top-k weights", ROUTER, shape=T,
        gradient="gradient of the top-k weights through their sum",
    )  # fmt: skip
    name = "router: sum of the top-k weights, clamped"
    clamped = op.run(tape, total, name, ROUTER, saved=(total,), gradient="gradient of the sum of the top-k weights")
    tape.release(total)
    made = op.run(
        tape, (chosen, clamped), "router: top-k weights, divided by their sum", ROUTER,
        saved=(chosen, clamped), gradient="gradient of the top-k weights, or of their sum",
        beside=("gradient of the sum of the top-k weights, not yet summed", 12 * T * t),
    )  # fmt: skip
    tape.release(clamped)
    return made


# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _with_experts(model: ModelSpec) -> Layout:
    def routed(moe: MoeSpec) -> Parameters:
        gate = "mlp.gate.weight", (moe.num_experts, model.hidden_size)
        bias = "mlp.gate.moe_statics.e_score_correction_bias", (1, moe.num_experts)
        width = moe.num_shared_experts * moe.moe_intermediate_size
        shared = gated("mlp.shared_experts", model, width) if width else ()
        return (Parameter(*gate), Parameter(*bias), *fused_experts(model, moe), *shared)

    return with_experts(model, attention_of(model), routed)


_ATTENTION = Attention(f"{ERNIE}, Ernie4_5Attention.forward", rotated=_rotated)
_LAYER = layer_of(f"{ERNIE}, Ernie4_5", LLAMA_NORM, _ATTENTION.run, gated_mlp)
_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
    fixed={"attention_bias": False, "mlp_bias": False},
    dropout={},
    only={"use_bias": (False,)},
)
_TABLES = Tables(
    8 * s * d, "rotary cos and sin, fp32", f"{ERNIE}, Ernie4_5RotaryEmbedding.forward", in_32_bits=True, copied=True
)
_MOE = _CONFIG._replace(
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 4, "tie_word_embeddings": True, "num_shared_experts": 2,
        "num_dense_layers": 1,
    },
    required=(*WITH_EXPERTS.required, "moe_intermediate_size"),
    keys={
        "num_experts": ("moe_num_experts", "num_experts"), "num_experts_per_tok": ("moe_k", "num_experts_per_tok"),
        "num_shared_experts": ("moe_num_shared_experts",), "num_dense_layers": ("moe_layer_start_index",),
    },
    only={"use_bias": (False,), "moe_layer_interval": (1,)},
    counted_as=WITH_EXPERTS.counted_as,
    read=("moe_layer_end_index",),
    harmless={
        **WITH_EXPERTS.harmless,
        "numbers in a formula, which change no tensor": ("moe_norm_min",),
        "multi-token prediction, which transformers does not build": ("num_nextn_predict_layers",),
        "read by no code of the class": ("moe_capacity", "moe_gate", "moe_use_aux_free"),
    },
)  # fmt: skip
_ROUTED = ("mlp", *EXPERT_MODULES[-5:], "mlp.gate", "mlp.gate.moe_statics", *EXPERT_MODULES[2:4])
FAMILIES = {
    "ernie4_5": Definition(layer(_LAYER), dense, _CONFIG, tables=_TABLES),
    "ernie4_5_moe": Definition(
        layer(_LAYER._replace(mlp=_mlp, source=f"{MODEL}, Ernie4_5_MoeDecoderLayer.forward")), _with_experts, _MOE,
        expert_modules=before_and_after(ATTENTION_MODULES, _ROUTED), tables=_TABLES,
    ),
}  # fmt: skip

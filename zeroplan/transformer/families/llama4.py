"""Llama 4 (Scout, Maverick), the text: three layers with attention in chunks, then one of full attention without positions.

Positions are complex products in fp32. Scout normalises rotated queries and keys, without a weight. Every token passes through all
experts, scaled by its router's score, which is 0 for experts that it does not visit; so the experts' input has E copies of the
tokens. In Maverick every second layer has a dense MLP.
"""

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import gated_mlp
from zeroplan.transformer.families.definition import Around, Block, Definition, Program, Tables
from zeroplan.transformer.families.experts import picked
from zeroplan.transformer.families.keys import WITH_EXPERTS
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, Names, before_and_after
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.tape import CAST_BY_CUDA, Arriving, Site, Store, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, gated, of_experts, patterned, two_norms
from zeroplan.transformer.params_modules import Parameters, linear
from zeroplan.transformer.symbols import E, T, a, c, d, e, h, k, k_d, m, q, s, t, v

LLAMA = "transformers 5.23, models/llama4/modeling_llama4.py"
LAYER = f"{LLAMA}, Llama4TextDecoderLayer.forward"
ATTENTION = f"{LLAMA}, Llama4TextAttention.forward"
ROTARY = f"{LLAMA}, apply_rotary_emb"
MLP = f"{LLAMA}, Llama4TextMLP.forward"
ROUTER = f"{LLAMA}, Llama4Router.forward"
MOE = f"{LLAMA}, Llama4TextMoe.forward"
EXPERTS = f"{LLAMA}, Llama4TextExperts.forward"
NORM = Norm("cast, then weighted, unnamed", f"{LLAMA}, Llama4TextRMSNorm.forward")
_OF_HEADS = Norm("no weight", f"{LLAMA}, Llama4TextL2Norm.forward")


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one layer. One variable holds the attention weights, and then the router's logits."""
    normal = op.norm(tape, given, "norm before attention", NORM, place=AT_ATTENTION_NORM)
    attended, weights = _attention(tape, normal, block)
    middle = op.add(tape, given, attended, "residual stream between attention and MLP", LAYER)
    tape.release(normal)
    normal = op.norm(tape, middle, "norm before the MLP", NORM, place=AT_MLP_NORM)
    branch, beside = _moe(tape, normal, block) if block.routed else (gated_mlp(tape, normal, block, MLP), weights)
    if block.routed:
        tape.release(weights)
    tape.release(normal)
    made = op.add(tape, middle, branch, "block output", LAYER)
    tape.release(attended, middle, branch, beside)
    return made


# --- attention ---------------------------------------------------------------------------------------------------------------


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    bias = block.attention_bias
    query = op.linear(tape, normal, q, Site("q projection", ATTENTION, Module.Q), bias=bias)
    key = op.linear(tape, normal, k, Site("k projection", ATTENTION, Module.K), bias=bias)
    value = op.linear(tape, normal, v, Site("v projection", ATTENTION, Module.V), bias=bias)
    positions: tuple[Store, ...] = ()
    if block.without_rotary:
        query, positions = _tempered(tape, query)
    else:
        query, key = _with_positions(tape, query, key)
        if block.head_norms:
            query, key = _normed(tape, query, "queries", a), _normed(tape, key, "keys", k_d)
    context, weights = block.attend(tape, Heads(query, key, value, block.grouped, block.one_key))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, Module.O), reads=c, bias=block.output_bias)
    tape.release(query, key, value, context)
    tape.drop(*positions)
    return Attended(made, weights)


def _with_positions(tape: Tape, query: Value, key: Value) -> tuple[Value, Value]:
    """Return queries and keys times complex numbers of length 1, in fp32; variables hold every step until both are done."""
    bare = query, key
    wide = [op.cast(tape, one, 4, Site(name, ROTARY)) for one, name in ((query, "queries"), (key, "keys"))]
    with_positions = [
        op.run(tape, one, f"{name}, rotated", ROTARY, gradient=f"gradient of the {name}")
        for one, name in zip(wide, ("queries", "keys"), strict=True)
    ]
    made = [
        op.cast(tape, one, own.dtype, Site(f"rotated {name}", ROTARY))
        for one, own, name in zip(with_positions, bare, ("queries", "keys"), strict=True)
    ]
    tape.release(*wide, *with_positions, *bare)
    return made[0], made[1]


def _normed(tape: Tape, bare: Value, name: str, heads: Size) -> Value:
    made = op.norm(tape, bare, f"norm of the {name}", _OF_HEADS, weight=d, rows=T * heads, place=Place(At.NORM))
    tape.release(bare)
    return made


def _tempered(tape: Tape, query: Value) -> tuple[Value, tuple[Store, ...]]:
    """Return queries times a number of each position, in fp32, and the positions and numbers, which variables hold."""
    positions = tape.make(op.TEMPORARY, "positions, int64", 8 * s, ATTENTION)
    scale, of = (
        tape.make(op.TENSOR, "scale of each token's queries", 4 * s, ATTENTION),
        "gradient through the scale of the queries",
    )
    made = op.run(tape, query, "queries, scaled", ATTENTION, dtype=4, saved=(scale,), gradient=of, widened=True)
    narrow = op.cast(tape, made, query.dtype, Site("scaled queries", ATTENTION))
    tape.release(made, query)
    return narrow, (positions, scale)


# --- experts -----------------------------------------------------------------------------------------------------------------


def _moe(tape: Tape, normal: Value, block: Block) -> tuple[Value, Value]:
    """Run all experts on all tokens, then the shared expert. Return the output, and the router's logits."""
    flat = op.view(tape, normal, Site("experts: their input", MOE))
    scores, logits = _router(tape, flat)
    entry = _scaled_copies(tape, flat, scores)
    with tape.inside(Module.EXPERTS), tape.owning():
        routed = _experts(tape, entry, block)
    shared = gated_mlp(tape, flat, block, MLP, width=m, prefix="shared expert: ")
    summed = op.run(
        tape, routed, "sum over the experts", MOE, dtype=CAST_BY_CUDA if tape.autocast else e,
        shape=T * h, gradient="gradient of the experts' outputs, copied for each",
    )  # fmt: skip
    made = op.add_in_place(tape, shared, summed, "", Site("sum of routed and shared experts", MOE))
    tape.release(summed, shared, entry, routed, scores, flat)
    return made, logits


def _router(tape: Tape, flat: Value) -> tuple[Value, Value]:
    """Return sigmoids of the chosen logits, 0 for other experts, and the logits."""
    logits = op.linear(tape, flat, E, Site("router", ROUTER))
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    chosen = picked(tape, logits, ("router: top-k logits", T * t), indices, ROUTER)
    sparse = op.run(
        tape, chosen, "router: logits of the chosen experts, -inf for others", ROUTER, shape=T * E,
        saved=(indices,), gradient="gradient of the top-k logits",
    )  # fmt: skip
    wide = op.cast(tape, sparse, 4, Site("router: chosen logits", ROUTER))
    bent = op.pointwise(tape, wide, "router: scores of all experts", ROUTER, saves_result=True)
    tape.release(wide)
    scores = op.cast(tape, bent, e, Site("router: scores", ROUTER))
    tape.release(bent, sparse, chosen)
    tape.drop(indices)
    return scores, logits


def _scaled_copies(tape: Tape, flat: Value, scores: Value) -> Value:
    """Return a copy of all tokens for each expert, times the expert's scores."""
    copies = op.run(
        tape, flat, "tokens, copied for each expert", MOE, shape=T * h * E,
        gradient="gradient of the tokens, summed over the experts",
    )  # fmt: skip
    name = "router: scores, expert by expert"
    column = op.run(tape, scores, name, MOE)
    made = op.tensor(
        tape, "tokens times scores, input of the experts", op.wider(tape, copies.dtype, column.dtype), copies.shape, MOE
    )  # fmt: skip

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        passed = op.gradient(tape, copies, "gradient of the tokens' copies", MOE)
        unsummed = tape.make(op.TEMPORARY, "gradient of the scores, not yet summed", made.dtype * made.shape, MOE)
        tape.used(copies.store, column.store)
        total = tape.make(op.GRADIENT, "gradient of the scores", made.dtype * column.shape, MOE)
        tape.drop(unsummed)
        return [(copies, passed), (column, op.as_narrow(tape, column, total, made, MOE))]

    tape.add("tokens times scores", (made,), (copies, column), backward, of=(copies, column))
    tape.release(copies, column)
    return made


def _experts(tape: Tape, entry: Value, block: Block) -> Value:
    both = op.batched_linear(tape, entry, (m + m), Site("experts: gate and up projections", EXPERTS), copies=E)
    gate, up = op.chunk(tape, both, (T * E * m, T * E * m), Site("experts: gates and ups", EXPERTS))
    active = activated(tape, gate, block.activation, "experts: silu of the gate", EXPERTS)
    reason = "experts: gated product, input of the down projection"
    inner = op.product(tape, up, active, reason, EXPERTS)
    tape.release(active)
    made = op.batched_linear(tape, inner, h, Site("experts: down projection", EXPERTS), reads=m, copies=E)
    tape.release(inner, gate, up, both)
    return made


# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    attention = attention_of(model, bias=model.attention_bias)
    dense = gated("feed_forward", model, model.intermediate_size)
    kinds = {"dense": dense, **({} if model.moe is None else dict.fromkeys(("local", "global"), _of_experts(model)))}
    return patterned(model, {kind: (*attention, *own, *two_norms(model)) for kind, own in kinds.items()})


def _of_experts(model: ModelSpec) -> Parameters:
    assert model.moe is not None  # noqa: S101  the caller has looked
    moe, hidden, width = model.moe, model.hidden_size, model.moe.moe_intermediate_size
    both = (
        of_experts("feed_forward.experts.gate_up_proj", moe, hidden, 2 * width),
        of_experts("feed_forward.experts.down_proj", moe, width, hidden),
    )
    return (
        *(one._replace(autocast=True, by_all=True) for one in both),
        *linear("feed_forward.router", hidden, moe.num_experts),
        *gated("feed_forward.shared_expert", model, width),
    )


_CONFIG = WITH_EXPERTS._replace(
    required=(*WITH_EXPERTS.required, "moe_intermediate_size"),
    read=("moe_layers", "interleave_moe_layer_step", "no_rope_layers", "use_qk_norm"),
).plus(
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192, "use_qk_norm": True,
    },
    fixed={"mlp_bias": False},
    keys={
        "intermediate_size": ("intermediate_size_mlp",), "moe_intermediate_size": ("intermediate_size",),
        "sliding_window": ("attention_chunk_size",),
    },
    only={"attn_temperature_tuning": (True,), "no_rope_layer_interval": (4,)},
    counted_as={"router_jitter_noise": (0.0, "the class reads no noise")},
    harmless={
        "numbers in a formula, which change no tensor": ("floor_scale", "attn_scale"),
        "for other programs": ("for_llm_compressor",),
    },
)  # fmt: skip
_ATTENTION: Names = (*ATTENTION_MODULES[:3], "self_attn.qk_norm", "self_attn.qk_norm", ATTENTION_MODULES[3])
_MLP, _SHARED = (
    tuple(f"{name}{part}" for part in ("", ".gate_proj", ".activation_fn", ".up_proj", ".down_proj"))
    for name in ("feed_forward", "feed_forward.shared_expert")
)
_MODULES = tuple(f"feed_forward{name}" for name in ("", ".router", ".experts", ".experts.act_fn"))
FAMILIES = {
    "llama4_text": Definition(
        Program(_layer, LAYER, NORM), _tensors, _CONFIG, before_and_after(_ATTENTION, _MLP),
        before_and_after(_ATTENTION, (*_MODULES, *_SHARED)),
        Tables(4 * s * d, "rotary numbers, complex", f"{LLAMA}, Llama4TextRotaryEmbedding.forward"), Around(masks=2, chunks=True),
    )
}  # fmt: skip

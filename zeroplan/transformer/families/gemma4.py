"""Gemma 4: some layers with a window, then one of full attention.

Layers with full attention have wider heads, and in the larger models fewer key/value heads and one projection for keys and values.
Values are normalised over each head, without a weight. A constant multiplies each layer's output in place. Experts, if any, read
the residual stream in parallel with the MLP. E2B and E4B have embeddings of each layer, and their last layers share keys
(``per_layer.py``).
"""

from functools import partial

from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec, PerLayerSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import gated_mlp, layer_of
from zeroplan.transformer.families.definition import Around, Block, Definition, Program, Tables
from zeroplan.transformer.families.experts import EXPERTS, Computing, Routing, divided_by_their_sum, picked, routed_experts
from zeroplan.transformer.families.gemma import BEFORE, FOUR_NORMS
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import gated_modules
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.per_layer import Sources, begin, shared_keys, slice_of, store_keys, with_embedding
from zeroplan.transformer.families.tags import AFTER_ATTENTION_AND_MLP, AT_ATTENTION_NORM
from zeroplan.transformer.families.tape import Operator, P_own, Site, Tape, Value
from zeroplan.transformer.parameters import KINDS_IN_TURN, BlockRun, Layout, Parameter, kinds_by_keys, own_keys
from zeroplan.transformer.params_gated import alternating, around, attention_of, fused_experts, gated, head_norms, norms
from zeroplan.transformer.params_modules import Parameters, embedding, linear, rms_norm
from zeroplan.transformer.symbols import E, T, a, c, d, h, k, k_d, m, q, r, s, t, v

GEMMA = "transformers 5.23, models/gemma4/modeling_gemma4.py"
LAYER = f"{GEMMA}, Gemma4TextDecoderLayer.forward"
ROUTER = f"{GEMMA}, Gemma4TextRouter.forward"
ATTENTION = f"{GEMMA}, Gemma4TextAttention.forward"
NORM = Norm("power", f"{GEMMA}, Gemma4RMSNorm.forward")
_BARE = NORM._replace(kind="power, no weight")


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run attention. Queries, keys and values each keep one variable through projection, norm and rotation."""
    bias, before = block.attention_bias, tape.operators.copy()
    query = op.linear(tape, normal, q, Site("q projection", ATTENTION, Module.Q), bias=bias)
    query = _with_positions(tape, _normed(tape, query, "queries", NORM, Module.Q_NORM), "queries")
    key, value = _keys(tape, normal, block, before)
    context, weights = block.attend(tape, Heads(query, key, value, block.grouped, block.one_key))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, Module.O), reads=c, bias=block.output_bias)
    tape.release(query, key, value, context)
    return Attended(made, weights)


def _keys(tape: Tape, normal: Value, block: Block, before: list[Operator]) -> tuple[Value, Value]:
    """Return keys and values. ``before``: the operators that made the layer's normalised input."""
    if block.own is not None and block.own.keys == "shared":
        return shared_keys(tape, block, ATTENTION)
    bias, at = block.attention_bias, len(tape.operators)
    bare = op.linear(tape, normal, k, Site("k projection", ATTENTION, Module.K), bias=bias)
    if block.keys_are_values:
        value = bare
        tape.hold(bare.store)
    else:
        value = op.linear(tape, normal, v, Site("v projection", ATTENTION, Module.V), bias=bias)
    key = _with_positions(tape, _normed(tape, bare, "keys", NORM, Module.K_NORM), "keys")
    value = _normed(tape, value, "values", _BARE, Module.NONE)
    if block.own is not None and block.own.keys == "stored":
        store_keys(tape, block, (key, value), [*before, *tape.operators[at:]], ATTENTION)
    return key, value


def _normed(tape: Tape, bare: Value, name: str, norm: Norm, module: Module) -> Value:
    rows = T * (a if name == "queries" else k_d)
    made = op.norm(tape, bare, f"norm of the {name}", norm, weight=d, rows=rows, place=Place(At.NORM, module))
    tape.release(bare)
    return made


def _with_positions(tape: Tape, bare: Value, name: str) -> Value:
    made = op.rotary(tape, bare, Site(name, ATTENTION))
    tape.release(bare)
    return made


_LAYER = layer_of(f"{GEMMA}, Gemma4Text", NORM, _attention, gated_mlp)._replace(before=BEFORE, after=AFTER_ATTENTION_AND_MLP)


_OWN = Sources(LAYER, f"{GEMMA}, Gemma4TextModel.forward", NORM)


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    own = None if block.own is None else slice_of(tape, begin(tape, block, _OWN.model), _OWN.model)
    bare = (_with_experts if block.routed else _LAYER.run)(tape, given, block)
    bare = bare if own is None else with_embedding(tape, bare, own, block, _OWN)
    made = Value(bare.store, bare.dtype, bare.shape)
    backward = op.makes("gradient through the layer's number", LAYER, bare)
    tape.add("the layer's number", (made,), (), backward, of=(bare,), saves_weight=True)  # the number: a buffer, no activation
    return made


# --- experts -----------------------------------------------------------------------------------------------------------------


def _with_experts(tape: Tape, given: Value, block: Block) -> Value:
    """Run a layer whose experts run in parallel with the MLP. Its variables hold their inputs and results until it returns."""
    normal = op.norm(tape, given, "norm before attention", NORM, place=AT_ATTENTION_NORM)
    attended, weights = _attention(tape, normal, block)
    tape.release(normal)
    middle = _added(tape, given, attended, "norm after attention", "residual stream between attention and MLP")
    normal = op.norm(tape, middle, "norm before the MLP", NORM)
    dense = gated_mlp(tape, normal, block, f"{GEMMA}, Gemma4TextMLP.forward")
    tape.release(normal)
    first = op.norm(tape, dense, "norm after the dense MLP", NORM)
    flat = op.view(tape, middle, Site("experts: the residual stream", LAYER))
    routing = _router(tape, flat)
    tape.release(weights)  # the router's scores take its variable
    second = _experts(tape, flat, routing.weights, block)
    both = op.add(tape, first, second, "output of MLP and experts", LAYER)
    tape.release(dense)
    made = _added(tape, middle, both, "norm after the MLP", "block output")
    tape.drop(routing.indices)
    tape.release(middle, first, second, flat, routing.weights, routing.logits)
    return made


def _added(tape: Tape, given: Value, branch: Value, norm: str, reason: str) -> Value:
    normal = op.norm(tape, branch, norm, NORM)
    tape.release(branch)
    made = op.add(tape, given, normal, reason, LAYER)
    tape.release(normal)
    return made


def _experts(tape: Tape, flat: Value, weights: Value, block: Block) -> Value:
    entry = op.norm(tape, flat, "norm before the experts", NORM)
    routed = routed_experts(tape, entry, weights, block, Computing(partial(_gated, block=block)))
    tape.release(entry)
    made = op.norm(tape, routed, "norm after the experts", NORM)
    tape.release(routed)
    return made


def _gated(tape: Tape, both: Value, block: Block) -> Value:
    gate, up = op.chunk(tape, both, (P_own * m, P_own * m), Site("experts: gates and ups", EXPERTS))
    active = activated(tape, gate, block.activation, f"experts: {block.activation} of the gate", EXPERTS)
    reason = "experts: gated product, input of the down projection"
    made = op.product(tape, active, up, reason, EXPERTS)
    tape.release(active, gate, up, both)
    return made


def _router(tape: Tape, flat: Value) -> Routing:
    """Choose experts by a softmax in fp32. Each expert's weight is multiplied by a learned number."""
    bare = op.norm(tape, flat, "router: norm", _BARE)
    wide = _times_weight(tape, bare)
    entry = op.scaled(tape, wide, "router: its input", ROUTER)
    logits = op.linear(tape, entry, E, Site("router", ROUTER, layer="proj"))
    reason, cast_at, at = "router: scores of all experts", Site("router: logits", ROUTER), Site("router: softmax", ROUTER)
    scores = op.softmax_in_32_bits(tape, logits, reason, cast_at, at)
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, ROUTER)
    bare_weights = divided_by_their_sum(tape, chosen, 4, ROUTER)
    numbers = op.tensor(tape, "router: number of each chosen expert", r, T * t, ROUTER)
    tape.add("router: numbers", (numbers,), (indices,), op.makes_weight_gradient(E), of=tape.with_weight())
    weights = op.product(tape, bare_weights, numbers, "router: weights", ROUTER)
    tape.release(numbers, bare_weights, entry, logits)
    return Routing(scores, weights, indices)


def _times_weight(tape: Tape, bare: Value) -> Value:
    """Multiply by a learned number per channel, and release ``bare``."""
    dtype, saved = op.wider(tape, bare.dtype, r), () if tape.mode.weights_frozen else (bare,)
    unsummed = "gradient of the router's scale, not yet summed", dtype * bare.shape, ROUTER
    through = op.makes("gradient of the router's normalised input", ROUTER, bare)
    made = op.run(
        tape, bare, "router: its input, weighted", ROUTER, dtype=dtype, saved=saved,
        backward=op.in_turn(through, op.trains(h, unsummed=unsummed)), weights="own",
    )  # fmt: skip
    tape.release(bare)
    return made


# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    if model.per_layer is not None:
        return _with_own_embeddings(model, model.per_layer)
    return alternating(model, KINDS_IN_TURN[0], _block(model), _block(model.of_kind("global"), keys_are_values=True))


def _block(model: ModelSpec, *, keys_are_values: bool = False) -> Parameters:
    attention = attention_of(model, bias=model.attention_bias)
    queries = tuple([one for one in attention if ".q_proj." in one.name])
    others = [one for one in attention if one not in queries and not (keys_are_values and ".v_proj." in one.name)]
    after = (*gated("mlp", model, model.intermediate_size), *norms(model, FOUR_NORMS), *_of_experts(model))
    return (*queries, *head_norms(model), *others, *after)


def _with_own_embeddings(model: ModelSpec, own: PerLayerSpec) -> Layout:
    every = model.num_hidden_layers * own.width
    before = (
        *embedding("model.embed_tokens_per_layer", own.vocab_size, every),
        *linear("model.per_layer_model_projection", model.hidden_size, every),
        *rms_norm("model.per_layer_projection_norm", own.width),
    )
    kinds = kinds_by_keys(model)
    in_order = sorted(set(kinds), key=kinds[::-1].index, reverse=True)
    runs = tuple([BlockRun(kind, kinds.count(kind), _own_block(model, own, kind)) for kind in in_order])
    return around(model, runs, before=before)


def _own_block(model: ModelSpec, own: PerLayerSpec, kind: str) -> Parameters:
    of_kind, keys = model.of_kind(kind), own_keys(kind, shares=own.shared_layers > 0)
    without = (".k_proj.", ".v_proj.", ".k_norm.") if keys.keys == "shared" else ()
    plain = [one for one in _block(of_kind) if not any(part in one.name for part in without)]
    gate = linear("per_layer_input_gate", model.hidden_size, own.width)
    projection = linear("per_layer_projection", own.width, model.hidden_size)
    return (*plain, *gate, *projection, *norms(model, ("post_per_layer_input_norm",)))


def _of_experts(model: ModelSpec) -> Parameters:
    if model.moe is None:
        return ()
    hidden, experts = model.hidden_size, model.moe.num_experts
    names = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    fused = fused_experts(model, model.moe)
    return (
        Parameter("router.scale", (hidden,)),
        Parameter("router.per_expert_scale", (experts,)),
        *linear("router.proj", hidden, experts),
        *(one._replace(name=one.name.removeprefix("mlp.")) for one in fused),
        *norms(model, names),
    )


def _tables(model: ModelSpec) -> Tables:
    size = 2 * r * s * (model.head_dim + model.global_head_dim)
    return Tables(size, "rotary cos and sin, of local and of global layers", f"{GEMMA}, Gemma4TextRotaryEmbedding.forward")


_CONFIG = ConfigKeys(
    defaults={
        "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262144, "tie_word_embeddings": True, "global_head_dim": 512, "vocab_size_per_layer_input": 262144,
    },
    fixed={"mlp_bias": False},
    required=("hidden_size", "intermediate_size", "num_hidden_layers", "global_key_value_heads", "sliding_window"),
    keys={
        "global_key_value_heads": ("num_global_key_value_heads",), "num_experts_per_tok": ("top_k_experts", "num_experts_per_tok"),
    },
    activation="hidden_activation",
    only={"use_bidirectional_attention": ("vision",)},
    not_null=("final_logit_softcapping",),
    read=(
        "num_global_key_value_heads", "global_head_dim", "enable_moe_block", "hidden_size_per_layer_input", "attention_k_eq_v",
        "num_kv_shared_layers", "use_double_wide_mlp", "vocab_size_per_layer_input",
    ),
    harmless={
        "of experts, read where there are some": ("num_experts", "moe_intermediate_size", "expert_intermediate_size"),
    },
)  # fmt: skip
_MODULES = (
    "input_layernorm",
    "self_attn",
    "self_attn.q_proj",
    "self_attn.q_norm",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.k_norm",
    "self_attn.v_norm",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    *gated_modules("mlp"),
    "post_feedforward_layernorm",
)
_OF_EMBEDDINGS = ("per_layer_input_gate", "act_fn", "per_layer_projection", "post_per_layer_input_norm")  # fmt: skip
_OF_EXPERTS = (
    "post_feedforward_layernorm_1", "router", "router.norm", "router.proj", "pre_feedforward_layernorm_2", "experts",
    "experts.act_fn",
    "post_feedforward_layernorm_2",
)  # fmt: skip
FAMILIES = {
    "gemma4_text": Definition(
        Program(_layer, LAYER, NORM), _tensors, _CONFIG, (*_MODULES, *_OF_EMBEDDINGS),
        (*_MODULES[:-1], *_OF_EXPERTS, _MODULES[-1]), tables=_tables, around=Around(masks=2),
    )
}  # fmt: skip

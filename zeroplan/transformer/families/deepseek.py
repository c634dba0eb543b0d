"""DeepSeek-V2 and V3, Mistral 4, GLM-4 MoE Lite (GLM-4.7-Flash): latent attention; a gated MLP, then routed and shared experts.

DeepSeek-V2's positions are complex products in fp32. A number of each position scales Mistral 4's queries.
"""

from collections.abc import Callable
from functools import partial

from zeroplan.expr import Size
from zeroplan.spec.model import MlaSpec, ModelSpec, MoeSpec
from zeroplan.spec.recipe import PRIME_RL
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attend, Attended, Heads, eager, efficient, in_32_bits
from zeroplan.transformer.families.decoder import LLAMA_NORM, Layer, gated_mlp, layer
from zeroplan.transformer.families.definition import Block, Definition, Tables
from zeroplan.transformer.families.experts import Routing, divided_by_their_sum, picked, product_of_router, routed_experts
from zeroplan.transformer.families.frozen import copied_linear
from zeroplan.transformer.families.keys import SIZES, ConfigKeys
from zeroplan.transformer.families.module_names import before_and_after, gated_modules
from zeroplan.transformer.families.operators import GRADIENT, TEMPORARY, TENSOR
from zeroplan.transformer.families.tape import CAST_BY_CUDA, Arriving, Site, Store, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, fused_experts, gated, query_width, two_norms, with_experts
from zeroplan.transformer.params_modules import Parameters, linear, rms_norm
from zeroplan.transformer.symbols import E, G, T, a, c, e, h, m, n, o, o_2, q, r, s, t, u, w

DEEPSEEK = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py"
LATENT = f"{DEEPSEEK}, DeepseekV3Attention.forward"
EXPAND = f"{DEEPSEEK}, DeepseekV3Attention.expand_kv"
V2 = "transformers 5.23, models/deepseek_v2/modeling_deepseek_v2.py"
MISTRAL = "transformers 5.23, models/mistral4/modeling_mistral4.py"
ROTARY = f"{DEEPSEEK}, apply_rotary_pos_emb_interleave"
EAGER = f"{DEEPSEEK}, eager_attention_forward"
MLP = f"{DEEPSEEK}, DeepseekV3MLP.forward"
ROUTER = f"{DEEPSEEK}, DeepseekV3TopkRouter.forward"
MOE = f"{DEEPSEEK}, DeepseekV3MoE.forward"
COPY = "torch 2.13, torch/csrc/autograd/functions/tensor.cpp, CopySlices::apply_impl"

# --- multi-head latent attention: low-rank projections, heads of two sizes, one rotary key for all heads ---------------------

#: Width of all heads' queries (or keys) without their rotary part; width of those keys and the values together.
BARE = q - a * o
JOINT = q - a * o + c


Choose = Callable[[Tape, Value, Value, Block], tuple[Store, ...]]
"""Picks each query's keys from the module's input and the compressed queries; returns the tensors that its variables keep."""


def attention(tape: Tape, normal: Value, block: Block, *, choose: Choose | None = None) -> Attended:
    """Run latent attention. The module's variables keep every intermediate tensor to its end."""
    queries, latent_queries = queries_of(tape, normal, block)
    if choose is None:
        tape.release(*latent_queries)
    bare, rotary_query = op.chunk(tape, queries, (T * BARE, T * a * o), Site("parts of the queries", LATENT))
    name = "first projection of keys and values"
    compressed = op.linear(tape, normal, w + o, Site(name, LATENT, layer="kv_a_proj_with_mqa"), bias=block.attention_bias)
    latent, rotary_key = op.chunk(tape, compressed, (T * w, T * o), Site("latent and rotary key", LATENT))
    latent_norm = norm_of(tape, latent, "norm of the latent", w)
    if block.family == "deepseek_v2":
        with_positions = _as_complex(tape, rotary_query, rotary_key)
    else:
        with_positions = (
            _rotated(tape, rotary_query, "rotary part of the queries", a * o_2),
            _rotated(tape, rotary_key, "rotary key", o_2),
        )
    tape.release(latent, rotary_query, rotary_key)
    query = op.joined(tape, (bare, with_positions[0]), "queries", T * q, LATENT)
    query = op.scaled_by_position(tape, query, f"{MISTRAL}, Mistral4Attention.forward") if block.family == "mistral4" else query
    key, value = expanded(tape, latent_norm, with_positions[1])
    chosen = () if choose is None else choose(tape, normal, latent_queries[0], block)
    context, weights = attend_of(block)(tape, Heads(query, key, value, grouped=False, one_key=False, joint=True))
    made = op.linear(tape, context, h, Site("output projection", LATENT, layer="o_proj"), reads=c, bias=block.attention_bias)
    tape.release(queries, bare, compressed, latent_norm, *with_positions, query, key, value, context)
    if choose is not None:
        tape.release(*latent_queries)
        tape.drop(*chosen)
    return Attended(made, weights)


def attend_of(block: Block, *, queries_joined: bool = True) -> Attend:
    """Return the kernel for heads of two sizes. CUDA's flash kernel refuses them; a CPU has one kernel.

    ``queries_joined``: a concatenation builds the queries, too, head by head.
    """
    by_head = partial(_by_head, queries_joined=queries_joined)
    if block.attention == "eager":
        return partial(by_head, attend=partial(eager, source=EAGER))
    if block.one_size or block.masked:
        return partial(by_head, attend=block.attend)
    if block.kernels == "cpu" or block.has_no_kernel:
        return partial(by_head, attend=in_32_bits)
    return partial(efficient, size=block.head_size)


def _by_head(tape: Tape, heads: Heads, *, attend: Attend, queries_joined: bool) -> Attended:
    """Run ``attend`` on keys, and maybe queries, that are contiguous because they were built head by head."""
    return attend(tape, heads._replace(joined=queries_joined, keys_joined=True))


def queries_of(tape: Tape, normal: Value, block: Block) -> tuple[Value, tuple[Value, ...]]:
    """Project queries with one matrix, or with two low-rank ones and a norm between them; return that norm's result as well."""
    if not block.compressed:
        return op.linear(tape, normal, q, Site("q projection", LATENT, layer="q_proj")), ()
    name = "first projection of the queries"
    compressed = op.linear(tape, normal, u, Site(name, LATENT, layer="q_a_proj"), bias=block.attention_bias)
    latent = norm_of(tape, compressed, "norm of the compressed queries", u)
    tape.release(compressed)
    made = op.linear(tape, latent, q, Site("second projection of the queries", LATENT, layer="q_b_proj"), reads=u)
    return made, (latent,)


def norm_of(tape: Tape, value: Value, name: str, width: Size) -> Value:
    """Run the norm of a latent."""
    return op.norm(tape, value, name, LLAMA_NORM, weight=width, place=Place(At.NORM))


def _rotated(tape: Tape, value: Value, name: str, half: Size) -> Value:
    """Apply rotary positions to pairs of neighbours: rotate even and odd elements, then join them."""
    even, odd = op.slices(tape, value, (T * half, T * half), Site(f"even and odd elements of the {name}", ROTARY))
    dtype = op.wider(tape, value.dtype, r)
    made = op.run(
        tape, (even, odd), f"{name}, rotated", ROTARY, dtype=dtype, shape=value.shape,
        passing=((f"{name}: both halves rotated", dtype * value.shape),), gradient=f"gradient of the {name}, half",
    )  # fmt: skip
    tape.release(even, odd)
    return made


def _as_complex(tape: Tape, rotary_query: Value, rotary_key: Value) -> tuple[Value, Value]:
    """Multiply both rotary parts, in fp32, by complex numbers of length 1; variables hold the fp32 parts until both are done."""
    source = f"{V2}, apply_rotary_emb"
    names = "rotary part of the queries", "rotary key"
    wide = [op.cast(tape, one, 4, Site(name, source)) for one, name in zip((rotary_query, rotary_key), names, strict=True)]
    made = []
    for one, name in zip(wide, names, strict=True):
        site = Site(f"rotary positions of the {name}", source)
        with_positions = op.run(tape, one, f"{name}, rotated, fp32", site, gradient=f"gradient of the {name}")
        made.append(op.cast(tape, with_positions, rotary_query.dtype, Site(f"rotated {name}", source)))
        tape.release(with_positions)
    tape.release(*wide)
    return made[0], made[1]


def expanded(tape: Tape, latent: Value, rotary_key: Value) -> tuple[Value, Value]:
    """Return keys and values of all heads, which share the rotary key. One projection makes values and the keys' first part."""
    joint = op.linear(tape, latent, JOINT, Site("projection to keys and values", EXPAND, layer="kv_b_proj"), reads=w)
    bare, value = op.chunk(tape, joint, (T * BARE, T * c), Site("keys and values", EXPAND))
    spread = Value(tape.hold(rotary_key.store), rotary_key.dtype, T * a * o)
    summed = op.makes("gradient of the rotary key, summed over heads", EXPAND, rotary_key)
    tape.add("rotary key for every head", (spread,), (), summed, of=(rotary_key,))
    whole = Value(tape.make(TENSOR, "keys", e * T * q, EXPAND), e, T * q)
    first = _copied_into(tape, whole, None, bare, "first part of the keys")
    made = _copied_into(tape, whole, first, spread, "rotary part of the keys")
    tape.release(joint, bare, spread)
    return made, value


def _copied_into(tape: Tape, whole: Value, before: Value | None, part: Value, name: str) -> Value:
    """``whole[...].copy_(part)``. Its backward copies the gradient of the whole tensor, and then the gradient of the part."""
    made = Value(whole.store, whole.dtype, whole.shape)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        copy = tape.make(GRADIENT, "gradient of the keys, copied", made.dtype * made.shape, COPY)
        passed = tape.make(GRADIENT, f"gradient of the {name}", made.dtype * part.shape, COPY)
        if before is None:
            tape.scratch.append(copy)
            return [(part, op.as_narrow(tape, part, passed, made, COPY))]
        tape.temporary("zeros in its place", made.dtype * part.shape, COPY)
        return [(before, copy), (part, op.as_narrow(tape, part, passed, made, COPY))]

    tape.add(name, (made,), (), backward, of=(part,) if before is None else (before, part))
    return made


# --- router and experts ------------------------------------------------------------------------------------------------------


def mlp(tape: Tape, normal: Value, block: Block) -> Value:
    """Run the gated MLP of the first layers, or routed and shared experts. The routing tensors live to the module's end.

    AutoModel runs the shared experts first (36044ad3, components/moe/layers.py, MoE.forward).
    """
    if not block.routed:
        return gated_mlp(tape, normal, block, MLP)
    if PRIME_RL in tape.mode.fused:
        from zeroplan.transformer.families.prime_rl import moe  # noqa: PLC0415  few jobs have it

        return moe(tape, normal, block)
    routing = _ROUTERS.get(block.family, router)(tape, normal, block)
    run_shared = partial(gated_mlp, tape, normal, block, MOE, width=n * m, prefix="shared experts: ")
    first = run_shared() if tape.mode.sends_by else None
    flat = op.view(tape, normal, Site("experts: their input", MOE))
    routed = routed_experts(tape, flat, routing.weights, block)
    tape.release(flat)
    shared = first or run_shared()
    made = op.add(tape, routed, shared, "output of routed and shared experts", MOE)
    tape.drop(routing.indices)
    tape.release(routed, shared, routing.weights, routing.logits)
    return made


def router(tape: Tape, normal: Value, block: Block) -> Routing:
    """Run the router. Its scores are sigmoids in fp32."""
    logits = logits_of(tape, normal, block)
    scores = op.pointwise(tape, logits, "router: scores of all experts", ROUTER, saves_result=True)
    indices = _top_experts(tape)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, ROUTER)
    tape.release(scores)
    tape.kernel_output(logits.store, chosen.store, indices, of="router-kept")
    shares = divided_by_their_sum(tape, chosen, CAST_BY_CUDA if block.autocast else 4, ROUTER)
    weights = op.scaled(tape, shares, "router: weights, scaled", ROUTER)
    return Routing(logits, weights, indices)


def _of_softmax(tape: Tape, normal: Value, block: Block) -> Routing:
    """Run DeepSeek-V2's router: the highest scores of a softmax in fp32, scaled. Its variables live until it returns."""
    source = f"{V2}, DeepseekV2TopkRouter.forward"
    logits = logits_of(tape, normal, block)
    cast_at, at = Site("router: logits", source), Site("router: softmax", source)
    scores = op.softmax_in_32_bits(tape, logits, "router: scores of all experts", cast_at, at)
    named: tuple[Store, ...] = ()
    if block.grouped_experts:
        scores, named = _within_groups(tape, scores, source)
    indices = tape.make(TENSOR, "router: top-k indices, int64", 8 * T * t, source)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, source)
    tape.release(scores)
    tape.kernel_output(logits.store, chosen.store, indices, of="router-kept")
    weights = op.scaled(tape, chosen, "router: weights, scaled", source)
    tape.drop(*named)
    return Routing(logits, weights, indices)


def _within_groups(tape: Tape, scores: Value, source: str) -> tuple[Value, tuple[Store, ...]]:
    """Return scores that are 0 outside the chosen groups, and what variables hold; release ``scores``. Autograd saves a mask.

    Every group counts as chosen.
    """
    name = "router: scores within the chosen groups"
    groups = tape.make(TEMPORARY, "router: highest score of each group, and which groups are chosen", 24 * T * G, source)
    spread = tape.make(TEMPORARY, "router: which experts may be chosen, fp32", 4 * T * E, source)
    mask = tape.make(TENSOR, "router: which experts are in no chosen group", T * E, source)
    made = op.run(tape, scores, name, source, saved=(mask,), gradient="gradient of the scores within the groups")
    tape.drop(mask)
    tape.release(scores)
    return made, (groups, spread, tape.hold(made.store))


def _of_mistral(tape: Tape, normal: Value, block: Block) -> Routing:
    """Run Mistral 4's router: a softmax in the dtype of the logits, which autocast makes fp32."""
    source = f"{MISTRAL}, Mistral4TopkRouter.forward"
    flat = op.view(tape, normal, Site("router: its input", source))
    with tape.owning(leaf=True):
        logits = op.linear(tape, flat, E, Site("router", source))
    tape.release(flat)
    wide = op.cast(tape, logits, CAST_BY_CUDA if block.autocast else logits.dtype, Site("router: logits", source))
    scores = op.pointwise(tape, wide, "router: scores of all experts", source, saves_result=True)
    tape.release(wide)
    indices = _top_experts(tape)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, source)
    tape.release(scores)
    tape.kernel_output(logits.store, chosen.store, indices, of="router-kept")
    shares = divided_by_their_sum(tape, chosen, chosen.dtype, source)
    weights = op.scaled(tape, shares, "router: weights, scaled", source)
    return Routing(logits, weights, indices)


def logits_of(tape: Tape, normal: Value, block: Block) -> Value:
    """Return logits in fp32. Under autocast their matrix product still runs in 16 bits."""
    narrow = tape.autocast and not tape.wide_residual
    if narrow and tape.mode.weights_frozen and not tape.mode.stacked.router:
        return _logits_of_copies(tape, normal)
    with tape.owning(leaf=True):
        logits, held = product_of_router(tape, normal, ROUTER, in_32_bits=not (block.wide or block.autocast))
    tape.release(*held)
    return logits


def _logits_of_copies(tape: Tape, normal: Value) -> Value:
    """Return logits of fp32 copies of a narrow input and a frozen narrow weight, which autocast makes narrow again."""
    flat = op.view(tape, normal, Site("router: its input", ROUTER))
    wide = op.cast(tape, flat, 4, Site("input of the router", ROUTER))
    weight = tape.make(TEMPORARY, "router's weight in fp32", 4 * E * h, ROUTER)
    made = copied_linear(tape, wide, E, Site("router", ROUTER), reads=h, bias=False)
    tape.drop(weight)
    tape.release(flat, wide)
    return made


def _top_experts(tape: Tape) -> Store:
    """Return the indices of each token's experts, by score plus bias within the best groups. Leaves out the tensors per group."""
    biased = tape.make(TEMPORARY, "router: scores and bias, mask of groups, scores within them, fp32", 12 * T * E, ROUTER)
    outside = tape.make(TEMPORARY, "router: which experts are in no chosen group", T * E, ROUTER)
    indices = tape.make(TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    tape.drop(biased, outside)
    return indices


_ROUTERS: dict[str, Callable[[Tape, Value, Block], Routing]] = {"deepseek_v2": _of_softmax, "mistral4": _of_mistral}

# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    return with_experts(model, attention_parameters(model), partial(routed_and_shared, model))


def _dense_tensors(model: ModelSpec) -> Layout:
    """Youtu: every block is like a dense block of DeepSeek-V3."""
    return alike(model, (*attention_parameters(model), *gated("mlp", model, model.intermediate_size), *two_norms(model)))


def routed_and_shared(model: ModelSpec, moe: MoeSpec, *, router_first: bool = False) -> Parameters:
    """Return routed experts, their router, and the shared experts as one MLP. ``router_first``: it is registered before them."""
    shared = moe.num_shared_experts * moe.moe_intermediate_size
    gate, experts = linear("mlp.gate", model.hidden_size, moe.num_experts), fused_experts(model, moe)
    return (
        *((*gate, *experts) if router_first else (*experts, *gate)),
        *(gated("mlp.shared_experts", model, shared) if shared else ()),
    )


def attention_parameters(model: ModelSpec) -> Parameters:
    """Return the parameters of latent attention."""
    assert model.mla is not None  # noqa: S101  the family always has it
    mla, hidden, heads = model.mla, model.hidden_size, model.num_attention_heads
    latent = mla.kv_lora_rank
    return (
        *_query_parameters(mla, model),
        *linear("self_attn.kv_a_proj_with_mqa", hidden, latent + mla.qk_rope_head_dim, bias=model.attention_bias),
        *rms_norm("self_attn.kv_a_layernorm", latent),
        *linear("self_attn.kv_b_proj", latent, heads * (mla.qk_nope_head_dim + mla.v_head_dim)),
        *linear("self_attn.o_proj", heads * mla.v_head_dim, hidden, bias=model.attention_bias),
    )


def _query_parameters(mla: MlaSpec, model: ModelSpec) -> Parameters:
    if mla.q_lora_rank is None:
        return linear("self_attn.q_proj", model.hidden_size, query_width(model))
    return (
        *linear("self_attn.q_a_proj", model.hidden_size, mla.q_lora_rank, bias=model.attention_bias),
        *rms_norm("self_attn.q_a_layernorm", mla.q_lora_rank),
        *linear("self_attn.q_b_proj", mla.q_lora_rank, query_width(model)),
    )


CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 128},
    fixed={"moe_layer_freq": 1, "mlp_bias": False},
    required=(
        *SIZES, "num_experts", "num_experts_per_tok", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "moe_intermediate_size", "num_shared_experts", "num_dense_layers",
    ),
    keys={
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "num_shared_experts": ("n_shared_experts",),
        "num_dense_layers": ("first_k_dense_replace",),
    },
    only={
        "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "rope_interleave": (True,), "norm_topk_prob": (True,),
    },
    counted_as={"output_router_logits": (False, "the router's logits take some bytes per token and expert more")},
    harmless={
        "numbers in a formula, which change no tensor": ("routed_scaling_factor",),
        "groups of experts, which mask scores of some bytes per token": ("n_group", "topk_group"),
        "made of other keys": ("qk_head_dim", "head_dim"),
        "multi-token prediction, which transformers does not build": ("num_nextn_predict_layers", "num_mtp_layers"),
        "of DeepSeek's own code": ("aux_loss_alpha", "seq_aux", "moe_layer_freq", "router_aux_loss_coef"),
    },
)  # fmt: skip
LATENT_MODULES = (
    "self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj",
)  # fmt: skip
EXPERT_MODULES = ("mlp", "mlp.gate", "mlp.experts", "mlp.experts.act_fn", *gated_modules("mlp.shared_experts"))
_DEEPSEEK = Definition(
    layer(Layer(LLAMA_NORM, attention, mlp, f"{DEEPSEEK}, DeepseekV3DecoderLayer.forward")), _tensors, CONFIG,
    before_and_after(LATENT_MODULES, gated_modules("mlp")), before_and_after(LATENT_MODULES, EXPERT_MODULES),
    Tables(2 * r * s * o),
)  # fmt: skip
#: GLM's classes are those of DeepSeek-V3 with other names; a list says which layers are dense.
_GLM = CONFIG._replace(
    defaults={"max_position_embeddings": 202752, "num_key_value_heads": 20},
    required=tuple(name for name in CONFIG.required if name != "num_dense_layers"),
    only={**CONFIG.only, "first_k_dense_replace": (1,), "partial_rotary_factor": (1.0,)},
    read=("mlp_layer_types",),
)
#: V2's class divides no weights by their sum, whatever its key says.
_V2 = CONFIG._replace(
    defaults={"max_position_embeddings": 2048, "num_dense_layers": 0, "num_shared_experts": 2},
    required=tuple(name for name in CONFIG.required if name not in ("num_dense_layers", "num_shared_experts")),
    only={"topk_method": ("greedy", "group_limited_greedy"), "scoring_func": ("softmax",)},
    harmless={
        **{why: keys for why, keys in CONFIG.harmless.items() if "groups" not in why},
        "read where topk_method needs it": ("n_group",), "a number in a formula": ("topk_group",),
        "read by no code of the class": ("norm_topk_prob",),
    },
)  # fmt: skip
_MISTRAL = CONFIG._replace(
    defaults={"max_position_embeddings": 1048576, "num_key_value_heads": 32, "num_dense_layers": 0, "num_shared_experts": 1},
    required=_V2.required,
    only={"rope_interleave": (True,), "norm_topk_prob": (True,)},
)
_YOUTU = ConfigKeys(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 16, "q_lora_rank": 1536, "tie_word_embeddings": True},
    fixed={"mlp_bias": False},
    required=(*SIZES, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    only={"rope_interleave": (True,)},
    harmless={
        "made of other keys": ("qk_head_dim", "head_dim"), "numbers from which weights begin": ("embedding_initializer_range",),
    },
)  # fmt: skip
FAMILIES = {
    "youtu": _DEEPSEEK._replace(tensors=_dense_tensors, config=_YOUTU, expert_modules=()),
    "deepseek_v2": _DEEPSEEK._replace(
        config=_V2, tables=Tables(4 * s * o, "rotary numbers, complex", f"{V2}, DeepseekV2RotaryEmbedding.forward")
    ),
    "deepseek_v3": _DEEPSEEK,
    "mistral4": _DEEPSEEK._replace(config=_MISTRAL),
    "glm4_moe_lite": _DEEPSEEK._replace(config=_GLM),
}

"""Blocks of DeepSeek-V3: latent attention; a gated MLP in the first layers, routed and shared experts in the others."""

from zeroplan.ledger import Module
from zeroplan.spec.model import MlaSpec, ModelSpec, MoeSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import SIZES, ConfigKeys, Definition, Tables
from zeroplan.transformer.families.gated import LLAMA_NORM, Branches, gated_mlp, layer
from zeroplan.transformer.families.latent import latent_attention
from zeroplan.transformer.families.operators import TEMPORARY, TENSOR
from zeroplan.transformer.families.pairs import picked
from zeroplan.transformer.families.parts import before_and_after, gated_modules
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.routed import Routing, divided_by_their_sum, experts_here
from zeroplan.transformer.families.tape import CAST_BY_CUDA, Arriving, Site, Store, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import fused_experts, gated, query_width, with_experts
from zeroplan.transformer.params_modules import Parameters, linear, rms_norm
from zeroplan.transformer.symbols import E, T, h, m, n, o, r, s, t

LAYER = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3DecoderLayer.forward"
MLP = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3MLP.forward"
ROUTER = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3TopkRouter.forward"
MOE = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3MoE.forward"


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    """A gated MLP in the first layers; then routed and shared experts, whose module holds the routing by name to its end."""
    if not block.routed:
        return gated_mlp(tape, normal, block, MLP)
    routing = _router(tape, normal, block)
    flat = op.view(tape, normal, Site("experts: their input", MOE))
    with tape.inside(Module.EXPERTS), tape.owning():
        routed = experts_here(tape, flat, routing.weights)
    tape.release(flat)
    shared = gated_mlp(tape, normal, block, MOE, width=n * m, of="shared experts: ")
    made = op.add(tape, routed, shared, "output of routed and shared experts", Site("sum of routed and shared experts", MOE))
    tape.drop(routing.indices)
    tape.release(routed, shared, routing.weights, routing.logits)
    return made


def _router(tape: Tape, normal: Value, block: Block) -> Routing:
    """Sigmoid scores in fp32, whose multiplication autocast runs in 16 bits nevertheless."""
    flat = op.view(tape, normal, Site("router: its input", ROUTER))
    in_32_bits = not (block.wide or block.autocast)
    with tape.owning(leaf=True):
        logits = _logits_in_32_bits(tape, flat) if in_32_bits else op.linear(tape, flat, E, Site("router", ROUTER))
    tape.release(flat)
    scores = op.pointwise(tape, logits, "router: scores of all experts", Site("router: sigmoid", ROUTER), saves_result=True)
    indices = _best(tape)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, ROUTER)
    tape.release(scores)
    shares = divided_by_their_sum(tape, chosen, CAST_BY_CUDA if block.autocast else 4, ROUTER)
    weights = op.tensor(tape, "router: weights, scaled", shares.dtype, shares.shape, ROUTER)
    backward = op.makes("gradient of the weights before they are scaled", ROUTER, shares)
    tape.add("router: scaling", (weights,), (), backward, of=(shares,))
    tape.release(shares)
    return Routing(logits, weights, indices)


def _logits_in_32_bits(tape: Tape, flat: Value) -> Value:
    """The product of fp32 copies of the router's input and weight."""
    given = op.cast(tape, flat, 4, Site("input of the router", ROUTER))
    weight = Value(tape.make(TENSOR, "router's weight in fp32", 4 * E * h, ROUTER), 4, E * h)

    def cast_back(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.weight_gradient(E * h)
        return []

    tape.add("router: cast of the weight gradient", (weight,), (), cast_back, of=None)
    made = op.tensor(tape, "output of the router", 4, T * E, ROUTER)
    tape.product(made.store)
    backward = op.makes("gradient of a factor of the router", ROUTER, given, weight)
    tape.add("router", (made,), (given.store, weight.store), backward, of=(given, weight))
    tape.release(given, weight)
    return made


def _best(tape: Tape) -> Store:
    """The experts of each token, chosen by score and bias from the best groups. What there is for each group is left out."""
    biased = tape.make(TEMPORARY, "router: scores and bias, mask of groups, scores within them, fp32", 12 * T * E, ROUTER)
    outside = tape.make(TEMPORARY, "router: which experts are in no chosen group", T * E, ROUTER)
    indices = tape.make(TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    tape.drop(biased, outside)
    return indices


# --- tensors, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    def routed(moe: MoeSpec) -> Parameters:
        shared = moe.num_shared_experts * moe.moe_intermediate_size
        return (
            *fused_experts(model, moe),
            *linear("mlp.gate", model.hidden_size, moe.num_experts),
            *(gated("mlp.shared_experts", model, shared) if shared else ()),
        )

    return with_experts(model, _attention(model), routed)


def _attention(model: ModelSpec) -> Parameters:
    """Queries, and keys with values, through low-rank projections."""
    assert model.mla is not None  # noqa: S101  the family always has it
    mla, hidden, heads = model.mla, model.hidden_size, model.num_attention_heads
    latent = mla.kv_lora_rank
    return (
        *_queries(mla, model),
        *linear("self_attn.kv_a_proj_with_mqa", hidden, latent + mla.qk_rope_head_dim, bias=model.attention_bias),
        *rms_norm("self_attn.kv_a_layernorm", latent),
        *linear("self_attn.kv_b_proj", latent, heads * (mla.qk_nope_head_dim + mla.v_head_dim)),
        *linear("self_attn.o_proj", heads * mla.v_head_dim, hidden, bias=model.attention_bias),
    )


def _queries(mla: MlaSpec, model: ModelSpec) -> Parameters:
    if mla.q_lora_rank is None:
        return linear("self_attn.q_proj", model.hidden_size, query_width(model))
    return (
        *linear("self_attn.q_a_proj", model.hidden_size, mla.q_lora_rank, bias=model.attention_bias),
        *rms_norm("self_attn.q_a_layernorm", mla.q_lora_rank),
        *linear("self_attn.q_b_proj", mla.q_lora_rank, query_width(model)),
    )


def _tables(_model: ModelSpec) -> Tables:
    return Tables(2 * r * s * o)


_CONFIG = ConfigKeys(
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
_LATENT = (
    "self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj",
)  # fmt: skip
_EXPERTS = ("mlp", "mlp.gate", "mlp.experts", "mlp.experts.act_fn", *gated_modules("mlp.shared_experts"))
FAMILIES = {
    "deepseek_v3": Definition(
        layer(Branches(LLAMA_NORM, latent_attention, _mlp, LAYER)), _tensors, _CONFIG,
        before_and_after(_LATENT, gated_modules("mlp")), before_and_after(_LATENT, _EXPERTS), _tables,
    )
}  # fmt: skip

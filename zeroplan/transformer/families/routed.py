"""Blocks with routed experts, Mixtral and Qwen3-MoE: a router, and experts on this rank or on several."""

from functools import partial
from typing import NamedTuple

from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import SIZES, ConfigKeys, Definition
from zeroplan.transformer.families.dense import WITH_NORMS, attention
from zeroplan.transformer.families.dispatched import dispatched, gated_experts, own_experts
from zeroplan.transformer.families.gated import LLAMA_NORM, Branches, layer
from zeroplan.transformer.families.pairs import (
    EXPERTS,
    back_in_order,
    grouped_product,
    picked,
    sorted_experts,
    summed,
    weighted_outputs,
)
from zeroplan.transformer.families.parts import ATTENTION_MODULES, before_and_after, gated_modules
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Site, Store, Tape, Value, Width
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, fused_experts, head_norms, with_experts
from zeroplan.transformer.params_modules import Parameters, linear
from zeroplan.transformer.symbols import E, T, e, h, m, t

ROUTER = "transformers 5.23, models/mixtral/modeling_mixtral.py, MixtralTopKRouter.forward"
MIXTRAL = "transformers 5.23, models/mixtral/modeling_mixtral.py, MixtralDecoderLayer.forward"
QWEN3 = "transformers 5.23, models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeDecoderLayer.forward"


def _mlp(tape: Tape, normal: Value, block: Block, *, narrowed: bool) -> Value:
    """Router and experts; ``narrowed``: the router returns its weights in the dtype of its logits."""
    with tape.owning(leaf=True):
        return _routed(tape, normal, block, narrowed=narrowed)


def _routed(tape: Tape, normal: Value, block: Block, *, narrowed: bool) -> Value:
    routing = router(tape, normal, narrowed=narrowed)
    with tape.inside(Module.EXPERTS):
        made = (
            dispatched(tape, normal, routing.weights, own_experts)
            if block.dispatched
            else experts_here(tape, normal, routing.weights)
        )
    tape.drop(routing.indices)
    tape.release(routing.weights, routing.logits)
    return made


# --- the router -----------------------------------------------------------------------------------------------------------


class Routing(NamedTuple):
    """What says which expert gets which token."""

    logits: Value
    weights: Value
    indices: Store


def router(tape: Tape, normal: Value, *, narrowed: bool) -> Routing:
    """Router over the tokens in one row: that view comes before the product, so that its weight has its gradient first."""
    flat = op.view(tape, normal, Site("router: its input", ROUTER))
    logits = op.linear(tape, flat, E, Site("router", ROUTER))
    tape.release(flat)
    wide = op.cast(tape, logits, 4, Site("router: logits", ROUTER))
    scores = op.pointwise(tape, wide, "router: scores of all experts", Site("router: softmax", ROUTER), saves_result=True)
    tape.release(wide)
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, ROUTER)
    tape.release(scores)
    weights = divided_by_their_sum(tape, chosen, 4, ROUTER)
    if not narrowed:
        return Routing(logits, weights, indices)
    narrow = op.cast(tape, weights, e, Site("router: weights", ROUTER))
    tape.release(weights)
    return Routing(logits, narrow, indices)


def divided_by_their_sum(tape: Tape, chosen: Value, dtype: Width, source: str) -> Value:
    """``weights /= weights.sum()``: in place, so that what they were is copied for the backward; ``dtype`` is the sum's."""
    total = tape.make(op.TENSOR, "router: sum of the top-k weights", dtype * T, source)
    before = tape.make(op.TENSOR, "router: top-k weights before they are divided by their sum", chosen.dtype * T * t, source)
    made = Value(chosen.store, chosen.dtype, chosen.shape)
    beside = ("gradient of the sum of the top-k weights, not yet summed", 2 * dtype * T * t)
    backward = op.makes("gradient of the top-k weights", source, chosen, beside=beside)
    tape.add("router: division by the sum", (made,), (total, before), backward, of=(chosen,))
    tape.drop(total, before)
    return made


# --- experts on this rank -------------------------------------------------------------------------------------------------


def experts_here(tape: Tape, normal: Value, weights: Value) -> Value:
    """``grouped_mm_experts_forward``, which holds all but the products' operands by name to its end."""
    theirs, order = sorted_experts(tape)
    rows = tape.make(op.TENSOR, "token of each pair, int64", 8 * T * t, EXPERTS)
    selected = picked(tape, normal, ("tokens sorted by expert, input of the experts", T * t * h), rows, EXPERTS)
    tape.drop(rows)
    by_expert = picked(tape, weights, ("routing weights sorted by expert", T * t), order, EXPERTS)
    counted = tape.make(op.TEMPORARY, "sorted experts as 32-bit numbers, and counts", 4 * T * t + 4 * E, EXPERTS)
    ends = tape.make(op.TENSOR, "ends of the experts' groups", 4 * E, EXPERTS)
    both = grouped_product(tape, selected, ("experts: gate and up projections", h, (m + m)), ends, experts=E)
    gated = gated_experts(tape, both)
    outputs = grouped_product(tape, gated, ("experts: down projection", m, h), ends, experts=E)
    tape.release(gated)
    weighted = weighted_outputs(tape, outputs, by_expert, EXPERTS)
    unsorted = back_in_order(tape, weighted, "experts: weighted outputs in the order of tokens")
    made = summed(tape, unsorted)
    tape.drop(theirs, order, counted, ends)
    tape.release(selected, by_expert, outputs, unsorted)
    return made


# --- tensors, and the keys of config.json ---------------------------------------------------------------------------------


def _mixtral(model: ModelSpec) -> Layout:
    def routed(moe: MoeSpec) -> Parameters:
        return (*linear("mlp.gate", model.hidden_size, moe.num_experts), *fused_experts(model, moe))

    return with_experts(model, attention_of(model), routed)


def _qwen3_moe(model: ModelSpec) -> Layout:
    def routed(moe: MoeSpec) -> Parameters:
        return (*fused_experts(model, moe), *linear("mlp.gate", model.hidden_size, moe.num_experts))

    return with_experts(model, (*attention_of(model, bias=model.attention_bias), *head_norms(model)), routed)


def _routing(source: str, *, narrowed: bool) -> Program:
    return layer(Branches(LLAMA_NORM, attention, partial(_mlp, narrowed=narrowed), source))


_EXPERT_SIZES = ("num_experts", "num_experts_per_tok")
_LOSS_OF_THE_ROUTER = "the loss of the router, which output_router_logits switches on"
_LOGITS = (False, "the loss of the router and its logits take some bytes per token and expert more")
_MIXTRAL = ConfigKeys(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    fixed={"attention_bias": False, "mlp_bias": False},
    required=(*SIZES, *_EXPERT_SIZES),
    keys={"num_experts": ("num_local_experts", "num_experts")},
    counted_as={
        "router_jitter_noise": (0.0, "the noise takes up to 1 % of a block more"),
        "output_router_logits": _LOGITS,
    },
    harmless={_LOSS_OF_THE_ROUTER: ("router_aux_loss_coef",)},
)
_QWEN3_MOE = ConfigKeys(
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    fixed={"decoder_sparse_step": 1, "mlp_bias": False},
    required=(*SIZES, *_EXPERT_SIZES, "moe_intermediate_size"),
    keys={"num_experts": ("num_experts", "num_local_experts")},
    optional_window=True,
    counted_as={
        "norm_topk_prob": (True, "without the division the router takes some bytes per token less"),
        "output_router_logits": _LOGITS,
    },
    assumed={"norm_topk_prob": False},
    read=("mlp_only_layers", "decoder_sparse_step"),
    harmless={
        _LOSS_OF_THE_ROUTER: ("router_aux_loss_coef",),
        "read by no decoder of these families": ("max_window_layers",),
    },
)
_MODULES = ("mlp", "mlp.gate", "mlp.experts", "mlp.experts.act_fn")
FAMILIES = {
    "mixtral": Definition(
        _routing(MIXTRAL, narrowed=False), _mixtral, _MIXTRAL, expert_modules=before_and_after(ATTENTION_MODULES, _MODULES)
    ),
    "qwen3_moe": Definition(
        _routing(QWEN3, narrowed=True), _qwen3_moe, _QWEN3_MOE, before_and_after(WITH_NORMS, gated_modules("mlp")),
        before_and_after(WITH_NORMS, _MODULES),
    ),
}  # fmt: skip

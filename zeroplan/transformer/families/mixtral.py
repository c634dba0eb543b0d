"""Blocks of the Mixtral kind: Llama's attention, and routed experts in place of the MLP."""

from zeroplan.ledger import Line, total_bytes
from zeroplan.numeric import maximum
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.blocks import BlockPass
from zeroplan.transformer.families import written_out
from zeroplan.transformer.families.llama import (
    SELECTIVE,
    attention,
    attention_excess,
    attention_kept,
    has_head_norms,
    middle,
    norm_output,
    query_and_value,
    written_out_excess,
)
from zeroplan.transformer.families.moe import BY_EXPERTS, EXPERTS, Router, routed_experts, router_logits, softmax_router
from zeroplan.transformer.families.norms import BEFORE_ATTENTION, BEFORE_MLP, rms_norm
from zeroplan.transformer.families.parts import SAVED, TEMPORARY, assemble
from zeroplan.transformer.families.widths import Widths


def mixtral_block(model: ModelSpec, x: Widths) -> BlockPass:
    """One decoder layer with routed experts."""
    assert model.moe is not None  # noqa: S101  block_pass comes here for blocks of kind moe only
    router = softmax_router(x, narrowed=model.family == "qwen3_moe")
    parts = (
        rms_norm(x, BEFORE_ATTENTION),
        attention(model, x),
        rms_norm(x, BEFORE_MLP),
        routed_experts(x, model.moe, router),
    )
    forward, recompute = _forward(x, model.moe, router), experts_recompute(x, model.moe, router)
    forward = (*forward, *written_out_excess(x, parts, forward, head_norms=has_head_norms(model)))
    later_casts = x.context * x.hidden + parts[3].casts
    recompute = (*recompute, attention_excess(x, recompute, later_casts))
    recompute = (*recompute, *written_out.recompute_excess(x, total_bytes(recompute)))
    return assemble(
        x, parts, forward=forward, recompute=recompute, selective=_selective(x, model.moe), input_is_saved=x.residual == 4
    )


def _forward(x: Widths, moe: MoeSpec, router: Router) -> tuple[Line, ...]:
    lines = (weighted_outputs(x, moe, router), routing_tables(x, moe, router))
    if x.autocast:
        return (norm_output(x), *lines)
    return lines if x.residual == 4 else (middle(x), *lines)


def weighted_outputs(x: Widths, moe: MoeSpec, router: Router) -> Line:
    """Describe the experts' weighted outputs at the moment they are put back into the order of the tokens."""
    wide = max(x.residual, router.applied)
    size = 2 * wide * x.tokens * moe.num_experts_per_tok * x.hidden
    formula = "8·T·t·h" if wide == 4 else "2·r·T·t·h"
    return Line(TEMPORARY, size, "weighted expert outputs, sorted and unsorted", formula, EXPERTS, BY_EXPERTS)


def routing_tables(x: Widths, moe: MoeSpec, router: Router) -> Line:
    """Describe what the router and the experts hold by name and need for no backward: logits, weights, sorted experts, counts."""
    pairs, experts = x.tokens * moe.num_experts_per_tok, moe.num_experts
    logits = router_logits(x, router)
    tables = (12 + router.applied) * pairs + logits * x.tokens * experts + 4 * experts
    formula = ("16" if router.applied == 4 else "(12+e)") + "·T·t + " + ("4" if logits == 4 else "e") + "·T·E + 4·E"
    return Line(TEMPORARY, tables, "routing tables held by name, partly int64", formula, EXPERTS)


def experts_recompute(x: Widths, moe: MoeSpec, router: Router) -> tuple[Line, ...]:
    """List what is alive at the highest point where nothing is saved."""
    pairs = x.tokens * moe.num_experts_per_tok
    outer, inner = x.residual * pairs * x.hidden, x.residual * pairs * moe.moe_intermediate_size
    wide = max(x.residual, router.applied)
    experts = Line(
        TEMPORARY,
        maximum(outer + 4 * inner, 2 * outer + 2 * wide * pairs * x.hidden + 8 * pairs),
        "experts: input and operands of the gated product, or input, output, weighted outputs and order",
        f"max(r·T·t·h + 4·r·T·t·m, 2·r·T·t·h + {'8' if wide == 4 else '2·r'}·T·t·h + 8·T·t)",
        EXPERTS,
        BY_EXPERTS,
    )
    logits = router_logits(x, router)
    tables = (28 + 2 * router.applied) * pairs + logits * x.tokens * moe.num_experts + 8 * moe.num_experts
    formula = ("36" if router.applied == 4 else "(28+2·e)") + "·T·t + " + ("4" if logits == 4 else "e") + "·T·E + 8·E"
    routing = Line(TEMPORARY, tables, "routing tables held by name, partly int64", formula, EXPERTS)
    return middle(x), norm_output(x), experts, routing


def _selective(x: Widths, moe: MoeSpec) -> tuple[Line, ...]:
    logits = Line(SAVED, x.element * x.tokens * moe.num_experts, "output of the router", "e·T·E", SELECTIVE)
    return attention_kept(x, *query_and_value(x), logits)

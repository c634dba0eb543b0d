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
    eager_excess,
    has_head_norms,
    middle,
    norm_output,
    query_and_value,
    written_out_excess,
)
from zeroplan.transformer.families.moe import EXPERTS, routed_experts
from zeroplan.transformer.families.norms import BEFORE_ATTENTION, BEFORE_MLP, rms_norm
from zeroplan.transformer.families.parts import SAVED, TEMPORARY, assemble
from zeroplan.transformer.families.widths import Widths


def mixtral_block(model: ModelSpec, x: Widths) -> BlockPass:
    """One decoder layer with routed experts."""
    assert model.moe is not None  # noqa: S101  block_pass comes here for blocks of kind moe only
    parts = (
        rms_norm(x, BEFORE_ATTENTION),
        attention(model, x),
        rms_norm(x, BEFORE_MLP),
        routed_experts(x, model.moe),
    )
    copied = x.residual != 4
    forward, recompute = _forward(x, model.moe), _recompute(x, model.moe)
    if x.attention == "eager":
        forward = (*forward, eager_excess(x, parts, forward, head_norms=has_head_norms(model)))
    forward = (*forward, *written_out_excess(x, parts, forward, head_norms=has_head_norms(model)))
    later_casts = x.context * x.hidden + parts[3].casts
    recompute = (*recompute, attention_excess(x, recompute, later_casts))
    recompute = (*recompute, *written_out.recompute_excess(x, total_bytes(recompute)))
    return assemble(
        x, parts, forward=forward, recompute=recompute, selective=_selective(x, model.moe), input_is_saved=not copied
    )  # fmt: skip


def _forward(x: Widths, moe: MoeSpec) -> tuple[Line, ...]:
    pairs = x.tokens * moe.num_experts_per_tok
    weighted = Line(
        TEMPORARY, 8 * pairs * x.hidden, "weighted expert outputs, fp32, sorted and unsorted", "8·T·t·h", EXPERTS
    )  # fmt: skip
    tables = 16 * pairs + x.element * x.tokens * moe.num_experts + 4 * moe.num_experts
    routing = Line(TEMPORARY, tables, "routing tables held by name, partly int64", "16·T·t + e·T·E + 4·E", EXPERTS)
    if x.autocast:
        return norm_output(x), weighted, routing
    return (weighted, routing) if x.residual == 4 else (middle(x), weighted, routing)


def _recompute(x: Widths, moe: MoeSpec) -> tuple[Line, ...]:
    pairs = x.tokens * moe.num_experts_per_tok
    outer, inner = x.residual * pairs * x.hidden, x.residual * pairs * moe.moe_intermediate_size
    experts = Line(
        TEMPORARY,
        maximum(outer + 4 * inner, 2 * outer + 8 * pairs * x.hidden),
        "experts: input and operands of the gated product, or input, output and weighted outputs",
        "max(r·T·t·h + 4·r·T·t·m, 2·r·T·t·h + 8·T·t·h)",
        EXPERTS,
    )
    tables = 36 * pairs + x.element * x.tokens * moe.num_experts + 8 * moe.num_experts
    routing = Line(TEMPORARY, tables, "routing tables held by name, partly int64", "36·T·t + e·T·E + 8·E", EXPERTS)
    return middle(x), norm_output(x), experts, routing


def _selective(x: Widths, moe: MoeSpec) -> tuple[Line, ...]:
    logits = Line(SAVED, x.element * x.tokens * moe.num_experts, "output of the router", "e·T·E", SELECTIVE)
    return attention_kept(x, *query_and_value(x), logits)

"""Routed experts between their norm and the residual addition, on grouped matrix multiplication."""

from zeroplan.ledger import Line
from zeroplan.spec.model import MoeSpec
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.parts import GRADIENT, SAVED, Part
from zeroplan.transformer.families.widths import Widths

ROUTER = "transformers 5.23, models/mixtral/modeling_mixtral.py, MixtralTopKRouter.forward"
EXPERTS = "transformers 5.23, integrations/moe.py, grouped_mm_experts_forward"


def routed_experts(x: Widths, moe: MoeSpec) -> Part:
    """Build a softmax router and SwiGLU experts; every token visits ``t`` of them, so the sums do not depend on the routing.

    The grouped multiplication takes no part in autocast: the experts compute in the dtype of their weights. GPUs below
    compute capability 8.0 fall back to a loop, which is not modelled. Under recomputation the expert outputs go one operation
    earlier than the point of their weighting says.
    """
    routing = _routing(x, moe)
    pairs = x.tokens * moe.num_experts_per_tok
    outer, inner = x.residual * pairs * x.hidden, x.residual * pairs * moe.moe_intermediate_size
    selected = Line(SAVED, outer, "tokens sorted by expert, input of the experts", "r·T·t·h", EXPERTS)
    hidden = (
        Line(SAVED, 2 * inner, "experts: gate and up projections' output", "2·r·T·t·m", EXPERTS),
        Line(SAVED, inner, "experts: silu of the gate", "r·T·t·m", EXPERTS),
    )
    product = Line(SAVED, inner, "experts: gated product, input of the down projection", "r·T·t·m", EXPERTS)
    outputs = Line(SAVED, outer, "experts: output before the routing weights", "r·T·t·h", EXPERTS)
    order = Line(SAVED, 8 * pairs, "order that undoes the sorting, int64", "8·T·t", EXPERTS)
    before = (*routing, selected, *hidden, product)
    saved = (*before, outputs, order)
    shared = _shared_experts(x, moe)
    expert, router = moe.num_experts * x.hidden * moe.moe_intermediate_size, moe.num_experts * x.hidden
    shared_weights = 3 * x.hidden * moe.num_shared_experts * moe.moe_intermediate_size
    return Part(
        saved + shared,
        (
            _weighting(x, moe, (*before, outputs, *shared)),
            *_expert_points(x, moe, before=(*routing, selected, *shared), hidden=hidden, product=product),
        ),
        3 * expert + router + shared_weights,
        router + shared_weights,
    )


def _shared_experts(x: Widths, moe: MoeSpec) -> tuple[Line, ...]:
    """List what experts that every token visits keep: a gated MLP's four tensors. They are taken to go last in the backward."""
    if not moe.num_shared_experts:
        return ()
    inner = 4 * x.element * x.tokens * moe.num_shared_experts * moe.moe_intermediate_size
    return (Line(SAVED, inner, "shared experts: gate, silu, up and product", "4·e·T·n·m", EXPERTS),)


def _routing(x: Widths, moe: MoeSpec) -> tuple[Line, ...]:
    tokens, pairs, experts = x.tokens, x.tokens * moe.num_experts_per_tok, moe.num_experts
    return (
        Line(SAVED, x.element * tokens * x.hidden, "input of the router", "e·T·h", ROUTER),
        Line(SAVED, 4 * tokens * experts, "router: softmax, fp32", "4·T·E", ROUTER),
        Line(SAVED, 12 * pairs + 4 * tokens, "router: top-k indices, weights and their sum", "12·T·t + 4·T", ROUTER),
        Line(SAVED, 16 * pairs + 4 * experts, "sorting of tokens by expert, int64, and group ends", "16·T·t + 4·E", EXPERTS),
        Line(SAVED, 4 * pairs, "routing weights sorted by expert, fp32", "4·T·t", EXPERTS),
    )


def _weighting(x: Widths, moe: MoeSpec, alive: tuple[Line, ...]) -> BackwardPoint:
    """Product of expert outputs and fp32 routing weights: fp32 gradients of both and of the sum, and a cast."""
    pairs = x.tokens * moe.num_experts_per_tok
    outer = pairs * x.hidden
    gradients = Line(GRADIENT, 12 * outer, "gradients of the weighted outputs and of both factors, fp32", "12·T·t·h", EXPERTS)
    if x.residual == 4:
        last = Line(GRADIENT, 4 * pairs, "gradient of the routing weights, fp32", "4·T·t", EXPERTS)
    else:
        last = Line(GRADIENT, x.residual * outer, "gradient of the expert outputs, cast", "r·T·t·h", EXPERTS)
    router = moe.num_experts * x.hidden if x.autocast else 0
    return BackwardPoint("weighting of the expert outputs", (*alive, gradients, last), 0, 0, router)


def _expert_points(
    x: Widths, moe: MoeSpec, *, before: tuple[Line, ...], hidden: tuple[Line, ...], product: Line
) -> tuple[BackwardPoint, ...]:
    pairs = x.tokens * moe.num_experts_per_tok
    outer, inner = x.residual * pairs * x.hidden, x.residual * pairs * moe.moe_intermediate_size
    matrix = moe.num_experts * x.hidden * moe.moe_intermediate_size
    router = moe.num_experts * x.hidden if x.autocast else 0
    down = Line(GRADIENT, outer + inner, "experts: gradients of output and of gated product", "r·T·t·(h+m)", EXPERTS)
    three = Line(GRADIENT, 3 * inner, "experts: gradients of the product, of silu and of up", "3·r·T·t·m", EXPERTS)
    both = Line(GRADIENT, 2 * inner, "experts: gradient of the gate and up projections' output", "2·r·T·t·m", EXPERTS)
    through = Line(GRADIENT, outer, "experts: gradient of their input", "r·T·t·h", EXPERTS)
    return (
        BackwardPoint("experts: down projection", (*before, *hidden, product, down), matrix, matrix, router),
        BackwardPoint("experts: gated product", (*before, *hidden, three), matrix, 0, router),
        BackwardPoint("experts: gate and up projections", (*before, both, through), 3 * matrix, 2 * matrix, router),
    )

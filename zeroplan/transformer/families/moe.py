"""Routed experts between their norm and the residual addition, on grouped matrix multiplication."""

from typing import NamedTuple

from zeroplan.ledger import Line, Module, Role, Tag
from zeroplan.numeric import Int
from zeroplan.spec.model import MoeSpec
from zeroplan.transformer.blocks import At, BackwardPoint, Place
from zeroplan.transformer.families.parts import GRADIENT, OPERAND, SAVED, Part
from zeroplan.transformer.families.widths import Widths

MIXTRAL = "transformers 5.23, models/mixtral/modeling_mixtral.py, MixtralTopKRouter.forward"
EXPERTS = "transformers 5.23, integrations/moe.py, grouped_mm_experts_forward"

#: What experts make of the tokens that they are given, and what their products read.
BY_EXPERTS, READ = Tag(module=Module.EXPERTS), Tag(Role.OPERAND, Module.EXPERTS)


class Router(NamedTuple):
    """What a family's router keeps: the bytes of an element in each step, and what it does in fp32."""

    scores: int
    """Of the softmax or sigmoid over all experts."""
    chosen: int
    """Of the chosen experts' weights as they are divided by their sum."""
    applied: int
    """Of the weights that the experts' outputs are multiplied with; the product has the wider dtype of the two."""
    logits: int = 0
    """Of its logits, where that is not the compute dtype's."""
    source: str = MIXTRAL


def router_logits(x: Widths, router: Router) -> int:
    """Bytes of an element of the router's logits."""
    return router.logits or x.element


def softmax_router(x: Widths, *, narrowed: bool = False) -> Router:
    """Mixtral's router, in fp32 to the end; ``narrowed``: Qwen3's, which hands the weights on in the dtype of its logits."""
    return Router(4, 4, x.element) if narrowed else Router(4, 4, 4)


def routed_experts(x: Widths, moe: MoeSpec, router: Router, inputs: tuple[Line, ...] | None = None) -> Part:
    """Build a router and SwiGLU experts; every token visits ``t`` of them, so the sums do not depend on the routing.

    The grouped multiplication takes no part in autocast: the experts compute in the dtype of their weights. GPUs below
    compute capability 8.0 fall back to a loop, which is not modelled. ``inputs`` are what the router's product saves, where
    that is not its input in the compute dtype.
    """
    made = (_router_input(x, router),) if inputs is None else inputs
    routing = (*made, *_routing(x, moe, router))
    pairs = x.tokens * moe.num_experts_per_tok
    outer, inner = x.residual * pairs * x.hidden, x.residual * pairs * moe.moe_intermediate_size
    selected = Line(SAVED, outer, "tokens sorted by expert, input of the experts", "r·T·t·h", EXPERTS, READ)
    hidden = (
        Line(SAVED, 2 * inner, "experts: gate and up projections' output", "2·r·T·t·m", EXPERTS, BY_EXPERTS),
        Line(SAVED, inner, "experts: silu of the gate", "r·T·t·m", EXPERTS, BY_EXPERTS),
    )
    product = Line(SAVED, inner, "experts: gated product, input of the down projection", "r·T·t·m", EXPERTS, READ)
    outputs = Line(SAVED, outer, "experts: output before the routing weights", "r·T·t·h", EXPERTS, BY_EXPERTS)
    order = Line(SAVED, 8 * pairs, "order that undoes the sorting, int64", "8·T·t", EXPERTS)
    before = (*routing, selected, *hidden, product)
    expert, weight = moe.num_experts * x.hidden * moe.moe_intermediate_size, moe.num_experts * x.hidden
    return Part(
        (*before, outputs, order),
        (
            _weighting(x, moe, router, (*before, outputs)),
            *_expert_points(x, moe, router, before=(*routing, selected), hidden=hidden, product=product),
        ),
        3 * expert + weight,
        weight,
    )


def _router_input(x: Widths, router: Router) -> Line:
    return Line(SAVED, x.element * x.tokens * x.hidden, "input of the router", "e·T·h", router.source, OPERAND)


def _routing(x: Widths, moe: MoeSpec, router: Router) -> tuple[Line, ...]:
    tokens, pairs, experts = x.tokens, x.tokens * moe.num_experts_per_tok, moe.num_experts
    scores, chosen, applied = router.scores, router.chosen, router.applied
    fp32 = chosen == 4
    return (
        Line(SAVED, scores * tokens * experts, "router: scores of all experts", "4·T·E" if scores == 4 else "e·T·E", router.source),
        Line(
            SAVED, (8 + chosen) * pairs + chosen * tokens, "router: top-k indices, weights and their sum",
            "12·T·t + 4·T" if fp32 else "(8+e)·T·t + e·T", router.source,
        ),
        Line(SAVED, 16 * pairs + 4 * experts, "sorting of tokens by expert, int64, and group ends", "16·T·t + 4·E", EXPERTS),
        Line(SAVED, applied * pairs, "routing weights sorted by expert", "4·T·t" if applied == 4 else "e·T·t", EXPERTS),
    )  # fmt: skip


def _weighting(x: Widths, moe: MoeSpec, router: Router, alive: tuple[Line, ...]) -> BackwardPoint:
    """Product of expert outputs and routing weights: gradients of the product and of both factors before they are summed or cast.

    The outputs go before what follows where they were recomputed, since nothing but the product's own backward holds them.
    """
    pairs = x.tokens * moe.num_experts_per_tok
    outer, wide = pairs * x.hidden, max(x.residual, router.applied)
    reason = "gradients of the weighted outputs and of both factors"
    gradients = Line(GRADIENT, 3 * wide * outer, reason, "12·T·t·h" if wide == 4 else "3·r·T·t·h", EXPERTS)
    weight = moe.num_experts * x.hidden if x.autocast else 0
    last = () if x.recomputed else (_after_weighting(x, router, pairs),)
    name, place = "weighting of the expert outputs", Place(At.WEIGHTING, Module.EXPERTS)
    return BackwardPoint(name, (*alive, gradients, *last), 0, 0, weight, place=place, before=alive)


def _after_weighting(x: Widths, router: Router, pairs: Int) -> Line:
    if x.residual < router.applied:
        return Line(GRADIENT, x.residual * pairs * x.hidden, "gradient of the expert outputs, cast", "r·T·t·h", EXPERTS)
    wide = max(x.residual, router.applied)
    return Line(GRADIENT, wide * pairs, "gradient of the routing weights", "4·T·t" if wide == 4 else "e·T·t", EXPERTS)


def _expert_points(
    x: Widths, moe: MoeSpec, router: Router, *, before: tuple[Line, ...], hidden: tuple[Line, ...], product: Line
) -> tuple[BackwardPoint, ...]:
    """Products of the experts. Their input's gradient is brought back to its places before the router's product goes backward."""
    pairs = x.tokens * moe.num_experts_per_tok
    outer, inner = x.residual * pairs * x.hidden, x.residual * pairs * moe.moe_intermediate_size
    matrix = moe.num_experts * x.hidden * moe.moe_intermediate_size
    weight = moe.num_experts * x.hidden if x.autocast else 0
    down = Line(GRADIENT, outer + inner, "experts: gradients of output and of gated product", "r·T·t·(h+m)", EXPERTS)
    three = Line(GRADIENT, 3 * inner, "experts: gradients of the product, of silu and of up", "3·r·T·t·m", EXPERTS)
    both = Line(GRADIENT, 2 * inner, "experts: gradient of the gate and up projections' output", "2·r·T·t·m", EXPERTS)
    through = Line(GRADIENT, outer, "experts: gradient of their input", "r·T·t·h", EXPERTS)
    return (
        BackwardPoint("experts: down projection", (*before, *hidden, product, down), matrix, matrix, weight),
        BackwardPoint("experts: gated product", (*before, *hidden, three), matrix, 0, weight),
        BackwardPoint(
            "experts: gate and up projections", (*before, both, through), 3 * matrix, 2 * matrix, weight,
            (*before[:-1], through), _after_router(x, router),
        ),
    )  # fmt: skip


def _after_router(x: Widths, router: Router) -> tuple[Line, Line]:
    wide, size = router_logits(x, router), x.tokens * x.hidden
    return (
        Line(GRADIENT, x.residual * size, "gradient through the experts", "r·T·h", EXPERTS),
        Line(GRADIENT, wide * size, "gradient through the router", "4·T·h" if wide == 4 else "e·T·h", router.source),
    )

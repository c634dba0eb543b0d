"""Blocks of DeepSeek-V3: latent attention; a gated MLP in the first layers, routed and shared experts in the others."""

from zeroplan.ledger import PLAIN, Line, Module, Role, total_bytes
from zeroplan.numeric import Int, maximum
from zeroplan.spec.model import MlaSpec, ModelSpec, MoeSpec
from zeroplan.transformer.blocks import BlockPass
from zeroplan.transformer.families.latent import (
    attention_forward_bytes,
    kernel,
    kernel_outputs,
    latent_attention,
    projected_outputs,
)
from zeroplan.transformer.families.llama import (
    ATTENTION_EXCESS,
    SELECTIVE,
    dense_forward,
    gated_recompute,
    middle,
    norm_output,
)
from zeroplan.transformer.families.mixtral import experts_recompute, routing_tables, weighted_outputs
from zeroplan.transformer.families.mlp import gated_mlp, gated_outputs
from zeroplan.transformer.families.moe import Router, routed_experts
from zeroplan.transformer.families.norms import BEFORE_ATTENTION, BEFORE_MLP, rms_norm
from zeroplan.transformer.families.parts import GRADIENT, OPERAND, SAVED, TEMPORARY, Part, assemble
from zeroplan.transformer.families.widths import Widths

ROUTER = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3TopkRouter.forward"
MOE = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3MoE.forward"


def deepseek_block(model: ModelSpec, kind: str, x: Widths) -> BlockPass:
    """One block, dense or with experts."""
    if kind != "moe":
        return deepseek_dense(model, x)
    made = deepseek_moe(model, x)
    in_forward = (*made.checkpoint, *made.forward_recompute) if x.recomputed else (*made.saved, *made.forward)
    return made._replace(before_experts=tuple(line for line in in_forward if line.tag.module is not Module.EXPERTS))


def deepseek_dense(model: ModelSpec, x: Widths) -> BlockPass:
    """One of the first layers, with a gated MLP."""
    mla = _latent(model)
    mlp = gated_mlp(x, model.intermediate_size)
    later = gated_outputs(x, model.intermediate_size)
    return _block(model, x, mla, mlp, forward=dense_forward(x), recompute=gated_recompute(model, x), later=later)


def deepseek_moe(model: ModelSpec, x: Widths) -> BlockPass:
    """One decoder layer with a router over all experts, and experts that every token visits."""
    assert model.moe is not None  # noqa: S101  block_pass comes here for blocks of kind moe only
    mla, moe, router = _latent(model), model.moe, _router(x)
    shared = _shared(x, moe)
    experts = _experts(x, moe, router, shared)
    end = _added(x, moe, router)
    early = total_bytes((weighted_outputs(x, moe, router), routing_tables(x, moe, router)))
    late = (
        total_bytes(end[-3:])
        + total_bytes(shared.saved if x.autocast else shared.saved[1:])
        + (x.element * shared.casts if x.autocast else 0)
    )
    recompute = experts_recompute(x, moe, router)
    logits = Line(SAVED, router.scores * x.tokens * moe.num_experts, "output of the router", _ROUTED[router.scores], SELECTIVE)
    later = (logits, *map(_named, gated_outputs(x, moe.num_shared_experts * moe.moe_intermediate_size)))
    return _block(model, x, mla, experts, forward=(*end, _excess(early - late)), recompute=recompute, later=later)


_ROUTED = {2: "e·T·E", 4: "4·T·E"}


def _latent(model: ModelSpec) -> MlaSpec:
    assert model.mla is not None  # noqa: S101  the family always has it
    return model.mla


def _block(
    model: ModelSpec, x: Widths, mla: MlaSpec, mlp: Part, *,
    forward: tuple[Line, ...], recompute: tuple[Line, ...], later: tuple[Line, ...],
) -> BlockPass:  # fmt: skip
    parts = (
        rms_norm(x, BEFORE_ATTENTION), latent_attention(x, mla, bias=model.attention_bias), rms_norm(x, BEFORE_MLP), mlp
    )  # fmt: skip
    absent = x.element * (x.context * x.hidden + mlp.casts) if x.autocast else 0
    if kernel(x) != "efficient":
        at_end = total_bytes(parts[1].saved) + total_bytes(parts[2].saved) + total_bytes(mlp.saved) + total_bytes(forward)
        forward = (*forward, _excess(attention_forward_bytes(x, mla, recomputed=False) - absent - at_end))
    recompute = (*recompute, _excess(attention_forward_bytes(x, mla, recomputed=True) - absent - total_bytes(recompute)))
    selective = _selective(x, (*projected_outputs(x, mla, bias=model.attention_bias), *later))
    return assemble(x, parts, forward=forward, recompute=recompute, selective=selective, input_is_saved=x.residual == 4)


def _selective(x: Widths, products: tuple[Line, ...]) -> tuple[Line, ...]:
    """Every second plain matrix product of the block, and what the kernel of attention makes, where one computes it."""
    return (*products[::2], *(kernel_outputs(x) if kernel(x) == "efficient" else ()))


def _excess(n_bytes: Int) -> Line:
    return Line(TEMPORARY, maximum(0, n_bytes), ATTENTION_EXCESS, source=MOE)


# --- routed and shared experts ------------------------------------------------------------------------------------------


def _router(x: Widths) -> Router:
    """Sigmoid scores in fp32, whose multiplication autocast runs in 16 bits nevertheless."""
    width = x.element if x.autocast else 4
    return Router(width, width, width, width, ROUTER)


def _router_inputs(x: Widths, moe: MoeSpec) -> tuple[Line, ...]:
    """Outside autocast the router multiplies fp32 copies of its input and of its weight, where those are not fp32."""
    size = x.tokens * x.hidden
    if x.autocast or x.element == 4:
        return (Line(SAVED, x.element * size, "input of the router", "e·T·h", ROUTER, OPERAND),)
    return (
        Line(SAVED, 4 * size, "input of the router, cast", "4·T·h", ROUTER, OPERAND),
        Line(SAVED, 4 * moe.num_experts * x.hidden, "router's weight, cast", "4·E·h", ROUTER),
    )


def _shared(x: Widths, moe: MoeSpec) -> Part:
    """A gated MLP; a tensor that is there at several points stays one line."""
    part, made = gated_mlp(x, moe.num_shared_experts * moe.moe_intermediate_size), dict[int, Line]()

    def named(lines: tuple[Line, ...]) -> tuple[Line, ...]:
        return tuple(made.setdefault(id(line), _named(line)) for line in lines)

    points = [point._replace(lines=named(point.lines), between=named(point.between)) for point in part.points]
    return part._replace(saved=named(part.saved), points=tuple(points))


def _named(line: Line) -> Line:
    """Say that a line of a gated MLP is of the shared experts, whose width is n·m."""
    tag = PLAIN if line.tag.role is Role.OUTPUT else line.tag
    reason, formula = f"shared experts: {line.reason}", line.formula.replace("f", "n·m")
    return line._replace(reason=reason, formula=formula, source=MOE, tag=tag)


def _shared_saved(x: Widths, shared: Part) -> tuple[Line, ...]:
    """In 32 bits the router multiplies the very input of the shared experts, which counts there."""
    return shared.saved[1:] if x.element == 4 else shared.saved


def _experts(x: Widths, moe: MoeSpec, router: Router, shared: Part) -> Part:
    """Shared experts go first in the backward, beside all that the routed ones saved; their input's gradient waits."""
    routed = routed_experts(x, moe, router, _router_inputs(x, moe))
    below = routed.saved[1:] if x.element == 4 else routed.saved
    through = Line(GRADIENT, x.residual * x.tokens * x.hidden, "gradient through the shared experts", "r·T·h", MOE)
    casts = routed.casts if x.autocast else 0
    first = [
        point._replace(
            name="shared experts: " + point.name,
            lines=(*below, *point.lines),
            live_casts=point.live_casts + casts,
            between=(*below, *point.between) if point.between else (),
        )
        for point in shared.points
    ]
    then = [
        point._replace(
            lines=(*point.lines, through),
            gradients=point.gradients + shared.weights,
            handed_on=(*point.handed_on, through) if point.handed_on else (),
            before=(*point.before, through) if point.before else (),
        )
        for point in routed.points
    ]
    saved = (*routed.saved, *_shared_saved(x, shared))
    return Part(saved, (*first, *then), routed.weights + shared.weights, routed.casts + shared.casts)


def _added(x: Widths, moe: MoeSpec, router: Router) -> tuple[Line, ...]:
    """What is alive beyond the saved tensors as the shared experts' output is added, the last three lines not before."""
    size = x.tokens * x.hidden
    pairs = x.tokens * moe.num_experts_per_tok
    width = router.applied
    tables = Line(
        TEMPORARY, width * (pairs + x.tokens * moe.num_experts), "router: logits and weights held by name",
        "4·T·(t+E)" if width == 4 else "e·T·(t+E)", ROUTER,
    )  # fmt: skip
    lines = (
        tables,
        Line(TEMPORARY, x.element * size, "output of the shared experts", "e·T·h", MOE),
        Line(TEMPORARY, 2 * x.residual * size, "output of the routed experts, and the sum", "2·r·T·h", MOE),
    )
    if x.autocast:
        return (norm_output(x), *lines)
    return lines if x.residual == 4 else (middle(x), *lines)

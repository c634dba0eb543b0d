"""FSDP2 going forward: one block gathered at a time, the buffer before it parked until the next copy-out.

Until that ends in torch 2.13, where a local of ``wait_for_unshard`` still names it; until it begins in 2.15.
"""

from collections.abc import Iterator

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2.buffers import (
    PARKED,
    POST_FORWARD,
    RELEASED,
    being_gathered,
    cast_alone,
    flowing,
    kept,
    last_gathered,
    root_unsharded,
    still_unsharded,
    unsharded,
)
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, ceil_div, maximum, where


def left_by_earlier(plan: Plan) -> tuple[Line, ...]:
    """Gradients of earlier micro-batches, while a later one runs forward: shards, or whole ones under ``no_sync``."""
    if not plan.recipe.sync_every_micro_batch:
        return plan.left_behind(plan.every_layer)
    none = tuple(0 for _ in plan.blocks)
    return (plan.gradient_shards(none, "of earlier micro-batches"),)


def forward(plan: Plan) -> Iterator[Moment]:
    """Each block where memory can peak: while it is unsharded, and while it computes."""
    left = left_by_earlier(plan)
    if alone := cast_alone(plan, plan.root):
        lines = (*plan.persistent, *left, root_unsharded(plan), *alone)
        yield Moment("forward: casting the root group", Phase.FORWARD, _there(1 - plan.gathers, lines))
    for position in plan.corners:
        group, one = plan.blocks[position.run], plan.passes[position.run]
        below = plan.root if position.previous_run is None else plan.blocks[position.previous_run]
        before = (
            *plan.persistent,
            *left,
            root_unsharded(plan),
            *kept(plan, position.before),
            *still_unsharded(plan, position.before),
        )
        beside = (*plan.head.forward, *(plan.head.first_input if position.layer else ()))
        common = (
            *before,
            unsharded(plan, group),
            last_gathered(plan, group, "this block's, parked until the next copy-out", PARKED),
            *beside,
        )
        entering = _parked_before(plan, below)
        if group.experts is not None:
            from zeroplan.engines.fsdp2 import experts  # noqa: PLC0415  the others' answers need not wait for it

            yield from experts.entering(plan, position, before, entering, (*beside, *one.checkpoint))
        elif plan.of_torch_2_15:
            lines = (*before, *being_gathered(plan, position.run), entering, *beside, *one.checkpoint)
            yield Moment(f"forward: gathering {position.name}", Phase.FORWARD, lines)
        else:
            yield Moment(f"forward: unsharding {position.name}", Phase.FORWARD, (*common, entering, *one.checkpoint))
        if alone := cast_alone(plan, group):
            lines = _there(1 - plan.gathers, (*common, *alone, *one.checkpoint))
            yield Moment(f"forward: casting {position.name}", Phase.FORWARD, lines)
        again = plan.recomputes[position.run]
        inside = (*one.saved, *one.forward) if again == "none" else (*one.kept(again), *one.forward_recompute)
        yield Moment(f"forward of {position.name}", Phase.FORWARD, (*common, *one.entered, *inside))
        if plan.of_torch_2_15 and not isinstance(plan.reshard, bool):
            yield _resharding(plan, position, common)


def _resharding(plan: Plan, position: Position, common: tuple[Line, ...]) -> Moment:
    """The block has run and is cut to its smaller shard, beside its input, which its first norm may have saved, and its output.

    ``fully_shard`` treats as many ways as ranks as ``True``.
    """
    one, again = plan.passes[position.run], plan.recomputes[position.run]
    inside = (*one.checkpoint_in_backward, *one.saved) if again == "none" else one.kept(again)
    made = flowing(plan, "this block's output")._replace(kind=Kind.TEMPORARY)
    lines = (*common, *inside, made, _cut(plan, position.run))
    return Moment(f"forward: resharding {position.name}", Phase.FORWARD, _there(where(plan.n == plan.reshard, 0, 1), lines))


def _there(there: Int, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """The lines of a moment that some places of a column lack (``there`` is 0): all are 0 at those places."""
    return lines if isinstance(there, int) else tuple(line._replace(n_bytes=line.n_bytes * there) for line in lines)


def _cut(plan: Plan, run: int) -> Line:
    """One parameter after the other is cut to its smaller shard, which is copied before the whole goes; what all take together."""
    ways, width = int(plan.reshard), plan.width.compute
    most: Int = 0
    done: Int = 0
    for parameter in plan.runs[run].parameters:
        whole = ceil_div(parameter.shape[0], plan.n) * plan.n * (parameter.numel // parameter.shape[0])
        most, done = maximum(most, done + whole // ways), done + whole // ways - whole
    formula = product(width, most) if isinstance(most, int) else ""
    return Line(Kind.UNSHARDED_PARAMETERS, width * most, "smaller shards beside what is still whole", formula, POST_FORWARD)


def _parked_before(plan: Plan, below: Group) -> Line:
    if plan.of_torch_2_15:
        return last_gathered(plan, below, "the one before, freed when this one is copied out", RELEASED)
    return last_gathered(plan, below, "the one before, freed at the end of the copy-out", PARKED)


def loss_forward(plan: Plan) -> Moment:
    """All blocks have run; the last one's buffer is parked until the root's forward ends, as it has where the loss is chunked."""
    parked = last_gathered(plan, plan.blocks[-1], "the last block's, parked until the root's forward ends", PARKED)
    lines = (
        *plan.persistent,
        *left_by_earlier(plan),
        root_unsharded(plan),
        *kept(plan, plan.every_layer, every=True),
        *still_unsharded(plan, plan.every_layer),
        *(() if plan.recipe.loss == "chunked" else (parked,)),
        *plan.head.saved,
        *plan.head.loss_forward,
    )
    return Moment("loss, forward", Phase.LOSS, lines, of_forward=True)

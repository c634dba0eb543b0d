"""The moments of reducing a stage's gradients, when all micro-batches are through."""

from collections.abc import Iterator

from zeroplan.engines.fsdp2 import buffers
from zeroplan.engines.fsdp2.buffers import reduce_output_bytes
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import REDUCE, Plan
from zeroplan.engines.pipeline.gradients import accumulated, as_made, in_elements, reduced, sizes_of_block
from zeroplan.engines.pipeline.lines import unsharded_parameters
from zeroplan.engines.pipeline.tensor import taking_its_share
from zeroplan.engines.pipeline.waiting import Rank
from zeroplan.engines.pipeline.walk import State
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import maximum


def reducing(rank: Rank, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """Group after group is sharded again and its gradients are reduced: the root group, then the blocks from the first on.

    What is left falls from block to block or grows, so that the first and the last of each kind are enough.
    """
    plan = rank.stages[state.chunk].plan
    whole = plan if state.earlier[state.chunk] else plan._replace(reduce_bytes=plan.width.compute)
    fresh = bool(state.fresh and state.fresh[state.chunk] and state.earlier[state.chunk])
    if plan.root.numel:
        alive = (*common, *_left(whole, plan.every_layer, fresh=fresh), *_unsharded_blocks(plan, plan.every_layer))
        if plan.at_embedding is not None:
            yield taking_its_share(whole, alive)
        yield _reduction(plan, plan.root, whole.reduce_bytes, plan.last_root_elements, "the root group", alive)
    for run, count in enumerate(plan.every_layer):
        for block in sorted({0, count - 1}) if _may_grow(plan) else (0,):
            after = tuple(0 if at < run else here - (at == run) * (block + 1) for at, here in enumerate(plan.every_layer))
            done = tuple(here if at < run else block * (at == run) for at, here in enumerate(plan.every_layer))
            alive = (*common, *_left(whole, after, fresh=fresh), *_done(plan, done), *_unsharded_blocks(plan, after))
            yield from _reducing_block(plan, run, whole.reduce_bytes, alive, is_first=block == 0)


def _may_grow(plan: Plan) -> bool:
    """Whether what a reduction leaves can be more than what it takes: shards in a wider dtype, beside all-reduces over replicas."""
    return plan.has_experts_apart or plan.reduce_bytes < plan.width.stored


def _reducing_block(plan: Plan, run: int, width: int, alive: tuple[Line, ...], *, is_first: bool) -> Iterator[Moment]:
    last, name = sizes_of_block(plan, run)[-1], f"the {'first' if is_first else 'last'} {plan.runs[run].kind} block"
    if plan.blocks[run].experts is None:
        yield _reduction(plan, plan.blocks[run], width, last, name, alive)
        return
    from zeroplan.engines.pipeline import experts  # noqa: PLC0415  the others' answers need not wait for it

    yield from experts.reducing(plan, run, width, name, (alive, experts.waiting(plan, run, is_first=is_first)))


def _left(plan: Plan, layers: tuple[int, ...], *, fresh: bool) -> Iterator[Line]:
    yield accumulated(plan, layers, root=False)
    if fresh:
        yield as_made(plan, layers, root=False)


def _unsharded_blocks(plan: Plan, layers: tuple[int, ...]) -> tuple[Line, ...]:
    return (unsharded_parameters(plan, layers, "blocks not sharded again yet", root=False),)


def _done(plan: Plan, layers: tuple[int, ...]) -> Iterator[Line]:
    """Shards, and what the all-reduce over replicas still holds of them where they are a copy of it."""
    shards = plan.trained_shards(layers, plan.trained_outside)
    yield reduced(plan, layers, "this rank's chunk of the gradients, reduced so far")
    if plan.reduce_bytes != plan.width.stored or plan.offloaded:
        held = plan.replicated * plan.reduce_bytes * shards
        line = Line(Kind.REDUCE, held, "all-reduces over replicas, held until all are over", source=REDUCE)
        yield in_elements(line, plan.reduce_bytes)


def _reduction(plan: Plan, group: Group, width: int, last: int, name: str, alive: tuple[Line, ...]) -> Moment:
    """Gradients are copied into the input; then the output joins it, all gradients gone but the ``last``, which has a name.

    They are ``width`` bytes wide until then.
    """
    whole, named = width * group.numel, plan.gathers * width * last
    n_bytes = maximum(whole, reduce_output_bytes(plan, group) + named)
    reason = "its gradients while copied in, or the reduce-scatter output and the last of them"
    made = Line(Kind.UNSHARDED_GRADIENTS, n_bytes, reason, source=REDUCE)
    made = in_elements(made, plan.width.compute)
    return Moment(f"reducing {name}", Phase.BACKWARD, (*alive, _reduce_input(plan, group), made))


def _reduce_input(plan: Plan, group: Group) -> Line:
    return in_elements(buffers.reduce_input(plan, group, "reduce-scatter input"), plan.reduce_bytes)

"""What FSDP1 sends per step: all-gathers before use, reduce-scatters after backward, all-reduces over replicas."""

from collections.abc import Iterator

from zeroplan.engines.fsdp1.adapters import IGNORED
from zeroplan.engines.fsdp1.flat import FlatPlan, adapter_units, frozen_units
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.traffic import REPLICAS, ROOT, gather, over_replicas, reduce_scatter
from zeroplan.ledger import Collective, Phase
from zeroplan.numeric import Int, ceil_div
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh


def collectives(plan: FlatPlan, mesh: Mesh, batch: Batch) -> tuple[Collective, ...]:
    """Every collective of one optimizer step.

    At stage 2 under ``no_sync`` parameters stay gathered from one micro-batch to the next (``_should_free_in_backward``).
    """
    passes, synced = batch.grad_accum_steps, plan.recipe.sync_every_micro_batch
    once: Int = 1 if plan.reshard is False and not synced else passes
    reductions: Int = passes if synced else 1
    reduced = reductions if plan.trained_root.numel else 0
    calls = list(_of_unit(plan, mesh, plan.root, ROOT, 1, (once, 0, reduced), is_root=True))
    again: Int = 0 if plan.reshard is False else passes * (1 + plan.options.checkpoints_units)
    if plan.is_partly_frozen:
        return (*calls, *_beside_adapters(plan, mesh, (once, again, reductions)))
    for group, run in zip(plan.blocks, plan.runs, strict=True):
        calls += _of_unit(plan, mesh, group, f"{run.words} blocks", run.layers, (once, again, reductions))
    return tuple(calls)


def _beside_adapters(plan: FlatPlan, mesh: Mesh, times: tuple[Int, Int, Int]) -> Iterator[Collective]:
    """The frozen units, and adapters, whose units are gathered once more where their layers run again."""
    once, again, reductions = times
    more = 2 * again if plan.recomputed and not plan.options.checkpoints_units else again
    for at, (group, run) in enumerate(zip(frozen_units(plan), plan.runs, strict=True)):
        yield from _of_unit(plan, mesh, group, f"frozen {run.words} blocks", run.layers, (once, again, 0))
        for unit in adapter_units(plan, at):
            if plan.options.ignores_adapters:
                yield _all_reduce(plan, unit, reductions * run.layers, f"gradients of adapters of {run.words} blocks")
                continue
            yield from _of_unit(plan, mesh, unit, f"adapters of {run.words} blocks", run.layers, (once, more, reductions))


def _all_reduce(plan: FlatPlan, unit: Group, calls: Int, what: str) -> Collective:
    """All-reduces of a matrix that every rank has whole."""
    payload: Int = plan.width.stored * unit.numel
    sent: Int = 2 * calls * ceil_div(payload, plan.n) * (plan.n - 1)
    return Collective("all_reduce", what, "backward", plan.n, calls, payload, sent, 2 * calls * unit.numel, IGNORED)


def _of_unit(
    plan: FlatPlan, mesh: Mesh, group: Group, name: str, layers: int, times: tuple[Int, Int, Int], *, is_root: bool = False
) -> Iterator[Collective]:
    forward, backward, reductions = times
    made = [gather(plan, group, forward * layers, f"parameters of {name}", Phase.FORWARD, ranks=plan.n)]
    if not isinstance(backward, int) or backward:
        made.append(gather(plan, group, backward * layers, f"parameters of {name}", Phase.BACKWARD, ranks=plan.n))
    if not isinstance(reductions, int) or reductions:
        made += (
            reduce_scatter(plan, group, reductions * layers, f"gradients of {name}", ranks=plan.n),
            over_replicas(plan, group, reductions * layers, f"{REPLICAS} of {name}", mesh.dp_replicate),
        )
    yield from (call._replace(is_root=is_root) for call in made)

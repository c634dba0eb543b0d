"""What FSDP2 sends per step: all-gathers before use, reduce-scatters after backward, all-reduces over replicas."""

from collections.abc import Iterator

from zeroplan.engines.fsdp2.buffers import GATHER
from zeroplan.engines.fsdp2.plan import REDUCE, Group, Plan
from zeroplan.ledger import Collective
from zeroplan.numeric import Int, ceil_div, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh

#: What the collectives of the root group, and those over replicas, are said to carry.
ROOT, REPLICAS = "the root group", "gradient shards"


def collectives(plan: Plan, mesh: Mesh, batch: Batch) -> tuple[Collective, ...]:
    """Every collective of one optimizer step.

    The root group is gathered once per micro-batch, blocks twice where they are resharded in between: somewhat less than the
    3Ψ of the ZeRO paper (arXiv:1910.02054, section 7).
    """
    reductions: Int = batch.grad_accum_steps if plan.recipe.sync_every_micro_batch else 1
    calls = list(_of_group(plan, (plan.root, plan.trained_root), 1, ROOT, mesh, batch.grad_accum_steps, reductions))
    for *groups, run in zip(plan.blocks, plan.trained_blocks, plan.runs, strict=True):
        calls += _of_group(
            plan, (groups[0], groups[1]), run.layers, f"{run.kind} blocks", mesh, batch.grad_accum_steps, reductions
        )
    return tuple(calls)


def _of_group(
    plan: Plan, groups: tuple[Group, Group], layers: int, name: str, mesh: Mesh, passes: Int, reductions: Int
) -> Iterator[Collective]:  # fmt: skip
    (group, trained), what = groups, f"parameters of {name}"
    yield _gather(plan, group, passes * layers, what, "forward", ranks=plan.n)
    if plan.reshard is not False and group is not plan.root:
        ranks = plan.n if plan.reshard is True else plan.reshard
        yield _gather(plan, group, passes * layers, what, "backward", ranks=ranks)
    yield _reduce_scatter(plan, trained, reductions * layers, f"gradients of {name}")
    yield _over_replicas(plan, trained, reductions * layers, f"{REPLICAS} of {name}", mesh.dp_replicate)


def _gather(plan: Plan, group: Group, calls: Int, what: str, when: str, *, ranks: Int) -> Collective:
    payload: Int = plan.width.compute * group.padded
    each: Int = ceil_div(payload, ranks)
    sent: Int = calls * each * (ranks - 1)
    elements = where(plan.n > 1, calls * group.padded, 0)
    return Collective("all_gather", what, when, ranks, calls, payload, sent, elements, GATHER)


def _reduce_scatter(plan: Plan, group: Group, calls: Int, what: str) -> Collective:
    payload: Int = plan.reduce_bytes * group.padded
    each: Int = plan.reduce_bytes * group.shard
    sent: Int = calls * each * (plan.n - 1)
    elements = where(plan.n > 1, calls * group.padded, 0)
    return Collective("reduce_scatter", what, "backward", plan.n, calls, payload, sent, elements, REDUCE)


def _over_replicas(plan: Plan, group: Group, calls: Int, what: str, replicas: Int) -> Collective:
    payload: Int = plan.reduce_bytes * group.shard
    each: Int = ceil_div(payload, replicas)
    sent: Int = 2 * calls * each * (replicas - 1)
    elements = where(replicas > 1, 2 * calls * group.shard, 0)
    return Collective("all_reduce", what, "backward", replicas, calls, payload, sent, elements, REDUCE)

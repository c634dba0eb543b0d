"""What FSDP2 sends per step: all-gathers before use, reduce-scatters after backward, all-reduces over replicas."""

from collections.abc import Iterator

from zeroplan.engines.fsdp2.buffers import GATHER
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import REDUCE, Plan
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Int, ceil_div, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec

#: What the collectives of the root group, those over replicas, and those of experts on several ranks are said to carry.
ROOT, REPLICAS, EXPERTS = "the root group", "gradient shards", "experts of"
#: What those of ranks that share a sequence are.
KEYS = "keys and values"
MUON = "torch 2.13, torch/optim/_muon.py, _zeropower_via_newtonschulz"
_BF16 = 2
#: Of Newton-Schulz, for each matrix (``ns_steps``).
_ITERATIONS = 5


def collectives(plan: Plan, mesh: Mesh, batch: Batch, model: ModelSpec) -> tuple[Collective, ...]:
    """Every collective of one optimizer step.

    The root group is gathered once per micro-batch, blocks twice where they are resharded in between: somewhat less than the
    3Ψ of the ZeRO paper (arXiv:1910.02054, section 7).
    """
    reductions: Int = batch.grad_accum_steps if plan.recipe.sync_every_micro_batch else 1
    calls = list(_outside(plan, mesh, batch.grad_accum_steps, reductions))
    for *groups, run, one in zip(plan.blocks, plan.trained_blocks, plan.runs, plan.passes, strict=True):
        name, backward = f"{run.words} blocks", run.layers if one.points else 1  # the uppermost that no gradient reaches
        if groups[0].experts is not None:
            from zeroplan.engines.fsdp2.experts import exchanges  # noqa: PLC0415  keeps start-up fast

            calls += _of_group(
                plan, (groups[0].of_experts, groups[1].of_experts), run.layers, f"{EXPERTS} {name}", mesh,
                batch.grad_accum_steps, reductions, backward=backward, ranks=groups[0].experts.ranks,
            )  # fmt: skip
            calls += exchanges(plan, run, mesh, batch, model)
        beside = (groups[0].beside_experts, groups[1].beside_experts)
        calls += _of_group(plan, beside, run.layers, name, mesh, batch.grad_accum_steps, reductions, backward=backward)
    if plan.at_embedding is not None:
        from zeroplan.engines.fsdp2.split import split_collectives  # noqa: PLC0415  keeps start-up fast

        calls += split_collectives(plan, batch, model, int(mesh.tp), reductions=reductions)
    if mesh.cp != 1:
        from zeroplan.engines.fsdp2.context import exchanged  # noqa: PLC0415  as above

        calls += exchanged(plan, batch, model, mesh)
    if plan.recipe.optimizer == "muon":
        calls += of_muon(plan)
    return tuple(calls)


def of_muon(plan: Plan) -> Iterator[Collective]:
    """What DTensor sends while Muon takes each matrix of a block, whose rows are sharded, through five Newton-Schulz iterations.

    Each iteration multiplies the matrix by its transpose, the product by itself, and that by the matrix, and each time DTensor
    gathers one factor. Of a matrix with more rows than columns the transpose is taken, whose product with its own transpose is a
    sum over ranks; two operators read it, and each has it summed up for itself. Before, the norm is summed up.
    """
    norms, gathers, sums = 0, list[tuple[Int, Int]](), list[tuple[Int, Int]]()
    for run in plan.runs:
        for one in (one for one in run.parameters if len(one.shape) == 2 and not one.frozen):
            rows, columns = one.shape
            norms += run.layers
            if rows > columns:
                sums.append((2 * _ITERATIONS * run.layers, columns * columns))
                continue
            padded = ceil_div(rows, plan.n) * plan.n
            gathers += [(2 * _ITERATIONS * run.layers, padded * columns), (_ITERATIONS * run.layers, padded * rows)]
    kinds = ("all_gather", gathers, 1), ("all_reduce", [(norms, 1), *sums], 2)
    for operation, each, times in kinds:
        calls = sum(count for count, _ in each)
        elements: Int = 0
        for count, size in each:
            elements = elements + count * size
        sent = times * (_BF16 * elements * (plan.n - 1) // plan.n)
        volume = where(plan.n > 1, times * elements, 0)
        if calls:
            yield Collective(
                operation, "matrices that Muon multiplies", "optimizer step", plan.n, calls, _BF16 * elements // calls, sent,
                volume, MUON, of_all=_BF16 * elements, phase=Phase.STEP,
            )  # fmt: skip


def _outside(plan: Plan, mesh: Mesh, passes: Int, reductions: Int) -> Iterator[Collective]:
    """The root group, or embedding and head as units of their own, of which the embedding is gathered again for its backward."""
    for group, trained in zip(plan.outside, plan.trained_outside, strict=True):
        embeds = plan.ends is not None and group is plan.ends.embedding
        name = ROOT if plan.ends is None else "the embedding" if embeds else "final norm and head"
        again = int(embeds and bool(plan.passes[plan.corners[0].run].points))
        yield from _of_group(plan, (group, trained), 1, name, mesh, passes, reductions, backward=again, is_root=True)


def _of_group(
    plan: Plan, groups: tuple[Group, Group], layers: int, name: str, mesh: Mesh, passes: Int, reductions: Int,
    *, backward: int = 0, ranks: Int | None = None, is_root: bool = False,
) -> Iterator[Collective]:  # fmt: skip
    (group, trained), what = groups, f"parameters of {name}"
    sharing = plan.n if ranks is None else ranks
    among = Among.SHARDS if ranks is None else Among.SHARDS_OF_EXPERTS
    calls = [gather(plan, group, passes * layers, what, Phase.FORWARD, ranks=sharing)]
    if plan.reshard is not False and backward:
        again = sharing if plan.reshard is True else plan.reshard
        calls.append(gather(plan, group, passes * backward, what, Phase.BACKWARD, ranks=again))
    calls.append(reduce_scatter(plan, trained, reductions * layers, f"gradients of {name}", ranks=sharing))
    yield from (call._replace(among=among, is_root=is_root) for call in calls)
    replicas = over_replicas(plan, trained, reductions * layers, f"{REPLICAS} of {name}", mesh.dp_replicate)
    yield replicas._replace(is_root=is_root)


def gather(plan: Plan, group: Group, calls: Int, what: str, phase: Phase, *, ranks: Int) -> Collective:
    """All-gathers of one group's parameters."""
    payload: Int = plan.width.compute * group.padded
    each: Int = ceil_div(payload, ranks)
    sent: Int = calls * each * (ranks - 1)
    elements = where(ranks > 1, calls * group.padded, 0)
    return Collective("all_gather", what, phase.value, ranks, calls, payload, sent, elements, GATHER, phase=phase)


def reduce_scatter(plan: Plan, group: Group, calls: Int, what: str, *, ranks: Int) -> Collective:
    """Reduce-scatters of one group's gradients."""
    payload: Int = plan.reduce_bytes * group.padded
    each: Int = plan.reduce_bytes * group.shard
    sent: Int = calls * each * (ranks - 1)
    elements = where(ranks > 1, calls * group.padded, 0)
    return Collective("reduce_scatter", what, "backward", ranks, calls, payload, sent, elements, REDUCE)


def over_replicas(plan: Plan, group: Group, calls: Int, what: str, replicas: Int) -> Collective:
    """All-reduces of the shards that reduce-scatters leave."""
    payload: Int = plan.reduce_bytes * group.shard
    each: Int = ceil_div(payload, replicas)
    sent: Int = 2 * calls * each * (replicas - 1)
    elements = where(replicas > 1, 2 * calls * group.shard, 0)
    return Collective("all_reduce", what, "backward", replicas, calls, payload, sent, elements, REDUCE, among=Among.REPLICAS)

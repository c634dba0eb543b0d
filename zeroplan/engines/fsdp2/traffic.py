"""FSDP2's traffic per step: all-gathers before use, reduce-scatters after backward, all-reduces over replicas."""

from collections.abc import Iterator
from functools import partial
from itertools import product

from zeroplan.engines import dion
from zeroplan.engines.fsdp2.buffers import GATHER
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.lines import unsharded_bytes
from zeroplan.engines.fsdp2.plan import REDUCE, Plan
from zeroplan.engines.muon import SOURCE, for_ranks, sent_by, updated_by_muon
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Int, ceil_div, for_each_value, maximum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import BlockRun

#: The payloads of the root group's collectives, of those over replicas, and of experts on several ranks, in words.
ROOT, REPLICAS, EXPERTS = "the root group", "gradient shards", "experts of"
#: The payload among ranks that share a sequence.
KEYS = "keys and values"
_BF16 = 2
_BY_MUON = {"all_gather": 1, "all_reduce": 2, "reduce_scatter": 1, "all_to_all": 1}
"""The collectives that DTensor may choose, and how often a ring sends each one's payload."""


def collectives(plan: Plan, mesh: Mesh, batch: Batch, model: ModelSpec) -> tuple[Collective, ...]:
    """Return every collective of one optimizer step.

    The root group is gathered once per micro-batch, blocks twice if they are resharded in between: somewhat less than the 3Ψ of
    the ZeRO paper (arXiv:1910.02054, section 7).
    """
    reductions: Int = batch.grad_accum_steps if plan.recipe.sync_every_micro_batch else 1
    calls = list(_outside(plan, mesh, batch.grad_accum_steps, reductions))
    uppermost = max((at for at, one in enumerate(plan.passes) if not one.points), default=None)  # run that no gradient reaches
    for at, (*groups, run, one) in enumerate(zip(plan.blocks, plan.trained_blocks, plan.runs, plan.passes, strict=True)):
        name, backward = f"{run.words} blocks", run.layers if one.points else int(at == uppermost)
        if groups[0].experts is not None:
            from zeroplan.engines.fsdp2.experts import exchanges  # noqa: PLC0415  keeps start-up fast

            calls += _of_group(
                plan, (groups[0].of_experts, groups[1].of_experts), run.layers, f"{EXPERTS} {name}", mesh,
                batch.grad_accum_steps, reductions, backward=backward, ranks=groups[0].experts.ranks,
            )  # fmt: skip
            calls += exchanges(plan, run, mesh, batch, model)
        if plan.recipe.fsdp2.keeps_last and plan.reshard is True and at == plan.walk[-1].run:
            backward -= 1  # the last block is still gathered
        beside = (groups[0].beside_experts, groups[1].beside_experts)
        calls += _of_group(plan, beside, run.layers, name, mesh, batch.grad_accum_steps, reductions, backward=backward)
        if plan.recipe.fsdp2.float8_all_gather:
            calls += _largest_values(plan, run, name, batch.grad_accum_steps)
    if plan.at_embedding is not None:
        from zeroplan.engines.fsdp2.split import split_collectives  # noqa: PLC0415  keeps start-up fast

        calls += split_collectives(plan, batch, model, int(mesh.tp), reductions=reductions)
    if mesh.cp != 1:
        from zeroplan.engines.fsdp2.context import exchanged  # noqa: PLC0415  as above

        calls += exchanged(plan, batch, model, mesh)
    if plan.recipe.optimizer == "muon":
        calls += of_muon(plan, mesh.dp_replicate)
    if plan.recipe.optimizer == "dion-muon":
        calls += of_dion(plan)
    return tuple(calls)


def _largest_values(plan: Plan, run: BlockRun, name: str, passes: Int) -> Iterator[Collective]:
    """Yield what ranks exchange before they gather a run's blocks in float8."""
    from zeroplan.engines.fsdp2.float8 import largest_values  # noqa: PLC0415  few jobs have it

    for phase in (Phase.FORWARD, Phase.BACKWARD) if plan.reshard is not False else (Phase.FORWARD,):
        yield largest_values(run.parameters, plan.width.stored, passes * run.layers, name, plan.n, phase)


def of_muon(plan: Plan, replicas: Int) -> Iterator[Collective]:
    """Yield DTensor's collectives while Muon updates each matrix of a block, whose rows are sharded."""
    matrices = [tensor for tensor in plan.local_tensors if updated_by_muon(tensor)]
    for (operation, times), among in product(_BY_MUON.items(), (Among.SHARDS, Among.REPLICAS)):
        group = plan.n if among is Among.SHARDS else replicas
        calls, n_bytes = _of_matrices(matrices, plan.width.stored, operation, over_replicas=among is Among.REPLICAS)
        sent = where(group > 1, times * (n_bytes * (group - 1) // group), 0)
        volume = where(group > 1, times * n_bytes // _BF16, 0)
        if isinstance(calls, int) and not calls:
            continue
        yield Collective(
            operation, "matrices that Muon multiplies", "optimizer step", group, calls, n_bytes // maximum(calls, 1), sent,
            volume, SOURCE, of_all=n_bytes, phase=Phase.STEP, among=among,
        )  # fmt: skip


def of_dion(plan: Plan) -> Iterator[Collective]:
    """Yield the two all-to-alls of each shape's matrices in dion's Muon."""
    for one in dion.batches(plan.local_tensors):
        n_bytes = for_each_value(one.sent, plan.n)
        sent, volume = 2 * (n_bytes // plan.n * (plan.n - 1)), where(plan.n > 1, 2 * n_bytes // _BF16, 0)
        yield Collective(
            "all_to_all", f"matrices of {one.rows} x {one.columns}", "optimizer step", plan.n, 2, n_bytes, sent, volume,
            dion.SOURCE, phase=Phase.STEP,
        )  # fmt: skip


def _of_matrices(matrices: list[LocalTensor], width: int, operation: str, *, over_replicas: bool) -> tuple[Int, Int]:
    """Return the number of calls of one collective in a step, and their total bytes."""
    sent = partial(sent_by, operation=operation, over_replicas=over_replicas)
    calls: Int = 0
    n_bytes: Int = 0
    for one in matrices:
        calls = calls + one.repeat * for_ranks(one, width, lambda events: len(sent(events)))
        n_bytes = n_bytes + one.repeat * for_ranks(one, width, lambda events: sum(sent(events)))
    return calls, n_bytes


def _outside(plan: Plan, mesh: Mesh, passes: Int, reductions: Int) -> Iterator[Collective]:
    """Yield the collectives of the root group, or of embedding and head. The backward gathers the embedding again."""
    for group, trained in zip(plan.outside, plan.trained_outside, strict=True):
        embeds = plan.ends is not None and group is plan.ends.embedding
        name = ROOT if plan.ends is None else "the embedding" if embeds else "final norm and head"
        again = int(embeds and bool(plan.passes[plan.corners[0].run].points))
        yield from _of_group(plan, (group, trained), 1, name, mesh, passes, reductions, backward=again, is_root=True)


def _of_group(
    plan: Plan, groups: tuple[Group, Group], layers: int, name: str, mesh: Mesh, passes: Int, reductions: Int,
    *, backward: int = 0, ranks: Int | None = None, is_root: bool = False,
) -> Iterator[Collective]:  # fmt: skip
    sharing = plan.n if ranks is None else ranks
    calls = passes * layers, passes * backward if backward and plan.reshard is not False else 0, reductions * layers
    again = sharing if isinstance(plan.reshard, bool) else plan.reshard
    for call in of_units(plan, groups, name, calls, ranks=(sharing, again), replicas=mesh.dp_replicate):
        shards = Among.SHARDS if ranks is None else Among.SHARDS_OF_EXPERTS
        yield call._replace(among=shards if call.among is Among.SHARDS else call.among, is_root=is_root)


def of_units(
    plan: Plan, groups: tuple[Group, Group], name: str, calls: tuple[Int, Int, Int], *, ranks: tuple[Int, Int], replicas: Int
) -> Iterator[Collective]:  # fmt: skip
    """Yield the collectives of units with these parameters, of which the second group is trained.

    ``calls``: how often a step gathers them in forward and in backward, and reduces them. ``ranks``: of the two gathers.
    """
    (group, trained), (forward, backward, reductions) = groups, calls
    yield gather(plan, group, forward, f"parameters of {name}", Phase.FORWARD, ranks=ranks[0])
    if not isinstance(backward, int) or backward:
        yield gather(plan, group, backward, f"parameters of {name}", Phase.BACKWARD, ranks=ranks[1])
    if not isinstance(reductions, int) or reductions:
        yield reduce_scatter(plan, trained, reductions, f"gradients of {name}", ranks=ranks[0])
        yield over_replicas(plan, trained, reductions, f"{REPLICAS} of {name}", replicas)


def gather(plan: Plan, group: Group, calls: Int, what: str, phase: Phase, *, ranks: Int) -> Collective:
    """Return the all-gathers of one group's parameters."""
    payload: Int = unsharded_bytes(plan, group)
    each: Int = ceil_div(payload, ranks)
    sent: Int = calls * each * (ranks - 1)
    elements = where(ranks > 1, calls * group.padded, 0)
    return Collective("all_gather", what, phase.value, ranks, calls, payload, sent, elements, GATHER, phase=phase)


def reduce_scatter(plan: Plan, group: Group, calls: Int, what: str, *, ranks: Int) -> Collective:
    """Return the reduce-scatters of one group's gradients."""
    payload: Int = plan.reduce_bytes * group.padded
    each: Int = plan.reduce_bytes * group.shard
    sent: Int = calls * each * (ranks - 1)
    elements = where(ranks > 1, calls * group.padded, 0)
    return Collective("reduce_scatter", what, "backward", ranks, calls, payload, sent, elements, REDUCE)


def over_replicas(plan: Plan, group: Group, calls: Int, what: str, replicas: Int) -> Collective:
    """Return the all-reduces of the shards that reduce-scatters leave."""
    payload: Int = plan.reduce_bytes * group.shard
    each: Int = ceil_div(payload, replicas)
    sent: Int = 2 * calls * each * (replicas - 1)
    elements = where(replicas > 1, 2 * calls * group.shard, 0)
    return Collective("all_reduce", what, "backward", replicas, calls, payload, sent, elements, REDUCE, among=Among.REPLICAS)

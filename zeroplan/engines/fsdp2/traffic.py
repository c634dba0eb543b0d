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
from zeroplan.numeric import Int, added_up, ceil_div, for_each_value, maximum, where
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
    passes = batch.grad_accum_steps
    reductions: Int = passes if plan.recipe.sync_every_micro_batch else 1
    calls = list(_outside(plan, mesh, passes, reductions))
    uppermost = max((at for at, one in enumerate(plan.passes) if not one.points), default=None)  # run that no gradient reaches
    for at, (run, one) in enumerate(zip(plan.runs, plan.passes, strict=True)):
        backward = run.layers if one.points else int(at == uppermost)
        if plan.recipe.fsdp2.keeps_last and plan.reshard is True and at == plan.walk[-1].run:
            backward -= 1  # the last block is still gathered
        again = 0 if plan.reshard is False else passes * backward
        calls += of_blocks(plan, at, (passes * run.layers, again, reductions * run.layers), mesh.dp_replicate)
        if plan.recipe.fsdp2.float8_all_gather:
            calls += _largest_values(plan, run, f"{run.words} blocks", passes)
    calls += among_split_ranks(plan, mesh, batch, model, reductions=reductions)
    if plan.recipe.optimizer == "dion-muon":
        calls += of_dion(plan)
    return tuple(calls)


def of_blocks(plan: Plan, at: int, calls: tuple[Int, Int, Int], replicas: Int) -> Iterator[Collective]:
    """Yield the collectives of a run's blocks: those of experts among the ranks that have them, then all others.

    ``calls``: as in :func:`of_units`.
    """
    group, trained, name = plan.blocks[at], plan.trained_blocks[at], f"{plan.runs[at].words} blocks"
    if group.experts is not None:
        theirs, ranks = (group.of_experts, trained.of_experts), group.experts.ranks
        for call in of_units(plan, theirs, f"{EXPERTS} {name}", calls, ranks=ranks, replicas=replicas):
            yield call._replace(among=Among.SHARDS_OF_EXPERTS) if call.among is Among.SHARDS else call
    beside = group.beside_experts, trained.beside_experts
    yield from of_units(plan, beside, name, calls, ranks=plan.n, replicas=replicas)


def among_split_ranks(
    plan: Plan, mesh: Mesh, batch: Batch, model: ModelSpec, *, reductions: Int, embeds: bool = True, ends: bool = True,
    accumulated: bool = False,
) -> Iterator[Collective]:  # fmt: skip
    """Yield what ranks exchange that split matrices or sequences, that have different experts, or that share a matrix's step.

    The options are those of :func:`~zeroplan.engines.fsdp2.split.split_collectives`.
    """
    if plan.tp != 1:
        from zeroplan.engines.fsdp2.split import split_collectives  # noqa: PLC0415  keeps start-up fast

        yield from split_collectives(
            plan, batch, model, plan.tp, reductions=reductions, embeds=embeds, ends=ends, accumulated=accumulated
        )  # fmt: skip
    for group, run in zip(plan.blocks, plan.runs, strict=True):
        if group.experts is not None:
            from zeroplan.engines.fsdp2.experts import exchanges  # noqa: PLC0415  as above

            yield from exchanges(plan, run, mesh, batch, model)
    if mesh.cp != 1:
        from zeroplan.engines.fsdp2.split import exchanged  # noqa: PLC0415  as above

        yield from exchanged(plan, batch, model, mesh)
    if plan.recipe.optimizer == "muon":
        yield from of_muon(plan, mesh.dp_replicate)


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
    calls = added_up(one.repeat * for_ranks(one, width, lambda events: len(sent(events))) for one in matrices)
    return calls, added_up(one.repeat * for_ranks(one, width, lambda events: sum(sent(events))) for one in matrices)


def _outside(plan: Plan, mesh: Mesh, passes: Int, reductions: Int) -> Iterator[Collective]:
    """Yield the collectives of the root group, or of embedding and head. The backward gathers the embedding again."""
    for group, trained in zip(plan.outside, plan.trained_outside, strict=True):
        embeds = plan.ends is not None and group is plan.ends.embedding
        name = ROOT if plan.ends is None else "the embedding" if embeds else "final norm and head"
        again = passes if embeds and plan.passes[plan.corners[0].run].points and plan.reshard is not False else 0
        calls = passes, again, reductions
        yield from of_units(plan, (group, trained), name, calls, ranks=plan.n, replicas=mesh.dp_replicate, is_root=True)


def of_units(
    plan: Plan, groups: tuple[Group, Group], name: str, calls: tuple[Int, Int, Int], *, ranks: Int, replicas: Int,
    is_root: bool = False,
) -> Iterator[Collective]:  # fmt: skip
    """Yield the collectives of units with these parameters, of which the second group is trained.

    ``calls``: how often a step gathers them in forward and in backward, and reduces them. ``ranks``: those that share them.
    """
    for call in _of_units(plan, groups, name, calls, ranks, replicas):
        yield call._replace(is_root=True) if is_root else call


def _of_units(
    plan: Plan, groups: tuple[Group, Group], name: str, calls: tuple[Int, Int, Int], ranks: Int, replicas: Int
) -> Iterator[Collective]:  # fmt: skip
    (group, trained), (forward, backward, reductions) = groups, calls
    yield gather(plan, group, forward, f"parameters of {name}", Phase.FORWARD, ranks=ranks)
    if not isinstance(backward, int) or backward:
        again = ranks if isinstance(plan.reshard, bool) or plan.is_a_stage else plan.reshard
        yield gather(plan, group, backward, f"parameters of {name}", Phase.BACKWARD, ranks=again)
    if (not isinstance(reductions, int) or reductions) and (trained.numel or not plan.is_a_stage):
        yield reduce_scatter(plan, trained, reductions, f"gradients of {name}", ranks=ranks)
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

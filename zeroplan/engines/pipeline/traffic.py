"""The traffic of a pipeline rank per step: hidden states up, their gradients down, and FSDP2's collectives under a schedule.

Gradients are reduced once per step. Parameters are gathered once, and again after the schedule has sharded their stage. If
blocks are resharded after their forward, every pass gathers them, except passes that follow a backward, which leaves its stage
unsharded.
"""

from collections.abc import Iterator

from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.traffic import EXPERTS, ROOT, of_muon, of_units
from zeroplan.engines.pipeline.schedule import Place
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.pipeline.walk import Gathers, gathers, unshards
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec

P2P = "torch 2.13, torch/distributed/pipelining/stage.py, get_fwd_send_ops and get_bwd_send_ops"
#: The operation's name, and what is sent.
SEND, UP, DOWN = "send", "hidden states to the next stage", "gradients to the stage before"


def collectives(
    stages: tuple[StagePlan, ...], place: Place, mesh: Mesh, batch: Batch, model: ModelSpec
) -> tuple[Collective, ...]:
    """Return every collective and every send of one optimizer step of a rank; ``batch`` is the rank's."""
    sent = _sends(stages, mesh, batch)
    among = (call for stage in stages for call in _among_the_split(stage, mesh, batch, model))
    of_blocks, of_stages = gathers(place, resharded=bool(stages[0].plan.reshard)), unshards(place)
    every = zip(stages, of_blocks, of_stages, strict=True)
    return (*(call for one in every for call in _of_stage(*one, mesh)), *among, *sent)


def _among_the_split(stage: StagePlan, mesh: Mesh, batch: Batch, model: ModelSpec) -> Iterator[Collective]:
    """Yield collectives among ranks that split the stage or its sequences, or one matrix's step."""
    if mesh.tp != 1:
        from zeroplan.engines.fsdp2.split import split_collectives  # noqa: PLC0415  keeps start-up fast

        embeds, ends = stage.stage.is_first, stage.stage.is_last
        yield from split_collectives(
            stage.plan, batch, model, int(mesh.tp), reductions=1, embeds=embeds, ends=ends, accumulated=True
        )  # fmt: skip
    for group, run in zip(stage.plan.blocks, stage.plan.runs, strict=True):
        if group.experts is not None:
            from zeroplan.engines.fsdp2.experts import exchanges  # noqa: PLC0415  as above

            yield from exchanges(stage.plan, run, mesh, batch, model)
    if mesh.cp != 1:
        from zeroplan.engines.fsdp2.context import exchanged  # noqa: PLC0415  as above

        yield from exchanged(stage.plan, batch, model, mesh)
    if stage.plan.recipe.optimizer == "muon":
        yield from of_muon(stage.plan, mesh.dp_replicate)


def _of_stage(stage: StagePlan, gathers: Gathers, once: Gathers, mesh: Mesh) -> Iterator[Collective]:
    plan = stage.plan
    for call in _outside(plan, gathers, once, mesh):
        yield call._replace(is_root=True)
    for *groups, run in zip(plan.blocks, plan.trained_blocks, plan.runs, strict=True):
        if groups[0].experts is not None:
            name, ranks = f"{EXPERTS} {run.words} blocks", groups[0].experts.ranks
            theirs = groups[0].of_experts, groups[1].of_experts
            for call in _of_units(plan, theirs, run.layers, name, gathers, mesh, ranks):
                yield call._replace(among=Among.SHARDS_OF_EXPERTS) if call.among is Among.SHARDS else call
        beside = groups[0].beside_experts, groups[1].beside_experts
        yield from _of_units(plan, beside, run.layers, f"{run.words} blocks", gathers, mesh, plan.n)


def _outside(plan: Plan, gathers: Gathers, once: Gathers, mesh: Mesh) -> Iterator[Collective]:
    """Yield gathers outside the blocks: the root group, or norm and head, as often as the schedule gathers the whole stage.

    A separate embedding is gathered as often as the blocks.
    """
    (*_, last), (*_, trained) = plan.outside, plan.trained_outside
    name = ROOT if plan.ends is None else "final norm and head"
    if plan.ends is not None and plan.ends.embedding.numel:
        embedding = plan.ends.embedding, plan.ends.trained_embedding
        yield from _of_units(plan, embedding, 1, "the embedding", gathers, mesh, plan.n)
    if last.numel:
        yield from _of_units(plan, (last, trained), 1, name, once, mesh, plan.n)


def _of_units(
    plan: Plan, groups: tuple[Group, Group], layers: int, name: str, gathers: Gathers, mesh: Mesh, ranks: Int
) -> Iterator[Collective]:  # fmt: skip
    calls = layers * gathers.forward, layers * gathers.backward, layers if groups[1].numel else 0
    yield from of_units(plan, groups, name, calls, ranks=(ranks, ranks), replicas=mesh.dp_replicate)


def _sends(stages: tuple[StagePlan, ...], mesh: Mesh, batch: Batch) -> Iterator[Collective]:
    """Yield the sends of hidden states per micro-batch and boundary, in both directions; stages of one rank need none."""
    here = [stage.stage.number for stage in stages]
    up = sum(not stage.stage.is_last and stage.stage.number + 1 not in here for stage in stages)
    down = sum(not stage.stage.is_first and stage.stage.number - 1 not in here for stage in stages)
    n_bytes, width = stages[0].hidden_bytes, stages[0].plan.width.compute
    for count, what, phase in ((up, UP, Phase.FORWARD), (down, DOWN, Phase.BACKWARD)):
        calls: Int = count * batch.grad_accum_steps
        if count:
            yield Collective(
                SEND, what, phase.value, mesh.pp, calls, n_bytes, calls * n_bytes, calls * n_bytes // width, P2P, phase=phase,
                among=Among.STAGES,
            )  # fmt: skip

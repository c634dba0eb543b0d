"""The traffic of a pipeline rank per step: hidden states up, their gradients down, and FSDP2's collectives under a schedule.

Gradients are reduced once per step. Parameters are gathered once, and again after the schedule has sharded their stage. If
blocks are resharded after their forward, every pass gathers them, except passes that follow a backward, which leaves its stage
unsharded.
"""

from collections.abc import Iterator

from zeroplan.engines.fsdp2.traffic import ROOT, among_split_ranks, of_blocks, of_units
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
    split = (
        call for one in stages
        for call in among_split_ranks(
            one.plan, mesh, batch, model, reductions=1, embeds=one.stage.is_first, ends=one.stage.is_last, accumulated=True
        )
    )  # fmt: skip
    of_blocks, of_stages = gathers(place, resharded=bool(stages[0].plan.reshard)), unshards(place)
    every = zip(stages, of_blocks, of_stages, strict=True)
    return (*(call for one in every for call in _of_stage(*one, mesh)), *split, *_sends(stages, mesh, batch))


def _of_stage(stage: StagePlan, gathers: Gathers, once: Gathers, mesh: Mesh) -> Iterator[Collective]:
    """Yield the collectives of a stage's units, reduced once.

    The schedule gathers the root group, or norm and head, as often as the whole stage; a separate embedding as often as blocks.
    """
    plan = stage.plan
    for group, trained in zip(plan.outside, plan.trained_outside, strict=True):
        embeds = plan.ends is not None and group is plan.ends.embedding
        name = ROOT if plan.ends is None else "the embedding" if embeds else "final norm and head"
        if group.numel:
            calls = (*(gathers if embeds else once), 1)
            yield from of_units(plan, (group, trained), name, calls, ranks=plan.n, replicas=mesh.dp_replicate, is_root=True)
    for at, run in enumerate(plan.runs):
        forward, backward, reductions = (run.layers * times for times in (*gathers, 1))
        yield from of_blocks(plan, at, (forward, backward, reductions), mesh.dp_replicate)


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

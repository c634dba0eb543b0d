"""The time of a step on a pipeline: the slowest rank's work, the wait for the pipeline to fill and drain, and sends.

A rank runs its stages for every micro-batch, and the slowest rank sets the pace. It waits while the other ranks work on the first
micro-batch, and again while they finish the last. v stages per rank divide this wait by v. Schedules with split backwards are
simulated instead.

Leaves out sends that share a link and, without a simulation, further waits caused by unequal stages.
"""

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.engines.account import Account
from zeroplan.engines.pipeline.schedule import Place, order_of
from zeroplan.engines.pipeline.stage import layers_of
from zeroplan.engines.pipeline.traffic import SEND
from zeroplan.ledger import Collective
from zeroplan.numeric import Float, longest, together
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import SPLIT, PipelineSchedule, Stage, cut, indices_of_rank, stages_per_rank
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime.compute import Computing, Rates, computing
from zeroplan.steptime.copies import copies_of_activations, copies_of_states
from zeroplan.steptime.efficiency import LINK_SOURCE
from zeroplan.steptime.links import Links, seconds, strided
from zeroplan.steptime.parts import Does, Part
from zeroplan.steptime.played import Costs, played
from zeroplan.steptime.pointwise import Moved
from zeroplan.steptime.sending import group_of, joining
from zeroplan.steptime.work import Core, Work, combined, of_one, without_head, work

BUBBLE = "Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 and 2.2.2"
ZERO_BUBBLE = "Qi et al. 2024, arXiv:2401.10241, section 2; the order of torch 2.13, torch/distributed/pipelining/schedules.py"


class Bubble(NamedTuple):
    """The times of all micro-batches on each rank, and the stages per rank. [s]"""

    ranks: tuple[Float, ...]
    chunks: int
    micro_batches: int

    @property
    def pace_s(self) -> Float:
        """The slowest rank's work."""
        return longest(*self.ranks)

    @property
    def idle_s(self) -> Float:
        """The slowest rank's wait while the pipeline fills and drains: one micro-batch on one stage of every other rank.

        Equal ranks wait (p - 1)/(v·m) of their work.

        >>> Bubble((8.0,) * 4, chunks=1, micro_batches=8).idle_s, Bubble((8.0,) * 4, chunks=2, micro_batches=8).idle_s
        (3.0, 1.5)
        """
        return (together(self.ranks) - self.pace_s) / (self.chunks * self.micro_batches)


def pipeline_parts(
    account: Account, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links, rates: Rates,
    mfu: float | None,
) -> tuple[Part, ...]:  # fmt: skip
    """Return the parts of a step without the optimizer's: those of the slowest rank, the bubble, collectives and sends. [s]"""
    schedule, pp = recipe.pipeline_schedule or "1f1b", int(mesh.pp)
    chunks = stages_per_rank(schedule, recipe.pipeline_stages_per_rank)
    stages = cut(model.num_hidden_layers, pp * chunks, recipe.layers_by_hand)
    alike: dict[object, Computing] = {}
    ranks = []
    for rank in range(pp):
        mine = tuple(stages[at] for at in indices_of_rank(schedule, rank=rank, pp=pp, stages=len(stages)))
        work_of = tuple((layers_of(model, stage)[0], stage.is_last) for stage in mine)
        if work_of not in alike:
            alike[work_of] = _computing(_work_of(mine, model, recipe, mesh, batch, rates), model, recipe, batch, rates, mfu)
        ranks.append(alike[work_of])
    steps = int(batch.grad_accum_steps)
    bubble = Bubble(tuple(one.forward_s + one.backward_s for one in ranks), chunks, steps)
    worst = max(range(pp), key=lambda rank: _largest(bubble.ranks[rank]))
    slowest, layers = ranks[worst], _layers(schedule, stages, worst, pp)
    idle, source = bubble.idle_s, BUBBLE
    if schedule in SPLIT:
        each = (_work_of((one,), model, recipe, mesh, batch, rates) for one in stages)
        costs = tuple(_costs(one, model, recipe, batch, rates, mfu) for one in each)
        idle, source = longest(_simulated_s(schedule, costs, pp, chunks, steps) - bubble.pace_s, 0.0), ZERO_BUBBLE
    waits = Part("pipeline bubble", idle, 0.0 * idle, f"{pp} ranks fill and drain, {schedule}", source, Does.IDLING)
    copies = _copies(account, recipe, slowest, rates.gpu.architecture, passes=steps * layers)
    joined = (joining(account.collectives, batch, rates.bandwidth),) if int(mesh.tp) > 1 and mfu is None else ()
    return (*slowest.parts, *joined, waits, *copies, *_traffic(account.collectives, slowest, recipe, mesh, batch, here))


def _layers(schedule: PipelineSchedule, stages: tuple[Stage, ...], rank: int, pp: int) -> int:
    return sum(stages[at].layers for at in indices_of_rank(schedule, rank=rank, pp=pp, stages=len(stages)))


def _copies(account: Account, recipe: RecipeSpec, busy: Computing, architecture: str, *, passes: int) -> Iterator[Part]:
    """Yield copies over PCIe: gradients once a step, weights at every all-gather, hidden states in all ``passes`` of blocks."""
    if recipe.offload_activations:
        hidden = next(call.n_bytes for call in account.collectives if call.operation == SEND)
        yield copies_of_activations(passes * hidden, architecture)
    if recipe.offloads_states:
        gathers = [call.calls for call in account.collectives if call.operation == "all_gather" and not call.is_root]
        reductions = [call.calls for call in account.collectives if call.operation == "reduce_scatter" and not call.is_root]
        times: Float = 1.0 + sum(gathers) / longest(1.0 * sum(reductions), 1.0)
        yield copies_of_states(account, recipe, busy, architecture, times=times)


def _computing(
    work: Work, model: ModelSpec, recipe: RecipeSpec, batch: Batch, rates: Rates, mfu: float | None
) -> Computing:  # fmt: skip
    return computing(lambda _one: work, model, recipe, batch, rates, mfu)


def _costs(
    work: Work, model: ModelSpec, recipe: RecipeSpec, batch: Batch, rates: Rates, mfu: float | None
) -> Costs:  # fmt: skip
    """Return the times of one stage's passes for one micro-batch; weight gradients take as long as the forward's products. [s]"""
    whole = _computing(work, model, recipe, batch, rates, mfu)
    matrices = work._replace(core=Core(), moved=Moved(), ends_moved=Moved())
    weights = _computing(matrices, model, recipe, batch, rates, mfu).forward_s
    steps = batch.grad_accum_steps
    return Costs(whole.forward_s / steps, (whole.backward_s - weights) / steps, weights / steps)


def _simulated_s(schedule: PipelineSchedule, costs: tuple[Costs, ...], pp: int, chunks: int, steps: int) -> Float:
    """Return the simulated time from the first rank's first pass to the end of the last pass. [s]"""
    places = tuple(Place(schedule, rank, pp, chunks, steps) for rank in range(pp))
    stages = tuple(indices_of_rank(schedule, rank=rank, pp=pp, stages=len(costs)) for rank in range(pp))
    return played(tuple(map(order_of, places)), stages, costs)


def _largest(seconds: Float) -> float:
    return float(seconds if isinstance(seconds, (int, float)) else seconds.max())


def _work_of(stages: tuple[Stage, ...], model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, rates: Rates) -> Work:
    """Return the work of one micro-batch on a rank: its layers, and head and loss on the last stage."""
    return combined(tuple(_work_of_stage(stage, model, recipe, mesh, batch, rates) for stage in stages))


def _work_of_stage(stage: Stage, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, rates: Rates) -> Work:
    layers, one = layers_of(model, stage)[0], of_one(int(batch.micro_batch_size), int(batch.seq_len))
    whole = work(layers, recipe, one, rates.running.kernels, tp=int(mesh.tp), cp=int(mesh.cp), expert_ranks=int(mesh.ep))
    return whole if stage.is_last else without_head(whole)


def _traffic(
    calls: tuple[Collective, ...], busy: Computing, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links
) -> tuple[Part, ...]:  # fmt: skip
    """Return waits for collectives and sends. All-gathers, except the first block's, overlap with a micro-batch's passes.

    Reduce-scatters run after all passes. Sends between stages, once each way per micro-batch, and collectives within a stage
    overlap with nothing.
    """
    gathers: Float = 0.0
    bare: Float = 0.0
    reductions: Float = 0.0
    sends: Float = 0.0
    among: Float = 0.0
    stride = mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp
    for call in calls:
        if call.operation == SEND:
            sends = sends + seconds(call._replace(group=2), strided(2, stride, here.per_node), here)
            continue
        takes = seconds(call, group_of(call, recipe, mesh, here), here)
        if call.near:
            among = among + takes
        elif call.operation == "all_gather":
            gathers, bare = gathers + takes, bare + takes / longest(1.0 * call.calls, 1.0)
        else:
            reductions = reductions + takes
    beside = (busy.forward_s + busy.backward_s) / batch.grad_accum_steps
    waits = longest(gathers - beside, bare)
    is_split = (int(mesh.tp), int(mesh.cp), int(mesh.ep)) != (1, 1, 1)
    within = _sent("collectives within a stage", among, 0.0 * among, "of ranks that split it: the next matrix waits")
    return (
        _sent("waiting for all-gathers", waits, gathers - waits, "gathered ahead of the block that needs it"),
        _sent("reducing gradients", reductions, 0.0 * reductions, "after the last backward, not overlapped"),
        *((within,) if is_split else ()),
        _sent("sends between stages", sends, 0.0 * sends, "the next pass waits for what it receives"),
    )


def _sent(name: str, seconds: Float, hidden: Float, reason: str) -> Part:
    return Part(name, seconds, hidden, reason, LINK_SOURCE, Does.SENDING)

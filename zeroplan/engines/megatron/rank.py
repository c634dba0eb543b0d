"""Which parameters, layers and schedule does one pipeline rank have, and how many ranks share them?"""

from collections.abc import Hashable
from typing import NamedTuple

from zeroplan.engines.megatron.buckets import Padded, padded_ends, padded_layer
from zeroplan.engines.megatron.chunks import Counts, Schedule, chunks_per_rank, counts_of, fullest, runs_of, stages_of
from zeroplan.engines.megatron.muon import Owned, owned_by
from zeroplan.engines.megatron.parameters import WEIGHTS_TOO, elements_of, ends_of, has_tied_head, in_fp8, table_of, trained_by
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.spec.batch import Batch
from zeroplan.spec.described import Job
from zeroplan.spec.pipeline import Stage as Chunk
from zeroplan.spec.recipe import RecipeSpec


class Rank(NamedTuple):
    """A pipeline rank: its trained parameters, its layers, and the micro-batches in flight on it."""

    at: int
    elements: Int
    """Parameters outside experts."""
    experts: Int
    matrices: Int
    """Parameters outside experts in matrices that Muon updates."""
    in_fp8: Int
    """Parameters, with experts, in matrices that multiply in FP8."""
    chunks: Int
    """The most chunk forwards that wait for their backward at a time."""
    embeds: Int
    """Micro-batches whose embedding keeps tensors at a time; 0 if another rank has the embedding."""
    has_head: bool
    stages: tuple[Chunk, ...]
    """The chunks of layers on this rank."""
    each: tuple[Counts, ...]
    """Number of layers of each kind, chunk by chunk."""
    schedule: Schedule
    frozen: Int = 0
    """Frozen parameters beside adapters."""
    muon: Owned | None = None
    """What the optimizer updates on this rank, if it is Muon."""

    @property
    def padding(self) -> Int:
        """Elements by which the buffers of weights and gradients are larger, so that Muon's matrices stay whole."""
        return 0 if self.muon is None else self.muon.padding

    @property
    def counts(self) -> Counts:
        """Number of layers of each kind in all chunks."""
        return tuple(map(sum, zip(*self.each, strict=True)))

    @property
    def layers(self) -> int:
        """Number of layers in all chunks."""
        return sum(self.counts)


def rank_of(at: int, job: Job) -> Rank:
    """Return the parameters, chunks and schedule of one pipeline rank."""
    mesh = job.mesh

    def key() -> Hashable:
        return (
            rank_of,
            at,
            job.model,
            job.recipe,
            int(mesh.pp),
            as_key(mesh.tp),
            as_key(mesh.ep),
            as_key(mesh.dp_shard * mesh.cp),
            as_key(job.batch.grad_accum_steps),
        )

    return recalled(key, lambda: _made(at, job))


def _made(at: int, job: Job) -> Rank:
    model = job.model
    pp, chunks = int(job.mesh.pp), chunks_per_rank(job)
    first, last = at == 0, at == pp - 1
    stages = stages_of(at, job)
    each = tuple(counts_of(stage, job) for stage in stages)
    counts = tuple(map(sum, zip(*each, strict=True)))
    inside, experts, matrices = elements_of(job, counts)
    embedding, end = ends_of(job)
    ends: Int = (embedding if first else 0) + (end if last else 0)
    if last and not first and (has_tied_head(job) or job.recipe.megatron.mtp_num_layers):
        ends = ends + table_of(job)  # a copy of the table, without positions: tied, or for next tokens
    group = job.recipe.megatron.microbatch_group_size_per_virtual_pipeline_stage or pp
    schedule = Schedule(pp - at - 1 if chunks == 1 else 2 * (pp - at - 1) + (chunks - 1) * group, chunks, group)
    in_flight = minimum(schedule.warm + 1, job.batch.grad_accum_steps * chunks)
    frozen: Int = 0
    if model.adapter is not None:
        frozen = inside + ends + experts
        ends, (inside, experts) = 0, trained_by(job, counts, is_first=first, is_last=last)
    matrices = matrices + (model.positions * model.hidden_size if first else 0)
    padded, by_muon = Padded(inside + ends, experts, in_fp8(job, counts)), job.recipe.optimizer == "muon"
    if job.recipe.zero_stage == WEIGHTS_TOO:
        padded = _padded(counts, job)
    whole = Owned(matrices + padded.experts, padded.beside - matrices)
    return Rank(
        at,
        padded.beside,
        padded.experts,
        matrices,
        padded.in_fp8,
        in_flight,
        _embedded_at_once(schedule, job.batch) if first else 0,
        last,
        stages,
        each,
        schedule,
        frozen,
        owned_by(each, whole, job, (sharers(job), expert_sharers(job)), first=first, last=last) if by_muon else None,
    )


def _padded(counts: Counts, job: Job) -> Padded:
    """Return the elements of all buckets under Megatron-FSDP's stage 3."""
    several, of_experts = sharers(job), expert_sharers(job)
    embedding, end = ends_of(job)
    table, others = padded_ends(job, table_of(job), embedding + end - table_of(job), several)
    found = Padded(table + others, 0, 0)
    for at, layers in enumerate(counts):
        of_layer = padded_layer(job, at, sharers=several, expert_sharers=of_experts)
        found = Padded(*(one + layers * more for one, more in zip(found, of_layer, strict=True)))
    return found


def _embedded_at_once(schedule: Schedule, batch: Batch) -> Int:
    """Return the most micro-batches whose first chunk waits for its backward at a time."""
    if schedule.chunks == 1:
        return minimum(schedule.warm + 1, batch.grad_accum_steps)
    embedding = ((1,), *[(0,)] * (schedule.chunks - 1))
    return fullest(schedule, embedding, batch.grad_accum_steps, (1,), loss=False)[0]


def kinds_backward(rank: Rank, job: Job) -> list[str]:
    """Return the kind of each of a rank's layers, in the order of the backward."""
    counted = zip(runs_of(job), rank.counts, strict=True)
    return [run.kind for run, count in counted for _ in range(count)][::-1]


def sharers(job: Job) -> Int:
    """Return the number of ranks that share the optimizer's states."""
    return maximum(1, job.mesh.dp_shard * job.mesh.cp // _instances(job.recipe)) if job.recipe.zero_stage else 1


def expert_sharers(job: Job) -> Int:
    """Return the number of ranks that share the optimizer's states of experts."""
    return maximum(1, same_experts(job) // _instances(job.recipe)) if job.recipe.zero_stage else 1


def _instances(recipe: RecipeSpec) -> int:
    return recipe.megatron.num_distributed_optimizer_instances


def same_experts(job: Job) -> Int:
    """Return the number of ranks in a pipeline stage that have the same part of the same experts."""
    mesh = job.mesh
    return mesh.dp_shard * mesh.cp * mesh.tp // (mesh.ep * job.recipe.megatron.expert_ways(int(mesh.tp)))


def updated_by(rank: Rank, job: Job) -> tuple[Int, str]:
    """Return the number of parameters that this rank's optimizer updates, and its formula."""
    if rank.muon is not None:
        return rank.muon.matrices + rank.muon.others, "(Y_own + A_own)"
    share = ceil_div(rank.elements, sharers(job)) + ceil_div(rank.experts, expert_sharers(job))
    return share, "(ceil(D_rank/N_opt) + ceil(X_rank/N_exp))"

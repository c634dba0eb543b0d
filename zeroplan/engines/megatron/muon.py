"""Which rank updates which matrix with Muon, what does it keep, and what do its Newton-Schulz iterations allocate?

Muon updates whole matrices. Megatron-LM's layer-wise optimizer gives each rank some of them, and lays the buffers out so that no
matrix crosses the border between the parts of two ranks. Every part of a bucket is as large as its fullest, so the buffers of all
ranks grow: with more ranks than matrices of a size, to several times the weights.

Source: Megatron-LM 2026-08 (d98e8a64), megatron/core/optimizer/layer_wise_optimizer.py, LayerWiseDistributedOptimizer. Its own
function, run without its package, gives the same elements. Left out: ``--ddp-num-buckets``, buckets padded for NCCL's
bandwidth, and generalized tensor parallelism.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, cycle
from math import lcm, prod
from operator import itemgetter
from typing import NamedTuple

from zeroplan.engines.formulas import sized
from zeroplan.engines.megatron.buckets import bucket_of
from zeroplan.engines.megatron.chunks import Counts, runs_of
from zeroplan.engines.megatron.parameters import (
    BY_ROWS,
    has_tied_head,
    head_of,
    is_expert,
    is_split,
    of_one_rank,
    of_shared_expert,
    table_of,
)
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, for_each_row, maximum, round_up, where
from zeroplan.spec.described import Job
from zeroplan.transformer.megatron import is_gated
from zeroplan.transformer.parameters import BlockRun, Parameter

MUON = "Megatron-LM 2026-08, megatron/core/optimizer/__init__.py, _get_megatron_emerging_optimizer"
ITERATES = "Emerging-Optimizers 2026-08, orthogonalized_optimizers/muon_utils.py, newton_schulz_tp"
Shape = tuple[int, int]
_ALIGNED = 64
"""A matrix starts at a multiple of this many elements."""
_STATES = (8, 12)
"""Bytes of states per element that Muon and Adam update, with the fp32 weights."""
_WIDER, _FULL = 1.3, 0.9
"""A part may exceed the mean of its bucket by 0.3; a bucket is full at 0.9 of its largest matrix for each rank."""


class Placed(NamedTuple):
    """Where the matrices of one kind are: outside experts, or of experts."""

    buffer: int
    """Elements of a rank's buffers, with padding."""
    elements: int
    """Elements of all matrices in them."""
    fullest: int
    """Elements of the matrices that one rank updates: the rank that has the most."""


@lru_cache(maxsize=512)
def placed(chunks: tuple[tuple[Shape, ...], ...], ranks: int, bucket: int | None) -> Placed:
    """Return where the matrices of a pipeline rank's chunks are.

    ``bucket``: elements at which a bucket may close; None: one bucket has all matrices.

    >>> placed((((64, 64),) * 3,), 2, None)
    Placed(buffer=16384, elements=12288, fullest=8192)
    """
    buffer, updated = 0, [0] * ranks
    for shapes in chunks:
        costs = [0] * ranks
        for together in _buckets(shapes[::-1], ranks, bucket):
            ends = _shared_out(together, costs, updated)
            buffer += ranks * _part(max(ends), ranks)
    return Placed(buffer, sum(map(prod, chain(*chunks))), max(updated))


class Owned(NamedTuple):
    """What a rank's optimizer updates with Muon, and by how much its buffers of weights and of gradients grow. [elements]"""

    matrices: Int
    others: Int
    """Updated by Adam: embedding, head and vectors."""
    padding: Int = 0


def owned_by(each: tuple[Counts, ...], whole: Owned, job: Job, ranks: tuple[Int, Int], *, first: bool, last: bool) -> Owned:
    """Return what the fullest of the ranks that share a pipeline rank's states updates.

    ``each``: layers by kind in each chunk. ``whole``: all matrices and other parameters of the pipeline rank. ``ranks``: how many
    share them, and how many share experts. The ranks with the most experts and with the most other matrices may differ; zeroplan
    assumes one rank with both.
    """
    own, bucket = job.recipe.megatron, bucket_of(job)
    if not job.recipe.zero_stage:
        return whole

    def of_row(sharers: int, expert_sharers: int, ep: int, close_at: int) -> tuple[int, int, int]:
        chunks = [matrices_of(counts, job, ep, first=first and not at) for at, counts in enumerate(each)]
        if not own.use_layer_wise_param_layout:
            return _dealt(chunks, [*others_of(each, job, first=first, last=last)], sharers, expert_sharers)
        beside, experts = (
            placed(of_kind, among, close_at or None)
            for of_kind, among in zip(zip(*chunks, strict=True), (sharers, expert_sharers), strict=True)
        )
        padding = beside.buffer - beside.elements + experts.buffer - experts.elements
        return beside.fullest + experts.fullest, ceil_div(int(whole.others), sharers), padding

    return Owned(*for_each_row(of_row, *ranks, job.mesh.ep, 0 if bucket is None else bucket))


def matrices_of(counts: Counts, job: Job, ep: int, *, first: bool) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Return a chunk's matrices on one rank, in the order of the modules: in the common buffers, and in those of experts.

    Experts have buffers of their own if their ranks differ from those of other parameters.
    """
    model, ways = job.model, job.recipe.megatron.expert_ways(int(job.mesh.tp))
    experts = 0 if model.moe is None else model.moe.num_experts // ep
    together = ep == 1 and ways == int(job.mesh.tp)
    beside = [(model.positions, model.hidden_size)] if first and model.positions else []
    routed: list[Shape] = []
    for run, layers in zip(runs_of(job), counts, strict=True):
        of_experts = [shape for shape in _of_an_expert(run, job) for _ in range(experts)]
        beside += layers * [*_outside_experts(run, job), *(of_experts if together else ())]
        routed += layers * (() if together else of_experts)
    return tuple(beside), tuple(routed)


def _outside_experts(run: BlockRun, job: Job) -> Iterator[Shape]:
    """Yield the matrices of a layer outside its experts. Query, key and value are one matrix, and so are gate and up projection."""
    joined: dict[str, Shape] = {}
    for one in run.parameters:
        if len(one.shape) > 1 and not is_expert(one):
            rows, columns = _on_rank(one, job)
            name = _JOINED.get(one.name.split(".")[-2], one.name)
            joined[name] = joined.get(name, (0, 0))[0] + rows, columns
    yield from (shape for shape in joined.values() if prod(shape))
    if shared := int(of_shared_expert(run.kind, job)):
        down = shared // (2 + is_gated(job))
        hidden = job.model.hidden_size
        yield (shared - down) // hidden, hidden
        yield hidden, down // hidden


def _of_an_expert(run: BlockRun, job: Job) -> Iterator[Shape]:
    """Yield the matrices of one routed expert of a layer. Each is a parameter of its own."""
    return (_on_rank(one, job) for one in run.parameters if is_expert(one) and len(one.shape) > 1)


def others_of(each: tuple[Counts, ...], job: Job, *, first: bool, last: bool) -> Iterator[int]:
    """Yield the elements of each tensor that Adam updates on a pipeline rank, without the final norm."""
    if first:
        yield int(table_of(job))
    if last and not (first and has_tied_head(job)):
        yield int(table_of(job) if has_tied_head(job) else head_of(job)[0])
    for run, layers in zip(runs_of(job), map(sum, zip(*each, strict=True)), strict=True):
        for _ in range(layers):
            yield from (int(of_one_rank(one, job)) for one in run.parameters if len(one.shape) == 1)


def _dealt(
    chunks: Sequence[tuple[tuple[Shape, ...], tuple[Shape, ...]]], others: Sequence[int], ranks: int, expert_ranks: int
) -> tuple[int, int, int]:
    """Return the elements that the fullest rank updates with Muon and with Adam, and no padding: tensors are dealt out by size."""
    beside = [(prod(shape), True) for each, _ in chunks for shape in each] + [(elements, False) for elements in others]
    routed = [(prod(shape), True) for _, each in chunks for shape in each]
    fullest = max(balanced(beside, ranks), key=lambda found: _STATES[0] * found[0] + _STATES[1] * found[1])
    experts = max(found[0] for found in balanced(routed, expert_ranks))
    return fullest[0] + experts, fullest[1], 0


#: Projections that are one matrix in Megatron-Core.
_JOINED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | dict.fromkeys(("gate_proj", "up_proj"), "fc1")


def _on_rank(one: Parameter, job: Job) -> Shape:
    """Return the rows and columns of a matrix on one tensor-parallel rank."""
    model, tp = job.model, int(job.mesh.tp)
    rows, columns = one.shape[-2:][::-1] if model.family == "gpt2" else one.shape[-2:]
    module = one.name.split(".")[-2]
    if model.traits.gated and not is_gated(job):
        rows = rows // 2 if one.name.endswith("gate_up_proj") else 0 if module == "gate_proj" else rows
    ways = job.recipe.megatron.expert_ways(tp) if is_expert(one) else tp if is_split(one.name) else 1
    by_rows = one.name.endswith("down_proj") if is_expert(one) else module in BY_ROWS
    return (rows, ceil_div(columns, ways)) if by_rows else (ceil_div(rows, ways), columns)


def _buckets(shapes: Sequence[Shape], ranks: int, bucket: int | None) -> Iterator[list[Shape]]:
    """Yield the matrices of each bucket, in the order of the backward.

    A bucket that is large enough still takes matrices for which its parts have room.
    """
    together: list[Shape] = []
    ends, elements, largest = [0] * ranks, 0, 0
    for shape in shapes:
        least, mine = round_up(min(ends), _ALIGNED), prod(shape)
        is_enough = bucket is not None and together and elements >= max(bucket, int(ranks * largest * _FULL))
        if is_enough and least + mine > _part(max(ends), ranks):
            yield together
            together, ends, elements, largest, least = [], [0] * ranks, 0, 0, 0
        ends[ends.index(min(ends))] = least + mine
        together.append(shape)
        elements, largest = elements + mine, max(largest, mine)
    if together:
        yield together


def _part(elements: int, ranks: int) -> int:
    """Return the size of each rank's part of a bucket whose fullest part has so many elements."""
    return round_up(elements, lcm(_ALIGNED, lcm(ranks, 128) // ranks))


def _shared_out(shapes: Sequence[Shape], costs: list[int], updated: list[int]) -> list[int]:
    """Give each matrix of a bucket to a rank; add its cost and elements there. Return where each rank's part ends.

    The most expensive matrix comes first. It goes to the rank with the least to compute whose part has room, or else to the
    shortest part.
    """
    ends = [0] * len(costs)
    most = sum(map(prod, shapes)) / len(costs) * _WIDER
    for shape in sorted(shapes, key=_cost, reverse=True):
        fits = [at for at, end in enumerate(ends) if round_up(end, _ALIGNED) + prod(shape) <= most]
        at = min(fits, key=costs.__getitem__) if fits else ends.index(min(ends))
        ends[at] = round_up(ends[at], _ALIGNED) + prod(shape)
        costs[at] += _cost(shape)
        updated[at] += prod(shape)
    return ends


def balanced(tensors: Sequence[tuple[int, bool]], ranks: int) -> list[tuple[int, int]]:
    """Return the elements that each rank updates with Muon and with Adam, as ``--no-use-layer-wise-param-layout`` shares them out.

    Tensors are dealt out by size, to the ranks forwards and backwards in turn. ``tensors``: elements, and whether by Muon.

    >>> balanced([(30, True), (10, False), (20, True)], 2)
    [(0, 10), (50, 0)]
    """
    found = [(0, 0)] * ranks
    dealt = cycle((*range(ranks), *range(ranks)[::-1]))
    for (elements, by_muon), at in zip(sorted(tensors, key=itemgetter(0)), dealt, strict=False):
        found[at] = found[at][0] + by_muon * elements, found[at][1] + (not by_muon) * elements
    return found


def _cost(shape: Shape) -> int:
    """Return what a Newton-Schulz iteration costs, in proportion."""
    return max(shape) * min(shape) ** 2


def muon_states(owned: Owned) -> Iterator[Line]:
    """Yield Muon's momentum of matrices, and Adam's states of all other parameters. [bytes]"""
    yield sized(Kind.OPTIMIZER_STATE, 4, owned.matrices, "Muon's momentum of matrices", MUON, "Y_own")
    reason = "Adam's momentum and variance of embedding, head and vectors"
    yield sized(Kind.OPTIMIZER_STATE, 8, owned.others, reason, MUON, "A_own")


def muon_step(job: Job) -> Line:
    """Return the memory of the Newton-Schulz iterations for the largest matrix. Every tensor-parallel rank gathers it.

    A rank holds its update, the gathered parts and the whole matrix in fp32. In addition it holds the iterate in fp32 and bf16, or
    two bf16 iterates and two products, whichever is more.
    """
    most: Int = 0
    for (rows, columns), ranks in largest_matrices(job):
        whole, product = rows * columns, min(rows, columns) ** 2
        again = 4 * ceil_div(whole, ranks) + where(ranks > 1, 8 * whole, 0) + max(6 * whole, 4 * whole + 4 * product)
        most = maximum(most, again)
    return Line(Kind.OPTIMIZER_TEMPORARY, most, "Newton-Schulz iterates of the largest matrix", "Y_step", ITERATES)


def largest_matrices(job: Job) -> Iterator[tuple[tuple[int, int], Int]]:
    """Yield the rows and columns of a layer's large matrices, and the number of ranks that split each."""
    model, mesh = job.model, job.mesh
    gates, hidden, mla = 2 if is_gated(job) else 1, model.hidden_size, model.mla
    if mla is None:
        yield ((model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim, hidden), mesh.tp
    else:
        yield (model.num_attention_heads * mla.v_head_dim, hidden), mesh.tp
    if model.moe is None or model.moe.num_dense_layers:
        yield (gates * model.intermediate_size, hidden), mesh.tp
    if model.moe is not None:
        yield (gates * model.moe.moe_intermediate_size, hidden), job.recipe.megatron.expert_ways(int(mesh.tp))

"""The time of a step of Megatron-Core: the slowest pipeline rank's work, the bubble, and waits for collectives and sends.

A rank computes its layers for every micro-batch. Tensor-parallel ranks wait for each other's activations, except for those that
Megatron gathers and reduces beside a matrix product in the backward. Every micro-batch adds its gradients to buffers. The ranks
reduce these after the last backward and gather weights after the optimizer's step, unless overlaps are on.

Leaves out the tied embedding's sum, the maxima and sums of a vocabulary-parallel loss, the gradient's norm, kernels that
Transformer Engine fuses, and the slowdown of collectives and matrix products beside each other.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.account import Account
from zeroplan.engines.megatron import (
    Rank,
    chunks_per_rank,
    collectives_of,
    head_lines,
    is_expert,
    is_split,
    rank_of,
    states_of,
    step_lines,
)
from zeroplan.ledger import Among, Collective, Kind, Phase, total_bytes
from zeroplan.numeric import Float, longest, together, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.hardware import GpuSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime.compute import FUSED, WRITTEN_OUT, Kernel, computing, peak_flops_per_s, stepping
from zeroplan.steptime.efficiency import Efficiency
from zeroplan.steptime.links import SOURCE, Group, Links, neighbours, seconds, strided
from zeroplan.steptime.parts import Does, Part, StepTime
from zeroplan.steptime.pipeline import BUBBLE, Bubble
from zeroplan.steptime.work import Work
from zeroplan.transformer.flops import attention_widths, block_matrices, matmul_parameters
from zeroplan.transformer.megatron import scores_bytes, whole_layer_lines
from zeroplan.transformer.params import layout

_BESIDE = (
    "Megatron-LM 2026-08, megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward"
)
_ADDED = "Megatron-LM 2026-08, megatron/core/tensor_parallel/layers.py, _wgrad_gemm (main_grad)"
_SENDS = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, and arguments.py (overlap_p2p_comm)"
_AFTER = "Megatron-LM 2026-08, megatron/core/distributed/distributed_data_parallel_config.py"
#: Collectives of a layer's two column-parallel matrices in the backward that overlap with a matrix product.
_BESIDE_PER_LAYER = 2


class _Machine(NamedTuple):
    """The GPU, its links and the shares of their rates."""

    gpu: GpuSpec
    here: Links
    share: Efficiency
    mfu: float | None

    def seconds(self, flops: Float, share: float, peak: float) -> Float:
        return flops / (peak * (share if self.mfu is None else self.mfu))


class _Case(NamedTuple):
    """The job."""

    model: ModelSpec
    recipe: RecipeSpec
    mesh: Mesh
    batch: Batch

    @property
    def kernel(self) -> Kernel:
        return WRITTEN_OUT if self.recipe.attention == "eager" else FUSED

    @property
    def split(self) -> int:
        """Ranks that split a micro-batch's tokens or matrices."""
        return int(self.mesh.tp) * int(self.mesh.cp)


class _Passes(NamedTuple):
    """Times of forwards and backwards. [s]"""

    forward_s: Float
    backward_s: Float


class _RankTime(NamedTuple):
    """A rank's part of the step before the optimizer. [s]"""

    parts: tuple[Part, ...]
    computing: _Passes
    sends_s: Float
    """Sends to neighbours beside the computing."""

    @property
    def total_s(self) -> Float:
        return together(part.seconds for part in self.parts)


def megatron_time(
    model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links, gpu: GpuSpec, share: Efficiency,
    mfu: float | None,
) -> StepTime:  # fmt: skip
    """Return the parts of a step. [s]"""
    case, machine, pp = _Case(model, recipe, mesh, batch), _Machine(gpu, here, share, mfu), int(mesh.pp)
    ends = {0: 1, pp - 1: 1} | ({1: pp - 2} if pp > 2 else {})  # ranks between the ends take equal time
    ranks = {at: rank_of(at, model, recipe, mesh, batch) for at in sorted(ends)}
    busy = {at: _busy(rank, case, machine) for at, rank in ranks.items()}
    parts = _slowest(tuple(busy.values()))
    if pp > 1:
        parts = (*parts, _bubble(busy, ends, case))
    fullest = max(ranks.values(), key=lambda rank: rank.elements + rank.experts)
    parts = (*parts, *_after_backward(fullest, case, machine, busy[fullest.at].computing))
    whole, passes = layout(model), batch.grad_accum_steps / (1.0 * case.split * pp)
    tokens = 1.0 * batch.micro_batch_size * batch.seq_len * passes
    scores = 2.0 * model.num_hidden_layers * attention_widths(model) * (batch.seq_len + 1) / 2.0
    flops = 3.0 * (2.0 * matmul_parameters(model, whole) + scores) * tokens
    return StepTime(parts, flops, tokens, peak_flops_per_s(gpu, recipe))


# --- what one rank computes -------------------------------------------------------------------------------------------------


def _work(rank: Rank, case: _Case) -> Work:
    """Return the work of one micro-batch on a rank, its share of matrices and tokens."""
    model, mesh, batch = case.model, case.mesh, case.batch
    whole, share = layout(model), rank.layers / model.num_hidden_layers
    tokens = 1.0 * batch.micro_batch_size * batch.seq_len
    in_blocks = share * block_matrices(whole)
    head = matmul_parameters(model, whole) - block_matrices(whole) if rank.has_head else 0
    keys = (batch.seq_len + 1) / 2.0 if case.kernel.fused else 1.0 * batch.seq_len
    scores = 2.0 * rank.layers * attention_widths(model) * keys
    plain = replace(case.recipe, recompute="none")
    saved = together(
        share * run.layers * total_bytes(whole_layer_lines(model, run.kind, plain, mesh, batch)) for run in whole.runs
    )
    raw, kept = (0.0, 0.0) if case.kernel.fused else _scores(rank, case)
    through = head_lines(model, case.recipe, mesh, batch)[:2]  # 16-bit logits and copies are read once to make the fp32 ones
    logits = 1.0 * total_bytes(through) if rank.has_head else 0.0 * tokens
    of_rank = tokens / case.split
    return Work(
        blocks_flops=2.0 * in_blocks * of_rank,
        head_flops=2.0 * head * of_rank,
        attention_flops=scores * of_rank,
        blocks_bytes=saved + raw,
        head_bytes=logits,
        weights_bytes=2.0 * (in_blocks + head) / int(mesh.tp),
        core_bytes=raw + kept,
    )


def _scores(rank: Rank, case: _Case) -> tuple[Float, Float]:
    """Return eager attention's scores before the softmax, which nothing keeps, and what is kept of them. [bytes]"""
    kept = scores_bytes(case.model, case.recipe, case.mesh, case.batch)
    raw = 2.0 * case.model.num_attention_heads * case.batch.seq_len * case.batch.seq_len * case.batch.micro_batch_size
    return rank.layers * raw / int(case.mesh.tp), rank.layers * 1.0 * kept


def _busy(rank: Rank, case: _Case, machine: _Machine) -> _RankTime:
    """Return a rank's computing and waiting for all micro-batches."""
    asked, recipe, steps = _work(rank, case), case.recipe, case.batch.grad_accum_steps
    busy = computing(asked, case.model, recipe, case.batch, machine.gpu, machine.share, machine.mfu, kernel=case.kernel)
    calls = tuple(collectives_of(rank, case.model, recipe, case.mesh, case.batch))
    peak, share = peak_flops_per_s(machine.gpu, recipe), machine.share
    columns = steps * machine.seconds(asked.blocks_flops * _column_share(case.model), share.matrices, peak)
    core = share.attention if case.kernel.fused else share.matrices
    attention = steps * machine.seconds(asked.attention_flops, core, peak)
    passes = _Passes(busy.forward_s, busy.backward_s)
    parts = (*busy.parts, _adding_up(rank, case, machine))
    if int(case.mesh.tp) > 1:
        parts = (*parts, _between_tensor_ranks(calls, case, machine, columns))
    if int(case.mesh.cp) > 1:
        parts = (*parts, _ring_attention(calls, case, machine, attention))
    if case.model.moe is not None and int(case.mesh.ep) > 1:
        parts = (*parts, _to_experts(calls, machine))
    if int(case.mesh.pp) == 1:
        return _RankTime(parts, passes, 0.0)
    sends = _sends(calls, case, machine)
    beside = chunks_per_rank(recipe, case.mesh) > 1 and recipe.megatron.overlap_p2p_comm
    waits = longest(sends - busy.forward_s - busy.backward_s, 0.0 * sends) if beside else sends
    reason = "overlapped with the other chunks' passes" if beside else "the next pass waits for what it receives"
    sent = Part("waiting for sends between stages", waits, sends - waits, reason, _SENDS, Does.SENDING)
    return _RankTime((*parts, sent), passes, sends - waits)


def _adding_up(rank: Rank, case: _Case, machine: _Machine) -> Part:
    """Return the time to read and write the gradient buffer, once per micro-batch; ``--mfu`` includes it."""
    gradients = next(line.n_bytes for line in states_of(rank, case.recipe, case.mesh) if line.kind is Kind.GRADIENTS)
    bandwidth = machine.share.bandwidth * machine.gpu.memory_bandwidth_bytes_per_s.value
    takes = case.batch.grad_accum_steps * 2.0 * gradients / bandwidth * (machine.mfu is None)
    return Part("adding up gradients", takes, 0.0 * takes, "buffers are read and written for every micro-batch", _ADDED)


@lru_cache(maxsize=256)
def _column_share(model: ModelSpec) -> float:
    """Return the share of column-parallel matrices among those that a token meets in the blocks."""
    whole = layout(model)
    split = sum(
        run.layers * parameter.numel
        for run in whole.runs
        for parameter in run.parameters
        if len(parameter.shape) > 1 and is_split(parameter.name) and not is_expert(parameter) and not _is_row(parameter.name)
    )
    return split / block_matrices(whole)


def _is_row(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in ("o_proj", "down_proj", "c_proj")


def _slowest(ranks: tuple[_RankTime, ...]) -> tuple[Part, ...]:
    """Return the parts of the slowest rank; for columns, of the slowest rank in each layout."""
    first, *others = ranks
    parts, total = first.parts, first.total_s
    for other in others:
        slower = other.total_s > total
        parts = tuple(
            one._replace(
                seconds=_chosen(slower, two.seconds, one.seconds), hidden_s=_chosen(slower, two.hidden_s, one.hidden_s)
            )
            for one, two in zip(parts, other.parts, strict=True)
        )
        total = longest(total, other.total_s)
    return parts


def _chosen(condition: object, yes: Float, no: Float) -> Float:
    return where(condition, yes, no)  # type: ignore[arg-type,return-value]  # of times as of sizes


def _bubble(busy: dict[int, _RankTime], ends: dict[int, int], case: _Case) -> Part:
    """Return the slowest rank's wait while the pipeline fills and drains, including sends that are hidden otherwise."""
    times = tuple(one.total_s + one.sends_s for at, one in busy.items() for _ in range(ends[at]))
    chunks = chunks_per_rank(case.recipe, case.mesh)
    idle = Bubble(times, chunks, case.batch.grad_accum_steps).idle_s  # type: ignore[arg-type]  # a column, too
    schedule = case.recipe.pipeline_schedule or "1f1b"
    return Part(
        "pipeline bubble", idle, 0.0 * idle, f"{int(case.mesh.pp)} ranks fill and drain, {schedule}", BUBBLE, Does.IDLING
    )


# --- what it waits for ------------------------------------------------------------------------------------------------------


def _between_tensor_ranks(calls: tuple[Collective, ...], case: _Case, machine: _Machine, columns: Float) -> Part:
    """Return waits for collectives of activations; in the backward those of column-parallel inputs overlap with a product."""
    forwards = 2 if case.recipe.recompute == "full" else 1
    takes: Float = 0.0
    waits: Float = 0.0
    for call in calls:
        if not call.near:
            continue
        time = seconds(call, neighbours(call.group, machine.here.per_node), machine.here)
        takes = takes + time
        per_layer = 2 * forwards + (2 if call.operation == "all_gather" else 0)
        beside = time * (_BESIDE_PER_LAYER / per_layer) if call.phase is Phase.BACKWARD else 0.0 * time
        waits = waits + (time - beside) + longest(beside - columns, 0.0 * time)
    reason = "the next matrix waits for activations; in backward half of it overlaps with matrix products"
    return Part("waiting for tensor-parallel ranks", waits, takes - waits, reason, f"{_BESIDE}; {SOURCE}", Does.SENDING)


def _ring_attention(calls: tuple[Collective, ...], case: _Case, machine: _Machine, attention: Float) -> Part:
    """Return waits for the ring: keys and values of the next part travel while attention computes with this one's."""
    beside = {Phase.FORWARD: attention, Phase.BACKWARD: (case.kernel.backward + (case.recipe.recompute == "full")) * attention}
    cp, tp, per_node = int(case.mesh.cp), int(case.mesh.tp), machine.here.per_node
    apart = Group(2, 2 if cp * tp <= per_node else 1)
    takes: Float = 0.0
    waits: Float = 0.0
    for call in calls:
        if call.among is not Among.SEQUENCE:
            continue
        time = seconds(call._replace(group=2), apart, machine.here)
        takes = takes + time
        waits = waits + longest(time - beside[call.phase] * (cp - 1) / cp, 0.0 * time)
    return Part("waiting for the context ring", waits, takes - waits, "sent on while attention computes", SOURCE, Does.SENDING)


def _to_experts(calls: tuple[Collective, ...], machine: _Machine) -> Part:
    exchanges = (call for call in calls if call.operation == "all_to_all")
    takes = together(seconds(call, neighbours(call.group, machine.here.per_node), machine.here) for call in exchanges)
    return Part("waiting for tokens of experts", takes, 0.0 * takes, "experts wait for their tokens", SOURCE, Does.SENDING)


def _sends(calls: tuple[Collective, ...], case: _Case, machine: _Machine) -> Float:
    """Return the time of sending hidden states and their gradients, between nodes if the pipeline spans several."""
    mesh, per_node = case.mesh, machine.here.per_node
    ranks = mesh.dp_shard * mesh.tp * mesh.cp * mesh.pp
    apart = Group(2, where(ranks > per_node, 1, 2))
    sends = (call for call in calls if call.among is Among.STAGES)
    return together(seconds(call._replace(group=2), apart, machine.here) for call in sends)


def _after_backward(rank: Rank, case: _Case, machine: _Machine, passes: _Passes) -> tuple[Part, ...]:
    """Return gradient reduction, optimizer step and the gather of its weights; one micro-batch hides overlapped ones."""
    mesh, per_node, own = case.mesh, machine.here.per_node, case.recipe.megatron
    reduced: Float = 0.0
    gathered: Float = 0.0
    for call in collectives_of(rank, case.model, case.recipe, mesh, case.batch):
        if call.among in (Among.SHARDS, Among.SHARDS_OF_EXPERTS):
            stride = mesh.tp if call.among is Among.SHARDS else mesh.ep
            time = seconds(call, strided(call.group, stride, per_node), machine.here)
            reduced, gathered = (reduced, gathered + time) if call.operation == "all_gather" else (reduced + time, gathered)
    beside = _Passes(*(each / case.batch.grad_accum_steps for each in passes))
    waits = longest(reduced - beside.backward_s * own.overlap_grad_reduce, 0.0 * reduced)
    waits = waits + longest(gathered - beside.forward_s * own.overlap_param_gather, 0.0 * gathered)
    reason = "gradients after the last backward, weights after the step; overlapped with a micro-batch if set"
    name, hidden = "collectives around the optimizer step", reduced + gathered - waits
    sent = Part(name, waits, hidden, reason, f"{_AFTER}; {SOURCE}", Does.SENDING_AT_STEP)
    copied = (line._replace(kind=Kind.OPTIMIZER_STATE) for line in step_lines(rank, case.recipe, mesh))  # written and read too
    states = Account((*states_of(rank, case.recipe, mesh), *copied), (), ())
    step = stepping(states, case.recipe, machine.gpu, machine.share, on_host=False, ranks_per_node=per_node)
    return sent, step

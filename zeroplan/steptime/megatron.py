"""The time of a step of Megatron-Core: the slowest pipeline rank's work, the bubble, and waits for collectives and sends.

A rank computes its layers for every micro-batch. Tensor-parallel ranks wait for each other's activations, except for those that
Megatron gathers and reduces beside a matrix product in the backward. Every micro-batch adds its gradients to buffers. The ranks
reduce these after the last backward and gather weights after the optimizer's step, unless overlaps are on.

Leaves out the tied embedding's sum, the maxima and sums of a vocabulary-parallel loss, the gradient's norm, kernels that
Transformer Engine fuses, and the slowdown of collectives and matrix products beside each other.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.account import Account
from zeroplan.engines.megatron.chunks import chunks_per_rank, ranks_in_question, runs_of
from zeroplan.engines.megatron.parameters import BY_ROWS, bytes_of, is_expert, is_split, padded_vocabulary
from zeroplan.engines.megatron.rank import Rank, rank_of
from zeroplan.engines.megatron.states import states_of, step_lines
from zeroplan.engines.megatron.traffic import collectives_of_passes, collectives_of_weights, visited
from zeroplan.errors import SpecError
from zeroplan.ledger import Among, Collective, Kind, Phase
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Float, ceil_div, longest, together, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime import pointwise
from zeroplan.steptime.compute import (
    ATTENTION_BACKWARD,
    ATTENTION_BACKWARD_SHARE,
    Rates,
    computing,
    peak_flops_per_s,
    recomputed_modules,
)
from zeroplan.steptime.links import SOURCE, Group, Links, neighbours, relayed_seconds, seconds, strided
from zeroplan.steptime.parts import Does, Part, StepTime
from zeroplan.steptime.pipeline import BUBBLE, Bubble
from zeroplan.steptime.pointwise import Moved, Split
from zeroplan.steptime.products import Product, of_block, of_head
from zeroplan.steptime.sending import slowed
from zeroplan.steptime.stepping import stepping
from zeroplan.steptime.work import Ranks, Work, core_of, multiplying
from zeroplan.transformer.flops import attention_widths, block_matrices
from zeroplan.transformer.megatron import PREDICTS, ROUTED, is_gated
from zeroplan.transformer.parameters import BlockRun, Parameter
from zeroplan.transformer.params import text_layout

_BESIDE = (
    "Megatron-LM 2026-08, megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward"
)
_ADDED = "Megatron-LM 2026-08, megatron/core/tensor_parallel/layers.py, _wgrad_gemm (main_grad)"
_SENDS = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, and arguments.py (overlap_p2p_comm)"
_AFTER = "Megatron-LM 2026-08, megatron/core/distributed/distributed_data_parallel_config.py"
_BESIDE_EXPERTS = "Megatron-LM 2026-08, megatron/core/models/common/model_chunk_schedule_plan.py"
_EXCHANGES = "waiting for tokens of experts"
#: Collectives of a layer's two column-parallel matrices in the backward that overlap with a matrix product.
_BESIDE_PER_LAYER = 2


class _Machine(NamedTuple):
    """The GPU, its links and the shares of their rates."""

    rates: Rates
    here: Links
    mfu: float | None


class _Case(NamedTuple):
    model: ModelSpec
    recipe: RecipeSpec
    mesh: Mesh
    batch: Batch

    @property
    def split(self) -> int:
        """Ranks that split a micro-batch's tokens or matrices."""
        return int(self.mesh.tp) * int(self.mesh.cp)


class _Passes(NamedTuple):
    """Times of forwards and backwards. [s]"""

    forward_s: Float
    backward_s: Float


class _RankTime(NamedTuple):
    """A rank's time before the optimizer's step. [s]"""

    parts: tuple[Part, ...]
    computing: _Passes
    sends_s: Float
    """Sends to neighbouring stages that overlap with computing."""

    @property
    def total_s(self) -> Float:
        return together(part.seconds for part in self.parts)


def megatron_time(
    model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links, rates: Rates, mfu: float | None
) -> StepTime:
    """Return the parts of a step; raises SpecError for BERT, T5, hybrid layers, FP8 of the job's recipe and Megatron-FSDP. [s]"""
    if recipe.megatron.pretrains != "gpt":
        raise SpecError(f"how long a step of megatron.pretrains={recipe.megatron.pretrains!r} takes is not modelled; use 'gpt'")
    if model.adapter is not None:
        raise SpecError("how long a step of adapters on Megatron-Core takes is not modelled; use engine 'fsdp2'")
    if recipe.zero_stage > 1:
        raise SpecError("how long a step of Megatron-FSDP takes is not modelled; use stage 1, the distributed optimizer")
    for name in ("hybrid_layer_pattern", "fp8_format", "optimizer_offload_fraction"):
        if getattr(recipe.megatron, name):
            raise SpecError(f"how long a step with megatron.{name} takes is not modelled; leave it out")
    case, machine, pp = _Case(model, recipe, mesh, batch), _Machine(rates, here, mfu), int(mesh.pp)
    ends = ranks_in_question(case)
    ranks = {at: rank_of(at, case) for at in ends}
    busy = {at: _busy(rank, case, machine) for at, rank in ranks.items()}
    parts = _slowest(tuple(busy.values()))
    if pp > 1:
        parts = (*parts, _bubble(busy, ends, case))
    fullest = max(ranks.values(), key=lambda rank: rank.elements + rank.experts)
    parts = (*parts, *_after_backward(fullest, case, machine, busy[fullest.at].computing))
    passes = batch.grad_accum_steps / (1.0 * case.split * pp)
    tokens = 1.0 * batch.micro_batch_size * batch.seq_len * passes
    gated, predicted = is_gated(case), recipe.megatron.mtp_num_layers
    multiplied = recalled(
        lambda: ("multiplied", model, recipe.megatron, gated),
        lambda: sum(one.flops for run in runs_of(case) for one in of_block(run.parameters, run.layers, tp=1, gated=gated)),
    )
    scores = 2.0 * (model.num_hidden_layers + predicted) * attention_widths(model) * (batch.seq_len + 1) / 2.0
    flops = 3.0 * (multiplied + 2.0 * (1 + predicted) * model.vocab_size * model.hidden_size + scores) * tokens
    return StepTime(parts, flops, tokens, peak_flops_per_s(rates.gpu, recipe, rates.running.operands))


def time_without_a_pipeline(
    model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links, rates: Rates, mfu: float | None
) -> Float:
    """Return a step's computing and waits of a rank with all layers (pp must be 1), without the optimizer. [s]"""
    case = _Case(model, recipe, mesh, batch)
    return _busy(rank_of(0, case), case, _Machine(rates, here, mfu)).total_s


# --- one rank's computing ---------------------------------------------------------------------------------------------------


def _work(rank: Rank, case: _Case, rates: Rates, one: Batch) -> Work:
    model, mesh, recipe = case.model, case.mesh, case.recipe
    tp, cp, ep, gated = int(mesh.tp), int(mesh.cp), int(mesh.ep), is_gated(case)
    tokens = 1.0 * one.micro_batch_size * one.seq_len / cp
    sorts = recipe.megatron.moe_token_dispatcher_type == "alltoall"  # noqa: S105  tokens of text
    kernels, split = rates.running.kernels, Split(tokens, tp, recipe.sequence_parallel, ep if sorts else 1, rates.bandwidth)
    products: tuple[Product, ...] = ()
    again: tuple[Product, ...] = ()
    moved = again_moved = Moved()
    modules = recomputed_modules(recipe)
    for run, layers, (linear, linear_again) in zip(runs_of(case), rank.counts, _products(rank, case), strict=True):
        experts = model.moe is not None and run.kind in ROUTED
        each = pointwise.of_block(model, kernels, split, experts=experts, gated=gated).and_of(multiplying(linear))
        if run.kind == PREDICTS:
            each = each.and_of(pointwise.of_joining(model, kernels, split))
        products, moved = products + linear, moved.and_of(Moved(*(layers * part for part in each)))
        again += linear_again
        each = pointwise.of_modules(model, kernels, split, modules, experts=experts, gated=gated)
        again_moved = again_moved.and_of(Moved(*(layers * part for part in each)))
    fused = kernels if recipe.megatron.cross_entropy_fusion_impl is None else "fused"
    ends = pointwise.of_ends(model, fused if fused == "fused" and kernels == "fused" else "eager", split)
    head = of_head(float(padded_vocabulary(case)), model.hidden_size, tp=tp) if rank.has_head else ()
    losses = 1 + recipe.megatron.mtp_num_layers  # each module for later tokens has its own logits and loss
    return Work(
        tokens, products, losses * head, core_of(model, recipe, one, Ranks(tp, cp), rank.layers), moved,
        Moved(*(losses * part for part in ends.and_of(multiplying(head)))) if rank.has_head else Moved(),
        layers=rank.layers, again=again, again_moved=again_moved,
    )  # fmt: skip


def _products(rank: Rank, case: _Case) -> tuple[tuple[tuple[Product, ...], tuple[Product, ...]], ...]:
    """Return the products of each kind of the rank's layers, and those that recomputed modules repeat."""
    model, recipe, tp, ep = case.model, case.recipe, int(case.mesh.tp), int(case.mesh.ep)
    modules, etp, gated = recomputed_modules(recipe), recipe.megatron.expert_ways(tp), is_gated(case)

    def of(parameters: Iterable[Parameter], layers: float) -> tuple[Product, ...]:
        return of_block(parameters, layers, tp=tp, ep=ep, etp=etp, at_once=True, gated=gated, sharing=tp)

    def repeated(run: BlockRun) -> Iterator[Parameter]:
        experts = model.moe is not None and run.kind in ROUTED
        return (one for one in run.parameters if _is_of(one.name, modules, experts=experts))

    return recalled(
        lambda: (_products, model, recipe.megatron, modules, rank.counts, tp, ep, gated),
        lambda: tuple(
            (of(run.parameters, layers), of(repeated(run), layers))
            for run, layers in zip(runs_of(case), rank.counts, strict=True)
        ),
    )


def _is_of(name: str, modules: tuple[str, ...], *, experts: bool) -> bool:
    """Whether one of these modules multiplies by a matrix (megatron/core/transformer, ``recompute_modules``)."""
    return ("mla_up_proj" in modules and (".q_b_proj" in name or ".kv_b_proj" in name)) or (
        name.startswith("mlp.")
        and (("moe" if experts else "mlp") in modules or ("shared_experts" in modules and "shared_expert" in name))
    )


def _busy(rank: Rank, case: _Case, machine: _Machine) -> _RankTime:
    """Return a rank's computing and waits over all micro-batches. [s]"""
    recipe, rates = case.recipe, machine.rates
    degrees = int(case.mesh.tp), int(case.mesh.cp), int(case.mesh.ep)
    key = (
        case.model, recipe.precision, recipe.attention, recipe.sequence_parallel, recipe.megatron, degrees,
        as_key(case.batch.seq_len), rank.counts, rank.has_head, rates.share, rates.running, recomputed_modules(recipe),
    )  # fmt: skip
    busy = computing(lambda one: _work(rank, case, rates, one), case.model, recipe, case.batch, rates, machine.mfu, key=key)
    calls = tuple(collectives_of_passes(rank, case))
    columns = busy.columns_s * _column_share(case.model)
    attention = busy.attention_s
    passes = _Passes(busy.forward_s, busy.backward_s)
    parts = busy.parts if recipe.megatron.gradient_accumulation_fusion else (*busy.parts, _adding_up(rank, case, machine))
    if int(case.mesh.tp) > 1:
        parts = (*parts, _between_tensor_ranks(calls, case, machine, columns))
    if int(case.mesh.cp) > 1:
        parts = (*parts, _ring_attention(calls, case, machine, attention))
    if case.model.moe is not None and int(case.mesh.ep) > 1:
        parts = (*parts, _to_experts(calls, case, machine, passes))
    if int(case.mesh.pp) == 1:
        return _RankTime(parts, passes, 0.0)
    sends = _sends(calls, case, machine)
    beside = chunks_per_rank(case) > 1 and recipe.megatron.overlap_p2p_comm
    waits = longest(sends - busy.forward_s - busy.backward_s, 0.0 * sends) if beside else sends
    reason = "overlapped with the other chunks' passes" if beside else "the next pass waits for what it receives"
    sent = Part("waiting for sends between stages", waits, sends - waits, reason, _SENDS, Does.SENDING)
    return _RankTime((*parts, sent), passes, sends - waits)


def _adding_up(rank: Rank, case: _Case, machine: _Machine) -> Part:
    """Return the time to add a gradient in the weights' dtype to its buffer, once per micro-batch; ``--mfu`` includes it."""
    gradients = next(line.n_bytes for line in states_of(rank, case) if line.kind is Kind.GRADIENTS)
    width = bytes_of(case.recipe)
    moved = (2.0 + width.weight / width.gradient) * gradients
    takes = case.batch.grad_accum_steps * moved / machine.rates.bandwidth * (machine.mfu is None)
    return Part("adding up gradients", takes, 0.0 * takes, "buffers are read and written for every micro-batch", _ADDED)


@lru_cache(maxsize=256)
def _column_share(model: ModelSpec) -> float:
    """Return the share of column-parallel matrices among the block matrices that a token is multiplied by."""
    whole = text_layout(model)
    split = sum(
        run.layers * parameter.numel
        for run in whole.runs
        for parameter in run.parameters
        if len(parameter.shape) > 1
        and is_split(parameter.name)
        and not is_expert(parameter)
        and parameter.name.rpartition(".")[0].rpartition(".")[2] not in BY_ROWS
    )
    return split / block_matrices(whole)


def _slowest(ranks: tuple[_RankTime, ...]) -> tuple[Part, ...]:
    """Return the parts of the slowest rank; for columns, of the slowest rank of each layout."""
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
    """Return the slowest rank's wait while the pipeline fills and drains, when nothing hides the overlapped sends."""
    times = tuple(one.total_s + one.sends_s for at, one in busy.items() for _ in range(ends[at]))
    chunks = chunks_per_rank(case)
    idle = Bubble(times, chunks, case.batch.grad_accum_steps).idle_s  # type: ignore[arg-type]  # a column, too
    schedule = case.recipe.pipeline_schedule or "1f1b"
    return Part(
        "pipeline bubble", idle, 0.0 * idle, f"{int(case.mesh.pp)} ranks fill and drain, {schedule}", BUBBLE, Does.IDLING
    )


# --- its waits --------------------------------------------------------------------------------------------------------------


def _between_tensor_ranks(calls: tuple[Collective, ...], case: _Case, machine: _Machine, columns: Float) -> Part:
    """Return waits for collectives of activations. In the backward, those of column-parallel inputs overlap with a product."""
    forwards = 2 if case.recipe.recompute == "full" else 1
    takes: Float = 0.0
    waits: Float = 0.0
    for call in calls:
        if not call.near:
            continue
        time = seconds(call, neighbours(call.group, machine.here.per_node), machine.here)
        takes = takes + time
        per_layer = 2 * forwards + (2 if call.operation == "all_gather" else 0)
        overlap = machine.rates.running.tensor_overlap
        beside = time * (_BESIDE_PER_LAYER / per_layer) if call.phase is Phase.BACKWARD and overlap != "none" else 0.0 * time
        if overlap == "all":  # tp pieces, each sent during another piece's product
            beside = time * (1.0 - 1.0 / int(case.mesh.tp))
        waits = waits + (time - beside) + longest(beside - columns, 0.0 * time)
    if machine.rates.running.tensor_overlap == "backward":  # NCCL takes SMs; Transformer Engine's buffers need one
        waits = waits + slowed(takes - waits, machine.here).seconds
    reason = "the next matrix waits for activations; in backward half of it overlaps with matrix products"
    return Part("waiting for tensor-parallel ranks", waits, takes - waits, reason, f"{_BESIDE}; {SOURCE}", Does.SENDING)


def _ring_attention(calls: tuple[Collective, ...], case: _Case, machine: _Machine, attention: Float) -> Part:
    """Return waits of ring attention: ranks pass on keys and values while attention computes with the previous ones."""
    back = ATTENTION_BACKWARD / ATTENTION_BACKWARD_SHARE + (case.recipe.recompute == "full")
    beside = {Phase.FORWARD: attention, Phase.BACKWARD: back * attention}
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


def _to_experts(calls: tuple[Collective, ...], case: _Case, machine: _Machine, passes: _Passes) -> Part:
    """Return waits for the experts' all-to-alls. If overlapped with another micro-batch's passes, only the first ones wait."""
    exchanges = (call for call in calls if call.operation == "all_to_all")
    takes = together(_exchange_s(call, case, machine.here) for call in exchanges)
    if not (case.recipe.megatron.overlap_moe_expert_parallel_comm or machine.rates.running.expert_overlap):
        return Part(_EXCHANGES, takes, 0.0 * takes, "experts wait for their tokens", SOURCE, Does.SENDING)
    beside = (passes.forward_s + passes.backward_s) / (1.0 - machine.here.taken)
    waits = longest(takes - beside, takes / case.batch.grad_accum_steps)
    slower = slowed(takes - waits, machine.here).seconds
    reason = "sent beside the passes of another micro-batch, which NCCL slows"
    return Part(_EXCHANGES, waits + slower, takes - waits, reason, f"{_BESIDE_EXPERTS}; {SOURCE}", Does.SENDING)


def _exchange_s(call: Collective, case: _Case, here: Links) -> Float:
    group = neighbours(call.group, here.per_node)
    if case.recipe.megatron.moe_token_dispatcher_type not in ("flex", "deepep"):
        return seconds(call, group, here)
    to_nodes = visited(case, ceil_div(group.size, group.members)) / visited(case, group.size)
    return relayed_seconds(call, group, here, to_nodes)


def _sends(calls: tuple[Collective, ...], case: _Case, machine: _Machine) -> Float:
    """Return the time of sending hidden states and their gradients, between nodes if the pipeline spans several."""
    mesh, per_node = case.mesh, machine.here.per_node
    ranks = mesh.dp_shard * mesh.tp * mesh.cp * mesh.pp
    apart = Group(2, where(ranks > per_node, 1, 2))
    sends = [call for call in calls if call.among is Among.STAGES and call.operation == "send"]
    seconds_apart = together(seconds(call._replace(group=2), apart, machine.here) for call in sends)
    every = 2 * case.batch.grad_accum_steps * chunks_per_rank(case)  # ranks at the ends receive what they do not send
    return seconds_apart * every / sum(call.calls for call in sends) if sends else seconds_apart


def _after_backward(rank: Rank, case: _Case, machine: _Machine, passes: _Passes) -> tuple[Part, ...]:
    """Return gradient reduction, optimizer step and all-gather of the weights; overlapped ones hide behind one micro-batch."""
    mesh, per_node, own = case.mesh, machine.here.per_node, case.recipe.megatron
    reduced: Float = 0.0
    gathered: Float = 0.0
    for call in collectives_of_weights(rank, case):
        stride = mesh.tp if call.among is Among.SHARDS else mesh.ep
        time = seconds(call, strided(call.group, stride, per_node), machine.here)
        reduced, gathered = (reduced, gathered + time) if call.operation == "all_gather" else (reduced + time, gathered)
    slower = case.batch.grad_accum_steps * (1.0 - machine.here.taken)
    beside = _Passes(*(each / slower for each in passes))
    waits = longest(reduced - beside.backward_s * own.overlap_grad_reduce, 0.0 * reduced)
    waits = waits + longest(gathered - beside.forward_s * own.overlap_param_gather, 0.0 * gathered)
    reason = "gradients after the last backward, weights after the step; overlapped with a micro-batch if set"
    name, hidden = "collectives around the optimizer step", reduced + gathered - waits
    sent = Part(name, waits, hidden, reason, f"{_AFTER}; {SOURCE}", Does.SENDING_AT_STEP)
    copied = (line._replace(kind=Kind.OPTIMIZER_STATE) for line in step_lines(rank, case))  # read and written
    states = Account((*states_of(rank, case), *copied), (), ())
    step = stepping(states, case.model, case.recipe, mesh, machine.rates, per_node)
    return sent, slowed(hidden, machine.here), step

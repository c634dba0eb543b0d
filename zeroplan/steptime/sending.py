"""The time that collectives add to a step, given what each engine overlaps with computing."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.engines.precisions import widths
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Float, Int, longest, shortest, together, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime.compute import Computing
from zeroplan.steptime.links import CHANNELS, SOURCE, Group, Links, crosses, neighbours, pair_of, seconds, strided
from zeroplan.steptime.parts import Does, Part
from zeroplan.transformer.params import parameter_count


class _Sent(NamedTuple):
    """Collectives of one phase of the step. [s]"""

    inside: Float = 0.0
    """Time on the links within a node."""
    across: Float = 0.0
    """Time on the network."""
    bare: Float = 0.0
    """Time that computing cannot hide."""

    @property
    def takes(self) -> Float:
        return longest(self.inside, self.across)

    def and_of(self, time: Float, group: Group, bare: Float) -> "_Sent":
        """Return the sum with one more collective, on the node's links or the network."""
        over = crosses(group)
        return _Sent(self.inside + (1 - over) * time, self.across + over * time, self.bare + bare)


def exposed(
    calls: tuple[Collective, ...], model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links, busy: Computing
) -> tuple[Part, ...]:
    """Return a GPU's waits for collectives in forward, backward and around the optimizer's step. [s]

    Collectives within nodes and between nodes run at the same time, in different groups.
    """
    passes = batch.grad_accum_steps
    windows = {Phase.FORWARD: _Sent(), Phase.BACKWARD: _Sent(), Phase.STEP: _Sent()}
    blocks = {  # collectives slow computing, which then hides more of them
        Phase.FORWARD: (busy.forward_s - busy.ends_s) / (1.0 - here.taken),
        Phase.BACKWARD: (busy.backward_s - busy.ends_backward_s) * _share_beside(recipe, passes) / (1.0 - here.taken),
        Phase.STEP: 0.0 * busy.forward_s,
    }
    for call in calls:
        group = group_of(call, recipe, mesh, here)
        time = _time(call, group, model, recipe, here)
        bare = _uncovered(time, call, model, recipe, passes, blocks[call.phase])
        windows[call.phase] = windows[call.phase].and_of(time, group, bare)
    others = 1.0 - 1.0 / model.num_hidden_layers  # one block computes after the last call
    parts = tuple(_part(phase, windows[phase], others * blocks[phase]) for phase in windows)
    return (*parts, slowed(together(part.hidden_s for part in parts), here))


def slowed(hidden_s: Float, here: Links) -> Part:
    """Return the slowdown of kernels that run during collectives, as NCCL's channels take SMs from them."""
    slower = here.taken * hidden_s
    reason = "NCCL's channels take SMs from the kernels beside them"
    return Part("computing slowed by collectives", slower, 0.0 * slower, reason, CHANNELS, Does.SENDING)


def joining(calls: tuple[Collective, ...], batch: Batch, bandwidth: float) -> Part:
    """Return the time of copies around tensor-parallel collectives, as NCCL concatenates and splits only along the first axis. [s]

    The sequence is the second axis. torch copies a reduce-scatter's input first, and an all-gather's output afterwards. With one
    sequence the output is a view.
    """
    moved: Float = 0.0 * batch.micro_batch_size
    for call in calls:
        if call.among is Among.TENSOR and call.operation in ("all_gather", "reduce_scatter"):
            copied = 1 if call.operation == "reduce_scatter" else where(batch.micro_batch_size > 1, 1, 0)
            moved = moved + 2.0 * copied * call.calls * call.n_bytes
    takes = moved / bandwidth
    source = "torch 2.13, torch/distributed/_functional_collectives.py, all_gather_single and reduce_scatter_single"
    return Part("copies for tensor-parallel ranks", takes, 0.0 * takes, "sequences are joined and cut by copies", source)


_NAMES = {
    Phase.FORWARD: ("waiting for all-gathers in forward", "gathered ahead of the block that needs it"),
    Phase.BACKWARD: ("waiting for collectives in backward", "gathered ahead, reduced behind"),
    Phase.STEP: ("collectives around the optimizer step", "not overlapped"),
}


def _part(phase: Phase, sent: _Sent, beside: Float) -> Part:
    """Return a phase's wait, beside computing of ``beside`` seconds."""
    takes = sent.takes
    waits = longest(takes - beside, shortest(sent.bare, takes))
    title, reason = _NAMES[phase]
    return Part(title, waits, takes - waits, reason, SOURCE, Does.SENDING_AT_STEP if phase is Phase.STEP else Does.SENDING)


def group_of(call: Collective, recipe: RecipeSpec, mesh: Mesh, here: Links) -> Group:
    """Return the layout of a collective's ranks: neighbours if they split the model; ``tp`` apart for sequences and shards."""
    if recipe.engine == "fsdp2" and call.among is Among.SEQUENCE:
        shared = strided(call.group, mesh.tp, here.per_node)
        return pair_of(shared) if call.operation == "all_to_all" else shared
    if recipe.engine not in ("fsdp1", "fsdp2") or call.near:
        return neighbours(call.group, here.per_node)
    if call.among is Among.SHARDS_OF_EXPERTS:
        return strided(call.group, mesh.ep, here.per_node)
    stride = mesh.tp * mesh.cp * mesh.dp_shard if call.among is Among.REPLICAS else mesh.tp
    return strided(call.group, stride, here.per_node)


def _time(call: Collective, group: Group, model: ModelSpec, recipe: RecipeSpec, here: Links) -> Float:
    """Return the time of a collective. DDP's single all-reduce stands for one call per bucket. [s]"""
    if recipe.engine == "ddp" and call.operation == "all_reduce":
        buckets = len(_buckets(model, recipe))
        return seconds(call._replace(calls=buckets * call.calls, n_bytes=call.n_bytes // buckets), group, here)
    return seconds(call, group, here)


def _buckets(model: ModelSpec, recipe: RecipeSpec) -> tuple[int, ...]:
    """Return the sizes of DDP's buckets, in the order of their reduction. [bytes]"""
    from zeroplan.engines.ddp import bucket_sizes  # noqa: PLC0415  keeps start-up fast

    return bucket_sizes(model, widths(recipe.precision).stored, recipe.ddp.bucket_cap_mb)


def _overlaps(call: Collective, recipe: RecipeSpec) -> bool:
    """Whether an engine overlaps a collective with computing: FSDP all, DDP its reductions, DeepSpeed as configured.

    Source: DeepSpeed 0.19, runtime/zero/partitioned_param_coordinator.py, ``fetch_sub_module``, which prefetches only for a
    bucket size above 0.
    """
    if recipe.engine != "deepspeed":
        return call.phase is Phase.BACKWARD if recipe.engine == "ddp" else not (call.near or call.is_root)
    options = recipe.deepspeed
    if call.operation == "all_gather":
        return options.stage3_prefetch_bucket_size > 0 or options.stage3_allgather_sequential or recipe.zero_stage < 3
    return recipe.zero_stage == 3 if options.overlap_comm is None else options.overlap_comm


def _uncovered(time: Float, call: Collective, model: ModelSpec, recipe: RecipeSpec, passes: Int, blocks: Float) -> Float:
    """Return the part of a collective's time that computing cannot hide; ``blocks``: the blocks' computing beside it. [s]

    Experts wait for their tokens, and a tensor-parallel rank's next product for its input.
    """
    if call.phase is Phase.STEP or call.operation == "all_to_all" or not _overlaps(call, recipe):
        return time
    if recipe.engine == "ddp" or (recipe.engine == "deepspeed" and call.operation != "all_gather"):
        return longest(*(unsent * time - uncomputed * blocks for unsent, uncomputed in _when_buckets_are_full(model, recipe)))
    first: Float = passes / longest(1.0 * call.calls, 1.0 * passes)
    if recipe.engine == "deepspeed" and call.phase is Phase.FORWARD:  # the embedding comes first, alone
        first = longest(first, 1.0 * model.vocab_size * model.hidden_size / parameter_count(model))
    return time * first


def _when_buckets_are_full(model: ModelSpec, recipe: RecipeSpec) -> Iterator[tuple[float, float]]:
    """Yield for each bucket, once full, the share of gradients not yet sent (its own included), and of blocks not yet computed.

    DDP's buckets are small, so only the last one counts: it has the embedding and is full after the backward.
    """
    if recipe.engine == "ddp":
        sizes = _buckets(model, recipe)
        yield sizes[-1] / sum(sizes), 0.0
        return
    from zeroplan.engines.deepspeed.buckets import schedule  # noqa: PLC0415  keeps start-up fast
    from zeroplan.engines.rows import trained_row  # noqa: PLC0415  as above

    whole, unsent = trained_row(model), 0
    of_blocks = Counter[int]()
    for each in whole.placed:
        of_blocks[each.block] += each.end - each.start
    for flush in schedule(
        whole, recipe.deepspeed.reduce_bucket_size, leaves=recipe.zero_stage == 3
    ).flushes:  # the last one first
        unsent += flush.fill
        begun = 0.0 if flush.block < 0 else min(1.0, flush.made / of_blocks[flush.block])
        left = min(whole.n_blocks, flush.block + 1 - begun) if flush.block >= 0 else 0
        yield unsent / whole.n_elements, left / whole.n_blocks


def _share_beside(recipe: RecipeSpec, passes: Int) -> Float:
    """Return the share of the step's backwards that overlap with gradient reductions: all, or the last micro-batch's."""
    if recipe.sync_every_micro_batch and not (recipe.engine == "deepspeed" and recipe.zero_stage < 2):
        return 1.0
    if recipe.engine in ("fsdp1", "fsdp2"):  # every backward gathers parameters
        return 1.0
    return 1.0 / passes

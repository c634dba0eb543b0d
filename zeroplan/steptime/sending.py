"""The time that collectives add to a step, given what each engine overlaps with computing."""

from typing import NamedTuple

from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Float, Int, longest, shortest, together, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime.compute import Computing
from zeroplan.steptime.links import (
    CHANNELS,
    SOURCE,
    Group,
    Links,
    crosses,
    neighbours,
    pair_of,
    seconds,
    strided,
)
from zeroplan.steptime.parts import Does, Part


class _Sent(NamedTuple):
    """Collectives in one window of the step. [s]"""

    inside: Float = 0.0
    """Time on the links within a node."""
    across: Float = 0.0
    """Time on the network."""
    bare: Float = 0.0
    """Time of both that nothing can hide."""

    @property
    def takes(self) -> Float:
        return longest(self.inside, self.across)

    def and_of(self, time: Float, group: Group, bare: Float) -> "_Sent":
        """Return the sum with one more collective, on one of the two links."""
        over = crosses(group)
        return _Sent(self.inside + (1 - over) * time, self.across + over * time, self.bare + bare)


def exposed(
    calls: tuple[Collective, ...], model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links, busy: Computing
) -> tuple[Part, ...]:
    """Return the parts of a step in which a GPU waits for others, in forward, backward and after it. [s]

    Traffic within nodes and between them runs side by side, in different groups.
    """
    passes = batch.grad_accum_steps
    windows = {Phase.FORWARD: _Sent(), Phase.BACKWARD: _Sent(), Phase.STEP: _Sent()}
    for call in calls:
        group = group_of(call, recipe, mesh, here)
        time = _time(call, group, model, recipe, here)
        bare = _hidden_part(call, recipe)
        windows[call.phase] = windows[call.phase].and_of(time, group, _uncovered(time, call, bare, passes))
    others = 1.0 - 1.0 / model.num_hidden_layers  # the block that waits for the last call computes after it
    beside = {
        Phase.FORWARD: others * (busy.forward_s - busy.ends_s),
        Phase.BACKWARD: others * (busy.backward_s - busy.ends_backward_s) * _share_beside(recipe, passes),
        Phase.STEP: 0.0 * busy.forward_s,
    }
    parts = tuple(_part(phase, windows[phase], beside[phase], here.taken) for phase in windows)
    return (*parts, slowed(together(part.hidden_s for part in parts), here))


def slowed(hidden_s: Float, here: Links) -> Part:
    """Return what collectives cost the kernels beside them, whose SMs NCCL's channels take while they send."""
    slower = here.taken * hidden_s
    return Part("computing slowed by collectives", slower, 0.0 * slower, _TAKEN, CHANNELS, Does.SENDING)


def joining(calls: tuple[Collective, ...], batch: Batch, bandwidth: float) -> Part:
    """Return the time of copies around collectives of tensor-parallel ranks: NCCL joins and cuts along the first axis alone. [s]

    A sequence is the second axis. What a reduce-scatter cuts is copied first, and what an all-gather joins afterwards, unless there
    is one sequence, which is a view.
    """
    moved: Float = 0.0 * batch.micro_batch_size
    for call in calls:
        if call.among is Among.TENSOR and call.operation in ("all_gather", "reduce_scatter"):
            copied = 1 if call.operation == "reduce_scatter" else where(batch.micro_batch_size > 1, 1, 0)
            moved = moved + 2.0 * copied * call.calls * call.n_bytes
    takes = moved / bandwidth
    return Part("copies for tensor-parallel ranks", takes, 0.0 * takes, "sequences are joined and cut by copies", _JOINED)


_JOINED = "torch 2.13, torch/distributed/_functional_collectives.py, all_gather_single and reduce_scatter_single"
_TAKEN = "NCCL's channels take SMs from the kernels beside them"


_NAMES = {
    Phase.FORWARD: ("waiting for all-gathers in forward", "gathered ahead of the block that needs it"),
    Phase.BACKWARD: ("waiting for collectives in backward", "gathered ahead, reduced behind"),
    Phase.STEP: ("collectives around the optimizer step", "not overlapped"),
}


def _part(phase: Phase, sent: _Sent, beside: Float, taken: float) -> Part:
    """Return what a phase waits for; computing beside collectives lasts longer, and hides more of them."""
    takes = sent.takes
    waits = longest(takes - beside / (1.0 - taken), shortest(sent.bare, takes))
    title, reason = _NAMES[phase]
    return Part(title, waits, takes - waits, reason, SOURCE, Does.SENDING_AT_STEP if phase is Phase.STEP else Does.SENDING)


def group_of(call: Collective, recipe: RecipeSpec, mesh: Mesh, here: Links) -> Group:
    """Return where a collective's ranks are: neighbours if they split the model; ``tp`` apart for sequences and shards."""
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
    """Return the time of a collective. DDP's one line stands for all buckets and has the latency of each."""
    if recipe.engine == "ddp" and call.operation == "all_reduce":
        from zeroplan.engines.ddp import bucket_count  # noqa: PLC0415  keeps start-up fast

        buckets = bucket_count(model, 4)
        return seconds(call._replace(calls=buckets * call.calls), group, here)
    return seconds(call, group, here)


def _hidden_part(call: Collective, recipe: RecipeSpec) -> str:
    """Return what of a collective computing can hide: ``none``, all but the ``first`` call, or all but a ``bucket``."""
    if call.phase is Phase.STEP or call.operation == "all_to_all":
        return "none"  # experts wait for their tokens
    if recipe.engine in ("fsdp1", "fsdp2"):
        return "none" if call.near or call.is_root else "first"  # the next matrix waits for it
    if recipe.engine == "ddp":
        return "bucket" if call.phase is Phase.BACKWARD else "none"
    return "first" if _overlaps(call, recipe) else "none"


def _overlaps(call: Collective, recipe: RecipeSpec) -> bool:
    """Whether DeepSpeed overlaps a collective of a pass with computing.

    Source: DeepSpeed 0.19, runtime/zero/partitioned_param_coordinator.py, ``fetch_sub_module``, which prefetches only for a
    bucket size above 0.
    """
    options = recipe.deepspeed
    if call.operation == "all_gather":
        return options.stage3_prefetch_bucket_size > 0 or options.stage3_allgather_sequential or recipe.zero_stage < 3
    return recipe.zero_stage == 3 if options.overlap_comm is None else options.overlap_comm


def _uncovered(time: Float, call: Collective, bare: str, passes: Int) -> Float:
    """Return the part of a collective's time that nothing can hide."""
    if bare == "none":
        return time
    if bare == "bucket":  # the last bucket, which is reduced after the backward
        from zeroplan.engines.ddp import BUCKET_BYTES  # noqa: PLC0415  keeps start-up fast

        return time * (1.0 * BUCKET_BYTES / longest(1.0 * call.n_bytes, 1.0 * BUCKET_BYTES))
    return time * (passes / longest(1.0 * call.calls, 1.0 * passes))


def _share_beside(recipe: RecipeSpec, passes: Int) -> Float:
    """Return the share of the step's backwards that gradient reductions overlap with: all, or the last micro-batch's."""
    if recipe.sync_every_micro_batch and not (recipe.engine == "deepspeed" and recipe.zero_stage < 2):
        return 1.0
    if recipe.engine in ("fsdp1", "fsdp2"):  # every backward gathers parameters
        return 1.0
    return 1.0 / passes

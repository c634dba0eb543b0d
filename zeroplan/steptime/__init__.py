"""The time of an optimizer step, part by part, for ints and columns. Nothing is measured on the user's machine.

Collectives overlap with forward and backward as the engine allows. FSDP2 gathers the next block and reduces the last one's
gradients while this block computes. DDP reduces bucket by bucket during the backward. DeepSpeed prefetches at stage 3, and
reduces beside the backward with ``overlap_comm``. An overlapped collective adds only what exceeds the computing. Others add all
of their time, such as those of tensor-parallel ranks, which wait for each other's activations.

Leaves out data loading, congestion, checkpoints.
"""

from collections.abc import Iterator

from zeroplan.engines.account import Account
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, bytes_by_kind
from zeroplan.memo import as_key
from zeroplan.numeric import Float, log2, longest, together
from zeroplan.spec.batch import Batch
from zeroplan.spec.hardware import ClusterSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime.compute import Computing, Rates, Running, computing, peak_flops_per_s, running_of
from zeroplan.steptime.copies import copies_of_activations, copies_of_states
from zeroplan.steptime.efficiency import Efficiency, efficiency, shares_of
from zeroplan.steptime.links import Links, links, neighbours, seconds
from zeroplan.steptime.parts import Does, Part, StepTime
from zeroplan.steptime.sending import exposed, joining
from zeroplan.steptime.stepping import stepping
from zeroplan.steptime.work import Work, of_one, work

__all__ = [
    "Efficiency",
    "Part",
    "Running",
    "StepTime",
    "efficiency",
    "least_computing",
    "shares_of",
    "step_time",
]


def step_time(
    account: Account,
    model: ModelSpec,
    recipe: RecipeSpec,
    mesh: Mesh,
    batch: Batch,
    cluster: ClusterSpec,
    *,
    mfu: float | None = None,
    share: Efficiency | None = None,
    running: Running | None = None,
) -> StepTime:
    """Return the parts of one step; raises SpecError without a GPU, or for a model without counts of operations. [s]

    ``running``: the step's kernels, if they differ from the engine's usual ones.
    """
    rates, here = _rates(recipe, cluster, share, running)
    alike = _if_all_are_alike(account, model, recipe, mesh, batch, here, rates, mfu)
    if mfu is not None:
        return alike
    return alike._replace(parts=(*alike.parts, _for_the_slowest(alike.seconds, recipe, mesh, here.per_node)))


#: Each doubling of the nodes makes a step longer by this share of it: the medians of runs of the open half that differ in their
#: number of GPUs alone. Where every block is gathered from all ranks, they all wait for the slowest at every block. Replicas wait
#: for each other only where they reduce gradients.
_PER_DOUBLING, _PER_DOUBLING_WITH_GATHERS = 0.006, 0.016
_SLOWEST = (
    "fitted to published runs that differ in their number of GPUs alone (tests/golden/published_throughput.jsonl, open half)"
)


def _for_the_slowest(step: Float, recipe: RecipeSpec, mesh: Mesh, per_node: int) -> Part:
    """Return how long the GPUs of several nodes wait for the slowest of them. ``step``: the other parts. [s]"""
    each = _PER_DOUBLING_WITH_GATHERS if recipe.zero_stage == 3 else _PER_DOUBLING
    alike = mesh.dp_shard * mesh.tp * mesh.cp * mesh.pp
    within = log2(longest(1.0 * alike / per_node, 1.0))
    among = log2(longest(1.0 * mesh.dp_replicate * alike / per_node, 1.0)) - within
    waits = step * (each * within + _PER_DOUBLING * among)
    reason = f"{each:.1%} of the step for each doubling of the nodes"
    if recipe.zero_stage == 3 and recipe.engine == "fsdp2":
        reason = f"{reason} of a shard group, {_PER_DOUBLING:.1%} for replicas"
    return Part("waiting for the slowest GPU", waits, 0.0 * waits, reason, _SLOWEST, Does.SENDING)


def _if_all_are_alike(
    account: Account,
    model: ModelSpec,
    recipe: RecipeSpec,
    mesh: Mesh,
    batch: Batch,
    here: Links,
    rates: Rates,
    mfu: float | None,
) -> StepTime:
    """Return the parts of one step in which no GPU is slower than another."""
    gpu = rates.gpu
    if recipe.engine == "megatron":
        from zeroplan.steptime.megatron import megatron_time  # noqa: PLC0415  keeps start-up fast

        return megatron_time(model, recipe, mesh, batch, here, rates, mfu)
    if account.pipeline:
        return _on_a_pipeline(account, model, recipe, mesh, batch, here, rates, mfu=mfu)
    busy, split = _busy(model, recipe, mesh, batch, rates, mfu)
    step = stepping(account, model, recipe, mesh, rates, here.per_node)
    copies = _copies(account, recipe, batch, busy, gpu.architecture)
    joined = (joining(account.collectives, batch, rates.bandwidth),) if split > 1 and int(mesh.tp) > 1 and mfu is None else ()
    parts = (*busy.parts, *joined, *exposed(account.collectives, model, recipe, mesh, batch, here, busy), *copies, step)
    tokens = 1.0 * batch.micro_batch_size * batch.seq_len * batch.grad_accum_steps / split
    peak = peak_flops_per_s(gpu, recipe, rates.running.operands)
    return StepTime(parts, 1.0 * batch.grad_accum_steps * busy.model_flops, tokens, peak)


def _rates(
    recipe: RecipeSpec, cluster: ClusterSpec, share: Efficiency | None = None, running: Running | None = None
) -> tuple[Rates, Links]:
    gpu, here = cluster.gpu, links(cluster)
    if gpu is None or here is None:
        raise SpecError("a step's time needs a GPU; add --gpu NAME (`zeroplan gpus` lists them)")
    return Rates(gpu, share or shares_of(cluster), running or running_of(recipe, gpu.architecture), recipe), here


def _busy(
    model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, rates: Rates, mfu: float | None
) -> tuple[Computing, int]:
    """Return a rank's computing, and the number of ranks that split a micro-batch."""
    split = recipe.engine == "fsdp2"
    tp, cp, ep = int(mesh.tp) if split else 1, int(mesh.cp) if split else 1, int(mesh.ep)
    sequence = as_key(batch.seq_len)
    kernels = (
        recipe.attention, recipe.kernels, recipe.loss == "fused", recipe.fused_parts, recipe.linear_attention, rates.running,
    )  # fmt: skip
    key = model, recipe.engine, recipe.precision, kernels, sequence, tp, cp, ep, rates.share

    def work_of(one: Batch) -> Work:
        return work(model, recipe, one, rates.running.kernels, tp=tp, cp=cp, expert_ranks=ep)

    return computing(work_of, model, recipe, batch, rates, mfu, key=key), tp * cp


def least_computing(
    model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, cluster: ClusterSpec, *, mfu: float | None = None
) -> Float:
    """Return the summed computing time of a pipeline's ranks, a lower bound for any schedule; raises SpecError as step_time. [s]

    ``mesh``: the job's mesh with pp=1. The time includes waits of tensor-parallel ranks for each other within a layer.
    """
    rates, here = _rates(recipe, cluster)
    if recipe.engine == "megatron":
        from zeroplan.steptime.megatron import time_without_a_pipeline  # noqa: PLC0415  keeps start-up fast

        return time_without_a_pipeline(model, recipe, mesh, batch, here, rates, mfu)
    busy, _ = _busy(model, recipe, mesh, batch, rates, mfu)
    return together((*(part.seconds for part in busy.parts), *_least_waits(model, recipe, mesh, batch, here)))


def _least_waits(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links) -> Iterator[Float]:
    """Yield the shortest waits of FSDP2's tensor-parallel ranks for each other; nothing for models with experts. [s]"""
    if int(mesh.tp) > 1 and model.moe is None:
        from zeroplan.engines.fsdp2.split import least_collectives  # noqa: PLC0415  keeps start-up fast

        for call in least_collectives(model, recipe, mesh, batch):
            yield seconds(call, neighbours(call.group, here.per_node), here)


def _on_a_pipeline(
    account: Account, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links, rates: Rates,
    *, mfu: float | None,
) -> StepTime:  # fmt: skip
    """Return the slowest rank's parts. All ranks work on the same tokens, each with its share of the operations."""
    from zeroplan.steptime.pipeline import pipeline_parts  # noqa: PLC0415  keeps start-up fast

    parts = pipeline_parts(account, model, recipe, mesh, batch, here, rates, mfu)
    step = stepping(account, model, recipe, mesh, rates, here.per_node)
    tp, cp, ep = int(mesh.tp), int(mesh.cp), int(mesh.ep)
    one = of_one(int(batch.micro_batch_size), int(batch.seq_len))
    asked, passes = work(model, recipe, one, tp=tp, cp=cp, expert_ranks=ep), batch.grad_accum_steps / (1.0 * mesh.pp)
    tokens: Float = 1.0 * batch.micro_batch_size * batch.seq_len * passes / (tp * cp)
    return StepTime(
        (*parts, step), passes * asked.model_flops, tokens, peak_flops_per_s(rates.gpu, recipe, rates.running.operands)
    )


def _copies(account: Account, recipe: RecipeSpec, batch: Batch, busy: Computing, architecture: str) -> Iterator[Part]:
    """Yield copies of offloaded tensors over PCIe: gradients after every backward; weights, if on the host, for every pass."""
    steps = batch.grad_accum_steps
    if recipe.offload_activations:
        yield copies_of_activations(steps * bytes_by_kind(account.host).get(Kind.ACTIVATIONS, 0), architecture)
    if recipe.offloads_states:
        away = recipe.engine != "deepspeed" or recipe.deepspeed.offload_param != "none"
        yield copies_of_states(account, recipe, busy, architecture, times=steps + (2.0 * steps if away else 1.0))

"""The time of an optimizer step, part by part, for ints and columns. Nothing is measured on the user's machine.

Collectives overlap with forward and backward as the engine allows. FSDP2 gathers the next block and reduces the last one's
gradients while this block computes. DDP reduces bucket by bucket during the backward. DeepSpeed prefetches at stage 3, and
reduces beside the backward with ``overlap_comm``. An overlapped collective adds only what exceeds the computing. Others add all
of their time, such as those of tensor-parallel ranks, which wait for each other's activations.

Leaves out data loading, launches of small kernels, stragglers, congestion, checkpoints.
"""

from collections.abc import Iterator
from dataclasses import replace

from zeroplan.engines.account import Account
from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, Line, bytes_by_kind
from zeroplan.numeric import Float
from zeroplan.spec.batch import Batch
from zeroplan.spec.hardware import ClusterSpec, Dtype, GpuSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime.compute import Computing, computing, peak_flops_per_s, stepping
from zeroplan.steptime.copies import copies_of_activations, copies_of_states
from zeroplan.steptime.efficiency import Efficiency, efficiency, shares_of
from zeroplan.steptime.links import Links, links
from zeroplan.steptime.parts import Part, StepTime
from zeroplan.steptime.sending import exposed
from zeroplan.steptime.work import work

__all__ = ["Efficiency", "Part", "StepTime", "efficiency", "shares_of", "step_time", "with_optimizer_step"]


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
    operands: Dtype | None = None,
) -> StepTime:
    """Return the parts of one step; raises SpecError without a GPU, or for a model without counts of operations. [s]

    ``operands``: the dtype of matrix products, if it is not that of the weights: fp8, fp4.
    """
    gpu, here = cluster.gpu, links(cluster)
    if gpu is None or here is None:
        raise SpecError("a step's time needs a GPU; add --gpu NAME (`zeroplan gpus` lists them)")
    if operands is not None:
        gpu = _with_operands(gpu, recipe, operands)
    share = share or shares_of(cluster, recipe.engine)
    if recipe.engine == "megatron":
        from zeroplan.steptime.megatron import megatron_time  # noqa: PLC0415  keeps start-up fast

        return megatron_time(model, recipe, mesh, batch, here, gpu, share, mfu)
    if account.pipeline:
        return _on_a_pipeline(account, model, recipe, mesh, batch, here, gpu, mfu=mfu, share=share)
    tp, cp = (int(mesh.tp), int(mesh.cp)) if recipe.engine == "fsdp2" else (1, 1)
    asked = work(model, recipe, batch, tp=tp, cp=cp, expert_ranks=int(mesh.ep))
    busy = computing(asked, model, recipe, batch, gpu, share, mfu)
    on_host = _steps_on_host(recipe)
    step = stepping(account, recipe, gpu, share, on_host=on_host, ranks_per_node=here.per_node)
    copies = _copies(account, recipe, batch, busy, gpu.architecture)
    parts = (*busy.parts, *exposed(account.collectives, model, recipe, mesh, batch, here, busy), *copies, step)
    tokens = 1.0 * batch.micro_batch_size * batch.seq_len * batch.grad_accum_steps / (tp * cp)
    flops = batch.grad_accum_steps * 3.0 * asked.flops
    return StepTime(parts, flops, tokens, peak_flops_per_s(gpu, recipe))


def _with_operands(gpu: GpuSpec, recipe: RecipeSpec, operands: Dtype) -> GpuSpec:
    """Return the GPU with the rate of other operands of matrix products in place of the weights'."""
    if operands not in gpu.dense_flops_per_s:
        raise SpecError(f"GPU {gpu.name!r} has no {operands} rate in its entry, so no time can be given; leave it out")
    return replace(
        gpu, dense_flops_per_s={**gpu.dense_flops_per_s, widths(recipe.precision).name: gpu.dense_flops_per_s[operands]}
    )  # type: ignore[dict-item]


def with_optimizer_step(time: StepTime, states: tuple[Line, ...], recipe: RecipeSpec, cluster: ClusterSpec) -> StepTime:
    """Return the time of a step with another optimizer step, on the GPU, with these states. [s]"""
    gpu, here = cluster.gpu, links(cluster)
    assert gpu is not None  # noqa: S101  a step without a GPU has no time
    assert here is not None  # noqa: S101  likewise
    account = Account(states, (), ())
    step = stepping(account, recipe, gpu, shares_of(cluster, recipe.engine), on_host=False, ranks_per_node=here.per_node)
    return time._replace(parts=(*time.parts[:-1], step))


def _on_a_pipeline(
    account: Account, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links, gpu: GpuSpec,
    *, mfu: float | None, share: Efficiency,
) -> StepTime:  # fmt: skip
    """Return the slowest rank's parts. Each rank runs its share of the operations, and all of them work on the same tokens."""
    from zeroplan.steptime.pipeline import pipeline_parts  # noqa: PLC0415  keeps start-up fast

    parts = pipeline_parts(account, model, recipe, mesh, batch, here, gpu, share, mfu)
    step = stepping(account, recipe, gpu, share, on_host=_steps_on_host(recipe), ranks_per_node=here.per_node)
    tp, cp, ep = int(mesh.tp), int(mesh.cp), int(mesh.ep)
    asked, passes = work(model, recipe, batch, tp=tp, cp=cp, expert_ranks=ep), batch.grad_accum_steps / (1.0 * mesh.pp)
    flops = passes * 3.0 * asked.flops
    tokens: Float = 1.0 * batch.micro_batch_size * batch.seq_len * passes / (tp * cp)
    return StepTime((*parts, step), flops, tokens, peak_flops_per_s(gpu, recipe))


def _steps_on_host(recipe: RecipeSpec) -> bool:
    if recipe.engine == "deepspeed":
        return recipe.deepspeed.offload_optimizer != "none"
    return recipe.offloads_states


def _copies(account: Account, recipe: RecipeSpec, batch: Batch, busy: Computing, architecture: str) -> Iterator[Part]:
    """Yield copies over PCIe of offloaded tensors: gradients after every backward, weights on the host for every pass."""
    steps = batch.grad_accum_steps
    if recipe.offload_activations:
        yield copies_of_activations(steps * bytes_by_kind(account.host).get(Kind.ACTIVATIONS, 0), architecture)
    if recipe.offloads_states:
        away = recipe.engine == "fsdp2" or recipe.deepspeed.offload_param != "none"
        yield copies_of_states(account, recipe, busy, architecture, times=steps + (2.0 * steps if away else 1.0))

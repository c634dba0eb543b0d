"""How much memory do loading and saving need, on each GPU and on a node's host?

``from_pretrained`` builds the model on the meta device and loads every tensor of the checkpoint to the CPU, in each process.
With ``fsdp_cpu_ram_efficient_loading`` only one process per node loads it, under ZeRO-3 only rank 0, and broadcasts the weights.
"""

from collections.abc import Iterator
from itertools import accumulate

from zeroplan.engines.precisions import widths
from zeroplan.estimator import Estimate
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.numeric import ceil_div
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params import layout
from zeroplan.workflow.phases import DRY_RUN, ON_A_CPU, HostUse, LoopPhase

LOADED = "transformers 5.23, modeling_utils.py, PreTrainedModel.from_pretrained"
IN_ONE = "transformers 5.23, modeling_utils.py, _move_missing_keys_from_meta_to_device"
ZERO3 = "transformers 5.23, integrations/deepspeed.py, _load_state_dict_into_zero3_model"
FULL = "accelerate 1.15, accelerator.py, Accelerator.get_state_dict"
GATHERED = "deepspeed 0.19.8, runtime/engine.py, DeepSpeedEngine._zero3_consolidated_16bit_state_dict"
SHARDED = "accelerate 1.15, utils/fsdp_utils.py, save_fsdp_model"
HANDED_OUT = "accelerate 1.15, utils/fsdp_utils.py, fsdp2_load_full_state_dict"
PLACED = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_init.py, _move_states_to_device"


def loading(answer: Estimate, reference: tuple[Line, ...], *, efficient: bool) -> LoopPhase:
    """Return the GPU's peak before the first step; ``reference``: the lines of a reference model's copy. [bytes]

    ``efficient``: one process loads the weights, and under FSDP2 broadcasts them tensor by tensor.
    """
    moments = [moment for moment in answer.engine_moments if moment.phase is Phase.INIT]
    weights = tuple(line for line in answer.states if line.kind is Kind.PARAMETERS)
    peak = max(moments, key=lambda one: int(one.total_bytes)).lines if moments else weights
    is_one_unit = bool(reference) and answer.job.recipe.engine == "fsdp2" and answer.job.mesh.dp_shard > 1
    if is_one_unit:  # the trained model is sharded later, at the start of training
        lines = (*reference, _whole(answer, answer.parameters, "reference model"))
        return LoopPhase("loading", "the reference model becomes one unit of FSDP2", lines, DRY_RUN)
    if efficient and answer.job.recipe.engine == "fsdp2" and answer.job.mesh.dp_shard > 1:
        return LoopPhase("loading", "a tensor is handed out", (*reference, *_broadcast_peak(answer)), DRY_RUN)
    if answer.job.recipe.engine.startswith("fsdp") and answer.job.mesh.dp_shard > 1:
        lines = (*reference, *peak, *_largest_unit(answer))
        return LoopPhase("loading", "the largest unit is cut", lines, DRY_RUN)
    return LoopPhase("loading", "model and optimizer are built", (*reference, *peak), DRY_RUN)


def _broadcast_peak(answer: Estimate) -> tuple[Line, ...]:
    """The peak of the broadcast: one whole tensor, and the shards received so far."""
    width, ranks = widths(answer.job.recipe.precision).stored, answer.job.mesh.dp_shard
    sizes = [one.numel for one in _tensors(answer.job)]
    shards = list(accumulate(width * ceil_div(numel, ranks) for numel in sizes))
    held, whole = max(zip(shards, sizes, strict=True), key=lambda one: one[0] + width * one[1])
    return (
        Line(Kind.PARAMETERS, held, "shards that have arrived", "", HANDED_OUT),
        Line(Kind.TEMPORARY, width * whole, "a tensor, before it is cut", f"{width}·{whole}", HANDED_OUT),
    )


def _largest_unit(answer: Estimate) -> tuple[Line, ...]:
    """The largest unit, which moves to the GPU before it is sharded. FSDP1 also flattens it there.

    Embedding and head are one unit of FSDP1. Under FSDP2 variables of accelerate's ``fsdp2_prepare_model`` hold both until it ends.
    """
    parts = layout(answer.job.model)
    ends = sum(one.numel for one in (*parts.embeddings, *parts.tail))
    unit = max(ends, *(sum(one.numel for one in run.parameters) for run in parts.runs))
    flat = (_whole(answer, unit, "the largest unit, flat"),) if answer.job.recipe.engine == "fsdp1" else ()
    return (_whole(answer, unit, "the largest unit"), *flat)


def _whole(answer: Estimate, elements: int, what: str) -> Line:
    """A whole unit on the GPU. [bytes]"""
    width = widths(answer.job.recipe.precision).stored
    return Line(Kind.TEMPORARY, width * elements, f"{what}: whole, before it is cut", f"{width}·{elements}", PLACED)


def saving(answer: Estimate, resident: tuple[Line, ...], *, full: bool) -> LoopPhase:
    """Return the GPU's peak while a checkpoint is written; a full one is gathered tensor by tensor. [bytes]"""
    job = answer.job
    if not full or not _is_sharded(job):
        return LoopPhase("saving", "each rank writes what it has", resident)
    (width, source), largest = _saved(job), max(one.numel for one in _tensors(job))
    line = Line(Kind.UNSHARDED_PARAMETERS, width * largest, "the largest tensor, gathered", f"{width}·{largest}", source)
    return LoopPhase("saving", "the largest tensor is gathered", (*resident, line), DRY_RUN)


def host(answer: Estimate, *, beside: int, efficient: bool, full: bool) -> Iterator[HostUse]:
    """Yield a node's host memory during loading and saving; ``beside``: parameters of a second model that is loaded.

    [bytes]
    """
    job, here = answer.job, answer.ranks_per_node or answer.job.mesh.world_size
    width, of_both = widths(job.recipe.precision).stored, " of both models" if beside else ""
    each = answer.parameters + beside
    if job.recipe.engine == "deepspeed" and job.recipe.zero_stage == 3:
        yield HostUse(
            "loading", each * widths(job.recipe.precision).compute, 1, f"the checkpoint{of_both}, in rank 0 alone", ZERO3
        )
    elif efficient and job.recipe.engine.startswith("fsdp"):
        yield HostUse("loading", each * width, 1, f"all weights{of_both}, in one process of the node", IN_ONE)
    else:
        yield HostUse("loading", each * width, here, f"all weights{of_both}, in every process", LOADED, ON_A_CPU)
    if not _is_sharded(job):
        return
    if full:
        width, source = _saved(job)
        yield HostUse("saving", width * answer.parameters, 1, "the full state dict, in rank 0", source)
    elif job.recipe.engine.startswith("fsdp"):
        share = -(-width * answer.parameters // job.mesh.dp_shard)
        yield HostUse("saving", share, here, "each rank's shards on their way to files, at most", SHARDED)


def _is_sharded(job: JobSpec) -> bool:
    return job.mesh.dp_shard > 1 and (job.recipe.engine.startswith("fsdp") or job.recipe.zero_stage == 3)


def _saved(job: JobSpec) -> tuple[int, str]:
    """Bytes per element in a full state dict, and the source: FSDP's stored dtype, or DeepSpeed's 16-bit weights."""
    width = widths(job.recipe.precision)
    return (width.stored, FULL) if job.recipe.engine.startswith("fsdp") else (width.compute, GATHERED)


def _tensors(job: JobSpec) -> Iterator[Parameter]:
    """Yield every tensor in the order of the state dict."""
    parts = layout(job.model)
    yield from parts.embeddings
    for run in parts.runs:
        for _ in range(run.layers):
            yield from run.parameters
    yield from parts.tail

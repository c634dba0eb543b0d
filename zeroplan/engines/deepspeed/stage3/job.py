"""The inputs of every part of ZeRO-3's account: the job's sizes, the trace of gathers, and shared lines."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

from zeroplan.engines.deepspeed.buckets import Schedule, schedule
from zeroplan.engines.deepspeed.coordinator import Pass
from zeroplan.engines.deepspeed.gathers import sharing_of
from zeroplan.engines.deepspeed.infinity import on_nvme, refuse_few_buffers, refuse_twice, staying, staying_of, swaps_optimizer
from zeroplan.engines.deepspeed.notes import Gathered, gathered, gathered_by_several
from zeroplan.engines.deepspeed.offload import offloads_parameters
from zeroplan.engines.deepspeed.sources import STAGE3
from zeroplan.engines.formulas import sized, unless_zero
from zeroplan.engines.precisions import widths
from zeroplan.engines.rows import Row, embedding_elements, embedding_symbol, has_tied_head, row_as_held, shares, trained_row
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Bool, Int, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DeepSpeedOptions, RecipeSpec
from zeroplan.transformer.recomputed import first_recomputed

COORDINATOR = "DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py"


class Job(NamedTuple):
    """The sizes of a job, and the trace of its gathers."""

    whole: Row
    """The trained parameters."""
    every: Row
    """All parameters, including frozen ones, which are sharded and gathered too."""
    recipe: RecipeSpec
    n_ranks: Int
    element: int
    """Bytes of a weight and of a gradient in the compute dtype."""
    master: int
    """Bytes of an element of the optimizer's weights."""
    kept: int
    """Bytes of an element of a gradient kept for the step."""
    partition: Int
    buckets: Schedule
    trace: Gathered
    applies: Bool
    """Whether ``trace`` belongs to the job's number of micro-batches."""
    ends_step: Bool = True
    """Whether a pass may be a step's last, in which DeepSpeed gives gradients to the optimizer."""


def make_job(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Job:
    """Return the sizes of a job, with the trace of a single micro-batch per step."""
    width = widths(recipe.precision)
    sums_in_fp32 = recipe.deepspeed.grad_accum_dtype == "fp32"
    every, whole = row_as_held(model, width.compute), trained_row(model)
    return Job(
        whole,
        every,
        recipe,
        mesh.dp_shard,
        width.compute,
        width.stored,
        4 if sums_in_fp32 else width.compute,
        shares(numels(whole), mesh.dp_shard),
        schedule(whole, recipe.deepspeed.reduce_bucket_size, leaves=True),
        _trace(every, recipe, mesh.dp_shard, of=gathered),
        applies=True,
    )


_Replayed = TypeVar("_Replayed", Gathered, Gathered | None)


def _trace(whole: Row, recipe: RecipeSpec, n_ranks: Int, *, of: Callable[[Pass], _Replayed]) -> _Replayed:
    """Return the gathered elements with a single micro-batch per step, or with several."""
    one = pass_of(whole, recipe, n_ranks)
    found = of(one)
    if one.on_nvme and found is not None:
        refuse_few_buffers(recipe.deepspeed, found.most_read)
        refuse_twice(found.read_twice)
    return found


def pass_of(whole: Row, recipe: RecipeSpec, n_ranks: Int) -> Pass:
    """Return the inputs of the coordinator's decisions in a job's passes."""
    options, disk = recipe.deepspeed, on_nvme(whole, recipe.deepspeed, widths(recipe.precision).compute, n_ranks)
    recomputed, sharing = _recomputed(whole, recipe), sharing_of(recipe, n_ranks)
    return Pass(whole, _of_gathers(options), recomputed, sharing, disk, trains=not recipe.forward_only)


def _recomputed(whole: Row, recipe: RecipeSpec) -> int:
    """Return how many blocks, from the first, the backward recomputes."""
    first = first_recomputed(whole.model, recipe)
    return 0 if recipe.recompute == "none" else whole.n_blocks if first is None else first


@lru_cache(maxsize=64)
def _of_gathers(options: DeepSpeedOptions) -> DeepSpeedOptions:
    """Return the options that decide gathers, with defaults for all others, so that one cached replay serves every other."""
    return DeepSpeedOptions(**{name: getattr(options, name) for name in _DECIDE_GATHERS})


_DECIDE_GATHERS = (
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_allgather_sequential", "memory_efficient_linear",
    "zero_hpz_partition_size", "offload_param_buffer_count",
)  # fmt: skip


def trace_of_several(job: Job, micro: Int) -> Gathered:
    """Return the trace with several micro-batches per step, which is twice as slow to find and often equals that of one."""
    if (micro if isinstance(micro, int) else micro.max()) == 1:
        return job.trace
    return _trace(job.every, job.recipe, job.n_ranks, of=gathered_by_several) or job.trace


def by_micro_batches(job: Job, batch: Batch) -> tuple[Job, ...]:
    """Return the job with the trace of a single micro-batch per step, and one with that of several if it differs."""
    several = trace_of_several(job, batch.grad_accum_steps)
    if several is job.trace:
        return (job,)
    more = batch.grad_accum_steps > 1
    return job._replace(applies=batch.grad_accum_steps == 1), job._replace(trace=several, applies=more)


@lru_cache(maxsize=256)
def numels(whole: Row) -> tuple[tuple[int, int], ...]:
    """Return the sizes of parameters and their counts."""
    counts: dict[int, int] = {}
    for each in whole.placed:
        numel = each.end - each.start
        counts[numel] = counts.get(numel, 0) + 1
    return tuple(counts.items())


def gathered_line(job: Job, elements: int) -> Line:
    """Return the gathered parameters as a line. A single rank gathers nothing."""
    n_bytes = unless_alone(job, where(job.applies, job.element * elements, 0))
    formula = f"{job.element}·{elements}{if_several(job)}" if job.applies is not False else "0"
    return Line(Kind.GATHER, n_bytes, "gathered parameters, and flat gathers not yet used up", formula, COORDINATOR)


def unless_alone(job: Job, n_bytes: Int) -> Int:
    """Return 0 for a single rank, which gathers nothing, unless it fetches parameters from host memory."""
    return n_bytes if offloads_parameters(job.recipe) else where(job.n_ranks > 1, n_bytes, 0)


def if_several(job: Job) -> str:
    """Return the formula's factor that is 0 for a single rank, which gathers nothing."""
    return "" if offloads_parameters(job.recipe) else "·min(1, N-1)"


def gradient_line(job: Job, elements: int, reason: str, symbol: str = "") -> Line:
    """Return a line of this many elements of gradients as autograd makes them. [bytes]"""
    return sized(Kind.UNSHARDED_GRADIENTS, job.element, elements, reason, STAGE3, symbol)


def tied_head_lines(job: Job) -> tuple[Line, ...]:
    """Return a tied head's gradient, which waits for the embedding's."""
    if not has_tied_head(job.whole):
        return ()
    elements = embedding_elements(job.whole)
    return (
        gradient_line(job, elements, "gradient of the tied head, waiting for the embedding's", embedding_symbol(job.whole)),
    )


def staying_lines(job: Job, *at: int) -> tuple[Line, ...]:
    """Return gradients of reduced buckets that wait on the GPU: all, or those before a point of a block."""
    if not swaps_optimizer(job.recipe):
        return ()
    if at:
        return if_at_end(job, staying(job.buckets, (at[0], at[1]), job.n_ranks, job.master))
    return if_at_end(job, staying_of(job.buckets, len(job.buckets.flushes), job.n_ranks, job.master))


def if_at_end(job: Job, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return lines that exist in a step's last micro-batch only."""
    if job.ends_step is True:
        return lines
    sizes = [where(job.ends_step, line.n_bytes, 0) for line in lines]
    return tuple(
        line._replace(n_bytes=size, formula=unless_zero(size, line.formula)) for line, size in zip(lines, sizes, strict=True)
    )

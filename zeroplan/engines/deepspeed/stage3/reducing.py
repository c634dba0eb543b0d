"""The memory of reducing a bucket during ZeRO-3's backward, and the buckets that take most."""

from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.deepspeed.buckets import Flush, Schedule, leaf_elements
from zeroplan.engines.deepspeed.infinity import staying_of, swaps_optimizer
from zeroplan.engines.deepspeed.notes import Gathered
from zeroplan.engines.deepspeed.offload import offloads_optimizer
from zeroplan.engines.deepspeed.quantized_gradients import applies, quantized_line, unless_quantized
from zeroplan.engines.deepspeed.running import GradientCounts, place_in_block, running_lines
from zeroplan.engines.deepspeed.sources import STAGE3
from zeroplan.engines.deepspeed.stage3.job import Job, gradient_line, if_at_end
from zeroplan.engines.deepspeed.stage3_offload import on_the_way
from zeroplan.engines.formulas import product, unless_zero
from zeroplan.engines.passes import Passes
from zeroplan.engines.rows import Sizes, shares
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.memo import recalled
from zeroplan.numeric import where
from zeroplan.spec.recipe import DeepSpeedOptions

_SCATTER = "DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced"
_CAST = f"{STAGE3}, __avg_scatter_grads"


@lru_cache(maxsize=256)
def highest_flushes(
    buckets: Schedule, trace: Gathered, counts: GradientCounts, beside: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Flush, int], ...]:
    """Return reduced buckets that take more than every earlier one at the same place of a block, with the gathered elements.

    Earlier ones have as many activations in the running block, and more kept by the blocks before.
    """
    chosen: list[tuple[Flush, int]] = []
    heaviest: dict[tuple[int, ...], int] = {}
    for index in range(len(buckets.flushes) - 1, 0, -1):
        flush = buckets.flushes[index]
        held = _gathered_at(trace, flush)
        alone = held + flush.fill * (1 + flush.alone) + flush.arriving
        place = place_in_block(counts, flush.block, flush.made)
        heavier = False
        for way, elements in enumerate(beside[index] if beside else (0,)):
            heavier = heavier or alone + elements > heaviest.get((way, *place), -1)
            heaviest[(way, *place)] = max(heaviest.get((way, *place), -1), alone + elements)
        if heavier:
            chosen.append((flush, held))
    return tuple(chosen)


def flush_memory(job: Job) -> tuple[tuple[int, ...], ...]:
    """Return each flush's memory beside its bucket, on the way to host memory, to NVMe or to 4 bits, in elements of a weight.

    The number of ranks decides which bucket takes most: on the way from the GPU on very many ranks, on 8 and on one.
    """
    recipe, quantizes = job.recipe, job.recipe.deepspeed.zero_quantized_gradients
    if not offloads_optimizer(recipe) and not quantizes:
        return ()
    fewest = job.n_ranks if isinstance(job.n_ranks, int) else int(job.n_ranks.min())
    if quantizes and applies(recipe, fewest) is False:
        return ()
    reads = (recipe, fewest) if quantizes or swaps_optimizer(recipe) else None  # plain offload reads sizes alone
    key = reads, job.element, job.kept, job.master, job.buckets
    return recalled(lambda: (flush_memory, *key), lambda: tuple(_beside(job, fewest)))


def _beside(job: Job, fewest: int) -> Iterator[tuple[int, ...]]:
    swaps = swaps_optimizer(job.recipe)
    for at, flush in enumerate(job.buckets.flushes):
        if job.recipe.deepspeed.zero_quantized_gradients:
            line = quantized_line(job.recipe, flush, fewest, element=job.element, kept=job.kept)
            yield (int(line.n_bytes) // job.element - flush.fill,)
            continue
        few = (job._replace(n_ranks=ranks, ends_step=True) for ranks in (8, 1))
        taken = (total_bytes((*on_the_way(one, flush), *(_staying_until(one, at) if swaps else ()))) for one in few)
        yield (0, *(int(n_bytes) // job.element for n_bytes in taken))


def _gathered_at(trace: Gathered, flush: Flush) -> int:
    if flush.block < 0:
        return trace.end
    notes = trace.head_notes if flush.block >= len(trace.backward) else trace.backward[flush.block]
    if not notes:
        return trace.past_head
    made = flush.made + (trace.tied_head if notes is trace.head_notes else 0)
    at = next((at for at, note in enumerate(notes) if note.made >= made), len(notes) - 1)
    note, before = notes[at], notes[at - 1].made if at else 0
    return note.during - min(max(made - before, 0), note.during - note.handing)


def all_reduces_buckets(options: DeepSpeedOptions) -> bool:
    """Whether buckets themselves are all-reduced."""
    return not options.reduce_scatter and options.contiguous_gradients


def is_all_reduced(flush: Flush, *, all_reduces: bool) -> bool:
    """Whether a bucket is one of those. A gradient too large for it is always reduce-scattered."""
    return all_reduces and not flush.alone


def reduce_lines(job: Job, flush: Flush) -> tuple[Line, ...]:
    """Return the memory of reducing a bucket: a copy in rank order, unless it is one gradient that divides evenly."""
    options = job.recipe.deepspeed
    held = flush.fill if flush.alone or not options.contiguous_gradients else 0
    share = shares(flush.sizes, job.n_ranks)
    copied = where(flush.fill % job.n_ranks == 0, 0, share * job.n_ranks) if len(flush.inside) == 1 else share * job.n_ranks
    copy_formula, cast_formula = _reduce_formulas(job.element, job.kept, flush.sizes)
    cast = job.kept * share if job.kept != job.element else 0
    if whole := is_all_reduced(flush, all_reduces=all_reduces_buckets(options)):
        copied, copy_formula = where(job.n_ranks > 1, flush.fill, 0), product(job.element, flush.fill)
        cast_formula = product(job.kept, flush.fill)
        cast = job.kept * flush.fill if job.kept != job.element else 0  # the whole bucket, of which a share is then kept
    kind = Kind.REDUCE if whole else Kind.TEMPORARY  # whole, it is reduced; else this rank's share
    quantized = job.recipe.deepspeed.zero_quantized_gradients
    if quantized:
        copied, cast = (unless_quantized(job.recipe, job.n_ranks, n_bytes) for n_bytes in (copied, cast))
    copy = Line(
        Kind.REDUCE,
        job.element * copied,
        "copy of the bucket that is reduce-scattered",
        unless_zero(copied, copy_formula),
        _SCATTER,
    )
    to_host = on_the_way(job, flush)
    return (
        gradient_line(job, held + flush.arriving, "gradient that does not fit into the bucket"),
        Line(kind, cast, "reduced gradients cast to fp32", unless_zero(cast, cast_formula), _CAST),
        *((quantized_line(job.recipe, flush, job.n_ranks, element=job.element, kept=job.kept),) if quantized else ()),
        *((copy, *to_host) if job.kept == job.element else _one_by_one(copy, to_host)),
    )


def _one_by_one(copy: Line, to_host: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return the larger of two memories as lines: the cast to fp32 replaces the copy before a gradient goes to the host."""
    if not to_host:
        return (copy,)
    is_copy = copy.n_bytes > total_bytes(to_host)
    sizes = [where(is_copy == (line is copy), line.n_bytes, 0) for line in (copy, *to_host)]
    lines = zip((copy, *to_host), sizes, strict=True)
    return tuple([line._replace(n_bytes=size, formula=unless_zero(size, line.formula)) for line, size in lines])


@lru_cache(maxsize=4096)
def _reduce_formulas(element: int, kept: int, sizes: Sizes) -> tuple[str, str]:
    share = " + ".join(f"{count}·ceil({numel}/N)" for numel, count in sizes)
    return f"{element}·N·({share})", f"{kept}·({share})"


def staying_until(job: Job, flush: Flush) -> tuple[Line, ...]:
    """Return the gradients of earlier buckets that wait on the GPU."""
    return _staying_until(job, job.buckets.flushes.index(flush)) if swaps_optimizer(job.recipe) else ()


def _staying_until(job: Job, at: int) -> tuple[Line, ...]:
    return if_at_end(job, staying_of(job.buckets, len(job.buckets.flushes) - 1 - at, job.n_ranks, job.master))


def running_at(job: Job, these: Passes, flush: Flush) -> tuple[Line, Line]:
    """Return the running block's activations. A leaf module delivers after its output gradients are summed."""
    saved, flowing = running_lines(these, flush.block, flush.made)
    if flush.made != leaf_elements(job.whole, flush.block):
        return saved, flowing
    formula = f"{flowing.formula} - {these.head.hidden_formula}"
    return saved, flowing._replace(n_bytes=flowing.n_bytes - these.head.hidden_bytes, formula=formula)

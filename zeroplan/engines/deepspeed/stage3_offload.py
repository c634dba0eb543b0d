"""ZeRO-Offload at stage 3 of DeepSpeed, on the GPU and in host memory.

With optimizer offload each reduced shard of a gradient goes to the host, comes back while it is accumulated there, and its norm
is computed in fp64. With parameter offload a shard is copied to the GPU before it is gathered; a single rank, which gathers
nothing, holds a parameter on the GPU while it is used.
"""

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.buckets import Flush
from zeroplan.engines.deepspeed.infinity import (
    Way,
    optimizer_in_host,
    pinned_beyond,
    swapping_symbols,
    swaps_optimizer,
    swaps_parameters,
    weights_in_host,
)
from zeroplan.engines.deepspeed.offload import offloads_optimizer, offloads_parameters, on_host
from zeroplan.engines.deepspeed.sources import FLAT_ON_HOST, FP64, NORM_PIECE, STAGE3
from zeroplan.engines.deepspeed.stage3.job import Job
from zeroplan.engines.formulas import sized
from zeroplan.engines.pinned import beyond, beyond_symbol
from zeroplan.engines.rows import numel
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, for_each_value, maximum, minimum, where
from zeroplan.spec.recipe import RecipeSpec

_NORM = f"{STAGE3}, partition_grads and _constant_buffered_norm2"


def states_on_gpu(recipe: RecipeSpec, states: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return the GPU's lines of weights, the optimizer's weights, gradients and the optimizer's states."""
    weights, *updated = states
    return (
        on_host(weights) if offloads_parameters(recipe) else weights,
        *(on_host(line) if offloads_optimizer(recipe) else line for line in updated),
    )


def on_the_way(job: Job, flush: Flush) -> tuple[Line, ...]:
    """Return the memory that takes a bucket's gradients to the host or to NVMe one by one, beyond the gradients. [bytes]

    A share is copied back, and in the last micro-batch of a step cast to fp64 for its norm. Without a contiguous bucket each
    gradient is freed then. On the way to NVMe the shares as the optimizer takes them stay until the last one is made.
    """
    if not offloads_optimizer(job.recipe):
        return ()
    back = Way(job.kept, 0, 0, freed=0 if job.recipe.deepspeed.contiguous_gradients else job.element)
    at_end = back._replace(norm=FP64, cast=job.master if job.kept != job.master else 0)
    before, reason = _most(job, flush, back), "share of a gradient, back from the host"
    if job.ends_step is False:
        return (sized(Kind.REDUCE, 1, before, reason, _NORM),)
    if swaps_optimizer(job.recipe):
        at_end, reason = at_end._replace(stays=job.master), "shares of a bucket's gradients, back from the host and on to NVMe"
    n_bytes = where(job.ends_step, _most(job, flush, at_end), before)
    return (sized(Kind.REDUCE, 1, n_bytes, f"{reason}, and in fp64 for its norm", _NORM),)


def _most(job: Job, flush: Flush, way: Way) -> Int:
    """Return the most beyond a bucket's gradients. In a contiguous bucket, without NVMe, it is that of the largest."""
    if way.freed or way.stays:
        return for_each_value(lambda ranks: way.most(flush.inside, ranks), job.n_ranks)
    share = ceil_div(max(map(numel, flush.inside)), job.n_ranks)
    return way.kept * share + maximum(way.norm * minimum(share, NORM_PIECE), way.cast * share)


def host_lines(job: Job, states: tuple[Line, ...], temporary: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return the host memory from the second step on, including the step's temporaries. [bytes]

    ``states``: the lines without offload (weights, the optimizer's weights, gradients, the optimizer's states); ``temporary``:
    the optimizer's temporaries.
    """
    weights, master, gradients, *optimizer = states
    recipe = job.recipe
    lines: list[Line] = []
    if swaps_parameters(recipe):
        lines += weights_in_host(job)
    elif offloads_parameters(recipe):
        lines.append(weights._replace(source=FLAT_ON_HOST))
    if swaps_optimizer(recipe):
        lines += [*optimizer_in_host(job), *temporary]
    elif offloads_optimizer(recipe):
        reason = "gradients of this rank's share, as the optimizer takes them"
        taken = sized(Kind.GRADIENTS, job.master, job.partition, reason, f"{STAGE3}, initialize_optimizer_states", "G_r")
        lines += [master, *optimizer, gradients, taken, *temporary]
    pins = _beyond(job)
    return (*lines, beyond(pins)) if lines and pins is not None else tuple(lines)


def host_symbols(job: Job) -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of :func:`host_lines`."""
    pins = _beyond(job)
    return (*swapping_symbols(job), *(() if pins is None else (beyond_symbol(pins),)))


def _beyond(job: Job) -> Int | None:
    """Return the size of pinned blocks beyond their tensors; None if nothing is pinned. [bytes]"""
    recipe, options = job.recipe, job.recipe.deepspeed
    if not offloads_parameters(recipe) and not (offloads_optimizer(recipe) and options.offload_optimizer_pin_memory):
        return None
    return pinned_beyond(job)

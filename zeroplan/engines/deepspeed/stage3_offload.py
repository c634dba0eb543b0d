"""What does ZeRO-Offload change at stage 3 of DeepSpeed, on the GPU and in host memory?

With the optimizer's offload each reduced share of a gradient goes to the host, comes back as it is summed up there, and its norm
is taken in fp64. With the parameters' offload a share is copied to the GPU before it is gathered, and a single rank, which gathers
nothing, holds a parameter on the GPU while it is used.
"""

from functools import lru_cache

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.buckets import Flush, Schedule
from zeroplan.engines.deepspeed.infinity import (
    casts_on_the_way,
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
from zeroplan.engines.formulas import times
from zeroplan.engines.pinned import beyond, beyond_symbol
from zeroplan.engines.rows import numel
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.spec.recipe import RecipeSpec

_NORM = f"{STAGE3}, partition_grads and _constant_buffered_norm2"


def states_on_gpu(recipe: RecipeSpec, states: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return weights, the weights that are updated, gradients and the optimizer's states as the GPU has them."""
    weights, *updated = states
    return (
        on_host(weights) if offloads_parameters(recipe) else weights,
        *(on_host(line) if offloads_optimizer(recipe) else line for line in updated),
    )


def on_the_way(job: Job, flush: Flush) -> tuple[Line, ...]:
    """Return what takes the largest gradient of a bucket to the host: its share, back from there, and its norm in fp64. [bytes]"""
    if not offloads_optimizer(job.recipe):
        return ()
    if swaps_optimizer(job.recipe):
        return casts_on_the_way(job, flush)
    share = ceil_div(max(map(numel, flush.inside)), job.n_ranks)
    cast = job.master * share if job.kept != job.master else 0
    n_bytes = job.kept * share + maximum(FP64 * minimum(share, NORM_PIECE), cast)
    formula = f"1·{n_bytes}" if isinstance(n_bytes, int) else ""
    return (Line(Kind.REDUCE, n_bytes, "share of a gradient, back from the host, and in fp64 for its norm", formula, _NORM),)


@lru_cache(maxsize=256)
def beside_flushes(buckets: Schedule, element: int) -> tuple[tuple[int, ...], ...]:
    """Of each bucket, what takes it to the host, in elements of a weight: on very many ranks, on 8 and on one.

    Which bucket takes most depends on the number of ranks.
    """
    every = (max(map(numel, flush.inside)) for flush in buckets.flushes)
    return tuple((0, *(ceil_div(largest, ranks) * (element + FP64) // element for ranks in (8, 1))) for largest in every)


def host_lines(job: Job, states: tuple[Line, ...], temporary: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return what is in host memory from the second step on, with what the step takes there. [bytes]

    ``states`` are the lines of a GPU that offloads nothing: weights, weights that are updated, gradients, optimizer's states;
    ``temporary`` what a step of the optimizer takes.
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
        formula, source = times(job.master, "G_r"), f"{STAGE3}, initialize_optimizer_states"
        taken = Line(Kind.GRADIENTS, job.master * job.partition, reason, formula, source)
        lines += [master, *optimizer, gradients, taken, *temporary]
    pins = _beyond(job)
    return (*lines, beyond(pins)) if lines and pins is not None else tuple(lines)


def host_symbols(job: Job) -> tuple[Symbol, ...]:
    """Return what the formulas of :func:`host_lines` count."""
    pins = _beyond(job)
    return (*swapping_symbols(job), *(() if pins is None else (beyond_symbol(pins),)))


def _beyond(job: Job) -> Int | None:
    """Bytes that pinned memory takes beyond its tensors; None where nothing is pinned."""
    recipe, options = job.recipe, job.recipe.deepspeed
    if not offloads_parameters(recipe) and not (offloads_optimizer(recipe) and options.offload_optimizer_pin_memory):
        return None
    return pinned_beyond(job)

"""The traffic of ZeRO-3: all-gathers of parameters in every pass, reduce-scatters of gradients bucket by bucket."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.deepspeed.buckets import Schedule
from zeroplan.engines.deepspeed.numbers import numbers_sharded
from zeroplan.engines.deepspeed.quantized_gradients import quantized_collectives
from zeroplan.engines.deepspeed.secondary import within_group
from zeroplan.engines.deepspeed.sources import STAGE3
from zeroplan.engines.deepspeed.stage3.job import COORDINATOR, Job, trace_of_several
from zeroplan.engines.deepspeed.stage3.reducing import all_reduces_buckets, is_all_reduced
from zeroplan.engines.deepspeed.stage3.step import group_count
from zeroplan.engines.rows import Sizes, shares
from zeroplan.ledger import Collective, Phase
from zeroplan.numeric import Int, ceil_div, where
from zeroplan.spec.batch import Batch

_SCALE = 4
"""Bytes of the scale of a group of weights in 8 bits."""


def collectives(job: Job, batch: Batch) -> tuple[Collective, ...]:
    """Return every collective of a step."""
    micro, n, element, trace = batch.grad_accum_steps, job.n_ranks, job.element, job.trace
    return (
        *_gathered_in_passes(job, micro),
        _all_gather(job, ("persistent parameters", "after the optimizer step", Phase.STEP), _padded(trace.persistent_sent, n),
                    trace.n_persistent, 1, element),
        *_gradients(job, micro),
        *numbers_sharded(job.recipe, n, group_count(job)),
    )  # fmt: skip


def _gradients(job: Job, micro: Int) -> Iterator[Collective]:
    """Yield the gradients' collectives, bucket by bucket: reduce-scattered, or all-reduced in the bucket."""
    n, element = job.n_ranks, job.element
    scattered, whole, elements = _flushed(job.buckets, all_reduces_buckets(job.recipe.deepspeed))
    name, when = "gradients, bucket by bucket", "in the backward of every micro-batch"
    if scattered.calls or not whole:
        share = shares(scattered.sizes, n)
        calls, reduced = scattered.calls, n * share
        sent = Collective(
            "reduce_scatter", name, when, n, calls * micro, element * ceil_div(reduced, calls),
            (n - 1) * element * share * micro, reduced * micro, f"{STAGE3}, __avg_scatter_grads", element * reduced * micro,
        )  # fmt: skip
        yield from quantized_collectives(job.recipe, job.whole, sent, micro, element=element)
    if whole:
        yield Collective(
            "all_reduce", name, when, n, whole * micro, element * ceil_div(elements, whole),
            2 * (n - 1) * element * elements // n * micro, 2 * elements * micro, f"{STAGE3}, __avg_scatter_contiguous_grads",
            element * elements * micro,
        )  # fmt: skip


class _Scattered(NamedTuple):
    """Buckets that are reduce-scattered, and the sizes of all gradients in them."""

    calls: int
    sizes: Sizes


@lru_cache(maxsize=256)
def _flushed(buckets: Schedule, all_reduces: bool) -> tuple[_Scattered, int, int]:  # noqa: FBT001  part of a key
    """Return the buckets that are reduce-scattered, and the number and the elements of those that are all-reduced."""
    whole = [flush for flush in buckets.flushes if is_all_reduced(flush, all_reduces=all_reduces)]
    scattered = [flush for flush in buckets.flushes if not is_all_reduced(flush, all_reduces=all_reduces)]
    counts = Counter[int]()
    for flush in scattered:
        counts.update(dict(flush.sizes))
    return _Scattered(len(scattered), tuple(counts.items())), len(whole), sum(flush.fill for flush in whole)


def _padded(sizes: Sizes, n_ranks: Int) -> Int:
    return n_ranks * shares(sizes, n_ranks)


def _gathered_in_passes(job: Job, micro: Int) -> Iterator[Collective]:
    """Yield the all-gathers of every forward and backward: weights, plain or in 8 bits, and then their scales."""
    n, one, quantized = job.n_ranks, job.trace, job.recipe.deepspeed.zero_quantized_weights
    several = trace_of_several(job, micro)
    what, width = ("parameters in 8 bits", 1) if quantized else ("parameters", job.element)
    for phase, single, later in (
        (Phase.FORWARD, one.sent_forward, several.sent_forward),
        (Phase.BACKWARD, one.sent_backward, several.sent_backward),
    ):
        when, forward = f"in every {phase.value}", phase is Phase.FORWARD
        elements = where(micro > 1, _padded(later.sizes, n), _padded(single.sizes, n))
        gather = _all_gather(job, (what, when, phase), elements, single.calls, micro, width)
        yield from within_group(job.recipe, gather, micro, forward=forward)
        if quantized:
            scales = where(micro > 1, later.scales, single.scales)
            beside = _all_gather(job, ("scales of the parameters", when, phase), scales, single.calls, micro, _SCALE)
            yield from within_group(job.recipe, beside._replace(volume_elements=0), micro, forward=forward)


def _all_gather(
    job: Job, words: tuple[str, str, Phase], elements: Int, calls: int, times: Int, width: int
) -> Collective:  # fmt: skip
    n, payload = job.n_ranks, width * elements * times
    each = width * ceil_div(elements, max(calls, 1))
    sent = (n - 1) * width * elements // n * times
    what, when, phase = words
    return Collective(
        "all_gather", what, when, n, calls * times, each, sent, elements * times, COORDINATOR, payload, phase=phase
    )

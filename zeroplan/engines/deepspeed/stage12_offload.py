"""What does ZeRO-Offload change at stages 1 and 2 of DeepSpeed, on the GPU and in host memory?

The weights stay on the GPU, and so does the reduce bucket. A gradient that is reduced goes to the host at once: its norm is
taken in fp64 on the way, and it is cast to fp32. Over several micro-batches it is summed up by way of the GPU, in a buffer of the
size of the largest parameter.
"""

from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.buckets import Schedule, flush_over
from zeroplan.engines.deepspeed.flat import Row, largest_parameter, pick
from zeroplan.engines.deepspeed.offload import members, offloads_optimizer
from zeroplan.engines.deepspeed.passes import Passes, kept_before, kept_bytes
from zeroplan.engines.deepspeed.running import running_bytes, running_lines
from zeroplan.engines.deepspeed.sources import FP64, SHARE, STAGE12
from zeroplan.engines.deepspeed.stage12_lines import (
    Job,
    bucket_lines,
    earlier_gradients,
    gradient_line,
    keeps_partition,
    own_gradients,
    reduces_in_backward,
    tied_head,
)
from zeroplan.engines.formulas import product, times, unless_zero
from zeroplan.engines.pinned import beyond, beyond_symbol, block_bytes, rounding
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, for_each_value, maximum, where

_BUFFER = f"{STAGE12}, temp_grad_buffer_for_gpu_offload"
_NORM = f"{STAGE12}, set_norm_for_param_grad_in_gpu"
_CLONED = f"{STAGE12}, reduce_independent_p_g_buckets_and_remove_grads"
_WAY_THERE = f"{STAGE12}, param_buffer_of_bit16_for_cpu_offload_groups"


def way_back(job: Job) -> tuple[Line, ...]:
    """Return the buffer on the GPU through which gradients summed on the host come back; it is there in any case."""
    if not offloads_optimizer(job.recipe):
        return ()
    reason = "buffer through which gradients summed on the host come back, as large as the largest parameter"
    return (Line(Kind.REDUCE, job.element * largest_parameter(job.whole), reason, times(job.element, "G_big"), _BUFFER),)


def host_lines(job: Job, states: tuple[Line, ...], temporary: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return what is in host memory from the second step on, with what the step takes there. [bytes]

    ``states`` are the weights of the share and the optimizer's states; ``temporary`` what a step of torch's own optimizer takes.
    """
    if not offloads_optimizer(job.recipe):
        return ()
    element, share = job.element, job.partition
    buffer = "weights of this rank's share on their way to the GPU"
    return (
        *states,
        Line(Kind.GRADIENTS, job.master * share, "gradients of this rank's share, as the optimizer takes them",
             times(job.master, SHARE), f"{STAGE12}, initialize_optimizer_states"),
        Line(Kind.PARAMETERS, element * share, buffer, times(element, SHARE), _WAY_THERE),
        Line(Kind.GRADIENTS, element * largest_parameter(job.whole), "buffer for one gradient, as large as the largest parameter",
             times(element, "G_big"), f"{STAGE12}, temp_grad_buffer_for_cpu_offload"),
        *_sums(job),
        *temporary,
        *((beyond(_beyond(job)),) if job.recipe.deepspeed.offload_optimizer_pin_memory else ()),
    )  # fmt: skip


def _sums(job: Job) -> tuple[Line, ...]:
    """Gradients summed over micro-batches at stage 2; at stage 1 they are summed on the GPU."""
    if keeps_partition(job) or job.recipe.zero_stage == 1:
        return ()
    n_bytes = where(job.accumulates, job.element * job.touched, 0)
    reason = "gradients summed over micro-batches, of every parameter that reaches into this rank's share, each whole"
    return (Line(Kind.GRADIENTS, n_bytes, reason, f"{job.element}·M·G_p", f"{STAGE12}, accumulated_grads_in_cpu"),)


def _beyond(job: Job) -> Int:
    """Bytes that pinned memory takes beyond its tensors: each is there from its first use on."""
    share, one = job.partition, job.element * largest_parameter(job.whole)
    total = 2 * rounding(job.master * share) + rounding(job.element * share) + rounding(one)
    if keeps_partition(job) or job.recipe.zero_stage == 1:
        return total
    summed = for_each_value(lambda partition: _rounded_sums(job.whole, job.element, partition), share)
    return total + where(job.accumulates, summed, 0)


@lru_cache(maxsize=256)
def _rounded_sums(whole: Row, element: int, partition: int) -> int:
    sizes = [element * (each.end - each.start) for each in whole.placed if each.start < partition]
    return sum(block_bytes(size) - size for size in sizes)


def host_symbols(job: Job) -> tuple[Symbol, ...]:
    """Return what the formulas of this module count."""
    if not offloads_optimizer(job.recipe):
        return ()
    return (
        Symbol("G_big", largest_parameter(job.whole), "elements of the largest parameter"),
        beyond_symbol(_beyond(job)),
    )


# On the GPU, during the backward


@lru_cache(maxsize=256)
def _slices(buckets: Schedule, partition: int) -> tuple[int, ...]:
    """Of each bucket, the elements of the largest piece of one parameter within the first ``partition`` elements."""
    return tuple(max(0, *(min(each.end, partition) - each.start for each in inside)) for inside in members(buckets))


def _own_slice(job: Job, index: int) -> Int:
    """Elements of the largest piece of one parameter of this rank in a bucket. [elements]"""
    return for_each_value(lambda partition: _slices(job.buckets, partition)[index], job.partition)


def _norm(elements: Int) -> Line:
    reason = "gradient of this rank in fp64, for its norm, on the way to the host"
    return Line(Kind.REDUCE, FP64 * elements, reason, product(FP64, elements), _NORM)


def offloading_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Return the moments that only offload has: gradients on the way to the host, and copies of those too large for a bucket."""
    if not offloads_optimizer(job.recipe):
        return ()
    if not reduces_in_backward(job.recipe):
        return tuple(_after_the_backward(job, these))
    return (*_on_the_way(job, these), *_copied(job, these))


def _around(job: Job, these: Passes) -> tuple[Line, ...]:
    return (*these.head.shared, *these.output, earlier_gradients(job), *bucket_lines(job))


def _fp32_sums(job: Job, block: Int) -> tuple[Line, ...]:
    """Return the fp32 gradients of the share once a bucket has reached into it, at ``block`` of the backward."""
    if not keeps_partition(job):
        return ()
    first = pick(job.buckets.blocks, flush_over(job.buckets, job.partition))
    n_bytes = where(job.accumulates, 0, where(first >= block, 4 * job.partition, 0))  # earlier micro-batches' are counted
    return (own_gradients(job)._replace(n_bytes=n_bytes, formula=unless_zero(n_bytes, "8·ceil(Ψ/(2·N))")),)


def _on_the_way(job: Job, these: Passes) -> Iterator[Moment]:
    """The bucket at whose reduction most is alive with a gradient on the way, and the last bucket, at the end."""
    yield Moment("end of backward: own gradients to the host", Phase.BACKWARD,
                 (*_around(job, these), *_fp32_sums(job, -1), _outside(job, 0), _norm(_own_slice(job, 0))))  # fmt: skip
    if len(job.buckets.flushes) == 1:
        return
    index, own = _highest(job, these)
    block = pick(job.buckets.blocks, index)
    lines = (
        *_around(job, these),
        *_fp32_sums(job, -1),
        kept_before(these, maximum(block, 0)),
        *running_lines(these, block, pick(job.buckets.made, index)),
        _outside(job, index),
        gradient_line(job, pick(job.buckets.arriving, index), "gradient that does not fit into the bucket"),
        *tied_head(job),
        _norm(own),
    )
    yield Moment("own gradients to the host during the backward", Phase.BACKWARD, lines)


def _outside(job: Job, index: Int) -> Line:
    return gradient_line(job, pick(job.buckets.held, index), "gradient that is reduced where it is")


def _highest(job: Job, these: Passes) -> tuple[Int, Int]:
    """The bucket at whose reduction most is alive with a gradient on the way, and the elements of that gradient."""
    most: Int = -1
    highest: Int = len(job.buckets.flushes) - 1
    largest: Int = 0
    for index in range(len(job.buckets.flushes) - 1, 0, -1):
        flush, own = job.buckets.flushes[index], _own_slice(job, index)
        beside = job.element * (flush.arriving + (flush.fill if flush.alone else 0)) + FP64 * own
        alive = where(
            own > 0, beside + kept_bytes(these, max(flush.block, 0)) + running_bytes(these, flush.block, flush.made), 0
        )
        highest, largest = where(alive > most, index, highest), where(alive > most, own, largest)
        most = maximum(most, alive)
    return highest, largest


def _copied(job: Job, these: Passes) -> Iterator[Moment]:
    """A gradient too large for the bucket is copied when it arrives, so that it has memory of its own."""
    size, around = job.buckets.size, (*_around(job, these), *tied_head(job))
    model = job.whole.model
    embedding = model.vocab_size * model.hidden_size
    if embedding > size and not model.tie_word_embeddings:
        running = running_lines(these, these.n_blocks, embedding)
        lines = (*around, kept_before(these, these.n_blocks), *running, _twice(job, embedding))
        yield Moment("gradient of the head copied", Phase.BACKWARD, lines)
    for run in these.runs:
        block = run.first + run.n_blocks - 1
        for made, elements in _oversized(job.buckets, block):
            sums, running = _fp32_sums(job, block), running_lines(these, block, made)
            lines = (*around, *sums, kept_before(these, block), *running, _twice(job, elements))
            yield Moment("gradient too large for the bucket copied", Phase.BACKWARD, lines)
    if embedding > size:
        yield Moment(
            "gradient of the embedding copied",
            Phase.BACKWARD,
            (*_around(job, these), *_fp32_sums(job, -1), _twice(job, embedding)),
        )


@lru_cache(maxsize=256)
def _oversized(buckets: Schedule, block: int) -> tuple[tuple[int, int], ...]:
    """Of a block, its gradients that are too large for the bucket: the elements made with each, and its own."""
    found: list[tuple[int, int]] = []
    made = 0
    for each in reversed(buckets.whole.executed):
        if each.block == block:
            made += each.end - each.start
            if each.end - each.start > buckets.size:
                found.append((made, each.end - each.start))
    return tuple(found)


def _twice(job: Job, elements: int) -> Line:
    """Return a gradient and its copy; at stage 1 a sum over micro-batches is among the earlier gradients already."""
    count = where(job.accumulates, 1, 2) if job.recipe.zero_stage == 1 else 2
    return gradient_line(job, count * elements, "gradient too large for the bucket, and its copy")._replace(source=_CLONED)


def _after_the_backward(job: Job, these: Passes) -> Iterator[Moment]:
    """At stage 1 all gradients are there first, and go from the front of the model to its end."""
    around = (*these.head.at_embedding, *these.output, *bucket_lines(job))
    first = min(
        (each for each in job.whole.placed if each.end - each.start > job.buckets.size),
        default=None,
        key=lambda each: each.start,
    )
    if first is not None:
        rest = gradient_line(job, job.whole.n_elements - first.start, "gradients not yet in a bucket")
        copy = gradient_line(job, first.end - first.start, "copy of the first gradient that is too large for the bucket")
        yield Moment("end of backward: gradient copied", Phase.BACKWARD, (*around, rest, copy._replace(source=_CLONED)))
    for start, filled, largest in _from_the_front(job):
        rest = gradient_line(job, job.whole.n_elements - start - filled, "gradients not yet in a bucket")
        yield Moment("end of backward: own gradients to the host", Phase.BACKWARD, (*around, rest, _norm(largest)))


def _from_the_front(job: Job) -> Iterator[tuple[int, int, Int]]:
    """The first bucket that is filled from the front: where it begins, what it takes, and this rank's largest piece in it."""
    filled, records = 0, list[tuple[int, int]]()
    for each in job.whole.placed:
        numel = each.end - each.start
        if filled and filled + numel > job.buckets.size:
            break
        filled += numel
        records.append((each.start, each.end))
    oversized = filled > job.buckets.size
    own = for_each_value(lambda partition: max(min(end, partition) - start for start, end in records), job.partition)
    yield 0, 0 if oversized else filled, own

"""When can memory peak in a backward pass under DeepSpeed's ZeRO-2, which reduces gradients as it goes?

A reduce bucket of constant size is allocated when the first gradient is made and released at the end of the backward. A
gradient is copied into it and freed. A full bucket is all-reduced in a copy of its own, unless all of it belongs to one
rank; what reaches into this rank's share is then copied into a buffer that lives until the step. ZeRO-1 does the same where
communication overlaps.
"""

from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.deepspeed.buckets import Schedule, flush_over, waiting_elements
from zeroplan.engines.deepspeed.flat import embedding_elements, has_tied_head, pick
from zeroplan.engines.deepspeed.passes import Passes, RunPass, around_block, head_instants, kept_before, kept_bytes, shared_at
from zeroplan.engines.deepspeed.running import GradientCounts, gradient_counts, place_in_block, running_bytes, running_lines
from zeroplan.engines.deepspeed.sources import STAGE12
from zeroplan.engines.deepspeed.stage12_lines import (
    Job,
    at_the_embedding,
    block_moments,
    bucket_lines,
    copy_line,
    earlier_gradients,
    embedding_gradient,
    gradient_line,
    keeps_partition,
    kept_buckets,
    oversize_copy,
    own_gradients,
    starts_with,
    tied_head,
    waiting,
)
from zeroplan.engines.formulas import unless_zero
from zeroplan.ledger import Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import Int, maximum, minimum, where
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.losses import HEAD_INPUT

_ADD = f"{STAGE12}, _add_to_grad_partition_buffer"


def reducing_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Return every moment of a backward pass that reduces buckets as they fill."""
    buckets = (earlier_gradients(job), *bucket_lines(job))
    always = (*buckets, *tied_head(job))
    return (
        *_head_moments(job, these),
        *(moment for run in these.runs for moment in _last_block_moments(job, these, run, (*always, *_unreduced(job, run)))),
        *_own_block_moments(job, these, always),
        *_first_block_moments(job, these, always),
        *_flush_moments(job, these, buckets),
        *_end_moments(job, these, buckets),
    )


def _head_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Loss, head and final norm: the head's gradient is the first that needs a bucket."""
    earlier, moments = (earlier_gradients(job),), []
    for at in head_instants(these):
        made = (gradient_line(job, at.point.current_gradient, "gradient just made"),) if at.point.gradients else ()
        first = at.point.gradients == at.point.current_gradient
        around = (*earlier, *kept_buckets(job)) if first else (*earlier, *bucket_lines(job), *tied_head(job))
        moments.append(Moment(at.name, at.phase, at.lines + around + made))
        if first and made:
            left = tuple(line for line in at.lines if line.kind is not Kind.LOGITS and line.reason != HEAD_INPUT)
            moments.append(Moment("backward: reduce bucket allocated", at.phase, left + earlier + bucket_lines(job) + made))
    return tuple(moments)


@lru_cache(maxsize=4096)
def _oversize_elements(buckets: Schedule, block: int, gradients: int) -> int:
    """Elements of all gradients made so far that are too large for the bucket, without the block's latest two."""
    total, made = 0, 0
    for each in reversed(buckets.whole.executed):
        numel = each.end - each.start
        made += numel if each.block == block else 0
        if each.block < block or (each.block == block and made > gradients):
            break
        total += numel if numel > buckets.size else 0
    return total - sum(waiting_elements(buckets, block, gradients))


def _staying(job: Job, block: int, gradients: int) -> tuple[Line, ...]:
    """At stage 1 nothing clears a gradient that is reduced where it is, outside the bucket, before the step."""
    if job.recipe.zero_stage == 2:
        return ()
    elements = where(job.accumulates, 0, _oversize_elements(job.buckets, block, gradients))
    return (gradient_line(job, elements, "gradients too large for the bucket, kept to the end"),)


def _waiting(job: Job, block: int, point: BackwardPoint) -> Line:
    return waiting(job.buckets, job.element, block, point.gradients, point.current_gradient)


def _unreduced(job: Job, run: RunPass) -> tuple[Line, ...]:
    """Without a contiguous bucket, gradients wait as they are: up to a bucket of them, one block's and the head's at least."""
    if job.recipe.deepspeed.contiguous_gradients:
        return ()
    last = run.first + run.n_blocks
    made = sum(each.end - each.start for each in job.whole.placed if each.block >= last - 1)
    return (gradient_line(job, min(made, job.recipe.deepspeed.reduce_bucket_size), "gradients waiting to be reduced"),)


def _last_block_moments(job: Job, these: Passes, run: RunPass, always: tuple[Line, ...]) -> Iterator[Moment]:
    """Each point of the last block, and of the one before it where only that finds the bucket at its first points."""
    last = run.first + run.n_blocks - 1
    begins = starts_with(job, last)
    none_yet = (earlier_gradients(job), *kept_buckets(job)) if begins else always
    yield from _points_of(job, these, (run, last, "backward of the last block"), none_yet, always)
    if begins and run.n_blocks > 1:
        yield from _points_of(job, these, (run, last - 1, "backward of the block before the last"), always, always)


def _points_of(
    job: Job, these: Passes, place: tuple[RunPass, int, str], before: tuple[Line, ...], after: tuple[Line, ...]
) -> Iterator[Moment]:
    """Each point of a block, with what is there ``before`` its first gradient and ``after``."""
    run, block, name = place

    def around(point: BackwardPoint) -> tuple[Line, ...]:
        buckets = after if point.gradients else before
        return (*buckets, *_staying(job, block, point.gradients), _waiting(job, block, point))

    return block_moments(these, run, block, name, around)


def _own_block_moments(job: Job, these: Passes, always: tuple[Line, ...]) -> Iterator[Moment]:
    """Return each point as it is passed first after a bucket reached into this rank's share, when its gradients are kept."""
    index = flush_over(job.buckets, job.partition)
    at, made, own = pick(job.buckets.blocks, index), pick(job.buckets.made, index), own_gradients(job)
    for run in these.runs:
        for point in run.block.points:
            arrived = point.gradients - (1 if point.current_gradient else 0)  # the gradient being made is yet to come
            block = where(arrived >= made, at, at - 1)
            kept = _resized(own, where(block >= run.first, _not_already(job, own.n_bytes), 0))
            inside = minimum(maximum(block, run.first), run.first + run.n_blocks - 1)
            lines = (*around_block(these, run, inside), *point.lines, *always, kept, _waiting(job, run.first, point))
            yield Moment(f"backward of a block of this rank: {point.name}", Phase.BACKWARD, lines)


def _first_block_moments(job: Job, these: Passes, always: tuple[Line, ...]) -> Iterator[Moment]:
    """Return the points of the first block at stage 1, where gradients above the bucket pile up until then."""
    if job.recipe.zero_stage == 2:
        return
    around = (*always, own_gradients(job))
    yield from block_moments(
        these, these.runs[0], 0, "backward of the first block",
        lambda point: (*around, *_staying(job, 0, point.gradients), _waiting(job, 0, point)),
    )  # fmt: skip


def _kept_after(job: Job, now: Int) -> Line:
    """Return this rank's gradients at bucket ``now``, if the first bucket that it has part in came before."""
    own = own_gradients(job)
    reached = flush_over(job.buckets, job.partition) > now
    return _resized(own, where(reached, _not_already(job, own.n_bytes), 0))


def _resized(own: Line, n_bytes: Int) -> Line:
    """Return this rank's gradients where they are there, or nothing."""
    return own._replace(n_bytes=n_bytes, formula=unless_zero(n_bytes, own.formula))


def _not_already(job: Job, n_bytes: Int) -> Int:
    """Return 0 while accumulating where all micro-batches are added into one tensor, which is there already. [bytes]"""
    return where(job.accumulates, 0, n_bytes) if keeps_partition(job) else n_bytes


def _reduced_copy(job: Job, index: Int) -> Int:
    """Elements copied to all-reduce a bucket: none where all of it belongs to one rank. [elements]"""
    low, high, fill = (pick(values, index) for values in (job.buckets.lows, job.buckets.highs, job.buckets.fills))
    options = job.recipe.deepspeed
    if not options.contiguous_gradients:
        return fill
    if not options.reduce_scatter:
        return 0
    split = low // job.partition != (high - 1) // job.partition
    copied = where(pick(job.buckets.held, index) > 0, oversize_copy(job, low, fill), where(split, fill, 0))
    if keeps_partition(job):
        return where(low < job.partition, fill, copied)
    return copied


def _flush_moments(job: Job, these: Passes, buckets: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Return the highest moment at which a bucket is reduced because a gradient does not fit into it any more.

    That is not the first: how far a block's backward has come makes a difference, and whether one rank owns all of a bucket.
    """
    if len(job.buckets.flushes) == 1:
        return ()
    index, own = _highest_flush(job, these), flush_over(job.buckets, job.partition)
    return (
        _flush_moment(job, these, buckets, index, "bucket reduced during the backward"),
        _flush_moment(job, these, buckets, own, "own gradients kept during the backward", kept=True),
    )


def _highest_flush(job: Job, these: Passes) -> Int:
    """Index of the bucket at whose reduction most is alive; the earliest of equals. The last bucket is reduced at the end."""
    most: Int = -1
    highest: Int = 0
    alone = isinstance(job.partition, int) and isinstance(job.accumulates, bool)
    for index in _candidates(job, gradient_counts(these)) if alone else range(len(job.buckets.flushes) - 1, 0, -1):
        flush = job.buckets.flushes[index]
        activations: Int = kept_bytes(these, max(flush.block, 0)) + running_bytes(these, flush.block, flush.made)
        alive = activations + _weight(job, index)
        highest = where(alive > most, index, highest)
        most = maximum(most, alive)
    return highest


@lru_cache(maxsize=256)
def _candidates(job: Job, counts: GradientCounts) -> tuple[int, ...]:
    """Buckets at which most may be alive, whatever the batch: heavier than all earlier ones at the same place of a block.

    Earlier ones find as much running there, and more kept by the blocks before.
    """
    heaviest: dict[tuple[int, ...], Int] = {}
    chosen: list[int] = []
    for index in range(len(job.buckets.flushes) - 1, 0, -1):
        flush, weight = job.buckets.flushes[index], _weight(job, index)
        place = place_in_block(counts, flush.block, flush.made)
        if weight > heaviest.get(place, -1):
            heaviest[place] = weight
            chosen.append(index)
    return tuple(chosen)


def _weight(job: Job, index: int) -> Int:
    """Gradients and copies that are alive while a bucket is reduced, but not at each of them. [bytes]"""
    tied = _waiting_elements(job) if job.buckets.flushes[index].block >= 0 else 0
    elements: Int = job.buckets.flushes[index].arriving + tied + _outside_bucket(job, index) + _reduced_copy(job, index)
    return job.element * elements + total_bytes(_own_at(job, index))


def _flush_moment(job: Job, these: Passes, buckets: tuple[Line, ...], index: Int, name: str, *, kept: bool = False) -> Moment:
    """Return the moment at which a bucket is reduced because a gradient does not fit into it any more.

    Or the one right after, with the copy gone, where the bucket is the first to reach into this rank's share, which is ``kept``.
    """
    block = pick(job.buckets.blocks, index)
    arriving = pick(job.buckets.arriving, index) + _outside_bucket(job, index)
    lines = (
        *shared_at(these, block),
        *these.output,
        kept_before(these, maximum(block, 0)),
        *running_lines(these, block, pick(job.buckets.made, index)),
        gradient_line(job, arriving, "gradient that does not fit into the bucket"),
        *(() if kept else (copy_line(job, _reduced_copy(job, index)),)),
        *buckets,
        *_tied_until(job, block),
        *(_own_at(job, index) if not kept else (_resized(own_gradients(job), _not_already(job, own_gradients(job).n_bytes)),)),
    )
    return Moment(name, Phase.BACKWARD, lines)


def _waiting_elements(job: Job) -> int:
    return embedding_elements(job.whole) if has_tied_head(job.whole) else 0


def _tied_until(job: Job, block: Int) -> tuple[Line, ...]:
    """Return a tied head's gradient, which the embedding's takes in when that arrives."""
    return tuple(_resized(line, where(block >= 0, line.n_bytes, 0)) for line in tied_head(job))


def _outside_bucket(job: Job, index: Int) -> Int:
    """Elements of gradients that are reduced where they are, beside the bucket. [elements]"""
    return pick(job.buckets.held if job.recipe.deepspeed.contiguous_gradients else job.buckets.fills, index)


def _own_at(job: Job, index: Int) -> tuple[Line, ...]:
    """Return this rank's gradients while a bucket is reduced."""
    if keeps_partition(job):
        return _partition_at(job, pick(job.buckets.lows, index))
    return (_kept_after(job, index),)


def _waits_for_embedding(job: Job, these: Passes) -> int:
    """Index of the last bucket that is to be reduced when the embedding's gradient is made, which may be what sends it off."""
    sent = job.buckets.flushes[1] if len(job.buckets.flushes) > 1 else None
    return int(sent is not None and sent.block < 0 and sent.made == these.below)


def _partition_at(job: Job, low: Int) -> tuple[Line, ...]:
    """Return the fp32 gradients of the share, with the cast that adds to them, once a bucket reaches into it."""
    reached = low < job.partition
    cast = where(reached, 4 * job.largest, 0)
    return (
        _resized(own_gradients(job), where(reached, _not_already(job, 4 * job.partition), 0)),
        Line(Kind.TEMPORARY, cast, "reduced gradient cast to fp32", unless_zero(cast, "4·G_max"), _ADD),
    )


def _end_moments(job: Job, these: Passes, buckets: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Return the moments of the embedding's gradient, and of the bucket that is left."""
    last = job.buckets.flushes[0]
    own, before = own_gradients(job), _kept_after(job, 0)
    held = last.fill if last.alone or not job.recipe.deepspeed.contiguous_gradients else 0
    outside = (gradient_line(job, held, "gradients outside the bucket"), *_staying(job, -1, 0))
    around = (*these.head.at_embedding, *these.output, *buckets, *outside)
    copied = copy_line(job, _reduced_copy(job, 0))
    return (
        *at_the_embedding(job, these, (*buckets, _kept_after(job, _waits_for_embedding(job, these)), embedding_gradient(job))),
        Moment("end of backward: last bucket reduced", Phase.BACKWARD, (*around, before, copied)),
        Moment("end of backward: own gradients kept", Phase.BACKWARD,
               (*around, _resized(own, _not_already(job, own.n_bytes)))),
    )  # fmt: skip

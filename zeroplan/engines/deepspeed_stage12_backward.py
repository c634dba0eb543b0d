"""When can memory peak in the backward pass under DeepSpeed's ZeRO-1 and ZeRO-2?

A reduce bucket of constant size is allocated when the first gradient is made and released at the end of the backward. A
gradient is copied into it and freed. A full bucket is all-reduced in a copy of its own, unless all of it belongs to one
rank; what reaches into this rank's share is then copied into a buffer that lives until the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.deepspeed_buckets import Schedule, first_bucket_elements, flush_over, schedule, waiting_elements
from zeroplan.engines.deepspeed_flat import Row, largest_slice, partition_elements, pick, row, touched_elements
from zeroplan.engines.deepspeed_passes import (
    Passes,
    RunPass,
    after_head_bytes,
    backward_instant,
    element_bytes,
    embedding_instant,
    head_instants,
    kept_before,
)
from zeroplan.ledger import Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import Bool, Int, maximum, minimum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import BackwardPoint

_FILE = "DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py"


class Job(NamedTuple):
    """What every formula of stages 1 and 2 is made of."""

    whole: Row
    recipe: RecipeSpec
    n_ranks: Int
    accumulates: Bool
    """There is more than one micro-batch per step."""
    element: int
    """Bytes of a weight and of a gradient."""
    master: int
    """Bytes of an element of the weights that the optimizer updates."""
    partition: Int
    """Elements of one rank's share."""
    touched: Int
    """Elements of all parameters that reach into rank 0's share."""
    buckets: Schedule


def job_of(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Job:
    """Collect what the formulas need."""
    element = element_bytes(recipe)
    whole = row(model)
    partition = partition_elements(whole, mesh.dp_shard)
    return Job(
        whole,
        recipe,
        mesh.dp_shard,
        batch.grad_accum_steps > 1,
        element,
        2 if recipe.precision == "bf16" else 4,
        partition,
        touched_elements(whole, partition),
        schedule(whole, recipe.deepspeed.reduce_bucket_size),
    )


def keeps_partition(job: Job) -> bool:
    """Whether reduced gradients are added up in an fp32 tensor of exactly the share (``grad_accum_dtype`` fp32)."""
    return job.recipe.deepspeed.grad_accum_dtype == "fp32" and job.element == 2


def reduces_in_backward(recipe: RecipeSpec) -> bool:
    """Whether buckets are reduced as they fill: at stage 2, and at stage 1 where communication overlaps."""
    return recipe.zero_stage == 2 or bool(recipe.deepspeed.overlap_comm)


def has_buckets(job: Job) -> bool:
    """Whether there is a reduce bucket: not at stage 0, nor where all gradients are added up in fp32 at stage 1."""
    return job.recipe.zero_stage == 2 or (job.recipe.zero_stage == 1 and not keeps_partition(job))


def own_gradients(job: Job) -> Line:
    """Return the reduced gradients that this rank keeps for the step."""
    if keeps_partition(job):
        return Line(Kind.GRADIENTS, 4 * job.partition, "fp32 gradients of this rank's share", "8·ceil(Ψ/(2·N))", _FILE)
    reason = "gradients of every parameter that reaches into this rank's share, each whole"
    return Line(Kind.GRADIENTS, job.element * job.touched, reason, "", f"{_FILE}, copy_grads_in_partition")


def window(job: Job) -> tuple[Line, ...]:
    """Return what earlier micro-batches of the step left behind, during the forward."""
    return (_earlier_gradients(job), *_kept_buckets(job))


def backward_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Every moment of the backward pass where memory can peak."""
    return (
        _reducing(job, these)
        if reduces_in_backward(job.recipe)
        else (*collecting_moments(job, these), *_reduced_after(job, these))
    )


def _earlier_gradients(job: Job) -> Line:
    """Gradients of the micro-batches before: this rank's own at stage 2, all of them at stage 1."""
    held = own_gradients(job).n_bytes if job.recipe.zero_stage == 2 else job.element * job.whole.n_elements
    return Line(Kind.GRADIENTS, where(job.accumulates, held, 0), "gradients of the micro-batches before", "", _FILE)


def _buckets(job: Job) -> tuple[Line, ...]:
    options = job.recipe.deepspeed
    if not options.contiguous_gradients or not has_buckets(job):
        return ()
    count = 2 if options.overlap_comm else 1
    n_bytes = count * job.element * options.reduce_bucket_size
    reason = "two reduce buckets, reduce_bucket_size each" if options.overlap_comm else "reduce bucket, reduce_bucket_size"
    return (Line(Kind.REDUCE, n_bytes, reason, "", f"{_FILE}, setup_buckets"),)


def _kept_buckets(job: Job) -> tuple[Line, ...]:
    """Return the bucket before the first gradient of a micro-batch: at stage 1 it stays until the last one is reduced."""
    if job.recipe.zero_stage == 2:
        return ()
    bucket = where(job.accumulates, total_bytes(_buckets(job)), 0)
    return (Line(Kind.REDUCE, bucket, "reduce bucket, kept between micro-batches", "", _FILE),)


def _gradient(job: Job, elements: Int, reason: str) -> Line:
    return Line(Kind.UNSHARDED_GRADIENTS, job.element * elements, reason, "", _FILE)


def _copy(job: Job, elements: Int) -> Line:
    return Line(Kind.REDUCE, job.element * elements, "copy of the bucket that is all-reduced", "", f"{_FILE}, allreduce_bucket")


def _tied_head(job: Job) -> tuple[Line, ...]:
    """With a tied head, its gradient waits for the embedding's before either reaches the bucket."""
    if not job.whole.model.tie_word_embeddings:
        return ()
    elements = job.whole.model.vocab_size * job.whole.model.hidden_size
    return (_gradient(job, elements, "gradient of the tied head, waiting for the embedding's"),)


def _block_moments(
    these: Passes, run: RunPass, block: Int, name: str, extra: Callable[[BackwardPoint], tuple[Line, ...]]
) -> Iterator[Moment]:
    for point in run.block.points:
        at = backward_instant(these, run, block, point, f"{name}: {point.name}")
        yield Moment(at.name, at.phase, at.lines + extra(point))


# Reduced as the backward goes.


def _reducing(job: Job, these: Passes) -> tuple[Moment, ...]:
    always = (_earlier_gradients(job), *_buckets(job), *_tied_head(job))
    top, own = flush_over(job.buckets, (job.n_ranks - 1) * job.partition), flush_over(job.buckets, job.partition)
    last = min(1, len(job.buckets.flushes) - 1)
    if not job.recipe.deepspeed.contiguous_gradients:
        top = len(job.buckets.flushes) - 1
    return (
        *_head_moments(job, these),
        *(moment for run in these.runs for moment in _last_block_moments(job, these, run, (*always, *_unreduced(job, run)))),
        *_own_block_moments(job, these, always),
        _flush_moment(job, these, always, top, "bucket reduced: the first that spans two ranks"),
        _flush_moment(job, these, always, own, "bucket reduced: the first that reaches into this rank's share"),
        _flush_moment(job, these, (*always, _kept_after(job, own)), maximum(own - 1, 0), "bucket reduced: the next"),
        _flush_moment(
            job, these, (*always, _kept_after(job, own, 1)), last, "bucket reduced: the embedding's gradient arrives"
        ),
        *_end_moments(job, these, always),
    )


def _head_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Loss, head and final norm: the head's gradient is the first that needs a bucket."""
    earlier, moments = (_earlier_gradients(job),), []
    for at in head_instants(these):
        made = (_gradient(job, at.point.current_gradient, "gradient just made"),) if at.point.gradients else ()
        first = at.point.gradients == at.point.current_gradient
        around = (*earlier, *_kept_buckets(job)) if first else (*earlier, *_buckets(job), *_tied_head(job))
        moments.append(Moment(at.name, at.phase, at.lines + around + made))
        if first and made:
            left = tuple(line for line in at.lines if line.kind is not Kind.LOGITS)
            moments.append(Moment("backward: reduce bucket allocated", at.phase, left + earlier + _buckets(job) + made))
    return tuple(moments)


@lru_cache(maxsize=4096)
def waiting(buckets: Schedule, element: int, block: int, gradients: int, current: int) -> Line:
    """Return the gradient being made, and one that is too large for the bucket and waits for the next to arrive. [bytes]"""
    latest, before = waiting_elements(buckets, block, gradients)
    elements = current + before if current else latest
    reason = "gradient just made, and one that waits outside the bucket"
    return Line(Kind.UNSHARDED_GRADIENTS, element * elements, reason, "", _FILE)


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
    return (_gradient(job, elements, "gradients too large for the bucket, kept to the end"),)


def _waiting(job: Job, block: int, point: BackwardPoint) -> Line:
    return waiting(job.buckets, job.element, block, point.gradients, point.current_gradient)


def _unreduced(job: Job, run: RunPass) -> tuple[Line, ...]:
    """Without a contiguous bucket, gradients wait as they are: up to a bucket of them, one block's and the head's at least."""
    if job.recipe.deepspeed.contiguous_gradients:
        return ()
    last = run.first + run.n_blocks
    made = sum(each.end - each.start for each in job.whole.placed if each.block >= last - 1)
    return (_gradient(job, min(made, job.recipe.deepspeed.reduce_bucket_size), "gradients waiting to be reduced"),)


def _last_block_moments(job: Job, these: Passes, run: RunPass, always: tuple[Line, ...]) -> Iterator[Moment]:
    block = run.first + run.n_blocks - 1
    yield from _block_moments(
        these,
        run,
        block,
        "backward of the last block",
        lambda point: (*always, *_staying(job, block, point.gradients), _waiting(job, block, point)),
    )


def _own_block_moments(job: Job, these: Passes, always: tuple[Line, ...]) -> Iterator[Moment]:
    """Return each point as it is passed first after a bucket reached into this rank's share, when its gradients are kept."""
    index = flush_over(job.buckets, job.partition)
    at, made, own = pick(job.buckets.blocks, index), pick(job.buckets.made, index), own_gradients(job)
    for run in these.runs:
        for point in run.block.points:
            block = where(point.gradients >= made, at, at - 1)
            kept = own._replace(n_bytes=where(block >= run.first, _not_already(job, own.n_bytes), 0), formula="")
            inside = minimum(maximum(block, run.first), run.first + run.n_blocks - 1)
            name = f"backward of a block of this rank: {point.name}"
            now = backward_instant(these, run, inside, point, name)
            yield Moment(name, now.phase, (*now.lines, *always, kept, _waiting(job, run.first, point)))


def _kept_after(job: Job, index: Int, now: int = 0) -> Line:
    """Return this rank's gradients at bucket ``now``, if bucket ``index``, the first that it has part in, came before."""
    own = own_gradients(job)
    return own._replace(n_bytes=where(index > now, _not_already(job, own.n_bytes), 0), formula="")


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
    copied = where(pick(job.buckets.held, index) > 0, _oversize_copy(job, low, fill), where(split, fill, 0))
    if keeps_partition(job):
        return where(low < job.partition, fill, copied)
    return copied


def _oversize_copy(job: Job, low: Int, fill: Int) -> Int:
    """Return the elements copied for a gradient above the bucket: slices of ranks, taken together up to a bucket. [elements]

    A slice that fills a bucket by itself is reduced where it is. Source: ``allreduce_and_scatter``.
    """
    share, size = job.partition, job.buckets.size
    first = minimum(fill, share - low % share)
    large = where(first > size, 0, where(first < fill, minimum(fill, first + share), 0))
    return where(share > size, large, where(first < fill, minimum(fill, size + share), 0))


def _flush_moment(job: Job, these: Passes, always: tuple[Line, ...], index: Int, name: str) -> Moment:
    """Return the moment at which a bucket is reduced because a gradient does not fit into it any more."""
    buckets = job.buckets
    block, held = pick(buckets.blocks, index), pick(buckets.held, index)
    if not job.recipe.deepspeed.contiguous_gradients:
        held = pick(buckets.fills, index)
    lines = (
        *these.head.shared,
        *these.output,
        kept_before(these, maximum(block, 0)),
        Line(Kind.ACTIVATIONS, _at_flush(these, block, pick(buckets.made, index)), "activations of the block that runs"),
        _gradient(job, pick(buckets.arriving, index) + held, "gradient that does not fit into the bucket"),
        _copy(job, _reduced_copy(job, index)),
        *always,
        *_partition_at(job, pick(buckets.lows, index)),
    )
    return Moment(name, Phase.BACKWARD, lines)


def _partition_at(job: Job, low: Int) -> tuple[Line, ...]:
    """Return the fp32 gradients of the share, with the cast that adds to them, once a bucket reaches into it."""
    if not keeps_partition(job):
        return ()
    reached = low < job.partition
    cast = where(reached, 4 * largest_slice(job.whole, job.partition), 0)
    return (
        own_gradients(job)._replace(n_bytes=where(reached, _not_already(job, 4 * job.partition), 0), formula=""),
        Line(Kind.TEMPORARY, cast, "reduced gradient cast to fp32", "", f"{_FILE}, _add_to_grad_partition_buffer"),
    )


def _at_flush(these: Passes, block: Int, made: Int) -> Int:
    """Activations of the block that runs when ``made`` elements of its gradients exist. [bytes]"""
    n_bytes = where(block < 0, these.head.hidden_bytes, where(block < these.n_blocks, 0, after_head_bytes(these)))
    for run in these.runs:
        inside = _at_point(run, made)
        here = (block >= run.first) & (block < run.first + run.n_blocks)
        n_bytes = n_bytes + where(here, inside, 0)
    return n_bytes


def _at_point(run: RunPass, made: Int) -> Int:
    """Return the activations at the first point of a block that comes after so many gradients. [bytes]"""
    n_bytes = run.settled[-1]
    for point, settled in zip(reversed(run.block.points[:-1]), reversed(run.settled[:-1]), strict=True):
        n_bytes = where(made <= point.gradients, settled, n_bytes)
    return n_bytes


def _end_moments(job: Job, these: Passes, always: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Return the moments of the embedding's gradient, and of the bucket that is left."""
    at, last = embedding_instant(these), job.buckets.flushes[0]
    own = own_gradients(job)
    before = _kept_after(job, flush_over(job.buckets, job.partition))
    held = last.fill if last.alone or not job.recipe.deepspeed.contiguous_gradients else 0
    outside = (_gradient(job, held, "gradients outside the bucket"), *_staying(job, -1, 0))
    around = (*these.head.shared, *these.output, *always, *outside)
    embedding = _gradient(job, job.whole.model.vocab_size * job.whole.model.hidden_size, "gradient of the embedding")
    return (
        Moment(at.name, at.phase, (*at.lines, *always, before, embedding)),
        Moment("end of backward: last bucket reduced", Phase.BACKWARD, (*around, before, _copy(job, _reduced_copy(job, 0)))),
        Moment("end of backward: own gradients kept", Phase.BACKWARD,
               (*around, own._replace(n_bytes=_not_already(job, own.n_bytes), formula=""))),
    )  # fmt: skip


# Collected first, reduced after the backward (stage 1).


def collecting_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Return the moments of a backward pass where every gradient stays until its end, the end itself left out."""
    return (
        *_collected_head(job, these),
        *(moment for run in these.runs for moment in _collected_block(job, these, run)),
    )


def _collected(job: Job, made: int, point: BackwardPoint) -> Line:
    """All gradients made so far; once accumulating, all of them and the one about to be added."""
    elements = where(job.accumulates, job.whole.n_elements + point.current_gradient, made)
    return _gradient(job, elements, "gradients made so far, or accumulated")


def _collected_head(job: Job, these: Passes) -> tuple[Moment, ...]:
    moments = []
    for at in head_instants(these):
        made = 0 if job.whole.model.tie_word_embeddings else at.point.gradients
        around = (_collected(job, made, at.point), *(_tied_head(job) if at.point.gradients else ()))
        first = at.point.gradients == at.point.current_gradient
        bucket = _kept_buckets(job) if first else _buckets(job)
        moments.append(Moment(at.name, at.phase, at.lines + around + bucket))
    return tuple(moments)


def _collected_block(job: Job, these: Passes, run: RunPass) -> Iterator[Moment]:
    block = run.first + run.n_blocks - 1
    whole = job.whole
    above = whole.n_elements - next(each.end for each in reversed(whole.placed) if each.block == block)
    around = (*_buckets(job), *_tied_head(job))
    yield from _block_moments(
        these, run, block, "backward of the last block",
        lambda point: (*around, _collected(job, above + point.gradients, point)),
    )  # fmt: skip


def _reduced_after(job: Job, these: Passes) -> tuple[Moment, ...]:
    """All gradients are there; the first bucket is filled from the front, reduced, and what this rank owns is kept."""
    psi, options = job.whole.n_elements, job.recipe.deepspeed
    first = first_bucket_elements(job.buckets)
    inside = options.contiguous_gradients and first <= options.reduce_bucket_size
    left = psi - first if inside else psi
    split = where(first > job.partition, first, 0) if inside else _oversize_copy(job, 0, first)
    split = split if options.contiguous_gradients else first
    around = (*these.head.shared, *these.output, *_buckets(job))
    at = embedding_instant(these)
    embedding = job.whole.model.vocab_size * job.whole.model.hidden_size
    all_made = _gradient(
        job, where(job.accumulates, psi + embedding, psi), "all gradients, and the embedding's before it is added"
    )
    rest = _gradient(job, left, "gradients not yet in a bucket")
    return (
        Moment(at.name, at.phase, (*at.lines, *_buckets(job), *_tied_head(job), all_made)),
        Moment("end of backward: first bucket reduced", Phase.BACKWARD,
               (*around, rest, _copy(job, split if options.reduce_scatter else 0))),
        Moment("end of backward: own gradients kept", Phase.BACKWARD, (*around, rest, own_gradients(job))),
    )  # fmt: skip

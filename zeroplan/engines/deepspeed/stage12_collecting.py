"""When can memory peak in a backward pass under DeepSpeed where all gradients are collected first (ZeRO-1, stage 0)?"""

from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.deepspeed.buckets import Front, from_the_front
from zeroplan.engines.deepspeed.flat import embedding_elements, embedding_symbol, has_tied_head
from zeroplan.engines.deepspeed.passes import (
    Passes,
    RunPass,
    around_block,
    head_instants,
)
from zeroplan.engines.deepspeed.stage12_lines import (
    Job,
    at_the_embedding,
    bucket_lines,
    copy_line,
    gradient_line,
    kept_buckets,
    oversize_copy,
    own_gradients,
    starts_with,
    tied_head,
)
from zeroplan.ledger import Line, Moment, Phase
from zeroplan.numeric import Int, where
from zeroplan.transformer.blocks import BackwardPoint


def collecting_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Return the moments of a backward pass where every gradient stays until its end, the end itself left out."""
    return (
        *_collected_head(job, these),
        *(moment for run in these.runs for moment in _collected_block(job, these, run)),
    )


def _collected(job: Job, made: int, point: BackwardPoint) -> Line:
    """All gradients made so far; once accumulating, all of them and the one about to be added."""
    elements = where(job.accumulates, job.whole.n_elements + point.current_gradient, made)
    return gradient_line(job, elements, "gradients made so far, or accumulated", _so_far(made, point.current_gradient))


@lru_cache(maxsize=4096)
def _so_far(made: int, current: int) -> str:
    return f"(M·(Ψ + {current}) + (1-M)·{made})"


def _collected_head(job: Job, these: Passes) -> tuple[Moment, ...]:
    moments, tied = [], has_tied_head(job.whole)
    for at in head_instants(these):
        made, point = (0, at.point._replace(current_gradient=0)) if tied else (at.point.gradients, at.point)
        around = (_collected(job, made, point), *(tied_head(job) if at.point.gradients else ()))
        first = at.point.gradients == at.point.current_gradient
        bucket = kept_buckets(job) if first else bucket_lines(job)
        moments.append(Moment(at.name, at.phase, at.lines + around + bucket))
    return tuple(moments)


def _collected_block(job: Job, these: Passes, run: RunPass) -> Iterator[Moment]:
    """Each point of the last block, where most is kept, and of the first, where most gradients are: one is the highest.

    And of the block before the last, where only that finds the bucket at its first points.
    """
    around = (*bucket_lines(job), *tied_head(job))
    ends = {each.block: each.end for each in job.whole.placed}
    last = run.first + run.n_blocks - 1
    before = ((last - 1, "backward of the block before the last"),) if starts_with(job, last) and run.n_blocks > 1 else ()
    for block, name in ((last, "backward of the last block"), *before, (run.first, "backward of the first block")):
        above = job.whole.n_elements - ends[block]
        beside = around_block(these, run, block)
        begins = starts_with(job, block)
        for point in run.block.points:
            buckets = kept_buckets(job) if begins and not point.gradients else around
            lines = (*beside, *point.lines, *buckets, _collected(job, above + point.gradients, point))
            yield Moment(f"{name}: {point.name}", Phase.BACKWARD, lines)


def reduced_after_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """All gradients are there; buckets are filled from the front and reduced, and what this rank owns is kept.

    The buffer of its own gradients comes with the first bucket, whose gradients go then; later ones find it there.
    """
    psi, around = job.whole.n_elements, (*these.head.at_embedding, *these.output, *bucket_lines(job))
    embedding = embedding_elements(job.whole)
    made = where(job.accumulates, psi + embedding, psi)
    formula = f"(Ψ + M·{embedding_symbol(job.whole)})" if embedding else "Ψ"
    all_made = gradient_line(job, made, "all gradients, and the embedding's before it is added", formula)
    first, later = from_the_front(job.buckets)[0], _highest_later(job)
    return (
        *at_the_embedding(job, these, (*bucket_lines(job), all_made)),
        Moment("end of backward: first bucket reduced", Phase.BACKWARD,
               (*around, _left(job, _waiting(job, first)), copy_line(job, _copied(job, first)))),
        Moment("end of backward: own gradients kept", Phase.BACKWARD,
               (*around, _left(job, _waiting(job, first)), own_gradients(job))),
        *(Moment("end of backward: later bucket reduced", Phase.BACKWARD,
                 (*around, _left(job, left), copy_line(job, copied), own_gradients(job))) for left, copied in later),
    )  # fmt: skip


def _left(job: Job, elements: Int) -> Line:
    return gradient_line(job, elements, "gradients not yet in a bucket")


def _waiting(job: Job, front: Front) -> int:
    """Elements of gradients that are where they were made: all from the bucket's on, but those that it holds itself."""
    inside = job.recipe.deepspeed.contiguous_gradients and not front.alone
    return job.whole.n_elements - (front.high if inside else front.low)


def _copied(job: Job, front: Front) -> Int:
    """Elements that are copied to reduce a bucket: none where all of it belongs to one rank. [elements]"""
    options = job.recipe.deepspeed
    if not options.reduce_scatter:
        return 0
    if not options.contiguous_gradients:
        return front.fill
    if front.alone:
        return oversize_copy(job, front.low, front.fill)
    return where(front.low // job.partition != (front.high - 1) // job.partition, front.fill, 0)


def _highest_later(job: Job) -> tuple[tuple[Int, Int], ...]:
    alone = isinstance(job.partition, int) and isinstance(job.accumulates, bool)
    return _of_one_job(job) if alone else _of_many(job)


@lru_cache(maxsize=256)
def _of_one_job(job: Job) -> tuple[tuple[Int, Int], ...]:
    return _of_many(job)


def _of_many(job: Job) -> tuple[tuple[Int, Int], ...]:
    """Return what waits and what is copied at the bucket after the first at which that is most; nothing where there is one."""
    left: Int = 0
    copied: Int = 0
    for front in from_the_front(job.buckets)[1:]:
        waiting, copy = _waiting(job, front), _copied(job, front)
        more = waiting + copy > left + copied
        left, copied = where(more, waiting, left), where(more, copy, copied)
    return ((left, copied),) if len(from_the_front(job.buckets)) > 1 else ()

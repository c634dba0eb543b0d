"""When can memory peak in a backward pass under DeepSpeed where all gradients are collected first (ZeRO-1, stage 0)?"""

from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.deepspeed.buckets import first_bucket_elements
from zeroplan.engines.deepspeed.flat import embedding_elements, has_tied_head
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
from zeroplan.numeric import where
from zeroplan.transformer.blocks import BackwardPoint

_FILE = "DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py"


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
    """Each point of the last block, where most is kept, and of the first, where most gradients are: one is the highest."""
    around = (*bucket_lines(job), *tied_head(job))
    ends = {each.block: each.end for each in job.whole.placed}
    for block, name in (
        (run.first + run.n_blocks - 1, "backward of the last block"),
        (run.first, "backward of the first block"),
    ):
        above = job.whole.n_elements - ends[block]
        beside = around_block(these, run, block)
        begins = starts_with(job, block)
        for point in run.block.points:
            buckets = kept_buckets(job) if begins and not point.gradients else around
            lines = (*beside, *point.lines, *buckets, _collected(job, above + point.gradients, point))
            yield Moment(f"{name}: {point.name}", Phase.BACKWARD, lines)


def reduced_after_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """All gradients are there; the first bucket is filled from the front, reduced, and what this rank owns is kept."""
    psi, options = job.whole.n_elements, job.recipe.deepspeed
    first = first_bucket_elements(job.buckets)
    inside = options.contiguous_gradients and first <= options.reduce_bucket_size
    left = psi - first if inside else psi
    split = where(first > job.partition, first, 0) if inside else oversize_copy(job, 0, first)
    split = split if options.contiguous_gradients else first
    around = (*these.head.shared, *these.output, *bucket_lines(job))
    embedding = embedding_elements(job.whole)
    made = where(job.accumulates, psi + embedding, psi)
    all_made = gradient_line(
        job, made, "all gradients, and the embedding's before it is added", "(Ψ + M·h·V)" if embedding else "Ψ"
    )
    rest = gradient_line(job, left, "gradients not yet in a bucket")
    return (
        *at_the_embedding(job, these, (*bucket_lines(job), all_made)),
        Moment("end of backward: first bucket reduced", Phase.BACKWARD,
               (*around, rest, copy_line(job, split if options.reduce_scatter else 0))),
        Moment("end of backward: own gradients kept", Phase.BACKWARD, (*around, rest, own_gradients(job))),
    )  # fmt: skip

"""The moments of the backward under ZeRO-3, from the loss to the bucket that is left at its end."""

from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.deepspeed.adapted import highest_places
from zeroplan.engines.deepspeed.buckets import unreduced_elements
from zeroplan.engines.deepspeed.infinity import swaps_optimizer
from zeroplan.engines.deepspeed.notes import Gathered, Note, rising
from zeroplan.engines.deepspeed.running import gradient_counts, running_lines
from zeroplan.engines.deepspeed.stage3.job import Job, gathered_line, gradient_line, staying_lines, tied_head_lines
from zeroplan.engines.deepspeed.stage3.reducing import flush_moment, highest_flushes, reduce_lines, taken_beside
from zeroplan.engines.deepspeed.stage12_lines import waiting
from zeroplan.engines.passes import (
    Instant,
    Passes,
    RunPass,
    around_block,
    embedding_instant,
    head_instants,
    kept_before,
)
from zeroplan.engines.rows import embedding_elements, embedding_symbol, has_tied_head
from zeroplan.engines.sources import INPUT_BUFFER
from zeroplan.ledger import Line, Moment, Phase
from zeroplan.transformer.blocks import At, BackwardPoint

_GATHERING = -1
"""Stands, in place of the elements being made, for the moment at which the module is gathered (:func:`_held`)."""
_NOWHERE = BackwardPoint("", (), 0, 0, 0)
_OF_HEAD = {At.LOSS: 0, At.HEAD: 1, At.FINAL_NORM: 2}
"""Where in the trace's figures of the head a point is, where no gradients tell."""


def backward_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Loss, head, blocks, the buckets reduced among them, and the end."""
    return (
        *_head(job, these),
        *(moment for run in these.runs for moment in (_frozen_blocks if _is_frozen(job, run) else _blocks)(job, these, run)),
        *(
            flush_moment(job, these, flush)
            for flush in highest_flushes(job.buckets, job.trace, gradient_counts(these), taken_beside(job))
        ),
        *_end(job, these),
    )


def _head(job: Job, these: Passes) -> Iterator[Moment]:
    for at in head_instants(these):
        first = at.point.gradients == at.point.current_gradient
        held = (
            _held_at_head(job.trace, at.point)
            if job.trace.head_notes
            else job.trace.head[
                _OF_HEAD[at.point.place.at] if job.trace.modules else 0 if not at.point.gradients else 1 if first else 2
            ]
        )
        tied = tied_head_lines(job) if at.point.gradients and not first else ()
        made = gradient_line(job, at.point.current_gradient, "gradient just made")
        yield Moment(at.name, at.phase, (*at.lines, gathered_line(job, held), made, *tied, *_before(job, these, at.point)))
        if first and at.point.gradients and not job.trace.head_notes:
            yield _past_head(job, these, at.point.gradients)


def _before(job: Job, these: Passes, point: BackwardPoint) -> tuple[Line, ...]:
    """Without a contiguous bucket, the gradients after the blocks that wait to be reduced, less the one being made."""
    if job.recipe.deepspeed.contiguous_gradients:
        return ()
    return (
        gradient_line(
            job, _unreduced(job, these.n_blocks, point) - point.current_gradient, "gradients that wait to be reduced"
        ),
    )


def _unreduced(job: Job, block: int, point: BackwardPoint) -> int:
    """Elements of gradients that wait in no bucket; that of a tied head waits for the embedding's first."""
    gradients = point.gradients
    if block == job.whole.n_blocks and has_tied_head(job.whole):
        gradients = max(point.current_gradient, gradients - embedding_elements(job.whole))
    return unreduced_elements(job.buckets, block, gradients, point.current_gradient)


def _waiting(job: Job, block: int, point: BackwardPoint) -> Line:
    """Return gradients outside the bucket: the one being made, and what waits with it."""
    if job.recipe.deepspeed.contiguous_gradients:
        return waiting(job.buckets, job.element, block, point.gradients, point.current_gradient)
    return gradient_line(job, _unreduced(job, block, point), "gradients that wait to be reduced")


def _held_at_head(trace: Gathered, point: BackwardPoint) -> int:
    return _held(trace.head_notes, point.gradients, point.current_gradient, ahead=False, apart=False)


def _past_head(job: Job, these: Passes, made: int) -> Moment:
    """Return the moment after the head: what the final norm needs is gathered while a gradient too large for the bucket waits."""
    waits = _waiting(job, these.n_blocks, _NOWHERE._replace(gradients=made))
    running = running_lines(these, these.n_blocks, made)
    around = (*these.head.shared, *these.output, *kept_before(these, these.n_blocks), *running, *tied_head_lines(job))
    return Moment(
        "gathered for the final norm's backward", Phase.BACKWARD, (*around, gathered_line(job, job.trace.head[2]), waits)
    )


@lru_cache(maxsize=4096)
def _highest_blocks(
    trace: Gathered, first: int, n_blocks: int, at: tuple[int, int, bool, bool]
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Return the last block, and earlier ones where more is gathered, with the elements gathered, at a point (:func:`_held`)."""
    return rising(first, n_blocks, lambda block: _held(trace.backward[block], *at))


def _held(notes: tuple[Note, ...], gradients: int, current: int, ahead: bool, apart: bool) -> int:  # noqa: FBT001  hashed as a tuple above
    """Return the elements gathered at a point after so many gradients, ``current`` elements of which are being made.

    ``ahead`` says that the module that runs has no gradient yet. While parameters are gathered, no gradient of their module is
    there, which is a moment ``apart``, or one with the point's lines. Of what the module's operators saved of its parameters, that
    is gone of which gradients are made.
    """
    at = next((at for at, note in enumerate(notes) if note.made >= gradients + ahead), len(notes) - 1)
    note, before = notes[at], notes[at - 1].made if at else 0
    if current == _GATHERING:
        return note.gathering
    gone = min(max(gradients - current - before, 0), note.during - note.handing)
    if current:
        return max(note.during - gone, note.gathering - current if gradients - current <= before and not apart else 0)
    return note.during - gone if note.made > gradients else note.after


def _is_frozen(job: Job, run: RunPass) -> bool:
    """Whether blocks of a run have weights that are not trained, beside adapters or alone."""
    return any(each.parameter.frozen for each in job.every.placed if each.block == run.first)


def _frozen_blocks(job: Job, these: Passes, run: RunPass) -> Iterator[Moment]:
    """Each point of the last block, and of earlier ones where more is gathered, where weights are frozen."""
    for point in run.block.points:
        current = point.current_gradient
        for block, held, gathering in highest_places(job.trace, run.first, run.n_blocks, point.place, current):
            around = (*around_block(these, run, block), _waiting(job, block, point), *tied_head_lines(job))
            yield Moment(
                f"backward of a block: {point.name}", Phase.BACKWARD, (*around, *point.lines, gathered_line(job, held))
            )
            if gathering > held:
                lines = (*around, *point.before, gathered_line(job, gathering))
                yield Moment(f"gathered for the backward of a block: {point.name}", Phase.BACKWARD, lines)


def _blocks(job: Job, these: Passes, run: RunPass) -> Iterator[Moment]:
    """Each point of the last block, and of earlier ones where more is gathered."""
    tied = tied_head_lines(job)
    beside: dict[int, tuple[Line, ...]] = {}
    experts = next((point.gradients for point in run.block.points if point.place.at is At.WEIGHTING), None)
    for point in run.block.points:
        apart = point.gradients - point.current_gradient == experts
        place = point.gradients, point.current_gradient, point.place.at is At.WEIGHTING, apart
        highest = _highest_with_waiting(job, run, place, point)
        for block, held in highest if not swaps_optimizer(job.recipe) else _and_first(job.trace, run, highest, place):
            if block not in beside:
                beside[block] = around_block(these, run, block)
            stay = staying_lines(job, block, point.gradients - point.current_gradient)
            around = (_waiting(job, block, point), *tied)
            lines = (*beside[block], *point.lines, gathered_line(job, held), *around, *stay)
            yield Moment(f"backward of a block: {point.name}", Phase.BACKWARD, lines)
        if point.place.at is At.WEIGHTING:
            yield from _experts_gathered(job, these, run, point)


def _highest_with_waiting(
    job: Job, run: RunPass, at: tuple[int, int, bool, bool], point: BackwardPoint
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Return :func:`_highest_blocks`, where gradients that wait in no bucket count too."""
    if job.recipe.deepspeed.contiguous_gradients:
        return _highest_blocks(job.trace, run.first, run.n_blocks, at)
    most = rising(run.first, run.n_blocks, lambda block: _held(job.trace.backward[block], *at) + _unreduced(job, block, point))
    return tuple((block, _held(job.trace.backward[block], *at)) for block, _ in most)


def _and_first(
    trace: Gathered, run: RunPass, highest: tuple[tuple[int, int], ...], at: tuple[int, int, bool, bool]
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Add the first block: gradients that stay on the GPU grow towards it, block by block, as activations grow less."""
    if highest[-1][0] == run.first:
        return highest
    return (*highest, (run.first, _held(trace.backward[run.first], *at)))


def _experts_gathered(job: Job, these: Passes, run: RunPass, first: BackwardPoint) -> Iterator[Moment]:
    """Return the moments at which experts are gathered for their backward, before its ``first`` point has made anything."""
    for block, held in _highest_blocks(job.trace, run.first, run.n_blocks, (first.gradients, _GATHERING, True, True)):
        stay = staying_lines(job, block, first.gradients)
        waits = _waiting(job, block, _NOWHERE._replace(gradients=first.gradients))
        lines = (*around_block(these, run, block), *first.before, gathered_line(job, held), waits, *tied_head_lines(job), *stay)
        yield Moment("experts gathered for their backward", Phase.BACKWARD, lines)


def _end(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Return the moments of the embedding's gradient, and of the bucket that is left."""
    at: Instant = embedding_instant(these)
    last = job.buckets.flushes[0]
    elements = embedding_elements(job.whole)
    embedding = gradient_line(job, elements, "gradient of the embedding", embedding_symbol(job.whole) if elements else "")
    held = gathered_line(job, job.trace.end)
    around = (*these.head.at_embedding, *these.output, held, *staying_lines(job, -1, -1))
    gathering = gathered_line(job, job.trace.embedding)
    waits = () if job.recipe.deepspeed.contiguous_gradients else (_waiting(job, -1, _NOWHERE),)
    gradients = (*waits, embedding, *tied_head_lines(job))
    return (
        Moment("embedding gathered for its backward", at.phase, (*at.lines, gathering, *waits, *tied_head_lines(job))),
        Moment(at.name, at.phase, (*at.lines, held, *gradients, *staying_lines(job, -1, -1))),
        *_sum_of_tied(job, (*around, *gradients)),
        Moment("end of backward: last bucket reduced", Phase.BACKWARD, (*around, *reduce_lines(job, last))),
    )


def _sum_of_tied(job: Job, alive: tuple[Line, ...]) -> Iterator[Moment]:
    """Yield the moment of a third tensor beside both gradients of a tied head that torch's ``linear`` multiplied with.

    DeepSpeed's own ``linear`` gives autograd a tensor to which the embedding's gradient is added in place; torch's gives a view.
    """
    if job.recipe.keeps_gathered_linears and has_tied_head(job.whole):
        elements, reason = embedding_elements(job.whole), "sum of the embedding's and the tied head's"
        total = gradient_line(job, elements, reason, embedding_symbol(job.whole))._replace(source=INPUT_BUFFER)
        yield Moment("sum of the embedding's and the tied head's gradient", Phase.BACKWARD, (*alive, total))

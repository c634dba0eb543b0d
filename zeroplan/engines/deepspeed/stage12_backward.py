"""When can memory peak in the forward and backward passes of DeepSpeed's stages 0 to 2, gradients and buckets included?

Activations come from :mod:`zeroplan.engines.deepspeed.passes`, gradients from :mod:`zeroplan.engines.deepspeed.course`; at each
place the moment is chosen at which both together are highest.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from zeroplan.engines.deepspeed.course import Courses, Held, Seen, courses_of, distinct_micro_batches, groups_of, highest
from zeroplan.engines.deepspeed.flat import embedding_elements, embedding_symbol, has_tied_head, head_elements
from zeroplan.engines.deepspeed.gradients import Event, numel, plan_of
from zeroplan.engines.deepspeed.passes import (
    Passes,
    RunPass,
    around_block,
    embedding_instant,
    forward_instant,
    head_instants,
    kept_before,
    kept_bytes,
    loss_instant,
    shared_at,
)
from zeroplan.engines.deepspeed.running import points_of_kinds, running_lines, running_size
from zeroplan.engines.deepspeed.sources import STAGE12
from zeroplan.engines.deepspeed.stage12_lines import (
    Job,
    gradient_line,
    own_gradients,
    tied_head,
    whole_gradients,
)
from zeroplan.engines.formulas import product, times, unless_zero
from zeroplan.engines.sources import INPUT_BUFFER
from zeroplan.ledger import Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import Int, maximum, minimum, where
from zeroplan.transformer.blocks import At, BackwardPoint

_BUCKETS = f"{STAGE12}, setup_buckets"
_ADD = f"{STAGE12}, _add_to_grad_partition_buffer"

#: What each event is called during the backward and after it, and what is copied then, with its source.
_DURING: dict[Event, str] = {
    "arrives": "gradient arrives at DeepSpeed during the backward",
    "copied": "gradient too large for the bucket copied during the backward",
    "reduced": "bucket reduced during the backward",
    "kept": "own gradients kept during the backward",
    "leaves": "own gradients to the host during the backward",
}
_AFTER: dict[Event, str] = {
    "copied": "end of backward: gradient too large for the bucket copied",
    "reduced": "end of backward: bucket reduced",
    "kept": "end of backward: own gradients kept",
    "leaves": "end of backward: own gradients to the host",
}
_COPIES: dict[Event, tuple[str, str]] = {
    "copied": ("copy of the gradient", f"{STAGE12}, reduce_independent_p_g_buckets_and_remove_grads"),
    "leaves": (
        "gradient of this rank in fp64, for its norm, on the way to the host",
        f"{STAGE12}, set_norm_for_param_grad_in_gpu",
    ),
}
_COPY = ("copy of the bucket that is all-reduced", f"{STAGE12}, allreduce_bucket")


def training_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Return every moment of forward and backward passes, up to the end of the last backward."""
    courses = _courses(job, these)
    return (
        *_forward(job, these, courses),
        *_head(job, these, courses),
        *(moment for at, run in enumerate(these.runs) for moment in _blocks(job, these, courses, (at, run))),
        *_during(job, these, courses),
        *_embedding(job, these, courses),
        *_after(job, these, courses),
    )


def _courses(job: Job, these: Passes) -> Courses:
    plan = plan_of(job.recipe, job.whole, tuple([run.first for run in these.runs]))
    share = job.whole.n_elements if plan.collects else job.partition  # no share matters then
    return courses_of(plan, share, minimum(job.micro_batches, distinct_micro_batches(plan.stage, overlaps=plan.overlaps)))


def held_lines(job: Job, held: Held, copied: tuple[str, str] = _COPY) -> tuple[Line, ...]:
    """Return what gradients take, line by line."""
    own, count = own_gradients(job), 2 if job.recipe.deepspeed.overlap_comm else 1
    bucket = "two reduce buckets, reduce_bucket_size each" if count > 1 else "reduce bucket, reduce_bucket_size"
    element, kept = job.element, "gradients of the micro-batches before, of every parameter that reaches into this rank's share"
    reason, source = copied
    return (
        Line(Kind.REDUCE, held.buckets, bucket, unless_zero(held.buckets, times(count * element, "B")), _BUCKETS),
        gradient_line(job, held.gradients // element, "gradients where they were made, or added up"),
        Line(Kind.REDUCE, held.copy, reason, product(element, held.copy // element), source),
        Line(Kind.TEMPORARY, held.cast, "reduced gradient cast to fp32", product(4, held.cast // 4), _ADD),
        own._replace(n_bytes=held.own, formula=unless_zero(held.own, own.formula)),
        Line(Kind.GRADIENTS, held.earlier, kept, unless_zero(held.earlier, times(element, "G_p")), own.source),
    )


def _forward(job: Job, these: Passes, courses: Courses) -> Iterator[Moment]:
    lines = held_lines(job, highest(courses, ("forward",)).held)
    for at in (*(forward_instant(these, run, run.first + run.n_blocks - 1) for run in these.runs), loss_instant(these)):
        yield Moment(at.name, at.phase, at.lines + lines, of_forward=True)


# --- the head ---------------------------------------------------------------------------------------------------------------


def _head(job: Job, these: Passes, courses: Courses) -> Iterator[Moment]:
    instants = head_instants(these)
    points = tuple([_of_head(job, at.point) for at in instants])
    counts = received_before(_counted(points), _sizes(job, these.n_blocks))
    for at, point, count in zip(instants, points, counts, strict=True):
        held = highest(courses, ("between", len(these.runs), count)).held
        tied = tied_head(job) if at.point.gradients and not _sums_by_itself(job, at.point) else ()
        made = gradient_line(job, point.current_gradient, "gradient just made")
        yield Moment(at.name, at.phase, (*at.lines, *held_lines(job, held), made, *tied))


def _of_head(job: Job, point: BackwardPoint) -> BackwardPoint:
    """Return the point with the gradients that DeepSpeed has received by then.

    A tied head's gradient waits for the embedding's. A loss in chunks adds the head's gradient up itself, and a fused loss makes it
    in the forward: both pass it on when their backward is over.
    """
    vocabulary = head_elements(job.whole)
    tied = vocabulary if has_tied_head(job.whole) else 0
    if _sums_by_itself(job, point):
        received = vocabulary - tied if job.recipe.loss == "fused" or point.place.at is At.HEAD else 0
        return point._replace(gradients=received, current_gradient=point.gradients)
    return point._replace(gradients=max(0, point.gradients - tied), current_gradient=0 if tied else point.current_gradient)


def _sums_by_itself(job: Job, point: BackwardPoint) -> bool:
    return job.recipe.loss != "full" and point.place.at is not At.FINAL_NORM


# --- blocks -----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def received_before(points: tuple[tuple[int, int], ...], groups: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many groups of gradients DeepSpeed has received when each point of a block's backward is reached.

    A point has the elements made by then and those being made; the latter arrive when it is over.

    >>> received_before(((4, 4), (4, 0), (11, 5)), (4, 2, 5))
    (0, 1, 2)
    """
    counts, made, count = [], 0, 0
    for gradients, current in points:
        latest = 0
        while count < len(groups) and made + groups[count] <= gradients:
            made += groups[count]
            count += 1
            latest = 1 if current and made == gradients else 0
        counts.append(count - latest)
    return tuple(counts)


def _counted(points: Sequence[BackwardPoint]) -> tuple[tuple[int, int], ...]:
    return tuple([(point.gradients, point.current_gradient) for point in points])


def _sizes(job: Job, block: int) -> tuple[int, ...]:
    return tuple([sum(map(numel, group)) for group in groups_of(job.whole).get(block, ())])


def _blocks(job: Job, these: Passes, courses: Courses, place: tuple[int, RunPass]) -> Iterator[Moment]:
    """Each point of a run's last block, and each point of that block before the last in which most is alive then."""
    index, run = place
    points = [
        (point, count)
        for kind in points_of_kinds(run)
        for point, count in zip(kind, received_before(_counted(kind), _sizes(job, run.first)), strict=True)
    ]
    for point, count in points:
        last = highest(courses, ("between", index, count))
        yield _at_point(job, these, run, last, f"backward of the last block: {point.name}", point)
    for point, count in points if run.n_blocks > 1 else ():
        other = highest(courses, ("before", index, count), lambda seen: kept_bytes(these, seen.block))
        yield _at_point(job, these, run, other, f"backward of a block before the last: {point.name}", point)


def _at_point(job: Job, these: Passes, run: RunPass, seen: Seen, name: str, point: BackwardPoint) -> Moment:
    made = gradient_line(job, point.current_gradient, "gradient just made")
    gradients = (*held_lines(job, seen.held), made, *tied_head(job))
    return Moment(name, Phase.BACKWARD, (*around_block(these, run, seen.block), *point.lines, *gradients))


# --- gradients that arrive, and buckets that are reduced --------------------------------------------------------------------


def _during(job: Job, these: Passes, courses: Courses) -> Iterator[Moment]:
    def alive(seen: Seen) -> Int:
        activations = kept_bytes(these, maximum(seen.block, 0)) + running_size(these, seen.block, seen.made)
        return activations + total_bytes(_tied_until(job, these, seen))

    for event, name in _DURING.items():
        if ("during", event) in courses.each[0]:
            seen = highest(courses, ("during", event), alive)
            lines = (
                *shared_at(these, seen.block),
                *these.output,
                kept_before(these, maximum(seen.block, 0)),
                *running_lines(these, seen.block, seen.made),
                *held_lines(job, seen.held, _COPIES.get(event, _COPY)),
                *_tied_until(job, these, seen),
            )
            yield Moment(name, Phase.BACKWARD, lines)


def _tied_until(job: Job, these: Passes, seen: Seen) -> tuple[Line, ...]:
    """Return a tied head's gradient as long as it waits for the embedding's, which is the last to arrive."""
    waits = (seen.block >= 0) | (seen.made < these.below)
    return tuple(
        line._replace(n_bytes=n_bytes, formula=unless_zero(n_bytes, line.formula))
        for line in tied_head(job)
        for n_bytes in (where(waits, line.n_bytes, 0),)
    )


def _embedding(job: Job, these: Passes, courses: Courses) -> Iterator[Moment]:
    """Each operator below the blocks, the embedding last.

    With a tied head both gradients are added up in a third tensor: autograd adds in place only to what nothing else refers to,
    and the head's is a transposed view, which refers to what it is a view of.
    """
    at, sizes = embedding_instant(these), _sizes(job, -1)
    lines: tuple[Line, ...] = ()
    for count, elements in enumerate(sizes or (0,)):
        held = held_lines(job, highest(courses, ("between", -1, count)).held)
        symbol = embedding_symbol(job.whole) if elements and elements == embedding_elements(job.whole) else ""
        made = gradient_line(job, elements, "gradient of the embedding", symbol)
        lines = (*held, made, *tied_head(job))
        yield Moment(at.name, at.phase, (*at.lines, *lines))
    if has_tied_head(job.whole) and job.recipe.loss == "full":
        elements = embedding_elements(job.whole)
        reason, formula = "sum of the embedding's and the tied head's", times(job.element, embedding_symbol(job.whole))
        total = Line(whole_gradients(job), job.element * elements, reason, formula, INPUT_BUFFER)
        alive = (*these.head.at_embedding, *these.output, *lines, total)
        yield Moment("sum of the embedding's and the tied head's gradient", at.phase, alive)


def _after(job: Job, these: Passes, courses: Courses) -> Iterator[Moment]:
    for event, name in _AFTER.items():
        if ("end", event) in courses.each[0]:
            held = highest(courses, ("end", event)).held
            lines = (*these.head.at_embedding, *these.output, *held_lines(job, held, _COPIES.get(event, _COPY)))
            yield Moment(name, Phase.BACKWARD, lines)

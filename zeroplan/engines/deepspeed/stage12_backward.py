"""The moments of DeepSpeed's stages 0 to 2 at which memory can peak in forward and backward, including gradients and buckets.

They are the points of the model's passes and the events of DeepSpeed's own program. For each event it takes the moment at which
gradients and activations together are highest.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from zeroplan.engines.collecting import Event, operators_below
from zeroplan.engines.deepspeed.course import Courses, Held, Seen, courses_of, highest
from zeroplan.engines.deepspeed.gradients import distinct_micro_batches, plan_of
from zeroplan.engines.deepspeed.muon import UPDATE
from zeroplan.engines.deepspeed.running import points_of_masks, running_lines, running_size
from zeroplan.engines.deepspeed.sources import STAGE12
from zeroplan.engines.deepspeed.stage12_lines import Job, gradient_line, own_gradients
from zeroplan.engines.deepspeed.wrappers import Around, wrapper_of
from zeroplan.engines.formulas import product, sized, times, unless_zero
from zeroplan.engines.micro_batch import Lines, MicroBatch
from zeroplan.engines.passes import Below, KindPass, Passes, kept_bytes, moments_below, shared_at
from zeroplan.engines.rows import Row, embedding_elements, embedding_symbol, groups_of, has_tied_head, head_elements, numel
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.memo import Computed
from zeroplan.numeric import Int, minimum
from zeroplan.spec.recipe import OptimizerImpl
from zeroplan.trace import Entry, Inside, Trace
from zeroplan.transformer.blocks import At, BackwardPoint

_BUCKETS = f"{STAGE12}, setup_buckets"
_ADD = f"{STAGE12}, _add_to_grad_partition_buffer"

#: Descriptions of each event during the backward and after it, and of the copy made then, with its source.
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
    "updated": "end of backward: Muon's updates",
}
_COPIES: dict[Event, tuple[str, str]] = {
    "copied": ("copy of the gradient", f"{STAGE12}, reduce_independent_p_g_buckets_and_remove_grads"),
    "leaves": (
        "gradient of this rank in fp64, for its norm, on the way to the host",
        f"{STAGE12}, set_norm_for_param_grad_in_gpu",
    ),
}
_COPY = ("copy of the bucket that is all-reduced", f"{STAGE12}, allreduce_bucket")


def trained(job: Job, impl: OptimizerImpl, these: Passes, persistent: Lines, temporary: Lines) -> tuple[Entry, ...]:
    """Return every moment of a step, beside the persistent lines; ``temporary``: lines of the optimizer's update."""
    trace = Trace()
    trace.hold("states", *persistent)

    def update() -> None:
        trace.put("temporaries", *temporary)
        trace.look()
        trace.drop("temporaries")

    wrapper = wrapper_of(job, impl, Around(trace, update, lambda: trace.drop("made")))
    Training(trace, job, these).run()
    wrapper.after_backward()
    trace.hold("shared")
    trace.hold("output")
    wrapper.step()
    return trace.finished()


class Training(MicroBatch):
    """The forward and backward passes, until the last backward ends."""

    def __init__(self, trace: Trace, job: Job, these: Passes) -> None:
        super().__init__(trace, job.recipe, these, job.whole)
        self.job, self.courses, self.own = job, _courses(job, these), own_gradients(job)._replace(n_bytes=0)
        self.kept = Computed[int, Int](lambda block: kept_bytes(these, max(block, 0)))
        """The bytes that the blocks before one keep."""
        self.just_made = Computed[int, Line](lambda elements: self.gradient(elements, "gradient just made"))
        """The gradient of so many elements that is being made."""

    def run(self) -> None:
        """Run forward, backward, and the reductions during and after it."""
        self.forward()
        self.backward()
        self._during()
        self.embedding_backward()
        self._after()

    def gradient(self, elements: int, reason: str, symbol: str = "") -> Line:
        """Return a whole gradient as a line, with ``symbol`` in its formula if given."""
        return gradient_line(self.job, elements, reason, symbol)

    def _lines(self, held: Held, copied: tuple[str, str] = _COPY) -> Lines:
        """Return the memory of gradients, line by line. That of one job does not depend on its batch."""
        make = held_lines if set(map(type, held)) == {int} else held_lines.__wrapped__
        return make(held, self.own, self.just_made[0], self.job.element, bool(self.recipe.deepspeed.overlap_comm), copied)

    def in_forward(self) -> Lines:
        """Return the gradients of earlier micro-batches."""
        return self._lines(highest(self.courses, ("forward",)).held)

    def at_head(self) -> Iterator[Lines]:
        """Yield gradients that have reached their weights, the one being made, and a tied head's."""
        points, head = self.these.head.points, len(self.these.kinds)
        made = tuple(map(self.of_head, points))
        received = received_before(made, _sizes(self.whole, self.these.n_blocks))
        for point, (_, current), count in zip(points, made, received, strict=True):
            waits = self.tied_waits(point) and not self.sums_by_itself(point)
            held = self._lines(highest(self.courses, ("between", head, count)).held)
            yield (*held, self.just_made[current], *(self.tied_head if waits else ()))

    def of_head(self, point: BackwardPoint) -> tuple[int, int]:
        """Return the same counts. A gradient that the loss accumulates itself counts as being made."""
        if not self.sums_by_itself(point):
            return super().of_head(point)
        received = head_elements(self.whole) if self.recipe.loss == "fused" or point.place.at is At.HEAD else 0
        return 0 if has_tied_head(self.whole) else received, point.gradients

    def in_last_block(self, one: KindPass) -> Iterator[Lines]:
        """Yield gradients that have reached their weights, and the one being made."""
        for points, count in self._received(one):
            held = self._lines(highest(self.courses, ("between", self._index(one), count)).held)
            for point in points:
                yield (*held, self.just_made[point.current_gradient], *self.tied_head)

    def before_last_block(self, one: KindPass) -> None:
        """Write each point in the earlier block of the kind with most live bytes then."""
        trace, index = self.trace, self._index(one)
        for points, count in self._received(one):
            seen = highest(self.courses, ("before", index, count), lambda seen: self.kept[seen.block])
            held = self._lines(seen.held)
            trace.hold("kept", *seen.lines(lambda one: self.kept_before(one.block)))
            inside = [(point.name, (point.lines, held, (self.just_made[point.current_gradient], *self.tied_head)))
                      for point in points]  # fmt: skip
            trace.pass_through(Inside(inside), "backward of a block before the last", Phase.BACKWARD)

    def _index(self, one: KindPass) -> int:
        return self.these.order.of_block[one.last]

    def _received(self, one: KindPass) -> Iterator[tuple[tuple[BackwardPoint, ...], int]]:
        """Yield the points of a block's backward, and how many groups of its gradients DeepSpeed has received by then."""
        for some in points_of_masks(one):
            made = tuple([(point.gradients, point.current_gradient) for point in some])
            counts = received_before(made, _sizes(self.whole, one.last))
            for count, points in groupby(zip(counts, some, strict=True), key=itemgetter(0)):
                yield tuple([point for _, point in points]), count

    def below_blocks(self) -> list[tuple[Below, Lines]]:
        """Return each moment below the blocks with its gradients, and those that have reached their weights."""
        found, table, symbol = list[tuple[Below, Lines]](), embedding_elements(self.whole), embedding_symbol(self.whole)
        for point in moments_below(self.these, operators_below(self.whole)):
            held, elements = self._lines(highest(self.courses, ("between", -1, point.operator)).held), point.current
            made = self.gradient(elements, "gradient of the embedding", symbol if elements and elements == table else "")
            found.append((point, (*held, made, *self.tied_head)))
        return found

    def _during(self) -> None:
        """Write the arrivals of gradients and the reductions of buckets."""
        trace, these = self.trace, self.these

        kept, running = self.kept, Computed[tuple[int, int], Int](self._running)

        def alive(seen: Seen) -> Int:
            return kept[seen.block] + running[seen.kind, seen.made]

        def lines(seen: Seen) -> Lines:
            kept, running = self.kept_before(max(seen.block, 0)), running_lines(these, seen.block, seen.made)
            return (*shared_at(these, seen.block), *kept, *running, *self._tied_until(seen.block, seen.made))

        trace.drop("shared")
        for event, name in _DURING.items():
            if ("during", event) in self.courses.each[0]:
                seen = highest(self.courses, ("during", event), alive)
                trace.at(name, Phase.BACKWARD)
                trace.pass_by(*seen.lines(lines), *self._lines(seen.held, _COPIES.get(event, _COPY)))

    def _running(self, place: tuple[int, int]) -> Int:
        """Return what is alive in the running block, which is the same in all blocks of a kind. [bytes]"""
        kind, made = place
        inside = 0 <= kind < len(self.these.kinds)
        block = self.these.kinds[kind].blocks[-1] if inside else -1 if kind < 0 else self.these.n_blocks
        return running_size(self.these, block, made, self._tied_until(block, made))

    def _tied_until(self, block: int, made: int) -> Lines:
        """Return a tied head's gradient until the embedding's arrives, which is the last."""
        if block >= 0 or made < self.these.below:
            return self.tied_head
        return tuple([line._replace(n_bytes=0, formula="0") for line in self.tied_head])

    def _after(self) -> None:
        for event, name in _AFTER.items():
            if ("end", event) in self.courses.each[0]:
                held = highest(self.courses, ("end", event)).held
                self.trace.at(name, Phase.BACKWARD)
                self.trace.pass_by(
                    *self._updating(held) if event == "updated" else self._lines(held, _COPIES.get(event, _COPY))
                )

    def _updating(self, held: Held) -> Lines:
        """Return Muon's updates and its temporaries beside gradients and buckets."""
        made = sized(Kind.GRADIENTS, 1, held.cast, "Muon's updates so far", UPDATE)
        reason = "temporaries of the update of the next matrix"
        following = sized(Kind.OPTIMIZER_TEMPORARY, 1, held.copy, reason, UPDATE)
        return (*self._lines(held._replace(copy=0, cast=0)), made, following)


@lru_cache(maxsize=4096)
def received_before(points: tuple[tuple[int, int], ...], groups: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many groups of gradients DeepSpeed has received at each point of a backward.

    A point has the elements made by then, including those being made, which arrive after the point.

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


@lru_cache(maxsize=4096)
def _sizes(whole: Row, block: int) -> tuple[int, ...]:
    return tuple([sum(map(numel, group)) for group in groups_of(whole).get(block, ())])


def _courses(job: Job, these: Passes) -> Courses:
    plan = plan_of(job.recipe, job.whole, these.order.of_block)
    ranks = 1 if plan.collects else job.n_ranks  # the shard does not matter then
    return courses_of(plan, ranks, minimum(job.micro_batches, distinct_micro_batches(plan.stage, overlaps=plan.overlaps)))


@lru_cache(maxsize=4096)
def held_lines(
    held: Held, own: Line, made: Line, element: int, overlaps: bool, copied: tuple[str, str]  # noqa: FBT001  part of a key
) -> tuple[Line, ...]:  # fmt: skip
    """Return the memory of gradients, line by line, like the lines of a rank's ``own`` gradients and of whole ones."""
    bucket = "two reduce buckets, reduce_bucket_size each" if overlaps else "reduce bucket, reduce_bucket_size"
    kept = "gradients of the micro-batches before, of every parameter that reaches into this rank's share"
    reason, source = copied
    whole = "gradients where they were made, or added up"
    return (
        Line(Kind.REDUCE, held.buckets, bucket, unless_zero(held.buckets, times((1 + overlaps) * element, "B")), _BUCKETS),
        sized(made.kind, element, held.gradients // element, whole, made.source),
        Line(Kind.REDUCE, held.copy, reason, product(element, held.copy // element), source),
        Line(Kind.TEMPORARY, held.cast, "reduced gradient cast to fp32", product(4, held.cast // 4), _ADD),
        own._replace(n_bytes=held.own, formula=unless_zero(held.own, own.formula)),
        Line(Kind.GRADIENTS, held.earlier, kept, unless_zero(held.earlier, times(element, "G_p")), own.source),
    )

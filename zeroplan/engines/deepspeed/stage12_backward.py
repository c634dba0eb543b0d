"""When can memory peak in the forward and backward passes of DeepSpeed's stages 0 to 2, gradients and buckets included?

Beside the points of the model's passes these are the events of DeepSpeed's own program; of each event the moment is chosen at which
gradients and activations together are highest.
"""

from zeroplan.engines.collecting import Event
from zeroplan.engines.course import Courses, Held, Seen, courses_of, highest
from zeroplan.engines.deepspeed.gradients import distinct_micro_batches, plan_of
from zeroplan.engines.deepspeed.sources import STAGE12
from zeroplan.engines.deepspeed.stage12_lines import Job, gradient_line, own_gradients
from zeroplan.engines.deepspeed.wrappers import Around, wrapper_of
from zeroplan.engines.formulas import product, times, unless_zero
from zeroplan.engines.micro_batch import Lines, MicroBatch
from zeroplan.engines.passes import Passes, kept_before, kept_bytes, shared_at
from zeroplan.engines.running import running_lines, running_size
from zeroplan.ledger import Kind, Line, Phase, total_bytes
from zeroplan.numeric import Int, maximum, minimum, where
from zeroplan.spec.recipe import OptimizerImpl
from zeroplan.trace import Entry, Trace

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


def trained(job: Job, impl: OptimizerImpl, these: Passes, persistent: Lines, temporary: Lines) -> tuple[Entry, ...]:
    """Return every moment of a step, beside what persists; ``temporary`` is what the optimizer's update takes."""
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
    """Forward and backward passes up to the end of the last backward."""

    def __init__(self, trace: Trace, job: Job, these: Passes) -> None:
        """Take the job."""
        super().__init__(trace, job.recipe, these, job.whole, _courses(job, these))
        self.job = job

    def run(self) -> None:
        """Forward, backward, and what is reduced after it."""
        self.forward()
        self.backward()
        self._during()
        self.embedding_backward()
        self._after()

    def gradients(self, held: Held) -> Lines:
        """What gradients, and what they are reduced in, take."""
        return held_lines(self.job, held)

    def gradient(self, elements: int, reason: str, symbol: str = "") -> Line:
        """A whole gradient, which ``symbol`` stands for if given."""
        return gradient_line(self.job, elements, reason, symbol)

    def _during(self) -> None:
        """Gradients that arrive, and buckets that are reduced."""
        trace, these = self.trace, self.these

        def alive(seen: Seen) -> Int:
            activations = kept_bytes(these, maximum(seen.block, 0)) + running_size(these, seen.block, seen.made)
            return activations + total_bytes(self._tied_until(seen))

        for event, name in _DURING.items():
            if ("during", event) in self.courses.each[0]:
                seen = highest(self.courses, ("during", event), alive)
                trace.hold("shared", *shared_at(these, seen.block))
                trace.at(name, Phase.BACKWARD)
                trace.pass_by(
                    kept_before(these, maximum(seen.block, 0)),
                    *running_lines(these, seen.block, seen.made),
                    *held_lines(self.job, seen.held, _COPIES.get(event, _COPY)),
                    *self._tied_until(seen),
                )

    def _tied_until(self, seen: Seen) -> Lines:
        """Return a tied head's gradient as long as it waits for the embedding's, which is the last to arrive."""
        waits = (seen.block >= 0) | (seen.made < self.these.below)
        return tuple(
            line._replace(n_bytes=n_bytes, formula=unless_zero(n_bytes, line.formula))
            for line in self.tied_head()
            for n_bytes in (where(waits, line.n_bytes, 0),)
        )

    def _after(self) -> None:
        for event, name in _AFTER.items():
            if ("end", event) in self.courses.each[0]:
                held = highest(self.courses, ("end", event)).held
                self.trace.at(name, Phase.BACKWARD)
                self.trace.pass_by(*held_lines(self.job, held, _COPIES.get(event, _COPY)))


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

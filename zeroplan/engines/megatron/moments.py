"""At which moments of the step can a rank's memory peak, and what is alive then?"""

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.engines.megatron.buffers import buffer_lines, rotary_tables
from zeroplan.engines.megatron.chunks import layers_of_a_checkpoint, runs_of
from zeroplan.engines.megatron.flying import Flying, flying_of, in_layers, without
from zeroplan.engines.megatron.inputs import EMBEDDED, attention_masks, embedded_lines, saves_mask
from zeroplan.engines.megatron.leftover import left_by_graphs, left_by_schedule
from zeroplan.engines.megatron.loss import (
    HEAD,
    deferred_lines,
    each_token,
    head_backward,
    head_lines,
    logits_of_loss,
    other_losses,
)
from zeroplan.engines.megatron.made_gradients import made_lines
from zeroplan.engines.megatron.muon import muon_step
from zeroplan.engines.megatron.on_host import copied_back
from zeroplan.engines.megatron.parameters import has_tied_head, table_of
from zeroplan.engines.megatron.rank import Rank, kinds_backward
from zeroplan.engines.megatron.sharded import AT_AHEAD, AT_END, AT_HEAD, AT_LAST, AT_LOSS, AT_STEP, Sharding, sharding_of
from zeroplan.engines.megatron.states import step_lines
from zeroplan.engines.megatron.tower import forward_of_the_tower, gradient_without_images, held_pixels, kept_of_images
from zeroplan.ledger import Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import ceil_div, minimum
from zeroplan.spec.described import Job
from zeroplan.transformer.megatron import Cost, Layers, element_of, keeps_placeholders
from zeroplan.transformer.params import is_frozen

RERUN = "Megatron-LM 2026-08, megatron/core/transformer/transformer_block.py, TransformerBlock._checkpointed_forward"
OVERLAPPED = (
    "Megatron-LM 2026-08, megatron/core/models/common/model_chunk_schedule_plan.py, TransformerModelChunkSchedulePlan.run"
)


class Step(NamedTuple):
    """A rank's step: the job, and the lines that several moments share."""

    rank: Rank
    layers: Layers
    job: Job
    flying: Flying
    held: tuple[Line, ...]
    """In the whole step."""
    embedded: tuple[Line, ...]
    """From the embedding, and of postponed weight gradients."""
    masks: tuple[Line, ...]
    left: dict[str, tuple[Line, ...]]
    """Hidden states that the schedule still refers to, by the names of ``Left``."""
    graphs: dict[str, tuple[Line, ...]]
    """Hidden states that graphs of dispatchers still refer to, by the names of ``Behind``."""
    sharding: Sharding | None
    """None without Megatron-FSDP."""

    @property
    def until_backward(self) -> tuple[Line, ...]:
        """The lines outside layers that the backward still needs."""
        return (*self.held, *self.embedded, *(self.masks if saves_mask(self.job.recipe) else ()))

    @property
    def in_backward(self) -> tuple[Line, ...]:
        """The lines outside layers while these run backward, except those of ``graphs``."""
        waiting = _waiting(self.rank, self.job)
        return (*self.until_backward, *self.left["backward"], *waiting)

    def whole(self, at: str | int) -> tuple[Line, ...]:
        """Return Megatron-FSDP's whole weights and gradients at a point of the step. [bytes]"""
        return () if self.sharding is None else self.sharding.lines(at)

    def made(self, at: str) -> tuple[Line, ...]:
        """Return the gradients in 16 bits that the backward has made (:func:`made_lines`). [bytes]"""
        return made_lines(at, self.rank, self.job)

    def waiting_layers(self, flying: Flying, *, last: str | None = None) -> tuple[Line, ...]:
        """Return what layers in flight keep (:func:`in_layers`). [bytes]"""
        return tuple(in_layers(flying, self.layers, self.job, last=last))


def moments_of(rank: Rank, layers: Layers, job: Job, states: tuple[Line, ...]) -> Iterator[Moment]:
    """Yield the moments of a rank's step, in the order of the step. [bytes]"""
    step = Step(
        rank, layers, job, flying_of(rank, layers, job),
        (*states, *buffer_lines(rank, layers, job), *rotary_tables(layers, job)),
        (*embedded_lines(rank, job), *deferred_lines(rank, job), *kept_of_images(rank, job)),
        tuple(attention_masks(rank, job)), left_by_schedule(rank, job),
        left_by_graphs(rank, job), sharding_of(rank, job),
    )  # fmt: skip
    if rank.at == 0:
        around = (*step.held, *step.embedded, *step.masks, *step.left["forward"], *_but_the_first_chunk(step))
        yield from forward_of_the_tower(rank, job, around)
    yield from _forward(step)
    if rank.has_head:
        yield from _around_loss(step)
    yield from _backward(step) if step.sharding is None else _backward_of_shards(step, step.sharding)
    if rank.at == 0 and not is_frozen(job.model, "embedding"):
        yield _backward_of_embedding(step)
    own = (muon_step(job),) if job.recipe.optimizer == "muon" else step_lines(rank, job)
    own = (*own, *copied_back(rank, job))
    lines = (*step.held, *step.whole(AT_STEP), *step.left["step"], *step.graphs["step"], *own)
    yield Moment("optimizer step", Phase.STEP, lines)


def _forward(step: Step) -> Iterator[Moment]:
    """Yield the forward with all layers in flight, and with weights gathered ahead."""
    flying, sharding = step.flying, step.sharding
    kinds = kinds_backward(step.rank, step.job)
    running = step.layers.kinds[kinds[0]].cost.forward if kinds else ()
    pixels = held_pixels(step.rank, step.job)
    around = *step.held, *pixels, *step.embedded, *step.masks, *step.left["forward"], *step.graphs["forward"]
    lines = (*around, *step.whole(AT_LAST), *step.waiting_layers(flying), *running)
    yield Moment("all that is in flight", Phase.FORWARD, lines)
    if sharding is not None and sharding.gathers:
        unread = tuple(minimum(sharding.unread(), count) for count in flying.counts[-1:])
        ahead = step.waiting_layers(without(flying, (*[0] * (len(flying.counts) - 1), *unread)))
        yield Moment("forward, with weights ahead", Phase.FORWARD, (*around, *step.whole(AT_AHEAD), *ahead, *running))


def _around_loss(step: Step) -> Iterator[Moment]:
    """Yield the loss, its backward and the head's."""
    job = step.job
    head, each = head_lines(job), tuple(each_token(step.rank, job))
    flying = step.waiting_layers(flying_of(step.rank, step.layers, job, loss=True))
    at_loss = (*flying, *other_losses(job), *step.graphs["loss"], *held_pixels(step.rank, job))
    gathered = step.whole(AT_LOSS)
    lines = (*step.held, *gathered, *at_loss, *step.embedded, *step.masks, *step.left["loss"], *head, *each)
    yield Moment("loss", Phase.LOSS, lines, of_forward=True)
    around, cast = (*step.until_backward, *step.left["head"]), (head[0], *logits_of_loss(job))
    yield Moment("backward of the loss", Phase.BACKWARD, (*around, *gathered, *at_loss, *cast))
    grown, placeholders = tuple(head_backward(job)), keeps_placeholders(job.recipe)
    written = (*(step.whole(AT_HEAD) if placeholders else gathered), *step.made("head"))
    yield Moment("backward of the head", Phase.BACKWARD, (*around, *written, *at_loss, head[0], *grown))
    if step.sharding is not None and not placeholders and not job.model.tie_word_embeddings:
        copied = (*around, *step.whole(AT_HEAD), *at_loss, head[0], *grown[1:])
        yield Moment("gradient of the head, copied", Phase.BACKWARD, copied)


def lasts_of(rank: Rank, job: Job) -> set[int]:
    """Return, for each kind, how many layers run backward before its last layer does."""
    order = kinds_backward(rank, job)
    return {order.index(kind) for kind in order}


def _backward_of_shards(step: Step, sharding: Sharding) -> Iterator[Moment]:
    """Yield the moments of the layers' backward under Megatron-FSDP.

    Layers whose backward has run may still have whole gradients. Layers before them may already have gathered weights.
    """
    rank, job, recipe = step.rank, step.job, step.job.recipe
    order, together = kinds_backward(rank, job), layers_of_a_checkpoint(recipe)
    around = *step.in_backward, *step.graphs["backward"], *step.made("end")
    again = "" if recipe.recompute == "none" else ", recomputed"
    for behind in sharding.backwards(lasts_of(rank, job), together):
        kind = order[behind]
        over = tuple(ceil_div(order[: behind + 1].count(run.kind), together) for run in runs_of(job))
        cost = step.layers.kinds[kind].cost
        below = *around, *sharding.lines(behind), *step.waiting_layers(without(step.flying, over))
        beside = tuple(_run_again_with_it(cost, kind, min(together, len(order))))
        what = f"a layer behind {behind}" if behind else "a layer"
        if sharding.gathers and cost.after_experts:
            in_experts = *around, *sharding.lines_in_experts(behind), *step.waiting_layers(without(step.flying, over))
            yield Moment(f"backward of the experts of {what}{again}", Phase.BACKWARD, (*in_experts, *beside, *cost.backward))
        inside = *beside, *(cost.after_experts if sharding.gathers and cost.after_experts else cost.backward)
        yield Moment(f"backward of {what}{again}", Phase.BACKWARD, (*below, *inside))
        yield Moment(f"reduction of {what}", Phase.BACKWARD, (*below, sharding.share(behind)))


def _backward_of_embedding(step: Step) -> Moment:
    """Return the moment at which the embedding makes the gradient of its whole table.

    By then the micro-batch's backward has run all layers of the first chunk.
    """
    job, batch = step.job, step.job.batch
    others = _but_the_first_chunk(step)
    e, what = element_of(job.recipe), "gradient of the embedding's output, and what the stage received"
    several = 1 if step.rank.has_head else 2
    arrived = ceil_div(several * e * batch.micro_batch_size * batch.seq_len * job.model.hidden_size, job.mesh.cp)
    gradient = Line(Kind.ACTIVATION_GRADIENTS, arrived, what, f"ceil({several}·e·T·h/C)", EMBEDDED)
    table = e * table_of(job)
    whole = Line(Kind.TEMPORARY, table, "gradient of the embedding's table", "e·ceil(V_p·h/p)", EMBEDDED)
    around = *step.in_backward, *step.graphs["embedding"], *step.whole(AT_END), *step.made("end")
    of_text = gradient_without_images(step.rank, job)
    return Moment("backward of the embedding", Phase.BACKWARD, (*around, *others, whole, gradient, *of_text))


def _but_the_first_chunk(step: Step) -> tuple[Line, ...]:
    """Return what layers in flight keep, but the first chunk's of one micro-batch. [bytes]"""
    together = layers_of_a_checkpoint(step.job.recipe)
    return step.waiting_layers(without(step.flying, tuple(ceil_div(count, together) for count in step.rank.each[0])))


def _backward(step: Step) -> Iterator[Moment]:
    """Yield the peak of the backward of the last layer of each kind.

    Full recomputation first runs the whole layer again, selective recomputation only some of its modules.
    """
    rank, recipe = step.rank, step.job.recipe
    around = *step.in_backward, *step.graphs["backward"]
    again = "" if recipe.recompute == "none" else ", recomputed"
    runs = [run for run, count in zip(runs_of(step.job), rank.counts, strict=True) if count]
    together = min(layers_of_a_checkpoint(recipe), max(map(max, rank.each)))
    for run in reversed(runs):
        cost = step.layers.kinds[run.kind].cost
        below = (
            *step.waiting_layers(step.flying, last=run.kind),
            *_run_again_with_it(cost, run.kind, together),
            *_beside_it(cost, run.kind, step.job),
            *step.made(run.kind),
        )
        what = "a layer" if run is runs[-1] else f"a {run.kind} layer"
        yield Moment(f"backward of {what}{again}", Phase.BACKWARD, (*around, *below, *cost.backward))
    if runs and (made := step.made("end")):
        yield _last_backward(step, runs[0].kind, together, (*around, *made), again)


def _last_backward(step: Step, kind: str, together: int, around: tuple[Line, ...], again: str) -> Moment:
    """Return the backward of the layer that runs last, with the gradients of all layers."""
    over = tuple(ceil_div(count, layers_of_a_checkpoint(step.job.recipe)) for count in step.rank.each[0])
    others, cost = step.waiting_layers(without(step.flying, over)), step.layers.kinds[kind].cost
    inside = (
        *_run_again_with_it(cost, kind, together),
        *_beside_it(cost, kind, step.job),
        *cost.backward,
    )
    return Moment(f"backward of the last layer{again}", Phase.BACKWARD, (*around, *others, *inside))


def _run_again_with_it(cost: Cost, kind: str, together: int) -> Iterator[Line]:
    """Yield the activations of a checkpoint's other layers, which it runs again together with this one. [bytes]"""
    if together > 1:
        n_bytes = (together - 1) * total_bytes((*cost.kept, *cost.statistics))
        reason = f"what {together - 1} more layers of the checkpoint keep, run again"
        yield Line(Kind.ACTIVATIONS, n_bytes, reason, f"{together - 1}·W_{kind}", RERUN)


def _beside_it(cost: Cost, kind: str, job: Job) -> Iterator[Line]:
    """Yield what a layer of the next micro-batch takes, whose forward overlaps this layer's backward. [bytes]"""
    if job.recipe.megatron.overlap_moe_expert_parallel_comm:
        others = minimum(1, job.batch.grad_accum_steps - 1)
        kept = total_bytes((*cost.kept, *cost.statistics))
        reason = "what a layer of the next micro-batch keeps, which goes forward beside"
        yield Line(Kind.ACTIVATIONS, others * kept, reason, f"min(1, B-1)·W_{kind}", OVERLAPPED)
        yield from (line._replace(n_bytes=others * line.n_bytes) for line in cost.forward)


def _waiting(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield the head's gradient of a tied table, which stays until the embedding's gradient is added. [bytes]"""
    tied = has_tied_head(job) and not is_frozen(job.model, "head")
    if rank.has_head and rank.at == 0 and tied and not keeps_placeholders(job.recipe):
        reason = "gradient of the tied table by the head, which waits for the embedding's"
        yield Line(Kind.TEMPORARY, element_of(job.recipe) * table_of(job), reason, "e·ceil(V_p·h/p)", HEAD)

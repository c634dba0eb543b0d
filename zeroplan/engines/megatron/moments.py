"""A rank's step, from the embedding to the optimizer, written into a trace: what is alive, and where memory can peak."""

from collections.abc import Iterator

from zeroplan.engines.megatron import inputs, loss, states
from zeroplan.engines.megatron.chunks import layers_of_a_checkpoint, runs_of
from zeroplan.engines.megatron.in_flight import InFlight, in_flight_of, in_layers, without
from zeroplan.engines.megatron.leftover import left_by_graphs, left_by_schedule
from zeroplan.engines.megatron.muon import muon_step
from zeroplan.engines.megatron.parameters import has_tied_head, table_of
from zeroplan.engines.megatron.rank import Rank, kinds_backward
from zeroplan.engines.megatron.sharded import AT_AHEAD, AT_END, AT_HEAD, AT_LAST, AT_LOSS, AT_STEP, Sharding, sharding_of
from zeroplan.ledger import Kind, Line, Phase, total_bytes
from zeroplan.numeric import Int, ceil_div, minimum
from zeroplan.spec.described import Job
from zeroplan.trace import Moments, Trace
from zeroplan.transformer.megatron import Layers, element_of, hidden_bytes, keeps_placeholders
from zeroplan.transformer.params import is_frozen

RERUN = "Megatron-LM 2026-08, megatron/core/transformer/transformer_block.py, TransformerBlock._checkpointed_forward"
OVERLAPPED = (
    "Megatron-LM 2026-08, megatron/core/models/common/model_chunk_schedule_plan.py, TransformerModelChunkSchedulePlan.run"
)

Lines = tuple[Line, ...]


def moments_of(rank: Rank, layers: Layers, job: Job, persistent: Lines) -> Moments:
    """Return the moments of a rank's step, in the order of the step. [bytes]"""
    step = _Step(rank, layers, job)
    step.trace.hold("states", *persistent, *states.buffer_lines(rank, layers, job), *states.rotary_tables(layers, job))
    step.run()
    return Moments(step.trace.finished())


def lasts_of(rank: Rank, job: Job) -> set[int]:
    """Return, for each kind, how many layers run backward before its last layer does."""
    order = kinds_backward(rank, job)
    return {order.index(kind) for kind in order}


class _Step:
    """A step of one rank, at whose moments every layer that can be in flight is."""

    def __init__(self, rank: Rank, layers: Layers, job: Job) -> None:
        self.rank, self.layers, self.job, self.trace = rank, layers, job, Trace()
        self.in_flight, self.sharding = in_flight_of(rank, layers, job), sharding_of(rank, job)
        self.by_schedule, self.by_graphs = left_by_schedule(rank, job), left_by_graphs(rank, job)
        self.order, self.together = kinds_backward(rank, job), layers_of_a_checkpoint(job.recipe)
        self.again = "" if job.recipe.recompute == "none" else ", recomputed"

    def run(self) -> None:
        """Run forward, loss, backward and the optimizer's step."""
        self.forward()
        if self.rank.has_head:
            self.loss()
        self.backward()
        self.optimizer_step()

    def moment(self, name: str, phase: Phase, *lines: Line, of_forward: bool = False) -> None:
        """Write a moment with these lines beside all that is held."""
        self.trace.at(name, phase, of_forward=of_forward)
        self.trace.put("now", *lines)
        self.trace.look()
        self.trace.drop("now")

    # --- what is alive ------------------------------------------------------------------------------------------------------

    def hold_left(self, schedule: str, graphs: str) -> None:
        """Hold the hidden states that the schedule (``Left``) and graphs of dispatchers (``Behind``) still refer to."""
        self.trace.hold("schedule", *self.by_schedule[schedule])
        self.trace.hold("graphs", *self.by_graphs[graphs])

    def whole(self, at: str | int) -> Lines:
        """Return Megatron-FSDP's whole weights and gradients at a point of the step; none without it. [bytes]"""
        return () if self.sharding is None else self.sharding.lines(at)

    def made(self, at: str) -> Lines:
        """Return the gradients in 16 bits that the backward has made. [bytes]"""
        return states.made_lines(at, self.rank, self.job)

    def lines_in_flight(self, in_flight: InFlight, *, last: str | None = None) -> Lines:
        """Return what layers in flight keep. [bytes]"""
        return tuple(in_layers(in_flight, self.layers, self.job, last=last))

    def but(self, over: tuple[Int, ...]) -> Lines:
        """Return the same without ``over`` layers of each kind. [bytes]"""
        return self.lines_in_flight(without(self.in_flight, over))

    @property
    def but_the_first_chunk(self) -> Lines:
        """What layers in flight keep, but the first chunk's of one micro-batch. [bytes]"""
        return self.but(tuple(ceil_div(count, self.together) for count in self.rank.each[0]))

    # --- forward and loss ---------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run the forward with all layers in flight, and with weights gathered ahead."""
        rank, job, trace, sharding, in_flight = self.rank, self.job, self.trace, self.sharding, self.in_flight
        trace.hold(
            "embedded", *inputs.embedded_lines(rank, job), *loss.deferred_lines(rank, job), *inputs.kept_of_images(rank, job)
        )
        trace.hold("masks", *inputs.attention_masks(rank, job))
        trace.hold("pixels", *inputs.held_pixels(rank, job))
        trace.hold("schedule", *self.by_schedule["forward"])
        for name, lines in inputs.forward_of_the_tower(rank, job):
            self.moment(name, Phase.FORWARD, *self.but_the_first_chunk, *lines)
        self.hold_left("forward", "forward")
        running = self.layers.kinds[self.order[0]].cost.forward if self.order else ()
        self.moment("all that is in flight", Phase.FORWARD, *self.whole(AT_LAST), *self.lines_in_flight(in_flight), *running)
        if sharding is not None and sharding.gathers:
            unread = tuple(minimum(sharding.unread(), count) for count in in_flight.counts[-1:])
            ahead = self.but((*[0] * (len(in_flight.counts) - 1), *unread))
            self.moment("forward, with weights ahead", Phase.FORWARD, *self.whole(AT_AHEAD), *ahead, *running)

    def loss(self) -> None:
        """Run the loss, its backward and the head's."""
        rank, job, trace = self.rank, self.job, self.trace
        head, gathered = loss.head_lines(job), self.whole(AT_LOSS)
        trace.hold("layers", *self.lines_in_flight(in_flight_of(rank, self.layers, job, loss=True)), *loss.other_losses(job))
        self.hold_left("loss", "loss")
        self.moment("loss", Phase.LOSS, *gathered, *head, *loss.each_token(rank, job), of_forward=True)
        self.end_masks()
        self.hold_left("head", "loss")
        self.moment("backward of the loss", Phase.BACKWARD, *gathered, head[0], *loss.logits_of_loss(job))
        grown, placeholders = tuple(loss.head_backward(job)), keeps_placeholders(job.recipe)
        written = (*(self.whole(AT_HEAD) if placeholders else gathered), *self.made("head"))
        self.moment("backward of the head", Phase.BACKWARD, *written, head[0], *grown)
        if self.sharding is not None and not placeholders and not job.model.tie_word_embeddings:
            self.moment("gradient of the head, copied", Phase.BACKWARD, *self.whole(AT_HEAD), head[0], *grown[1:])

    def end_masks(self) -> None:
        """Free the attention masks, unless autograd has saved them."""
        if not inputs.saves_mask(self.job.recipe):
            self.trace.drop("masks")

    # --- backward -----------------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Run the layers, then the embedding."""
        rank, job, trace = self.rank, self.job, self.trace
        trace.drop("layers", "pixels")
        self.end_masks()
        self.hold_left("backward", "backward")
        trace.hold("tied", *self.waiting())
        if self.sharding is None:
            self.backward_of_layers()
        else:
            self.backward_of_shards(self.sharding)
        if rank.at == 0 and not is_frozen(job.model, "embedding"):
            self.backward_of_the_embedding()

    def backward_of_layers(self) -> None:
        """Run the last layer of each kind; and the last layer of all, where gradients of all layers are counted.

        Full recomputation first runs the whole layer again, selective recomputation only some of its modules.
        """
        runs = [run for run, count in zip(runs_of(self.job), self.rank.counts, strict=True) if count]
        for run in reversed(runs):
            what = "a layer" if run is runs[-1] else f"a {run.kind} layer"
            self.backward_of_layer(what, run.kind, self.lines_in_flight(self.in_flight, last=run.kind), self.made(run.kind))
        if runs and (made := self.made("end")):
            self.backward_of_layer("the last layer", runs[0].kind, self.but_the_first_chunk, made)

    def backward_of_layer(self, what: str, kind: str, others: Lines, made: Lines) -> None:
        """Run a layer, beside what the ``others`` in flight keep and the gradients ``made``."""
        together = min(self.together, max(map(max, self.rank.each)))
        beside = (*others, *self.run_again_with_it(kind, together), *self.beside_it(kind), *made)
        self.moment(f"backward of {what}{self.again}", Phase.BACKWARD, *beside, *self.layers.kinds[kind].cost.backward)

    def backward_of_shards(self, sharding: Sharding) -> None:
        """Run the layers under Megatron-FSDP.

        Layers whose backward has run may still have whole gradients. Layers before them may already have gathered weights.
        """
        for behind in sharding.backwards(lasts_of(self.rank, self.job), self.together):
            kind, what = self.order[behind], f"a layer behind {behind}" if behind else "a layer"
            over = tuple(ceil_div(self.order[: behind + 1].count(run.kind), self.together) for run in runs_of(self.job))
            others, cost, whole = (*self.made("end"), *self.but(over)), self.layers.kinds[kind].cost, sharding.lines(behind)
            again = tuple(self.run_again_with_it(kind, min(self.together, len(self.order))))
            name, inside = f"backward of {what}{self.again}", cost.backward
            if sharding.gathers and cost.after_experts:
                in_experts = (*sharding.lines_in_experts(behind), *others, *again, *cost.backward)
                self.moment(f"backward of the experts of {what}{self.again}", Phase.BACKWARD, *in_experts)
                inside = cost.after_experts
            self.moment(name, Phase.BACKWARD, *whole, *others, *again, *inside)
            self.moment(f"reduction of {what}", Phase.BACKWARD, *whole, *others, sharding.share(behind))

    def backward_of_the_embedding(self) -> None:
        """Make the gradient of the embedding's whole table, after the backward of all layers of the first chunk."""
        job, several = self.job, 1 if self.rank.has_head else 2
        arrived = ceil_div(several * hidden_bytes(job), job.mesh.cp)
        reason, formula = "gradient of the embedding's output, and what the stage received", f"ceil({several}·e·T·h/C)"
        gradient = Line(Kind.ACTIVATION_GRADIENTS, arrived, reason, formula, inputs.EMBEDDED)
        whole = self.of_table("gradient of the embedding's table", inputs.EMBEDDED)
        self.hold_left("backward", "embedding")
        beside = (*self.but_the_first_chunk, *self.whole(AT_END), *self.made("end"))
        of_text = inputs.gradient_without_images(self.rank, job)
        self.moment("backward of the embedding", Phase.BACKWARD, *beside, whole, gradient, *of_text)

    def of_table(self, reason: str, source: str) -> Line:
        """Return a gradient of the embedding's table. [bytes]"""
        n_bytes = element_of(self.job.recipe) * table_of(self.job)
        return Line(Kind.TEMPORARY, n_bytes, reason, "e·ceil(V_p·h/p)", source)

    def waiting(self) -> Iterator[Line]:
        """Yield the head's gradient of a tied table, which stays until the embedding's gradient is added. [bytes]"""
        rank, job = self.rank, self.job
        tied = has_tied_head(job) and not is_frozen(job.model, "head")
        if rank.has_head and rank.at == 0 and tied and not keeps_placeholders(job.recipe):
            yield self.of_table("gradient of the tied table by the head, which waits for the embedding's", loss.HEAD)

    def run_again_with_it(self, kind: str, together: int) -> Iterator[Line]:
        """Yield the activations of a checkpoint's other layers, which it runs again together with this one. [bytes]"""
        if together > 1:
            n_bytes = (together - 1) * self.kept_by(kind)
            reason = f"what {together - 1} more layers of the checkpoint keep, run again"
            yield Line(Kind.ACTIVATIONS, n_bytes, reason, f"{together - 1}·W_{kind}", RERUN)

    def beside_it(self, kind: str) -> Iterator[Line]:
        """Yield what a layer of the next micro-batch takes, whose forward overlaps this layer's backward. [bytes]"""
        if self.job.recipe.megatron.overlap_moe_expert_parallel_comm:
            others = minimum(1, self.job.batch.grad_accum_steps - 1)
            reason = "what a layer of the next micro-batch keeps, which goes forward beside"
            yield Line(Kind.ACTIVATIONS, others * self.kept_by(kind), reason, f"min(1, B-1)·W_{kind}", OVERLAPPED)
            yield from (line._replace(n_bytes=others * line.n_bytes) for line in self.layers.kinds[kind].cost.forward)

    def kept_by(self, kind: str) -> Int:
        """Return what a layer of a kind keeps if it is not recomputed whole. [bytes]"""
        cost = self.layers.kinds[kind].cost
        return total_bytes((*cost.kept, *cost.statistics))

    # --- the step -----------------------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Run the optimizer's step, after the backward has freed the batch and all that it needed."""
        rank, job = self.rank, self.job
        self.trace.drop("embedded", "deferred", "masks", "tied")
        self.hold_left("step", "step")
        own = (muon_step(job),) if job.recipe.optimizer == "muon" else states.step_lines(rank, job)
        self.moment("optimizer step", Phase.STEP, *self.whole(AT_STEP), *own, *states.copied_back(rank, job))

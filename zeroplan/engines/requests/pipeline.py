"""The training step of a pipeline's rank, request by request: FSDP2's own step of each of its stages, in a schedule's order.

Source: torch 2.13, torch/distributed/pipelining (schedules.py and stage.py).
"""

from collections.abc import Hashable, Iterable
from typing import Any

from zeroplan.engines.block_runs import recompute_of
from zeroplan.engines.optimizers import LocalTensor, implementation_of
from zeroplan.engines.pipeline import arranged, cut_lines, received_lines
from zeroplan.engines.pipeline.order import interleaved
from zeroplan.engines.pipeline.stage import StagePlan, layers_of, stage_plans
from zeroplan.engines.pipeline.tensor import whole_embedding
from zeroplan.engines.pipeline.traffic import SEND
from zeroplan.engines.precisions import widths
from zeroplan.engines.requests import fsdp2
from zeroplan.engines.requests.fsdp2_units import Unit
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ENDING
from zeroplan.engines.requests.optimizer import Update
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.batch import Batch
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import SINGLE
from zeroplan.transformer.families.requested import Instruction, Sized, block_requests
from zeroplan.transformer.families.tape import Do

_OF_A_PASS = frozenset({"hidden", "gradient"})
_NAMED = frozenset({"tables", "by name", "batch", "cached", "tied", "output", "rotations"})
_TWO = 2
"""Ranks of a send."""
_RECEIVED: Hashable = ("received",)
"""What lies in a receive buffer, which nobody requests."""


class Held(dict[Hashable, list[int]]):
    """What a micro-batch holds in a stage, beside what the stage itself does."""

    def __init__(self, of_stage: dict[Hashable, list[int]]) -> None:
        """Begin with nothing of its own."""
        super().__init__()
        self.of_stage = of_stage

    def _own(self, key: Hashable) -> bool:
        if isinstance(key, tuple):
            return isinstance(key[0], int) or key[0] in _OF_A_PASS
        return key in _NAMED

    def __contains__(self, key: object) -> bool:
        """Whether it is held, here or by the stage."""
        return super().__contains__(key) or key in self.of_stage

    def get(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401  as dict has it
        """What a key holds."""
        return super().get(key, default) if self._own(key) else self.of_stage.get(key, default)

    def setdefault(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401  as dict has it
        """The same, begun where there is nothing."""
        return super().setdefault(key, default) if self._own(key) else self.of_stage.setdefault(key, default)

    def pop(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401  as dict has it
        """What a key held."""
        return super().pop(key, default) if self._own(key) else self.of_stage.pop(key, default)


class StageStep(fsdp2.Step):
    """A stage of the rank: micro-batches go through it in turns, and its gradients are reduced when all have."""

    def __init__(self, stage: StagePlan, model: ModelSpec, mesh: Mesh, batch: Batch, log: Log) -> None:
        """Take the stage's plan, and its layers as a model."""
        super().__init__(model, mesh, stage.plan, batch, log)
        self.stage = stage.stage
        self.of_stage: dict[Hashable, list[int]] = {}
        self.flying: dict[int, Held] = {}
        """What each micro-batch holds between its forward and its backward."""
        self.given = None if self.stage.is_last else self._given(model, batch)
        self.reducing = False

    def _given(self, model: ModelSpec, batch: Batch) -> Sized:
        """The last block's program, whose gradient another rank sends."""
        run, compute = self.tree.runs[self.order[-1]], self.compute
        if run.plain:
            compute = compute._replace(recompute="none")
        return block_requests(model, run.kind, compute, batch, recompute_of(run, compute), received=True)

    def program(self, layer: int) -> Sized:
        """A layer's program."""
        is_last = layer == len(self.order) - 1
        return self.given if is_last and self.given is not None else super().program(layer)

    # --- passes -------------------------------------------------------------------------------------------------------------

    def forward_of(self, micro_batch: int) -> None:
        """A micro-batch goes forward; what the stage returns is held as its output."""
        self.log.held = self.flying[micro_batch] = Held(self.of_stage)
        self.forward()
        self.log.release("parked")

    def backward_of(self, micro_batch: int) -> None:
        """It goes backward. Its output is the schedule's, and the gradient of its input."""
        self.log.held = self.flying.pop(micro_batch)
        self.log.rename("output", ("output of", micro_batch))
        self.backward()
        if self.flow is not None and not self.stage.is_first:
            self.log.rename(self.flow, ("sent", micro_batch))
            self.log.call(SEND, self._hidden_bytes, _TWO)

    def output_of(self, micro_batch: int) -> None:
        """The schedule lets go of an output."""
        self.log.held = self.of_stage
        self.log.release(("output of", micro_batch))
        if micro_batch in self.flying:
            self.log.held = self.flying[micro_batch]
            self.log.release("output")

    def sent(self, micro_batch: int) -> None:
        """A send lets go of the gradient of an input."""
        self.log.held = self.of_stage
        self.log.release(("sent", micro_batch))

    def unshard_all(self) -> None:
        """``_add_unshard_reshard``: all units are gathered before the step's first pass."""
        self.log.held = self.of_stage
        for unit in (*self.outside, *self.units):
            for group in unit.groups:
                self.all_gather(group)

    def wait_for_all(self) -> None:
        """They are copied out before the stage's first pass."""
        self.log.held = self.of_stage
        for unit in (*self.outside, *self.units):
            for group in () if self.is_unsharded(unit) else unit.groups:
                self.copy_out(group)
                self.log.release(("gathered", group.key))

    def reduce(self) -> None:
        """``perform_reduce_grad``: the root unit, the blocks, then a unit of the head."""
        self.log.held, self.reducing = self.of_stage, True
        self.log.begin(self.step, Phase.BACKWARD)
        root, *head = self.outside
        self._take_share()
        for unit in (root, *self.units, *head):
            self.post_backward(unit)
        self.log.release(*self.reduce_inputs, "all-reduced")
        self.reduce_inputs, self.reducing = [], False

    def _take_share(self) -> None:
        """``_get_grad_inner_tensor``: of the gradient of a whole embedding that ranks split."""
        plan, log = self.plan, self.log
        if plan.at_embedding is None:
            return
        key = "whole", self.outside[0].groups[0].key
        share, whole = plan.embedding_elements, plan.embedding_elements + whole_embedding(plan)
        log.request(key, plan.reduce_bytes * share, Kind.UNSHARDED_GRADIENTS, "this rank's share of the embedding's gradient")
        log.part(key, plan.reduce_bytes * whole, "gone")
        log.release("gone")

    def drop_gradients(self) -> None:
        """``zero_grad``."""
        self.log.held = self.of_stage
        self.log.release(*(("shard", group.key) for unit in self.every_unit for group in unit.groups))

    # --- forward ------------------------------------------------------------------------------------------------------------

    def take_batch(self) -> None:
        """Ids of all micro-batches are there already; positions are made in every pass."""
        kept = [line for line in self.plan.head.shared if line not in self.plan.head.with_blocks]
        self._lines("tables", kept)

    def embed(self) -> None:
        """Other stages' input is in a receive buffer."""
        if self.stage.is_first:
            super().embed()

    def ending_forward(self) -> None:
        """The last stage's head makes logits, of which the schedule asks for the loss; others return hidden states."""
        log = self.log
        if self.stage.is_last:
            super().ending_forward()
            self._keep_output()
            return
        log.layer = ENDING
        log.release("by name", *((("hidden", -1),) if self.head.first_input else ()))
        log.rename(("hidden", len(self.order) - 1), "output")
        log.call(SEND, self._hidden_bytes, _TWO)

    def _keep_output(self) -> None:
        """Logits, or hidden states of which the loss comes in chunks."""
        if self.recipe.loss == "chunked":
            self.log.request("output", self._hidden_bytes, Kind.ACTIVATIONS, "output of the last stage")
        elif not self.recipe.keep_logits:
            self._lines("output", self.head.output)

    def before_ending(self) -> None:
        """A unit of norm and head is gathered."""
        if self.ends_apart:
            self.unshard(self.outside[-1])

    def _do(self, layer: int, one: Instruction, ends: dict[int, Hashable], *, forward: bool) -> None:
        """The root's forward ends with the logits, before the loss."""
        is_of_loss = forward and layer == ENDING and one.do is Do.REQUEST and one.kind is Kind.LOGITS
        if is_of_loss and one.reason != "logits":
            self.log.release("parked")
        super()._do(layer, one, ends, forward=forward)

    # --- backward -----------------------------------------------------------------------------------------------------------

    def ending_backward(self) -> None:
        """Loss, head and norm in the last stage; elsewhere the root's hook gathers the last block ahead."""
        if self.stage.is_last:
            super().ending_backward()
            return
        self.flow = _RECEIVED
        self._gather_last_block()

    def before_ending_backward(self) -> None:
        """The loss is not in any unit."""

    def before_head_backward(self) -> None:
        """The hook of the root, or of the head's unit, gathers what ran before it."""
        self._gather_last_block()

    def _gather_last_block(self) -> None:
        last = self.units[-1]
        if self.plan.reshard is not False and not self.is_unsharded(last):
            for group in reversed(last.groups) if self.ends_apart else last.groups[-1:]:
                self.all_gather(group)

    def below_backward(self) -> None:
        """The first stage's embedding."""
        if self.stage.is_first:
            super().below_backward()

    def embedding_gradients(self) -> None:
        """That of an embedding which ranks split is a whole one, until it is reduced."""
        at = self.plan.at_embedding
        if at is None:
            super().embedding_gradients()
            return
        self._lines("by rank", (at.by_rank,))
        self._lines("gathered gradient", (at.gathered,))
        self.log.release("by rank", self.flow)
        self.make_gradient(self.plan.embedding_elements + whole_embedding(self.plan))
        self.log.release("gathered gradient")

    def post_backward(self, unit: Unit) -> None:
        """Gradients stay whole, and units unsharded, until all micro-batches are through."""
        if self.reducing:
            super().post_backward(unit)
            return
        for group in reversed(unit.groups):
            self.keep_whole(group, self.made.pop(group.key, []))

    def after_backward(self) -> None:
        """The root unit's gradients come to those of earlier micro-batches."""
        self.post_backward(self.outside[0])


class RankStep:
    """A rank of a pipeline: its stages, and the schedule."""

    def __init__(self, job: JobSpec, rank: int, log: Log) -> None:
        """Cut the model, and take the rank's stages."""
        here = arranged(job.model, job.recipe, job.mesh)
        batch = here.local(job.batch)
        mine = tuple(here.stages[at] for at in here.indices(rank))
        self.plans = stage_plans(here.model, here.recipe, job.mesh, batch, mine)
        models = [layers_of(here.model, stage, tp=int(job.mesh.tp), ep=int(job.mesh.ep))[0] for stage in mine]
        self.stages = [StageStep(*one, job.mesh, batch, log) for one in zip(self.plans, models, strict=True)]
        self.place, self.log, self.mesh, self.batch = here.place(rank, int(batch.grad_accum_steps)), log, job.mesh, batch
        self.count = int(batch.grad_accum_steps)
        self.of_rank = log.held

    def begin(self) -> list[LocalTensor]:
        """What is there from the first step to the last, and what the optimizer updates."""
        tensors: list[LocalTensor] = []
        for stage in self.stages:
            self.log.held = stage.of_stage
            tensors += stage.begin()
        self.log.held = self.of_rank
        for line in received_lines(self.plans, self.mesh, self.batch):
            self.log.request("received", int(line.n_bytes), line.kind, line.reason)
        return tensors

    def passes(self, step: int) -> None:
        """All passes of a step."""
        for stage in self.stages:
            stage.step = step
        for line in cut_lines(self.plans, self.mesh, self.batch):
            self.log.held = self.of_rank
            self.log.request("cut", int(line.n_bytes), line.kind, line.reason)
        schedules = {"gpipe": self._gpipe, "1f1b": self._one_forward_one_backward}
        (schedules[self.place.schedule] if self.place.schedule in SINGLE else self._interleaved)()
        for stage in self.stages:
            for at in range(self.count):
                stage.output_of(at)
                stage.sent(at)
        self.log.held = self.of_rank
        self.log.release("cut")

    def _gpipe(self) -> None:
        """All forwards, then all backwards. Sends hold what they send until the step ends."""
        (stage,), last = self.stages, self.count - 1
        for at in range(self.count):
            stage.forward_of(at)
        for at in range(self.count):
            stage.backward_of(at)
            if stage.stage.is_last and at != last:
                stage.output_of(at)
        stage.reduce()

    def _one_forward_one_backward(self) -> None:
        """Follow the variables of ``Schedule1F1B``: which outputs and gradients the last sends still hold."""
        (stage,), ahead = self.stages, min(self.count, self.place.pp - self.place.rank)
        held, done = _Outputs(stage), 0
        for at in range(self.count + ahead):
            if at < self.count:
                stage.forward_of(at)
                held.made(at, waits=at < ahead - 1)
            if at < ahead - 1 or done == self.count:
                continue
            if at >= self.count:
                held.hold(in_work=set())
            stage.backward_of(done)
            stage.sent(done - 1)
            held.cached.discard(done)
            held.hold()
            done += 1
        held.hold(in_work=set())
        stage.reduce()

    def _interleaved(self) -> None:
        """A stage's gradients are reduced right after its last backward; sends hold what they send until the step ends."""
        place = self.place
        for stage in self.stages:
            stage.unshard_all()
        order = interleaved(rank=place.rank, pp=place.pp, chunks=place.chunks, micro_batches=place.micro_batches)
        for kind, chunk, at in order:
            stage = self.stages[chunk]
            if kind == "forward":
                if not at:
                    stage.wait_for_all()
                stage.forward_of(at)
                continue
            stage.backward_of(at)
            if stage.stage.is_last:
                stage.output_of(at)
            if at == self.count - 1:
                stage.reduce()

    def end_step(self) -> None:
        """``zero_grad``."""
        for stage in self.stages:
            stage.drop_gradients()


class _Outputs:
    """Whose outputs ``Schedule1F1B`` refers to."""

    def __init__(self, stage: StageStep) -> None:
        """None, yet."""
        self.stage, self.alive = stage, set[int]()
        self.cached, self.named, self.to_send, self.in_work = set[int](), set[int](), set[int](), set[int]()

    def made(self, at: int, *, waits: bool) -> None:
        """A forward has made one."""
        self.alive.add(at)
        self.cached.add(at)
        self.named = {at}
        self.to_send = set() if self.stage.stage.is_last else {at}
        self.hold(in_work=self.to_send if waits else self.in_work)

    def hold(self, in_work: Iterable[int] | None = None) -> None:
        """Let go of those that nothing refers to; ``in_work`` are those of a send that is waited for later."""
        self.in_work = self.in_work if in_work is None else set(in_work)
        for at in sorted(self.alive - self.cached - self.named - self.to_send - self.in_work):
            self.stage.output_of(at)
            self.alive.discard(at)


def requests(job: JobSpec, steps: int, rank: int) -> Log:
    """What the first GPU of a pipeline's rank requests and releases from before the first step on."""
    log = Log()
    log.begin(-1, Phase.INIT)
    one, width = RankStep(job, rank, log), widths(job.recipe.precision)
    update = Update(job.recipe.optimizer, implementation_of(job.recipe), width.stored)
    tensors = one.begin()
    update.begin(log, tensors)
    for step in range(steps):
        one.passes(step)
        log.held = one.of_rank
        log.begin(step, Phase.STEP)
        update.step(log, tensors)
        one.end_step()
    return log

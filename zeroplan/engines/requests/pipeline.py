"""The training step of a pipeline's rank, request by request: passes through its stages, in a schedule's order.

Source: torch 2.13, torch/distributed/pipelining/schedules.py.
"""

from collections.abc import Iterable

from zeroplan.engines.optimizers import LocalTensor, implementation_of
from zeroplan.engines.pipeline import arranged, cut_lines, received_lines
from zeroplan.engines.pipeline.halves_walk import goes_by_hand, order_of
from zeroplan.engines.pipeline.order import interleaved
from zeroplan.engines.pipeline.stage import layers_of, stage_plans
from zeroplan.engines.precisions import widths
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.optimizer import Update
from zeroplan.engines.requests.pipeline_stage import StageStep
from zeroplan.ledger import Phase
from zeroplan.spec.job import JobSpec
from zeroplan.spec.pipeline import SPLIT


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
        for chunk, stage in enumerate(self.stages):
            stage.sends_up, stage.sends_down = (not goes_by_hand(self.place, at) for at in (chunk, chunk - 1))
        self.of_rank = log.held

    def begin(self) -> list[LocalTensor]:
        """What is there from the first step to the last, and what the optimizer updates."""
        tensors: list[LocalTensor] = []
        for stage in self.stages:
            self.log.held = stage.of_stage
            tensors += stage.request_shards()
        self.log.held = self.of_rank
        buffers, *tokens = received_lines(self.plans, self.mesh, self.batch)
        each = int(self.plans[0].hidden_bytes)
        for _ in range(int(buffers.n_bytes) // each):
            self.log.request("received", each, buffers.kind, "receive buffer")
        for line in tokens:
            self.log.request("received", int(line.n_bytes), line.kind, line.reason)
        return tensors

    def passes(self, step: int) -> None:
        """All passes of a step."""
        for stage in self.stages:
            stage.step = step
        for line in cut_lines(self.plans, self.mesh, self.batch):
            self.log.held = self.of_rank
            self.log.request("cut", int(line.n_bytes), line.kind, line.reason)
        schedules = {"gpipe": self._gpipe, "1f1b": self._one_forward_one_backward, "interleaved-1f1b": self._interleaved}
        splits = self.place.schedule in SPLIT
        self._let_go(sent=splits)
        schedules.get(self.place.schedule, self._in_halves)()
        self._let_go(outputs=True, sent=not splits)
        self.log.held = self.of_rank
        self.log.release("cut")

    def _let_go(self, *, outputs: bool = False, sent: bool = False) -> None:
        """Sends end; a first half leaves the gradient of its input on what was received, until the next step begins."""
        for stage in self.stages:
            for at in range(self.count):
                if outputs:
                    stage.output_of(at)
                if sent:
                    stage.sent(at)

    def _in_halves(self) -> None:
        """What a rank hands to its own next stage counts as what that has received."""
        takes = {"forward": self._forward_half, "input": self._first_half, "weights": self._second_half}
        for stage in self.stages:
            stage.unshard_all()
        for kind, chunk, at in order_of(self.place):
            takes[kind](self.stages[chunk], at)

    def _forward_half(self, stage: StageStep, at: int) -> None:
        if not at:
            stage.wait_for_all()
        stage.forward_of(at)
        if not stage.sends_up:
            stage.output_of(at)

    def _first_half(self, stage: StageStep, at: int) -> None:
        """The first stage of all has no input to make a gradient for: its second half is a whole backward."""
        if stage.stage.is_first:
            return
        stage.input_of(at)
        if stage.stage.is_last:
            stage.output_of(at)
        if not stage.sends_down:
            stage.sent(at)

    def _second_half(self, stage: StageStep, at: int) -> None:
        (stage.backward_of if stage.stage.is_first else stage.weights_of)(at)
        if at == self.count - 1:
            stage.reduce()

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

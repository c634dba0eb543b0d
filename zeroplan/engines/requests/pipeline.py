"""The training step of a pipeline's rank, request by request: passes through its stages, in a schedule's order.

Source: torch 2.13, torch/distributed/pipelining/schedules.py.
"""

from zeroplan.engines.optimizers import LocalTensor, implementation_of
from zeroplan.engines.pipeline import arranged, cut_lines, received_lines
from zeroplan.engines.pipeline.schedule import Passes
from zeroplan.engines.pipeline.stage import layers_of, stage_plans
from zeroplan.engines.precisions import widths
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.optimizer import Update
from zeroplan.engines.requests.pipeline_stage import StageStep
from zeroplan.ledger import Phase
from zeroplan.spec.job import JobSpec


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
        place = here.place(rank, int(batch.grad_accum_steps))
        self.schedule, self.log, self.mesh, self.batch = Passes(place, self.stages), log, job.mesh, batch
        for chunk, stage in enumerate(self.stages):
            stage.sends_up, stage.sends_down = (not place.goes_by_hand(at) for at in (chunk, chunk - 1))
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
        self.schedule.run()
        self.log.held = self.of_rank
        self.log.release("cut")

    def end_step(self) -> None:
        """``zero_grad``."""
        for stage in self.stages:
            stage.drop_gradients()


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

"""Micro-batches of an engine whose parameters are whole on every rank: gradients come to their parameters one by one."""

from collections import defaultdict
from collections.abc import Hashable

from zeroplan.engines.collecting import GradientPlan
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ENDING, ModelPass, is_final_norm
from zeroplan.engines.rows import Placed, numel
from zeroplan.spec.job import JobSpec


class WholePass(ModelPass):
    """A rank's micro-batches; the engine's program (:mod:`zeroplan.engines.collecting`) says what becomes of gradients."""

    def __init__(self, job: JobSpec, log: Log, plan: GradientPlan) -> None:
        """Take the job, and what the engine does with gradients."""
        super().__init__(job.model, job.recipe, job.batch, log)
        self.ranks, self.whole = int(job.mesh.dp_shard), plan.whole
        self.gradients = plan.program(log, self.ranks)
        self.of_block: dict[int, list[Placed]] = defaultdict(list)
        for each in reversed(self.whole.executed):
            self.of_block[len(self.order) if each.block < 0 and is_final_norm(each.parameter) else each.block].append(each)
        self.waiting: dict[int, list[Placed]] = {}

    def before_forward(self) -> None:
        """No gradient has come yet."""
        self.waiting = {block: list(placed) for block, placed in self.of_block.items()}

    def arrived(self, gradients: list[Hashable]) -> None:
        """Each gradient comes to its parameter."""
        self.gradients.last = self.last
        for one in gradients:
            self.gradients.arrived(self._whose(self.log.bytes_of(one) // self.gradient_width), one)

    def _whose(self, elements: int) -> Placed:
        layer = self.log.layer
        waiting = self.waiting[len(self.order) if layer == ENDING else layer]
        return waiting.pop(next(at for at, each in enumerate(waiting) if numel(each) == elements))

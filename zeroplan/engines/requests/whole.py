"""Micro-batches of engines that receive gradients parameter by parameter: DDP and DeepSpeed."""

from collections import defaultdict
from collections.abc import Hashable
from typing import cast

from zeroplan.engines.collecting import GradientPlan
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ENDING, ModelPass
from zeroplan.engines.rows import Placed, Row, numel
from zeroplan.spec.job import JobSpec


class OneByOne(ModelPass):
    """A rank's micro-batches, in which the engine needs to know each gradient's parameter."""

    def __init__(self, job: JobSpec, log: Log, whole: Row) -> None:
        super().__init__(job.model, job.recipe, job.batch, log)
        self.ranks, self.whole = int(job.mesh.dp_shard), whole
        self.of_block: dict[int, list[Placed]] = defaultdict(list)
        for each in reversed(whole.executed):
            self.of_block[each.block].append(each)
        self.order_of = {each.start: at for at, each in enumerate(reversed(whole.executed))}
        """The place of each parameter in the order in which gradients reach their weights, by its start in the row."""
        self.waiting: dict[int, list[Placed]] = {}

    def before_forward(self) -> None:
        """Begin with all gradients outstanding."""
        self.waiting = {block: list(placed) for block, placed in self.of_block.items()}

    @property
    def block(self) -> int:
        """The block that runs, in the row's numbering."""
        return len(self.order) if self.log.layer == ENDING else self.log.layer

    def whose(self, gradient: Hashable) -> Placed:
        """Return the parameter of an arriving gradient."""
        elements, waiting = self.log.bytes_of(gradient) // self.gradient_width, self.waiting[self.block]
        return waiting.pop(next(at for at, each in enumerate(waiting) if numel(each) == elements))

    def in_order(self, gradients: list[Hashable]) -> list[tuple[Placed, Hashable]]:
        """Return gradients that one operator made, with their parameters, in the order in which they reach their weights.

        A matrix product makes the weight's gradient first, but the bias's reaches its weight first.
        """
        return sorted([(self.whose(one), one) for one in gradients], key=lambda each: self.order_of[each[0].start])


class WholePass(OneByOne):
    """Micro-batches of engines whose parameters are whole on every rank.

    The engine's program (:mod:`zeroplan.engines.collecting`) handles the gradients.
    """

    def __init__(self, job: JobSpec, log: Log, plan: GradientPlan) -> None:
        super().__init__(job, log, plan.whole)
        self.gradients = plan.program(log, self.ranks)

    def kind_of(self, micro: int) -> Hashable:
        """Only gradients of earlier micro-batches make a difference."""
        return micro > 0, self.last

    @property
    def state(self) -> dict[int, Hashable]:
        """The gradients that stay."""
        return dict(self.gradients.made)

    def after_repeat(self, state: object) -> None:
        """Keep the same gradients."""
        self.gradients.made = dict(cast("dict[int, Hashable]", state))

    def arrived(self, gradients: list[Hashable]) -> None:
        """Give each gradient to its parameter."""
        self.gradients.last = self.last
        for placed, one in self.in_order(gradients):
            self.gradients.arrived(placed, one)

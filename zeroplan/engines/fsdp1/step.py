"""The training step of a rank under FSDP1: that of FSDP2, where flat parameters take the place of its groups.

It runs the last micro-batch of a step, with what earlier ones have left.
"""

from zeroplan.engines.fsdp1.flat import FlatPlan
from zeroplan.engines.fsdp1.runtime import FlatRuntime, joined_last, made_gradients
from zeroplan.engines.fsdp2 import buffers, outside
from zeroplan.engines.fsdp2.runtime import Unit, Units
from zeroplan.engines.fsdp2.step import MicroBatch
from zeroplan.engines.positions import Position
from zeroplan.ledger import Line, Moment, Phase
from zeroplan.trace import Moments, Trace, entry_of
from zeroplan.transformer.blocks import BackwardPoint


def moments(plan: FlatPlan, step: tuple[Line, ...]) -> Moments:
    """Every moment at which memory can be highest; ``step`` is what is alive in the optimizer's step. [bytes]"""
    trace = Trace()
    one = FlatMicroBatch(plan, trace, Units(plan))
    one.forward()
    one.loss()
    one.backward_of_the_ending()
    one.blocks_backward()
    one.end_of_backward()
    at_the_end = (*not_reduced(plan), Moment("optimizer step", Phase.STEP, step))
    return Moments((*trace.finished(), *map(entry_of, at_the_end)))


class FlatMicroBatch(MicroBatch):
    """A micro-batch on its way through the model and back."""

    def __init__(self, plan: FlatPlan, trace: Trace, units: Units) -> None:
        """Take the units of the plan."""
        super().__init__(plan, trace, units)
        in_order = (self.root, *(unit for _, unit in self.layers))
        following = {unit.name: after for unit, after in zip(in_order, in_order[1:], strict=False)}
        self.flat, self.run = plan, FlatRuntime(plan, trace, units.made, following)
        self._pending: Unit | None = None

    def _gather_last_block(self, point: BackwardPoint) -> None:
        """The root's hook prefetches the last block, before the loss goes backward."""
        self.trace.hold("entering", *point.before)
        super()._gather_last_block(point)
        self.trace.drop("entering")

    def gradients_so_far(self, position: Position) -> None:
        """Hold the shards that the blocks above have left, and what earlier micro-batches left of the others."""
        own = tuple(count + (run == position.run) for run, count in enumerate(position.before))
        self.trace.shrink("shards", self.plan.gradient_shards(position.after, "reduced so far"))
        self.trace.shrink("left", *self.plan.left_behind(own, self.left))

    def end_block(self, position: Position, unit: Unit) -> None:
        """A block has gone backward: its gradients are joined and reduced.

        Autograd takes up the latest operator of the forward first. That which splits a prefetched unit's flat parameter is earlier
        than the block that ran meanwhile, so its gradients wait until that block has gone backward, too.
        """
        self.trace.put("made", *made_gradients(self.plan, unit.parts.trained_group))
        if not self.flat.options.forward_prefetch:
            super().end_block(position, unit)
            return
        self.trace.rename("made", ("made", unit.name))
        waiting, self._pending = self._pending, unit
        if waiting is not None:
            super().end_block(position, waiting)

    def end_of_backward(self) -> None:
        """The embedding's gradient, then the root is reduced."""
        plan, trace = self.plan, self.trace
        trace.drop("kept", "still unsharded")
        trace.shrink("shards", plan.gradient_shards(plan.every_layer, "reduced so far"))
        trace.shrink("left", *plan.left_behind(tuple(0 for _ in plan.blocks), self.left))
        trace.shrink("shared", *outside.shared_at_embedding(plan))
        outside.backward_of_the_embedding(plan, trace)
        trace.drop("left")
        if self._pending is not None:
            self.run.post_backward(self._pending)
        trace.rename("root gradients", "made")
        self.run.post_backward(self.root)


def not_reduced(plan: FlatPlan) -> tuple[Moment, ...]:
    """The end of a backward under ``no_sync`` that is not the step's last: the root's gradients are joined."""
    if plan.recipe.sync_every_micro_batch:
        return ()
    root, unsharded = plan.trained_root, buffers.outside_unsharded(plan)
    (flat,), (made,), (blocks,) = joined_last(plan, root), made_gradients(plan, root), plan.left_behind(plan.every_layer)
    flat = flat._replace(n_bytes=flat.n_bytes * (1 + plan.twice), formula=f"(1+M_2)·{flat.formula}")
    alive = (*plan.persistent, *unsharded, *buffers.still_unsharded(plan, plan.every_layer), blocks, made, flat)
    return (Moment("joining the root's gradients, not to be reduced yet", Phase.BACKWARD, alive),)

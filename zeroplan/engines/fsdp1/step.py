"""A rank's training step under FSDP1: FSDP2's step, with flat parameters instead of its groups.

It runs the last micro-batch of a step, with the gradients of earlier ones.
"""

from collections.abc import Iterator
from itertools import pairwise

from zeroplan.engines.fsdp1.flat import EarlierPlan, FlatPlan
from zeroplan.engines.fsdp1.runtime import FlatRuntime, made_gradients
from zeroplan.engines.fsdp2 import buffers, outside
from zeroplan.engines.fsdp2.runtime import Unit, Units
from zeroplan.engines.fsdp2.step import MicroBatch
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.trace import Moments, Trace, entry_of
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.tags import AT_MLP_NORM

_REENTRANT = "torch 2.13, torch/utils/checkpoint.py, CheckpointFunction.backward"


def moments(plan: FlatPlan, step: tuple[Line, ...]) -> Moments:
    """Return every moment at which memory can peak; ``step``: lines of the optimizer's step. [bytes]"""
    trace = Trace()
    _micro_batch(plan, trace).run_through()
    at_the_end = (*not_reduced(plan), Moment("optimizer step", Phase.STEP, step))
    return Moments((*trace.finished(), *map(entry_of, at_the_end)))


def _micro_batch(plan: FlatPlan, trace: Trace) -> "FlatMicroBatch":
    if not plan.is_partly_frozen:
        return FlatMicroBatch(plan, trace, Units(plan))
    from zeroplan.engines.fsdp1.adapters import AdaptedMicroBatch  # noqa: PLC0415  keeps start-up fast

    return AdaptedMicroBatch(plan, trace, Units(plan))


class FlatMicroBatch(MicroBatch):
    """A micro-batch through the model, forward and backward."""

    run: FlatRuntime

    def __init__(self, plan: FlatPlan, trace: Trace, units: Units) -> None:
        super().__init__(plan, trace, units)
        in_order = (self.root, *(unit for _, unit in self.layers))
        following = {unit.name: after for unit, after in pairwise(in_order)}
        self.flat, self.run = plan, FlatRuntime(plan, trace, units.made, following)
        self._at: Position | None = None

    @property
    def prefetches(self) -> bool:
        """Whether the backward prefetches blocks."""
        return self.plan.reshard is not False and self.flat.backward_prefetch != "no_prefetch"

    def _gather_last_block(self, point: BackwardPoint) -> None:
        """Prefetch the last block in the root's hook, before the loss runs its backward."""
        self.trace.hold("entering", *point.before)
        super()._gather_last_block(point)
        self.trace.drop("entering")

    def gradients_so_far(self, position: Position) -> None:
        """Hold the shards of the blocks above, and earlier micro-batches' gradients of the others."""
        self._at = position
        waiting = position.next_run if self.flat.options.forward_prefetch else None
        done = tuple(count - (run == waiting) for run, count in enumerate(position.after))
        own = tuple(count + (run == position.run) + (run == waiting) for run, count in enumerate(position.before))
        self._hold_gradients(done, own)

    def enter_backward(self, unit: Unit, below: Unit | None) -> None:
        """Unshard a block. If a checkpoint calls its unit, the recomputation reshards it, and it is unsharded again."""
        super().enter_backward(unit, below)
        if self.flat.options.checkpoints_units and self.plan.reshard is not False and self._at is not None:
            self.run.reshard(unit)
            self.trace.put("run again", *self.plan.passes[self._at.run].saved)
            super().enter_backward(unit, below)
            self.trace.drop("run again")

    @property
    def is_reentrant(self) -> bool:
        """Whether checkpoints are reentrant, as those that call a unit are."""
        return self.flat.options.checkpoints_units

    def run_again(self) -> tuple[Line, ...]:
        """Return the recomputed output that a reentrant checkpoint holds until its block's backward ends."""
        if not self.is_reentrant:
            return ()
        line = buffers.flowing(self.plan, "this block's output, run again")
        return (line._replace(kind=Kind.ACTIVATIONS, source=_REENTRANT),)

    def made_inside(self, position: Position) -> Iterator[tuple[str, tuple[tuple[Line, ...], ...]]]:
        """Yield the moments of a block's backward."""
        arrived = self.arrived_at(position)
        for at, (name, parts) in enumerate(super().made_inside(position)):
            yield name, (*parts, self.run_again(), arrived[at])

    def arrived_at(self, position: Position) -> list[tuple[Line, ...]]:
        """Return at each point of a block's backward the gradient that arrived, where a reentrant checkpoint alone holds it.

        After the norm before the MLP another tensor has the sum of both ways through the residual stream. Without such a checkpoint
        autograd adds in place.
        """
        points = self.plan.passes[position.run].points
        norm = max((at for at, point in enumerate(points) if point.place == AT_MLP_NORM), default=len(points))
        line = buffers.flowing(self.plan, "gradient that flows into this block, which its checkpoint holds")
        held = (line._replace(source=_REENTRANT),) if self.is_reentrant else ()
        return [held if at > norm else () for at in range(len(points))]

    def _hold_gradients(self, done: tuple[int, ...], left: tuple[int, ...]) -> None:
        if self.run.reduces:
            self.trace.shrink("shards", self.plan.gradient_shards(done, "reduced so far"))
        self.trace.shrink("left", *self.plan.left_behind(left, self.left))

    def end_block(self, position: Position, unit: Unit) -> None:
        """End a block's backward: concatenate and reduce its gradients, or those of the block above if they have waited."""
        plan, trace, later = self.plan, self.trace, self.flat.options.forward_prefetch
        trace.put(("made", unit.name), *made_gradients(plan, unit.parts.trained_group))
        joins = self.run.joined_after(unit)
        if joins is None:
            return
        trace.shrink(
            "left", *plan.left_behind(with_one(position.before, position.run) if later else position.before, self.left)
        )
        if not position.layer:
            trace.shrink("shared", *plan.head.at_embedding)
        trace.hold("leaving", buffers.flowing(plan, "gradient that flows out of this block"))
        self.run.post_backward(joins)
        trace.drop("leaving")

    def end_of_earlier_backward(self) -> None:
        """Run the end of a backward that reduces nothing, but adds to the flat gradients of earlier micro-batches."""
        plan, trace, run, done = self.flat, self.trace, self.run, self.plan.every_layer
        run.last = False
        trace.hold("states", *plan.persistent, *buffers.output(plan), *buffers.still_unsharded(plan, done))
        run.hold_unsharded(self.root)
        if plan.options.forward_prefetch:
            position, run.waiting = self.layers[0]
            trace.hold(("made", run.waiting.name), *made_gradients(plan, run.waiting.parts.trained_group))
            if run.frees:
                run.hold_unsharded(run.waiting)
            done = with_one(done, position.run, -1)
        trace.hold("accumulated", *FlatPlan(*plan._replace(several=1)).left_behind(done))
        self.end_of_backward()

    def end_of_backward(self) -> None:
        """Make the embedding's gradient, then reduce the root."""
        plan, trace, none = self.plan, self.trace, tuple(0 for _ in self.plan.blocks)
        first = none if self.run.waiting is None else with_one(none, self.layers[0][0].run)
        trace.drop("kept", "still unsharded")
        self._hold_gradients(tuple(count - one for count, one in zip(plan.every_layer, first, strict=True)), first)
        trace.shrink("shared", *outside.shared_at_embedding(plan))
        outside.backward_of_the_embedding(plan, trace)
        if self.run.waiting is not None:
            trace.shrink("left", *plan.left_behind(none, self.left))
            trace.shrink("root gradients", buffers.root_gradients(plan, plan.trained_root.numel))
            self.run.post_backward(self.run.waiting)
            self._hold_gradients(plan.every_layer, none)
        trace.drop("left")
        trace.shrink("root gradients")
        trace.hold(("made", self.root.name), *made_gradients(plan, plan.trained_root))
        self.run.post_backward(self.root)


def with_one(layers: tuple[int, ...], run: int, more: int = 1) -> tuple[int, ...]:
    """Return the number of layers of each run, with one more of a run."""
    return tuple(count + more * (at == run) for at, count in enumerate(layers))


def not_reduced(plan: FlatPlan) -> tuple[Moment, ...]:
    """Return the end of an earlier micro-batch's backward under ``no_sync``: the second or a later one, except the last."""
    alone = isinstance(plan.several, int) and not plan.several
    if plan.recipe.sync_every_micro_batch or plan.is_partly_frozen or alone:
        return ()
    trace, of_this = Trace(), EarlierPlan(*plan._replace(several=plan.twice))
    FlatMicroBatch(of_this, trace, Units(of_this)).end_of_earlier_backward()
    return tuple(
        Moment(f"{one.name}, not to be reduced yet", one.phase, _there(plan, *one.lines)) for one in Moments(trace.finished())
    )


def _there(plan: FlatPlan, *lines: Line) -> tuple[Line, ...]:
    """Return the lines, set to 0 at the places of a column that have one micro-batch per step."""
    if isinstance(plan.several, int):
        return lines
    return tuple(line._replace(n_bytes=line.n_bytes * plan.several) for line in lines)

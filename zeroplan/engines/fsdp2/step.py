"""The training step of a data-parallel rank under FSDP2, from the first all-gather to the optimizer.

It runs the last micro-batch of a step, with what earlier ones have left. Layers at which memory cannot be highest are left out.
"""

from zeroplan.engines.fsdp2 import buffers, lines, outside
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.runtime import Runtime, Unit
from zeroplan.engines.positions import Position
from zeroplan.ledger import Line, Moment, Phase
from zeroplan.trace import Trace
from zeroplan.transformer.blocks import At, BackwardPoint


def moments(plan: Plan, step: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Every moment at which memory can be highest; ``step`` is what is alive in the optimizer's step. [bytes]"""
    trace = Trace()
    one = _MicroBatch(plan, trace)
    one.forward()
    one.loss()
    one.backward_of_the_ending()
    one.backward_of_the_blocks()
    one.end_of_backward()
    return (*trace.finished(), *outside.not_reduced(plan), Moment("optimizer step", Phase.STEP, step))


class _MicroBatch:
    """A micro-batch on its way through the model and back."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        self.plan, self.trace, self.run = plan, trace, Runtime(plan, trace)
        self.root = Unit(plan, None, "the root group")
        self.layers = tuple((position, Unit(plan, position.run, position.name)) for position in plan.walk)

    # --- forward --------------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        plan, trace = self.plan, self.trace
        trace.put("states", *plan.persistent)
        trace.put("shards", *outside.earlier_shards(plan))
        trace.put("left", *plan.left_behind(plan.every_layer))
        self.run.pre_forward(self.root)
        trace.put("shared", *plan.head.shared)
        trace.put("by name", *plan.head.forward)
        for position, unit in self.layers:
            trace.recording = position.is_corner
            self._block_forward(position, unit)
            if not position.layer:
                trace.put("first input", *plan.head.first_input)
        trace.recording = True

    def _block_forward(self, position: Position, unit: Unit) -> None:
        plan, trace, one = self.plan, self.trace, self.plan.passes[position.run]
        self._keep(position.before)
        trace.put("input", *one.checkpoint)
        self.run.pre_forward(unit)
        trace.drop("input")
        trace.at(f"forward of {position.name}", Phase.FORWARD)
        again = plan.recomputes[position.run]
        inside = (*one.saved, *one.forward) if again == "none" else (*one.kept(again), *one.forward_recompute)
        self._for_a_while(*one.entered, *inside)
        if plan.of_torch_2_15 and not isinstance(plan.reshard, bool):
            trace.at(f"forward: resharding {position.name}", Phase.FORWARD)
            self._for_a_while(*outside.resharding(plan, position))
        self.run.reshard(unit)

    def _keep(self, layers: tuple[int, ...], *, every: bool = False) -> None:
        """So many layers of each run have run forward and not backward yet: their activations, and parameters not resharded."""
        kept, *_ = buffers.kept(self.plan, layers, every=every)
        self.trace.shrink("kept", kept)
        self.trace.shrink("still unsharded", *buffers.still_unsharded(self.plan, layers))

    def _for_a_while(self, *some: Line) -> None:
        self.trace.put("inside", *some)
        self.trace.drop("inside")

    def loss(self) -> None:
        """The root's forward ends after the loss, or before one that comes in chunks."""
        plan, trace = self.plan, self.trace
        trace.drop("by name", "first input")
        self._keep(plan.every_layer, every=True)
        if plan.recipe.loss == "chunked":
            self.run.release_parked()
        trace.at("loss, forward", Phase.LOSS, of_forward=True)
        self._for_a_while(*plan.head.saved, *plan.head.loss_forward)
        self.run.release_parked()

    # --- backward -------------------------------------------------------------------------------------------------------

    def backward_of_the_ending(self) -> None:
        """Loss, head and final norm. A chunked loss goes backward before the model's own backward begins."""
        plan, trace = self.plan, self.trace
        trace.put("output", *buffers.output(plan))
        for point in plan.head.points:
            by_itself = plan.recipe.loss == "chunked" and point.place.at is not At.FINAL_NORM
            trace.at(f"backward of the {point.name}", Phase.LOSS if point.place.at is At.LOSS else Phase.BACKWARD)
            if not by_itself:
                self.run.gather_ahead(self.layers[-1][1])
            early = buffers.cast_early(plan, normed=point.place.at is At.FINAL_NORM)
            trace.shrink("root gradients", outside.at_the_ending(plan, point), *early)
            self._for_a_while(*point.lines)
            if by_itself and point.current_gradient and plan.cast_on_arrival:
                self._cast_from_a_chunk(point)

    def _cast_from_a_chunk(self, point: BackwardPoint) -> None:
        self.trace.at(f"backward of the {point.name}: cast of its gradient", Phase.BACKWARD)
        self._for_a_while(outside.cast_of(self.plan, point), *point.handed_on)

    def backward_of_the_blocks(self) -> None:
        """Each block from the last to the first that a gradient reaches."""
        plan, trace = self.plan, self.trace
        trace.shrink("root gradients", outside.made_before_blocks(plan), *buffers.cast_early(plan))
        for at in reversed(range(len(self.layers))):
            position, unit = self.layers[at]
            if not plan.passes[position.run].points:
                break
            trace.recording = position.is_corner
            self._block_backward(position, unit, self.layers[at - 1][1] if at else None)
        trace.recording = True

    def _block_backward(self, position: Position, unit: Unit, below: Unit | None) -> None:
        plan, trace, one = self.plan, self.trace, self.plan.passes[position.run]
        again = plan.recomputes[position.run]
        own = tuple(count + (run == position.run) for run, count in enumerate(position.before))
        trace.shrink("shards", *outside.reduced(plan, position.after))
        trace.shrink("left", *plan.left_behind(own))
        self._keep(position.before)
        trace.at(f"backward: unsharding {position.name}", Phase.BACKWARD)
        trace.hold("own smaller shard", *lines.own_smaller_shard(plan, unit.group))
        trace.put("entering", *one.kept(again), buffers.flowing(plan, "gradient that flows into this block"))
        self.run.pre_backward(unit, below)
        trace.drop("entering")
        trace.put("checkpoint", *(() if again == "none" else one.checkpoint_in_backward))
        for point in one.points:
            trace.at(outside.point_of(position.name, point.name), Phase.BACKWARD)
            self._for_a_while(*point.lines, outside.made_in_a_block(plan, point))
        trace.drop("checkpoint")
        self._reduce_block(position, unit)

    def _reduce_block(self, position: Position, unit: Unit) -> None:
        plan, trace, one = self.plan, self.trace, self.plan.passes[position.run]
        is_last = not position.layer and plan.trained_root is plan.root
        if is_last:  # what blocks alone need has gone with the last of them
            trace.shrink("shared", *plan.head.at_embedding)
        keeps_input = not is_last and plan.recomputes[position.run] != "none" and not plan.recipe.offload_activations
        trace.shrink("left", *plan.left_behind(position.before))
        trace.hold(
            "leaving",
            buffers.flowing(plan, "gradient that flows out of this block"),
            *(one.checkpoint if keeps_input else ()),
        )
        self.run.post_backward(unit)
        trace.drop("leaving")

    def end_of_backward(self) -> None:
        """The embedding's gradient, then the reduction of the root group."""
        plan, trace = self.plan, self.trace
        trace.drop("kept", "still unsharded")
        trace.shrink("shards", *outside.reduced(plan, plan.every_layer))
        trace.shrink("left", *plan.left_behind(tuple(0 for _ in plan.blocks)))
        trace.shrink("shared", *outside.shared_at_embedding(plan))
        outside.backward_of_the_embedding(plan, trace)
        trace.shrink("shared", *(plan.head.at_embedding if plan.shared_sequences else ()))
        trace.drop("left", "root gradients")
        self.run.reshard(self.root)
        if plan.trained_root.numel:
            outside.reduce_root(plan, trace, self.run)

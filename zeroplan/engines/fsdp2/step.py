"""The training step of a data-parallel rank under FSDP2, from the first all-gather to the optimizer.

It runs the last micro-batch of a step, with the gradients of earlier ones. Layers at which memory cannot peak are skipped.
"""

from collections.abc import Iterable

from zeroplan.engines.fsdp2 import buffers, lines, outside
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.runtime import Runtime, Unit, Units
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line, Moment, Phase, Role
from zeroplan.memo import Computed
from zeroplan.spec.recipe import OF_PAIRS
from zeroplan.trace import Inside, Moments, Trace, entry_of
from zeroplan.transformer.blocks import At, BackwardPoint, BlockPass, without_input


def moments(plan: Plan, step: tuple[Line, ...]) -> Moments:
    """Return every moment at which memory can peak; ``step``: lines of the optimizer's step. [bytes]"""
    trace = Trace()
    MicroBatch(plan, trace, Units(plan)).run_through()
    at_the_end = (*outside.not_reduced(plan), Moment("optimizer step", Phase.STEP, step))
    return Moments((*trace.finished(), *map(entry_of, at_the_end)))


class MicroBatch:
    """A micro-batch through the model, forward and backward."""

    def __init__(self, plan: Plan, trace: Trace, units: Units) -> None:
        self.plan, self.trace, self.run = plan, trace, Runtime(plan, trace, units.made)
        self.root, self.ends, self.layers, self._inside = units.root, units.ends, units.layers, units.inside
        self._prefetched: list[Unit] = []
        self._kept = Computed[tuple[int, ...], Line](lambda layers: buffers.kept(plan, layers)[0])
        self._flowing = Computed[tuple[str, bool], Line](
            lambda key: buffers.flowing(plan, f"gradient that flows {key[0]} this block", in_tower=key[1])
        )
        """The gradient that flows into or out of a block, by the direction and whether it is the vision tower's."""
        self._keeps_input = any(line.tag.role is Role.BLOCK_INPUT for line in plan.head.shared)

    def _depth(self, *, backward: bool) -> int:
        """How many blocks a block gathers ahead. FSDP1, which runs this program, too, has options of its own."""
        options = self.plan.recipe.fsdp2
        if self.plan.recipe.engine != "fsdp2":
            return int(backward)
        return options.backward_prefetch if backward else options.forward_prefetch

    @property
    def several(self) -> bool:
        """Whether earlier micro-batches have left gradients; False if a column has both cases."""
        return isinstance(self.plan.several, int) and bool(self.plan.several)

    @property
    def left(self) -> tuple[Group, ...]:
        """Units outside the blocks that are reduced after the blocks."""
        return self.plan.trained_outside if self.ends is None else self.ends.left

    @property
    def below_blocks(self) -> Unit | None:
        """The unit that FSDP2 prefetches while the first block runs its backward."""
        return None if self.ends is None else self.ends.embedding

    def run_through(self) -> None:
        """Run forward, loss and backward."""
        self.forward()
        self.loss()
        if self.plan.chunks_apart and self.ends is not None:
            from zeroplan.engines.fsdp2.torchtitan import run_chunks  # noqa: PLC0415  only its jobs pay for it

            run_chunks(self, self.ends.head)
        else:
            self.backward_of_the_ending()
        self.blocks_backward()
        self.end_of_backward()

    # --- forward --------------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run the embedding and all blocks."""
        plan, trace = self.plan, self.trace
        trace.put("states", *plan.persistent)
        trace.put("shards", *outside.earlier_shards(plan))
        trace.put("left", *plan.left_behind(plan.every_layer, plan.trained_outside))
        if self.ends is None:
            self.run.pre_forward(self.root)
        trace.put("shared", *plan.head.shared)
        if self.ends is not None:
            self._embedding_forward(self.ends.embedding)
        trace.put("by name", *plan.head.forward)
        self.blocks_forward()

    def blocks_forward(self) -> None:
        """Run every block from the first to the last."""
        units, depth = [unit for _, unit in self.layers], self._depth(backward=False)
        for at, (position, unit) in enumerate(self.layers):
            self.trace.recording = position.is_corner
            self._prefetched = units[at + 1 : at + 1 + depth]
            if position.layer == self.plan.first_ahead:
                self.trace.put("predictions", *self.plan.head.ahead.beside, *buffers.experts_ahead(self.plan))
            self._block_forward(position, unit)
            if position.layer == self.plan.tower_layers:
                self.trace.put("first input", *self.plan.head.first_input)
        self.trace.recording = True

    def _embedding_forward(self, unit: Unit) -> None:
        at = self.plan.at_embedding
        self.run.pre_forward(unit)
        self.trace.at("forward of the embedding", Phase.FORWARD)
        made = buffers.flowing(self.plan, "token embeddings")._replace(kind=Kind.ACTIVATIONS)
        self.trace.pass_by(made, *(() if at is None else outside.summed_up(at)))
        if self.plan.reshard is not False:
            self.trace.put("the embedding's smaller shard", *lines.own_smaller_shard(self.plan, unit.parts.group))
            self.run.reshard(unit)

    def _block_forward(self, position: Position, unit: Unit) -> None:
        trace = self.trace
        self.keep(position.before)
        trace.shrink("still unsharded", *self.unsharded_beside(position, backward=False))
        if checkpoint := self.pass_of(position).checkpoint:
            trace.put("input", *checkpoint)
        self.enter(unit)
        if checkpoint:
            trace.drop("input")
        if position.is_corner:
            trace.at(f"forward of {position.name}", Phase.FORWARD)
            trace.pass_by(*self.inside_forward(position))
        self.leave(position, unit)

    def pass_of(self, position: Position) -> BlockPass:
        """Return the memory of a block. The first block's input counts among the shared lines, if those keep it."""
        one = self.plan.passes[position.run]
        if self._keeps_input and position.layer == self.plan.tower_layers:
            return one._replace(checkpoint=without_input(one.checkpoint))
        return one

    def inside_forward(self, position: Position) -> tuple[Line, ...]:
        """Return the lines of a block's forward at its peak."""
        one, again = self.pass_of(position), self.plan.recomputes[position.run]
        return (*one.entered, *one.kept(again), *(one.forward if again == "none" else one.forward_recompute))

    def enter(self, unit: Unit) -> None:
        """Gather a block for its forward."""
        self.run.pre_forward(unit)
        for one in self._prefetched:
            self.run.prefetch(one)

    def leave(self, position: Position, unit: Unit) -> None:
        """Reshard a block after its forward. :meth:`unsharded_beside` counts parameters that stay unsharded."""
        plan, trace = self.plan, self.trace
        if plan.recipe.fsdp2.keeps_last and plan.reshard is True and unit is self.layers[-1][1]:
            return
        if plan.of_torch_2_15 and not isinstance(plan.reshard, bool):
            trace.at(f"forward: resharding {position.name}", Phase.FORWARD)
            self.trace.pass_by(*outside.resharding(plan, position))
        self.run.post_forward(unit)

    def keep(self, layers: tuple[int, ...], *, every: bool = False) -> None:
        """Hold the activations of these layers of each run, whose forward has run and whose backward has not."""
        self.trace.shrink("kept", buffers.kept(self.plan, layers, every=True)[0] if every else self._kept[layers])

    def unsharded_beside(self, position: Position, *, backward: bool) -> tuple[Line, ...]:  # noqa: ARG002  a stage needs it
        """Return the parameters of other blocks that are unsharded while this one runs, or their smaller shards."""
        return () if self.plan.reshard is True else buffers.still_unsharded(self.plan, position.before)

    def loss(self) -> None:
        """End the root's forward after the loss, or before a chunked loss or a loss in the training loop."""
        plan, trace = self.plan, self.trace
        self.keep(plan.every_layer, every=True)
        trace.shrink("still unsharded", *buffers.still_unsharded(plan, plan.every_layer))
        if self.ends is not None:
            trace.hold("last output", buffers.flowing(plan, "output of the last block")._replace(kind=Kind.ACTIVATIONS))
            self.run.pre_forward(self.ends.head)
            trace.drop("last output")
            trace.at(f"forward of {self.ends.head.name}", Phase.FORWARD)
            self.trace.pass_by(*plan.head.saved, *outside.made_by_the_ending(plan))
        trace.drop("by name", "first input")
        if plan.recipe.loss == "chunked" or plan.loss_in_loop:
            self.run.release_parked()
        if plan.chunks_apart:
            return
        trace.at("loss, forward", Phase.LOSS, of_forward=True)
        self.trace.pass_by(*plan.head.saved, *plan.head.loss_forward, *plan.head.ahead.forward)
        self.run.release_parked()

    # --- backward -------------------------------------------------------------------------------------------------------

    def backward_of_the_ending(self) -> None:
        """Run loss, head and final norm. A chunked loss runs its backward before the model's own backward begins."""
        plan, trace = self.plan, self.trace
        trace.put("output", *buffers.output(plan))
        trace.put("losses of predictions", *plan.head.ahead.backward)
        for point in plan.head.points:
            gathers = self._gathers_ahead(point.place.at)
            early = buffers.cast_early(plan, normed=point.place.at is At.FINAL_NORM)
            trace.shrink("root gradients", outside.at_the_ending(plan, point), *early)
            if gathers:
                self._gather_last_block(point)
            trace.at(f"backward of the {point.name}", Phase.LOSS if point.place.at is At.LOSS else Phase.BACKWARD)
            self.trace.pass_by(*point.lines)
            if not gathers and point.current_gradient and plan.cast_on_arrival:
                self._cast_from_a_chunk(point)
        trace.drop("losses of predictions")
        if self.ends is not None:
            trace.drop("root gradients")
            trace.shrink("left", *plan.left_behind(plan.every_layer, self.left))
            trace.hold("leaving", buffers.flowing(plan, "gradient that flows into the last block"))
            self.run.post_backward(self.ends.head)
            trace.drop("leaving")

    def _gathers_ahead(self, at: At) -> bool:
        """Whether the backward of the head's unit has begun. The root's begins with the loss, unless the loss has the head."""
        if self.plan.recipe.loss == "chunked" or "loss-in-pieces" in self.plan.recipe.fused_parts:
            return at is At.FINAL_NORM
        inside = self.plan.recipe.loss == "log-probs" and self.plan.recipe.log_probs not in OF_PAIRS
        return self.ends is None or at is not At.LOSS or inside

    def _gather_last_block(self, point: BackwardPoint) -> None:
        """Gather the last block, as the pre-backward hook of the root, or of the head's unit, does."""
        _, last = self.layers[-1]
        if self.ends is None:
            self.run.gather_ahead(last)
        elif self.plan.reshard is not False and not self.run.is_unsharded(last) and not self.trace.has(last.gathered[0]):
            self.trace.at(f"backward: gathering {last.name}", Phase.BACKWARD)
            saved = self.plan.head.saved if self.plan.recipe.loss == "chunked" else ()
            self.trace.hold("entering", *(point.before or saved))
            self.run.prefetch(last)
            self.trace.drop("entering")

    def _cast_from_a_chunk(self, point: BackwardPoint) -> None:
        self.trace.at(f"backward of the {point.name}: cast of its gradient", Phase.BACKWARD)
        self.trace.pass_by(outside.cast_of(self.plan, point), *point.handed_on)

    def blocks_backward(self) -> None:
        """Run each block from the last to the first that a gradient reaches."""
        if self.ends is None:
            made = outside.made_before_blocks(self.plan), *buffers.cast_early(self.plan)
            self.trace.shrink("root gradients", *made)
        self.trace.put("left by predictions", *self.plan.head.ahead.left)
        units, depth = [unit for _, unit in self.layers], self._depth(backward=True)
        for at in reversed(range(len(self.layers))):
            position, unit = self.layers[at]
            if not self.plan.passes[position.run].points:
                break
            below = units[at - 1] if at else self.below_blocks
            self._prefetched = units[at - depth if at > depth else 0 : at - 1][::-1] if at else []
            self.trace.recording = position.is_corner
            if position.layer == self.plan.tower_layers - 1:
                outside.backward_of_the_projector(self.plan, self.trace)
            self._block_backward(position, unit, below)
            if position.layer == self.plan.first_ahead:
                self.trace.drop("predictions")
        self.trace.recording = True

    def _block_backward(self, position: Position, unit: Unit, below: Unit | None) -> None:
        trace, one, again = self.trace, self.pass_of(position), self.plan.recomputes[position.run]
        self.gradients_so_far(position)
        self.keep(position.before)
        trace.shrink("still unsharded", *self.unsharded_beside(position, backward=True))
        trace.at(f"backward: unsharding {position.name}", Phase.BACKWARD)
        if self.plan.reshard is not True:
            trace.hold(unit.smaller[0], *lines.own_smaller_shard(self.plan, unit.parts.group))
        trace.put("entering", *one.kept(again), *self.flows_in(position))
        self.enter_backward(unit, below)
        trace.drop("entering")
        if again != "none":
            trace.hold("checkpoint", *one.checkpoint_in_backward)
        if position.is_corner:
            trace.pass_through(self.inside_backward(position), f"backward of {position.name}", Phase.BACKWARD)
        if again != "none":
            trace.drop("checkpoint")
        self.end_block(position, unit)

    def inside_backward(self, position: Position) -> Inside:
        """Return the moments of a block's backward with their lines, cached by kind."""
        kind = self.kind_of(position)
        if kind not in self._inside:
            self._inside[kind] = Inside(self.made_inside(position))
        return self._inside[kind]

    def kind_of(self, position: Position) -> object:
        """Return the key of blocks whose backward is equal inside."""
        return position.run

    def made_inside(self, position: Position) -> Iterable[tuple[str, tuple[tuple[Line, ...], ...]]]:
        """Return the same without a cache."""
        points = self.plan.passes[position.run].points
        both = zip(points, outside.made_in_a_block(self.plan, points), strict=True)
        return [(point.name, (point.lines, made)) for point, made in both]

    def flows_in(self, position: Position) -> tuple[Line, ...]:
        """Return the gradient that arrives at a block's end, and what layers above have left beside it."""
        beside = self.plan.passes[position.run].arriving
        return (self._flowing["into", position.layer < self.plan.tower_layers], *beside)

    def enter_backward(self, unit: Unit, below: Unit | None) -> None:
        """Gather a block for its backward, and prefetch the one below."""
        self.run.pre_backward(unit, below)
        for one in self._prefetched:
            self.run.prefetch(one)

    def gradients_so_far(self, position: Position) -> None:
        """Hold the shards of the blocks above, and earlier micro-batches' gradients of the others."""
        shards = outside.reduced(self.plan, position.after, () if self.ends is None else self.ends.reduced)
        self.trace.shrink("shards", *shards)
        if not self.plan.recipe.sync_every_micro_batch:
            own = tuple([count + (run == position.run) for run, count in enumerate(position.before)])
            self.trace.shrink("left", *self.plan.left_behind(own, self.left))

    def end_block(self, position: Position, unit: Unit) -> None:
        """Reduce a block's gradients after its backward."""
        plan, trace, one = self.plan, self.trace, self.plan.passes[position.run]
        is_last = not position.layer and not plan.is_partly_frozen and self.ends is None
        if is_last:  # tensors that only blocks need are freed with the last block
            trace.shrink("shared", *plan.head.at_embedding, *plan.head.before)
        if not plan.recipe.sync_every_micro_batch:
            trace.shrink("left", *plan.left_behind(position.before, self.left))
        trace.hold("leaving", self._flowing["out of", position.layer < plan.tower_layers], *one.leaving)
        self.run.post_backward(unit)
        trace.drop("leaving")

    def end_of_backward(self) -> None:
        """Run the embedding's backward, then the last reduction."""
        plan, trace = self.plan, self.trace
        trace.drop("kept", "still unsharded")
        trace.shrink("shards", *outside.reduced(plan, plan.every_layer, () if self.ends is None else self.ends.reduced))
        trace.shrink("left", *plan.left_behind(tuple(0 for _ in plan.blocks), self.left))
        trace.shrink("shared", *outside.shared_at_embedding(plan))
        if self.ends is not None:
            self._embedding_backward(self.ends.embedding)
            return
        outside.backward_of_the_embedding(plan, trace)
        trace.shrink("shared", *(plan.head.at_embedding if plan.shared_sequences else ()))
        trace.drop("left", "root gradients")
        self.run.reshard(self.root)
        if plan.trained_root.numel:
            outside.reduce_root(plan, trace, self.run)

    def _embedding_backward(self, unit: Unit) -> None:
        """Gather a separate embedding unit again for its backward. It is reduced after the backward ends.

        If no gradient reaches it, it is at most prefetched for a backward that never runs.
        """
        plan, trace = self.plan, self.trace
        if not unit.parts.trained[0].of.numel and not plan.recomputed:
            return
        trace.at(f"backward: unsharding {unit.name}", Phase.BACKWARD)
        trace.put("entering", buffers.flowing(plan, "gradient that flows into the embedding"))
        self.run.pre_backward(unit, None)
        trace.drop("the embedding's smaller shard")
        if plan.at_embedding is None:
            trace.at("backward of the embedding", Phase.BACKWARD)
            made = sum(group.of.numel for group in unit.parts.trained)
            trace.put("made", buffers.root_gradients(plan, made, made))
        else:
            trace.drop("entering")
            outside.of_a_split_embedding(plan, plan.at_embedding, trace, 0)
        trace.drop("made", "entering", "left")
        self.run.post_backward(unit)

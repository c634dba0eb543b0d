"""One micro-batch on its way through a stage of a pipeline, forward or backward: FSDP2's own program, in a schedule's order.

Under a schedule FSDP2 reduces nothing until all micro-batches are through. Whole gradients add up, and a stage that has gone
backward stays unsharded (torch 2.13, torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``). Hidden states that
another rank sends lie in a receive buffer, which is there all the time.
"""

from collections.abc import Iterator

from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.runtime import Unit
from zeroplan.engines.fsdp2.step import MicroBatch
from zeroplan.engines.pipeline import tensor
from zeroplan.engines.pipeline.gradients import accumulated, as_made, made_line, root_gradients, sizes_of_block, taken_up
from zeroplan.engines.pipeline.lines import (
    flowing_line,
    gathered_at_once,
    kept_before,
    kept_of_all,
    root_sizes,
    unsharded_parameters,
)
from zeroplan.engines.pipeline.waiting import Rank, waiting_lines
from zeroplan.engines.pipeline.walk import State
from zeroplan.engines.positions import Position
from zeroplan.ledger import Line, Phase, Role
from zeroplan.trace import Entry, Trace
from zeroplan.transformer.blocks import At, BlockPass
from zeroplan.transformer.families.norms import AT_MLP_NORM


def forward(rank: Rank, state: State, waiting: tuple[Line, ...]) -> tuple[Entry, ...]:
    """Every moment of a forward at which memory can be highest; ``waiting`` is what belongs to no stage's pass."""
    one = StagePass(rank, state, waiting)
    one.forward_through()
    return one.trace.finished()


def backward(rank: Rank, state: State, waiting: tuple[Line, ...]) -> tuple[Entry, ...]:
    """The same of a backward."""
    one = StagePass(rank, state, waiting)
    one.backward_through()
    return one.trace.finished()


def earlier_gradients(rank: Rank, state: State) -> tuple[Line, ...]:
    """Whole gradients that micro-batches before this one have left in its stage."""
    plan = rank.stages[state.chunk].plan
    fresh = bool(state.fresh and state.fresh[state.chunk])
    return (
        *((accumulated(plan, plan.every_layer, root=True),) if state.earlier[state.chunk] else ()),
        *((as_made(plan, plan.every_layer, root=True),) if fresh else ()),
    )


class StagePass(MicroBatch):
    """A micro-batch in one stage, beside everything that waits on the rank."""

    def __init__(self, rank: Rank, state: State, waiting: tuple[Line, ...]) -> None:
        """Take the rank's stage whose pass it is."""
        self.rank, self.state, self.stage = rank, state, rank.stages[state.chunk]
        self.whole, self.earlier = state.whole[state.chunk], bool(state.earlier[state.chunk])
        self.output_made: int | None = None
        """How many moments come before the loss is made, in the last stage's forward."""
        super().__init__(self.stage.plan._replace(several=state.earlier[state.chunk]), Trace(), rank.units[state.chunk])
        self.trace.hold("waiting", *waiting)

    # --- forward --------------------------------------------------------------------------------------------------------

    def forward_through(self) -> None:
        """Run the stage forward."""
        plan, trace = self.plan, self.trace
        trace.hold("earlier", *earlier_gradients(self.rank, self.state))
        self._enter_stage()
        trace.hold("shared", *plan.head.shared)
        trace.put("by name", *plan.head.forward)
        self.blocks_forward()
        if self.stage.stage.is_last:
            self._head_and_loss()

    def _enter_stage(self) -> None:
        """What is outside the blocks is gathered once a step; an interleaved schedule gathers the whole stage at once."""
        trace, root = self.trace, self.root
        trace.at("forward: unsharding the stage", Phase.FORWARD)
        if self.state.begins and self.whole:
            self.trace.pass_by(*gathered_at_once(self.plan))
        if self.state.begins and not self.whole and root.parts.group.numel:
            self.run.pre_forward(root)
        else:
            self.run.hold_unsharded(root)

    def pass_of(self, position: Position) -> BlockPass:
        """What a block costs; the first one's input lies in a receive buffer."""
        one, stage = super().pass_of(position), self.stage
        if position.layer or stage.stage.is_first:
            return one
        return one._replace(
            checkpoint=stage.at_its_beginning(one.checkpoint),
            checkpoint_in_backward=stage.at_its_beginning(one.checkpoint_in_backward),
            saved=stage.at_its_beginning(one.saved),
            selective=stage.at_its_beginning(one.selective),
        )

    def enter(self, unit: Unit) -> None:
        """A stage that a backward has left unsharded gathers nothing."""
        if self.whole:
            self.run.hold_unsharded(unit)
        else:
            super().enter(unit)

    def keep(self, layers: tuple[int, ...], *, every: bool = False) -> None:
        """Hold what this micro-batch has left in so many layers; the lowest one's input lies in a receive buffer."""
        kept, *_ = kept_of_all(self.stage) if every else kept_before(self.stage, layers)
        self.trace.shrink("kept", kept)

    def unsharded_beside(self, position: Position, *, backward: bool) -> tuple[Line, ...]:
        """Other blocks that are unsharded: those of a whole stage, and those that have run and are not sharded again."""
        has_run = position.after if backward else position.before
        stays = backward or not self.plan.reshard
        others = position.before if backward else position.after
        still = self.whole or (backward and not self.plan.reshard)
        layers = tuple(stays * done + still * left for done, left in zip(has_run, others, strict=True))
        return (_unsharded(self.plan, layers),)

    def _head_and_loss(self) -> None:
        """The head makes logits within the stage's forward, in which the last block's buffer is parked. The loss comes after it."""
        plan, trace = self.plan, self.trace
        trace.shrink("waiting", *waiting_lines(self.rank, only_in_flight(self.state)))
        self.output_made = trace.written
        layers = self._after_all()
        trace.shrink("still unsharded", _unsharded(plan, layers))
        self.keep(plan.every_layer, every=True)
        trace.shrink("by name", *(line for line in plan.head.forward if line.tag.role is Role.BATCH))
        trace.drop("first input")
        trace.hold("head", *plan.head.saved)
        trace.at("head, forward", Phase.FORWARD)
        if self.stage.by_rank is not None:
            tensor.head_forward(plan, self.stage.by_rank, trace)
        elif not self.whole:
            self.trace.pass_by(*plan.head.output)
        trace.drop("by name", "parked")
        trace.at("loss, forward", Phase.LOSS, of_forward=True)
        self.trace.pass_by(*tensor.after_the_forward(plan.head.loss_forward))

    def _after_all(self) -> tuple[int, ...]:
        """Blocks that are unsharded once all have run forward."""
        return tuple(0 for _ in self.plan.blocks) if self.plan.reshard else self.plan.every_layer

    # --- backward -------------------------------------------------------------------------------------------------------

    def backward_through(self) -> None:
        """Run the stage backward."""
        self.run.hold_unsharded(self.root)
        self.trace.hold("shared", *self.plan.head.shared)
        if self.stage.stage.is_last:
            self._after_the_loss()
        self.blocks_backward()
        self._end_of_backward()

    def _after_the_loss(self) -> None:
        plan, trace = self.plan, self.trace
        self.keep(plan.every_layer, every=True)
        if self.earlier:
            trace.hold("whole gradients", accumulated(plan, plan.every_layer, root=True))
        layers = plan.every_layer if self.whole else self._after_all()
        trace.hold("still unsharded", _unsharded(plan, layers))
        for point in plan.head.points:
            is_loss = point.place.at is At.LOSS
            if not is_loss and not self.whole:
                self.run.gather_ahead(self.layers[-1][1])
            name = "backward of the loss" if is_loss else f"backward of the {point.name}"
            trace.at(name, Phase.LOSS if is_loss else Phase.BACKWARD)
            trace.shrink("root gradients", root_gradients(plan, point.gradients, point.current_gradient))
            self.trace.pass_by(*point.lines)

    def gradients_so_far(self, position: Position) -> None:
        """Whole gradients: of all micro-batches before, or of the blocks above in this first one; the head's come at the end."""
        plan, earlier = self.plan, self.earlier
        layers = plan.every_layer if earlier else position.after
        self.trace.shrink("whole gradients", accumulated(plan, layers, root=earlier))
        self.trace.shrink("root gradients", root_gradients(plan, plan.tail_elements))

    def flows_in(self, position: Position) -> tuple[Line, ...]:
        """The gradient that comes in; the last block's lies in a receive buffer, unless the head makes it."""
        count = int(position.next_run is not None or self.stage.stage.is_last)
        return (flowing_line(self.stage, "gradient that flows into this block", count),)

    def enter_backward(self, unit: Unit, below: Unit | None) -> None:
        """A stage that is whole gathers nothing."""
        if self.whole:
            self.run.hold_unsharded(unit)
        else:
            super().enter_backward(unit, below)

    def kind_of(self, position: Position) -> object:
        """Blocks of a run between a stage's ends are alike, in passes that find the same left behind."""
        return position.run, position.layer == 0, position.next_run is None, self.several

    def made_inside(self, position: Position) -> Iterator[tuple[str, tuple[tuple[Line, ...], ...]]]:
        """The moments of a block's backward, without what lies in receive buffers."""
        stage, plan, adding, coming_in = self.stage, self.plan, False, position.next_run is None
        for point in plan.passes[position.run].points:
            coming_in = coming_in and (point.place == AT_MLP_NORM or not adding)
            adding = adding or point.place == AT_MLP_NORM
            lines = stage.at_its_end(point.lines) if coming_in else point.lines
            fresh, _ = plan.fresh(point.gradients, point.current_gradient)
            made = made_line(plan, fresh, "this block's, made so far")
            yield point.name, (lines if position.layer else stage.at_its_beginning(lines), (made,))

    def end_block(self, position: Position, unit: Unit) -> None:
        """A block's gradients come to those of earlier micro-batches, or become the first in the reduction's dtype."""
        plan, trace, one = self.plan, self.trace, self.pass_of(position)
        trace.at(f"backward: gradients of {position.name}", Phase.BACKWARD)
        self.trace.pass_by(
            taken_up(plan, sizes_of_block(plan, position.run), first=not self.earlier),
            flowing_line(self.stage, "gradient that flows out of this block"),
            *(() if plan.recomputes[position.run] == "none" else one.checkpoint),
        )
        self.run.reshard(unit)  # it stays unsharded, and counts among the others from here on

    def _end_of_backward(self) -> None:
        """The embedding's gradient, then those of the embedding, or of final norm and head, come to earlier ones."""
        plan, trace, stage = self.plan, self.trace, self.stage
        if not plan.root.numel:
            return
        trace.drop("kept", "shared", "root gradients")
        trace.shrink("whole gradients", accumulated(plan, plan.every_layer, root=self.earlier))
        trace.shrink("still unsharded", _unsharded(plan, plan.every_layer))
        flow = flowing_line(stage, "gradient that flows out of the first block")
        if plan.at_embedding is not None:
            tensor.embedding_backward(plan.at_embedding, trace, flow)
        elif stage.stage.is_first:
            trace.at("backward of the embedding", Phase.BACKWARD)
            self.trace.pass_by(
                made_line(plan, plan.width.compute * plan.root.numel, "the embedding's of this micro-batch"), flow
            )
        trace.at("backward: gradients of the root group", Phase.BACKWARD)
        flows_on = () if plan.at_embedding is not None or stage.stage.is_first else (flow,)
        self.trace.pass_by(taken_up(plan, root_sizes(plan), first=not self.earlier), *flows_on)


def _unsharded(plan: Plan, layers: tuple[int, ...]) -> Line:
    return unsharded_parameters(plan, layers, "this stage's parameters, unsharded", root=False)


def only_in_flight(state: State) -> State:
    """When the loss is made, the name of the output before is already the new one's."""
    outputs = tuple(min(flying, count) if at == state.chunk else count
                    for at, (flying, count) in enumerate(zip(state.flying, state.outputs, strict=True)))  # fmt: skip
    return state._replace(outputs=outputs)

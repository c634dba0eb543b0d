"""One micro-batch through a stage of a pipeline, forward or backward: FSDP2's own program, in a schedule's order.

Under a schedule FSDP2 reduces gradients only after all micro-batches. Whole gradients accumulate, and a stage stays unsharded
after a backward (torch 2.13, torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``). Hidden states from another
rank are in a receive buffer, which always exists.
"""

from collections.abc import Iterator

from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.outside import made_by_the_ending, summed_up
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.runtime import Unit
from zeroplan.engines.fsdp2.step import MicroBatch
from zeroplan.engines.pipeline.lines import (
    accumulated,
    accumulated_gradients,
    as_made,
    flowing_line,
    gathered_at_once,
    kept_before,
    kept_of_all,
    made_bytes,
    made_line,
    root_gradients,
    root_sizes,
    sizes_of_block,
    split_embedding_backward,
    split_head_forward,
    unsharded_parameters,
)
from zeroplan.engines.pipeline.waiting import Rank, in_flight_line, of_the_head, waiting_lines
from zeroplan.engines.pipeline.walk import State
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line, Phase, Role
from zeroplan.trace import Entry, Trace
from zeroplan.transformer.blocks import At, BlockPass
from zeroplan.transformer.context import without_labels
from zeroplan.transformer.families.tags import AT_MLP_NORM, HELD_NORM


def through(rank: Rank, state: State, waiting: tuple[Line, ...]) -> tuple[Entry, ...]:
    """Return every moment of a forward or backward at which memory can peak; ``waiting``: the rank's other lines."""
    one = StagePass(rank, state, waiting)
    if state.kind == "forward":
        one.forward_through()
    else:
        one.backward_through()
    return one.trace.finished()


def earlier_gradients(rank: Rank, state: State) -> tuple[Line, ...]:
    """Return the whole gradients that earlier micro-batches have left in the stage."""
    plan = rank.stages[state.chunk].plan
    fresh = bool(state.fresh and state.fresh[state.chunk])
    return (
        *((accumulated(plan, plan.every_layer, plan.trained_outside),) if state.earlier[state.chunk] else ()),
        *((as_made(plan, plan.every_layer, plan.trained_outside),) if fresh else ()),
    )


class StagePass(MicroBatch):
    """A micro-batch in one stage, with everything that waits on the rank."""

    def __init__(self, rank: Rank, state: State, waiting: tuple[Line, ...]) -> None:
        self.rank, self.state, self.stage = rank, state, rank.stages[state.chunk]
        self.whole, self.earlier = state.whole[state.chunk], bool(state.earlier[state.chunk])
        self.output_made: int | None = None
        """The number of moments before the loss is made, in the last stage's forward."""
        super().__init__(self.stage.plan._replace(several=state.earlier[state.chunk]), Trace(), rank.units[state.chunk])
        self.trace.hold("waiting", *waiting)

    @property
    def below_blocks(self) -> Unit | None:
        """The embedding, if it is in this stage and has a unit of its own."""
        return super().below_blocks if self.plan.outside[0].numel else None

    # --- forward --------------------------------------------------------------------------------------------------------

    def forward_through(self) -> None:
        """Run the stage forward."""
        plan, trace = self.plan, self.trace
        trace.hold("earlier", *earlier_gradients(self.rank, self.state))
        trace.hold("ahead", *(of_the_head(self.rank, self.state) if self.stage.is_chunked else ()))
        self._enter_stage()
        if self.ends is not None and plan.outside[0].numel:
            self._embedding_forward(self.ends.embedding)
        trace.hold("shared", *plan.head.shared)
        trace.put("by name", *plan.head.forward)
        self.blocks_forward()
        if self.stage.stage.is_last:
            self._head_and_loss()

    def _enter_stage(self) -> None:
        """Gather the units outside the blocks, which happens once a step. An interleaved schedule gathers the whole stage."""
        self._copy_out_all(Phase.FORWARD)
        if self.ends is None:
            self._enter_once(self.root)
        elif not self._gathers_once:
            self.run.hold_unsharded(self.ends.head)

    def _copy_out_all(self, phase: Phase) -> None:
        """Copy out a stage that the schedule has gathered ahead of this pass."""
        self.trace.at(f"{phase.value}: unsharding the stage", phase)
        if self.state.begins and self.whole:
            self.trace.pass_by(*gathered_at_once(self.plan))

    @property
    def _gathers_once(self) -> bool:
        """Whether this pass gathers, unit by unit, the units that are gathered once a step."""
        return self.state.begins and not self.whole

    def _enter_once(self, unit: Unit) -> None:
        if self._gathers_once and unit.parts.group.numel:
            self.run.pre_forward(unit)
        else:
            self.run.hold_unsharded(unit)

    def _embedding_forward(self, unit: Unit) -> None:
        """Gather and reshard a separate embedding like a block. Of the tables only position ids exist then."""
        head = self.plan.head
        of_batch = [line for line in head.forward if line.tag.role is Role.BATCH]
        self.trace.hold("shared", *head.shared[len(head.with_blocks) :], *of_batch)
        if self.whole:
            self.trace.hold("still unsharded", _unsharded(self.plan, self.plan.every_layer))
        self.enter(unit)
        self.trace.at("forward of the embedding", Phase.FORWARD)
        at = self.plan.at_embedding
        made = flowing_line(self.stage, "token embeddings")._replace(kind=Kind.ACTIVATIONS)
        self.trace.pass_by(made, *(() if at is None else summed_up(at)))
        if self.plan.reshard:
            self.run.reshard(unit)

    def pass_of(self, position: Position) -> BlockPass:
        """Return the memory of a block. The first block's input is in a receive buffer."""
        one, stage = super().pass_of(position), self.stage
        if position.layer or stage.stage.is_first:
            return one
        return one._replace(
            checkpoint=stage.given(one.checkpoint),
            checkpoint_in_backward=stage.at_its_beginning(one.checkpoint_in_backward),
            saved=stage.at_its_beginning(one.saved),
            selective=stage.at_its_beginning(one.selective),
        )

    def enter(self, unit: Unit) -> None:
        """Gather a unit, unless a backward has left the stage unsharded."""
        if self.whole:
            self.run.hold_unsharded(unit)
        else:
            super().enter(unit)

    def keep(self, layers: tuple[int, ...], *, every: bool = False) -> None:
        """Hold the activations of this micro-batch in these layers. The lowest layer's input is in a receive buffer."""
        kept, *_ = kept_of_all(self.stage) if every else kept_before(self.stage, layers)
        self.trace.shrink("kept", kept)

    def unsharded_beside(self, position: Position, *, backward: bool) -> tuple[Line, ...]:
        """Return the other unsharded blocks: all blocks of a whole stage, and blocks that have run without resharding."""
        has_run = position.after if backward else position.before
        stays = backward or not self.plan.reshard
        others = position.before if backward else position.after
        still = self.whole or (backward and not self.plan.reshard)
        layers = tuple(stays * done + still * left for done, left in zip(has_run, others, strict=True))
        return (_unsharded(self.plan, layers),)

    def _head_and_loss(self) -> None:
        """Run the head within the stage's forward, while the last block's buffer is still held; run the loss after it."""
        plan, trace = self.plan, self.trace
        trace.shrink("waiting", *waiting_lines(self.rank, only_in_flight(self.state)))
        self.output_made = trace.written
        layers = self._after_all()
        if self.ends is not None:
            self._gather_head(self.ends.head, layers)
        trace.shrink("still unsharded", _unsharded(plan, layers))
        self.keep(plan.every_layer, every=True)
        trace.shrink("by name", *(line for line in plan.head.forward if line.tag.role is Role.BATCH))
        trace.drop("first input")
        trace.hold("head", *plan.head.saved)
        trace.at("head, forward", Phase.FORWARD)
        if self.stage.by_rank is not None:
            split_head_forward(plan, self.stage.by_rank, trace)
        elif not self.whole or self.stage.is_chunked:
            self.trace.pass_by(*made_by_the_ending(plan))
        trace.drop("by name", "parked")
        if self.stage.is_chunked:
            self._loss_in_chunks()
            return
        trace.at("loss, forward", Phase.LOSS, of_forward=True)
        self.trace.pass_by(*(line for line in plan.head.loss_forward if line.tag != HELD_NORM))

    def _loss_in_chunks(self) -> None:
        """Run the chunked loss, whose backward goes through the head before the stage's backward. Labels are alive anyway."""
        plan, trace = self.plan, self.trace
        trace.at("loss in chunks, forward", Phase.FORWARD)
        trace.drop("head")
        trace.pass_by(*plan.head.saved, *without_labels(plan.head.loss_forward))
        trace.drop("ahead")
        for point in self.stage.ending[0]:
            trace.at(f"loss in chunks, backward of the {point.name}", Phase.FORWARD)
            made = root_gradients(plan, point.gradients, point.current_gradient)
            trace.pass_by(made, *without_labels(point.lines))

    def _gather_head(self, unit: Unit, layers: tuple[int, ...]) -> None:
        """Gather a separate unit of norm and head after all blocks have run."""
        self.trace.shrink("still unsharded", _unsharded(self.plan, layers))
        self.keep(self.plan.every_layer, every=True)
        if self._gathers_once:
            made = flowing_line(self.stage, "output of the last block")
            self.trace.hold("last output", made._replace(kind=Kind.ACTIVATIONS))
            self.run.pre_forward(unit)
            self.trace.drop("last output")

    def _after_all(self) -> tuple[int, ...]:
        """Return the blocks that are unsharded after all of them have run forward."""
        return tuple(0 for _ in self.plan.blocks) if self.plan.reshard else self.plan.every_layer

    # --- backward -------------------------------------------------------------------------------------------------------

    def backward_through(self) -> None:
        """Run the stage backward."""
        if self.state.begins:
            self.trace.hold("kept", in_flight_line(self.stage), *earlier_gradients(self.rank, self.state))
            self._copy_out_all(Phase.BACKWARD)
            self.trace.drop("kept")
        if self.ends is None:
            self.run.hold_unsharded(self.root)
        else:
            self.run.hold_unsharded(self.ends.head)
            if self.whole:
                self.run.hold_unsharded(self.ends.embedding)
        self.trace.hold("shared", *self.plan.head.shared)
        if self.stage.stage.is_last:
            self._after_the_loss()
        self.blocks_backward()
        self._end_of_backward()

    def _after_the_loss(self) -> None:
        plan, trace = self.plan, self.trace
        self.keep(plan.every_layer, every=True)
        if self.earlier:
            trace.hold("whole gradients", accumulated(plan, plan.every_layer, plan.trained_outside))
        layers = plan.every_layer if self.whole else self._after_all()
        trace.hold("still unsharded", _unsharded(plan, layers))
        made = self.stage.head_elements - self._not_ahead if self.stage.is_chunked else 0
        for point in self.stage.ending[1]:
            is_loss = point.place.at is At.LOSS
            trace.shrink("root gradients", root_gradients(plan, made))
            if not is_loss and not self.whole:
                self._gather_last_block(point)
            made = point.gradients - self._not_ahead
            name = "backward of the loss" if is_loss else f"backward of the {point.name}"
            trace.at(name, Phase.LOSS if is_loss else Phase.BACKWARD)
            trace.shrink("root gradients", root_gradients(plan, made, point.current_gradient))
            self.trace.pass_by(*point.lines)
        if self.ends is not None:
            self._end_head()

    def _end_head(self) -> None:
        """Accumulate the gradients of a separate unit of norm and head before the blocks run backward."""
        plan, trace = self.plan, self.trace
        trace.drop("root gradients")
        trace.at("backward: gradients of the last norm and the head", Phase.BACKWARD)
        flow = flowing_line(self.stage, "gradient that flows into the last block")
        if plan.trained_outside[-1].numel:
            trace.pass_by(accumulated_gradients(plan, self._sizes_outside, first=not self.earlier), flow)

    def gradients_so_far(self, position: Position) -> None:
        """Hold whole gradients: earlier micro-batches', or in the first one those of the blocks above. The head's come last."""
        plan, earlier = self.plan, self.earlier
        layers = plan.every_layer if earlier else position.after
        self.trace.shrink("whole gradients", accumulated(plan, layers, self._outside_so_far))
        self.trace.shrink(
            "root gradients", root_gradients(plan, 0 if self.ends is not None else plan.tail_elements - self._not_ahead)
        )

    @property
    def _not_ahead(self) -> int:
        """Elements of the head's gradient, if no chunked loss has made it since the last backward."""
        return self.stage.head_elements if self.stage.is_chunked and not self.state.ahead else 0

    @property
    def _outside_so_far(self) -> tuple[Group, ...]:
        """Units outside the blocks that have whole gradients while blocks run backward."""
        ends = self.plan.ends
        return self.plan.trained_outside if self.earlier else () if ends is None else (ends.trained_head,)

    def flows_in(self, position: Position) -> tuple[Line, ...]:
        """Return the incoming gradient. The last block's is in a receive buffer, unless the head makes it."""
        count = int(position.next_run is not None or self.stage.stage.is_last)
        return (flowing_line(self.stage, "gradient that flows into this block", count),)

    def enter_backward(self, unit: Unit, below: Unit | None) -> None:
        """Enter a unit's backward. A whole stage gathers nothing."""
        if self.whole:
            self.run.hold_unsharded(unit)
        else:
            super().enter_backward(unit, below)

    def kind_of(self, position: Position) -> object:
        """Return the key of equal blocks: those of a run between a stage's ends, in passes with equal earlier gradients."""
        return position.run, position.layer == 0, position.next_run is None, self.several

    def made_inside(self, position: Position) -> Iterator[tuple[str, tuple[tuple[Line, ...], ...]]]:
        """Yield the moments of a block's backward, without the tensors in receive buffers."""
        stage, plan, adding, coming_in = self.stage, self.plan, False, position.next_run is None
        for point in plan.passes[position.run].points:
            coming_in = coming_in and (point.place == AT_MLP_NORM or not adding)
            adding = adding or point.place == AT_MLP_NORM
            lines = stage.at_its_end(point.lines) if coming_in else point.lines
            made = made_line(plan, made_bytes(plan, point.gradients, point.current_gradient), "this block's, made so far")
            yield point.name, (lines if position.layer else stage.at_its_beginning(lines), (made,))
        if plan.cast_on_arrival and not self.earlier:
            yield from self._casts(plan.passes[position.run])

    def _casts(self, one: BlockPass) -> Iterator[tuple[str, tuple[tuple[Line, ...], ...]]]:
        """Yield the moments when autograd casts each gradient, while the operator's result is still alive."""
        plan, before = self.plan, 0
        for arrival in one.handed:
            n_bytes = plan.reduce_bytes * arrival.gradients + plan.width.compute * (arrival.gradients - before)
            before = arrival.gradients
            yield "a gradient is cast", (arrival.lines, (made_line(plan, n_bytes, "this block's, made so far and cast"),))

    def end_block(self, position: Position, unit: Unit) -> None:
        """Accumulate a block's gradients, or cast the first ones to the reduction's dtype."""
        plan, trace = self.plan, self.trace
        trace.at(f"backward: gradients of {position.name}", Phase.BACKWARD)
        is_followed = plan.runs[position.run].kind != "first" or plan.recomputes[position.run] != "none"
        self.trace.pass_by(
            accumulated_gradients(plan, sizes_of_block(plan, position.run), first=not self.earlier),
            flowing_line(self.stage, "gradient that flows out of this block", int(is_followed)),
        )
        self.run.reshard(unit)  # it stays unsharded, and counts among the others from here on

    def _end_of_backward(self) -> None:
        """Run the embedding's backward, then accumulate the gradients of the embedding, or of final norm and head."""
        plan, trace, stage = self.plan, self.trace, self.stage
        first = plan.trained_outside[0]
        if not first.numel and self.below_blocks is None:
            return
        trace.drop("kept", "shared", "root gradients")
        trace.shrink("whole gradients", accumulated(plan, plan.every_layer, self._outside_so_far))
        trace.shrink("still unsharded", _unsharded(plan, plan.every_layer))
        flow = flowing_line(stage, "gradient that flows out of the first block")
        if self.ends is not None and not self.whole:
            trace.hold("entering", flow)
            self.run.pre_backward(self.ends.embedding, None)
            trace.drop("entering")
        if not first.numel:
            return
        if plan.at_embedding is not None:
            split_embedding_backward(plan.at_embedding, trace, flow)
        elif stage.stage.is_first:
            trace.at("backward of the embedding", Phase.BACKWARD)
            self.trace.pass_by(made_line(plan, plan.width.compute * first.numel, "the embedding's of this micro-batch"), flow)
        trace.at(f"backward: gradients of {'the root group' if self.ends is None else 'the embedding'}", Phase.BACKWARD)
        flows_on = () if plan.at_embedding is not None or stage.stage.is_first else (flow,)
        self.trace.pass_by(accumulated_gradients(plan, self._sizes_outside, first=not self.earlier), *flows_on)

    @property
    def _sizes_outside(self) -> tuple[int, ...]:
        """Return the elements of each gradient outside the blocks that this backward makes."""
        return root_sizes(self.plan)[:-1] if self._not_ahead else root_sizes(self.plan)


def _unsharded(plan: Plan, layers: tuple[int, ...]) -> Line:
    return unsharded_parameters(plan, layers, "this stage's parameters, unsharded")


def only_in_flight(state: State) -> State:
    """Return the state when the loss is made. The variable of the previous output already holds the new one."""
    outputs = tuple(min(in_flight, count) if at == state.chunk else count
                    for at, (in_flight, count) in enumerate(zip(state.in_flight, state.outputs, strict=True)))  # fmt: skip
    return state._replace(outputs=outputs)

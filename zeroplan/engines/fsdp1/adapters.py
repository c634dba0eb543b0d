"""A step of FSDP1 with adapters. Each adapter matrix is a unit of its own, inside the frozen unit of its block.

peft wraps them this way (``fsdp_auto_wrap_policy``), since a flat parameter is either trained or frozen as a whole. Units run
backward in reverse forward order, so the first adapter of a block prefetches the block below.
"""

from collections.abc import Iterator

from zeroplan.engines.formulas import sized
from zeroplan.engines.fsdp1.flat import FlatPlan, adapter_units, frozen_units
from zeroplan.engines.fsdp1.step import FlatMicroBatch, with_one
from zeroplan.engines.fsdp2 import buffers, lines
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.runtime import Parts, Unit, Units
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, maximum
from zeroplan.trace import Trace
from zeroplan.transformer.blocks import At, BackwardPoint

_SOURCE = "torch 2.13, torch/distributed/fsdp/_runtime_utils.py, _prefetch_handle"
IGNORED = "fms-acceleration 876e2ed, fms_acceleration_foak/utils.py, lora_adapters_switch_ddp_from_fsdp"
_HELD = "torch 2.13, torch/distributed/fsdp/_runtime_utils.py, _register_post_backward_reshard_only_hook"
_NOTHING = Group(0, 0, 0, "nothing")


class AdaptedMicroBatch(FlatMicroBatch):
    """A micro-batch through frozen blocks with adapters, forward and backward."""

    def __init__(self, plan: FlatPlan, trace: Trace, units: Units) -> None:
        """Store the plan's units; a block's unit has its frozen parameters."""
        parts = [Parts(plan, group, _NOTHING) for group in frozen_units(plan)]
        units.layers = tuple((position, Unit(unit.name, parts[position.run])) for position, unit in units.layers)
        super().__init__(plan, trace, units)
        self._adapters = [_largest_unit(plan, run) for run in range(len(plan.runs))]
        self._below: Unit | None = None

    def inside_forward(self, position: Position) -> tuple[Line, ...]:
        """Return the lines of a block's forward at its peak, with one adapter unit."""
        return (*super().inside_forward(position), *self._of_adapters(position.run))

    def unsharded_beside(self, position: Position, *, backward: bool) -> tuple[Line, ...]:
        """Return what other blocks keep unsharded, and at stage 2 this block's adapters, which its frozen unit does not have."""
        beside = super().unsharded_beside(position, backward=backward)
        return beside if self.plan.reshard is not False else (*beside, _all_units(self.flat, position.run))

    def _of_adapters(self, run: int) -> tuple[Line, ...]:
        """Return the largest adapter unit; at stage 2 all of them stay unsharded."""
        return () if self.plan.reshard is False else (self._adapters[run],)

    def gradients_so_far(self, position: Position) -> None:
        """Hold the gradients and hooked tensors of the blocks above."""
        super().gradients_so_far(position)
        if self.flat.options.checkpoints_units:
            self.trace.shrink("hooked", *_hooked(self.flat, sum(position.after)))

    def _hold_gradients(self, done: tuple[int, ...], left: tuple[int, ...]) -> None:
        """Hold shards and earlier micro-batches' gradients; beside hooked tensors as many whole ones as any micro-batch, at most.

        Hooked tensors grow downwards, so the peak may be in the first blocks of an earlier micro-batch, whose gradients stay whole.
        """
        whole = tuple(map(max, done, left)) if self.flat.options.checkpoints_units else left
        super()._hold_gradients(done, whole)

    def enter_backward(self, unit: Unit, below: Unit | None) -> None:
        """Unshard a block; an adapter prefetches the one below later."""
        self._below = below
        super().enter_backward(unit, None)

    def kind_of(self, position: Position) -> object:
        """Return the key of blocks whose backward is equal inside."""
        return position.run, position.previous_run

    def made_inside(self, position: Position) -> Iterator[tuple[str, tuple[tuple[Line, ...], ...]]]:
        """Yield the moments of a block's backward. The block below is there once the first adapter, last in backward, has run."""
        points = self.plan.passes[position.run].points
        last = max((at for at, point in enumerate(points) if point.place.at is At.ADAPTER_B), default=0)
        again, arrived = self.run_again(), self.arrived_at(position)
        for at, point in enumerate(points):
            ahead = self._ahead(copies=at == last + 1) if at > last else ()
            beside = (*again, *arrived[at], _made(self.flat, point), *self._of_adapters(position.run), *ahead)
            yield point.name, (point.lines, beside)

    @property
    def is_reentrant(self) -> bool:
        """Whether checkpoints are reentrant. Adapters need that, since others refuse inputs that change their dtype."""
        return self.plan.recomputed

    def _ahead(self, *, copies: bool) -> tuple[Line, ...]:
        """Return the block below, unsharded; ``copies``: its shard from host memory is copied now. Views keep that shard."""
        if self._below is None or not self.prefetches:
            return ()
        group, copied = self._below.parts.groups[0], self._below.parts.copied_groups[0]
        shard = lines.chunk_to_gather(self.plan, group, copied) if copies or self.flat.views_shards else ()
        return (*lines.unsharded(self.plan, group), *shard)

    def end_block(self, position: Position, unit: Unit) -> None:
        """End a block's backward. The first block, whose input has no gradient, stays unsharded until the end.

        Two hooks see the gradient of a block's input. The block below unshards first, then this block is resharded.
        """
        self._hold_gradients(with_one(position.after, position.run), position.before)
        self.trace.hold("leaving", buffers.flowing(self.plan, "gradient that flows out of this block"))
        if self._below is not None and self.plan.reshard is not False:
            self.run.prefetch(self._below)
        self.trace.drop("leaving")
        if position.layer:
            self.run.post_backward(unit)

    def end_of_backward(self) -> None:
        """Write nothing below the blocks, since no gradient goes there."""
        self.trace.drop("kept", "still unsharded", "left")
        self.trace.shrink("shards", self.plan.gradient_shards(self.plan.every_layer, "reduced so far"))


def _hooked(plan: FlatPlan, blocks: int) -> tuple[Line, ...]:
    """Return inputs of frozen units above and their gradients, without the flowing one. A hook on each holds both until the end."""
    each, formula = plan.head.hidden_bytes, plan.head.hidden_formula
    reason = "inputs of the frozen units above and their gradients, which hooks hold until the backward ends"
    count = 2 * blocks - min(1, blocks)
    return (sized(Kind.ACTIVATIONS, count, each, reason, _HELD, formula),)


def _largest_unit(plan: FlatPlan, run: int) -> Line:
    """Return the largest unit of a block's adapters, which exists while its layer runs. [bytes]"""
    width: int = plan.adapter_bytes
    largest: Int = 0
    for unit in () if plan.options.ignores_adapters else adapter_units(plan, run):
        viewed = unit.shard if plan.views_shards and not plan.width.mixed else 0
        largest = maximum(largest, width * (unit.padded + viewed))
    reason = "a matrix of an adapter, while it is used"
    return sized(Kind.UNSHARDED_PARAMETERS, 1, largest, reason, _SOURCE)


def _all_units(plan: FlatPlan, run: int) -> Line:
    """Return all units of a block's adapters, unsharded. [bytes]"""
    units = () if plan.options.ignores_adapters else adapter_units(plan, run)
    n_bytes: Int = plan.adapter_bytes * sum(unit.padded for unit in units)
    return sized(Kind.UNSHARDED_PARAMETERS, 1, n_bytes, "this block's adapters, unsharded", _SOURCE)


def _made(plan: FlatPlan, point: BackwardPoint) -> Line:
    """Return the gradients of a block's adapters: reduced shards, and the current one, both as made and flat. [bytes]"""
    width, done = plan.adapter_bytes, point.gradients - point.current_gradient
    if plan.options.ignores_adapters:
        whole = plan.width.stored * point.gradients
        return sized(Kind.GRADIENTS, 1, whole, "adapters' gradients of this block, whole", IGNORED)
    n_bytes = plan.width.stored * ceil_div(done, plan.n) + 2 * width * point.current_gradient
    reason = "adapters' gradients: shards of those that are reduced, and the one that is made"
    return sized(Kind.UNSHARDED_GRADIENTS, 1, n_bytes, reason, _SOURCE)

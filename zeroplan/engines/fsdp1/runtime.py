"""FSDP1's handling of a unit's flat parameter and gradient, for moments and for requests.

Each method follows the function of torch 2.13 that it names (torch/distributed/fsdp/_runtime_utils.py, _flat_param.py). In a
trace of moments memory counts as free once the host frees it, since streams wait for each other.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, cast

from zeroplan.engines.formulas import sized
from zeroplan.engines.fsdp1.flat import FlatPlan
from zeroplan.engines.fsdp2 import lines
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.runtime import Runtime, Unit
from zeroplan.engines.sources import ACCUMULATE
from zeroplan.ledger import Among, Kind, Line, Phase
from zeroplan.numeric import Int, where

if TYPE_CHECKING:
    from zeroplan.engines.fsdp2.runtime import Memory

SPLIT = "torch 2.13, torch/csrc/autograd/FunctionsManual.cpp, split_with_sizes_backward"
PRE_UNSHARD = "torch 2.13, torch/distributed/fsdp/_flat_param.py, FlatParamHandle.pre_unshard"
REDUCE = "torch 2.13, torch/distributed/fsdp/_runtime_utils.py, _reduce_grad"

GATHERS, REDUCES, CASTS, ALL_REDUCES = 1, 2, 3, 4
"""Streams for unsharding, after a unit's backward, for casts before unsharding, and replicas' all-reduce (``_init_streams``)."""
_IN_FLIGHT = 2
"""Number of units that may wait to be freed (``_max_num_inflight_all_gathers``)."""


class FlatRuntime(Runtime):
    """The flat parameters of one rank, and their gradients."""

    of_outputs = Kind.REDUCE
    """The kind of a reduce-scatter's output. In a log it becomes the gradient."""

    def __init__(
        self, plan: FlatPlan, memory: "Memory", made: dict[object, tuple[Line, ...]], following: Mapping[str | int, Unit]
    ) -> None:
        """Begin with everything sharded; ``following``: the unit to prefetch during the forward of the unit with that name."""
        Runtime.__init__(self, plan, memory, made)
        self.flat, self._following = plan, following
        self._below: dict[str | int, Unit] = {}
        self.prefetched, self.freed = set[str | int](), deque[int]()
        """Prefetched units; and the deed numbers at which units were freed and for which the host has not waited."""
        self.waiting: Unit | None = None
        """A unit whose backward has run and whose gradients are not concatenated yet."""

    # --- parameters -----------------------------------------------------------------------------------------------------

    @property
    def frees(self) -> bool:
        """Whether blocks are resharded after their forward (FULL_SHARD)."""
        return self.plan.reshard is not False

    @property
    def prefetches_forward(self) -> bool:
        """Whether the next unit is prefetched in forward."""
        return self.flat.options.forward_prefetch

    def pre_forward(self, unit: Unit) -> None:
        """``_pre_forward_unshard``, and the prefetch of the next unit."""
        if unit.name not in self.prefetched:
            self._unshard(unit, Phase.FORWARD)
        if self.prefetches_forward and unit.name in self._following:
            self.prefetch(self._following[unit.name], Phase.FORWARD)

    def pre_backward(self, unit: Unit, below: Unit | None) -> None:
        """``_pre_backward_hook``: unshard a unit, unless it was prefetched, then prefetch the one below."""
        if not self.frees:
            self.hold_unsharded(unit)
        if unit.name not in self.prefetched:
            self._unshard(unit, Phase.BACKWARD)
        if below is not None:
            self._below[unit.name] = below
            self.gather_ahead(below)

    def gather_ahead(self, unit: Unit) -> None:
        """Prefetch a unit before the backward of the one above it. The root's hook prefetches the last block."""
        if self.flat.backward_prefetch == "backward_pre":
            self.prefetch(unit)

    def prefetch(self, unit: Unit, phase: Phase = Phase.BACKWARD) -> None:
        """``_prefetch_handle``."""
        if unit.name not in self.prefetched:
            self._unshard(unit, phase)
            self.prefetched.add(unit.name)

    def _unshard(self, unit: Unit, phase: Phase) -> None:
        """``_unshard``: cast this rank's shard, all-gather all shards into the flat parameter, free the cast shard.

        Before a gather the host waits until the GPU has freed all but the last two units (``limit_all_gathers``,
        _limiter_utils.py).
        """
        memory, key, is_there = self.memory, unit.unsharded[0], self.memory.has(unit.unsharded[0])
        if is_there and self.plan.offloaded:
            memory.at(f"{phase.value}: {unit.name} is unsharded", phase)
            memory.pass_by(*self._once(unused_copies, unit.parts.group))
        if not is_there:
            memory.at(f"{phase.value}: unsharding {unit.name}", phase)
            memory.stream = CASTS
            memory.put("cast shard", *self._once(lines.chunk_to_gather, unit.parts.groups[0], unit.parts.copied_groups[0]))
            memory.mark("cast shard")
        if len(self.freed) >= _IN_FLIGHT and self.flat.options.limit_all_gathers:
            memory.wait_for(self.freed.popleft())
        if not is_there:
            memory.stream = GATHERS
            (line,) = self._once(lines.unsharded, unit.parts.groups[0])
            memory.put(key, line)
            memory.mark(key)
            memory.call("all_gather", line.n_bytes, self.plan.n)
            if self.flat.views_shards:
                memory.rename("cast shard", viewed(unit))
            memory.drop("cast shard")
        memory.stream = 0

    def post_forward(self, unit: Unit) -> None:
        """``_post_forward_reshard``. A line for all blocks counts a shard that stays, too."""
        super().post_forward(unit)
        if not self.frees:
            self.memory.settle(viewed(unit))

    def hold_unsharded(self, unit: Unit) -> None:
        """Hold a unit that is unsharded already, and its shard."""
        super().hold_unsharded(unit)
        if self.flat.views_shards:
            self.memory.hold(
                viewed(unit), *self._once(lines.chunk_to_gather, unit.parts.groups[0], unit.parts.copied_groups[0])
            )

    def reshard(self, unit: Unit) -> None:
        """``_reshard``."""
        super().reshard(unit)
        self.memory.drop(viewed(unit))
        self.freed.append(self.memory.point)
        self.prefetched.discard(unit.name)

    # --- gradients ------------------------------------------------------------------------------------------------------

    @property
    def joins(self) -> int:
        """The stream on which autograd concatenates a unit's gradients: that of the split, which is the all-gather's."""
        return GATHERS

    def joined_after(self, unit: Unit) -> Unit | None:
        """Return the unit whose gradients autograd concatenates after a block's backward.

        Autograd runs the latest operator of the forward first. The split of a prefetched unit's flat parameter is earlier than
        the block that ran meanwhile, so the unit's gradients wait until that block's backward has ended, too.
        """
        if not self.prefetches_forward:
            return unit
        joins, self.waiting = self.waiting, unit
        return joins

    def post_backward(self, unit: Unit) -> None:
        """``_post_backward_hook``, after autograd has concatenated the gradients of a unit's parameters.

        If an earlier micro-batch left a flat gradient, autograd adds to it, and holds the new one until the hook returns.
        """
        group, memory, flat, earlier = unit.parts.trained_group, self.memory, ("flat", unit.name), ("left", unit.name)
        if not group.numel:  # frozen: _post_backward_reshard_only_hook
            self.reshard(unit)
            return
        memory.at(f"backward: joining the gradients of {unit.name}", Phase.BACKWARD)
        memory.hold(earlier, *self._once(left, group))
        memory.stream = self.joins
        memory.put(flat, *self._once(joined, group))
        memory.stream = 0
        memory.drop(("made", unit.name))
        if memory.has(earlier):
            memory.rename(flat, "added")
            memory.rename(earlier, flat)
        if self.reduces or self.frees:
            self.reshard(unit)
        if self.flat.backward_prefetch == "backward_post" and unit.name in self._below:
            self.prefetch(self._below[unit.name])
        if self.reduces:
            self._reduce(unit, flat)
        else:
            self.keep_whole(unit, 0)
        memory.drop("added")

    def keep_whole(self, unit: Unit, index: int) -> None:  # noqa: ARG002  the only group
        """Keep the flat gradient under ``no_sync``."""
        self.memory.rename(("flat", unit.name), ("left", unit.name))

    def _reduce(self, unit: Unit, flat: Hashable) -> None:
        """``_reduce_grad``: cast, pad, reduce-scatter, cast again; then store the shard as this rank's gradient or add it."""
        memory, group, shard = self.memory, unit.parts.trained_group, ("shard", unit.name)
        (output, *cast_again), there = self._once(reduced, group, self.of_outputs), memory.has(shard)
        memory.at(f"backward: reducing {unit.name}", Phase.BACKWARD)
        memory.stream = REDUCES
        memory.put("to reduce", *self._once(to_reduce, group))
        memory.put("reduced" if there or cast_again else shard, output)
        memory.call("reduce_scatter", self.plan.reduce_bytes * group.padded, self.plan.n)
        memory.call("all_reduce", output.n_bytes, self.replicas, Among.REPLICAS)
        memory.stream = ALL_REDUCES if self.replicas > 1 else REDUCES
        if cast_again:
            memory.put("reduced, cast" if there else shard, *cast_again)
        memory.stream = 0
        memory.mark(flat)
        memory.drop("to reduce", "reduced", "reduced, cast", flat)
        memory.settle(shard)


def viewed(unit: Unit) -> Hashable:
    """Return the key of a unit's shard on the GPU that its original parameters view."""
    return "viewed", unit.name


def unused_copies(plan: Plan, group: Group) -> tuple[Line, ...]:
    """Return this rank's shard, copied from the host and cast although the unit is unsharded: ``pre_unshard`` does so. [bytes]

    In an all-gather the same copies are smaller than the unsharded parameters, which come after them.
    """
    width = plan.width.stored + (plan.width.compute if plan.width.mixed else 0)
    formula = f"{width}·P_{group.symbol}/N"
    return (Line(Kind.GATHER, width * group.shard, "this rank's chunk, copied from the host", formula, PRE_UNSHARD),)


def made_gradients(plan: Plan, group: Group) -> tuple[Line]:
    """Return the gradients of a unit's parameters before they are concatenated. [bytes]"""
    width = plan.width.compute
    return (sized(Kind.UNSHARDED_GRADIENTS, width, group.numel, "this block's, made", SPLIT, f"G_{group.symbol}"),)


def joined(plan: Plan, group: Group) -> tuple[Line]:
    """Return the flat gradient. [bytes]"""
    flat = cast("FlatPlan", plan)
    n_bytes, formula = plan.width.compute * flat.flat(group), f"{plan.width.compute}·{flat.letter}_{group.symbol}"
    return (Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "the unit's flat gradient", formula, SPLIT),)


def left(plan: Plan, group: Group) -> tuple[Line, ...]:
    """Return the flat gradient that earlier micro-batches left (``no_sync``). [bytes]"""
    if plan.recipe.sync_every_micro_batch:
        return ()
    (line,) = joined(plan, group)
    n_bytes, formula = plan.several * line.n_bytes, f"{cast('FlatPlan', plan).earlier}·{line.formula}"
    return (Line(line.kind, n_bytes, "the unit's flat gradient of earlier micro-batches", formula, ACCUMULATE),)


def reduced(plan: Plan, group: Group, kind: Kind) -> tuple[Line, ...]:
    """Return this rank's shard of a reduction's result and, if the parameters have another dtype, its cast. [bytes]"""
    wide, stored, share = plan.reduce_bytes, plan.width.stored, f"P_{group.symbol}/N"
    output = sized(kind, wide, group.shard, "reduce-scatter output", REDUCE, share)
    if wide == stored:
        return (output,)
    return output, sized(kind, stored, group.shard, "reduce-scatter output, cast", REDUCE, share)


def to_reduce(plan: Plan, group: Group) -> tuple[Line, ...]:
    """Return the flat gradient in the reduction's dtype, if that is another, and with its padding, if it lacks that. [bytes]"""
    flat, wide, made = cast("FlatPlan", plan), plan.reduce_bytes, list[Line]()
    if wide != plan.width.compute:
        formula = f"{wide}·{flat.letter}_{group.symbol}"
        made.append(Line(Kind.REDUCE, wide * flat.flat(group), "the flat gradient, cast", formula, REDUCE))
    if not flat.options.use_orig_params:
        n_bytes: Int = where(group.padded > group.numel, wide * group.padded, 0)
        made.append(sized(Kind.REDUCE, 1, n_bytes, "the flat gradient, padded", REDUCE))
    return tuple(made)

"""FSDP1's handling of a unit's flat parameter and gradient, written into a trace.

Each method follows the function of torch 2.13 that it names (torch/distributed/fsdp/_runtime_utils.py, _flat_param.py). Memory
counts as free once the host frees it, since streams wait for each other.
"""

from collections.abc import Mapping
from typing import cast

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp1.flat import FlatPlan
from zeroplan.engines.fsdp2 import lines
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.runtime import Runtime, Unit
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.numeric import Int, where
from zeroplan.trace import Trace

SPLIT = "torch 2.13, torch/csrc/autograd/FunctionsManual.cpp, split_with_sizes_backward"
REDUCE = "torch 2.13, torch/distributed/fsdp/_runtime_utils.py, _reduce_grad"


class FlatRuntime(Runtime):
    """The flat parameters of one rank, and their gradients."""

    def __init__(
        self, plan: FlatPlan, memory: Trace, made: dict[object, tuple[Line, ...]], following: Mapping[str | int, Unit]
    ) -> None:
        """Begin with everything sharded; ``following``: the unit to prefetch during the forward of the unit with that name."""
        super().__init__(plan, memory, made)
        self.flat, self._following = plan, following
        self._below: dict[str | int, Unit] = {}

    # --- parameters -----------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """``_pre_forward_unshard``."""
        self._unshard(unit, Phase.FORWARD)
        if self.flat.options.forward_prefetch and unit.name in self._following:
            self._unshard(self._following[unit.name], Phase.FORWARD)

    def pre_backward(self, unit: Unit, below: Unit | None) -> None:
        """``_pre_backward_hook``: unshard a unit, unless it was prefetched, then prefetch the one below."""
        if self.plan.reshard is False:
            self.hold_unsharded(unit)
            return
        self._unshard(unit, Phase.BACKWARD)
        if below is not None:
            self._below[unit.name] = below
            if self.flat.backward_prefetch == "backward_pre":
                self._unshard(below, Phase.BACKWARD)

    def prefetch(self, unit: Unit) -> None:
        """``_prefetch_handle``."""
        self._unshard(unit, Phase.BACKWARD)

    def gather_ahead(self, unit: Unit) -> None:
        """The root's ``_pre_backward_hook``: its parameters are unsharded already, and it prefetches the last block."""
        if self.plan.reshard is not False and self.flat.backward_prefetch == "backward_pre":
            self._unshard(unit, Phase.BACKWARD)

    def _unshard(self, unit: Unit, phase: Phase) -> None:
        """``_unshard``: cast this rank's shard, all-gather all shards into the flat parameter, free the cast shard."""
        for index, group in enumerate(unit.parts.groups):
            if self.memory.has(unit.unsharded(index)):
                continue
            self.memory.at(f"{phase.value}: unsharding {unit.name}", phase)
            self.memory.put("cast shard", *self._once(lines.chunk_to_gather, group, unit.parts.copied_groups[index]))
            self.memory.put(unit.unsharded(index), *self._once(lines.unsharded, group))
            self.memory.drop("cast shard")

    # --- gradients ------------------------------------------------------------------------------------------------------

    def post_backward(self, unit: Unit) -> None:
        """``_post_backward_hook``, after autograd has concatenated the gradients of a unit's parameters.

        Autograd calls the hook with that gradient, and holds it until the hook returns, even if it was added to an earlier one.
        """
        group = unit.parts.trained_group
        if not group.numel:  # frozen: _post_backward_reshard_only_hook
            self.reshard(unit)
            return
        self.memory.at(f"backward: joining the gradients of {unit.name}", Phase.BACKWARD)
        self.memory.put("joined", *self._once(joined, group))
        self.memory.drop("made", ("made", unit.name))
        self.reshard(unit)
        if self.flat.backward_prefetch == "backward_post" and unit.name in self._below:
            self._unshard(self._below[unit.name], Phase.BACKWARD)
        self.memory.at(f"backward: reducing {unit.name}", Phase.BACKWARD)
        self.memory.pass_by(*self._once(reducing, group))
        self.memory.drop("joined")


def made_gradients(plan: Plan, group: Group) -> tuple[Line]:
    """Return the gradients of a unit's parameters before they are concatenated. [bytes]"""
    width = plan.width.compute
    return (Line(Kind.UNSHARDED_GRADIENTS, width * group.numel, "this block's, made", f"{width}·G_{group.symbol}", SPLIT),)


def joined(plan: Plan, group: Group) -> tuple[Line]:
    """Return the flat gradient, with earlier micro-batches' under ``no_sync``. [bytes]"""
    (line,) = joined_last(plan, group)
    if plan.recipe.sync_every_micro_batch:
        return (line,)
    return (line._replace(n_bytes=line.n_bytes * (1 + plan.several), formula=f"(1+M)·{line.formula}"),)


def joined_last(plan: Plan, group: Group) -> tuple[Line]:
    """Return the flat gradient only. [bytes]"""
    flat = cast("FlatPlan", plan)
    n_bytes, formula = plan.width.compute * flat.flat(group), f"{plan.width.compute}·{flat.letter}_{group.symbol}"
    return (Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "the unit's flat gradient", formula, SPLIT),)


def reducing(plan: Plan, group: Group) -> tuple[Line, ...]:
    """Return the memory of a reduction beside the flat gradient: casts, padding and this rank's shard of the result. [bytes]"""
    flat, reduced, stored, symbol = cast("FlatPlan", plan), plan.reduce_bytes, plan.width.stored, group.symbol
    out = reduced + (stored if reduced != stored else 0)
    made = [Line(Kind.REDUCE, out * group.shard, "reduce-scatter output", f"{out}·P_{symbol}/N", REDUCE)]
    if reduced != plan.width.compute:
        formula = f"{reduced}·{flat.letter}_{symbol}"
        made.append(Line(Kind.REDUCE, reduced * flat.flat(group), "the flat gradient, cast", formula, REDUCE))
    if not flat.options.use_orig_params:
        padded: Int = where(group.padded > group.numel, reduced * group.padded, 0)
        made.append(Line(Kind.REDUCE, padded, "the flat gradient, padded", product(1, padded), REDUCE))
    return tuple(made)

"""What FSDP2 does with a unit's parameters and gradients, as torch's code does it, written into a trace.

Each method does what the function of torch 2.13 does that it names (torch/distributed/fsdp/_fully_shard). ``FSDPParamGroup`` and
``FSDPState`` hold buffers by reference, and a buffer is freed with its last reference. Differences of 2.15 are marked.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from zeroplan.engines.fsdp2 import lines
from zeroplan.engines.fsdp2.groups import Ends, Group
from zeroplan.engines.fsdp2.param_groups import ParamGroup, param_groups
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.ledger import Line, Phase
from zeroplan.trace import Inside, Trace


class Parts:
    """The parameter groups that units of one kind have, such as all blocks of a run."""

    def __init__(self, plan: Plan, group: Group, trained: Group, words: str = "this block's", *, last: int = 0) -> None:
        """Take what such a unit gathers, and what of it is trained; of the ``last`` parameter so many elements."""
        self.group, self.trained_group, self.last = group, trained, last
        copies_all = plan.cast_too or plan.offloaded
        self.copied = group if copies_all else trained
        self.groups = param_groups(group, plan.gathers, words, in_numbers=plan.is_a_stage)
        self.trained = self.groups
        if trained is not group:
            self.trained = param_groups(trained, plan.gathers, words, in_numbers=plan.is_a_stage)
        self.copied_groups = self.groups if copies_all else self.trained


class Unit(NamedTuple):
    """What one ``fully_shard`` call wraps: a block, or what no other unit has."""

    name: str
    parts: Parts

    def gathered(self, index: int) -> Hashable:
        """The key of a group's all-gather buffer."""
        return "gathered", self.name, index

    def unsharded(self, index: int) -> Hashable:
        """The key of a group's unsharded parameters."""
        return "unsharded", self.name, index


class EndUnits:
    """Embedding and head as units of their own."""

    def __init__(self, plan: Plan, groups: Ends) -> None:
        """Take the parameters of both."""
        last = groups.trained_embedding.numel
        self.embedding = Unit(
            "the embedding", Parts(plan, groups.embedding, groups.trained_embedding, "the embedding's", last=last)
        )
        words, last = "the last norm's and the head's", plan.last_root_elements
        head = Parts(plan, groups.head, groups.trained_head, words, last=last)
        self.head = Unit("the last norm and the head", head)
        self.reduced = (groups.trained_head,)
        """Reduced before the blocks."""
        self.left = (groups.trained_embedding,)
        """Reduced after them."""


class Units:
    """All units of a plan, and the lines that they have in common from one pass to the next."""

    def __init__(self, plan: Plan) -> None:
        """Make the units of the layers in the plan's walk, and of what is outside them."""
        self.root = Unit("the root group", Parts(plan, plan.root, plan.trained_root, "the root group's"))
        self.ends = None if plan.ends is None else EndUnits(plan, plan.ends)
        blocks = [Parts(plan, *groups) for groups in zip(plan.blocks, plan.trained_blocks, strict=True)]
        self.layers = tuple((position, Unit(position.name, blocks[position.run])) for position in plan.walk)
        self.made: dict[object, tuple[Line, ...]] = {}
        self.inside: dict[object, Inside] = {}


class Runtime:
    """The collectives' buffers of one rank, and who holds them."""

    def __init__(self, plan: Plan, trace: Trace, made: dict[object, tuple[Line, ...]]) -> None:
        """Begin with nothing gathered; ``made`` keeps lines for the next pass of the same units."""
        self.plan, self.trace = plan, trace
        self._reduce_inputs: list[Hashable] = []
        self._made = made

    def _lines(self, make: Callable[..., tuple[Line, ...]], *of: object) -> tuple[Line, ...]:
        """What a function of :mod:`lines` makes of some parts; made once, since blocks of a run are alike."""
        key = make, *map(id, of)
        if key not in self._made:
            self._made[key] = make(self.plan, *of)
        return self._made[key]

    # --- parameters -----------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """``FSDPState._pre_forward``: gather and copy out one group after the other."""
        for index, group in enumerate(unit.parts.groups):
            more = "" if index + 1 == len(unit.parts.groups) else ", experts not yet"
            self.trace.at(f"forward: gathering {unit.name}{more}", Phase.FORWARD)
            self._all_gather(unit, index)
            self.trace.at(f"forward: unsharding {unit.name}{more}", Phase.FORWARD)
            if self.plan.of_torch_2_15:
                self.release_parked()
            self._copy_out(unit, index, group)
            self.release_parked()  # in 2.13 a local of wait_for_unshard names it until here
            self.trace.rename(unit.gathered(index), "parked")

    def release_parked(self) -> None:
        """``FSDPCommContext.all_gather_state``: a buffer stays until the next copy-out, so that the two overlap."""
        self.trace.drop("parked")

    def hold_unsharded(self, unit: Unit) -> None:
        """A unit is unsharded from before."""
        for index, group in enumerate(unit.parts.groups):
            self.trace.hold(unit.unsharded(index), *self._lines(lines.unsharded, group))

    def reshard(self, unit: Unit) -> None:
        """``FSDPParamGroup.reshard``."""
        self.trace.drop(*map(unit.unsharded, range(len(unit.parts.groups))))

    def pre_backward(self, unit: Unit, below: Unit | None) -> None:
        """``FSDPState._pre_backward``: copy out what has been gathered ahead or is now, then gather the unit below."""
        for index, group in enumerate(unit.parts.groups):
            if self.plan.reshard is not False:
                self._all_gather(unit, index)
            self._copy_out(unit, index, group)
            self.trace.drop(unit.gathered(index))
        self.trace.drop("own smaller shard")
        if below is not None and self.plan.reshard is not False:
            self.prefetch(below)

    def gather_ahead(self, unit: Unit) -> None:
        """Gather the group that ran last, as the root's hook does before the backward (``_backward_prefetch``)."""
        index = len(unit.parts.groups) - 1
        if self.plan.reshard is not False and not self.trace.has(unit.gathered(index)):
            self.trace.put(unit.gathered(index), *self._lines(lines.gathered_ahead, unit.parts.groups[index]))

    def prefetch(self, unit: Unit) -> None:
        """``FSDPParamGroup._backward_prefetch``: a block's experts first."""
        for index, group in reversed(list(enumerate(unit.parts.groups))):
            self.trace.put(unit.gathered(index), *self._lines(lines.gathered_ahead, group))
            if isinstance(self.plan.reshard, bool):
                copy = self._lines(lines.chunk_to_gather, group, unit.parts.copied_groups[index])
            else:
                copy = self._lines(lines.smaller_chunk_to_gather, unit.parts.group, unit.parts.copied)
            self.trace.pass_by(*copy)

    def _all_gather(self, unit: Unit, index: int) -> None:
        """``foreach_all_gather``: a buffer for all chunks, and this rank's chunk, cast.

        What is copied out right after is larger than that chunk. In 2.15 the buffer of the unit before has gone by then.
        """
        if self.trace.has(unit.gathered(index)):
            return  # gathered ahead
        group = unit.parts.groups[index]
        self.trace.put(unit.gathered(index), *self._lines(lines.gather_buffer, group))
        if self.plan.of_torch_2_15:
            self.trace.pass_by(*self._lines(lines.chunk_to_gather, group, unit.parts.copied_groups[index]))

    def _copy_out(self, unit: Unit, index: int, group: ParamGroup) -> None:
        """``foreach_all_gather_copy_out``."""
        self.trace.put(unit.unsharded(index), *self._lines(lines.unsharded, group))
        self.trace.pass_by(*self._lines(lines.copying_out, unit.parts.group, group))

    # --- gradients ------------------------------------------------------------------------------------------------------

    def post_backward(self, unit: Unit) -> None:
        """``FSDPParamGroup.post_backward``: shard a group again and reduce its gradients; of a block its experts first."""
        for index, group in reversed(list(enumerate(unit.parts.trained))):
            experts = " the experts of" if group.are_experts else ""
            self.trace.at(f"backward: reducing{experts} {unit.name}", Phase.BACKWARD)
            self.trace.drop(unit.unsharded(index))
            if index == len(unit.parts.trained) - 1:
                self.drop_reduce_inputs()
            if group.numel:
                self._reduce(unit, index, group)
        self.trace.drop("shard of the experts")

    def drop_reduce_inputs(self) -> None:
        """``FSDPCommContext.reduce_scatter_states``: inputs stay until the next unit begins to reduce."""
        self.trace.drop(*self._reduce_inputs)
        self._reduce_inputs = []

    def _reduce(self, unit: Unit, index: int, group: ParamGroup) -> None:
        """``foreach_reduce``."""
        key = "reduce input", unit.name, index
        self._reduce_inputs.append(key)
        if group.are_experts:
            self.trace.put("waiting gradients", *self._lines(lines.waiting_gradients, *unit.parts.trained[:index]))
        self.trace.put("copied or reduced", *self._lines(lines.copied_or_reduced, group))
        self.trace.put(key, *self._lines(lines.reduce_input, group))
        self.trace.drop("copied or reduced", "waiting gradients")
        if unit.parts.last and not self.plan.of_torch_2_15:
            self.trace.pass_by(*self._lines(lines.reduced, group), lines.still_named(self.plan, unit.parts.last))
        if group.are_experts:
            self.trace.put("shard of the experts", *self._lines(lines.fresh_shard, group))

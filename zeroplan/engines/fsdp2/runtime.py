"""FSDP2's handling of a unit's parameters and gradients, for moments and for requests.

Each method follows the function of torch 2.13 that it names (torch/distributed/fsdp/_fully_shard). ``FSDPParamGroup`` and
``FSDPState`` hold buffers by reference, and the last reference frees a buffer. Differences in 2.15 are marked.

The program allocates in a trace of moments (:mod:`zeroplan.trace`), where a group's tensors are one line, or in a log of
requests, where they are separate (:mod:`zeroplan.engines.requests.fsdp2`).
"""

from collections.abc import Callable, Hashable
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

from zeroplan.engines.fsdp2 import lines
from zeroplan.engines.fsdp2.groups import Ends, Group, ParamGroup, param_groups
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.ledger import Line, Phase
from zeroplan.trace import Inside, Trace

if TYPE_CHECKING:
    from zeroplan.engines.requests.log import Log

    Memory: TypeAlias = Log | Trace


class Parts:
    """The parameter groups that units of one kind have, such as all blocks of a run."""

    def __init__(self, plan: Plan, group: Group, trained: Group, words: str = "this block's", *, last: int = 0) -> None:
        """Store the groups that such a unit gathers and their trained parts; ``last``: elements of the last parameter."""
        self.group, self.trained_group, self.last = group, trained, last
        copies_all = plan.cast_too or plan.offloaded
        self.copied = group if copies_all else trained
        self.groups = param_groups(group, plan.gathers, words, plan.n, in_numbers=plan.is_a_stage)
        self.trained = self.groups
        if trained is not group:
            self.trained = param_groups(trained, plan.gathers, words, plan.n, in_numbers=plan.is_a_stage)
        self.copied_groups = self.groups if copies_all else self.trained


class Unit:
    """The modules of one ``fully_shard`` call: a block, or all modules in no other unit."""

    __slots__ = ("gathered", "name", "parts", "smaller", "unsharded")

    def __init__(self, name: str | int, parts: Parts) -> None:
        """``name``: the name of the unit in moments; its layer in a log of requests."""
        self.name, self.parts = name, parts
        named = repeat(name), range(len(parts.groups))
        self.gathered: tuple[Hashable, ...] = tuple(zip(repeat("gathered"), *named))
        """The key of each group's all-gather buffer."""
        self.unsharded: tuple[Hashable, ...] = tuple(zip(repeat("unsharded"), *named))
        """The key of each group's unsharded parameters."""
        self.smaller: tuple[Hashable, ...] = tuple(zip(repeat("smaller"), *named))
        """The key of each group's smaller shard, if ``reshard_after_forward`` is a number."""


class EndUnits:
    """Embedding and head as units of their own."""

    def __init__(self, plan: Plan, groups: Ends) -> None:
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
    """All units of a plan, and the lines that passes share."""

    def __init__(self, plan: Plan) -> None:
        """Make the units of the layers in the plan's walk, and the units outside them."""
        self.root = Unit("the root group", Parts(plan, plan.root, plan.trained_root, "the root group's"))
        self.ends = None if plan.ends is None else EndUnits(plan, plan.ends)
        self.blocks = [Parts(plan, *groups) for groups in zip(plan.blocks, plan.trained_blocks, strict=True)]
        self.layers = tuple([(position, Unit(position.name, self.blocks[position.run])) for position in plan.walk])
        self.made: dict[object, tuple[Line, ...]] = {}
        self.inside: dict[object, Inside] = {}


class Runtime:
    """The buffers of one rank's collectives, and their holders."""

    replicas = 1
    """The number of replicas, for a log of collectives."""
    last = True
    """Whether the micro-batch is the step's last."""

    def __init__(self, plan: Plan, memory: "Memory", made: dict[object, tuple[Line, ...]]) -> None:
        """Begin with everything sharded; ``made`` caches lines for the next pass of the same units."""
        self.plan, self.memory = plan, memory
        self._reduce_inputs: list[Hashable] = []
        self._made, self._is_newer = made, plan.of_torch_2_15

    def _once(self, make: Callable[..., tuple[Line, ...]], *of: object) -> tuple[Line, ...]:
        """Return the lines of a function of :mod:`lines`, cached because blocks of a run are equal."""
        key = make, *map(id, of)
        if key not in self._made:
            self._made[key] = make(self.plan, *of)
        return self._made[key]

    # --- parameters -----------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """``FSDPState._pre_forward``: gather and copy out each group."""
        for index, group in enumerate(() if self.memory.has(unit.unsharded[0]) else unit.parts.groups):
            more = "" if index + 1 == len(unit.parts.groups) else ", experts not yet"
            self.memory.at(f"forward: gathering {unit.name}{more}", Phase.FORWARD)
            self.all_gather(unit, index)
            self.memory.at(f"forward: unsharding {unit.name}{more}", Phase.FORWARD)
            if self._is_newer:
                self.release_parked()
            self.copy_out(unit, index, group)
            self.memory.drop("parked")  # in 2.13 a local of wait_for_unshard holds it until here
            self.memory.rename(unit.gathered[index], "parked")

    def release_parked(self) -> None:
        """``FSDPCommContext.all_gather_state``: a buffer lives until the next copy-out, so that gather and copy-out overlap."""
        self.memory.drop("parked")

    def is_unsharded(self, unit: Unit) -> bool:
        """Whether a unit's parameters are unsharded."""
        return self.memory.has(unit.unsharded[0])

    def hold_unsharded(self, unit: Unit) -> None:
        """Hold a unit that is unsharded already."""
        for index, group in enumerate(unit.parts.groups):
            self.memory.hold(unit.unsharded[index], *self._once(lines.unsharded, group))

    def reshard(self, unit: Unit) -> None:
        """``FSDPParamGroup.reshard``."""
        self.memory.drop(*unit.unsharded)

    def post_forward(self, unit: Unit) -> None:
        """``FSDPState._post_forward``: reshard a unit. In a trace a line for all blocks counts one that stays unsharded."""
        if self.plan.reshard is not False:
            self.reshard(unit)
        else:
            self.memory.settle(*unit.unsharded)

    def pre_backward(self, unit: Unit, below: Unit | None) -> None:
        """``FSDPState._pre_backward``: gather a unit unless it was prefetched, copy it out, then prefetch the unit below."""
        if self.plan.reshard is False:
            self.hold_unsharded(unit)
        for index, group in enumerate(() if self.memory.has(unit.unsharded[0]) else unit.parts.groups):
            self.all_gather(unit, index)
            self.copy_out(unit, index, group)
            self.memory.drop(unit.gathered[index])
        if self.plan.reshard is not True:
            self.memory.drop(*unit.smaller)
        if below is not None:
            self._gather_groups_ahead(below, len(unit.parts.groups))  # only a unit of several groups prefetches several

    def gather_ahead(self, unit: Unit) -> None:
        """Gather the group that ran last, as the root's hook does before the backward (``_backward_prefetch``)."""
        index = len(unit.parts.groups) - 1
        if self.plan.reshard is not False and not self.is_unsharded(unit) and not self.memory.has(unit.gathered[index]):
            self._request_buffer(unit, index, ahead=True)

    def prefetch(self, unit: Unit) -> None:
        """Gather a unit ahead, explicitly or as the backward of a unit of one group does: only the group that ran last."""
        self._gather_groups_ahead(unit, 1)

    def _gather_groups_ahead(self, unit: Unit, most: int) -> None:
        """``FSDPParamGroup._backward_prefetch``: gather at most so many groups of a unit, a block's experts first."""
        if self.plan.reshard is False or self.memory.has(unit.unsharded[0]):
            return
        for index, _ in [*enumerate(unit.parts.groups)][::-1][:most]:
            self.all_gather(unit, index, ahead=True)

    def all_gather(self, unit: Unit, index: int, *, ahead: bool = False) -> None:
        """``foreach_all_gather``: allocate a buffer for all chunks, and this rank's chunk, cast."""
        if not self.memory.has(unit.gathered[index]):  # gathered ahead
            if self.plan.recipe.fsdp2.float8_all_gather:
                self.cast_to_float8(unit.parts.groups[index])
            self.request_chunk(unit, index, ahead=ahead)
            self._request_buffer(unit, index, ahead=ahead)
            self.memory.drop("chunk")

    def request_chunk(self, unit: Unit, index: int, *, ahead: bool) -> None:
        """``_get_param_all_gather_inputs``, only where memory can peak.

        Before a forward the following copy-out is larger. In 2.15 the buffer of the previous unit is free by then.
        """
        if ahead and not isinstance(self.plan.reshard, bool):
            self.memory.put("chunk", *self._once(lines.smaller_chunk_to_gather, unit.parts.group, unit.parts.copied))
        elif ahead or self._is_newer:
            chunk = self._once(lines.chunk_to_gather, unit.parts.groups[index], unit.parts.copied_groups[index])
            self.memory.put("chunk", *chunk)

    def cast_to_float8(self, group: ParamGroup) -> None:
        """``FSDPParam.all_gather_inputs``, where a parameter has an all-gather of its own."""
        from zeroplan.engines.fsdp2.float8 import casting  # noqa: PLC0415  few jobs have it

        self.memory.pass_by(casting(group))

    def _request_buffer(self, unit: Unit, index: int, *, ahead: bool) -> None:
        make = lines.gathered_ahead if ahead else lines.gather_buffer
        self.memory.put(unit.gathered[index], *self._once(make, unit.parts.groups[index]))

    def copy_out(self, unit: Unit, index: int, group: ParamGroup) -> None:
        """``foreach_all_gather_copy_out``: copy every parameter to its own memory."""
        if self.plan.recipe.fsdp2.float8_all_gather:
            from zeroplan.engines.fsdp2.float8 import casting_late  # noqa: PLC0415  few jobs have it

            self.memory.pass_by(casting_late(group))
        self.memory.put(unit.unsharded[index], *self._once(lines.unsharded, group))
        if copies := self._once(lines.copying_out, unit.parts.group, group):
            self.memory.pass_by(*copies)

    # --- gradients ------------------------------------------------------------------------------------------------------

    def post_backward(self, unit: Unit) -> None:
        """``FSDPParamGroup.post_backward``: reshard a group and reduce its gradients; a block's experts first."""
        last = len(unit.parts.trained) - 1
        for index, group in self.order_of_reductions(unit):
            experts = " the experts of" if group.are_experts else ""
            self.memory.at(f"backward: reducing{experts} {unit.name}", Phase.BACKWARD)
            self.memory.drop(unit.unsharded[index])
            if not self.reduces:
                self.keep_whole(unit, index)
                continue
            if index == last:
                self.drop_reduce_inputs()
            if group.of.numel:
                self.foreach_reduce(unit, index, group)
        if last:
            self.memory.drop("shard of the experts")

    def order_of_reductions(self, unit: Unit) -> list[tuple[int, ParamGroup]]:
        """Return a unit's groups in the order of their reductions: as autograd's hooks run, the last first."""
        return list(enumerate(unit.parts.trained))[::-1]

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced in this micro-batch."""
        return self.last or self.plan.recipe.sync_every_micro_batch

    def keep_whole(self, unit: Unit, index: int) -> None:
        """``FSDPParam.to_accumulated_grad_if_needed``: do nothing, since a trace of moments counts whole gradients by layers."""

    def reduce_input(self, unit: Unit, index: int) -> Hashable:
        """Return the key of a new reduce-scatter input."""
        key = "reduce input", unit.name, index
        self._reduce_inputs.append(key)
        return key

    def drop_reduce_inputs(self) -> None:
        """``FSDPCommContext.reduce_scatter_states``: free the inputs, which live until the next unit's reduction begins."""
        self.memory.drop(*self._reduce_inputs)
        self._reduce_inputs = []

    def foreach_reduce(self, unit: Unit, index: int, group: ParamGroup) -> None:
        """Reduce a group's gradients."""
        key = self.reduce_input(unit, index)
        if group.are_experts:
            self.memory.put("waiting gradients", *self._once(lines.waiting_gradients, *unit.parts.trained[:index]))
        self.memory.put("copied or reduced", *self._once(lines.copied_or_reduced, group))
        self.memory.put(key, *self._once(lines.reduce_input, group))
        self.memory.drop("copied or reduced", "waiting gradients")
        if unit.parts.last and not self._is_newer:
            self.memory.pass_by(*self._once(lines.reduced, group), lines.still_named(self.plan, unit.parts.last))
        if self.plan.recipe.fsdp2.step_in_backward:  # a parameter's hook steps before foreach_reduce returns
            stepping = self.plan.stepping(in_block=not unit.parts.last)
            self.memory.pass_by(*self._once(lines.reduced, group), lines.still_named(self.plan, unit.parts.last), *stepping)
        if group.are_experts:
            self.memory.put("shard of the experts", *self._once(lines.fresh_shard, group))

"""What FSDP2 does with a unit's parameters and gradients, as torch's code does it, written into a trace.

Each method is named after what it stands for in torch 2.13, torch/distributed/fsdp/_fully_shard: ``FSDPParamGroup`` and
``FSDPState`` hold buffers by reference, and a buffer goes when the last reference does. What 2.15 does otherwise is marked.
"""

from collections.abc import Hashable

from zeroplan.engines.fsdp2 import lines
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.param_groups import ParamGroup, param_groups
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.ledger import Line, Phase
from zeroplan.trace import Trace


class Unit:
    """What one ``fully_shard`` call wraps: a block, or what no other unit has."""

    def __init__(self, plan: Plan, name: str, group: Group, trained: Group, words: str = "this block's") -> None:
        """Take what it gathers, and what of it is trained."""
        self.name, self.group, in_numbers = name, group, plan.is_a_stage
        self.copied = group if plan.cast_too else trained
        self.groups = param_groups(group, plan.gathers, words, in_numbers=in_numbers)
        self.trained = param_groups(trained, plan.gathers, words, in_numbers=in_numbers)
        self.copied_groups = self.groups if plan.cast_too else self.trained

    @classmethod
    def of_block(cls, plan: Plan, run: int, name: str) -> "Unit":
        """A block of a run."""
        return cls(plan, name, plan.blocks[run], plan.trained_blocks[run])

    def gathered(self, index: int) -> Hashable:
        """The key of a group's all-gather buffer."""
        return "gathered", self.name, index

    def unsharded(self, index: int) -> Hashable:
        """The key of a group's unsharded parameters."""
        return "unsharded", self.name, index


class Runtime:
    """The collectives' buffers of one rank, and who holds them."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        """Begin with nothing gathered."""
        self.plan, self.trace = plan, trace
        self._reduce_inputs: list[Hashable] = []

    # --- parameters -----------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """``FSDPState._pre_forward``: gather and copy out one group after the other."""
        for index, group in enumerate(unit.groups):
            more = "" if index + 1 == len(unit.groups) else ", experts not yet"
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
        for index, group in enumerate(unit.groups):
            self.trace.hold(unit.unsharded(index), lines.unsharded(self.plan, group))

    def reshard(self, unit: Unit) -> None:
        """``FSDPParamGroup.reshard``."""
        self.trace.drop(*map(unit.unsharded, range(len(unit.groups))))

    def pre_backward(self, unit: Unit, below: Unit | None) -> None:
        """``FSDPState._pre_backward``: copy out what has been gathered ahead or is now, then gather the unit below."""
        for index, group in enumerate(unit.groups):
            if self.plan.reshard is not False:
                self._all_gather(unit, index)
            self._copy_out(unit, index, group)
            self.trace.drop(unit.gathered(index))
        self.trace.drop("own smaller shard")
        if below is not None and self.plan.reshard is not False:
            self.prefetch(below)

    def gather_ahead(self, unit: Unit) -> None:
        """Gather the group that ran last, as the root's hook does before the backward (``_backward_prefetch``)."""
        index = len(unit.groups) - 1
        if self.plan.reshard is not False and not self.trace.has(unit.gathered(index)):
            buffer = lines.gather_buffer(self.plan, unit.groups[index], "gathered ahead of its backward")
            self.trace.put(unit.gathered(index), buffer)

    def prefetch(self, unit: Unit) -> None:
        """``FSDPParamGroup._backward_prefetch``: a block's experts first."""
        for index, group in reversed(list(enumerate(unit.groups))):
            buffer = lines.gather_buffer(self.plan, group, "gathered ahead of its backward")
            self.trace.put(unit.gathered(index), buffer)
            if isinstance(self.plan.reshard, bool):
                copy = lines.chunk_to_gather(self.plan, group, unit.copied_groups[index])
            else:
                copy = lines.smaller_chunk_to_gather(self.plan, unit.group, unit.copied)
            self._in_passing(*copy)

    def _all_gather(self, unit: Unit, index: int) -> None:
        """``foreach_all_gather``: a buffer for all chunks, and this rank's chunk, cast."""
        if self.trace.has(unit.gathered(index)):
            return  # gathered ahead
        group = unit.groups[index]
        self.trace.put(unit.gathered(index), lines.gather_buffer(self.plan, group))
        self._in_passing(*lines.chunk_to_gather(self.plan, group, unit.copied_groups[index]))

    def _copy_out(self, unit: Unit, index: int, group: ParamGroup) -> None:
        """``foreach_all_gather_copy_out``."""
        self.trace.put(unit.unsharded(index), lines.unsharded(self.plan, group))
        self._in_passing(*lines.copying_out(self.plan, unit.group, group))

    def _in_passing(self, *some: Line) -> None:
        self.trace.put("in passing", *some)
        self.trace.drop("in passing")

    # --- gradients ------------------------------------------------------------------------------------------------------

    def post_backward(self, unit: Unit) -> None:
        """``FSDPParamGroup.post_backward``: shard a group again and reduce its gradients; of a block its experts first."""
        for index, group in reversed(list(enumerate(unit.trained))):
            experts = " the experts of" if group.are_experts else ""
            self.trace.at(f"backward: reducing{experts} {unit.name}", Phase.BACKWARD)
            self.trace.drop(unit.unsharded(index))
            if index == len(unit.trained) - 1:
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
            self.trace.put("waiting gradients", *(lines.waiting_gradients(self.plan, one) for one in unit.trained[:index]))
        self.trace.put("copied or reduced", lines.copied_or_reduced(self.plan, group))
        self.trace.put(key, lines.reduce_input(self.plan, group))
        self.trace.drop("copied or reduced", "waiting gradients")
        if group.are_experts:
            self.trace.put("shard of the experts", lines.fresh_shard(self.plan, group))

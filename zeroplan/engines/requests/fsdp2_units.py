"""What ``fully_shard`` gathers and reduces together: units, their parameter groups, and the sizes of their parameters."""

import math
from typing import NamedTuple

from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.requests.log import Log
from zeroplan.ledger import Kind
from zeroplan.numeric import ceil_div
from zeroplan.transformer.parameters import Parameter

Key = tuple[int, int]


class Group(NamedTuple):
    """One parameter group: a unit's parameters, or with expert parallelism its experts, or everything beside them. [elements]"""

    key: Key
    """Its unit's name, and its place there."""
    whole: tuple[int, ...]
    """Of each parameter, with padding."""
    shard: int
    """This rank's chunks."""
    trained: int
    """This rank's chunks of what gets gradients."""
    gradients: tuple[int, ...]
    """Of each parameter that gets one, without padding."""
    copied: tuple[int, ...]
    """This rank's chunk of each parameter that is copied before it is gathered."""
    widths: tuple[int, ...]
    """Of each parameter's elements, as they are stored. [bytes]"""
    ranks: int
    """Those that share it."""
    narrow: bool
    """It is cut along dim 1."""
    are_experts: bool


class Unit(NamedTuple):
    """What one ``fully_shard`` call wraps."""

    name: int
    """Its layer; that of the embedding where it has more outside the blocks."""
    groups: tuple[Group, ...]
    """In the order in which they are gathered in the forward."""

    @property
    def is_trained(self) -> bool:
        """Whether anything of it gets gradients."""
        return any(group.trained for group in self.groups)

    def group_of(self, elements: int) -> Group:
        """The group with a parameter whose gradient has so many elements."""
        return next((group for group in self.groups if elements in group.gradients), self.groups[0])


class Cutting:
    """Cuts parameters into this rank's chunks."""

    def __init__(self, plan: Plan) -> None:
        """Take the job's plan."""
        self.plan, self.n, self.tp, self.ep = plan, int(plan.n), plan.tp, int(plan.ep)

    def unit(self, name: int, parameters: tuple[Parameter, ...]) -> Unit:
        """A unit of these parameters, its experts apart where ranks share them out."""
        theirs = [self.ep != 1 and one.active_share != (1, 1) for one in parameters]
        apart = [tuple([one for one, is_it in zip(parameters, theirs, strict=True) if is_it is them]) for them in (False, True)]
        groups = [self._group((name, at), part, are_experts=at == 1) for at, part in enumerate(apart) if part or not at]
        return Unit(name, tuple(groups))

    def _group(self, key: Key, parameters: tuple[Parameter, ...], *, are_experts: bool) -> Group:
        ranks = self.n * self.tp // self.ep if are_experts else self.n
        shards = [self.shard(one) for one in parameters]
        trained = [shard for shard, one in zip(shards, parameters, strict=True) if not one.frozen]
        return Group(
            key,
            tuple([ranks * shard for shard in shards]),
            sum(shards),
            sum(trained),
            tuple([one.numel for one in parameters if not one.frozen]),
            tuple(shards if self.plan.cast_too else trained),
            tuple(map(self.width, parameters)),
            ranks,
            are_experts and self.n * self.tp > parameters[0].shape[0] * self.ep,
            are_experts,
        )

    def shard(self, parameter: Parameter) -> int:
        """This rank's chunk of a parameter. [elements]"""
        return math.prod(self.chunk(parameter))

    def chunk(self, parameter: Parameter) -> tuple[int, ...]:
        """Its shape."""
        if self.ep != 1:
            from zeroplan.engines.fsdp2.experts import chunk  # noqa: PLC0415  keeps start-up fast

            return tuple(map(int, chunk(parameter, 1, n=self.n, tp=self.tp, ep=self.ep, in_block=True).shape))
        return ceil_div(parameter.shape[0], self.n), *parameter.shape[1:]

    def width(self, parameter: Parameter) -> int:
        """Of an element as it is stored: beside adapters what is frozen is in the compute dtype. [bytes]"""
        return self.plan.frozen_width if parameter.frozen else self.plan.width.stored

    def request_shards(self, log: Log, parameters: list[Parameter]) -> None:
        """This rank's chunks of all parameters."""
        for one in parameters:
            log.request("shards", self.width(one) * self.shard(one), Kind.PARAMETERS, "this rank's chunk of a parameter")

"""How large are the single parameters of what FSDP2 gathers and reduces together?"""

import math
from typing import NamedTuple

from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.split import summed
from zeroplan.engines.requests.log import Log
from zeroplan.ledger import Kind
from zeroplan.numeric import ceil_div
from zeroplan.transformer.parameters import Parameter


class Sizes(NamedTuple):
    """Of each parameter of a parameter group. [elements]"""

    whole: tuple[int, ...]
    """With padding."""
    gradients: tuple[int, ...]
    """Of those that get one, without padding."""
    widths: tuple[int, ...]
    """Of an element, as it is stored. [bytes]"""
    norms: tuple[int, ...]
    """Of norms, whose gradients tensor-parallel ranks sum up (:func:`summed`)."""


class Cutting:
    """Cuts parameters into this rank's chunks."""

    def __init__(self, plan: Plan) -> None:
        """Take the job's plan."""
        self.plan, self.n, self.tp, self.ep = plan, int(plan.n), plan.tp, int(plan.ep)

    def sizes(self, parameters: tuple[Parameter, ...]) -> tuple[Sizes, ...]:
        """Those of a unit's groups: its experts are apart where ranks share them out."""
        theirs = [self.ep != 1 and one.active_share != (1, 1) for one in parameters]
        apart = [tuple([one for one, is_it in zip(parameters, theirs, strict=True) if is_it is them]) for them in (False, True)]
        ranks = self.n, self.n * self.tp // self.ep
        return tuple([self._sizes(part, ranks[at]) for at, part in enumerate(apart) if part or not at])

    def _sizes(self, parameters: tuple[Parameter, ...], ranks: int) -> Sizes:
        return Sizes(
            tuple([ranks * self.shard(one) for one in parameters]),
            tuple([one.numel for one in parameters if not one.frozen]),
            tuple(map(self.width, parameters)),
            summed(parameters),
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

"""The time of a schedule's passes, simulated in the order in which each rank runs them.

A pass begins when its rank is free and its input has arrived: a forward needs the previous stage's forward, an input gradient the
next stage's. The first stage has no input gradient, so its backward is one pass.

Leaves out the time of sends, which is a separate part.
"""

from typing import NamedTuple

from zeroplan.engines.pipeline.order import Action, Pass
from zeroplan.numeric import Float, longest


class Costs(NamedTuple):
    """Times of one micro-batch's passes on one stage. [s]"""

    forward: Float
    inputs: Float
    weights: Float

    def of(self, kind: Pass, stage: int) -> Float:
        """Return the time of one pass of stage number ``stage``. [s]"""
        if kind == "forward":
            return self.forward
        if stage == 0:
            return 0.0 if kind == "input" else self.inputs + self.weights
        return self.inputs if kind == "input" else self.weights


def played(orders: tuple[tuple[Action, ...], ...], stages: tuple[tuple[int, ...], ...], costs: tuple[Costs, ...]) -> Float:
    """Return the time at which the last rank ends; ``stages``: the stages of each rank, as indices into ``costs``. [s]

    Two ranks and one micro-batch: four forwards, three input passes with one weight pass between, and the first stage's
    backward.

    >>> one = tuple(Action(kind, chunk, 0) for kind, chunk in (("forward", 0), ("forward", 1), ("input", 1), ("weights", 1),
    ...                                                         ("input", 0), ("weights", 0)))
    >>> played((one, one), ((0, 3), (1, 2)), (Costs(1.0, 1.0, 1.0),) * 4)
    10.0
    """
    ended: dict[tuple[str, int, int], Float] = {}
    free: list[Float] = [0.0 for _ in orders]
    at = [0 for _ in orders]
    while any(done < len(order) for done, order in zip(at, orders, strict=True)):
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, chunk, micro_batch = order[at[rank]]
                stage = stages[rank][chunk]
                needed = _needed(kind, stage, micro_batch, len(costs))
                if needed is not None and needed not in ended:
                    break
                begins = free[rank] if needed is None else longest(free[rank], ended[needed])
                free[rank] = begins + costs[stage].of(kind, stage)
                ended[kind, stage, micro_batch] = free[rank]
                at[rank] += 1
    return longest(*free)


def _needed(kind: Pass, stage: int, micro_batch: int, stages: int) -> tuple[str, int, int] | None:
    """Return the pass of another stage that must end first; None if there is none."""
    if kind == "forward" and stage:
        return kind, stage - 1, micro_batch
    if kind == "input" and stage < stages - 1:
        return kind, stage + 1, micro_batch
    return None

"""An upper bound of the memory of a pass through a stage, which is quicker to compute than the peak.

A search compares many passes and ranks, most of them far from the highest. A bound sums all tensors of a stage that can be
alive in a pass, in any order. So a pass whose bound is below another pass's peak need not run.
"""

from typing import NamedTuple

from zeroplan.engines.fsdp2.buffers import reduce_output_bytes
from zeroplan.engines.pipeline.lines import elements_of
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.pipeline.waiting import Sizes
from zeroplan.engines.pipeline.walk import State
from zeroplan.ledger import total_bytes
from zeroplan.numeric import weighted
from zeroplan.weights import Weight


class Bounds(NamedTuple):
    """Upper bounds of one stage. [bytes]"""

    forward: int
    """Bound of a forward, without all-gathers and gradients."""
    backward: int
    """Bound of a backward, without all-gathers and gradients."""
    reducing: int
    """Bound of the gradients' reduction."""
    gathers: int
    """Bound of the all-gathers, if the stage is not whole yet."""
    sizes: Sizes
    """Sizes of waiting tensors, including earlier micro-batches' gradients; ints."""

    def of(self, state: State) -> Weight | None:
        """Return the bound of a state's pass, by pool; None for half a backward."""
        at, (gradients, fresh) = state.chunk, map(int, (self.sizes.gradients, self.sizes.fresh))
        earlier = state.earlier[at] * gradients + (fresh if state.fresh and state.fresh[at] else 0)
        gathers = 0 if state.whole[at] and not state.begins else self.gathers
        if state.kind == "forward":
            return self.forward + earlier, gathers, 0
        if state.kind == "backward":
            return self.backward + max(earlier, gradients), gathers, 0
        return (self.reducing + max(earlier, fresh), 0, int(self.sizes.shards)) if state.kind == "reducing" else None


def bounds_of(stage: StagePlan, sizes: Sizes) -> Bounds | None:
    """Return the bounds of a stage; None if parameters are gathered, kept or reduced in an unusual way."""
    plan = stage.plan
    if plan.has_experts_apart or plan.of_torch_2_15 or not isinstance(plan.reshard, bool) or plan.recipe.offloads:
        return None
    width, groups = plan.width.compute, (plan.root, *plan.blocks)
    alone = 0 if plan.gathers else 2 * max(group.alone for group in groups)
    shard = max(int(group.shard) for group in groups)
    gathers = width * (alone + shard + 2 * max(int(group.padded) for group in groups))
    staying = int(sizes.unsharded) + total_bytes((*plan.head.shared, *plan.head.forward, *plan.head.first_input))
    return Bounds(
        int(staying + _forward(stage)),
        int(staying + _backward(stage)),
        int(sizes.unsharded) + _reducing(stage),
        int(gathers),
        sizes,
    )


def _kept(stage: StagePlan) -> tuple[int, int]:
    plan = stage.plan
    every = int(weighted(plan.every_layer, plan.kept))
    return every, every - int(min(plan.kept))


def _forward(stage: StagePlan) -> int:
    """Return the bound of the blocks, or of head and loss after them."""
    plan, head = stage.plan, stage.plan.head
    every, others = _kept(stage)
    within = max(
        int(total_bytes((*one.checkpoint, *one.entered, *one.kept(again), *one.forward, *one.forward_recompute)))
        for one, again in zip(plan.passes, plan.recomputes, strict=True)
    )
    if not stage.stage.is_last:
        return others + within
    by_rank = () if stage.by_rank is None else (stage.by_rank, *head.loss_forward)
    behind = int(total_bytes((*head.saved, *head.output, *head.loss_forward, *by_rank)))
    return max(others + within, every + behind)


def _backward(stage: StagePlan) -> int:
    """Return the bound of loss and head, of the blocks, or of the embedding."""
    plan, hidden, width = stage.plan, int(stage.hidden_bytes), stage.plan.width.compute
    every, others = _kept(stage)
    both = width + plan.reduce_bytes
    root = both * sum(elements_of(plan, group) for group in plan.outside)
    of_blocks = 0
    for one, again, group in zip(plan.passes, plan.recomputes, plan.blocks, strict=True):
        entering = total_bytes((*one.checkpoint, *one.checkpoint_in_backward, *one.kept(again))) + 2 * hidden
        points = max([int(total_bytes(point.lines)) for point in one.points], default=0)
        beside = int(total_bytes((*one.checkpoint, *one.checkpoint_in_backward))) + 2 * hidden
        of_blocks = max(of_blocks, int(entering), points + beside + both * group.numel)
    points = max([int(total_bytes(point.lines)) for point in plan.head.points], default=0) if stage.stage.is_last else 0
    at = plan.at_embedding
    embedding = 0 if at is None else int(total_bytes((at.gathered, at.by_rank, at.whole)))
    return root + max(others + of_blocks, every + points, embedding + 2 * hidden)


def _reducing(stage: StagePlan) -> int:
    """Return gradients being copied into the reduce-scatter input, its output, and earlier reductions' results."""
    plan, width, reduced = stage.plan, stage.plan.width.compute, stage.plan.reduce_bytes
    groups = (plan.root, *plan.blocks)
    made = max(
        int(reduced * group.padded + reduce_output_bytes(plan, group)) + (width + reduced) * group.numel for group in groups
    )
    done = (plan.width.stored + reduced) * int(plan.trained_shards(plan.every_layer, plan.trained_outside))
    largest = max([parameter.numel for parameter in plan.parameters])
    return made + done + reduced * plan.embedding_elements + (width + reduced) * largest

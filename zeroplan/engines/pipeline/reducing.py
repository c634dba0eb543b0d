"""The moments of reducing a stage's gradients after all micro-batches.

If experts are on several ranks, FSDP2 shards each block in two param groups. Everything but the experts is gathered, copied out
and, under a schedule, reduced first; the experts follow. Only the second reduction frees the inputs of earlier ones (torch 2.13,
``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``, ``post_backward``; ``torch/distributed/pipelining/stage.py``,
``perform_reduce_grad``).
"""

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.engines.formulas import sized
from zeroplan.engines.fsdp2.buffers import reduce_input, reduce_output_bytes
from zeroplan.engines.fsdp2.groups import Group, param_groups
from zeroplan.engines.fsdp2.lines import experts_copied_or_reduced
from zeroplan.engines.fsdp2.plan import REDUCE, Plan
from zeroplan.engines.pipeline.lines import (
    accumulated,
    as_made,
    named_bytes,
    plain,
    reduced,
    sizes_of_block,
    taking_its_share,
    unsharded_parameters,
)
from zeroplan.engines.pipeline.waiting import Rank
from zeroplan.engines.pipeline.walk import State
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, maximum


class _Reduction(NamedTuple):
    """One unit's reduction: the layers, by run, that follow it and that precede it."""

    after: tuple[int, ...]
    done: tuple[int, ...]
    done_outside: int
    """Number of units outside the blocks that are done; these are the first ones."""
    after_outside: int
    """Number of units outside the blocks that are left; these are the last ones."""


def reducing(rank: Rank, state: State, common: tuple[Line, ...]) -> Iterator[Moment]:
    """Yield the moments in which FSDP2 reshards each unit and reduces its gradients.

    The root group or a separate embedding is first, then the blocks from the first on, then a separate head. The remaining
    memory falls or grows from block to block, so the first and the last block of each kind suffice.
    """
    one = _Reducing(rank, state, common)
    plan, (first, *others) = one.plan, one.plan.trained_outside
    none = tuple(0 for _ in plan.blocks)
    if first.numel:
        yield from one.first_unit(_Reduction(plan.every_layer, none, 0, len(others)))
    yield from one.blocks(len(others))
    for head in others:
        if head.numel:
            alive = one.alive(_Reduction(none, plan.every_layer, 1, 0))
            yield one.reduction(head, one.taken(head, plan.last_root_elements), "the last norm and the head", alive)


class _Reducing:
    """The gradients of a stage during their reduction."""

    def __init__(self, rank: Rank, state: State, common: tuple[Line, ...]) -> None:
        """Store the stage, and the width of its gradients before the reduction."""
        self.plan, self.common = rank.stages[state.chunk].plan, common
        earlier = state.earlier[state.chunk]
        self.width = self.plan.reduce_bytes if earlier else self.plan.width.compute
        self.fresh = bool(state.fresh and state.fresh[state.chunk] and earlier)

    def first_unit(self, reduction: _Reduction) -> Iterator[Moment]:
        """Yield the root group's reduction, or a separate embedding's."""
        plan, (first, *_) = self.plan, self.plan.trained_outside
        if plan.at_embedding is not None:
            yield taking_its_share(plan._replace(reduce_bytes=self.width), self.alive(reduction))
        root = plan.ends is None
        last, name = (plan.last_root_elements, "the root group") if root else (first.numel, "the embedding")
        yield self.reduction(first, self.taken(first, last), name, self.alive(reduction))

    def blocks(self, after_outside: int) -> Iterator[Moment]:
        """Yield the first and the last block of each kind."""
        plan = self.plan
        # A reduction can add memory: shards in a wider dtype, beside all-reduces over replicas.
        may_grow = plan.has_experts_apart or plan.reduce_bytes < plan.width.stored
        for run, count in enumerate(plan.every_layer):
            for block in sorted({0, count - 1}) if may_grow else (0,):
                after = tuple(0 if at < run else here - (at == run) * (block + 1) for at, here in enumerate(plan.every_layer))
                done = tuple(here if at < run else block * (at == run) for at, here in enumerate(plan.every_layer))
                if plan.trained_blocks[run].numel:
                    yield from self.block(run, self.alive(_Reduction(after, done, 1, after_outside)), is_first=block == 0)

    def block(self, run: int, alive: tuple[Line, ...], *, is_first: bool) -> Iterator[Moment]:
        """Yield the reduction of a block of a kind."""
        plan, name = self.plan, f"the {'first' if is_first else 'last'} {self.plan.runs[run].kind} block"
        group = plan.trained_blocks[run]
        if plan.blocks[run].experts is None:
            yield self.reduction(group, self.taken(group, sizes_of_block(plan, run)[-1]), name, alive)
            return
        before = plan.outside[0] if is_first and not run else plan.blocks[run - is_first]
        yield from self.with_experts(run, name, alive, before)

    def with_experts(self, run: int, name: str, alive: tuple[Line, ...], before: Group) -> Iterator[Moment]:
        """Yield the reduction of a block's other parameters, while its experts are unsharded, and then that of the experts.

        The input of the reduction ``before``, of the same group unless it is the first, lives until the experts' begins.
        """
        plan, width, unit = self.plan, self.width, self.plan.blocks[run]
        others, experts, (_, theirs) = unit.beside_experts, unit.of_experts, param_groups(unit, plan.gathers, "", plan.n)
        there = (
            sized(Kind.UNSHARDED_PARAMETERS, plan.width.compute, experts.padded, "its experts, unsharded", REDUCE),
            sized(Kind.UNSHARDED_GRADIENTS, width, experts.numel, "its experts' gradients", REDUCE),
            plain(reduce_input(plan, before.of_experts, "reduce-scatter input of what was reduced before")),
        )
        last = [one.numel for one in plan.runs[run].parameters if one.active_share == (1, 1)][-1]
        yield self.reduction(others, self.taken(others, last), f"{name} beside its experts", (*alive, *there))
        reason = "this rank's chunk of the gradients beside its experts"
        shards = sized(Kind.GRADIENTS, plan.width.stored, others.shard, reason, REDUCE)
        apart_too = 0 if plan.reduce_bytes == plan.width.stored else plan.reduce_bytes  # the all-reduce's own is a copy then
        reason = "all-reduce over replicas of the gradients beside its experts, held"
        held = sized(Kind.REDUCE, apart_too, plan.replicated * others.shard, reason, REDUCE)
        named = experts.gathers * named_bytes(plan, width, experts.last) + reduce_output_bytes(plan, experts)
        taken = maximum(experts_copied_or_reduced(plan, theirs, width), named)
        yield self.reduction(experts, taken, f"the experts of {name}", (*alive, shards, held))

    def alive(self, reduction: _Reduction) -> tuple[Line, ...]:
        """Return the lines beside the current unit: gradients or shards of the others, and units that are not resharded yet."""
        plan, at = self.plan._replace(reduce_bytes=self.width), len(self.plan.outside) - reduction.after_outside
        left, done = plan.trained_outside[at:], plan.trained_outside[: reduction.done_outside]
        return (
            *self.common,
            accumulated(plan, reduction.after, left),
            *((as_made(plan, reduction.after, left),) if self.fresh else ()),
            *_done(self.plan, reduction.done, done),
            unsharded_parameters(plan, reduction.after, "blocks not sharded again yet", plan.outside[at:]),
        )

    def taken(self, group: Group, last: int) -> Int:
        """Return the gradients copied into a reduction's input, or its output beside the ``last`` gradient. [bytes]"""
        named = named_bytes(self.plan, self.width, last)
        return maximum(self.width * group.numel, reduce_output_bytes(self.plan, group) + named)

    def reduction(self, group: Group, n_bytes: Int, name: str, alive: tuple[Line, ...]) -> Moment:
        """Return the moment of a reduction: its input, and the ``n_bytes`` beside it."""
        reason = "its gradients while copied in, or the reduce-scatter output and the last of them"
        made = sized(Kind.UNSHARDED_GRADIENTS, 1, n_bytes, reason, REDUCE)
        into = plain(reduce_input(self.plan, group, "reduce-scatter input"))
        return Moment(f"reducing {name}", Phase.BACKWARD, (*alive, into, made))


def _done(plan: Plan, layers: tuple[int, ...], outside: tuple[Group, ...]) -> Iterator[Line]:
    """Yield shards, and the copies that all-reduces over replicas still hold."""
    yield reduced(plan, layers, "this rank's chunk of the gradients, reduced so far", outside)
    if plan.reduce_bytes != plan.width.stored or plan.offloaded:
        held, reason = (
            plan.replicated * plan.trained_shards(layers, outside),
            "all-reduces over replicas, held until all are over",
        )
        yield sized(Kind.REDUCE, plan.reduce_bytes, held, reason, REDUCE)

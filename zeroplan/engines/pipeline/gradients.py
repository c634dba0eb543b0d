"""Whole gradients on a pipeline rank, which accumulate until all micro-batches are through."""

from collections.abc import Iterable

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2 import buffers
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import ACCUMULATE, REDUCE, Plan
from zeroplan.engines.pipeline.tensor import elements_of
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, weighted
from zeroplan.transformer.parameters import Parameter

HALVES = "torch 2.13, torch/distributed/pipelining/_backward.py, stage_backward_weight"


def accumulated(
    plan: Plan, layers: tuple[int, ...], outside: tuple[Group, ...] = (), *, whose: str = "this stage's"
) -> Line:  # fmt: skip
    """Return the whole gradients of layers and of units outside them, in the reduction's dtype. [bytes]"""
    in_layers = weighted(layers, [group.numel for group in plan.trained_blocks])
    elements = sum(elements_of(plan, group) for group in outside) + in_layers
    n_bytes, formula = plan.reduce_bytes * elements, product(plan.reduce_bytes, elements)
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, f"{whose} whole gradients, not reduced yet", formula, ACCUMULATE)


def reduced(plan: Plan, layers: tuple[int, ...], reason: str, outside: tuple[Group, ...]) -> Line:
    """Return this rank's gradient shards of layers and of units outside them; nothing if they are on the host. [bytes]"""
    elements = 0 if plan.offloaded else plan.trained_shards(layers, outside)
    return in_elements(Line(Kind.GRADIENTS, plan.width.stored * elements, reason, source=REDUCE), plan.width.stored)


def named_bytes(plan: Plan, width: int, last: int) -> Int:
    """Return the bytes of a unit's last gradient (``last`` elements), which a local of ``foreach_reduce`` holds until it returns.

    In torch 2.13 only a loop over several ranks' chunks assigns that local.
    """
    return 0 if plan.of_torch_2_15 else plan.gathers * width * last


def as_made(plan: Plan, layers: tuple[int, ...], outside: tuple[Group, ...] = (), *, whose: str = "this stage's") -> Line:
    """Return the whole gradients of a second half, in the dtype in which they were made. [bytes]"""
    line = accumulated(plan._replace(reduce_bytes=plan.width.compute), layers, outside)
    return line._replace(reason=f"{whose} whole gradients of weights, not added to the others yet", source=HALVES)


def root_gradients(plan: Plan, made: int, current: int = 0) -> Line:
    """Return the gradients of parameters outside the blocks. [bytes]"""
    line = buffers.root_gradients(plan, made, current)
    return in_elements(line._replace(n_bytes=made_bytes(plan, made, current)), plan.width.compute)


def made_bytes(plan: Plan, made: int, current: int) -> Int:
    """Return the gradients of this micro-batch beside earlier ones; ``current`` of these elements are just made. [bytes]

    Torch 2.15 casts the first micro-batch's gradients one by one, as they reach their weights.
    """
    if plan.cast_on_arrival and not plan.several:
        return plan.width.compute * current + plan.reduce_bytes * (made - current)
    n_bytes, _ = plan.fresh(made, current)
    return n_bytes


def made_line(plan: Plan, n_bytes: Int, reason: str) -> Line:
    """Return a line of whole gradients of this micro-batch, in the compute dtype. [bytes]"""
    width = plan.width.compute
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, reason, product(width, n_bytes // width), ACCUMULATE)


def in_elements(line: Line, width: int) -> Line:
    """Return the line with a formula: this many bytes times the elements of this rank's stages."""
    kind, n_bytes, reason, _, source, tag = line
    return Line(kind, n_bytes, reason, product(width, n_bytes // width), source, tag)


def sizes_of_block(plan: Plan, run: int) -> tuple[int, ...]:
    """Return the elements of each trained parameter of a block."""
    return sizes_of(plan.runs[run].parameters)


def sizes_of(parameters: Iterable[Parameter]) -> tuple[int, ...]:
    """Return the elements of the trained parameters."""
    return tuple(parameter.numel for parameter in parameters if not parameter.frozen)


def taken_up(plan: Plan, sizes: tuple[int, ...], *, first: bool) -> Line:
    """Return the gradients of one group while FSDP2 accumulates them, cast if they are the first and the dtype widens. [bytes]

    If the dtypes are alike, or autograd has cast the gradients on arrival, those of later micro-batches have been added
    already.
    """
    here, there = plan.width.compute, plan.reduce_bytes
    n_bytes = here * sum(sizes)
    if here == there or plan.cast_on_arrival:
        n_bytes = there * sum(sizes) if first else 0
    elif first:
        n_bytes = _highest_cast(sizes, here, there)
    return made_line(plan, n_bytes, "this micro-batch's, cast one by one or added to earlier ones")


def _highest_cast(sizes: tuple[int, ...], here: int, there: int) -> int:
    """Return the peak while tensors of one width become tensors of another, one after the other. [bytes]"""
    most, done, left = 0, 0, sum(sizes)
    for size in sizes:
        done += size
        most = max(most, there * done + here * left)
        left -= size
    return most

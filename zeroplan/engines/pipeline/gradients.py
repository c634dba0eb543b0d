"""Whole gradients on a rank of a pipeline, which add up until all micro-batches are through."""

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2 import buffers
from zeroplan.engines.fsdp2.plan import ACCUMULATE, Plan
from zeroplan.engines.pipeline.tensor import root_elements
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int

HALVES = "torch 2.13, torch/distributed/pipelining/_backward.py, stage_backward_weight"


def accumulated(plan: Plan, layers: tuple[int, ...], *, root: bool, whose: str = "this stage's") -> Line:
    """Whole gradients in the dtype in which they will be reduced. [bytes]"""
    elements = root_elements(plan) if root else 0
    for count, group in zip(layers, plan.blocks, strict=True):
        elements += count * group.numel
    n_bytes, formula = plan.reduce_bytes * elements, product(plan.reduce_bytes, elements)
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, f"{whose} whole gradients, not reduced yet", formula, ACCUMULATE)


def as_made(plan: Plan, layers: tuple[int, ...], *, root: bool, whose: str = "this stage's") -> Line:
    """Whole gradients of a second half, in the dtype that they were made in. [bytes]"""
    line = accumulated(plan._replace(reduce_bytes=plan.width.compute), layers, root=root)
    return line._replace(reason=f"{whose} whole gradients of weights, not added to the others yet", source=HALVES)


def root_gradients(plan: Plan, made: int, current: int = 0) -> Line:
    """Gradients of what is outside the blocks. [bytes]"""
    return in_elements(buffers.root_gradients(plan, made, current), plan.width.compute)


def made_line(plan: Plan, n_bytes: Int, reason: str) -> Line:
    """Whole gradients of this micro-batch, in the dtype that they are computed in. [bytes]"""
    width = plan.width.compute
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, reason, product(width, n_bytes // width), ACCUMULATE)


def in_elements(line: Line, width: int) -> Line:
    """Write a line as so many bytes times so many elements of this rank's stages."""
    kind, n_bytes, reason, _, source, tag = line
    return Line(kind, n_bytes, reason, product(width, n_bytes // width), source, tag)


def sizes_of_block(plan: Plan, run: int) -> tuple[int, ...]:
    """Elements of each parameter of a block."""
    return tuple(parameter.numel for parameter in plan.runs[run].parameters)


def taken_up(plan: Plan, sizes: tuple[int, ...], *, first: bool) -> Line:
    """Gradients of one group, cast one by one where they are the first and the reduction's dtype is wider. [bytes]"""
    here, there = plan.width.compute, plan.reduce_bytes
    n_bytes = here * sum(sizes)
    if here == there:
        n_bytes = n_bytes if first else 0
    elif first:
        n_bytes = _highest_cast(sizes, here, there)
    return made_line(plan, n_bytes, "this micro-batch's, cast one by one or added to earlier ones")


def _highest_cast(sizes: tuple[int, ...], here: int, there: int) -> int:
    """Most bytes while tensors in one width become tensors in another, in order."""
    most, done, left = 0, 0, sum(sizes)
    for size in sizes:
        done += size
        most = max(most, there * done + here * left)
        left -= size
    return most

"""The activations alive in the backward when this many gradients exist, in the running block or outside the blocks."""

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.formulas import total_formula
from zeroplan.engines.passes import KindPass, Passes
from zeroplan.engines.sources import FLOWING
from zeroplan.ledger import Kind, Line, Role, total_bytes
from zeroplan.numeric import Int
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.tags import HEAD_INPUT

_FLOW = "r·T·h"
_FLOWING = Kind.ACTIVATION_GRADIENTS


def running_lines(these: Passes, block: int, made: int) -> tuple[Line, Line]:
    """Return activations and their gradients in the running block when ``made`` elements of its weight gradients exist. [bytes]

    Outside the blocks: those of the embedding (``block`` -1), whose own gradient is the last and leaves nothing, or of the head
    (``n_blocks``).
    """
    lines = _alive_now(these, block, made)
    flowing, others = (tuple([one for one in lines if (one.kind is _FLOWING) is is_flow]) for is_flow in (True, False))
    return (
        Line(Kind.ACTIVATIONS, total_bytes(others), "activations of the block that runs", _sum_of(others), FLOWING),
        Line(_FLOWING, total_bytes(flowing), "their gradients in the block that runs", _sum_of(flowing), FLOWING),
    )


def running_size(these: Passes, block: int, made: int, beside: tuple[Line, ...]) -> Int:
    """Return the total of :func:`running_lines` and of other lines ``beside`` them. [bytes]"""
    return total_bytes((*_alive_now(these, block, made), *beside))


def points_of_masks(one: KindPass) -> Iterator[tuple[BackwardPoint, ...]]:
    """Yield the points of a block's backward, separately with and without a mask (:func:`_masks`)."""
    points = one.block.points
    for some in _masks(tuple([point.gradients for point in points])):
        yield points[some.start : some.stop]


def _alive_now(these: Passes, block: int, made: int) -> tuple[Line, ...]:
    """Return the live tensors of the running block when this many elements of its weight gradients exist.

    They are alive when autograd delivers the last of those gradients. There are none if everything below is frozen. Outside the
    blocks only a profile knows them.
    """
    head = these.head
    arrivals = head.handed_below if block < 0 else head.handed if block == these.n_blocks else these.of(block).block.handed
    if arrivals:
        for one in arrivals:
            if made <= one.gradients:
                return one.lines
        return arrivals[-1].lines
    flow = Line(_FLOWING, these.head.hidden_bytes, "", _FLOW)
    if block < 0:
        return (flow,) if made < these.below else ()
    return (*_left_of_head(these, with_norm=made != these.table), flow)


def _left_of_head(these: Passes, *, with_norm: bool) -> tuple[Line, ...]:
    """Return the tensors still saved outside the blocks when the head's gradient is delivered, or the final norm's (``with_norm``).

    The head's input is freed by then, and later the norm's normalised input. A LayerNorm is one operator, which leaves nothing.
    """
    saved = these.head.saved
    if with_norm and not any(line.tag.role is Role.NORMALISED for line in saved):
        return ()
    return tuple([line for line in saved if line.tag != HEAD_INPUT and not (with_norm and line.tag.role is Role.NORMALISED)])


GradientCounts = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""The kind of each block; and for each kind the elements of a block's gradients made when autograd delivers each weight's."""


def gradient_counts(these: Passes) -> GradientCounts:
    """Return the counts that locate a number of gradients within a block."""
    return these.order.of_block, tuple([tuple([arrival.gradients for arrival in one.block.handed]) for one in these.kinds])


def place_in_block(counts: GradientCounts, block: int, made: int) -> tuple[int, ...]:
    """Return the kind, the index of the block's next gradients, and whether they have just come; outside blocks the position."""
    of_block, of_kinds = counts
    if not 0 <= block < len(of_block):
        return (block,)
    gradients = of_kinds[of_block[block]]
    at = min(bisect_left(gradients, made), len(gradients) - 1)
    return of_block[block], at, made == gradients[at]


def _sum_of(lines: tuple[Line, ...]) -> str:
    return total_formula(tuple([line.formula for line in lines])) or "0"


@lru_cache(maxsize=256)
def _masks(gradients: tuple[int, ...]) -> tuple[range, ...]:
    """Return the points with a mask and those without: a column of batches may have both, one after the other.

    For a batch of the one, the lines of the other are 0.
    """
    if not gradients:  # frozen blocks without a backward
        return ()
    starts = [at for at in range(len(gradients)) if not at or gradients[at] < gradients[at - 1]]
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], len(gradients)], strict=True))

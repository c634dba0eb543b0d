"""The activations alive in the backward when this many gradients exist, in the running block or outside the blocks."""

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.formulas import total_formula
from zeroplan.engines.passes import Passes, RunPass
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


def running_size(these: Passes, block: int, made: int) -> Int:
    """Return the total of :func:`running_lines`. [bytes]"""
    return total_bytes(_alive_now(these, block, made))


def points_of_kinds(run: RunPass) -> Iterator[tuple[BackwardPoint, ...]]:
    """Yield the points of a block's backward, separately for each kind of block (:func:`_kinds`)."""
    points = run.block.points
    for kind in _kinds(tuple([point.gradients for point in points])):
        yield points[kind.start : kind.stop]


def _alive_now(these: Passes, block: int, made: int) -> tuple[Line, ...]:
    """Return the live tensors of the running block when this many elements of its weight gradients exist.

    They are alive when autograd delivers the last of those gradients. There are none if everything below is frozen. Outside the
    blocks only a profile knows them.
    """
    head = these.head
    of_block = (run.block.handed for run in these.runs if block < run.first + run.n_blocks)
    arrivals = head.handed_below if block < 0 else next(of_block, head.handed)
    if arrivals:
        return next((one.lines for one in arrivals if made <= one.gradients), arrivals[-1].lines)
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


GradientCounts = tuple[tuple[int, str, tuple[int, ...]], ...]
"""For each run: the block after its last, its kind, and the elements of a block's gradients made when autograd delivers each
weight's."""


def gradient_counts(these: Passes) -> GradientCounts:
    """Return the counts that locate a number of gradients within a block."""
    return tuple(
        [(run.first + run.n_blocks, run.kind, tuple([one.gradients for one in run.block.handed])) for run in these.runs]
    )


def place_in_block(counts: GradientCounts, block: int, made: int) -> tuple[str | int, ...]:
    """Return the kind, the index of the block's next gradients, and whether they have just come; outside blocks the position."""
    if not 0 <= block < counts[-1][0]:
        return (block,)
    kind, gradients = next((kind, arrivals) for end, kind, arrivals in counts if block < end)
    at = min(bisect_left(gradients, made), len(gradients) - 1)
    return kind, at, made == gradients[at]


def _sum_of(lines: tuple[Line, ...]) -> str:
    return total_formula(tuple([line.formula for line in lines])) or "0"


@lru_cache(maxsize=256)
def _kinds(gradients: tuple[int, ...]) -> tuple[range, ...]:
    """Return the points of each kind of block: a column of batches may have two kinds, with and without a mask.

    Their points are consecutive. For a batch of one kind, the lines of the other are 0.
    """
    if not gradients:  # frozen blocks without a backward
        return ()
    starts = [at for at in range(len(gradients)) if not at or gradients[at] < gradients[at - 1]]
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], len(gradients)], strict=True))

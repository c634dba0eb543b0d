"""The activations alive in the backward when this many gradients exist, in the running block or outside the blocks."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.engines.formulas import total_formula
from zeroplan.engines.passes import Passes, RunPass
from zeroplan.engines.sources import FLOWING
from zeroplan.ledger import Kind, Line, Role, total_bytes
from zeroplan.memo import recalled
from zeroplan.numeric import Bool, Int, where
from zeroplan.transformer.blocks import BackwardPoint, HandedOn
from zeroplan.transformer.families.tags import HEAD_INPUT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FLOW = "r·T·h"
_FLOWING = Kind.ACTIVATION_GRADIENTS


class Running(NamedTuple):
    """The running block's activations, and gradients of activations. [bytes]"""

    activations: Int
    gradients: Int

    @property
    def n_bytes(self) -> Int:
        """Both. [bytes]"""
        return self.activations + self.gradients


def running_of(lines: tuple[Line, ...]) -> Running:
    """Return activations and their gradients among these lines."""
    flowing = total_bytes(tuple(_flowing(lines)))
    return Running(total_bytes(lines) - flowing, flowing)


def _flowing(lines: tuple[Line, ...]) -> Iterator[Line]:
    return (line for line in lines if line.kind is _FLOWING)


def running_lines(these: Passes, block: Int, made: Int) -> tuple[Line, Line]:
    """Return activations and their gradients in the running block when ``made`` elements of its weight gradients exist. [bytes]

    Outside the blocks: those of the embedding (``block`` -1), whose own gradient is the last and leaves nothing, or of the head
    (``n_blocks``).
    """
    if isinstance(block, int) and isinstance(made, int):
        lines = _alive_now(these, block, made)
        flowing = _sum_of(_flowing(lines))
        running, formulas = running_of(lines), (_sum_of(line for line in lines if line.kind is not _FLOWING), flowing)
    else:
        running, formulas = _running_anywhere(these, block, made), ("", "")
    return (
        Line(Kind.ACTIVATIONS, running.activations, "activations of the block that runs", formulas[0], FLOWING),
        Line(_FLOWING, running.gradients, "their gradients in the block that runs", formulas[1], FLOWING),
    )


def running_size(these: Passes, block: Int, made: Int) -> Int:
    """Return the total of :func:`running_lines`. [bytes]"""
    if isinstance(block, int) and isinstance(made, int):
        return total_bytes(_alive_now(these, block, made))
    return _running_anywhere(these, block, made).n_bytes


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
    handed = head.handed_below if block < 0 else next(of_block, head.handed)
    if handed:
        return next((one.lines for one in handed if made <= one.gradients), handed[-1].lines)
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
    kind, gradients = next((kind, handed) for end, kind, handed in counts if block < end)
    at = min(bisect_left(gradients, made), len(gradients) - 1)
    return kind, at, made == gradients[at]


def _sum_of(lines: Iterable[Line]) -> str:
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


class _Handed:
    """The live tensors when gradients are delivered, in that order."""

    def __init__(self, of: tuple[HandedOn, ...]) -> None:
        """Store the arrivals, which must live as long as this object."""
        self.of, self.running = of, tuple([running_of(one.lines) for one in of])
        self.most = tuple(accumulate((one.gradients for one in of), max))
        """Elements made at each arrival, or at an earlier one."""

    @cached_property
    def tables(self) -> tuple["NDArray[np.int64]", tuple["NDArray[np.intp]", ...]]:
        """Activations and gradients of activations, stacked by arrival, and the indexes of the further axes."""
        import numpy as np  # noqa: PLC0415  a single job never needs it

        every = np.broadcast_arrays(*(size for one in self.running for size in one))
        table = np.stack([np.stack(every[0::2]), np.stack(every[1::2])]).astype(np.int64)
        return table, np.ix_(*map(np.arange, table.shape[2:]))


def _handed_when(handed: tuple[HandedOn, ...], made: Int) -> Running:
    """Return the live bytes when the last of this many gradients is delivered, also for columns."""
    found = recalled(lambda: (_handed_when, id(handed)), lambda: _Handed(handed))
    last = len(handed) - 1
    if isinstance(made, int):
        return found.running[min(bisect_left(found.most, made), last)]
    import numpy as np  # noqa: PLC0415  a single job never needs it

    (activations, gradients), beside = found.tables
    at = (np.minimum(np.searchsorted(found.most, made), last), *beside)
    return Running(activations[at], gradients[at])


def _beyond_blocks(these: Passes, block: Int, made: Int) -> Running:
    """Return the live bytes outside the blocks, for columns; 0 inside the blocks."""
    head, nothing = these.head, Running(0, 0)
    if head.handed_below:
        below = _handed_when(head.handed_below, made)
    else:
        below = Running(0, where(made < these.below, head.hidden_bytes, 0))
    if head.handed:
        above = _handed_when(head.handed, made)
    else:
        after_head, after_norm = (total_bytes(_left_of_head(these, with_norm=with_norm)) for with_norm in (False, True))
        above = Running(where(made == these.table, after_head, after_norm), head.hidden_bytes)
    return _either(block < 0, below, _either(block < these.n_blocks, nothing, above))


def _running_anywhere(these: Passes, block: Int, made: Int) -> Running:
    low, high = (block, block) if isinstance(block, int) else (block.min(), block.max())
    for run in these.runs:
        if run.block.handed and run.first <= low and high < run.first + run.n_blocks:
            return _handed_when(run.block.handed, made)
    inside = low >= 0 and high < these.n_blocks
    found = Running(0, 0) if inside else _beyond_blocks(these, block, made)
    for run in these.runs:
        if run.block.handed and run.first <= high and low < run.first + run.n_blocks:
            here = (block >= run.first) & (block < run.first + run.n_blocks)
            found = _either(here, _handed_when(run.block.handed, made), found)
    return found


def _either(condition: Bool, yes: Running, no: Running) -> Running:
    return Running(where(condition, yes.activations, no.activations), where(condition, yes.gradients, no.gradients))

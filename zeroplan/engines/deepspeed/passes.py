"""When, in one forward and backward pass, can memory peak, as far as activations go?

Each instant holds the activations alive then and says which block runs; an engine adds its weights, gradients and buffers.
"""

from typing import NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.engines.formulas import blocks_sum, total_formula
from zeroplan.engines.outside import outside
from zeroplan.engines.precisions import compute_of
from zeroplan.engines.sources import FLOWING, KEPT
from zeroplan.ledger import Kind, Line, Phase, total_bytes
from zeroplan.numeric import Int, maximum, minimum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec, Recompute
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BackwardPoint, BlockPass, HeadPass
from zeroplan.transformer.params import layout


class RunPass(NamedTuple):
    """Consecutive blocks of one kind, what one of them costs, and what it keeps until its backward."""

    kind: str
    first: int
    n_blocks: int
    block: BlockPass
    kept: tuple[Line, ...]
    kept_bytes: Int
    settled: tuple[Int, ...]
    """For each point of its backward, the activations without the temporaries of the operator that runs there. [bytes]

    That is about what is alive when the gradient made last is handed on, between two points; under recomputation with the
    block's input.
    """


class Passes(NamedTuple):
    """One forward and backward pass of the whole model."""

    runs: tuple[RunPass, ...]
    kinds: tuple[str, ...]
    """Kind of each run, as symbols have it."""
    head: HeadPass
    recompute: Recompute
    output: tuple[Line, ...]
    """The logits, where the training loop keeps them while it calls backward."""

    @property
    def n_blocks(self) -> int:
        """Blocks of the model."""
        return self.runs[-1].first + self.runs[-1].n_blocks


class Instant(NamedTuple):
    """A moment of the pass: its activations, its point, the block that runs (``n_blocks``: head; -1: embedding)."""

    name: str
    phase: Phase
    lines: tuple[Line, ...]
    block: Int
    point: BackwardPoint


_FLOW = "r·T·h"
_TEMPORARY, _WORKSPACE = Kind.TEMPORARY, Kind.WORKSPACE
_NOWHERE = BackwardPoint("", (), 0, 0, 0)


def passes(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> Passes:
    """Work out what each kind of block, and the part outside the blocks, costs."""
    compute = compute_of(recipe)
    runs: list[RunPass] = []
    first = 0
    for run in layout(model).runs:
        block = block_pass(model, run.kind, compute, batch)
        kept = block.kept(recipe.recompute)
        beside = total_bytes(block.checkpoint_in_backward) if recipe.recompute == "full" else 0
        settled = tuple(beside + _settled_bytes(point) for point in block.points)
        runs.append(RunPass(run.kind, first, run.layers, block, kept, total_bytes(kept), settled))
        first += run.layers
    head = outside(model, recipe, batch)
    kinds = tuple(run.kind for run in runs)
    return Passes(tuple(runs), kinds, head, recipe.recompute, head.output if recipe.keep_logits else ())


def kept_before(these: Passes, block: Int) -> Line:
    """Return what the blocks before ``block`` (0 to ``n_blocks``) keep for their backward. [bytes]"""
    formula = _kept_formula(these, block) if isinstance(block, int) else ""
    reason = "kept by the blocks before for their backward"
    return Line(Kind.ACTIVATIONS, kept_bytes(these, block), reason, formula, KEPT[these.recompute])


def kept_bytes(these: Passes, block: Int) -> Int:
    """Return the size of :func:`kept_before`. [bytes]"""
    first, *later = these.runs
    n_bytes = (minimum(block, first.n_blocks) if later else block) * first.kept_bytes
    for run in later:
        n_bytes = n_bytes + minimum(maximum(block - run.first, 0), run.n_blocks) * run.kept_bytes
    return n_bytes


def _kept_formula(these: Passes, block: int) -> str:
    if len(these.runs) == 1:
        return blocks_sum("S", (block,), these.kinds)
    return blocks_sum("S", tuple(min(max(block - run.first, 0), run.n_blocks) for run in these.runs), these.kinds)


def kept_symbols(these: Passes) -> tuple[Symbol, ...]:
    """Return what the formulas of kept activations count."""
    return tuple(
        Symbol(f"S_{run.kind}", run.kept_bytes, f"bytes one {run.kind} block keeps from its forward to its backward")
        for run in these.runs
    )


def kept_in_a_block(these: Passes) -> tuple[tuple[str, tuple[Line, ...]], ...]:
    """Return what one block of each kind keeps, line by line."""
    return tuple((f"one {run.kind} block", run.kept) for run in these.runs)


def kept_by_all(these: Passes) -> tuple[Line, ...]:
    """Return what all blocks keep, the last one line by line."""
    last = these.runs[-1]
    return (kept_before(these, these.n_blocks - 1), *last.kept)


def forward_instant(these: Passes, run: RunPass, block: int) -> Instant:
    """Return the highest moment in the forward of a block."""
    own = (*run.kept, *(run.block.forward if these.recompute == "none" else run.block.forward_recompute))
    lines = (*these.head.shared, *these.head.forward, *these.head.first_input, kept_before(these, block), *own)
    return Instant("forward of a block", Phase.FORWARD, lines, block, _NOWHERE)


def loss_instant(these: Passes) -> Instant:
    """Return the instant of the loss, forward."""
    lines = (*these.head.shared, *kept_by_all(these), *these.head.saved, *these.head.loss_forward)
    return Instant("loss forward", Phase.LOSS, lines, these.n_blocks, _NOWHERE)


def head_instants(these: Passes) -> tuple[Instant, ...]:
    """Return the instants of the backward of loss, head and final norm."""
    around = (*these.head.shared, *these.output, *kept_by_all(these))
    return tuple(
        Instant(f"backward of the {point.name}", Phase.BACKWARD, around + point.lines, these.n_blocks, point)
        for point in these.head.points
    )


def checkpoint_beside(these: Passes, run: RunPass) -> tuple[Line, ...]:
    """Under recomputation, a block's input, alive during its own backward."""
    return run.block.checkpoint_in_backward if these.recompute == "full" else ()


def after_head_bytes(these: Passes) -> Int:
    """Return what is alive beyond the blocks when the head's gradient is handed on: what the norm saved, the flow. [bytes]"""
    return total_bytes(these.head.saved) + these.head.hidden_bytes


def head_forward_instant(these: Passes) -> Instant:
    """Return the instant of the head's multiplication, forward: its input and the logits."""
    lines = (*these.head.shared, *kept_by_all(these), *these.head.saved, *these.head.output)
    return Instant("forward of the head", Phase.FORWARD, lines, these.n_blocks, _NOWHERE)


def _settled(point: BackwardPoint) -> list[Line]:
    return [line for line in point.lines if line.kind is not _TEMPORARY and line.kind is not _WORKSPACE]


def _settled_bytes(point: BackwardPoint) -> Int:
    total: Int = 0
    for line in point.lines:
        if line.kind is not _TEMPORARY and line.kind is not _WORKSPACE:
            total = total + line.n_bytes
    return total


def running_line(these: Passes, block: Int, made: Int) -> Line:
    """Return the activations of the block that runs when ``made`` elements of its gradients exist. [bytes]

    Beyond the blocks, those of the embedding (``block`` -1) or of the head (``n_blocks``).
    """
    if isinstance(block, int) and isinstance(made, int):
        n_bytes, formula = _running_now(these, block, made)
    else:
        n_bytes, formula = _running_anywhere(these, block, made), ""
    return Line(Kind.ACTIVATIONS, n_bytes, "activations of the block that runs", formula, FLOWING)


def running_bytes(these: Passes, block: int, made: int) -> Int:
    """Return the size of :func:`running_line` for plain numbers. [bytes]"""
    if block < 0:
        return these.head.hidden_bytes
    if block >= these.n_blocks:
        return after_head_bytes(these)
    run = _run_of(these, block)
    return run.settled[_point_after(run, made)]


def _running_now(these: Passes, block: int, made: int) -> tuple[Int, str]:
    """Bytes and formula of ``running_line`` where block and gradients are plain numbers."""
    n_bytes = running_bytes(these, block, made)
    if block < 0:
        return n_bytes, _FLOW
    if block >= these.n_blocks:
        return n_bytes, total_formula((*(line.formula for line in these.head.saved), _FLOW))
    run = _run_of(these, block)
    lines = (*checkpoint_beside(these, run), *_settled(run.block.points[_point_after(run, made)]))
    return n_bytes, total_formula(tuple([line.formula for line in lines]))


def _run_of(these: Passes, block: int) -> RunPass:
    return next(run for run in these.runs if block < run.first + run.n_blocks)


def _point_after(run: RunPass, made: int) -> int:
    """Index of the first point of a block that comes after so many gradients; the last where none does."""
    return next((index for index, point in enumerate(run.block.points) if made <= point.gradients), -1)


def _running_anywhere(these: Passes, block: Int, made: Int) -> Int:
    n_bytes = where(block < 0, these.head.hidden_bytes, where(block < these.n_blocks, 0, after_head_bytes(these)))
    for run in these.runs:
        here = (block >= run.first) & (block < run.first + run.n_blocks)
        n_bytes = n_bytes + where(here, _at_point(run, made), 0)
    return n_bytes


def _at_point(run: RunPass, made: Int) -> Int:
    """Return the activations at the first point of a block that comes after so many gradients. [bytes]"""
    n_bytes = run.settled[-1]
    for point, settled in zip(reversed(run.block.points[:-1]), reversed(run.settled[:-1]), strict=True):
        n_bytes = where(made <= point.gradients, settled, n_bytes)
    return n_bytes


def around_block(these: Passes, run: RunPass, block: Int) -> tuple[Line, ...]:
    """Return the activations beside those of a block's own points, in its backward.

    Under recomputation the block's input is one of them.
    """
    return (*these.head.shared, *these.output, kept_before(these, block), *checkpoint_beside(these, run))


def embedding_instant(these: Passes) -> Instant:
    """Return the instant of the embedding's backward: the gradient of its output, all blocks done."""
    gradient = Line(Kind.ACTIVATIONS, these.head.hidden_bytes, "gradient of the embedding's output", _FLOW, FLOWING)
    lines = (*these.head.shared, *these.output, gradient)
    return Instant("backward of the embedding", Phase.BACKWARD, lines, -1, _NOWHERE)

"""When, in one forward and backward pass, can memory peak, as far as activations go?

Each instant holds the activations alive then and says which block runs; an engine adds its weights, gradients and buffers.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.engines.block_runs import recompute_of, run_pass
from zeroplan.engines.formulas import blocks_sum, total_formula
from zeroplan.engines.outside import outside
from zeroplan.engines.precisions import compute_of
from zeroplan.engines.sources import FLOWING, KEPT
from zeroplan.ledger import Kind, Line, Phase, total_bytes
from zeroplan.numeric import Bool, Int, maximum, minimum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec, Recompute
from zeroplan.transformer.blocks import BackwardPoint, BlockPass, HeadPass
from zeroplan.transformer.losses import HEAD_INPUT
from zeroplan.transformer.parameters import BlockRun, Parameter
from zeroplan.transformer.recomputed import first_recomputed, layout_by_recomputation, order_by_recomputation


class Running(NamedTuple):
    """Of the block that runs in backward: its activations, and gradients of activations. [bytes]"""

    activations: Int
    gradients: Int

    @property
    def n_bytes(self) -> Int:
        """Both. [bytes]"""
        return self.activations + self.gradients


class RunPass(NamedTuple):
    """Consecutive blocks of one kind, what one of them costs, and what it keeps until its backward."""

    kind: str
    """As symbols have it."""
    first: int
    n_blocks: int
    recompute: Recompute
    block: BlockPass
    kept: tuple[Line, ...]
    kept_bytes: Int
    settled: tuple["Running", ...]
    """For each point of its backward, what runs when the gradient that it makes is handed on.

    Under recomputation with the block's input.
    """
    between: tuple["Running", ...]
    """The same for a gradient that is made between the point before and this one."""


class Passes(NamedTuple):
    """One forward and backward pass of the whole model."""

    runs: tuple[RunPass, ...]
    kinds: tuple[str, ...]
    """Kind of each run, as symbols have it."""
    head: HeadPass
    recompute: Recompute
    output: tuple[Line, ...]
    """The logits, where the training loop keeps them while it calls backward."""
    table: int
    """Elements of the token embedding, and of the head."""
    below: int
    """Elements of all parameters before the blocks."""

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
    head, runs, first = outside(model, recipe, batch), list[RunPass](), 0
    recomputed = first_recomputed(model, recipe)
    flow, parts = _flow(head), layout_by_recomputation(model, recomputed)
    costs = {run.name: _run_pass(model, run, recipe, batch, flow) for run in parts.runs}
    for kind, layers in stretches(model, recomputed):
        runs.append(costs[kind]._replace(first=first, n_blocks=layers))
        first += layers
    kinds = tuple(run.kind for run in runs)
    output = head.output if recipe.keep_logits else ()
    table = model.vocab_size * model.hidden_size
    return Passes(tuple(runs), kinds, head, recipe.recompute, output, table, _numel(parts.embeddings))


def _run_pass(model: ModelSpec, run: BlockRun, recipe: RecipeSpec, batch: Batch, flow: Line) -> RunPass:
    """What a block of a kind costs, wherever it stands."""
    compute = compute_of(recipe)
    block, recompute = run_pass(model, run, compute, batch), recompute_of(run, compute)
    kept = block.kept(recompute)
    beside = block.checkpoint_in_backward if recompute != "none" else ()
    settled = tuple(_running((*beside, *_settled(block, index, flow))) for index in range(len(block.points)))
    between = tuple(_running((*beside, *_between(block, index))) for index in range(len(block.points)))
    return RunPass(run.name, 0, 0, recompute, block, kept, total_bytes(kept), settled, between)


_FIRST, _LAST = 2, 3
"""Stretches at either end that stand in a row of their own where kinds take turns: a turn, and the rest of one after a turn."""


@lru_cache(maxsize=256)
def stretches(model: ModelSpec, recomputed: int | None = None) -> tuple[tuple[str, int], ...]:
    """Return consecutive blocks of one kind, with how many there are; where kinds take turns, those in the middle as if sorted.

    What blocks keep and what gradients they make grow by the same amount from turn to turn, so that a peak lies in the first turn
    or in the last one.

    >>> stretches(ModelSpec(family="gemma2", hidden_size=8, intermediate_size=16, num_hidden_layers=13, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=4, vocab_size=10, sliding_window=8))
    (('local', 1), ('global', 1), ('local', 4), ('global', 4), ('local', 1), ('global', 1), ('local', 1))
    """
    kinds = [run.name for run in layout_by_recomputation(model, recomputed).runs]
    order = order_by_recomputation(model, recomputed)
    cut = recomputed or len(order)
    return (*_in_stretches(kinds, order[:cut]), *_in_stretches(kinds, order[cut:]))


def _in_stretches(kinds: list[str], order: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    found = [(kinds[run], len(list(same))) for run, same in groupby(order)]
    if len(found) <= _FIRST + _LAST:
        return tuple(found)
    middle: dict[str, int] = {}
    for kind, layers in found[_FIRST:-_LAST]:
        middle[kind] = middle.get(kind, 0) + layers
    return (*found[:_FIRST], *middle.items(), *found[-_LAST:])


@lru_cache(maxsize=256)
def _numel(parameters: tuple[Parameter, ...]) -> int:
    return sum(parameter.numel for parameter in parameters)


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
        for run in _one_of_each_kind(these)
    )


def kept_in_a_block(these: Passes) -> tuple[tuple[str, tuple[Line, ...]], ...]:
    """Return what one block of each kind keeps, line by line."""
    return tuple((f"one {run.kind} block", run.kept) for run in _one_of_each_kind(these))


def _one_of_each_kind(these: Passes) -> tuple[RunPass, ...]:
    return tuple({run.kind: run for run in these.runs}.values())


def kept_by_all(these: Passes) -> tuple[Line, ...]:
    """Return what all blocks keep, the last one line by line."""
    last = these.runs[-1]
    return (kept_before(these, these.n_blocks - 1), *last.kept)


def forward_instant(these: Passes, run: RunPass, block: int) -> Instant:
    """Return the highest moment in the forward of a block."""
    own = (*run.block.entered, *run.kept, *(run.block.forward if run.recompute == "none" else run.block.forward_recompute))
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


def checkpoint_beside(run: RunPass) -> tuple[Line, ...]:
    """Under recomputation of either kind, a block's input, alive during its own backward."""
    return run.block.checkpoint_in_backward if run.recompute != "none" else ()


def head_gathering_instant(these: Passes) -> Instant:
    """Return the instant before the head's multiplication, forward: its input is there, the logits are not."""
    lines = (*these.head.shared, *kept_by_all(these), *these.head.saved)
    return Instant("gathered for the head", Phase.FORWARD, lines, these.n_blocks, _NOWHERE)


def head_forward_instant(these: Passes) -> Instant:
    """Return the instant of the head's multiplication, forward: its input and the logits."""
    lines = (*these.head.shared, *kept_by_all(these), *these.head.saved, *these.head.output)
    return Instant("forward of the head", Phase.FORWARD, lines, these.n_blocks, _NOWHERE)


def _running(lines: tuple[Line, ...]) -> Running:
    flowing = total_bytes(tuple(_flowing(lines)))
    return Running(total_bytes(lines) - flowing, flowing)


def _flowing(lines: tuple[Line, ...]) -> Iterator[Line]:
    return (line for line in lines if line.kind is Kind.ACTIVATION_GRADIENTS)


def _lasting(point: BackwardPoint) -> list[Line]:
    """Return what is alive of a point without the temporaries of the operator that runs there."""
    return [line for line in point.lines if line.kind is not _TEMPORARY and line.kind is not _WORKSPACE]


def _between(block: BlockPass, index: int) -> list[Line]:
    """Return what is alive when a gradient is handed on that is made between the point before and this one."""
    known = block.points[index - 1].between if index else ()
    return list(known) or _lasting(block.points[index])


def _settled(block: BlockPass, index: int, flow: Line) -> list[Line]:
    """Return what is alive of a point when its operator is done and the gradient it made is handed on.

    Its temporaries are gone, and so is the input of a product whose gradient that is: autograd lets go of what it saved before it
    hands on what it made (torch 2.13, ``engine.cpp``, ``call_function`` and ``release_variables``). Before a norm, what flows
    has been added up to ``flow``, one gradient of a hidden state.
    """
    point = block.points[index]
    if point.handed_on:
        return list(point.handed_on)
    lines = _lasting(point)
    if not point.current_gradient or index + 1 == len(block.points):
        return lines
    after = block.points[index + 1]
    stay = {line.reason for line in after.lines}
    lines = [line for line in lines if line.reason in stay or _OPERAND not in line.reason]
    if not after.name.startswith("norm"):
        return lines
    stay |= {line.reason for line in block.saved}
    return [*(line for line in lines if line.reason in stay), flow]


#: How the lines of a block name what a product reads and autograd has saved.
_OPERAND = "input of the"
_NORMALISED = "normalised input"


def _flow(head: HeadPass) -> Line:
    return Line(Kind.ACTIVATION_GRADIENTS, head.hidden_bytes, "gradient of a hidden state", head.hidden_formula, FLOWING)


def running_lines(these: Passes, block: Int, made: Int) -> tuple[Line, Line]:
    """Return activations and their gradients in the block that runs when ``made`` elements of its weights' gradients exist. [bytes]

    Beyond the blocks, those of the embedding (``block`` -1), whose own gradient is the last and leaves nothing behind, or of the
    head (``n_blocks``).
    """
    if isinstance(block, int) and isinstance(made, int):
        running, formulas = _running_now(these, block, made), _running_formulas(these, block, made)
    else:
        running, formulas = _running_anywhere(these, block, made), ("", "")
    return (
        Line(Kind.ACTIVATIONS, running.activations, "activations of the block that runs", formulas[0], FLOWING),
        Line(Kind.ACTIVATION_GRADIENTS, running.gradients, "their gradients in the block that runs", formulas[1], FLOWING),
    )


def running_bytes(these: Passes, block: int, made: int) -> Int:
    """Return the size of :func:`running_lines` for plain numbers. [bytes]"""
    return _running_now(these, block, made).n_bytes


def _handed_at(these: Passes, block: int, made: int) -> tuple[Line, ...]:
    """What a profile says is alive when the last of so many gradients is handed on; nothing of a family, whose points say it."""
    head = these.head
    handed = head.handed_below if block < 0 else head.handed if block >= these.n_blocks else _run_of(these, block).block.handed
    return next((one.lines for one in handed if made <= one.gradients), handed[-1].lines if handed else ())


def _running_now(these: Passes, block: int, made: int) -> Running:
    if lines := _handed_at(these, block, made):
        return _running(lines)
    if block < 0:
        return Running(0, these.head.hidden_bytes if made < these.below else 0)
    if block >= these.n_blocks:
        return Running(total_bytes(_left_of_head(these, with_norm=made != these.table)), these.head.hidden_bytes)
    run = _run_of(these, block)
    points = run.block.points
    return _highest([
        (run.settled if made == points[at].gradients else run.between)[at] for at in _points_after(run, made)
    ])  # fmt: skip


def _left_of_head(these: Passes, *, with_norm: bool) -> tuple[Line, ...]:
    """Return what is still saved beyond the blocks when the head's gradient is handed on, or the final norm's (``with_norm``).

    The head's input is gone, and then what the norm multiplied with its weight. A LayerNorm is one operator, which leaves nothing.
    """
    saved = these.head.saved
    if with_norm and not any(line.reason.endswith(_NORMALISED) for line in saved):
        return ()
    gone = (HEAD_INPUT, _NORMALISED) if with_norm else (HEAD_INPUT,)
    return tuple([line for line in saved if not line.reason.endswith(gone)])


GradientCounts = tuple[tuple[int, tuple[int, ...]], ...]
"""Of each run the block after its last, and the elements of a block's gradients made at each point of its backward."""


def gradient_counts(these: Passes) -> GradientCounts:
    """Return what says at which point of its backward a block is when so many gradients are made."""
    return tuple(
        (run.first + run.n_blocks, tuple([point.gradients for point in run.block.handed or run.block.points]))
        for run in these.runs
    )


def place_in_block(counts: GradientCounts, block: int, made: int) -> tuple[int, ...]:
    """Return the run and the point of its blocks, and whether it is at that point or before; or that it is outside blocks."""
    if not 0 <= block < counts[-1][0]:
        return (block,)
    run, gradients = next((at, points) for at, (end, points) in enumerate(counts) if block < end)
    points = _first_after(gradients, made)
    return run, *points, *(made == gradients[point] for point in points)


def _running_formulas(these: Passes, block: int, made: int) -> tuple[str, str]:
    """Write ``_running_now`` in symbols."""
    if lines := _handed_at(these, block, made):
        return _sum_of(line for line in lines if line.kind is not Kind.ACTIVATION_GRADIENTS), _sum_of(_flowing(lines))
    if block < 0:
        return "0", _FLOW if made < these.below else "0"
    if block >= these.n_blocks:
        return _sum_of(_left_of_head(these, with_norm=made != these.table)), _FLOW
    run = _run_of(these, block)
    index = _points_after(run, made)[0]
    point = run.block.points[index]
    alive = _settled(run.block, index, _flow(these.head)) if made == point.gradients else _between(run.block, index)
    lines = (*checkpoint_beside(run), *alive)
    return _sum_of(line for line in lines if line.kind is not Kind.ACTIVATION_GRADIENTS), _sum_of(_flowing(lines))


def _sum_of(lines: Iterable[Line]) -> str:
    return total_formula(tuple([line.formula for line in lines])) or "0"


def _run_of(these: Passes, block: int) -> RunPass:
    return next(run for run in these.runs if block < run.first + run.n_blocks)


def _points_after(run: RunPass, made: int) -> tuple[int, ...]:
    """Index of the first point of a block that comes after so many gradients; the last where none does."""
    return _first_after(tuple([point.gradients for point in run.block.points]), made)


@lru_cache(maxsize=4096)
def _first_after(gradients: tuple[int, ...], made: int) -> tuple[int, ...]:
    """That index, one for each kind of block (:func:`_kinds`)."""
    return tuple(next((at for at in kind if made <= gradients[at]), kind[-1]) for kind in _kinds(gradients))


@lru_cache(maxsize=256)
def _kinds(gradients: tuple[int, ...]) -> tuple[range, ...]:
    """Which points are of one kind of block: a column of batches may have two, with and without a mask.

    Their points follow each other, and where a batch is of one kind the lines of the other are nothing.
    """
    starts = [at for at in range(len(gradients)) if not at or gradients[at] < gradients[at - 1]]
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], len(gradients)], strict=True))


def _handed_anywhere(these: Passes, block: Int, made: Int) -> Running:
    """:func:`_handed_at` for columns."""
    head, end = these.head, these.n_blocks
    found = Running(0, 0)
    places = [(block < 0, head.handed_below), (block >= end, head.handed)]
    places += [((block >= run.first) & (block < run.first + run.n_blocks), run.block.handed) for run in these.runs]
    for here, handed in places:
        at = Running(0, 0)
        for last, one in enumerate(reversed(handed)):
            at = _either(made <= one.gradients, _running(one.lines), at) if last else _running(one.lines)
        found = _either(here, at, found)
    return found


def _running_anywhere(these: Passes, block: Int, made: Int) -> Running:
    if these.runs[0].block.handed:
        return _handed_anywhere(these, block, made)
    after_head, after_norm = (total_bytes(_left_of_head(these, with_norm=with_norm)) for with_norm in (False, True))
    activations = where(block < these.n_blocks, 0, where(made == these.table, after_head, after_norm))
    flow = these.head.hidden_bytes
    gradients = where(block < 0, where(made < these.below, flow, 0), where(block < these.n_blocks, 0, flow))
    for run in these.runs:
        here = (block >= run.first) & (block < run.first + run.n_blocks)
        at = _at_point(run, made)
        activations = activations + where(here, at.activations, 0)
        gradients = gradients + where(here, at.gradients, 0)
    return Running(activations, gradients)


def _at_point(run: RunPass, made: Int) -> Running:
    """Return the activations at the first point of a block that comes after so many gradients."""
    kinds = _kinds(tuple([point.gradients for point in run.block.points]))
    return _highest([_at_point_of(run, kind, made) for kind in kinds])


def _at_point_of(run: RunPass, kind: range, made: Int) -> Running:
    found = Running(0, 0)
    for at in reversed(kind):
        gradients = run.block.points[at].gradients
        here = _either(made == gradients, run.settled[at], run.between[at])
        found = here if at == kind[-1] else _either(made <= gradients, here, found)
    return found


def _highest(found: list[Running]) -> Running:
    """What is there, of kinds of blocks of which all but one are nothing but what all have."""
    first, *others = found
    for other in others:
        first = Running(maximum(first.activations, other.activations), maximum(first.gradients, other.gradients))
    return first


def _either(condition: Bool, yes: Running, no: Running) -> Running:
    return Running(where(condition, yes.activations, no.activations), where(condition, yes.gradients, no.gradients))


def shared_at(these: Passes, block: Int) -> tuple[Line, ...]:
    """Return what blocks share, in the backward of a block, or of the embedding (-1), where lines of nothing stand for tables."""
    if isinstance(block, int):
        gone = (line._replace(n_bytes=0, formula="0") for line in these.head.with_blocks)
        return these.head.shared if block >= 0 else (*these.head.at_embedding, *gone)
    tables = (line._replace(n_bytes=where(block >= 0, line.n_bytes, 0)) for line in these.head.with_blocks)
    return (*these.head.at_embedding, *tables)


def around_block(these: Passes, run: RunPass, block: Int) -> tuple[Line, ...]:
    """Return the activations beside those of a block's own points, in its backward.

    Under recomputation the block's input is one of them.
    """
    return (*these.head.shared, *these.output, kept_before(these, block), *checkpoint_beside(run))


def embedding_instant(these: Passes) -> Instant:
    """Return the instant of the embedding's backward: the gradient of its output, all blocks done."""
    head, reason = these.head, "gradient of the embedding's output"
    gradient = Line(Kind.ACTIVATION_GRADIENTS, head.hidden_bytes, reason, head.hidden_formula, FLOWING)
    lines = (*head.at_embedding, *these.output, gradient, *head.below_blocks)
    return Instant("backward of the embedding", Phase.BACKWARD, lines, -1, _NOWHERE)

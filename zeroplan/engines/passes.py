"""One forward and backward pass of a whole model: the memory of its blocks, in runs of one kind, and of the rest.

Engines walk through it, and add weights, gradients and buffers.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, groupby
from operator import mul
from typing import NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.engines.formulas import kept_by, several
from zeroplan.engines.outside import outside, recompute_of, run_pass
from zeroplan.engines.precisions import compute_of
from zeroplan.engines.sources import FLOWING, KEPT
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec, Recompute
from zeroplan.transformer.blocks import BackwardPoint, BlockPass, HeadPass
from zeroplan.transformer.parameters import BlockRun
from zeroplan.transformer.recomputed import first_recomputed, layout_by_recomputation, order_by_recomputation


class RunPass(NamedTuple):
    """Consecutive blocks of one kind: the memory of one of them, and the tensors that it keeps until its backward."""

    kind: str
    """The kind as symbols write it."""
    first: int
    n_blocks: int
    recompute: Recompute
    block: BlockPass
    kept: tuple[Line, ...]
    kept_bytes: Int
    kept_casts: Int = 0
    """The part of ``kept_bytes`` that copies of weights take."""


class Passes(NamedTuple):
    """One forward and backward pass of the whole model."""

    runs: tuple[RunPass, ...]
    kinds: tuple[str, ...]
    """Kind of each run, as symbols write it."""
    head: HeadPass
    recompute: Recompute
    output: tuple[Line, ...]
    """The logits, if the training loop keeps them during the backward."""
    table: int
    """Elements of the token embedding, or of the head."""
    below: int
    """Elements of all parameters before the blocks."""
    firsts: tuple[int, ...]
    lengths: tuple[int, ...]
    """The first block of each run, and the number of its blocks."""
    keeps: tuple[Int, ...]
    """What a block of each run keeps. [bytes]"""

    @property
    def n_blocks(self) -> int:
        """Blocks of the model."""
        return self.firsts[-1] + self.lengths[-1]

    def before(self, block: int) -> tuple[int, ...]:
        """Return how many blocks of each run come before a block."""
        at = max(bisect_right(self.firsts, block) - 1, 0)
        ahead = min(max(block - self.firsts[at], 0), self.lengths[at])
        return *self.lengths[:at], ahead, *(0,) * (len(self.lengths) - at - 1)


def passes(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> Passes:
    """Return the memory of each kind of block and of the part outside the blocks."""
    head, runs, first = outside(model, recipe, batch), list[RunPass](), 0
    recomputed = first_recomputed(model, recipe)
    parts = layout_by_recomputation(model, recomputed)
    costs = {run.name: _run_pass(model, run, recipe, batch) for run in parts.runs}
    for kind, layers in stretches(model, recomputed):
        runs.append(costs[kind]._replace(first=first, n_blocks=layers))
        first += layers
    kinds = tuple(run.kind for run in runs)
    output = head.output if recipe.keep_logits else ()
    table = model.vocab_size * model.hidden_size
    below = sum(one.numel for one in parts.embeddings)
    places = tuple([run.first for run in runs]), tuple([run.n_blocks for run in runs]), tuple([run.kept_bytes for run in runs])
    return Passes(tuple(runs), kinds, head, recipe.recompute, output, table, below, *places)


def _run_pass(model: ModelSpec, run: BlockRun, recipe: RecipeSpec, batch: Batch) -> RunPass:
    """Return the memory of one block of a kind, at any position."""
    compute = compute_of(recipe)
    block, recompute = run_pass(model, run, compute, batch), recompute_of(run, compute)
    kept = block.kept(recompute)
    casts = total_bytes(tuple([line for line in kept if line.kind is Kind.WEIGHT_CASTS]))
    return RunPass(run.name, 0, 0, recompute, block, kept, total_bytes(kept), casts)


_FIRST, _LAST = 2, 3
"""Number of runs at either end that get a row each if kinds alternate: one full period, and the rest after it."""


@lru_cache(maxsize=256)
def stretches(model: ModelSpec, recomputed: int | None = None) -> tuple[tuple[str, int], ...]:
    """Return consecutive blocks of one kind, with their number. If kinds alternate, the ones in the middle are sorted by kind.

    They stay unsorted if kinds have different parameters, whose positions matter too.

    Kept activations and gradients grow by the same amount from period to period, so memory peaks in the first or the last
    period.

    >>> stretches(ModelSpec(family="gemma2", hidden_size=8, intermediate_size=16, num_hidden_layers=13, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=4, vocab_size=10, sliding_window=8))
    (('local', 1), ('global', 1), ('local', 4), ('global', 4), ('local', 1), ('global', 1), ('local', 1))
    """
    runs = layout_by_recomputation(model, recomputed).runs
    kinds, alike = [run.name for run in runs], len({run.parameters for run in runs}) == 1
    order = order_by_recomputation(model, recomputed)
    cut = recomputed or len(order)
    return tuple([one for part in (order[:cut], order[cut:]) for one in _in_stretches(kinds, part, alike=alike)])


def _in_stretches(kinds: list[str], order: tuple[int, ...], *, alike: bool) -> tuple[tuple[str, int], ...]:
    found = [(kinds[run], len(list(same))) for run, same in groupby(order)]
    if len(found) <= _FIRST + _LAST or not alike:
        return tuple(found)
    middle: dict[str, int] = {}
    for kind, layers in found[_FIRST:-_LAST]:
        middle[kind] = middle.get(kind, 0) + layers
    return (*found[:_FIRST], *middle.items(), *found[-_LAST:])


def kept_before(these: Passes, block: int) -> tuple[Line, ...]:
    """Return the activations and copies of frozen weights that the blocks before ``block`` (0 to ``n_blocks``) keep. [bytes]"""
    formula, tag = kept_by(these.before(block), these.kinds)
    reason = "kept by the blocks before for their backward"
    line = Line(Kind.ACTIVATIONS, kept_bytes(these, block), reason, formula, KEPT[these.recompute], tag)
    if not any(run.kept_casts for run in these.runs):
        return (line,)
    counts = [*zip(these.before(block), [run.kept_casts for run in these.runs], strict=True)]
    n_bytes: Int = sum(count * each for count, each in counts)
    reason, formula_of_casts = "copies of frozen weights kept by the blocks before", several(*counts)
    casts = Line(Kind.WEIGHT_CASTS, n_bytes, reason, formula_of_casts, KEPT[these.recompute])
    return line._replace(n_bytes=line.n_bytes - n_bytes, formula=f"{formula} - ({formula_of_casts})"), casts


def kept_bytes(these: Passes, block: int) -> Int:
    """Return the total of :func:`kept_before`. [bytes]"""
    n_bytes: Int = sum(map(mul, these.before(block), these.keeps))
    return n_bytes


def kept_symbols(these: Passes) -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of kept activations."""
    return tuple(
        Symbol(f"S_{run.kind}", run.kept_bytes, f"bytes one {run.kind} block keeps from its forward to its backward")
        for run in _one_of_each_kind(these)
    )


def kept_in_a_block(these: Passes) -> tuple[tuple[str, tuple[Line, ...]], ...]:
    """Return the lines that one block of each kind keeps."""
    return tuple((run.kind, run.kept) for run in _one_of_each_kind(these))


def _one_of_each_kind(these: Passes) -> tuple[RunPass, ...]:
    return tuple({run.kind: run for run in these.runs}.values())


def kept_by_all(these: Passes) -> tuple[Line, ...]:
    """Return the lines that all blocks keep, the last block's one by one."""
    last = these.runs[-1]
    return (*kept_before(these, these.n_blocks - 1), *last.kept)


def checkpoint_beside(run: RunPass) -> tuple[Line, ...]:
    """Return a recomputed block's input, which is alive during its own backward."""
    return run.block.checkpoint_in_backward if run.recompute != "none" else ()


def shared_at(these: Passes, block: int) -> tuple[Line, ...]:
    """Return the tensors that blocks share, in the backward of a block or of the embedding (-1), where position tables are 0."""
    freed = (line._replace(n_bytes=0, formula="0") for line in these.head.with_blocks)
    return these.head.shared if block >= 0 else (*these.head.at_embedding, *freed)


def flowing_at_embedding(these: Passes) -> Line:
    """Return the gradient of the embedding's output after the backward of all blocks."""
    head, reason = these.head, "gradient of the embedding's output"
    return Line(Kind.ACTIVATION_GRADIENTS, head.hidden_bytes, reason, head.hidden_formula, FLOWING)


class Below(NamedTuple):
    """A moment of the backward below the blocks, in or before the backward of an operator with weights."""

    operator: int
    """The operator's index, in backward order."""
    name: str
    """The operator's label (:func:`~zeroplan.engines.collecting.operators_below`)."""
    lines: tuple[Line, ...]
    """Live activations."""
    gradients: int
    """Elements of gradients made so far."""
    current: int
    """Elements of those that are being made."""


def moments_below(these: Passes, operators: tuple[tuple[str, int], ...]) -> Iterator[Below]:
    """Yield the moments of the backward below the blocks. ``operators``: their labels and the elements of their gradients."""
    ends = tuple(accumulate(elements for _, elements in operators))
    if not these.head.below:
        lines = (flowing_at_embedding(these), *these.head.below_blocks)
        yield from (Below(at, name, lines, ends[at], elements) for at, (name, elements) in enumerate(operators))
    for at, point in operators_of(these, operators):
        yield Below(at, operators[at][0], point.lines, point.gradients, point.current_gradient)


def operators_of(these: Passes, operators: tuple[tuple[str, int], ...]) -> Iterator[tuple[int, BackwardPoint]]:
    """Yield the points of the part before the blocks, each with the index of the operator whose gradient is made then or next."""
    ends = tuple(accumulate(elements for _, elements in operators))
    for point in these.head.below:
        yield min(bisect_right(ends, point.gradients - point.current_gradient), len(ends) - 1), point

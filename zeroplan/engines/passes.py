"""One forward and backward pass of a whole model: the memory of its blocks, kind by kind, and of the rest.

Engines walk through it, and add weights, gradients and buffers. Blocks of one kind differ only in their place.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter, mul
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


class KindPass(NamedTuple):
    """All blocks of one kind: the memory of one of them, and the tensors that it keeps until its backward."""

    kind: str
    """The kind as symbols write it."""
    blocks: tuple[int, ...]
    """The blocks of the model that are of this kind, first to last."""
    recompute: Recompute
    block: BlockPass
    kept: tuple[Line, ...]
    kept_bytes: Int
    kept_casts: Int = 0
    """The part of ``kept_bytes`` that copies of weights take."""

    @property
    def last(self) -> int:
        """The last block of this kind, before which most blocks keep activations."""
        return self.blocks[-1]


class Order(NamedTuple):
    """The kinds of a model's blocks, by their index."""

    of_block: tuple[int, ...]
    """The kind of each block."""
    blocks: tuple[tuple[int, ...], ...]
    """The blocks of each kind, first to last."""
    before: tuple[tuple[int, ...], ...]
    """For each block and for the end: how many blocks of each kind come before it."""
    ends: tuple[tuple[int, ...], ...]
    """The blocks of each kind next to a block of another kind, or to either end of the model."""


class Passes(NamedTuple):
    """One forward and backward pass of the whole model."""

    kinds: tuple[KindPass, ...]
    order: Order
    head: HeadPass
    recompute: Recompute
    output: tuple[Line, ...]
    """The logits, if the training loop keeps them during the backward."""
    table: int
    """Elements of the token embedding, or of the head."""
    below: int
    """Elements of all parameters before the blocks."""
    names: tuple[str, ...]
    """The names of the kinds."""
    keeps: tuple[Int, ...]
    """What a block of each kind keeps. [bytes]"""

    @property
    def n_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.order.of_block)

    @property
    def rising(self) -> list[KindPass]:
        """The kinds in the order of their last blocks."""
        return sorted(self.kinds, key=_last)

    def of(self, block: int) -> KindPass:
        """Return the kind of a block."""
        return self.kinds[self.order.of_block[block]]


_last = attrgetter("last")


def passes(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> Passes:
    """Return the memory of each kind of block and of the part outside the blocks."""
    head = outside(model, recipe, batch)
    recomputed = first_recomputed(model, recipe)
    parts, order = layout_by_recomputation(model, recomputed), order_of(model, recomputed)
    kinds = tuple([_kind_pass(model, run, blocks, recipe, batch) for run, blocks in zip(parts.runs, order.blocks, strict=True)])
    output = head.output if recipe.keep_logits else ()
    table = model.vocab_size * model.hidden_size
    below = sum([one.numel for one in parts.embeddings])
    names, keeps = tuple([one.kind for one in kinds]), tuple([one.kept_bytes for one in kinds])
    return Passes(kinds, order, head, recipe.recompute, output, table, below, names, keeps)


def _kind_pass(model: ModelSpec, run: BlockRun, blocks: tuple[int, ...], recipe: RecipeSpec, batch: Batch) -> KindPass:
    """Return the memory of the blocks of a kind."""
    compute = compute_of(recipe)
    block, recompute = run_pass(model, run, compute, batch), recompute_of(run, compute)
    kept = block.kept(recompute)
    casts = total_bytes(tuple([line for line in kept if line.kind is Kind.WEIGHT_CASTS]))
    return KindPass(run.name, blocks, recompute, block, kept, total_bytes(kept), casts)


@lru_cache(maxsize=256)
def order_of(model: ModelSpec, recomputed: int | None = None) -> Order:
    """Return the kinds of a model's blocks. Those after the first ``recomputed`` blocks are other kinds.

    >>> order = order_of(ModelSpec(family="gemma2", hidden_size=8, intermediate_size=16, num_hidden_layers=5,
    ...     num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=10, sliding_window=8))
    >>> order.blocks, order.before[4]
    (((1, 3), (0, 2, 4)), (2, 2))
    """
    of_block = order_by_recomputation(model, recomputed)
    blocks: list[list[int]] = [[] for _ in range(max(of_block) + 1)]
    before = [(0,) * len(blocks)]
    for block, kind in enumerate(of_block):
        blocks[kind] += (block,)
        counts = before[-1]
        before += ((*counts[:kind], counts[kind] + 1, *counts[kind + 1 :]),)
    around = (-1, *of_block, -1)
    ends = [tuple([at for at in some if around[at] != kind or around[at + 2] != kind]) for kind, some in enumerate(blocks)]
    return Order(of_block, tuple(map(tuple, blocks)), tuple(before), tuple(ends))


def kept_before(these: Passes, block: int) -> tuple[Line, ...]:
    """Return the activations and copies of frozen weights that the blocks before ``block`` (0 to ``n_blocks``) keep. [bytes]"""
    formula, tag = kept_by(these.order.before[block], these.names)
    reason = "kept by the blocks before for their backward"
    line = Line(Kind.ACTIVATIONS, kept_bytes(these, block), reason, formula, KEPT[these.recompute], tag)
    casts_of_kinds = [one.kept_casts for one in these.kinds]
    if not any(casts_of_kinds):
        return (line,)
    counts = [*zip(these.order.before[block], casts_of_kinds, strict=True)]
    n_bytes: Int = sum(count * each for count, each in counts)
    reason, formula_of_casts = "copies of frozen weights kept by the blocks before", several(*counts)
    casts = Line(Kind.WEIGHT_CASTS, n_bytes, reason, formula_of_casts, KEPT[these.recompute])
    return line._replace(n_bytes=line.n_bytes - n_bytes, formula=f"{formula} - ({formula_of_casts})"), casts


def kept_bytes(these: Passes, block: int) -> Int:
    """Return the total of :func:`kept_before`. [bytes]"""
    n_bytes: Int = sum(map(mul, these.order.before[block], these.keeps))
    return n_bytes


def kept_symbols(these: Passes) -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of kept activations."""
    return tuple(
        Symbol(f"S_{one.kind}", one.kept_bytes, f"bytes one {one.kind} block keeps from its forward to its backward")
        for one in these.kinds
    )


def kept_in_a_block(these: Passes) -> tuple[tuple[str, tuple[Line, ...]], ...]:
    """Return the lines that one block of each kind keeps."""
    return tuple([(one.kind, one.kept) for one in these.kinds])


def kept_by_all(these: Passes) -> tuple[Line, ...]:
    """Return the lines that all blocks keep, the last block's one by one."""
    last = these.n_blocks - 1
    return (*kept_before(these, last), *these.of(last).kept)


def checkpoint_beside(one: KindPass) -> tuple[Line, ...]:
    """Return a recomputed block's input, which is alive during its own backward."""
    return one.block.checkpoint_in_backward if one.recompute != "none" else ()


def shared_at(these: Passes, block: int) -> tuple[Line, ...]:
    """Return the tensors that blocks share, in the backward of a block or of the embedding (-1), where position tables are 0."""
    freed = (line._replace(n_bytes=0, formula="0") for line in these.head.with_blocks)
    return these.head.shared if block >= 0 else (*these.head.at_embedding, *freed)


def flowing_at_embedding(these: Passes) -> Line:
    """Return the gradient of the embedding's output after the backward of all blocks."""
    return incoming_gradient(these)._replace(reason="gradient of the embedding's output")


def incoming_gradient(these: Passes) -> Line:
    """Return the gradient of a block's output. [bytes]"""
    head, reason = these.head, "gradient of the block's output"
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

"""The moments of one training step under ``DistributedDataParallel`` where memory can peak.

Over the blocks of a run everything grows or shrinks by the same amount per block, so a peak lies in its first or last one.
"""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.precisions import compute_of
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, maximum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BackwardPoint, BlockPass, HeadPass
from zeroplan.transformer.head import head_pass

Lines = tuple[Line, ...]

_AUTOCAST = "torch 2.13, aten/src/ATen/autocast_mode.cpp, cached_cast"
_ACCUMULATE = "torch 2.13, torch/csrc/autograd/functions/accumulate_grad.h"
_REBUILD = "torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, Reducer::rebuild_buckets"
_EMBEDDING = "torch 2.13, aten::embedding_dense_backward"


class Run(NamedTuple):
    """Consecutive blocks of one kind."""

    kind: str
    layers: int
    elements: int
    """Parameters of one block."""
    casts: int
    """Elements of one block's weights and biases that autocast copies."""


class Weights(NamedTuple):
    """Elements of a model's parts."""

    total: int
    embeddings: int
    largest_embedding: int
    """Of the tables; the parameters that a shape leaves unplaced are none."""
    runs: tuple[Run, ...]
    tied_head: int
    """Elements of the embedding where the head is that embedding, whose gradient then comes in two parts."""
    head_casts: int


class Step(NamedTuple):
    """What the moments of one step are made from."""

    weights: Weights
    base: Lines
    """Alive at every moment: parameters, buckets, optimizer states."""
    element_bytes: int
    """Of a parameter and of a gradient."""
    recipe: RecipeSpec
    autocast: bool
    """Matrix multiplications cast fp32 weights."""
    views: bool
    """Gradients are views of the buckets."""
    sync_every: bool
    """Every micro-batch moves its gradients into the buckets."""
    accum: Int


class _Stack(NamedTuple):
    """One run of blocks in a pass, and what lies beneath it."""

    run: Run
    block: BlockPass
    kept: Lines
    """What one block keeps from its forward to its backward."""
    every: Lines
    """What all blocks of the run keep."""
    beneath: Lines
    """What all blocks of the runs before keep."""
    casts_beneath: int
    """Elements of the casts that the runs before keep until their backward."""
    cached_beneath: int
    """Elements of the casts that the runs before put into autocast's cache."""
    gradients_above: int
    """Elements of the gradients made before this run's backward."""
    symbol: bool
    """All blocks are of this run, so L counts them."""


def pass_moments(step: Step, model: ModelSpec, batch: Batch) -> tuple[Moment, ...]:
    """Forward, loss and backward of one micro-batch; the later one where there are several."""
    recipe = step.recipe
    compute = compute_of(recipe)
    head = head_pass(model, compute, batch, recomputed=recipe.recompute != "none")
    stacks = _stacks(step.weights, recipe, [block_pass(model, run.kind, compute, batch) for run in step.weights.runs])
    top = stacks[-1]
    whole = (*head.shared, *top.beneath, *top.every)
    held = (*head.shared, *head.output) if recipe.keep_logits else head.shared
    above = whole + head.output if recipe.keep_logits else whole
    return (
        *(_forward(step, head, stack) for stack in stacks),
        _loss_forward(step, head, top, whole),
        *(_head_backward(step, point, top, above) for point in head.points),
        *(moment for stack in reversed(stacks) for moment in _block_backward(step, stack, held)),
        *_embedding_backward(step, held, head.hidden_bytes),
    )


def rebuild_moment(step: Step, parameters: Line) -> tuple[Moment, ...]:
    """Second forward of the training: the reducer makes its final buckets while gradients still view the first one.

    Only where gradients are views and stay from one micro-batch to the next; there are no optimizer states yet.
    """
    if not step.views or not step.sync_every:
        return ()
    total = step.element_bytes * step.weights.total
    first = Line(Kind.GRADIENTS, total, "gradients, views of the first bucket", _psi(step.element_bytes), _REBUILD)
    final = Line(Kind.REDUCE, where(step.accum > 1, total, 0), "the reducer's final buckets", "", _REBUILD)
    return (Moment("second forward: buckets rebuilt", Phase.INIT, (parameters, first, final)),)


def _stacks(weights: Weights, recipe: RecipeSpec, blocks: list[BlockPass]) -> list[_Stack]:
    stacks: list[_Stack] = []
    beneath: Lines = ()
    casts = cached = 0
    above = weights.total - weights.embeddings
    for run, block in zip(weights.runs, blocks, strict=True):
        kept = block.kept(recipe.recompute)
        above -= run.layers * run.elements
        only = len(weights.runs) == 1
        every = _times(kept, run.layers, "L" if only else "")
        stacks.append(_Stack(run, block, kept, every, beneath, casts, cached, above, only))
        beneath = (*beneath, *every)
        casts += run.layers * _kept_casts(recipe, block)
        cached += run.layers * run.casts
    return stacks


def _kept_casts(recipe: RecipeSpec, block: BlockPass) -> int:
    """Elements of one block's casts that autograd keeps: none where the block is recomputed."""
    return block.cast_elements if recipe.recompute == "none" else 0


def _forward(step: Step, head: HeadPass, stack: _Stack) -> Moment:
    layers = stack.run.layers
    recomputed = step.recipe.recompute != "none"
    beside = head.forward if layers == 1 and not stack.beneath else (*head.forward, *head.first_input)
    extra = (*beside, *(stack.block.forward_recompute if recomputed else stack.block.forward))
    lines = (
        *step.base,
        _gradients(step, 0, 0, 0),
        *_casts(step, stack.cached_beneath + layers * stack.run.casts),
        *head.shared,
        *stack.beneath,
        *stack.every,
        *extra,
    )
    return Moment(_named("forward of the last", "" if stack.symbol else f"{stack.run.kind} ", ""), Phase.FORWARD, lines)


def _loss_forward(step: Step, head: HeadPass, top: _Stack, whole: Lines) -> Moment:
    cached = top.cached_beneath + top.run.layers * top.run.casts + step.weights.head_casts
    lines = (*step.base, _gradients(step, 0, 0, 0), *_casts(step, cached), *whole, *head.saved, *head.loss_forward)
    return Moment("forward of the loss", Phase.LOSS, lines)


def _head_backward(step: Step, point: BackwardPoint, top: _Stack, above: Lines) -> Moment:
    casts = top.casts_beneath + top.run.layers * _kept_casts(step.recipe, top.block) + point.live_casts
    waiting = step.weights.tied_head if point.gradients else 0
    current = 0 if waiting else point.current_gradient
    gradients = _gradients(step, point.gradients - waiting, current, waiting)
    return Moment(
        _join("backward", point.name), Phase.LOSS, (*step.base, gradients, *_casts(step, casts), *above, *point.lines)
    )


def _block_backward(step: Step, stack: _Stack, held: Lines) -> list[Moment]:
    """Each point of the run's last block, where its backward begins, and of its first block, where it ends."""
    beneath = stack.run.layers - 1
    own = () if step.recipe.recompute == "none" else stack.block.checkpoint_in_backward
    positions = [("backward of the last", beneath)] + ([("backward of the first", 0)] if beneath else [])
    kind = "" if stack.symbol else f"{stack.run.kind} "
    tied = step.weights.tied_head
    moments: list[Moment] = []
    for position, layers in positions:
        below = stack.beneath + _times(stack.kept, layers, "(L-1)" if stack.symbol else "")
        alive = step.base + held + below + own
        casts = stack.casts_beneath + layers * _kept_casts(step.recipe, stack.block)
        made = stack.gradients_above + (beneath - layers) * stack.run.elements
        for point in stack.block.points:
            gradients = _gradients(step, made + point.gradients, point.current_gradient, tied)
            lines = (*alive, gradients, *_casts(step, casts + point.live_casts), *point.lines)
            moments.append(Moment(_named(position, kind, point.name), Phase.BACKWARD, lines))
    return moments


def _embedding_backward(step: Step, held: Lines, hidden_bytes: Int) -> tuple[Moment, ...]:
    """Moments at the end of the backward; for a tied head also the sum of the embedding's gradient with the head's.

    Autograd adds the second part to the first in place only if that is contiguous. The head's is a transposed view, except
    under autocast, where the cast to fp32 has made a tensor of it.
    """
    weights = step.weights
    tied, embedding = weights.tied_head, weights.largest_embedding
    flowing = Line(Kind.ACTIVATIONS, hidden_bytes, "gradient of the embedding's output", "", _EMBEDDING)
    parts = (*step.base, _gradients(step, weights.total, embedding, tied), *held, flowing)
    moments = (Moment("backward of the embedding", Phase.BACKWARD, parts),)
    if step.autocast or not tied:
        return moments
    added = (*step.base, _gradients(step, weights.total, embedding, 2 * tied), *held)
    return (*moments, Moment("sum of the embedding's and the tied head's gradient", Phase.BACKWARD, added))


def _gradients(step: Step, made: int, current: int, waiting: int) -> Line:
    """Gradients alive beside the buckets, once ``made`` elements exist, ``current`` of them just being made.

    ``waiting`` elements lie outside their parameter until the embedding's part of a tied head's gradient arrives. A gradient
    stays with its parameter, or moves into the bucket that it then views; one that finds another there is added to it and
    freed.
    """
    loose = current + waiting
    total = step.weights.total
    if not step.views:
        elements = where(step.accum > 1, total + loose, made + waiting)
        return Line(Kind.GRADIENTS, step.element_bytes * elements, "gradients made so far", "", _ACCUMULATE)
    elements = loose
    if not step.sync_every:
        last_of_two = maximum(made + waiting, total - made + current + loose)
        elements = where(step.accum > 2, total + loose, where(step.accum > 1, last_of_two, loose))
    return Line(Kind.UNSHARDED_GRADIENTS, step.element_bytes * elements, "gradients not in their buckets", "", _ACCUMULATE)


def _casts(step: Step, elements: int) -> Lines:
    if not step.autocast:
        return ()
    return (Line(Kind.WEIGHT_CASTS, 2 * elements, "autocast's 16-bit copies of the weights", "", _AUTOCAST),)


def _times(lines: Lines, layers: int, symbol: str) -> Lines:
    """Lines of that many blocks; with a formula where one symbol counts them."""
    if not layers:
        return ()
    return tuple(
        Line(line.kind, layers * line.n_bytes, line.reason, _product(symbol, line.formula), line.source) for line in lines
    )


@lru_cache(maxsize=1024)
def _product(symbol: str, formula: str) -> str:
    return f"{symbol}·({formula})" if symbol and formula else ""


@lru_cache(maxsize=1024)
def _named(position: str, kind: str, point: str) -> str:
    return _join(f"{position} {kind}block", point)


@lru_cache(maxsize=1024)
def _join(what: str, point: str) -> str:
    return f"{what}: {point}" if point else what


def _psi(element_bytes: int) -> str:
    return "4·Ψ" if element_bytes == 4 else "2·Ψ"

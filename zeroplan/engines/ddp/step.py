"""The moments of one training step under ``DistributedDataParallel`` where memory can peak.

Over the blocks of a run everything grows or shrinks by the same amount per block, so a peak lies in its first or last one; where
kinds of layers take turns, at one of the corners of ``positions.py``.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.formulas import blocks_sum, product
from zeroplan.engines.outside import outside
from zeroplan.engines.positions import corners
from zeroplan.engines.sources import ACCUMULATE
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, maximum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec, Recompute
from zeroplan.transformer.blocks import BackwardPoint, BlockPass, Compute, HeadPass
from zeroplan.transformer.parameters import KINDS_IN_TURN
from zeroplan.transformer.recomputed import first_recomputed

Lines = tuple[Line, ...]

_AUTOCAST = "torch 2.13, aten/src/ATen/autocast_mode.cpp, cached_cast"
_REBUILD = "torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, Reducer::rebuild_buckets"
_SINK = "torch 2.13, torch/nn/parallel/distributed.py, _DDPSink"
_EMBEDDING = "torch 2.13, aten::embedding_dense_backward"


class Run(NamedTuple):
    """Consecutive blocks of one kind."""

    kind: str
    layers: int
    elements: int
    """Parameters of one block."""
    casts: int
    """Elements of one block's weights and biases that autocast copies."""
    plain: bool
    """Its blocks are not recomputed, while those before them are."""

    def recompute(self, recipe: RecipeSpec) -> Recompute:
        """What the backward of its blocks runs again."""
        return "none" if self.plain else recipe.recompute


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """Elements of a model's parts; one object per model."""

    total: int
    embeddings: int
    largest_embedding: int
    """Of the tables; the parameters that a shape leaves unplaced are none."""
    runs: tuple[Run, ...]
    tied_head: int
    """Elements of the embedding where the head is that embedding, whose gradient then comes in two parts."""
    head_casts: int

    @property
    def tail(self) -> int:
        """Parameters of the final norm and, where it is not the embedding, the head."""
        return self.total - self.embeddings - sum(run.layers * run.elements for run in self.runs)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each run, as symbols have it."""
        return tuple(run.kind for run in self.runs)

    @property
    def layers(self) -> tuple[int, ...]:
        """Blocks of each run."""
        return tuple(run.layers for run in self.runs)


class _Sum(NamedTuple):
    """Elements of several blocks and what is outside them, and how a formula writes them."""

    elements: int
    formula: str


_NOTHING = _Sum(0, "0")


class Step(NamedTuple):
    """What the moments of one step are made from."""

    weights: Weights
    base: Lines
    """Alive at every moment: parameters, buckets, optimizer states."""
    element_bytes: int
    """Of a parameter and of a gradient."""
    recipe: RecipeSpec
    compute: Compute
    """How the module runs; under autocast, matrix multiplications cast fp32 weights."""
    views: bool
    """Gradients are views of the buckets."""
    sync_every: bool
    """Every micro-batch moves its gradients into the buckets."""
    accum: Int
    wrapped: Int
    """1 where DDP wraps the model, else 0."""


class _Place(NamedTuple):
    """A block at which memory can peak, by its run, and how many blocks of each run come before and after it."""

    forward: str
    backward: str
    run: int
    before: tuple[int, ...]
    after: tuple[int, ...]


class _Stack(NamedTuple):
    """One run of blocks in a pass."""

    run: Run
    block: BlockPass
    recompute: Recompute
    """What the backward of its blocks runs again."""
    kept: Lines
    """What one block keeps from its forward to its backward."""
    every: Lines
    """What all blocks of the run keep."""
    kept_casts: tuple[int, ...]
    """Elements of the casts that autograd keeps of one block of each run."""
    symbol: bool
    """All blocks are of this run, so L counts them."""


def pass_moments(step: Step, model: ModelSpec, batch: Batch, blocks: tuple[BlockPass, ...]) -> tuple[Moment, ...]:
    """Forward, loss and backward of one micro-batch; the later one where there are several."""
    recipe = step.recipe
    head = outside(model, recipe, batch)
    stacks = _stacks(step.weights, recipe, blocks)
    places = _places(model, step.weights, first_recomputed(model, recipe))
    whole = (*head.shared, *(line for stack in stacks for line in stack.every))
    output = head.output if recipe.keep_logits else ()
    held = (*head.shared, *output)
    above = whole + head.output if recipe.keep_logits else whole
    return (
        *(_forward(step, head, stacks, place) for place in places if place.forward),
        _loss_forward(step, head, whole),
        *_output_copied(step, head, whole),
        *(_head_backward(step, point, stacks[-1], above) for point in head.points),
        *(moment for place in reversed(places) for moment in _block_backward(step, stacks, place, held)),
        *_embedding_backward(step, (*head.at_embedding, *output, *head.below_blocks), head),
    )


@lru_cache(maxsize=256)
def _places(model: ModelSpec, weights: Weights, first: int | None) -> tuple[_Place, ...]:
    """First to last: of each run both ends, or the corners where runs take turns."""
    layers = weights.layers
    if any(set(kinds) <= set(weights.kinds) for kinds in KINDS_IN_TURN):
        return tuple(
            _Place(f"forward of {at.name}", f"backward of {at.name}", at.run, at.before, at.after)
            for at in corners(model, first)
        )
    places: list[_Place] = []
    for index, run in enumerate(weights.runs):
        kind = f"{run.kind.replace('_', ' ')} " if len(layers) > 1 else ""
        for name, at in (("first", 0), ("last", run.layers - 1))[run.layers == 1 :]:
            before = (*layers[:index], at, *(0 for _ in layers[index + 1 :]))
            after = (*(0 for _ in layers[:index]), run.layers - 1 - at, *layers[index + 1 :])
            forward = f"forward of the last {kind}block" if name == "last" else ""
            places.append(_Place(forward, f"backward of the {name} {kind}block", index, before, after))
    return tuple(places)


def rebuild_moment(step: Step, parameters: Lines) -> tuple[Moment, ...]:
    """Second forward of the training: the reducer makes its final buckets while gradients still view the first one.

    Only where gradients are views and stay from one micro-batch to the next; there are no optimizer states yet.
    """
    if not step.views or not step.sync_every:
        return ()
    total = step.element_bytes * step.weights.total
    first = Line(Kind.GRADIENTS, total, "gradients, views of the first bucket", psi(step.element_bytes), _REBUILD)
    formula = "4·Ψ·M" if step.element_bytes == 4 else "2·Ψ·M"
    final = Line(Kind.REDUCE, where(step.accum > 1, total, 0), "the reducer's final buckets", formula, _REBUILD)
    return (Moment("second forward: buckets rebuilt", Phase.INIT, (*parameters, first, final)),)


def _stacks(weights: Weights, recipe: RecipeSpec, blocks: tuple[BlockPass, ...]) -> list[_Stack]:
    again = tuple(run.recompute(recipe) for run in weights.runs)
    casts = tuple(kept_casts(one, block) for one, block in zip(again, blocks, strict=True))
    only = len(weights.runs) == 1
    stacks: list[_Stack] = []
    for run, block, recompute in zip(weights.runs, blocks, again, strict=True):
        kept = block.kept(recompute)
        stacks.append(
            _Stack(run, block, recompute, kept, _times(kept, run.layers, "L" if only else str(run.layers)), casts, only)
        )
    return stacks


def _below(stacks: list[_Stack], before: tuple[int, ...]) -> Lines:
    """What so many blocks of each run keep."""
    lines: Lines = ()
    for stack, count in zip(stacks, before, strict=True):
        if count == stack.run.layers:
            lines = (*lines, *stack.every)
        elif count:
            lines = (*lines, *_times(stack.kept, count, "(L-1)" if stack.symbol else str(count)))
    return lines


def kept_casts(recompute: Recompute, block: BlockPass) -> int:
    """Elements of one block's casts that autograd keeps: none where the block is recomputed."""
    return block.cast_elements if recompute == "none" else 0


@lru_cache(maxsize=4096)
def _cached(weights: Weights, counts: tuple[int, ...]) -> _Sum:
    """What so many blocks of each run have put into autocast's cache by the end of their forward."""
    elements = sum(count * run.casts for count, run in zip(counts, weights.runs, strict=True))
    return _Sum(elements, blocks_sum("C", counts, weights.kinds))


@lru_cache(maxsize=4096)
def _kept(weights: Weights, counts: tuple[int, ...], kept: tuple[int, ...]) -> _Sum:
    """Casts that so many blocks of each run keep until their backward."""
    elements = sum(count * one for count, one in zip(counts, kept, strict=True))
    return _Sum(elements, blocks_sum("K", counts, weights.kinds))


@lru_cache(maxsize=4096)
def _made_above(weights: Weights, counts: tuple[int, ...]) -> _Sum:
    """Gradients of the head, the final norm and so many blocks of each run."""
    elements = weights.tail + sum(count * run.elements for count, run in zip(counts, weights.runs, strict=True))
    return _Sum(elements, blocks_sum("G", counts, weights.kinds, "G_tail"))


def _forward(step: Step, head: HeadPass, stacks: list[_Stack], place: _Place) -> Moment:
    stack = stacks[place.run]
    beside = (*head.forward, *head.first_input) if any(place.before) else head.forward
    extra = (*stack.block.entered, *(stack.block.forward if stack.recompute == "none" else stack.block.forward_recompute))
    so_far = _with_this(place)
    lines = (
        *step.base,
        _gradients(step, _NOTHING, 0),
        *_casts(step, _cached(step.weights, so_far), 0),
        *head.shared,
        *_below(stacks, so_far),
        *beside,
        *extra,
    )
    return Moment(place.forward, Phase.FORWARD, lines)


def _with_this(place: _Place) -> tuple[int, ...]:
    """How many blocks of each run there are up to a place, its own included."""
    return tuple(count + (run == place.run) for run, count in enumerate(place.before))


def _loss_forward(step: Step, head: HeadPass, whole: Lines) -> Moment:
    casts = _casts(step, _cached(step.weights, step.weights.layers), step.weights.head_casts)
    lines = (*step.base, _gradients(step, _NOTHING, 0), *casts, *whole, *head.saved, *head.loss_forward)
    return Moment("forward of the loss", Phase.LOSS, lines, of_forward=True)


def _output_copied(step: Step, head: HeadPass, whole: Lines) -> tuple[Moment, ...]:
    """The end of the forward where DDP looks for unused parameters: it hands on copies of what the model returns."""
    options = step.recipe.ddp
    if not options.find_unused_parameters or options.static_graph:
        return ()
    casts = _casts(step, _cached(step.weights, step.weights.layers), step.weights.head_casts)
    copies = tuple(_copied(step, line) for line in head.output)
    lines = (*step.base, _gradients(step, _NOTHING, 0), *casts, *whole, *head.saved, *head.loss, *head.output, *copies)
    return (Moment("forward: DDP copies the model's output", Phase.FORWARD, lines),)


def _copied(step: Step, line: Line) -> Line:
    formula = line.formula if step.recipe.wraps_one_rank else f"{line.formula}·min(1, N-1)"
    reason = f"{line.reason}, copied by DDP"
    return Line(line.kind, step.wrapped * line.n_bytes, reason, formula if line.formula else "", _SINK)


def _head_backward(step: Step, point: BackwardPoint, top: _Stack, above: Lines) -> Moment:
    casts = _casts(step, _kept(step.weights, step.weights.layers, top.kept_casts), point.live_casts)
    waiting = step.weights.tied_head if point.gradients else 0
    current = 0 if waiting else point.current_gradient
    gradients = _gradients(step, _NOTHING, point.gradients - waiting, current=current, waiting=waiting)
    return Moment(f"backward of the {point.name}", Phase.LOSS, (*step.base, gradients, *casts, *above, *point.lines))


def _block_backward(step: Step, stacks: list[_Stack], place: _Place, held: Lines) -> list[Moment]:
    """Each point of a block's backward."""
    stack, tied = stacks[place.run], step.weights.tied_head
    own = () if stack.recompute == "none" else stack.block.checkpoint_in_backward
    alive = step.base + held + _below(stacks, place.before) + own
    kept = _kept(step.weights, place.before, stack.kept_casts)
    above = _made_above(step.weights, place.after)
    moments: list[Moment] = []
    for point in stack.block.points:
        gradients = _gradients(step, above, point.gradients, current=point.current_gradient, waiting=tied)
        lines = (*alive, gradients, *_casts(step, kept, point.live_casts), *point.lines)
        moments.append(Moment(_join(place.backward, point.name), Phase.BACKWARD, lines))
    return moments


def _embedding_backward(step: Step, held: Lines, head: HeadPass) -> tuple[Moment, ...]:
    """Moments at the end of the backward; for a tied head also the sum of the embedding's gradient with the head's.

    Autograd adds the second part to the first in place only where nothing else refers to that. The head's is a transposed view,
    which refers to what it is a view of, except under autocast, where the cast to fp32 has made a tensor of it.
    """
    weights = step.weights
    tied, embedding, everything = weights.tied_head, weights.largest_embedding, _Sum(weights.total, "Ψ")
    flowing = Line(
        Kind.ACTIVATION_GRADIENTS, head.hidden_bytes, "gradient of the embedding's output", head.hidden_formula, _EMBEDDING
    )
    parts = (*step.base, _gradients(step, everything, 0, current=embedding, waiting=tied), *held, flowing)
    moments = (Moment("backward of the embedding", Phase.BACKWARD, parts),)
    if step.compute.autocast or not tied:
        return moments
    added = (*step.base, _gradients(step, everything, 0, current=embedding, waiting=2 * tied), *held)
    return (*moments, Moment("sum of the embedding's and the tied head's gradient", Phase.BACKWARD, added))


def _gradients(step: Step, above: _Sum, own: int, *, current: int = 0, waiting: int = 0) -> Line:
    """Gradients alive beside the buckets, once those ``above`` and ``own`` elements exist, ``current`` just being made.

    ``waiting`` elements lie outside their parameter until the embedding's part of a tied head's gradient arrives. A gradient
    stays with its parameter, or moves into the bucket that it then views; one that finds another there is added to it and
    freed.
    """
    width, total = step.element_bytes, step.weights.total
    made, loose = above.elements + own, current + waiting
    if not step.views:
        elements = where(step.accum > 1, total + loose, made + waiting)
        formula = _made_formula(width, above.formula, own + waiting, loose)
        return Line(Kind.GRADIENTS, width * elements, "gradients made so far", formula, ACCUMULATE)
    if step.sync_every:
        formula = product(width, loose)
        return Line(Kind.UNSHARDED_GRADIENTS, width * loose, "gradients not in their buckets", formula, ACCUMULATE)
    last_of_two = maximum(made + waiting, total - made + current + loose)
    elements = where(step.accum > 2, total + loose, where(step.accum > 1, last_of_two, loose))
    formula = _loose_formula(width, above.formula, own, current, waiting)
    return Line(Kind.UNSHARDED_GRADIENTS, width * elements, "gradients not in their buckets", formula, ACCUMULATE)


@lru_cache(maxsize=4096)
def _made_formula(width: int, above: str, own: int, loose: int) -> str:
    """Write the gradients so far or, with earlier micro-batches (``M``), all of them and those beside."""
    return f"{width}·(M·({_plus('Ψ', loose)}) + (1-M)·({_plus(above, own)}))"


@lru_cache(maxsize=4096)
def _loose_formula(width: int, above: str, own: int, current: int, waiting: int) -> str:
    """Write the gradients outside the buckets, which earlier micro-batches (``M``, ``M_2``) have left for the next."""
    loose = current + waiting
    left = _plus(f"Ψ - ({_plus(above, own)})", current + loose)
    last_of_two = f"max({_plus(above, own + waiting)}, {left})"
    return f"{width}·(M_2·({_plus('Ψ', loose)}) + (M - M_2)·{last_of_two} + (1-M)·{loose})"


def _plus(formula: str, elements: int) -> str:
    return f"{formula} + {elements}" if elements else formula


def _casts(step: Step, of_blocks: _Sum, beside: int) -> Lines:
    if not step.compute.autocast:
        return ()
    n_bytes = 2 * (of_blocks.elements + beside)
    formula = _twice(of_blocks.formula, beside)
    return (Line(Kind.WEIGHT_CASTS, n_bytes, "autocast's 16-bit copies of the weights", formula, _AUTOCAST),)


@lru_cache(maxsize=4096)
def _twice(formula: str, beside: int) -> str:
    return f"2·({_plus(formula, beside)})"


def _times(lines: Lines, layers: int, symbol: str) -> Lines:
    """Lines of that many blocks; with a formula where one symbol counts them."""
    return tuple(
        Line(line.kind, layers * line.n_bytes, line.reason, _product(symbol, line.formula), line.source, line.tag)
        for line in lines
    )


@lru_cache(maxsize=1024)
def _product(symbol: str, formula: str) -> str:
    return f"{symbol}·({formula})" if formula else ""


@lru_cache(maxsize=1024)
def _join(what: str, point: str) -> str:
    return f"{what}: {point}" if point else what


def psi(element_bytes: int) -> str:
    """Write an element's bytes for every parameter."""
    return "4·Ψ" if element_bytes == 4 else "2·Ψ"

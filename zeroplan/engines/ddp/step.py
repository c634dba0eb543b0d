"""A training step under ``DistributedDataParallel``, written into a trace: its last micro-batch, and what earlier ones have left.

Over the blocks of a run everything grows or shrinks by the same amount per block, so a peak lies in its first or last one; where
kinds of layers take turns, at one of the corners of ``positions.py``. No other blocks are run.
"""

from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from zeroplan.engines.block_runs import recompute_of, run_pass
from zeroplan.engines.formulas import blocks_sum, product
from zeroplan.engines.outside import outside
from zeroplan.engines.positions import corners
from zeroplan.engines.sources import ACCUMULATE
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.numeric import Int, maximum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.trace import Inside, Trace
from zeroplan.transformer.blocks import At, Compute
from zeroplan.transformer.parameters import KINDS_IN_TURN, BlockRun
from zeroplan.transformer.recomputed import first_recomputed

Lines = tuple[Line, ...]

_AUTOCAST = "torch 2.13, aten/src/ATen/autocast_mode.cpp, cached_cast"
_SINK = "torch 2.13, torch/nn/parallel/distributed.py, _DDPSink"
_EMBEDDING = "torch 2.13, aten::embedding_dense_backward"


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """Elements of a model's parts that are trained; one object per model. Tuples have an item for each run of blocks."""

    runs: tuple[BlockRun, ...]
    total: int
    tail: int
    """The final norm and, where it is not the embedding, the head."""
    largest_embedding: int
    """Of the tables; the parameters that a shape leaves unplaced are none."""
    tied_head: int
    """The embedding where the head is that embedding, whose gradient then comes in two parts."""
    head_casts: int
    elements: tuple[int, ...]
    """Parameters of one block."""
    casts: tuple[int, ...]
    """Of one block's weights and biases those that autocast copies."""
    kinds: tuple[str, ...]
    """As symbols have them."""
    layers: tuple[int, ...]


class Step(NamedTuple):
    """What a step depends on."""

    weights: Weights
    base: Lines
    """Alive at every moment: parameters, buckets, optimizer states."""
    element_bytes: int
    """Of a parameter and of a gradient."""
    recipe: RecipeSpec
    compute: Compute
    """How the module runs; under autocast, matrix multiplications cast fp32 weights."""
    accum: Int
    wrapped: Int
    """1 where DDP wraps the model, else 0."""


class _Place(NamedTuple):
    """A block at which memory can peak, by its run, and how many blocks of each run come before and after it."""

    name: str
    run: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    in_forward: bool = True
    """Memory can peak in its forward too."""


@lru_cache(maxsize=256)
def _places(model: ModelSpec, weights: Weights, first: int | None) -> tuple[_Place, ...]:
    """First to last: of each run both ends, or the corners where runs take turns."""
    layers = weights.layers
    if any(set(kinds) <= set(weights.kinds) for kinds in KINDS_IN_TURN):
        return tuple(_Place(at.name, at.run, at.before, at.after) for at in corners(model, first))
    places: list[_Place] = []
    for run, (name, count) in enumerate(zip(weights.kinds, layers, strict=True)):
        kind = f"{name.replace('_', ' ')} " if len(layers) > 1 else ""
        below, above = layers[:run], layers[run + 1 :]
        for end, at in (("first", 0), ("last", count - 1))[count == 1 :]:
            before, after = (*below, at, *(0 for _ in above)), (*(0 for _ in below), count - 1 - at, *above)
            places.append(_Place(f"the {end} {kind}block", run, before, after, in_forward=end == "last"))
    return tuple(places)


class _Sum(NamedTuple):
    """Elements of several blocks and what is outside them, and how a formula writes them."""

    elements: int
    formula: str


_NOTHING = _Sum(0, "0")


@lru_cache(maxsize=4096)
def _sum(letter: str, weights: Weights, layers: tuple[int, ...], each: tuple[int, ...]) -> _Sum:
    """What so many blocks of each run have, if one has so much."""
    return _Sum(sum(map(mul, layers, each)), blocks_sum(letter, layers, weights.kinds))


@lru_cache(maxsize=4096)
def _made_above(weights: Weights, layers: tuple[int, ...]) -> _Sum:
    """Gradients of the head, the final norm and so many blocks of each run."""
    elements = weights.tail + sum(map(mul, layers, weights.elements))
    return _Sum(elements, blocks_sum("G", layers, weights.kinds, "G_tail"))


class MicroBatch:
    """The last micro-batch of a step on its way through the model and back."""

    def __init__(self, step: Step, model: ModelSpec, batch: Batch) -> None:
        """Work out what blocks and the rest of the model cost."""
        self.step, self.weights, self.trace = step, step.weights, Trace()
        runs, compute = step.weights.runs, step.compute
        self.head = outside(model, step.recipe, batch)
        self.places = _places(model, step.weights, first_recomputed(model, step.recipe))
        self.blocks = tuple([run_pass(model, run, compute, batch) for run in runs])
        self.recomputes = tuple([recompute_of(run, compute) for run in runs])
        self.kept = tuple([block.kept(again) for block, again in zip(self.blocks, self.recomputes, strict=True)])

    @property
    def kept_casts(self) -> tuple[int, ...]:
        """Elements of one block's casts that autograd keeps, of each run: none where the block is recomputed."""
        both = zip(self.blocks, self.recomputes, strict=True)
        return tuple([block.cast_elements if again == "none" else 0 for block, again in both])

    def forward(self) -> None:
        """All blocks, the loss, and where DDP looks for unused parameters copies of what the model returns."""
        trace, head, weights = self.trace, self.head, self.weights
        trace.hold("states", *self.step.base)
        trace.hold("gradients", self._gradients(_NOTHING))
        trace.hold("shared", *head.shared)
        for place in self.places:
            if place.in_forward:
                self._block_forward(place)
        trace.drop("by name")
        self._keep(weights.layers)
        beside = weights.head_casts if self.step.recipe.loss != "fused" else 0  # Liger's own copy counts in its loss
        trace.hold("casts", *self._casts(_sum("C", weights, weights.layers, weights.casts), beside))
        trace.at("forward of the loss", Phase.LOSS, of_forward=True)
        trace.pass_by(*head.saved, *head.loss_forward)
        options = self.step.recipe.ddp
        if options.find_unused_parameters and not options.static_graph:
            trace.at("forward: DDP copies the model's output", Phase.FORWARD)
            trace.pass_by(*head.saved, *head.loss, *head.output, *[_copied(self.step, line) for line in head.output])
        trace.drop("gradients", "casts")

    def _block_forward(self, place: _Place) -> None:
        trace, head, block = self.trace, self.head, self.blocks[place.run]
        so_far = tuple([count + (run == place.run) for run, count in enumerate(place.before)])
        self._keep(so_far)
        trace.hold("by name", *head.forward, *(head.first_input if any(place.before) else ()))
        trace.at(f"forward of {place.name}", Phase.FORWARD)
        trace.pass_by(
            *self._casts(_sum("C", self.weights, so_far, self.weights.casts)),
            *block.entered,
            *(block.forward if self.recomputes[place.run] == "none" else block.forward_recompute),
        )

    def backward(self) -> None:
        """Loss and head, then the blocks from the last to the first, then the embedding.

        Chunks of a loss go backward before autocast's context ends, and with it the copies in its cache.
        """
        trace, head, weights = self.trace, self.head, self.weights
        trace.hold("output", *(head.output if self.step.recipe.keep_logits else ()))
        casts = _sum("K", weights, weights.layers, self.kept_casts)
        for point in head.points:
            waiting = weights.tied_head if point.gradients else 0
            current = 0 if waiting else point.current_gradient
            made = self._gradients(_NOTHING, point.gradients - waiting, current, waiting)
            in_context = self.step.recipe.loss == "chunked" and point.place.at is not At.FINAL_NORM
            copies = _sum("C", weights, weights.layers, weights.casts) if in_context else casts
            trace.at(f"backward of the {point.name}", Phase.LOSS)
            trace.pass_by(made, *self._casts(copies, point.live_casts), *point.lines)
        for place in reversed(self.places):
            self._block_backward(place)
        trace.drop("kept", "checkpoint")
        self._embedding_backward()

    def _block_backward(self, place: _Place) -> None:
        trace, weights, block = self.trace, self.weights, self.blocks[place.run]
        self._keep(place.before)
        trace.hold("checkpoint", *(() if self.recomputes[place.run] == "none" else block.checkpoint_in_backward))
        above, casts = _made_above(weights, place.after), _sum("K", weights, place.before, self.kept_casts)
        points = list[tuple[str, tuple[Lines, ...]]]()
        for point in block.points:
            made = self._gradients(above, point.gradients, point.current_gradient, weights.tied_head)
            points.append((point.name, ((made, *self._casts(casts, point.live_casts)), point.lines)))
        trace.pass_through(Inside(points), f"backward of {place.name}", Phase.BACKWARD)

    def _embedding_backward(self) -> None:
        """The embedding's gradient, and for a tied head the sum of it with the head's.

        Autograd adds the second part to the first in place only where nothing else refers to that. The head's is a transposed
        view, which refers to what it is a view of, except under autocast, where the cast to fp32 has made a tensor of it.
        """
        trace, head, weights = self.trace, self.head, self.weights
        embedding, tied, everything = weights.largest_embedding, weights.tied_head, _Sum(weights.total, "Ψ")
        trace.hold("shared", *head.at_embedding, *head.below_blocks)
        trace.at("backward of the embedding", Phase.BACKWARD)
        reason = "gradient of the embedding's output"
        flowing = Line(Kind.ACTIVATION_GRADIENTS, head.hidden_bytes, reason, head.hidden_formula, _EMBEDDING)
        trace.pass_by(self._gradients(everything, 0, embedding, tied), flowing)
        if tied and not self.step.compute.autocast:
            trace.at("sum of the embedding's and the tied head's gradient", Phase.BACKWARD)
            trace.pass_by(self._gradients(everything, 0, embedding, 2 * tied))

    def _keep(self, layers: tuple[int, ...]) -> None:
        """Hold what so many blocks of each run keep for their backward; L counts them where all are of one run."""
        lines: Lines = ()
        for count, every, kept in zip(layers, self.weights.layers, self.kept, strict=True):
            symbol = str(count) if len(layers) > 1 else "L" if count == every else "(L-1)"
            lines = (*lines, *(_times(kept, count, symbol) if count else ()))
        self.trace.hold("kept", *lines)

    def _casts(self, of_blocks: _Sum, beside: int = 0) -> Lines:
        if not self.step.compute.autocast:
            return ()
        n_bytes, reason = 2 * (of_blocks.elements + beside), "autocast's 16-bit copies of the weights"
        return (Line(Kind.WEIGHT_CASTS, n_bytes, reason, _twice(of_blocks.formula, beside), _AUTOCAST),)

    def _gradients(self, above: _Sum, own: int = 0, current: int = 0, waiting: int = 0) -> Line:
        """Gradients alive beside the buckets, once those ``above`` and ``own`` elements exist, ``current`` just being made.

        ``waiting`` elements lie outside their parameter until the embedding's part of a tied head's gradient arrives. A gradient
        stays with its parameter, or moves into the bucket that it then views; one that finds another there is added to it and
        freed.
        """
        step, width, total = self.step, self.step.element_bytes, self.weights.total
        made, loose = above.elements + own, current + waiting
        if not step.recipe.ddp.gradient_as_bucket_view:
            elements = where(step.accum > 1, total + loose, made + waiting)
            formula = _made_formula(width, above.formula, own + waiting, loose)
            return Line(Kind.GRADIENTS, width * elements, "gradients made so far", formula, ACCUMULATE)
        reason = "gradients not in their buckets"
        if step.recipe.sync_every_micro_batch:
            return Line(Kind.UNSHARDED_GRADIENTS, width * loose, reason, product(width, loose), ACCUMULATE)
        last_of_two = maximum(made + waiting, total - made + current + loose)
        elements = where(step.accum > 2, total + loose, where(step.accum > 1, last_of_two, loose))
        formula = _loose_formula(width, above.formula, own, current, waiting)
        return Line(Kind.UNSHARDED_GRADIENTS, width * elements, reason, formula, ACCUMULATE)


def _copied(step: Step, line: Line) -> Line:
    formula = line.formula if step.recipe.wraps_one_rank else f"{line.formula}·min(1, N-1)"
    reason = f"{line.reason}, copied by DDP"
    return Line(line.kind, step.wrapped * line.n_bytes, reason, formula if line.formula else "", _SINK)


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


@lru_cache(maxsize=4096)
def _twice(formula: str, beside: int) -> str:
    return f"2·({_plus(formula, beside)})"


def _times(lines: Lines, layers: int, symbol: str) -> Lines:
    """Lines of that many blocks."""
    return tuple(
        [
            Line(kind, layers * n_bytes, reason, _product(symbol, formula), source, tag)
            for kind, n_bytes, reason, formula, source, tag in lines
        ]
    )


@lru_cache(maxsize=1024)
def _product(symbol: str, formula: str) -> str:
    return f"{symbol}·({formula})" if formula else ""

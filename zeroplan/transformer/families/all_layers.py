"""The part before the blocks in models with embeddings of each layer (Gemma 4 E2B and E4B).

The model looks up every layer's embedding of each token in a second table. It projects the token's own embedding to as many
elements, normalises each layer's part, and adds both.
"""

from functools import lru_cache, partial
from itertools import groupby
from typing import NamedTuple

from zeroplan.expr import Size, Values
from zeroplan.ledger import Kind, Line
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BackwardPoint, Compute, GradientArrivals
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Training, definition_of
from zeroplan.transformer.families.frozen import linear
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tags import BLOCK_INPUT
from zeroplan.transformer.families.tape import Alive, Mode, Site, Store, Tape, Value
from zeroplan.transformer.families.traced import Plan, Sizes, Stores, numbered, ran_forward, training_of
from zeroplan.transformer.families.widths import Widths
from zeroplan.transformer.symbols import T, V, V_l, h, h_l, n_l, r, w_l

_MODEL = "transformers 5.23, models/gemma4/modeling_gemma4.py, Gemma4TextModel.project_per_layer_inputs"


class Before(NamedTuple):
    """The memory of the part before the blocks.

    ``looked_up``: the tokens' embeddings, and the rows of the table before and after they are scaled; ``made``: the embeddings of
    all layers, which blocks read; ``kept``: what autograd saves; ``given``: the first block's input, if the projection saves it;
    ``points`` and ``handed``: moments of the backward, with everything alive.
    """

    looked_up: tuple[Line, ...]
    made: tuple[Line, ...]
    kept: tuple[Line, ...]
    given: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]
    handed: tuple[GradientArrivals, ...]


class _Structure(NamedTuple):
    """Equal structures allocate the same tensors."""

    family: str
    wide: bool
    autocast: bool
    projection: Training | None = None
    """How the projection is trained beside adapters."""
    given_tracked: bool = True
    """Autograd tracks the first block's input."""


class _Planned(NamedTuple):
    plan: Plan
    looked_up: Stores
    made: Stores
    kept: Stores
    given: Stores


def before_blocks(model: ModelSpec, compute: Compute, x: Widths, values: Values) -> Before:
    """Return the memory of the part before the blocks, for one batch. [bytes]"""
    plan, looked_up, made, kept, given = _plan_of(_structure_of(model, compute, x))
    sizes = Sizes(plan, values)
    points = tuple([point._replace(lines=(*point.lines, *_copies(point.live_casts))) for point in sizes.points("none")])
    saved = (*sizes.lines(kept), *_copies(sizes.elements(plan.casts)))
    return Before(sizes.lines(looked_up), sizes.lines(made), saved, sizes.lines(given), points, sizes.handed("none"))


def _copies(elements: int) -> tuple[Line, ...]:
    """Return autocast's copies of so many elements of weights. [bytes]"""
    reason = "16-bit copy of the weights of the projection to all layers"
    return (Line(Kind.WEIGHT_CASTS, 2 * elements, reason, f"2·{elements}", _MODEL),) if elements else ()


def _structure_of(model: ModelSpec, compute: Compute, x: Widths) -> _Structure:
    adapter, recomputed = model.adapter, compute.recompute != "none"
    training = None if adapter is None else training_of(model, "", compute)
    autocast = compute.autocast and (training is None or not training.wide_adapters)
    given_tracked = adapter is None or recomputed
    return _Structure(model.family, x.element == 4, autocast, training, given_tracked)


@lru_cache(maxsize=64)
def _plan_of(structure: _Structure) -> _Planned:
    """Run the part forward and backward, from the gradients of the embeddings of all layers and of the first block's input."""
    training = structure.projection
    narrow = training is not None and not training.wide_residual
    tape = Tape(wide=structure.wide, autocast=structure.autocast, saving=True, narrow=narrow)
    if training is not None:
        tape.mode = Mode(partial(linear, training=training), weights_frozen=True)
    dtypes = {"wide": structure.wide, "autocast": structure.autocast}
    given, looking_up, made = _run(tape, definition_of(structure.family).program.norm, structure)
    forward, casts = ran_forward(tape, tape.saved, dtypes), tuple(tape.casts)
    kept = tuple([one for one in tape.saved if one is not given.store])
    saved = (given.store,) if given.store in tape.saved else ()
    tape.release(given, made)
    if structure.given_tracked:
        tape.arriving[given] = Store(op.GRADIENT, "gradient of the first block's input", r * given.shape, _MODEL)
    if made not in tape.untracked:
        tape.run_backward(made, Store(op.GRADIENT, "gradient of the embeddings of all layers", r * made.shape, _MODEL))
    moments = [] if made in tape.untracked else _highest_of_each(tape, dtypes)
    arrivals, others = tuple(tape.gradients.arrivals), (*looking_up, made.store)
    plan = Plan(_MODEL, {"none": forward}, numbered(moments), casts, arrivals=arrivals, others=others)
    return _Planned(plan, looking_up, (made.store,), kept, saved)


def _run(tape: Tape, norm: Norm, structure: _Structure) -> tuple[Value, tuple[Store, ...], Value]:
    """Run it forward. Return the first block's input, what is alive beside the table's rows, and the embeddings of all layers."""
    given = _embedded(tape, "token embeddings", T * h, h * V)
    given.store.tag = BLOCK_INPUT
    if structure.given_tracked:
        tape.untracked.discard(given)
    own = _embedded(tape, "rows of the table of all layers", T * w_l, V_l * w_l)
    looking_up = tape.moments[-1].stores
    wide = op.linear(tape, given, w_l, Site("projection to all layers", _MODEL, layer="per_layer_model_projection"))
    wide = op.scaled(tape, wide, "projection to all layers, scaled", _MODEL)
    normal = op.norm(tape, wide, "norm of the projection to all layers", norm, weight=h_l, rows=T * n_l)
    tape.release(wide)
    both = op.add(tape, normal, own, "sum of projections and rows", _MODEL)
    made = op.scaled(tape, both, "embeddings of all layers", _MODEL)
    tape.release(normal, own)
    return given, looking_up, made


def _embedded(tape: Tape, reason: str, shape: Size, weight: Size) -> Value:
    """Look up an embedding and multiply by a constant, a buffer."""
    bare = op.tensor(tape, reason, r, shape, _MODEL)
    tape.add(reason, (bare,), (), op.makes_weight_gradient(weight), of=tape.with_weight())
    return op.scaled(tape, bare, f"{reason}, scaled", _MODEL)


def _highest_of_each(tape: Tape, dtypes: dict[str, bool]) -> list[Alive]:
    """Return the moments that can be the peak while the same gradients exist. An engine adds others at each."""
    found: list[Alive] = []
    for _, same in groupby(tape.moments, key=lambda one: (one.gradients, one.current)):
        found += highest(list(same), **dtypes)
    return found

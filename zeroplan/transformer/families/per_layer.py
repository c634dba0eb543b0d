"""Embeddings of each layer, and keys that layers share (Gemma 4 E2B and E4B): what a layer reads and leaves beside the stream.

Before the blocks, the model looks up every layer's embedding of each token in a second table, and adds a projection of the token's
own embedding. Each layer reads its slice. Autograd writes a slice's gradient into zeros as large as all slices.

The last layers use the keys and values of the last layer of their kind below them, its *stored* keys. The gradient of these is
summed up over the layers. A checkpoint of the stored layer makes them again, and a dictionary that all checkpoints hold keeps them,
with everything that autograd saved to make them, until the first layer's backward.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from zeroplan.expr import NOTHING, Size
from zeroplan.ledger import Kind
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.definition import Block
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Arriving, Operator, Site, Store, Tape, Value, Width, with_twins
from zeroplan.transformer.parameters import BY_KEYS
from zeroplan.transformer.symbols import T, d_o, e, h, h_l, k, k_o, r, v, w_l

LayerKind = Literal["local", "global"]


class Sources(NamedTuple):
    """Where transformers runs these parts: the layer's forward, and the model's; and the norm of the layer's embedding."""

    layer: str
    model: str
    norm: Norm


# --- what arrives with the gradient, and what is left ---------------------------------------------------------------------------


def begin(tape: Tape, block: Block, source: str) -> Value:
    """Announce what layers above leave for the backward, except gradients of this kind of layer's keys.

    It returns the embeddings of all layers.
    """
    every = _of_others(tape, block, "embeddings", ("embeddings of all layers", r, T * w_l), source)
    if block.training is not None and not block.training.all_layers_tracked:
        tape.untracked.add(every)
        tape.arriving.pop(every, None)
    if block.own is None:
        return every
    other: LayerKind = "global" if block.heads == "local" else "local"
    if other in block.own.arriving:
        for name, dtype in _keys_and_values(tape, block):
            _of_others(tape, block, other, (f"shared {name} of the other kind of layers", dtype, T * k_o), source)
    for kind in block.own.left if tape.recomputed else ():
        tape.left += _left_by(block, kind, source)
    return every


def _keys_and_values(tape: Tape, block: Block) -> tuple[tuple[str, Width], ...]:
    """Return the dtypes of keys, which the tables of positions widen, and of values. Layers in few bits return their input's."""
    in_few_bits = block.training is not None and block.training.quantize != "none"
    return ("keys", op.wider(tape, e, r)), ("values", r if in_few_bits else e)


def shared_keys(tape: Tape, block: Block, source: str) -> tuple[Value, Value]:
    """Return the keys and values of a layer below, which counts them."""
    names = _keys_and_values(tape, block)
    key, value = (
        _of_others(tape, block, block.heads, (f"{name} of a layer below", dtype, T * width), source)
        for (name, dtype), width in zip(names, (k, v), strict=True)
    )
    return key, value


def _of_others(tape: Tape, block: Block, what: str, made_as: tuple[str, Width, Size], source: str) -> Value:
    """Return a tensor that another layer, or the model, makes and counts; its gradient waits if layers above have begun it."""
    reason, dtype, shape = made_as
    value = Value(Store(op.TENSOR, reason, NOTHING, source), dtype, shape)
    _waits(tape, block, what, value, reason, source)
    return value


def _waits(tape: Tape, block: Block, what: str, value: Value, reason: str, source: str) -> None:
    tape.of_others.add(value)
    if block.own is not None and what in block.own.arriving:
        size = tape.in_this_run(value.dtype * value.shape)
        tape.arriving[value] = Store(op.GRADIENT, f"gradient of {reason}, of the layers above", size, source)


def store_keys(tape: Tape, block: Block, keys: tuple[Value, Value], made_by: list[Operator], source: str) -> None:
    """Let layers above read this layer's keys and values. ``made_by``: the operators that made them.

    A recomputation leaves what these operators saved in memory.
    """
    stores = tuple([one.store for one in keys])
    for name, value in zip(("shared keys", "shared values"), keys, strict=True):
        _waits(tape, block, block.heads, value, name, source)
    tape.of_others.difference_update(keys)  # their gradients go on to this layer's projections
    tape.history.handed = tuple([tape.hold(one) for one in stores])
    beneath = dict.fromkeys((*stores, *(store for one in made_by for store in one.saved)))
    casts = [
        Store(Kind.WEIGHT_CASTS, f"16-bit copy, {one.name}", e * one.cast, source) for one in made_by if one.cast is not None
    ]
    tape.history.beneath = (*beneath, *casts)
    if tape.recomputed:
        tape.hold_to_the_end(*beneath)
        tape.lasting.update(map(id, made_by))


def _left_by(block: Block, kind: LayerKind, source: str) -> list[Store]:
    """Return the tensors that the recomputation of the stored layer of this kind has left."""
    own, swaps = BY_KEYS[f"{kind}_stored"], {} if kind == block.heads else {"k": k_o, "v": k_o, "d": d_o}
    stores = _beneath(block._replace(own=own, heads=kind))
    if block.own is not None and block.own.weights_too:
        stores = (*stores, Store(Kind.UNSHARDED_PARAMETERS, "gathered weights of keys and values", e * h * (k + v), source))
    return [Store(one.kind, f"{one.reason}, left by a layer above", one.size.replacing(swaps), source) for one in stores]


@lru_cache(maxsize=256)
def _beneath(stored: Block) -> tuple[Store, ...]:
    from zeroplan.transformer.families.traced import run_forward  # noqa: PLC0415  it imports the families' files

    tape, _, _ = run_forward(stored, saving=True, recomputed=True)
    return with_twins(tape.history.beneath)


# --- a layer's embedding ----------------------------------------------------------------------------------------------------------


def slice_of(tape: Tape, every: Value, source: str) -> Value:
    """Return this layer's embedding, a view. Its backward makes a gradient of all layers' embeddings, and runs last."""
    made = Value(every.store, every.dtype, T * h_l, strided=True)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.history.leaving = tuple(tape.alive)
        return [(every, op.gradient(tape, every, "gradient of the embeddings of all layers, 0 but for this one", source))]

    tape.add("embedding of this layer", (made,), (), backward, of=(every,))
    return made


def with_embedding(tape: Tape, given: Value, own: Value, block: Block, sources: Sources) -> Value:
    """Add what the layer makes of its embedding to the residual stream, and release ``given``."""
    layer = sources.layer
    gate = op.linear(tape, given, h_l, Site("gate of the layer's embedding", layer, layer="per_layer_input_gate"))
    active = activated(tape, gate, block.activation, f"{block.activation} of the embedding's gate", layer)
    tape.release(gate)
    inner = op.product(tape, active, own, "gated embedding of the layer", layer)
    tape.release(active)
    site = Site("projection of the layer's embedding", layer, layer="per_layer_projection")
    wide = op.linear(tape, inner, h, site, reads=h_l)
    tape.release(inner)
    normal = op.norm(tape, wide, "norm of the layer's embedding", sources.norm)
    tape.release(wide)
    made = op.add(tape, given, normal, "block output", layer)
    tape.release(normal, given)
    return made

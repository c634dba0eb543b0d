"""A linear layer's adapter with DoRA: trained magnitudes of the layer's outputs, divided by the norms of the changed weight.

Every forward multiplies both matrices by an identity to make the whole change of the weight, and adds it to a copy of the weight.
Local variables hold these until the layer's forward ends. The norms get no gradient.
"""

from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.spec.adapter import Quantize
from zeroplan.transformer.blocks import At
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Training
from zeroplan.transformer.families.frozen import (
    copied_linear,
    dequantised,
    dropped,
    frozen_linear,
    low_rank,
    scales_written_out,
)
from zeroplan.transformer.families.operators import TEMPORARY
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value, Width
from zeroplan.transformer.symbols import e, z

DORA = "peft 0.21, tuners/lora/dora.py, DoraLinearLayer.forward"
DEQUANTISED = "bitsandbytes 0.50, functional.py, dequantize_4bit"


def plus_dora(
    tape: Tape, given: Value, made: Value, site: Site, training: Training, *, width: Size, reads: Size, bias: bool
) -> Value:  # fmt: skip
    """Run the adapter on ``given``, and add its output and that of the layer, both scaled, to ``made``; release both."""
    name = site.name
    at = Site(f"{name} with DoRA", DORA, site.module, At.ADAPTED)
    read = dropped(tape, given, site) if training.dropout else given
    if training.dora == "torchtune":
        outer = low_rank(tape, read, site, training, width=width, reads=reads, only=False)
    norms, held, copies, weight = _norms(tape, read, site, training, width=width, reads=reads)
    wide = op.wider(tape, 4 if tape.autocast else e, read.dtype)
    scale = _scale(tape, norms, (name, width, wide), at)
    tape.drop(*copies)
    if training.dora == "peft":
        outer = low_rank(tape, read, site, training, width=width, reads=reads, only=False)
        base = _base(tape, read, made, site, weight, width=width, reads=reads, bias=bias, dropout=training.dropout)
    else:  # torchtune scales the layer's output itself, with its bias and made without dropout
        tape.hold(made.store)
        base = made
    less = op.plus_constant(tape, scale, f"magnitudes of the {name}'s outputs, less one", at)
    first = _by_magnitudes(tape, less, base, f"output of the {name}, scaled", wide)
    tape.release(less)
    product = _by_magnitudes(tape, scale, outer, f"output of the {name}'s adapter, by magnitudes", wide)
    second = op.scaled(tape, product, f"output of the {name}'s adapter, scaled", at)
    change = op.add(tape, first, second, f"change of the {name}'s output", at)
    tape.release(first, second, outer, scale, base, *((read,) if training.dropout else ()))
    tape.drop(*held, *weight, norms)
    total = op.add(tape, made, change, f"output of the {name} and its adapter", at)
    tape.release(made, change, given)
    if training.quantize != "none" or tape.is_wide(total.dtype) == tape.is_wide(made.dtype):
        return total
    narrow = op.cast(tape, total, made.dtype, at._replace(name=f"output of the {name} and its adapter"))
    tape.release(total)
    return narrow


class _Made(NamedTuple):
    """The norms, what else lives until the layer's forward ends, and autocast's copies of the matrices, until these run."""

    norms: Store
    held: tuple[Store, ...]
    copies: tuple[Store, ...]
    weight: tuple[Store, ...]
    """The layer's weight, if it is a copy. It lives as long."""


def _norms(tape: Tape, read: Value, site: Site, training: Training, *, width: Size, reads: Size) -> _Made:
    """Make the norms of the changed weight's rows."""
    name, matrix, dtype = site.name, reads * width, read.dtype
    by_name = training.dora == "torchtune"
    change, saved, copies = _change(tape, read, name, width=width, reads=reads, in_a_variable=by_name)
    weight = _weight(tape, read, name, matrix, training.quantize)
    scaled = tape.make(TEMPORARY, f"change of the {name}'s weight, scaled", dtype * matrix, DORA)
    total = tape.make(TEMPORARY, f"changed weight of the {name}", dtype * matrix, DORA)
    tape.drop(scaled)
    norms = tape.make(op.TENSOR, f"norms of the {name}'s weight", dtype * width, DORA)
    tape.drop(total)
    return _Made(norms, (*saved, change), copies, weight)


class _Change(NamedTuple):
    """The change of a weight, what autograd saves for it, and autocast's copies of both matrices."""

    change: Store
    saved: tuple[Store, ...]
    copies: tuple[Store, ...] = ()


def _change(tape: Tape, read: Value, name: str, *, width: Size, reads: Size, in_a_variable: bool) -> _Change:
    """Multiply both matrices by an identity. A checkpoint that saves nothing lets go of what autograd would save.

    ``in_a_variable``: a variable of the layer's forward holds the identity, as in torchtune.
    """
    dtype: Width = 4 if tape.autocast else read.dtype
    identity = tape.make(TEMPORARY, f"identity of the {name}'s inputs", dtype * reads * reads, DORA)
    if tape.autocast:
        return _change_cast(tape, read, name, identity, width=width, reads=reads)
    inner = tape.make(TEMPORARY, f"{name}'s adapter, A, whole", read.dtype * reads * z, DORA)
    change = tape.make(TEMPORARY, f"change of the {name}'s weight", read.dtype * reads * width, DORA)
    if tape.saving:
        return _Change(change, (identity, inner))
    tape.drop(inner, *(() if in_a_variable else (identity,)))
    return _Change(change, (identity,) if in_a_variable else ())


def _change_cast(tape: Tape, read: Value, name: str, identity: Store, *, width: Size, reads: Size) -> _Change:
    """Do so under autocast, whose change is cast to the dtype of the input."""
    first = tape.make(TEMPORARY, f"{name}'s adapter, A, in 16 bits", e * z * reads, DORA)
    given = tape.make(TEMPORARY, f"identity of the {name}'s inputs, in 16 bits", e * reads * reads, DORA)
    inner = tape.make(TEMPORARY, f"{name}'s adapter, A, whole", e * reads * z, DORA)
    if not tape.saving:
        tape.drop(given)
    second = tape.make(TEMPORARY, f"{name}'s adapter, B, in 16 bits", e * z * width, DORA)
    narrow = tape.make(TEMPORARY, f"change of the {name}'s weight, in 16 bits", e * reads * width, DORA)
    tape.drop(identity, *(() if tape.saving else (inner,)))
    change = narrow
    if tape.is_wide(read.dtype):
        change = tape.make(TEMPORARY, f"change of the {name}'s weight", read.dtype * reads * width, DORA)
        tape.drop(narrow)
    return _Change(change, (given, inner) if tape.saving else (), (first, second))


def _weight(tape: Tape, read: Value, name: str, matrix: Size, quantize: Quantize) -> tuple[Store, ...]:
    """Return a copy of the layer's weight in the input's dtype, if it has another one."""
    written: list[Store] = []
    if quantize != "none":
        scales = scales_written_out(tape, name, matrix, quantize, copies=1)
        written = [dequantised(tape, name, matrix, DEQUANTISED, quantize)]
        tape.drop(*scales)
    if tape.is_wide(read.dtype) == tape.is_wide(e):
        return tuple(written)
    wide = tape.make(TEMPORARY, f"weight of the {name}, in fp32", read.dtype * matrix, DORA)
    tape.drop(*written)
    return (wide,)


def _base(
    tape: Tape, read: Value, made: Value, site: Site, weight: tuple[Store, ...], *, width: Size, reads: Size, bias: bool,
    dropout: bool,
) -> Value:  # fmt: skip
    """Return the layer's output without its bias, as peft makes it: of the input with dropout it is a second product.

    Autograd saves a copied weight, which autocast casts once more, for that product.
    """
    name = site.name
    if not dropout:
        at = Site(f"output of the {name}, less its bias", DORA, site.module, At.ADAPTED)
        if bias:
            return op.plus_constant(tape, made, at.name, at)
        tape.hold(made.store)
        return made
    again = Site(f"{name}, of the input with dropout", DORA, site.module, At.ADAPTED)
    if tape.autocast:
        return copied_linear(tape, read, width, again, reads=reads, bias=False)
    if not weight:
        return frozen_linear(tape, read, width, again, reads=reads, bias=False, keeps_input=False)
    second = op.tensor(tape, f"output of the {again.name}", read.dtype, tape.rows * width, DORA)
    backward = op.makes(f"gradient through the {again.name}", DORA, read)
    tape.add(again.name, (second,), weight, backward, of=(read,), place=again.place)
    return second


def _scale(tape: Tape, norms: Store, of: tuple[str, Size, Width], at: Site) -> Value:
    """Divide the magnitudes by the norms, which autograd saves. ``of``: the layer's name, its outputs, and the result's dtype."""
    name, width, dtype = of
    scale = op.tensor(tape, f"magnitudes of the {name}'s outputs, by their norms", dtype, width, DORA)
    tape.add(f"{name}: magnitudes", (scale,), (norms,), op.makes_weight_gradient(width), of=None, place=at.place)
    return scale


def _by_magnitudes(tape: Tape, factor: Value, value: Value, reason: str, dtype: Width) -> Value:
    """Multiply every row of ``value`` by the magnitudes, whose gradient is summed over the rows before ``value``'s is cast."""
    made = op.tensor(tape, reason, dtype, value.shape, DORA)
    saved = op.factors(tape, (factor, (factor,)), (value, (value,)))

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        unsummed = tape.make(op.GRADIENT, f"gradient of the magnitudes of {reason}, not yet summed", dtype * value.shape, DORA)
        tracked = tape.follows(value)
        wide = [tape.make(op.GRADIENT, f"gradient of {reason}", dtype * value.shape, DORA)] if tracked else []
        tape.used(*op.stores_of(saved))
        summed = op.gradient(tape, factor, f"gradient of the magnitudes of {reason}", DORA)
        tape.drop(unsummed)
        if not tracked:
            return [(factor, summed)]
        return [(factor, summed), (value, op.as_narrow(tape, value, wide[0], made, DORA))]

    tape.add(reason, (made,), saved, backward, of=(factor, value))
    return made

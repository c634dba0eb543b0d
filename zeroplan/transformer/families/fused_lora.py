"""Attention's projections of a 4-bit model with adapters, as Unsloth's autograd functions run them.

fms-acceleration installs them (``fused_lora``): one function for q, k and v together and one for the output projection. Each
dequantises its weights and adds the adapter's output in place. It saves its input and, with dropout, the copy that each adapter
read. It saves no mask: the backward recognises dropped elements by their zeros.
"""

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.expr import Size, ceil
from zeroplan.ledger import Kind, Module
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Training
from zeroplan.transformer.families.operators import GRADIENT, TEMPORARY
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.symbols import T, e, h, z

BITS = "fms-acceleration 876e2ed, fms_acceleration_foak/fused_ops/unsloth_lora/utils.py, fast_dequantize"
GPTQ = "fms-acceleration 876e2ed, fms_acceleration_foak/fused_ops/unsloth_lora/gptq/triton/kernels.py, dequant248"
LORA = "fms-acceleration 876e2ed, fms_acceleration_foak/fused_ops/unsloth_lora/bnb/fast_lora.py, LoRA_QKV"


class Projection(NamedTuple):
    """One of the linear layers that a function runs."""

    name: str
    width: Size


def projections(tape: Tape, given: Value, layers: tuple[Projection, ...], training: Training) -> tuple[Value, ...]:
    """Run layers that read the same input, and their adapters."""
    at_once = training.quantize == "gptq"
    weights = [_written_out(tape, one, h, training) for one in layers] if at_once else []
    made, read = [], list[Store]()
    for one in layers:
        weight = None if at_once else _written_out(tape, one, h, training)
        made.append(op.tensor(tape, f"output of the {one.name} and its adapter", e, T * one.width, LORA))
        tape.drop(*(() if weight is None else (weight,)))
        read += _dropped(tape, one, given) if training.dropout else ()
        tape.drop(*_product_of_adapter(tape, one))
    tape.drop(*weights)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        _weight_gradients(tape, layers, h)
        if not tape.follows(given):
            return []
        arriving = given.store if not at_once else tape.make(GRADIENT, "gradient through the projections", e * T * h, LORA)
        for at, one in enumerate(layers):
            weight = _written_out(tape, one, h, training)
            tape.drop(weight, *(_of_one(tape, one) if at else ()))
            _through_adapter(tape, one, h)
        return [op.through(given, arriving) if not at_once else (given, arriving)]

    names = f"fused {', '.join(one.name for one in layers)}"
    tape.add(names, tuple(made), (given.store, *read), backward, of=None, place=Place(At.ADAPTED, Module.Q))
    tape.drop(*read)
    return tuple(made)


def output(tape: Tape, given: Value, width: Size, site: Site, training: Training, *, reads: Size) -> Value:
    """Run the output projection and its adapter."""
    one = Projection(site.name, width)
    weight = _written_out(tape, one, reads, training)
    made = op.tensor(tape, f"output of the {one.name} and its adapter", e, T * width, LORA)
    tape.drop(weight)
    read = _dropped(tape, one, given) if training.dropout else ()
    tape.drop(*_product_of_adapter(tape, one))

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        _weight_gradients(tape, (one,), reads)
        weight = _written_out(tape, one, reads, training)
        arriving = tape.make(GRADIENT, f"gradient through the {one.name}", e * T * reads, LORA)
        tape.drop(weight)
        _through_adapter(tape, one, reads)
        return [(given, arriving)]

    tape.add(f"fused {one.name}", (made,), (given.store, *read), backward, of=None, place=Place(At.ADAPTED, site.module))
    tape.drop(*read)
    return made


def _written_out(tape: Tape, one: Projection, reads: Size, training: Training) -> Store:
    """Return a weight in the compute dtype. Scales in 8 bits are dequantised beside it."""
    matrix, reason = reads * one.width, f"weight of the {one.name}, written out of 4 bits"
    if training.quantize == "gptq":
        return tape.make(TEMPORARY, reason, e * matrix, GPTQ)
    made = tape.make(TEMPORARY, reason, e * matrix, BITS)
    tape.drop(tape.make(TEMPORARY, f"scales of the {one.name}'s weight, fp32", 4 * ceil(matrix, 64), BITS))
    return made


def _dropped(tape: Tape, one: Projection, given: Value) -> tuple[Store]:
    """Return the copy with dropout that an adapter reads. The mask is freed at once."""
    reason = f"input of the {one.name}'s adapter, after dropout"
    made = tape.make(op.TENSOR, reason, given.dtype * given.shape, LORA)
    tape.drop(tape.make(TEMPORARY, f"{reason}: mask", given.shape, LORA))
    return (made,)


def _product_of_adapter(tape: Tape, one: Projection) -> Iterator[Store]:
    """Yield the adapter's tensors; its output is added in place."""
    yield tape.make(TEMPORARY, f"{one.name}'s adapter: product with A", e * T * z, LORA)
    yield tape.make(TEMPORARY, f"{one.name}'s adapter: its output", e * T * one.width, LORA)


def _weight_gradients(tape: Tape, layers: tuple[Projection, ...], reads: Size) -> None:
    """Make the gradients of the adapters' matrices, in 16 bits and then cast."""
    for one in layers:
        tape.temporary(f"{one.name}'s adapter: gradients, not yet cast", e * z * (reads + one.width), LORA)
    for one in layers:
        tape.weight_gradient(reads * z)
        tape.weight_gradient(one.width * z)


def _of_one(tape: Tape, one: Projection) -> tuple[Store]:
    """Return the gradient through a further layer, which is added in place."""
    return (tape.make(Kind.TEMPORARY, f"gradient through the {one.name}", e * T * h, LORA),)


def _through_adapter(tape: Tape, one: Projection, reads: Size) -> None:
    """Make the gradient through an adapter: a mask of the undropped elements, the product, and the masked product."""
    name = f"{one.name}'s adapter"
    kept = tape.make(TEMPORARY, f"{name}: what was not dropped, booleans", T * reads, LORA)
    inner = tape.make(TEMPORARY, f"{name}: gradient of the product with A", e * T * z, LORA)
    through = tape.make(TEMPORARY, f"gradient through the {name}", e * T * reads, LORA)
    tape.drop(inner)
    masked = tape.make(TEMPORARY, f"gradient through the {name}, with zeros", e * T * reads, LORA)
    tape.drop(kept, through, masked)

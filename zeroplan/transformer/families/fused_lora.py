"""Attention's projections of a 4-bit model with adapters, as Unsloth's autograd functions run them.

fms-acceleration installs them (``fused_lora``): one function for q, k and v together and one for the output projection. Each
dequantises its weights and adds the adapter's output in place. It saves its input and, with dropout, the copy that each adapter
read. It saves no mask: the backward recognises dropped elements by their zeros.

Axolotl's functions (``by_axolotl``, ``gated_mlp``) also run unquantised weights and gated MLPs. They save their input, the input
after dropout (a mask for all layers), 16-bit copies of fp32 adapters and of an MLP the gate and the up projection.
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
from zeroplan.transformer.symbols import T, e, f, h, z

BITS = "fms-acceleration 876e2ed, fms_acceleration_foak/fused_ops/unsloth_lora/utils.py, fast_dequantize"
GPTQ = "fms-acceleration 876e2ed, fms_acceleration_foak/fused_ops/unsloth_lora/gptq/triton/kernels.py, dequant248"
AXOLOTL = "axolotl 067b021c, kernels/lora.py, LoRA_QKV, LoRA_O and LoRA_MLP"
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

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
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
    if training.fused == "axolotl-lora":
        return by_axolotl(tape, given, (one,), training, reads=reads, module=site.module)[0]
    weight = _written_out(tape, one, reads, training)
    made = op.tensor(tape, f"output of the {one.name} and its adapter", e, T * width, LORA)
    tape.drop(weight)
    read = _dropped(tape, one, given) if training.dropout else ()
    tape.drop(*_product_of_adapter(tape, one))

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
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


# --- Axolotl's ---------------------------------------------------------------------------------------------------------------


def by_axolotl(
    tape: Tape, given: Value, layers: tuple[Projection, ...], training: Training, *, reads: Size = h, module: Module = Module.Q
) -> tuple[Value, ...]:  # fmt: skip
    """Run layers that read the same input, and their adapters, as one of Axolotl's functions."""
    names = f"fused {', '.join(one.name for one in layers)}"
    read = _read_by_adapters(tape, given, names, training)
    made = tuple(_product(tape, one, reads, training) for one in layers)
    copies = _copies(tape, tuple((one.name, reads, one.width) for one in layers))

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        beside = [_of_adapter(tape, one.name, reads, one.width) for one in layers]
        arriving = _input_gradients(tape, given, read, layers, reads, training)
        _gradients_of(tape, beside, tuple((reads, one.width) for one in layers))
        return arriving

    saved = (given.store, *(() if read is given else (read.store,)), *copies)
    tape.add(names, made, saved, backward, of=None, place=Place(At.ADAPTED, module))
    tape.drop(*copies, *(() if read is given else (read.store,)))
    return made


def gated_mlp(tape: Tape, given: Value, training: Training) -> Value:
    """Run a gated MLP and its adapters. The backward writes the activation and both gradients over what it gets and saved."""
    gate, up, down = (Projection(f"{name} projection", f) for name in ("gate", "up", "down"))
    with tape.owning():
        read = _read_by_adapters(tape, given, "fused gated MLP", training)
        wide = [_product(tape, one, h, training).store for one in (gate, up)]
        hidden = tape.make(TEMPORARY, "gated product, input of the down projection", e * T * f, AXOLOTL)
        made = _product(tape, down._replace(width=h), f, training)
        sizes = ((h, f), (h, f), (f, h))
        names = tuple(one.name for one in (gate, up, down))
        copies = _copies(tape, tuple((name, *size) for name, size in zip(names, sizes, strict=True)))
        tape.drop(hidden)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        weight = _written(tape, down, h, training)
        through = tape.make(GRADIENT, "gradient through the down projection, then the gated product", e * T * f, AXOLOTL)
        tape.drop(*weight)
        beside = [_of_adapter(tape, name, *size) for name, size in zip(names, sizes, strict=True)]
        arriving = _input_gradients(tape, given, read, (up, gate), h, training)
        _gradients_of(tape, beside, sizes)
        tape.drop(through)
        return arriving

    saved = (given.store, *(() if read is given else (read.store,)), *wide, *copies)
    tape.add("fused gated MLP", (made,), saved, backward, of=None, place=Place(At.ADAPTED, Module.GATE))
    tape.drop(*wide, *copies, *(() if read is given else (read.store,)))
    return made


def _read_by_adapters(tape: Tape, given: Value, name: str, training: Training) -> Value:
    from zeroplan.transformer.families.frozen import dropped  # noqa: PLC0415  frozen.py imports this module

    return dropped(tape, given, Site(name, AXOLOTL)) if training.dropout else given


def _product(tape: Tape, one: Projection, reads: Size, training: Training) -> Value:
    """Multiply with a layer's weight, and add its adapter's output in place."""
    weight = _written(tape, one, reads, training)
    made = op.tensor(tape, f"output of the {one.name} and its adapter", e, T * one.width, AXOLOTL)
    tape.drop(*weight)
    casts = _copies(tape, ((one.name, reads, one.width),))
    tape.drop(*casts, tape.make(TEMPORARY, f"{one.name}'s adapter: product with A", e * T * z, AXOLOTL))
    return made


def _written(tape: Tape, one: Projection, reads: Size, training: Training) -> tuple[Store, ...]:
    return () if training.quantize == "none" else (_written_out(tape, one, reads, training),)


def _copies(tape: Tape, sizes: tuple[tuple[str, Size, Size], ...]) -> tuple[Store, ...]:
    """The adapters' matrices in the compute dtype: copies if they are fp32."""
    if not tape.autocast:
        return ()
    return tuple(
        tape.make(op.TENSOR, f"{name}'s adapter: matrices in 16 bits", e * z * (reads + width), AXOLOTL)
        for name, reads, width in sizes
    )


def _of_adapter(tape: Tape, name: str, reads: Size, width: Size) -> tuple[Store, Store]:
    """The gradient of the product with A, and the gradients of both matrices in 16 bits, until the function returns."""
    inner = tape.make(TEMPORARY, f"{name}'s adapter: gradient of the product with A", e * T * z, AXOLOTL)
    both = tape.make(TEMPORARY, f"{name}'s adapter: gradients, not yet cast", e * z * (reads + width), AXOLOTL)
    tape.drop(tape.make(TEMPORARY, f"{name}'s adapter: product of its input and A", e * T * z, AXOLOTL))
    return inner, both


def _input_gradients(
    tape: Tape, given: Value, read: Value, layers: tuple[Projection, ...], reads: Size, training: Training
) -> Arriving:  # fmt: skip
    arriving: Arriving = []
    if tape.follows(given):
        arriving.append((given, tape.make(GRADIENT, "gradient through the projections", e * T * reads, AXOLOTL)))
        for one in layers:
            tape.drop(*_written(tape, one, reads, training))
    if read is not given:
        arriving.append((read, tape.make(GRADIENT, "gradient through the adapters", e * T * reads, AXOLOTL)))
    return arriving


def _gradients_of(tape: Tape, beside: list[tuple[Store, Store]], sizes: tuple[tuple[Size, Size], ...]) -> None:
    """Release the adapters' temporaries, and hand on the gradients of their matrices."""
    for inner, _ in beside:
        tape.drop(inner)
    for (_, both), (reads, width) in zip(beside, sizes, strict=True):
        tape.weight_gradient(reads * z)
        tape.weight_gradient(width * z)
        tape.drop(both)

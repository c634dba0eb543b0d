"""Adapters of a layer's stacked experts, and of its router: peft's ``ParamWrapper`` adds each to the whole frozen weight.

The experts' weights are one tensor, not linear layers, so peft cannot add an adapter's output to a layer's output. Instead it
replaces the weight, while the module's forward runs, by the frozen weight plus the product of the adapter's two matrices. Torch
computes this sum once more when the parametrization is registered, to check its shape. ``grouped_mm`` saves the sum for the
gradient of its input, so that every layer keeps a second copy of its experts until its backward, which makes the gradient of
all experts at once.
"""

from typing import NamedTuple

from zeroplan.expr import NOTHING, Size
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.operators import GRADIENT, TEMPORARY
from zeroplan.transformer.families.tags import SCRATCH
from zeroplan.transformer.families.tape import Arriving, Beside, Do, Site, Store, Tape, Value
from zeroplan.transformer.symbols import E, T, e, h, z

WRAPPER = "peft 0.21, tuners/lora/layer.py, ParamWrapper.get_delta_factors"
SUM = "peft 0.21, tuners/lora/layer.py, _LoraFactorsProxy.forward"
CHECKED = "torch 2.13, torch/nn/utils/parametrize.py, ParametrizationList.__init__"
PARAMETRIZED = "bitsandbytes 0.50, nn/parametrize.py, Bnb4bitParametrization.forward"
OF_A_MATRIX = "peft 0.21, tuners/lora/layer.py, ParamWrapper.get_delta_weight"
BLAS = "torch 2.13, aten/src/ATen/native/cuda/Blas.cpp, prepare_batch_matrix_for_cublas (read, not run)"


class Wrapped(NamedTuple):
    """A weight whose adapter is active, and the adapter's matrices in the order in which their product reads them."""

    name: str
    matrix: Size
    """Elements of the weight."""
    factors: tuple[Value, Value]
    waits: bool
    """The second factor is a view of its parameter, so that its gradient is the parameter's."""
    scratch: int
    """Factors whose order in memory BLAS does not read."""


def wrapped(tape: Tape, name: str, rank: Size, sizes: tuple[Size, Size], *, transposed: bool) -> Wrapped:
    """Activate the adapter of all experts' ``name``, of ``sizes``: the features that an expert reads, and those that it makes.

    ``transposed``: the weight has its input features first, so that both matrices are read in another order than theirs.
    """
    a, b = (E * rank * width for width in sizes)
    is_view = not (transposed or tape.autocast or tape.mode.wide_adapters)
    if transposed:
        factors = _factor(tape, f"{name}'s adapter, A", a), _factor(tape, f"{name}'s adapter, B", b)
    else:
        left = _factor(tape, f"{name}'s adapter, B", b, waiting=a if is_view else None)
        factors = left, _factor(tape, f"{name}'s adapter, A", a, reordered=False)
    made = Wrapped(name, E * sizes[0] * sizes[1], factors, is_view, 1 + transposed)
    tape.drop(tape.make(TEMPORARY, f"{name} with its adapter, to check its shape", e * made.matrix, CHECKED))
    return made


def _factor(tape: Tape, name: str, elements: Size, *, reordered: bool = True, waiting: Size | None = None) -> Value:
    """Return a factor: a cast copy of an fp32 matrix, else a view of the parameter.

    ``reordered``: its gradient is copied into the order of the parameter. ``waiting``: the gradient that arrives with it.
    """
    wide = tape.autocast or tape.mode.wide_adapters
    made = Value(Store(TEMPORARY, "", NOTHING, ""), 4 if wide else e, elements)

    def arrives(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        if waiting is not None:
            tape.gradients.waiting.remove(waiting)
        tape.weight_gradient(elements)
        return []

    if reordered:
        tape.add(f"{name}: order of its gradient", (made,), (), arrives, of=None)
    if not wide:
        return made
    copy = op.tensor(tape, f"{name}, cast", e, elements, WRAPPER)
    through = op.makes(f"gradient of the {name}, fp32", WRAPPER, made) if reordered else arrives
    tape.add(f"{name}: cast", (copy,), (), through, of=None)
    return copy


def merged(tape: Tape, weight: Wrapped) -> Value:
    """Add an adapter to the weight of all experts, for the rest of the module's forward. ``baddbmm`` saves both factors.

    With ``lora_alpha`` = rank torch leaves out the scaled copies of the factors' gradients, which are counted.
    """
    name, reason = f"{weight.name} with its adapter", f"gradient of a factor of the {weight.name}'s adapter"
    made = op.tensor(tape, name, e, weight.matrix, SUM)
    made.strided = weight.scratch == 1  # grouped_mm saves a view with input features first
    reason_of_copy = f"factor of the {weight.name}'s adapter, in order"
    tape.drop(*[tape.make(TEMPORARY, reason_of_copy, e * one.shape, BLAS, SCRATCH) for one in weight.factors[: weight.scratch]])

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        arriving: Arriving = []
        for one in weight.factors:
            unscaled = tape.make(TEMPORARY, f"{reason}, not yet scaled", e * one.shape, SUM)
            if weight.waits and one is weight.factors[1]:
                tape.weight_gradient(one.shape, waits=True)
            else:
                arriving.append((one, tape.make(GRADIENT, reason, e * one.shape, SUM)))
            tape.drop(unscaled)
        return arriving

    copies = tuple(one for one in weight.factors if one.store.size.terms)
    views = tuple(Beside(reason, e * one.shape, strided=True) for one in weight.factors if one not in copies)
    tape.add(name, (made,), copies, backward, of=None, saves_weight=True, beside=views)
    return made


def written_out(tape: Tape, name: str, matrix: Size) -> Value:
    """Write the weight of all experts out of four bits, for the rest of the module's forward. ``grouped_mm`` may save it."""
    from zeroplan.transformer.families.frozen import scales_written_out  # noqa: PLC0415  few jobs have it

    matrix = tape.in_this_run(matrix)  # a rounded-up size shows no symbols to replace
    scales = scales_written_out(tape, name, matrix, tape.mode.quantised_experts, copies=1)
    made = op.tensor(tape, f"{name}, written out of 4 bits", e, matrix, PARAMETRIZED)
    made.strided = True
    tape.drop(*scales)
    tape.untracked.add(made)
    return made


# --- the router --------------------------------------------------------------------------------------------------------------


def change_of_router(tape: Tape) -> Value:
    """Return the scaled product of the matrices of the router's adapter."""
    product = _product(tape)
    scaled = op.scaled(tape, product, "router's adapter, scaled", OF_A_MATRIX)
    change = op.cast(tape, scaled, e, Site("router's adapter", OF_A_MATRIX))
    tape.release(scaled)
    tape.drop(tape.make(TEMPORARY, "router with its adapter, to check its shape", e * E * h, CHECKED))
    return change


def _product(tape: Tape) -> Value:
    """Multiply the two matrices, which autocast casts to 16 bits."""
    name, sizes = "router's adapter", (z * h, E * z)
    wide, casts = tape.mode.wide_adapters, list[Value]()
    for elements in sizes if tape.autocast else ():
        casts.append(Value(Store(TEMPORARY, "", NOTHING, ""), e, elements))
        tape.add(f"{name}: cast of a gradient", (casts[-1],), (), op.makes_weight_gradient(elements), of=None)
    if casts:
        tape.casts.append(z * h + E * z)
        tape.history.actions.append((Do.CAST, tape.casts[-1]))
    made = op.tensor(tape, f"{name}: product", 4 if wide else e, E * h, OF_A_MATRIX)
    tape.matrix_product(made.store)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        if casts:
            reason = f"gradient of the {name}, not yet cast"
            return [(one, tape.make(TEMPORARY, reason, e * one.shape, OF_A_MATRIX)) for one in casts]
        for elements in sizes:
            tape.weight_gradient(elements)
        return []

    cast = tape.casts[-1] if casts else None
    tape.add(f"{name}: product", (made,), (), backward, of=None, cast=cast, saves_weight=True)
    return made


def logits_with_adapter(
    tape: Tape, flat: Value, change: Value, source: str, *, in_32_bits: bool
) -> tuple[Value, Value]:  # fmt: skip
    """Add the change to the router's weight, and multiply. Return the logits and the sum, which lives until the module returns."""
    weight = factor = op.tensor(tape, "router with its adapter", e, E * h, SUM)
    tape.add("router with its adapter", (weight,), (), op.same_gradient(change), of=(change,))
    if in_32_bits:
        flat = op.cast(tape, flat, 4, Site("input of the router", source))
        factor = op.cast(tape, weight, 4, Site("router with its adapter", source))
    made = op.tensor(tape, "output of the router", factor.dtype, T * E, source)
    tape.matrix_product(made.store)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        arriving = [(factor, op.gradient(tape, factor, "gradient of the router with its adapter", source))]
        if tape.follows(flat):
            arriving.append((flat, op.gradient_of_product(tape, flat, "gradient through the router", source)))
        return arriving

    saved = op.factors(tape, (flat, (flat,)), (factor, (factor,)))
    tape.add("router", (made,), saved, backward, of=(flat, factor))
    if in_32_bits:
        tape.release(flat, factor)
    return made, weight

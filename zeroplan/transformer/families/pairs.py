"""Operators on pairs of a token and one of its experts: sorted for grouped matrix multiplication, and put back in order."""

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.symbols import T, h, r, t, x

EXPERTS = "transformers 5.23, integrations/moe.py, grouped_mm_experts_forward"


def sorted_experts(tape: Tape) -> tuple[Store, Store]:
    """The expert of each pair, sorted, and the order that sorts them."""
    experts = tape.make(op.TENSOR, "experts of the pairs, sorted, int64", 8 * T * t, EXPERTS)
    return experts, tape.make(op.TENSOR, "order of the sorted pairs, int64", 8 * T * t, EXPERTS)


def picked(
    tape: Tape, value: Value, made_as: tuple[str, Size], by: Store, source: str, *, first: bool = False
) -> Value:  # fmt: skip
    """Elements or rows of a tensor by their indices, which are saved; the gradient is put into zeros of the whole's size.

    ``first`` of what a module does with its weights: when its backward is done gradients that wait come to them.
    """
    reason, shape = made_as
    made = op.tensor(tape, reason, value.dtype, shape, source)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        if first:
            tape.waiting.clear()
        return [(value, op.gradient(tape, value, f"gradient of what {reason} came from", source))]

    tape.add(reason, (made,), (by,), backward, of=(value,))
    return made


def grouped_product(tape: Tape, value: Value, site: tuple[str, Size, Size], ends: Store, *, experts: Size) -> Value:
    """``grouped_mm``, which autocast leaves alone; the gradient of the weights of so many experts is made first.

    Weights of a rank's own experts, ``x``, come through operators that ran before others.
    """
    name, reads, width = site
    made = op.tensor(tape, f"{name}: output", r, T * t * width, EXPERTS)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.weight_gradient(experts * reads * width, waits=experts == x)
        return [(value, op.gradient(tape, value, f"gradient of the input of {name}", EXPERTS))]

    tape.add(name, (made,), (value.store, ends), backward, of=None)
    return made


def back_in_order(tape: Tape, value: Value, reason: str) -> Value:
    """The pairs in the order in which they came, to whose result the name goes over."""
    inverse = tape.make(op.TENSOR, "order that undoes the sorting, int64", 8 * T * t, EXPERTS)
    tape.drop(tape.make(op.TEMPORARY, "0, 1, 2, ..., int64", 8 * T * t, EXPERTS))
    made = picked(tape, value, (reason, T * t * h), inverse, EXPERTS)
    tape.drop(inverse)
    tape.release(value)
    return made


def weighted_outputs(tape: Tape, outputs: Value, weights: Value, source: str) -> Value:
    """The experts' outputs times the routing weights, in the wider dtype of the two."""
    wide = op.wider(tape, outputs.dtype, weights.dtype)
    made = op.tensor(tape, "experts: weighted outputs", wide, T * t * h, source)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        unsummed = tape.make(op.TEMPORARY, "gradient of the routing weights, not yet summed", made.dtype * T * t * h, source)
        if tape.is_wide(made.dtype) == tape.is_wide(outputs.dtype):
            passed = op.gradient(tape, outputs, "gradient of the experts' outputs", source)
            tape.used(outputs.store, weights.store)
        else:
            uncast = tape.make(op.TEMPORARY, "gradient of the outputs, not yet cast", made.dtype * T * t * h, source)
            tape.used(outputs.store, weights.store)
            passed = op.gradient(tape, outputs, "gradient of the experts' outputs", source)
            tape.drop(uncast)
        total = tape.make(op.GRADIENT, "gradient of the routing weights", made.dtype * T * t, source)
        tape.drop(unsummed)
        return [(outputs, passed), (weights, op.as_narrow(tape, weights, total, made, source))]

    place, saved = Place(At.WEIGHTING, Module.EXPERTS), (outputs.store, weights.store)
    tape.add("weighting of the expert outputs", (made,), saved, backward, of=(outputs, weights), place=place)
    return made


def summed(tape: Tape, unsorted: Value) -> Value:
    """The sum over a token's experts, in the dtype of the residual stream."""
    wide = op.tensor(tape, "sum over a token's experts", unsorted.dtype, T * h, EXPERTS)
    backward = op.makes("gradient of the output, for each expert of a token", EXPERTS, unsorted)
    tape.add("sum over a token's experts", (wide,), (), backward, of=(unsorted,))
    made = op.cast(tape, wide, r, Site("output of the experts", EXPERTS))
    tape.release(wide)
    return made

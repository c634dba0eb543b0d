"""Experts on several ranks: tokens go to the rank of their expert and come back.

Evenly visited experts are assumed: a rank gets as many pairs of a token and an expert as it sends, T·t.
"""

from collections.abc import Callable
from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.pairs import (
    EXPERTS,
    back_in_order,
    grouped_product,
    picked,
    sorted_experts,
    weighted_outputs,
)
from zeroplan.transformer.families.tape import Site, Store, Tape, Value
from zeroplan.transformer.symbols import E, T, e, h, m, r, t, x

DISPATCH = "transformers 5.23, distributed/expert_parallel.py, AllToAllEP._dispatch_tokens"
COMBINE = "transformers 5.23, distributed/expert_parallel.py, AllToAllEP._combine_tokens"


def dispatched(tape: Tape, normal: Value, weights: Value, experts: Callable[[Tape, Value], Value]) -> Value:
    """``AllToAllEP.__call__``, which holds what came, and what the experts made of it, by name to its end."""
    order, received = _sent(tape, normal)
    theirs = tape.make(op.TENSOR, "experts of the pairs that came, int64", 8 * T * t, DISPATCH)
    ones = tape.make(op.TENSOR, "weights of one for the pairs that came", e * T * t, DISPATCH)
    outputs = experts(tape, received)
    made = _combined(tape, outputs, weights, order)
    tape.drop(order, theirs, ones)
    tape.release(received, outputs)
    return made


def _sent(tape: Tape, normal: Value) -> tuple[Store, Value]:
    """Pairs sorted by expert, and so by rank, are sent; how many go where is sent before."""
    order = tape.make(op.TENSOR, "order of the pairs sorted by expert, int64", 8 * T * t, DISPATCH)
    rows = tape.make(op.TENSOR, "token of each pair that is sent, int64", 8 * T * t, DISPATCH)
    sent = picked(tape, normal, ("tokens sorted by expert, to be sent", T * t * h), rows, DISPATCH)
    tape.drop(rows)
    counts = tape.make(op.TEMPORARY, "pairs for each expert, sent and got, int64", 16 * E, DISPATCH)
    tape.drop(tape.make(op.TEMPORARY, "ones to be counted, int64", 8 * T * t, DISPATCH))
    received = _exchanged(tape, sent, "tokens that came for this rank's experts", DISPATCH)
    tape.drop(tape.make(op.TEMPORARY, "experts of the pairs that came, as they are made", 16 * T * t + 8 * E, DISPATCH))
    tape.release(sent)
    tape.drop(counts)
    return order, received


def _exchanged(tape: Tape, value: Value, reason: str, source: str) -> Value:
    """``all_to_all_single``, which is sent the other way in the backward; torchtitan's selective recomputation keeps its output."""
    made = op.tensor(tape, reason, value.dtype, value.shape, source)
    tape.by_kernel(made.store)

    backward = op.makes(f"gradient, sent back, of {reason}", source, value)
    tape.add(f"all-to-all: {reason}", (made,), (), backward, of=(value,))
    return made


def _combined(tape: Tape, outputs: Value, weights: Value, order: Store) -> Value:
    """The experts' outputs come back, are put in order, weighted and summed over a token's experts."""
    returned = _exchanged(tape, outputs, "outputs that came back from the experts", COMBINE)
    unsorted = op.tensor(tape, "outputs of the experts in the order of tokens", returned.dtype, T * t * h, COMBINE)

    backward = op.makes("gradient of the outputs, sorted by expert", COMBINE, returned)
    tape.add("outputs in the order of tokens", (unsorted,), (order,), backward, of=(returned,))
    wide = _summed(tape, weighted_outputs(tape, unsorted, weights, COMBINE))
    tape.release(unsorted, returned)
    made = op.cast(tape, wide, r, Site("output of the experts", COMBINE))
    tape.release(wide)
    return made


def _summed(tape: Tape, weighted: Value) -> Value:
    made = op.tensor(tape, "sum over a token's experts", weighted.dtype, T * h, COMBINE)
    tape.add("sum over a token's experts", (made,), (), op.passes(weighted), of=(weighted,))
    tape.release(weighted)
    return made


# --- this rank's experts -----------------------------------------------------------------------------------------------------


class Sorting(NamedTuple):
    """What the experts know of the pairs that came."""

    theirs: Store
    """The expert of each, sorted."""
    order: Store
    ones: Store
    """Weights of one, sorted."""
    counted: Store
    ends: Store
    """Where each expert's pairs end."""
    beyond: Store
    """Which pairs are no expert's: none, but asked for each."""


def own_experts(tape: Tape, received: Value) -> Value:
    """``grouped_mm_experts_forward`` with the parts that expert parallelism switches on: pairs of no expert are set to nought."""
    selected, sorting = sorted_pairs(tape, received)
    masked = nought(tape, selected, sorting, "input of the experts", in_place=True)
    tape.hold(selected.store)
    both = _grouped(tape, masked, ("experts: gate and up projections", h, (m + m)), sorting)
    outputs = _grouped(tape, gated_experts(tape, both), ("experts: down projection", m, h), sorting)
    return returned_pairs(tape, outputs, selected, sorting)


def sorted_pairs(tape: Tape, received: Value) -> tuple[Value, Sorting]:
    """Pairs by expert, and what says so."""
    theirs, order = sorted_experts(tape)
    rows = tape.make(op.TENSOR, "row of each pair, int64", 8 * T * t, EXPERTS)
    selected = picked(tape, received, ("pairs sorted by expert, input of the experts", T * t * h), rows, EXPERTS, first=True)
    tape.drop(rows)
    return selected, Sorting(
        theirs,
        order,
        tape.make(op.TENSOR, "weights of one, sorted", e * T * t, EXPERTS),
        tape.make(op.TEMPORARY, "sorted experts as 32-bit numbers, and counts", 4 * T * t + 4 * x, EXPERTS),
        tape.make(op.TENSOR, "ends of the experts' groups", 4 * x, EXPERTS),
        tape.make(op.TENSOR, "which pairs are of no expert", T * t, EXPERTS),
    )


def returned_pairs(tape: Tape, outputs: Value, selected: Value, sorting: Sorting, *also: Value) -> Value:
    """The experts' outputs in the order in which pairs came; what the experts held by name goes."""
    made = _unsorted(tape, outputs, sorting.ones)
    tape.drop(*sorting)
    tape.release(outputs, selected, *also)
    return made


def nought(tape: Tape, value: Value, sorting: Sorting, name: str, *, in_place: bool = False) -> Value:
    """``masked_fill``, whose mask is saved; the name goes over to the result."""
    made = (
        Value(value.store, value.dtype, value.shape)
        if in_place
        else op.tensor(tape, f"{name}, of no expert's pairs nought", value.dtype, value.shape, EXPERTS)
    )

    backward = op.makes(f"gradient of the {name}, of no expert's pairs nought", EXPERTS, value)
    tape.add(f"{name}: no expert's pairs", (made,), (sorting.beyond,), backward, of=(value,))
    if not in_place:
        tape.release(value)
    return made


def _grouped(tape: Tape, value: Value, site: tuple[str, Size, Size], sorting: Sorting) -> Value:
    """``grouped_mm``, to whose result the name goes over, and no expert's pairs set to nought."""
    product = grouped_product(tape, value, site, sorting.ends, experts=x)
    tape.release(value)
    return nought(tape, product, sorting, f"output of {site[0]}")


def gated_experts(tape: Tape, both: Value) -> Value:
    """``silu(gate) * up`` of what the first product made; the name goes over to the result."""
    gate, up = op.chunk(tape, both, (T * t * m, T * t * m), Site("experts: gates and ups", EXPERTS))
    active = op.pointwise(tape, gate, "experts: silu of the gate", Site("experts: silu", EXPERTS))
    made = op.product(
        tape, active, up, "experts: gated product, input of the down projection", Site("experts: gated product", EXPERTS)
    )
    tape.release(active, gate, up, both)
    return made


def _unsorted(tape: Tape, outputs: Value, ones: Store) -> Value:
    """The outputs times one, back in the order in which the pairs came, each the sum over a single expert."""
    weighted = op.tensor(tape, "experts: outputs times one", outputs.dtype, T * t * h, EXPERTS)

    backward = op.makes("gradient of the outputs, times one", EXPERTS, outputs)
    tape.add("experts: outputs times one", (weighted,), (ones,), backward, of=(outputs,))
    back = back_in_order(tape, weighted, "experts: outputs in the order in which pairs came")
    made = op.tensor(tape, "output of this rank's experts", back.dtype, T * t * h, EXPERTS)
    tape.add("experts: sum over one", (made,), (), op.passes(back), of=(back,))
    tape.release(back)
    return made

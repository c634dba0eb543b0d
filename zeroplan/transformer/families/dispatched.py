"""Blocks whose experts are on several ranks, of Mixtral and Qwen3-MoE: tokens go to the rank of their expert and come back.

Evenly visited experts are assumed: a rank gets as many pairs of a token and an expert as it sends, T·t.
"""

from collections.abc import Callable
from typing import NamedTuple

from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attend import Attended
from zeroplan.transformer.families.gated import Branches, three_projections, two_branches
from zeroplan.transformer.families.moe import EXPERTS
from zeroplan.transformer.families.moe import MIXTRAL as ROUTER
from zeroplan.transformer.families.operators import NormAs, Site
from zeroplan.transformer.families.pairs import back_in_order, grouped_product, picked, sorted_experts
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Arriving, Store, Tape, Value

MIXTRAL = "transformers 5.23, models/mixtral/modeling_mixtral.py, MixtralDecoderLayer.forward"
QWEN3 = "transformers 5.23, models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeDecoderLayer.forward"
DISPATCH = "transformers 5.23, distributed/expert_parallel.py, AllToAllEP._dispatch_tokens"
COMBINE = "transformers 5.23, distributed/expert_parallel.py, AllToAllEP._combine_tokens"
NORM = NormAs(one_plus=False, source=MIXTRAL)
QWEN3_NORM = NormAs(one_plus=False, source=QWEN3)


def mixtral(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer of Mixtral."""
    return two_branches(tape, given, block, Branches(NORM, _attention, _routed, MIXTRAL))


def qwen3_moe(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer of Qwen3-MoE."""
    return two_branches(tape, given, block, Branches(QWEN3_NORM, _attention_with_norms, _narrowly_routed, QWEN3))


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    return three_projections(tape, normal, block, MIXTRAL)


def _attention_with_norms(tape: Tape, normal: Value, block: Block) -> Attended:
    return three_projections(tape, normal, block, QWEN3, QWEN3_NORM)


def _routed(tape: Tape, normal: Value) -> Value:
    return _mlp(tape, normal, narrowed=False)


def _narrowly_routed(tape: Tape, normal: Value) -> Value:
    return _mlp(tape, normal, narrowed=True)


def _mlp(tape: Tape, normal: Value, *, narrowed: bool) -> Value:
    """Router, dispatch, experts, combination; ``narrowed``: the router hands its weights on in the dtype of its logits."""
    routing = _router(tape, normal, narrowed=narrowed)
    made = dispatched(tape, normal, routing.weights, _experts)
    tape.drop(routing.indices)
    tape.release(routing.weights, routing.logits)
    return made


# --- the router -----------------------------------------------------------------------------------------------------------


class _Routing(NamedTuple):
    """What says which expert gets which token."""

    logits: Value
    weights: Value
    indices: Store


def _router(tape: Tape, normal: Value, *, narrowed: bool) -> _Routing:
    logits = op.linear(tape, normal, "E", Site("router", ROUTER))
    wide = op.cast(tape, logits, "4", Site("router: logits", ROUTER))
    scores = op.pointwise(tape, wide, "router: scores of all experts", Site("router: softmax", ROUTER), saves_result=True)
    tape.release(wide)
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", "8·T·t", ROUTER)
    chosen = picked(tape, scores, ("router: top-k weights", "T·t"), indices, ROUTER)
    tape.release(scores)
    weights = _normalised(tape, chosen)
    if not narrowed:
        return _Routing(logits, weights, indices)
    narrow = op.cast(tape, weights, "e", Site("router: weights", ROUTER))
    tape.release(weights)
    return _Routing(logits, narrow, indices)


def _normalised(tape: Tape, chosen: Value) -> Value:
    """``weights /= weights.sum()``: in place, so that what they were is copied for the backward."""
    total = tape.make(op.TENSOR, "router: sum of the top-k weights", "4·T", ROUTER)
    before = tape.make(op.TENSOR, "router: top-k weights before they are divided by their sum", "4·T·t", ROUTER)
    made = Value(chosen.store, chosen.dtype, chosen.shape)
    beside = ("gradient of the sum of the top-k weights, not yet summed", "8·T·t")
    backward = op.makes("gradient of the top-k weights", ROUTER, chosen, beside=beside)
    tape.add("router: division by the sum", (made,), (total, before), backward)
    tape.drop(total, before)
    return made


# --- tokens go and come back -----------------------------------------------------------------------------------------------


def dispatched(tape: Tape, normal: Value, weights: Value, experts: Callable[[Tape, Value], Value]) -> Value:
    """``AllToAllEP.__call__``, which holds what came, and what the experts made of it, by name to its end."""
    order, received = _sent(tape, normal)
    theirs = tape.make(op.TENSOR, "experts of the pairs that came, int64", "8·T·t", DISPATCH)
    ones = tape.make(op.TENSOR, "weights of one for the pairs that came", "e·T·t", DISPATCH)
    outputs = experts(tape, received)
    made = _combined(tape, outputs, weights, order)
    tape.drop(order, theirs, ones)
    tape.release(received, outputs)
    return made


def _sent(tape: Tape, normal: Value) -> tuple[Store, Value]:
    """Pairs sorted by expert, and so by rank, are sent; how many go where is sent before."""
    order = tape.make(op.TENSOR, "order of the pairs sorted by expert, int64", "8·T·t", DISPATCH)
    rows = tape.make(op.TENSOR, "token of each pair that is sent, int64", "8·T·t", DISPATCH)
    sent = picked(tape, normal, ("tokens sorted by expert, to be sent", "T·t·h"), rows, DISPATCH)
    tape.drop(rows)
    counts = tape.make(op.TEMPORARY, "pairs for each expert, sent and got, int64", "16·E", DISPATCH)
    tape.drop(tape.make(op.TEMPORARY, "ones to be counted, int64", "8·T·t", DISPATCH))
    received = _exchanged(tape, sent, "tokens that came for this rank's experts", DISPATCH)
    tape.drop(tape.make(op.TEMPORARY, "experts of the pairs that came, as they are made", "16·T·t + 8·E", DISPATCH))
    tape.release(sent)
    tape.drop(counts)
    return order, received


def _exchanged(tape: Tape, value: Value, reason: str, source: str) -> Value:
    """``all_to_all_single``, which is sent the other way in the backward; torchtitan's selective recomputation keeps its output."""
    made = op.tensor(tape, reason, value.dtype, value.shape, source)
    tape.by_kernel(made.store)

    tape.add(f"all-to-all: {reason}", (made,), (), op.makes(f"gradient, sent back, of {reason}", source, value))
    return made


def _combined(tape: Tape, outputs: Value, weights: Value, order: Store) -> Value:
    """The experts' outputs come back, are put in order, weighted and summed over a token's experts."""
    returned = _exchanged(tape, outputs, "outputs that came back from the experts", COMBINE)
    unsorted = op.tensor(tape, "outputs of the experts in the order of tokens", returned.dtype, "T·t·h", COMBINE)

    backward = op.makes("gradient of the outputs, sorted by expert", COMBINE, returned)
    tape.add("outputs in the order of tokens", (unsorted,), (order,), backward)
    wide = _summed(tape, _weighted(tape, unsorted, weights))
    tape.release(unsorted, returned)
    made = op.cast(tape, wide, "r", Site("output of the experts", COMBINE))
    tape.release(wide)
    return made


def _weighted(tape: Tape, outputs: Value, weights: Value) -> Value:
    """The outputs times the routing weights, in the wider dtype of the two."""
    made = op.tensor(tape, "experts: weighted outputs", weights.dtype, "T·t·h", COMBINE)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("gradient of the routing weights, not yet summed", f"{made.dtype}·T·t·h", COMBINE)
        uncast: tuple[Store, ...] = ()
        if tape.is_wide(made.dtype) != tape.is_wide(outputs.dtype):
            uncast = (tape.make(op.TEMPORARY, "gradient of the outputs, not yet cast", f"{made.dtype}·T·t·h", COMBINE),)
            tape.used(outputs.store, weights.store)
        arriving = [(outputs, op.gradient(tape, outputs, "gradient of the experts' outputs", COMBINE))]
        tape.drop(*uncast)
        return [*arriving, (weights, op.gradient(tape, weights, "gradient of the routing weights", COMBINE))]

    tape.add("weighting of the expert outputs", (made,), (outputs.store, weights.store), backward)
    return made


def _summed(tape: Tape, weighted: Value) -> Value:
    made = op.tensor(tape, "sum over a token's experts", weighted.dtype, "T·h", COMBINE)
    tape.add("sum over a token's experts", (made,), (), op.passes(weighted))
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


def _experts(tape: Tape, received: Value) -> Value:
    """``grouped_mm_experts_forward`` with the parts that expert parallelism switches on: pairs of no expert are set to nought."""
    selected, sorting = sorted_pairs(tape, received)
    masked = nought(tape, selected, sorting, "input of the experts", in_place=True)
    tape.hold(selected.store)
    both = _grouped(tape, masked, ("experts: gate and up projections", "h", "(m+m)"), sorting)
    outputs = _grouped(tape, _gated(tape, both), ("experts: down projection", "m", "h"), sorting)
    return returned_pairs(tape, outputs, selected, sorting)


def sorted_pairs(tape: Tape, received: Value) -> tuple[Value, Sorting]:
    """Pairs by expert, and what says so."""
    theirs, order = sorted_experts(tape)
    rows = tape.make(op.TENSOR, "row of each pair, int64", "8·T·t", EXPERTS)
    selected = picked(tape, received, ("pairs sorted by expert, input of the experts", "T·t·h"), rows, EXPERTS, first=True)
    tape.drop(rows)
    return selected, Sorting(
        theirs,
        order,
        tape.make(op.TENSOR, "weights of one, sorted", "e·T·t", EXPERTS),
        tape.make(op.TEMPORARY, "sorted experts as 32-bit numbers, and counts", "4·T·t + 4·x", EXPERTS),
        tape.make(op.TENSOR, "ends of the experts' groups", "4·x", EXPERTS),
        tape.make(op.TENSOR, "which pairs are of no expert", "T·t", EXPERTS),
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
    tape.add(f"{name}: no expert's pairs", (made,), (sorting.beyond,), backward)
    if not in_place:
        tape.release(value)
    return made


def _grouped(tape: Tape, value: Value, site: tuple[str, str, str], sorting: Sorting) -> Value:
    """``grouped_mm``, to whose result the name goes over, and no expert's pairs set to nought."""
    product = grouped_product(tape, value, site, sorting.ends, experts="x")
    tape.release(value)
    return nought(tape, product, sorting, f"output of {site[0]}")


def _gated(tape: Tape, both: Value) -> Value:
    gate, up = op.chunk(tape, both, ("T·t·m", "T·t·m"), Site("experts: gates and ups", EXPERTS))
    active = op.pointwise(tape, gate, "experts: silu of the gate", Site("experts: silu", EXPERTS))
    made = op.product(
        tape, active, up, "experts: gated product, input of the down projection", Site("experts: gated product", EXPERTS)
    )
    tape.release(active, gate, up, both)
    return made


def _unsorted(tape: Tape, outputs: Value, ones: Store) -> Value:
    """The outputs times one, back in the order in which the pairs came, each the sum over a single expert."""
    weighted = op.tensor(tape, "experts: outputs times one", outputs.dtype, "T·t·h", EXPERTS)

    backward = op.makes("gradient of the outputs, times one", EXPERTS, outputs)
    tape.add("experts: outputs times one", (weighted,), (ones,), backward)
    back = back_in_order(tape, weighted, "experts: outputs in the order in which pairs came")
    made = op.tensor(tape, "output of this rank's experts", back.dtype, "T·t·h", EXPERTS)
    tape.add("experts: sum over one", (made,), (), op.passes(back))
    tape.release(back)
    return made

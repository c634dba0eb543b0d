"""Megatron-Core's token dispatchers: how tokens come to their experts, and how outputs return."""

from collections.abc import Callable

from zeroplan.expr import NOTHING
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.megatron.sources import CORE
from zeroplan.transformer.families.megatron.structure import Dispatcher, Routing
from zeroplan.transformer.families.megatron.symbols import X_1, X_2, E_r, T_g, T_n, X_r, X_s, w_p
from zeroplan.transformer.families.tape import Backward, Site, Store, Tape, Value, Width
from zeroplan.transformer.symbols import E, e, h

PERMUTE = f"{CORE}/transformer/moe/moe_utils.py, permute"
UNPERMUTE = f"{CORE}/transformer/moe/moe_utils.py, unpermute"
SORT = f"{CORE}/transformer/moe/moe_utils.py, sort_chunks_by_idxs"
ALL_TO_ALL = f"{CORE}/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher"
ALL_GATHER = f"{CORE}/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher"
HYBRID_EP = f"{CORE}/transformer/moe/fused_a2a.py, HybridEPDispatch and HybridEPCombine"

Dispatched = tuple[Value, Value, tuple[Store, ...]]
"""Tokens sorted by expert, the routing weight of each, and what variables of ``MoELayer.forward`` hold until it returns."""


def _gathered(tape: Tape, normal: Value, weights: Value) -> Dispatched:
    """Dispatch by all-gather: all ranks' tokens go to Megatron's persistent buffer, and a rank picks those of its experts."""
    maps = tape.make(op.TENSOR, "experts: maps and weights of all ranks", T_g * E + w_p * T_g * E, ALL_GATHER)
    own = tape.make(op.TENSOR, "experts: map and weights of this rank's", (2 + w_p) * T_g * E_r, ALL_GATHER)
    sorting = tape.make(op.TEMPORARY, "experts: choices, sorted", 16 * T_g * E_r, PERMUTE)
    order = tape.make(op.TENSOR, "experts: order of tokens", 8 * X_r, PERMUTE)
    tokens = op.tensor(tape, "experts: tokens that came", e, X_r * h, PERMUTE)
    tape.drop(sorting, maps)
    chosen = op.tensor(tape, "experts: weight of each token", w_p, X_r, ALL_GATHER)
    whole = "gradient of all ranks' tokens", e * T_g * h
    _dispatch(tape, (normal, weights), (tokens, chosen), (own, order), op.needs(ALL_GATHER, whole), ALL_GATHER)
    return tokens, chosen, ()


def _dispatch(
    tape: Tape, given: tuple[Value, Value], made: tuple[Value, Value], saved: tuple[Store, Store], way: Backward, source: str
) -> None:  # fmt: skip
    """Add a dispatch of tokens and routing weights to the tape. Its backward is the ``way`` back, and then both gradients."""
    back = op.in_turn(
        way,
        op.makes("gradient of this rank's tokens", source, given[0]),
        op.makes("gradient of the routing weights", source, given[1]),
    )
    tape.add("dispatch", made, saved, back, of=given)
    tape.drop(*saved)


def _sent(tape: Tape, normal: Value, weights: Value) -> Dispatched:
    """Dispatch by all-to-all.

    Tokens are sorted by expert, sent to the expert's rank, gathered over expert tensor-parallel ranks, and sorted by local expert.
    """
    order = tape.make(op.TENSOR, "experts: order of tokens", 8 * X_s, PERMUTE)
    every = tape.make(op.TENSOR, "experts: all pairs sorted, of which an index is a view", 8 * T_n * E, PERMUTE)
    sorting = tape.make(op.TEMPORARY, "experts: choices, sorted", 8 * T_n * E, PERMUTE)
    sorted_ = tape.make(op.TEMPORARY, "experts: tokens to send", e * X_1 * h, PERMUTE)
    tape.drop(sorting)
    came = tape.make(op.TEMPORARY, "experts: tokens as they came", e * X_2 * h, ALL_TO_ALL)
    tokens = op.tensor(tape, "experts: tokens that came", e, X_r * h, SORT)
    chosen = op.tensor(tape, "experts: weight of each token", w_p, X_r, ALL_TO_ALL)
    returning = "gradient of the tokens on their way back", e * (X_1 + X_2) * h
    _dispatch(tape, (normal, weights), (tokens, chosen), (order, every), op.needs(ALL_TO_ALL, returning), PERMUTE)
    return tokens, chosen, (sorted_, came)


def times_weights(tape: Tape, value: Value, chosen: Value, routing: Routing, source: str) -> Value:
    """The product with the routing weights, in their dtype. A wider product is cast back."""
    dtype: Width = 4 if routing.wide else e
    backward = op.in_turn(
        op.needs(
            source, ("experts: product of gradient and output", dtype * value.shape),
            ("experts: gradient before its cast", 4 * value.shape if routing.wide else NOTHING),
        ),
        op.makes("experts: gradient of what is weighed", source, value),
        op.makes("gradient of the routing weights", source, chosen),
    )  # fmt: skip
    product = op.run(
        tape, (value, chosen), "experts: product with routing weights", Site("experts: routing weights", source), dtype=dtype,
        saved=(value.store, chosen.store), backward=backward,
    )  # fmt: skip
    if not routing.wide:
        return product
    made = op.cast(tape, product, e, Site("experts: weighted output", source))
    tape.release(product)
    return made


def _scattered(tape: Tape, outputs: Value, chosen: Value, routing: Routing) -> Value:
    """Combination after all-gather: outputs go to the places of all ranks' tokens, and ranks sum them in the weights' dtype."""
    if routing.late:
        weighed = times_weights(tape, outputs, chosen, routing, ALL_GATHER)
        tape.release(outputs)
        return _scattered(tape, weighed, chosen, routing._replace(late=False, deterministic=False))
    cast = w_p * T_g * h if routing.wide else NOTHING
    whole = tape.make(op.TEMPORARY, "experts: outputs at their places", e * T_g * h, UNPERMUTE)
    of_outputs = op.makes("gradient of the experts' outputs", UNPERMUTE, outputs)
    made = op.run(
        tape, outputs, "experts: output", Site("combination", ALL_GATHER), dtype=e, shape=T_n * h,
        passing=(("experts: the same in the weights' dtype", cast),), saved=(outputs.store,) if routing.deterministic else (),
        backward=op.in_turn(op.needs(ALL_GATHER, ("gradient of all ranks' outputs", cast + e * T_g * h)), of_outputs),
    )  # fmt: skip
    tape.drop(whole)
    tape.release(outputs)
    return made


def _returned(tape: Tape, outputs: Value, chosen: Value, routing: Routing) -> Value:
    """Combination after all-to-all, which releases ``outputs``.

    Outputs are sorted by rank, summed over expert tensor-parallel ranks, sent back, and added to their tokens. A variable of
    ``MoELayer.forward`` holds the sorted ones until they came back.
    """
    ordered = tape.make(op.TEMPORARY, "experts: outputs, sorted by rank", e * X_2 * h, SORT)
    cast = w_p * X_2 * h if routing.wide else NOTHING
    tape.drop(tape.make(op.TEMPORARY, "experts: the same in the weights' dtype", cast, ALL_TO_ALL))
    tape.release(outputs)
    backward = op.in_turn(
        op.needs(ALL_TO_ALL, ("gradient of the outputs on their way", e * (X_1 + X_2) * h)),
        op.makes("gradient of the experts' outputs", SORT, outputs),
    )
    if routing.late:
        came = op.tensor(tape, "experts: outputs that came back", e, X_s * h, ALL_TO_ALL)
        tape.drop(ordered)
        tape.add("return", (came,), (), backward, of=(outputs,))
        weighed = times_weights(tape, came, chosen, routing, UNPERMUTE)
        tape.release(came)
        made = _combined(tape, weighed, UNPERMUTE, "gradient of weighed outputs")
        tape.release(weighed)
        return made
    back = tape.make(op.TEMPORARY, "experts: outputs that came back", e * X_1 * h, ALL_TO_ALL)
    tape.drop(ordered)
    made = op.tensor(tape, "experts: output", e, T_n * h, UNPERMUTE)
    tape.add("combination", (made,), (back,) if routing.deterministic else (), backward, of=(outputs,))
    tape.drop(back)
    return made


def _combined(tape: Tape, outputs: Value, source: str, gradient: str) -> Value:
    site = Site("combination", source)
    return op.run(tape, outputs, "experts: output", site, dtype=e, shape=T_n * h, gradient=gradient)


def _sent_by_hybrid_ep(tape: Tape, normal: Value, weights: Value) -> Dispatched:
    """Dispatch by HybridEP: one kernel permutes, sends and sorts tokens, with its own buffers."""
    tokens = op.tensor(tape, "experts: tokens that came", e, X_r * h, HYBRID_EP)
    chosen = op.tensor(tape, "experts: weight of each token", w_p, X_r, HYBRID_EP)
    backward = op.makes("gradient of this rank's tokens, or of the routing weights", HYBRID_EP, normal, weights)
    tape.add("dispatch", (tokens, chosen), (), backward, of=(normal, weights))
    return tokens, chosen, ()


def _returned_by_hybrid_ep(tape: Tape, outputs: Value, _chosen: Value, _routing: Routing) -> Value:
    """Combination by HybridEP: one kernel returns outputs and adds them up."""
    made = _combined(tape, outputs, HYBRID_EP, "gradient of the experts' outputs")
    tape.release(outputs)
    return made


#: Dispatch and combination of each token dispatcher.
WAYS: dict[
    Dispatcher, tuple[Callable[[Tape, Value, Value], Dispatched], Callable[[Tape, Value, Value, Routing], Value]]
] = {
    "alltoall": (_sent, _returned), "allgather": (_gathered, _scattered), "flex": (_sent_by_hybrid_ep, _returned_by_hybrid_ep)
}  # fmt: skip

"""Routed experts: the router, the experts of one rank, and experts spread over several ranks.

A pair is a token and one of its experts. ``grouped_mm`` multiplies all pairs at once, so the pairs are sorted by expert before
it and put back in token order after it.
"""

from collections.abc import Callable
from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.ledger import Among, Module
from zeroplan.spec.recipe import GATHERING
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Block
from zeroplan.transformer.families.merged_experts import (
    Wrapped,
    change_of_router,
    logits_with_adapter,
    merged,
    wrapped,
    written_out,
)
from zeroplan.transformer.families.tape import (
    CAST_BY_CUDA,
    Arriving,
    Beside,
    Exchange,
    P_own,
    Site,
    Store,
    T_own,
    Tape,
    Value,
    Width,
    h_own,
)
from zeroplan.transformer.symbols import E, T, e, h, m, r, t, x, z

ROUTER = "transformers 5.23, models/mixtral/modeling_mixtral.py, MixtralTopKRouter.forward"
MINIMAX = "transformers 5.23, models/minimax_m2/modeling_minimax_m2.py, MiniMaxM2TopKRouter.forward"
EXPERTS = "transformers 5.23, integrations/moe.py, grouped_mm_experts_forward"
FALLBACK = "transformers 5.23, integrations/moe.py, _grouped_mm_fallback"
DISPATCH = "transformers 5.23, distributed/expert_parallel.py, AllToAllEP._dispatch_tokens"
COMBINE = "transformers 5.23, distributed/expert_parallel.py, AllToAllEP._combine_tokens"

# --- the router --------------------------------------------------------------------------------------------------------------


class Routing(NamedTuple):
    """A router's outputs: logits, the weight of each pair, and the index of each pair's expert."""

    logits: Value
    weights: Value
    indices: Store


def router(tape: Tape, normal: Value, *, narrowed: bool, sigmoid: bool = False, divided: bool = True) -> Routing:
    """Run Mixtral's router. ``narrowed``: Qwen3's, which casts its weights to the dtype of its logits.

    ``sigmoid``: MiniMax's scores, to which it adds a bias for the choice. Not ``divided``: the weights of OLMoE do not sum to
    one. The router reads a view of all tokens in one row. The view comes before the product, so the router's weight gets its
    gradient before the view's gradient reaches ``normal``.
    """
    logits, held = product_of_router(tape, normal, ROUTER, in_32_bits="router-in-fp32" in tape.mode.fused)
    scores = _sigmoids(tape, logits) if sigmoid else _scores(tape, logits, narrowed=narrowed)
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, ROUTER)
    tape.release(scores)
    tape.kernel_output(logits.store, chosen.store, indices, of="router-kept")
    weights = divided_by_their_sum(tape, chosen, 4, ROUTER) if divided else chosen
    if narrowed:
        narrow = op.cast(tape, weights, e, Site("router: weights", ROUTER))
        tape.release(weights)
        weights = narrow
    tape.release(*held)
    return Routing(logits, weights, indices)


def product_of_router(tape: Tape, value: Value, source: str, *, in_32_bits: bool) -> tuple[Value, tuple[Value, ...]]:
    """Multiply a view of ``value`` by the router's weight. Return the logits, and what lives until the router's module returns."""
    change = change_of_router(tape) if tape.mode.stacked.router else None
    flat = op.view(tape, value, Site("router: its input", source))
    if change is not None:
        logits, weight = logits_with_adapter(tape, flat, change, source, in_32_bits=in_32_bits)
        tape.release(flat)
        return logits, (change, weight)
    logits = logits_in_32_bits(tape, flat) if in_32_bits else op.linear(tape, flat, E, Site("router", source))
    tape.release(flat)
    return logits, ()


def logits_in_32_bits(tape: Tape, flat: Value) -> Value:
    """Multiply fp32 copies of the router's input and weight. Autograd saves both copies."""
    given = op.cast(tape, flat, 4, Site("input of the router", ROUTER))
    weight = Value(tape.make(op.TENSOR, "router's weight in fp32", 4 * E * h, ROUTER), 4, E * h)
    tape.add("router: cast of the weight gradient", (weight,), (), op.makes_weight_gradient(E * h), of=tape.with_weight())
    saved = op.factors(tape, (given, (given.store,)), (weight, (weight.store,)))
    made = op.run(
        tape, (given, weight), "output of the router", ROUTER, dtype=4, shape=T * E, saved=saved,
        gradient="gradient of a factor of the router",
    )  # fmt: skip
    tape.matrix_product(made.store)
    tape.release(given, weight)
    return made


def _scores(tape: Tape, logits: Value, *, narrowed: bool) -> Value:
    """Softmax of the logits: Mixtral's of ``logits.float()``, Qwen3's with ``dtype=torch.float``."""
    reason, cast_at, site = "router: scores of all experts", Site("router: logits", ROUTER), Site("router: softmax", ROUTER)
    if narrowed:
        return op.softmax_in_32_bits(tape, logits, reason, cast_at, site)
    wide = op.cast(tape, logits, 4, cast_at)
    scores = op.pointwise(tape, wide, reason, site, saves_result=True)
    tape.release(wide)
    return scores


def _sigmoids(tape: Tape, logits: Value) -> Value:
    """Return the sigmoids of ``logits.float()``. The router chooses experts by sigmoid plus bias."""
    wide = op.cast(tape, logits, 4, Site("router: logits", MINIMAX))
    scores = op.pointwise(tape, wide, "router: scores of all experts", MINIMAX, saves_result=True)
    tape.release(wide)
    tape.drop(tape.make(op.TEMPORARY, "router: scores and bias, fp32", 4 * T * E, MINIMAX))
    return scores


def divided_by_their_sum(tape: Tape, chosen: Value, dtype: Width, source: str) -> Value:
    """``weights /= weights.sum()`` in place. Autograd saves a copy of the old weights, and the sum in ``dtype``."""
    total = tape.make(op.TENSOR, "router: sum of the top-k weights", dtype * T, source)
    before = tape.make(op.TENSOR, "router: top-k weights before they are divided by their sum", chosen.dtype * T * t, source)
    made = Value(chosen.store, chosen.dtype, chosen.shape)
    beside = ("gradient of the sum of the top-k weights, not yet summed", 2 * dtype * T * t)
    backward = op.makes("gradient of the top-k weights", source, chosen, beside=beside)
    tape.add("router: division by the sum", (made,), (total, before), backward, of=(chosen,))
    tape.drop(total, before)
    return made


def biased_router(tape: Tape, logits: Value, block: Block, source: str) -> Routing:
    """Pick experts by sigmoid plus bias, and divide the sigmoids by their sum, not in place (Hunyuan 3, LFM2-MoE)."""
    scores = op.pointwise(tape, logits, "router: scores of all experts", source, saves_result=True)
    biased = tape.make(op.TEMPORARY, "router: scores and bias, fp32", 4 * T * E, source)
    best = tape.make(op.TEMPORARY, "router: the best of them", 4 * T * t, source)
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * T * t, source)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, source)
    tape.kernel_output(logits.store, chosen.store, indices, of="router-kept")
    shares = divided_by_sum(tape, chosen, CAST_BY_CUDA if block.autocast else logits.dtype, source)
    weights = op.scaled(tape, shares, "router: weights, scaled", source)
    tape.drop(biased, best)
    tape.release(scores)
    return Routing(logits, weights, indices)


def divided_by_sum(tape: Tape, chosen: Value, dtype: Width, source: str) -> Value:
    """``weights / weights.sum()``, which saves both. It releases ``chosen``."""
    total = tape.make(op.TENSOR, "router: sum of the top-k weights", dtype * T, source)
    made = op.run(
        tape, chosen, "router: weights, divided by their sum", source, dtype=dtype,
        saved=(total, chosen), gradient="gradient of the top-k weights",
        beside=("gradient of the sum of the top-k weights, not yet summed", 2 * dtype * T * t),
    )  # fmt: skip
    tape.drop(total)
    tape.release(chosen)
    return made


# --- what families' experts compute ------------------------------------------------------------------------------------------


class Computing(NamedTuple):
    """The function that one family's experts compute between their two products."""

    gate: Callable[[Tape, Value], Value]
    """Maps the first product's output to the second's input, and releases its argument."""
    biases: bool = False
    """Both products add a bias."""
    gated: bool = True
    """The first product also makes a gate for the second's input."""
    weighted_last: bool = False
    """NeMo AutoModel weights the second product's output, not its input."""
    transposed: bool = False
    """The weights have their input features first."""


#: Families whose experts NeMo AutoModel weights after both products (glm4_moe/model.py, apply_router_weight_after_down).
WEIGHTED_LAST = ("glm4_moe", "glm4_moe_lite")


def silu_gate(tape: Tape, both: Value) -> Value:
    """``silu(gate) * up`` of the first product's output. It releases ``both``."""
    gate, up = op.chunk(tape, both, (P_own * m, P_own * m), Site("experts: gates and ups", EXPERTS))
    active = op.pointwise(tape, gate, "experts: silu of the gate", EXPERTS)
    reason = "experts: gated product, input of the down projection"
    made = op.product(tape, active, up, reason, Site("experts: gated product", EXPERTS))
    tape.release(active, gate, up, both)
    return made


SILU = Computing(silu_gate)


class _Sorting(NamedTuple):
    """Tensors that describe the sorted pairs."""

    experts: Store
    """The expert of each pair."""
    order: Store
    """The permutation that sorts the pairs."""
    ends: Store
    """The index of each expert's last pair."""
    beyond: Store | None = None
    """Boolean mask of the pairs that no expert of this rank computes. Only with experts on several ranks."""


class _Weights(NamedTuple):
    """The weights of all experts that have adapters, while these are active."""

    first: Wrapped | None = None
    second: Wrapped | None = None


_NO_ADAPTERS = _Weights()


def _with_adapters(tape: Tape, computing: Computing) -> _Weights:
    """Activate the adapters of all experts. The wrapper of the second weight is around that of the first."""
    stacked, width = tape.mode.stacked, m + m if computing.gated else m
    second = wrapped(tape, "experts' second weight", z, (m, h), transposed=computing.transposed) if stacked.second else None
    rank = stacked.first * z
    first = wrapped(tape, "experts' first weight", rank, (h, width), transposed=computing.transposed) if stacked.first else None
    return _Weights(first, second)


def _products(
    tape: Tape, given: Value, sorting: _Sorting, computing: Computing, *, experts: Size, weights: _Weights = _NO_ADAPTERS
) -> tuple[Value, tuple[Value, ...]]:
    """Run both products of the experts. Return their output, and what variables hold beside it until the module returns."""
    name, width = ("experts: gate and up projections", m + m) if computing.gated else ("experts: up projection", m)
    summed = _made_anew(tape, weights.first, "experts' first weight", experts * h_own * width)
    first = _bias(tape, "gate and up", (m + m), sorting, experts) if computing.biases else None
    if sorting.beyond is not None:
        given = _zeroed(tape, given, sorting.beyond, "input of the experts", in_place=True)
    both = _grouped(tape, given, first, (name, h_own, width), sorting, experts, weight=summed)
    gated = computing.gate(tape, both)
    second_sum = _made_anew(tape, weights.second, "experts' second weight", experts * m * h_own)
    second = _bias(tape, "down", h_own, sorting, experts) if computing.biases else None
    if first is not None:
        tape.release(first)
    site = "experts: down projection", m, h_own
    made = _grouped(tape, gated, second, site, sorting, experts, frees=True, weight=second_sum)
    return made, tuple(one for one in (second, summed, second_sum) if one is not None)


def _made_anew(tape: Tape, adapted: Wrapped | None, name: str, matrix: Size) -> Value | None:
    """Return a weight of all experts that the forward makes: with its adapter, or out of four bits; None if it only reads it."""
    if adapted is not None:
        return merged(tape, adapted)
    return None if tape.mode.quantised_experts == "none" else written_out(tape, name, matrix)


def _grouped(
    tape: Tape, value: Value, bias: Value | None, site: tuple[str, Size, Size], sorting: _Sorting, experts: Size, *,
    frees: bool = False, weight: Value | None = None,
) -> Value:  # fmt: skip
    """``grouped_mm`` and a bias added in place. Rows without an expert are set to zero. Autograd saves the input.

    ``frees``: release ``value`` before the rows are set to zero.
    """
    made = grouped_product(tape, value, site, sorting.ends, experts=experts, weight=weight)
    if bias is not None:
        product = made
        made = Value(product.store, product.dtype, product.shape)
        tape.add(f"{site[0]}: bias", (made,), (), op.same_gradient(bias, product), of=(bias, product))
    if frees:
        tape.release(value)
    return made if sorting.beyond is None else _zeroed(tape, made, sorting.beyond, f"output of {site[0]}")


def grouped_product(
    tape: Tape, value: Value, site: tuple[str, Size, Size], ends: Store, *, experts: Size, weight: Value | None = None
) -> Value:  # fmt: skip
    """``grouped_mm``, which autocast ignores. Its backward makes the gradients of ``experts`` weights first.

    Gradients of a rank's own experts (``x``) reach their weights only after the backward of operators that ran earlier.
    ``weight``: the frozen weights with an adapter, or written out of four bits. An old GPU multiplies expert by expert
    (``FALLBACK``), in a Python operator that saves both factors, makes both gradients, and has ``ends`` on its node.
    """
    if {"te-float8", "te-experts"} <= set(tape.mode.fused) and experts == x:
        from zeroplan.transformer.families.te_float8 import grouped  # noqa: PLC0415  keeps start-up fast

        return grouped(tape, value, site)
    name, reads, width = site
    made = op.tensor(tape, f"{name}: output", r, P_own * width, EXPERTS)
    is_sum = weight is not None and weight not in tape.untracked
    trains_none, one_by_one = tape.mode.weights_frozen and not is_sum, tape.mode.expert_by_expert

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        arriving: Arriving = []
        if weight is not None and is_sum:
            arriving.append((weight, op.gradient(tape, weight, f"gradient of the weights of {name}", EXPERTS)))
        elif not trains_none:
            tape.weight_gradient(experts * reads * width, waits=experts == x)
        elif one_by_one:
            tape.temporary(f"gradient of the frozen weights of {name}, unused", r * experts * reads * width, FALLBACK)
        if one_by_one or weight is None or tape.follows(value):
            arriving.append((value, op.gradient(tape, value, f"gradient of the input of {name}", EXPERTS)))
        return arriving

    frozen = Beside(f"weights of {name}", r * experts * reads * width, strided=True)
    summed = (weight,) if weight is not None and (one_by_one or tape.follows(value)) else ()
    saved = (*(() if trains_none and not one_by_one else (value,)), *(() if one_by_one else (ends,)), *summed)
    of, beside = (tape.with_weight(value), (frozen,)) if weight is None else ((value, weight), ())
    if one_by_one and (of is None or tape.follows(*of)):
        tape.hold_in_node(ends)
    tape.add(name, (made,), saved, backward, of=of, beside=beside)
    return made


def _bias(tape: Tape, name: str, width: Size, sorting: _Sorting, experts: Size) -> Value:
    """Return the bias of each pair's expert, one row per pair. Autograd saves the experts' indices."""
    made = op.tensor(tape, f"experts: bias of the {name} projection for each pair", r, P_own * width, EXPERTS)
    backward = op.makes_weight_gradient(experts * width, waits=experts == x)
    tape.add(f"experts: bias of the {name} projection", (made,), (sorting.experts,), backward, of=tape.with_weight())
    return made


def routed_experts(tape: Tape, normal: Value, weights: Value, block: Block, computing: Computing = SILU) -> Value:
    """Run the experts as their module does: all on this rank, or spread over several ranks."""
    computing = computing._replace(weighted_last=block.family in WEIGHTED_LAST)
    with tape.inside(Module.EXPERTS), tape.owning():
        if tape.mode.sends_by and (block.dispatched or tape.mode.sends_by in GATHERING):
            from zeroplan.transformer.families.automodel_experts import own_experts  # noqa: PLC0415  keeps start-up fast

            return own_experts(tape, normal, weights, computing, dispatched=block.dispatched)
        return (_dispatched if block.dispatched else _experts_here)(tape, normal, weights, computing)


# --- all experts on this rank ------------------------------------------------------------------------------------------------


def _experts_here(tape: Tape, normal: Value, weights: Value, computing: Computing) -> Value:
    """``grouped_mm_experts_forward``. Its variables hold all tensors but the products' inputs until it returns."""
    adapted = _with_adapters(tape, computing)
    experts, order = _sorted_experts(tape)
    rows = tape.make(op.TENSOR, "token of each pair, int64", 8 * T_own * t, EXPERTS)
    selected = picked(tape, normal, ("tokens sorted by expert, input of the experts", T_own * t * h_own), rows, EXPERTS)
    tape.drop(rows)
    by_expert = picked(tape, weights, ("routing weights sorted by expert", T_own * t), order, EXPERTS)
    counted = tape.make(op.TEMPORARY, "sorted experts as 32-bit numbers, and counts", 4 * T_own * t + 4 * E, EXPERTS)
    ends = tape.make(op.TENSOR, "ends of the experts' groups", 4 * E, EXPERTS)
    outputs, held = _products(tape, selected, _Sorting(experts, order, ends), computing, experts=E, weights=adapted)
    weighted = _weighted_outputs(tape, outputs, by_expert, EXPERTS)
    unsorted, inverse = _back_in_order(tape, weighted, "experts: weighted outputs in the order of tokens")
    summed_in = CAST_BY_CUDA if tape.autocast and not tape.is_wide(unsorted.dtype) else unsorted.dtype
    wide = op.run(
        tape, unsorted, "sum over a token's experts", EXPERTS, shape=T_own * h_own,
        dtype=summed_in, gradient="gradient of the output, for each expert of a token",
    )  # fmt: skip
    made = op.cast(tape, wide, r, Site("output of the experts", EXPERTS))
    tape.drop(experts, order, counted, ends, inverse)
    factors = (factor for one in adapted if one is not None for factor in one.factors)
    tape.release(wide, selected, by_expert, outputs, unsorted, *held, *factors)
    return made


def _sorted_experts(tape: Tape) -> tuple[Store, Store]:
    """Return the expert of each pair, sorted, and the permutation that sorts the pairs."""
    experts = tape.make(op.TENSOR, "experts of the pairs, sorted, int64", 8 * P_own, EXPERTS)
    return experts, tape.make(op.TENSOR, "order of the sorted pairs, int64", 8 * P_own, EXPERTS)


def picked(
    tape: Tape, value: Value, made_as: tuple[str, Size], by: Store, source: str, *, first: bool = False
) -> Value:  # fmt: skip
    """Return the elements or rows of ``value`` at the indices ``by``, which autograd saves. The backward fills zeros of its size.

    ``first``: the operator runs before those of the experts' weights, so their gradients arrive after its backward.
    """
    reason, shape = made_as
    makes = op.makes(f"gradient of what {reason} came from", source, value)
    backward = op.in_turn(_arrived, makes) if first else makes
    return op.run(tape, value, reason, source, shape=shape, saved=(by,), backward=backward)


def _arrived(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
    """The waiting gradients of the experts' weights arrive."""
    tape.gradients.waiting.clear()
    return []


def of_adapter(
    tape: Tape, value: Value, site: tuple[str, Size | int, Size | int], saved: tuple[Store, ...], source: str, *, pairs: Size,
    experts: Size,
) -> Value:  # fmt: skip
    """Multiply pairs with one matrix of each expert's adapter, which is trained. It saves ``value`` and ``saved``."""
    name, reads, width = site
    backward = op.in_turn(
        op.makes_weight_gradient(experts * reads * width, waits=experts == x),
        op.makes(f"gradient of the input of {name}", source, value),
    )
    return op.run(
        tape, value, f"{name}: output", source, dtype=e, shape=pairs * width, saved=(value, *saved),
        backward=backward, weights="trained",
    )  # fmt: skip


def _weighted_outputs(tape: Tape, outputs: Value, weights: Value, source: str) -> Value:
    """Multiply the experts' outputs by the routing weights, in the wider dtype of the two. It saves both."""
    wide = op.wider(tape, outputs.dtype, weights.dtype)
    made = op.tensor(tape, "experts: weighted outputs", wide, T_own * t * h_own, source)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        unsummed = tape.make(
            op.TEMPORARY, "gradient of the routing weights, not yet summed", made.dtype * T_own * t * h_own, source
        )
        if tape.is_wide(made.dtype) == tape.is_wide(outputs.dtype):
            passed = op.gradient(tape, outputs, "gradient of the experts' outputs", source)
            tape.used(outputs.store, weights.store)
        else:
            uncast = tape.make(op.TEMPORARY, "gradient of the outputs, not yet cast", made.dtype * T_own * t * h_own, source)
            tape.used(outputs.store, weights.store)
            passed = op.gradient(tape, outputs, "gradient of the experts' outputs", source)
            tape.drop(uncast)
        total = tape.make(op.GRADIENT, "gradient of the routing weights", made.dtype * T_own * t, source)
        tape.drop(unsummed)
        return [(outputs, passed), (weights, op.as_narrow(tape, weights, total, made, source))]

    place, saved = Place(At.WEIGHTING, Module.EXPERTS), (outputs, weights)
    tape.add("weighting of the expert outputs", (made,), saved, backward, of=(outputs, weights), place=place)
    return made


def _back_in_order(tape: Tape, value: Value, reason: str) -> tuple[Value, Store]:
    """Return the pairs in their order before sorting, and that order, which a variable holds. It releases ``value``."""
    inverse = tape.make(op.TENSOR, "order that undoes the sorting, int64", 8 * P_own, EXPERTS)
    tape.drop(tape.make(op.TEMPORARY, "0, 1, 2, ..., int64", 8 * P_own, EXPERTS))
    made = picked(tape, value, (reason, P_own * h_own), inverse, EXPERTS)
    tape.release(value)
    return made, inverse


# --- experts on several ranks: tokens go to the rank of their expert and come back --------------------------------------------


def _dispatched(tape: Tape, normal: Value, weights: Value, computing: Computing) -> Value:
    """``AllToAllEP.__call__``. Its variables hold the received pairs and the experts' outputs until it returns.

    A rank receives as many pairs as it sends, T·t, or X_r if tokens choose its experts more often. Tensor-parallel ranks have
    the same tokens, and each sends its share.
    """
    normal, weights, indices = _of_this_rank(tape, normal, weights)
    order, received = _sent(tape, normal)
    tape.drop(*indices)
    tape.release(normal)
    theirs = tape.make(op.TENSOR, "experts of the pairs that came, int64", 8 * P_own, DISPATCH)
    ones = tape.make(op.TENSOR, "weights of one for the pairs that came", e * P_own, DISPATCH)
    outputs = _own_experts(tape, received, computing)
    made = _combined(tape, outputs, weights, order)
    tape.drop(order, theirs, ones)
    tape.release(received, outputs, weights)
    return made


def _of_this_rank(tape: Tape, normal: Value, weights: Value) -> tuple[Value, Value, tuple[Store, ...]]:
    """Return tokens, routing weights and copied indices: of all tokens, or of this rank's share under tensor parallelism."""
    if not tape.mode.sharded:
        tape.hold(normal.store)
        tape.hold(weights.store)
        return normal, weights, ()
    cut = Site("this rank's share of the tokens", DISPATCH)
    own = op.run(
        tape, normal, "this rank's share of the tokens", cut, shape=T_own * h_own, gradient="gradient of all ranks' tokens",
        sends_back=(_of_all_ranks(normal, h_own),),
    )  # fmt: skip
    indices = tape.make(op.TENSOR, "experts of this rank's share of the tokens, int64", 8 * T_own * t, DISPATCH)
    site = cut._replace(name="routing weights of this rank's share")
    return (
        own,
        op.run(
            tape, weights, site.name, site, shape=T_own * t, gradient="gradient of all ranks' routing weights",
            sends_back=(_of_all_ranks(weights, t),),
        ),
        (indices,),
    )  # fmt: skip


def _of_all_ranks(value: Value, width: Size) -> Exchange:
    return Exchange("all_gather", Among.TENSOR, value.dtype * T * width)


def _sent(tape: Tape, normal: Value) -> tuple[Store, Value]:
    """Sort pairs by expert, and so by rank. All-to-all the counts, then the pairs. Return the order and the received pairs."""
    order = tape.make(op.TENSOR, "order of the pairs sorted by expert, int64", 8 * T_own * t, DISPATCH)
    rows = tape.make(op.TENSOR, "token of each pair that is sent, int64", 8 * T_own * t, DISPATCH)
    sent = picked(tape, normal, ("tokens sorted by expert, to be sent", T_own * t * h_own), rows, DISPATCH)
    tape.drop(rows)
    counts = tape.make(op.TEMPORARY, "pairs for each expert, sent and got, int64", 16 * E, DISPATCH)
    tape.send(Exchange("all_to_all", Among.EXPERTS, 8 * E))
    tape.drop(tape.make(op.TEMPORARY, "ones to be counted, int64", 8 * T_own * t, DISPATCH))
    received = _exchanged(tape, sent, P_own * h_own, "tokens that came for this rank's experts", DISPATCH)
    tape.drop(tape.make(op.TEMPORARY, "experts of the pairs that came, as they are made", 16 * P_own + 8 * E, DISPATCH))
    tape.release(sent)
    tape.drop(counts)
    return order, received


def _exchanged(tape: Tape, value: Value, shape: Size, reason: str, source: str) -> Value:
    """``all_to_all_single``. Its backward is another all-to-all. torchtitan's selective recomputation keeps its output."""
    sends, back = (Exchange("all_to_all", Among.EXPERTS, value.dtype * sent) for sent in (value.shape, shape))
    made = op.run(
        tape, value, reason, source, shape=shape, gradient=f"gradient, sent back, of {reason}", sends=(sends._replace(kept=True),),
        sends_back=(back,),
    )  # fmt: skip
    tape.kernel_output(made.store)
    return made


def _combined(tape: Tape, outputs: Value, weights: Value, order: Store) -> Value:
    """Send the experts' outputs back, reorder and weight them, and sum over each token's experts."""
    returned = _exchanged(tape, outputs, T_own * t * h_own, "outputs that came back from the experts", COMBINE)
    unsorted = op.run(
        tape, returned, "outputs of the experts in the order of tokens", COMBINE,
        shape=T_own * t * h_own, saved=(order,), gradient="gradient of the outputs, sorted by expert",
    )  # fmt: skip
    weighted, name = _weighted_outputs(tape, unsorted, weights, COMBINE), "sum over a token's experts"
    wide = op.run(tape, weighted, name, COMBINE, shape=T_own * h_own)
    tape.release(weighted)
    if tape.mode.sharded:
        own, whole = wide, "outputs of the experts for all ranks' tokens"
        wide = op.run(
            tape, own, whole, COMBINE, shape=T * h_own, gradient="gradient of this rank's outputs",
            sends=(_of_all_ranks(own, h_own),),
        )  # fmt: skip
        tape.release(own)
    tape.release(unsorted, returned)
    made = op.cast(tape, wide, r, Site("output of the experts", COMBINE))
    tape.release(wide)
    return made


def _own_experts(tape: Tape, received: Value, computing: Computing) -> Value:
    """``grouped_mm_experts_forward`` of this rank's experts. It masks pairs without an expert, although there are none."""
    experts, order = _sorted_experts(tape)
    rows = tape.make(op.TENSOR, "row of each pair, int64", 8 * P_own, EXPERTS)
    selected = picked(
        tape, received, ("pairs sorted by expert, input of the experts", P_own * h_own), rows, EXPERTS, first=True
    )
    tape.drop(rows)
    ones = tape.make(op.TENSOR, "weights of one, sorted", e * P_own, EXPERTS)
    counted = tape.make(op.TEMPORARY, "sorted experts as 32-bit numbers, and counts", 4 * P_own + 4 * x, EXPERTS)
    ends = tape.make(op.TENSOR, "ends of the experts' groups", 4 * x, EXPERTS)
    beyond = tape.make(op.TENSOR, "which pairs are of no expert", P_own, EXPERTS)
    outputs, held = _products(tape, selected, _Sorting(experts, order, ends, beyond), computing, experts=x)
    made = _unsorted(tape, outputs, ones)
    tape.drop(experts, order, ones, counted, ends, beyond)
    tape.release(outputs, selected, *held)
    return made


def _zeroed(tape: Tape, value: Value, beyond: Store, name: str, *, in_place: bool = False) -> Value:
    """``masked_fill`` of the pairs without an expert. Autograd saves the mask. It releases ``value``."""
    made = (
        Value(value.store, value.dtype, value.shape)
        if in_place
        else op.tensor(tape, f"{name}, pairs of no expert set to zero", value.dtype, value.shape, EXPERTS)
    )
    backward = op.makes(f"gradient of the {name}, pairs of no expert set to zero", EXPERTS, value)
    tape.add(f"{name}: no expert's pairs", (made,), (beyond,), backward, of=(value,))
    if not in_place:
        tape.release(value)
    return made


def _unsorted(tape: Tape, outputs: Value, ones: Store) -> Value:
    """Multiply the outputs by one, put them back in the order of receipt, and sum over the single expert of each pair."""
    weighted = op.run(
        tape, outputs, "experts: outputs times one", EXPERTS, shape=P_own * h_own,
        saved=(ones,), gradient="gradient of the outputs, times one",
    )  # fmt: skip
    back, inverse = _back_in_order(tape, weighted, "experts: outputs in the order in which pairs came")
    made = op.run(tape, back, "output of this rank's experts", EXPERTS, shape=P_own * h_own)
    tape.release(back)
    tape.drop(inverse)
    return made

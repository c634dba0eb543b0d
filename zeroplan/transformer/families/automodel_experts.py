"""Experts of NeMo AutoModel's own models: DeepEP or HybridEP sends tokens to them, or every rank gathers all tokens.

DeepEP and HybridEP were read, not run. ``GroupedExperts`` was run on a CPU (tests/transformer/test_automodel_experts.py).
"""

from zeroplan.expr import Size, call
from zeroplan.ledger import Among
from zeroplan.numeric import ceil_div
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.experts import Computing, grouped_product, of_adapter, picked
from zeroplan.transformer.families.tape import Arriving, Exchange, P_own, Site, Store, T_own, Tape, Value, h_own
from zeroplan.transformer.symbols import E, T, T_g, X_r, e, m, r, t, x

AUTOMODEL = "NeMo AutoModel 36044ad3, components/moe/experts.py, GroupedExpertsDeepEP.forward"
SENT = "NeMo AutoModel 36044ad3, components/moe/megatron/token_dispatcher.py, MoEFlexTokenDispatcher.token_permutation2"
LORA = "NeMo AutoModel 36044ad3, components/_peft/lora_experts.py, GroupedExpertsLoRA._forward_grouped_mm"
GROUPED = "NeMo AutoModel 36044ad3, components/moe/experts.py, GroupedExperts.forward"


def own_experts(tape: Tape, normal: Value, weights: Value, computing: Computing, *, dispatched: bool) -> Value:
    """Run the experts that ``tape.mode.sends_by`` names. ``dispatched``: they are on several ranks.

    Those with adapters weight what comes between their products in every model.
    """
    sends_by = tape.mode.sends_by
    if tape.mode.stacked.grouped:
        computing = computing._replace(weighted_last=False)
    if sends_by in ("deepep", "hybridep"):
        return _sent_by_kernels(tape, normal, weights, computing, packs=sends_by == "hybridep")
    return _gathered(tape, normal, weights, computing, dispatched=dispatched)


# --- DeepEP and HybridEP ------------------------------------------------------------------------------------------------------


def _sent_by_kernels(tape: Tape, normal: Value, weights: Value, computing: Computing, *, packs: bool) -> Value:
    """``GroupedExpertsDeepEP.forward``, whose variables hold the experts' input and output until it returns.

    ``packs``: HybridEP, whose kernel also sorts the pairs by expert. DeepEP sends a token once to each rank that has one of its
    experts, at most once per pair, which is counted; tokens are then sorted in a step of its own. Leaves out DeepEP's handle, some
    numbers per token and rank. Experts are multiplied by torch, grouped_gemm or Transformer Engine, which save the same tensors.
    """
    indices = tape.make(op.TENSOR, "experts of the pairs, with masked ones, int64", 8 * T_own * t, AUTOMODEL)
    given, chosen, kept = (_packed if packs else _sorted_after)(tape, normal, weights)
    ends = tape.make(op.TENSOR, "ends of the experts' groups", 4 * x, AUTOMODEL)
    outputs, gated = _both_products(tape, given, chosen, ends, computing, experts=x)
    outputs = _weighted_after(tape, outputs, chosen) if computing.weighted_last else outputs
    made = _returned_by_kernels(tape, outputs, packs=packs)
    tape.release(gated, outputs, given, chosen)
    tape.drop(indices, ends, *kept)
    return made


def _weighted_after(tape: Tape, outputs: Value, chosen: Value) -> Value:
    """Multiply the second product's output by the weights in fp32, which saves both. It releases ``outputs``."""
    site = Site("experts: outputs, weighted", AUTOMODEL)
    wide = op.cast(tape, outputs, 4, Site("experts: outputs", AUTOMODEL))
    product = _times_weights(tape, wide, chosen, site)
    made = op.cast(tape, product, e, site)
    tape.release(wide, product, outputs)
    return made


def _times_weights(tape: Tape, wide: Value, chosen: Value, site: Site) -> Value:
    """Multiply fp32 outputs by the weights, which saves both."""
    return op.run(
        tape, (wide, chosen), "experts: outputs, weighted, fp32", site, saved=(wide, chosen),
        gradient="gradient of the outputs, or of the weights",
        beside=("gradient of the weights, not yet summed", 4 * P_own * h_own),
    )  # fmt: skip


def _packed(tape: Tape, normal: Value, weights: Value) -> tuple[Value, Value, tuple[Store, ...]]:
    """Return the sorted pairs, their weights in fp32, and what HybridEP's backward needs: a map of all experts."""
    maps = tape.make(op.TENSOR, "which experts a token has, and their weights", 5 * T_own * E, SENT)
    return *_pairs_that_came(tape, normal, weights, (maps,)), (maps,)


def _sorted_after(tape: Tape, normal: Value, weights: Value) -> tuple[Value, Value, tuple[Store, ...]]:
    """Return the same for DeepEP: it sends tokens with their experts, which Transformer Engine's ``permute`` then sorts."""
    came = op.run(
        tape, normal, "tokens that came for this rank's experts", SENT, dtype=e, shape=P_own * h_own,
        gradient="gradient of this rank's tokens",
    )  # fmt: skip
    maps = tape.make(op.TENSOR, "rows of the sorted pairs, and their experts", (8 * x + 4) * P_own + 5 * P_own * x, SENT)
    given, chosen = _pairs_that_came(tape, came, weights, (maps,))
    tape.release(came)
    return given, chosen, (maps,)


def _pairs_that_came(tape: Tape, value: Value, weights: Value, maps: tuple[Store, ...]) -> tuple[Value, Value]:
    given = op.tensor(tape, "pairs sorted by expert, input of the experts", e, P_own * h_own, SENT)
    chosen = op.tensor(tape, "weight of each pair, fp32", 4, P_own, SENT)
    backward = op.makes("gradient of the tokens, or of the routing weights", SENT, value, weights)
    tape.add("pairs sorted by expert", (given, chosen), maps, backward, of=(value, weights))
    return given, chosen


def _both_products(
    tape: Tape, given: Value, chosen: Value, ends: Store, computing: Computing, *, experts: Size
) -> tuple[Value, Value]:
    """Run both products and what is between them, weighted by ``chosen``, or by ones where the outputs are.

    Return the outputs and the second product's input, which some programs hold.
    """
    width, name = (m + m, "gate and up projections") if computing.gated else (m, "up projection")
    both = _product(tape, given, (f"experts: {name}", h_own, width), ends, experts=experts, beside=given)
    counts = tape.make(op.TENSOR, "pairs of the experts, int64", 8 * experts, AUTOMODEL)
    both = _with_bias(tape, both, counts, width, experts) if computing.biases else both
    factor = op.tensor(tape, "weights of one, fp32", 4, P_own, AUTOMODEL) if computing.weighted_last else chosen
    gated = op.run(
        tape, (both, factor), "experts: weighted activation, input of the down projection", AUTOMODEL,
        shape=P_own * m, saved=(both, factor), gradient="gradient of the experts' first product, or of the weights",
    )  # fmt: skip
    tape.release(both, *([factor] if computing.weighted_last else []))
    outputs = _product(tape, gated, ("experts: down projection", m, h_own), ends, experts=experts, beside=chosen)
    if computing.biases:
        outputs = _with_bias(tape, outputs, counts, h_own, experts, chosen=None if computing.weighted_last else chosen)
    tape.drop(counts)
    return outputs, gated


def _product(
    tape: Tape, value: Value, site: tuple[str, Size, Size], ends: Store, *, experts: Size, beside: Value
) -> Value:  # fmt: skip
    """Run a grouped product, with AutoModel's adapter if the experts have them."""
    if rank := tape.mode.stacked.grouped:
        return _with_adapter(tape, value, site, ends, experts=experts, rank=rank, beside=beside)
    return grouped_product(tape, value, site, ends, experts=experts)


def _with_adapter(
    tape: Tape, value: Value, site: tuple[str, Size, Size], ends: Store, *, experts: Size, rank: int, beside: Value
) -> Value:  # fmt: skip
    """Run a grouped product beside its adapter's two, and add the scaled result.

    Their matrices are padded to a rank that 16 bytes divide, in copies, which the products save. ``beside``: the value that
    lives as long as the module's forward, where a variable holds the adapter's output.
    """
    name, reads, width = site
    padded = rank + -rank % _ALIGNED
    size = e * experts * padded * (reads + width)
    copies = () if padded == rank else (tape.make(op.TENSOR, f"{name}: adapters, padded", size, LORA),)
    product = grouped_product(tape, value, site, ends, experts=experts)
    inner = of_adapter(tape, value, (f"{name}: A", reads, padded), (ends, *copies), LORA, pairs=P_own, experts=experts)
    outer = of_adapter(tape, inner, (f"{name}: B", padded, width), (ends, *copies), LORA, pairs=P_own, experts=experts)
    scaled = op.run(tape, outer, f"{name}: adapter's output, scaled", LORA, gradient="gradient of the adapter's output")
    made = op.run(tape, (product, scaled), f"{name}: sum with its adapter", LORA)
    tape.release(product, scaled, inner)
    tape.drop(*copies)
    beside.copy = outer.store
    return made


_ALIGNED = 8
"""Elements of 16 bits in 16 bytes."""


def _with_bias(tape: Tape, product: Value, counts: Store, width: Size, experts: Size, *, chosen: Value | None = None) -> Value:
    """Add each expert's bias, of which a row per pair is made; ``chosen``: times the pair's weight. It releases ``product``.

    Weighted rows are fp32, are saved, and make the sum fp32 too (components/moe/experts.py, _apply_bias).
    """
    rows, wide = e * P_own * width, 4 * P_own * width
    cast = tape.make(op.TEMPORARY, "biases in fp32", 4 * experts * width, AUTOMODEL)
    kept = rows if tape.mode.weights_frozen or chosen is None else wide
    bias = tape.make(op.TEMPORARY if chosen is None else op.TENSOR, "experts: bias for each pair", kept, AUTOMODEL)
    weighted = None if chosen is None else tape.make(op.TEMPORARY, "experts: weighted biases, fp32", wide, AUTOMODEL)
    total = None if chosen is None else tape.make(op.TEMPORARY, "experts: product and biases, fp32", wide, AUTOMODEL)
    made = op.tensor(tape, "experts: product and bias", e, P_own * width, AUTOMODEL)

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        if chosen is not None:
            tape.temporary("gradients of biases, weights and sum, fp32", 3 * wide, AUTOMODEL)
        if not tape.mode.weights_frozen:
            tape.weight_gradient(experts * width, waits=experts == x)
        if chosen is None:
            return [op.through(product, grad_outputs[0])]
        passed = [(product, op.gradient(tape, product, "gradient of the product", AUTOMODEL))] if tape.follows(product) else []
        return [*passed, (chosen, op.gradient(tape, chosen, "gradient of the weights", AUTOMODEL))]

    saved = (counts,) if chosen is None else (counts, bias, chosen)
    tape.add("experts: bias", (made,), saved, backward, of=tape.with_weight(product, *(() if chosen is None else (chosen,))))
    tape.drop(cast, bias, *(one for one in (weighted, total) if one is not None))
    tape.release(product)
    return made


def _returned_by_kernels(tape: Tape, outputs: Value, *, packs: bool) -> Value:
    """Send outputs back; the kernel sums over a token's experts. With DeepEP a step before it sums over those of one rank."""
    summed = outputs
    if not packs:
        reason = "outputs of this rank's experts, by token"
        summed = op.run(tape, outputs, reason, SENT, gradient="gradient of the sorted outputs")
    reason = "outputs that came back from the experts"
    made = op.run(tape, summed, reason, SENT, shape=T_own * h_own, gradient="gradient of this rank's outputs")
    tape.release(*(() if packs else (summed,)))
    return made


# --- GroupedExperts: every rank gathers the tokens of all ranks, and sums the outputs over them --------------------------------


def _gathered(tape: Tape, normal: Value, weights: Value, computing: Computing, *, dispatched: bool) -> Value:
    """``GroupedExperts.forward``, whose variables hold the tokens that it gathers, if dispatched, until it returns."""
    tokens = T_g if dispatched else T
    given, wide = normal, op.cast(tape, weights, 4, Site("routing weights", GROUPED))
    beside = tape.make(
        op.TENSOR, "experts of the tokens, int64, their mask, and numbers of ranks", tokens * (8 * t + 1) + 8 * E, GROUPED
    )
    if dispatched:
        own, given = wide, _of_all_ranks(tape, normal, h_own, "tokens of all ranks")
        wide = _of_all_ranks(tape, own, t, "routing weights of all ranks")
        tape.release(own)
    run = _looped if tape.mode.sends_by == "looped-experts" else _multiplied
    made = run(tape, given, wide, computing, experts=x if dispatched else E, tokens=tokens)
    made = _summed_over_ranks(tape, made, given) if dispatched else made
    total = (
        op.run(tape, made, "sum over a token's experts", GROUPED, dtype=4, shape=T * h_own) if computing.weighted_last else made
    )
    output = op.cast(tape, total, r, Site("output of the experts", GROUPED))
    tape.release(wide, made, *([given] if dispatched else []), *([total] if computing.weighted_last else []))
    tape.drop(beside)
    return output


def _of_all_ranks(tape: Tape, value: Value, width: Size, reason: str) -> Value:
    """All-gather pieces and join them. The backward sums over the ranks in place and copies this rank's part."""
    whole = value.dtype * T_g * width
    pieces = tape.make(op.TEMPORARY, f"{reason}, by rank", whole, GROUPED)
    made = op.run(
        tape, value, reason, GROUPED, shape=T_g * width, gradient=f"gradient of this rank's part: {reason}",
        sends=(Exchange("all_gather", Among.EXPERTS, whole),), sends_back=(Exchange("all_reduce", Among.EXPERTS, whole),),
    )  # fmt: skip
    tape.drop(pieces)
    return made


def _summed_over_ranks(tape: Tape, made: Value, given: Value) -> Value:
    """All-reduce a copy of the outputs, of which this rank's part is a view. It releases ``made``.

    Zero times the sum of the gathered tokens keeps their graph, so the backward fills a gradient of them early.
    """
    joined = Value(made.store, 4, made.shape)
    early = op.makes("gradient of zero times the gathered tokens", GROUPED, given)
    backward = op.in_turn(op.same_gradient(made), early)
    tape.add("zero times the gathered tokens", (joined,), (), backward, of=(made, given))
    sent = Exchange("all_reduce", Among.EXPERTS, 4 * made.shape)
    copied = op.run(
        tape, joined, "outputs of all ranks' experts", GROUPED,
        gradient="gradient of the outputs, summed over ranks", sends=(sent,), sends_back=(sent,),
    )  # fmt: skip
    tape.release(joined)
    part = Value(copied.store, 4, T * h_own * t if made.shape.has(t) else T * h_own)
    of_part = op.makes("gradient of all ranks' outputs, zero outside this rank's part", GROUPED, copied)
    tape.add("this rank's part", (part,), (), of_part, of=(copied,))
    return part


def _multiplied(tape: Tape, given: Value, weights: Value, computing: Computing, *, experts: Size, tokens: Size) -> Value:
    """``_forward_grouped_mm``. It returns fp32 sums over a token's experts, or what is to be summed."""
    rows, chosen, others = _sorted_by_expert(tape, weights, tokens)
    total = tape.make(op.TENSOR, "experts: sum of the outputs, fp32", 4 * _of_sum(tokens, computing), GROUPED)
    sorted_ = picked(tape, given, ("pairs sorted by expert, input of the experts", P_own * h_own), rows, GROUPED)
    ends = tape.make(op.TENSOR, "ends of the experts' groups", 4 * experts, GROUPED)
    counts = tape.make(
        op.TENSOR, "pairs of the experts and tokens of the ranks, int64, and ends", 12 * experts + 8 * E, GROUPED
    )
    outputs, gated = _both_products(tape, sorted_, chosen, ends, computing, experts=experts)
    tape.release(*([] if computing.biases else [gated]))
    site = Site("experts: outputs", GROUPED)
    wide = op.cast(tape, outputs, 4, site)
    if computing.weighted_last:
        product = _times_weights(tape, wide, chosen, site)
        tape.release(wide, outputs)
        wide = outputs = product
        tape.hold(wide.store)
    made = Value(total, 4, _of_sum(tokens, computing))
    copied = ("gradients of the sum, copied for a view that was changed", 8 * made.shape) if computing.weighted_last else None
    backward = op.makes("gradient of each pair's output, fp32", GROUPED, wide, beside=copied)
    tape.add("experts: outputs added", (made,), (others if computing.weighted_last else rows,), backward, of=(wide,))
    tape.release(wide, outputs, sorted_, chosen, *([gated] if computing.biases else []))
    tape.drop(rows, others, ends, counts)
    return made


def _of_sum(tokens: Size, computing: Computing) -> Size:
    return tokens * t * h_own if computing.weighted_last else tokens * h_own


def _sorted_by_expert(tape: Tape, weights: Value, tokens: Size) -> tuple[Store, Value, Store]:
    """``_permute_tokens_for_grouped_mm``. Return rows, weights and places of this rank's pairs, sorted by expert."""
    masked = tape.make(op.TEMPORARY, "experts of all pairs, masked, and the tokens of the pairs", 16 * tokens * t, GROUPED)
    which = tape.make(op.TENSOR, "which pairs are of this rank's experts", tokens * t, GROUPED)
    unsorted = tape.make(op.TEMPORARY, "experts, tokens and sorted experts of this rank's pairs", 24 * P_own, GROUPED)
    own = picked(tape, weights, ("weights of this rank's pairs", P_own), which, GROUPED)
    order = tape.make(op.TENSOR, "order of the sorted pairs, int64", 8 * P_own, GROUPED)
    rows = tape.make(op.TENSOR, "token of each pair, int64", 8 * P_own, GROUPED)
    chosen = picked(tape, own, ("weight of each pair, fp32, sorted by expert", P_own), order, GROUPED)
    places = tape.make(op.TENSOR, "place of each pair, int64", 8 * P_own, GROUPED)
    tape.release(own)
    tape.drop(masked, which, unsorted, order)
    return rows, chosen, places


def _pairs_of_one(tape: Tape, experts: Size) -> Size:
    pairs = X_r if tape.mode.uneven else T * t
    return call(f"ceil({pairs}/{experts})", lambda values: ceil_div(pairs.value(values), experts.value(values)))


def _looped(tape: Tape, given: Value, weights: Value, computing: Computing, *, experts: Size, tokens: Size) -> Value:
    """``_forward_loop``, as one operator: what all experts keep, and what one of them takes beside it.

    The backward of one expert makes a gradient as large as the weights of all experts. Autograd adds them up in place.
    """
    total = tape.make(op.TENSOR, "experts: sum of the outputs, fp32", 4 * _of_sum(tokens, computing), GROUPED)
    width, one, frozen = m + m if computing.gated else m, _pairs_of_one(tape, experts), tape.mode.weights_frozen
    rows = tape.make(op.TENSOR, "token and place of each pair, int64", 16 * P_own, GROUPED)
    chosen = op.tensor(tape, "weight of each pair, fp32", 4, P_own, GROUPED)
    both = op.tensor(tape, "experts: gate and up projections: output", e, P_own * width, GROUPED)
    inputs = () if frozen else (
        op.tensor(tape, "pairs by expert, input of the experts", e, P_own * h_own, GROUPED),
        op.tensor(tape, "experts: weighted activation, input of the down projection", e, P_own * m, GROUPED),
    )  # fmt: skip
    last = (op.tensor(tape, "experts: outputs, fp32", 4, P_own * h_own, GROUPED),) if computing.weighted_last else ()
    beside = tape.make(op.TEMPORARY, "one expert's outputs, in 16 bits and in fp32", one * (4 * h_own + e * h_own), GROUPED)
    made = Value(total, 4, _of_sum(tokens, computing))
    biases = width + h_own if computing.biases else 0

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.temporary("gradients of what one expert computes", one * (4 * h_own + e * (h_own + h_own + m + width)), GROUPED)
        if not frozen:
            tape.weight_gradient(experts * (h_own * width + m * h_own + biases), waits=experts == x)
            tape.temporary("gradients of one expert's weights", e * (h_own * width + m * h_own), GROUPED)
            tape.temporary("gradient of all experts' weights, filled by one expert", e * experts * h_own * width, GROUPED)
        if not tape.follows(given):
            return [(weights, op.gradient(tape, weights, "gradient of the routing weights", GROUPED))]
        tape.temporary("gradient of all tokens, filled by one expert", given.dtype * given.shape, GROUPED)
        reason = "gradient of the tokens, or of their weights"
        return [(value, op.gradient(tape, value, reason, GROUPED)) for value in (given, weights)]

    saved = (given, rows, chosen, both, *inputs, *last)
    tape.add("experts, one by one", (made,), saved, backward, of=tape.with_weight(given, weights))
    tape.release(chosen, both, *inputs, *last)
    tape.drop(beside, rows)
    return made

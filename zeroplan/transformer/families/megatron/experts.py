"""MLP and experts of a Megatron-Core layer: router, dispatch, the experts' matrices, and combination."""

from zeroplan.expr import NOTHING, Size
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.megatron.dispatchers import WAYS, times_weights
from zeroplan.transformer.families.megatron.matrices import Around, column, matrix, row, with_adapter
from zeroplan.transformer.families.megatron.sources import CORE
from zeroplan.transformer.families.megatron.structure import Routing
from zeroplan.transformer.families.megatron.symbols import E_g, T_m, T_n, X_f, X_g, X_i, X_l, X_r, f_s, g_m, m_r, w_p
from zeroplan.transformer.families.tape import Part, Site, Tape, Value
from zeroplan.transformer.symbols import E, e, h, t, z

MLP = f"{CORE}/transformer/mlp.py, MLP.forward"
ROUTER = f"{CORE}/transformer/moe/moe_utils.py, topk_routing_with_score_function"
GATING = f"{CORE}/transformer/moe/moe_utils.py, RouterGatingLinearFunction"
EXPERTS = f"{CORE}/transformer/moe/experts.py, TEGroupedMLP.forward"
SEQUENTIAL = f"{CORE}/transformer/moe/experts.py, SequentialMLP.forward"
SHARED = f"{CORE}/transformer/moe/shared_experts.py, SharedExpertMLP"
_SHARED = "shared expert"
#: The part that ends where the experts' backward is done.
ROUTING = "router"


def mlp(tape: Tape, normal: Value, width: Size, name: str) -> Value:
    """``MLP.forward``: a matrix, the activation in one operator, and a matrix."""
    return _closed(tape, _opened(tape, normal, width, name), width, name)


def _opened(tape: Tape, normal: Value, width: Size, name: str, *, keeps_gathered: bool = False) -> Value:
    """Run an MLP up to its activation. ``keeps_gathered``: see :func:`column`."""
    wide = column(tape, normal, g_m * width, f"{name}: the first matrix", layer="linear_fc1", keeps_gathered=keeps_gathered)
    wide.store.reason = f"{name}: output of the first matrix"
    active = op.run(
        tape, wide, f"{name}: input of the second matrix", Site(f"{name}: activation", MLP), shape=T_m * width,
        saved=(wide.store,), gradient=f"{name}: gradient of the first matrix's output",
    )  # fmt: skip
    tape.release(wide)
    return active


def _closed(tape: Tape, active: Value, width: Size, name: str) -> Value:
    """Run the rest of an MLP, and release ``active``."""
    made = row(tape, active, width, f"{name}: the second matrix", layer="linear_fc2")
    tape.release(active)
    return made


def experts(tape: Tape, normal: Value, routing: Routing) -> Value:
    """``MoELayer.forward``: shared expert, router, dispatch, experts and combination.

    An overlapped shared expert runs its first matrix beside the dispatch, and its second beside the combination.
    """
    again = Part("moe")
    with tape.within(again):
        made = _experts(tape, normal, routing)
    tape.end(again, made)
    return made


def _shared_expert(tape: Tape, normal: Value, routing: Routing) -> Value:
    again = Part("shared_experts")
    with tape.within(again):
        made = _gated(tape, normal, mlp(tape, normal, f_s, _SHARED), routing)
    tape.end(again, made)
    return made


def _experts(tape: Tape, normal: Value, routing: Routing) -> Value:
    shared = _shared_expert(tape, normal, routing) if routing.shared and not routing.overlapped else None
    weights = _routed(tape, normal, routing)
    there, back = WAYS[routing.dispatcher]
    begun = _opened(tape, normal, f_s, _SHARED, keeps_gathered=True) if routing.overlapped else None
    tokens, chosen, behind = there(tape, normal, weights)
    tape.release(weights)
    outputs = _grouped(tape, tokens, chosen, routing)
    tape.release(tokens)
    made = back(tape, outputs, chosen, routing)
    if begun is not None:
        shared = _gated(tape, normal, _closed(tape, begun, f_s, _SHARED), routing)
    tape.release(chosen)
    tape.drop(*behind)
    if shared is None:
        return made
    both = op.add(tape, made, shared, "experts: sum with the shared expert", Site("sum with the shared expert", SHARED))
    tape.release(made, shared)
    return both


def _gated(tape: Tape, normal: Value, shared: Value, routing: Routing) -> Value:
    """Multiply the shared expert's output by a number for each token, if it has such a gate; then release it."""
    if not routing.gated:
        return shared
    score = tape.make(op.TENSOR, "shared expert: gate of each token", e * T_n, SHARED)
    backward = op.in_turn(
        op.makes("shared expert: gradient of its output", SHARED, shared),
        op.needs(SHARED, ("shared expert: product of gradient and output", e * T_n * h)),
        op.makes("shared expert: gradient through its gate", SHARED, normal),
    )
    made = op.run(
        tape, shared, "shared expert: gated output", Site("shared expert: gate", SHARED),
        saved=(shared.store, score, normal.store), backward=backward, weights="trained",
    )  # fmt: skip
    tape.drop(score)
    tape.release(shared)
    return made


def _routed(tape: Tape, normal: Value, routing: Routing) -> Value:
    """Routing weights of all experts, zero for those not chosen. The all-to-all dispatcher keeps them and the map of choices."""
    logits = tape.make(op.TEMPORARY, "router: logits", w_p * T_n * E, GATING)
    scores = 4 * T_n * E + 8 * E + 4 if routing.balanced else NOTHING
    balance = tape.make(op.TENSOR, "router: scores of the auxiliary loss, fp32, and tokens of each expert", scores, ROUTER)
    rows = 8 * T_n if routing.deterministic else NOTHING
    chosen = tape.make(op.TENSOR, "router: choices and their scores", 12 * T_n * t + rows, ROUTER)
    sigmoids = tape.make(op.TENSOR, "router: sigmoids, fp32", 4 * T_n * E if routing.sigmoid else NOTHING, ROUTER)
    chart = tape.make(op.TENSOR, "router: map of choices", T_n * E, ROUTER)
    made = op.tensor(tape, "router: weights", w_p, T_n * E, ROUTER)
    tape.drop(logits)
    wide = 2 * w_p * T_n * h if routing.wide else NOTHING
    beside = "router: input and its gradient in the weights' dtype", wide
    backward = op.makes("gradient through the router", GATING, normal, beside=beside)
    named = (made.store, chart) if routing.dispatcher == "alltoall" else ()
    tape.add("router", (made,), (normal.store, balance, chosen, sigmoids, *named), backward, of=None)
    tape.end(Part(ROUTING))
    tape.drop(balance, chosen, sigmoids, chart)
    return made


def _grouped(tape: Tape, tokens: Value, chosen: Value, routing: Routing) -> Value:
    """Run the experts' MLPs: all at once, or one after the other.

    The experts between the second and the last are one MLP here. Its backward frees all that they keep before it makes gradients.
    In Megatron-Core each expert frees its own tensors and makes its own gradients, so that memory peaks at the first or the last
    of them. When the first expert's backward runs, the gradients of the other experts' outputs are gone.
    """
    if routing.grouped:
        return _visited(tape, tokens, chosen, X_r, routing)
    each, outputs = (X_f, X_g, X_i, X_l), list[Value]()
    parts = op.chunk(tape, tokens, tuple([pairs * h for pairs in each]), Site("tokens of each expert", SEQUENTIAL))
    weights = op.chunk(tape, chosen, each, Site("routing weights of each expert", SEQUENTIAL))
    for pairs, part, weight in zip(each, parts, weights, strict=True):
        began = len(tape.operators)
        outputs.append(_visited(tape, part, weight, pairs, routing))
        if pairs == X_i:
            _freed_first(tape, began, (part, weight), outputs[-1])
    joined = op.joined(tape, tuple(outputs), "experts: outputs, joined", X_r * h, Site("experts: outputs", SEQUENTIAL))
    tape.release(*outputs, *parts, *weights)
    return joined


def _freed_first(tape: Tape, began: int, given: tuple[Value, ...], made: Value) -> None:
    """Replace the operators added since ``began``. The new backward frees all that they saved, then makes ``given``'s gradients."""
    inner = tape.operators[began:]
    del tape.operators[began:]
    between = op.tensor(tape, "experts between", e, NOTHING, SEQUENTIAL)
    tape.add("experts between", (between,), (), op.makes("gradient of their inputs", SEQUENTIAL, *given), of=given)
    saved = tuple([store for one in inner for store in one.saved])
    tape.add("what they keep", (made,), saved, op.makes("freed", SEQUENTIAL, between), of=(between,))
    tape.drop(*saved)
    tape.release(between)


def _visited(tape: Tape, tokens: Value, chosen: Value, pairs: Size, routing: Routing) -> Value:
    """Experts' MLPs over ``pairs`` pairs. The routing weights multiply between the two matrices, or later."""
    source = EXPERTS if routing.grouped else SEQUENTIAL
    wide = _matrix(tape, tokens, ("experts: the first matrix", "linear_fc1"), source, pairs, (h, g_m * m_r))
    wide.store.reason = "experts: output of the first matrix"
    make = _active if routing.late else _weighted_at_once if routing.fused else _weighted
    again = Part("moe_act")
    with tape.within(again):
        active = make(tape, wide, chosen, pairs * m_r, routing, source)
    active.store.reason = "experts: input of the second matrix"
    tape.release(wide)
    made = _matrix(tape, active, ("experts: the second matrix", "linear_fc2"), source, pairs, (m_r, h))
    tape.end(again)
    tape.release(active)
    return made


def _matrix(tape: Tape, value: Value, named: tuple[str, str], source: str, pairs: Size, sides: tuple[Size, Size]) -> Value:
    """Multiply by matrices of experts, and by those of their adapters. ``named``: in words, and by Megatron-Core."""
    (name, layer), (reads, width) = named, sides
    made = matrix(tape, value, name, source, shape=pairs * width, weight=E_g * reads * width)
    first, second = (pairs * z, E_g * reads * z, Around()), (pairs * width, E_g * z * width, Around())
    return with_adapter(tape, value, made, name, layer, first, second)


def _weighted_at_once(tape: Tape, wide: Value, chosen: Value, shape: Size, _routing: Routing, source: str) -> Value:
    return op.run(
        tape, (wide, chosen), "experts: gated, times routing weights", Site("experts: activation", source), shape=shape,
        saved=(wide.store, chosen.store), gradient="experts: gradient of the first matrix's output, or of the weights",
    )  # fmt: skip


def _active(tape: Tape, wide: Value, _chosen: Value, shape: Size, _routing: Routing, source: str) -> Value:
    return op.run(
        tape, wide, "experts: output of the activation", Site("experts: activation", source), shape=shape, saved=(wide.store,),
        gradient="experts: gradient of the first matrix's output",
    )  # fmt: skip


def _weighted(tape: Tape, wide: Value, chosen: Value, shape: Size, routing: Routing, source: str) -> Value:
    active = _active(tape, wide, chosen, shape, routing, source)
    made = times_weights(tape, active, chosen, routing, source)
    tape.release(active)
    return made

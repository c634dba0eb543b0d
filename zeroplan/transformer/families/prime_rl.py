"""Routed experts in prime-rl's own models (Qwen3-MoE, GLM-4.5), with all experts on each rank.

A pair is a token and one of its experts. ``torch._grouped_mm`` multiplies pairs sorted by expert: in full training padded to
multiples of eight per expert, in a copy; beside frozen weights without padding, with one adapter of all experts, that of the run
whose tokens are in the batch. Not modelled: GPUs before Hopper, which run one expert after the other, as adapters did before 30
January 2026 on other GPUs than Hopper's. Run as modules of our own with the same behaviour (tests/transformer/prime_rl_experts.py).
"""

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Block
from zeroplan.transformer.families.experts import Routing, divided_by_sum, of_adapter, picked
from zeroplan.transformer.families.tape import Beside, Site, Store, Tape, Value
from zeroplan.transformer.symbols import E, T, e, h, m, n, t, z

MOE = "prime-rl 969df59e, trainer/models/layers/moe.py, MoE.forward"
ROUTER = "prime-rl 969df59e, trainer/models/layers/moe.py, TokenChoiceTopKRouter.forward"
GROUPED = "prime-rl 969df59e, trainer/models/layers/moe.py, _run_experts_grouped_mm"
PADDED = "torchtitan a1fdd7e, distributed/expert_parallel.py, expert_parallel"
LORA = "prime-rl 969df59e, trainer/models/layers/lora/multi_moe.py, MultiLoRAGroupedExperts.forward"
_PAIRS = T * t
_ALIGNED = 8
"""Pairs of an expert are padded to a multiple of it."""


def moe(tape: Tape, normal: Value, block: Block) -> Value:
    """Run router, experts and shared experts. Its variables hold what sorts the pairs until it returns."""
    with tape.owning(leaf=True), tape.inside(Module.EXPERTS):
        flat = op.view(tape, normal, Site("experts: their input", MOE))
        routing = _router(tape, flat, block)
        counts = tape.make(op.TENSOR, "pairs of each expert, int64", 8 * E, MOE)
        chosen, rows = _sorted(tape, routing)
        given = _pairs(tape, flat, rows)
        run = _with_adapters if tape.mode.stacked.runs else _trained
        outputs = _weighted(tape, run(tape, given), chosen)
        own = _shared(tape, flat) if block.shares else _zeros(tape, flat)
        made = _added(tape, own, outputs, rows)
        tape.release(own, outputs, given, chosen, routing.weights, flat)
        tape.drop(rows, counts, routing.indices)
    return made


def _router(tape: Tape, flat: Value, block: Block) -> Routing:
    """Score all experts in fp32: by sigmoids, to which GLM adds a bias for the choice, or a softmax."""
    by_sigmoid = block.family == "glm4_moe"
    logits = op.linear(tape, flat, E, Site("router", ROUTER))
    wide = op.cast(tape, logits, 4, Site("router: logits", ROUTER))
    scores = op.pointwise(tape, wide, "router: scores of all experts", ROUTER, saves_result=True)
    tape.release(wide, logits)
    biased = [tape.make(op.TEMPORARY, "router: scores and bias, fp32", 4 * T * E, ROUTER)] if by_sigmoid else []
    best = [tape.make(op.TEMPORARY, "router: the best of them", 4 * _PAIRS, ROUTER)] if by_sigmoid else []
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * _PAIRS, ROUTER)
    tape.drop(*biased)
    chosen = picked(tape, scores, ("router: top-k weights", _PAIRS), indices, ROUTER)
    shares = divided_by_sum(tape, chosen, 4, ROUTER)
    weights = op.scaled(tape, shares, "router: weights, scaled", ROUTER)
    tape.drop(*best)
    tape.release(scores)
    return Routing(logits, weights, indices)


def _sorted(tape: Tape, routing: Routing) -> tuple[Value, Store]:
    """Sort the pairs by expert. Return the weight of each pair, and its token."""
    source = "prime-rl 969df59e, trainer/models/layers/moe.py, TokenReorderer.forward"
    experts = tape.make(op.TEMPORARY, "experts of the pairs, sorted, int64", 8 * _PAIRS, source)
    order = tape.make(op.TENSOR, "order of the sorted pairs, int64", 8 * _PAIRS, source)
    tape.drop(experts)
    chosen = picked(tape, routing.weights, ("weight of each pair, fp32, sorted by expert", _PAIRS), order, source)
    rows = tape.make(op.TENSOR, "token of each pair, int64", 8 * _PAIRS, source)
    tape.drop(order)
    return chosen, rows


def _pairs(tape: Tape, flat: Value, rows: Store) -> Value:
    """Gather the tokens of the pairs, which saves all tokens, too."""
    reason, of = "pairs sorted by expert, input of the experts", "gradient of the experts' input"
    return op.run(tape, flat, reason, MOE, dtype=e, shape=_PAIRS * h, saved=(flat, rows), gradient=of)


def _weighted(tape: Tape, outputs: Value, weights: Value) -> Value:
    """Multiply the outputs by the weights in fp32, which saves both. It releases ``outputs``."""
    site = Site("experts: outputs", MOE)
    wide = op.cast(tape, outputs, 4, site)
    product = op.times_per_row(tape, wide, weights, "experts: weighted outputs, fp32", 4, MOE)
    tape.release(wide)
    made = op.cast(tape, product, e, site._replace(name="experts: weighted outputs"))
    tape.release(product, outputs)
    return made


def _shared(tape: Tape, flat: Value) -> Value:
    """Run the shared experts, whose weights are no linear layers."""
    name = "shared experts"
    gates = op.linear(tape, flat, n * m, Site(f"{name}: gate", MOE))
    active = op.pointwise(tape, gates, f"{name}: silu of the gate", MOE)
    tape.release(gates)
    ups = op.linear(tape, flat, n * m, Site(f"{name}: up", MOE))
    gated = op.product(tape, active, ups, f"{name}: gated product", MOE)
    tape.release(active, ups)
    made = op.linear(tape, gated, h, Site(f"{name}: down", MOE), reads=n * m)
    tape.release(gated)
    return made


def _zeros(tape: Tape, flat: Value) -> Value:
    made = op.tensor(tape, "zeros for the sum of the outputs", e, flat.shape, MOE)
    tape.untracked.add(made)
    return made


def _added(tape: Tape, own: Value, outputs: Value, rows: Store) -> Value:
    """Add each pair's output to its token, in a copy of ``own``."""
    backward = op.in_turn(op.same_gradient(own), op.makes("gradient of the weighted outputs", MOE, outputs))
    return op.run(tape, (own, outputs), "output of all experts", MOE, dtype=e, saved=(rows,), backward=backward)


# --- full training -----------------------------------------------------------------------------------------------------------


def _trained(tape: Tape, given: Value) -> Value:
    """Run the experts on pairs padded for each expert, and put their outputs back."""
    rows = _PAIRS + _ALIGNED * E
    joined = op.run(tape, given, "pairs and a row of zeros", PADDED, shape=_PAIRS * h + h)
    places = tape.make(op.TENSOR, "place of each padded pair, int32", 4 * rows, PADDED)
    padded = picked(tape, joined, ("pairs, padded for each expert", rows * h), places, PADDED)
    tape.release(joined)
    outputs = _products(tape, padded, rows)
    tape.release(padded)
    of = "gradient of the experts' padded outputs"
    written = op.run(tape, outputs, "outputs of the pairs", PADDED, shape=_PAIRS * h + h, saved=(places,), gradient=of)
    made = Value(tape.hold(written.store), e, _PAIRS * h)
    backward = op.makes("gradient of the outputs, and a row of zeros", PADDED, written)
    tape.add("outputs without the last row", (made,), (), backward, of=(written,))
    tape.release(outputs, written)
    tape.drop(places)
    return made


def _products(tape: Tape, given: Value, rows: Size) -> Value:
    ends = tape.make(op.TENSOR, "ends of the experts' groups", 4 * E, GROUPED)
    gates = _grouped(tape, given, ("experts: gate", h, m), rows, ends)
    active = op.pointwise(tape, gates, "experts: silu of the gate", GROUPED)
    tape.release(gates)
    ups = _grouped(tape, given, ("experts: up", h, m), rows, ends)
    gated = op.product(tape, active, ups, "experts: gated product", GROUPED)
    tape.release(ups, active)
    made = _grouped(tape, gated, ("experts: down", m, h), rows, ends)
    tape.release(gated)
    tape.drop(ends)
    return made


def _grouped(tape: Tape, value: Value, site: tuple[str, Size, Size], rows: Size, ends: Store) -> Value:
    """Multiply sorted pairs by the weights of their experts, trained or frozen."""
    name, reads, width = site
    weights = Beside(f"weights of {name}", e * E * reads * width, strided=True)
    return op.run(
        tape, value, f"{name}: output", GROUPED, dtype=e, shape=rows * width, weights="own", reads=(weights,),
        saved=(ends,) if tape.mode.weights_frozen else (value, ends),
        backward=op.in_turn(op.trains(E * reads * width), op.makes(f"gradient of the input of {name}", GROUPED, value)),
    )  # fmt: skip


# --- adapters of several runs, of which a batch uses one ----------------------------------------------------------------------


def _with_adapters(tape: Tape, given: Value) -> Value:
    """Run frozen experts and their adapter. Variables hold all products but the adapter's inner ones until it returns."""
    ends = tape.make(op.TENSOR, "ends of the experts' groups", 4 * E, LORA)
    gates, of_gates = _beside_adapter(tape, given, ("experts: gate", h, m), ends)
    ups, of_ups = _beside_adapter(tape, given, ("experts: up", h, m), ends)
    active = op.pointwise(tape, gates, "experts: silu of the gate", LORA)
    gated = op.product(tape, active, ups, "experts: gated product", LORA)
    tape.release(active)
    made, of_outputs = _beside_adapter(tape, gated, ("experts: down", m, h), ends)
    tape.release(gates, ups, gated, *of_gates, *of_ups, *of_outputs)
    tape.drop(ends)
    return made


def _beside_adapter(
    tape: Tape, value: Value, site: tuple[str, Size, Size], ends: Store
) -> tuple[Value, tuple[Value, Value]]:  # fmt: skip
    """Add the scaled output of an adapter. Return the sum, and what variables hold: both products."""
    name, reads, width = site
    product = _grouped(tape, value, site, _PAIRS, ends)
    inner = of_adapter(tape, value, (f"{name}: A", reads, z), (ends,), LORA, pairs=_PAIRS, experts=E)
    outer = of_adapter(tape, inner, (f"{name}: B", z, width), (ends,), LORA, pairs=_PAIRS, experts=E)
    tape.release(inner)
    scaled = op.multiplied(tape, outer, f"{name}: adapter's output, scaled", LORA)
    made = op.run(tape, (product, scaled), f"{name}: sum with its adapter", LORA)
    tape.release(scaled)
    return made, (product, outer)

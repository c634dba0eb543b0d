"""Mixtral's experts before transformers 5: a loop over experts, each three linear layers that run the tokens routed to it.

They are frozen; adapters are in the attention. Assumes that every expert gets the same number of tokens: the saved tensors have
the same size for all routings, but one expert's temporaries depend on the routing.
"""

from zeroplan.expr import Size, Values, call
from zeroplan.ledger import Role, Tag
from zeroplan.numeric import Int, ceil_div
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Training
from zeroplan.transformer.families.experts import divided_by_their_sum, picked
from zeroplan.transformer.families.frozen import packed_linear
from zeroplan.transformer.families.operators import TEMPORARY, TENSOR
from zeroplan.transformer.families.tape import Site, Store, Tape, Value
from zeroplan.transformer.symbols import E, T, e, h, m, t

MIXTRAL = "transformers 4.48.1, models/mixtral/modeling_mixtral.py, MixtralSparseMoeBlock.forward"


def _share(values: Values) -> Int:
    return ceil_div(values["T"] * values["t"], values["E"])


#: Tokens of one expert.
N = call("ceil(T·t/E)", _share)


def looped_experts(tape: Tape, normal: Value, training: Training, experts: int) -> Value:
    """Run router and experts. Variables hold the router's tensors and the mask of all experts until the module returns."""
    flat = op.view(tape, normal, Site("router: its input", MIXTRAL))
    logits = _router(tape, flat, training)
    weights, indices = _weights(tape, logits, flat)
    total = op.tensor(tape, "output of the experts, so far", flat.dtype, T * h, MIXTRAL)
    mask = tape.make(TEMPORARY, "experts of each token, one-hot, int64", 8 * T * t * E, MIXTRAL)
    held: tuple[Value, ...] = ()
    for expert in range(experts):
        total, held = _expert(tape, flat, weights, total, held, training, expert)
    tape.release(*held, weights, logits, flat)
    tape.drop(mask, indices)
    return total


def _router(tape: Tape, flat: Value, training: Training) -> Value:
    """Run the router's layer, which GPTQ leaves in 16 bits."""
    site, of = Site("router", MIXTRAL, layer="gate"), "gradient through the router"
    if training.quantize != "gptq":
        return op.linear(tape, flat, E, site)
    return op.run(tape, flat, "output of the router", site, dtype=e, shape=T * E, gradient=of, saves_weight=True)


def _weights(tape: Tape, logits: Value, flat: Value) -> tuple[Value, Store]:
    """Return the routing weights in the dtype of the hidden states, and the experts of each token."""
    scores = op.run(tape, logits, "router: scores of all experts", MIXTRAL, dtype=4, gradient="gradient of the logits")
    indices = tape.make(TENSOR, "router: top-k indices, int64", 8 * T * t, MIXTRAL)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, MIXTRAL)
    tape.release(scores)
    wide = divided_by_their_sum(tape, chosen, 4, MIXTRAL)
    narrow = op.cast(tape, wide, flat.dtype, Site("router: weights", MIXTRAL))
    tape.release(wide)
    return narrow, indices


def _expert(
    tape: Tape, flat: Value, weights: Value, total: Value, held: tuple[Value, ...], training: Training, expert: int
) -> tuple[Value, tuple[Value, ...]]:
    """Run one expert and add its output to the total. Return the total, and the tensors that variables hold meanwhile."""
    name = f"expert {expert}"
    rows = tape.make(TENSOR, f"{name}: its tokens, int64", 16 * N, MIXTRAL)
    given = picked(tape, flat, (f"{name}: its tokens' hidden states", N * h), rows, MIXTRAL)
    tape.release(*held[:1])
    gate = _layer(tape, given, m, h, f"w1 of {name}", training)
    active = op.pointwise(tape, gate, f"{name}: silu of w1", MIXTRAL)
    tape.release(gate)
    up = _layer(tape, given, m, h, f"w3 of {name}", training)
    inner = op.product(tape, active, up, f"{name}: gated product", MIXTRAL)
    tape.release(active, up)
    made = _layer(tape, inner, h, m, f"w2 of {name}", training)
    tape.release(inner)
    own = picked(tape, weights, (f"{name}: weights of its tokens", N), rows, MIXTRAL)
    weighted = op.times_per_row(tape, made, own, f"{name}: weighted output", made.dtype, MIXTRAL)
    tape.release(made, own, *held[1:])
    after = Value(tape.hold(total.store), total.dtype, total.shape)
    of_output = op.makes(f"{name}: gradient of its output", MIXTRAL, weighted)
    backward = op.in_turn(op.same_gradient(total), of_output)
    tape.add(f"{name}: sum", (after,), (rows,), backward, of=(total, weighted))
    tape.release(total)
    tape.drop(rows)
    return after, (given, weighted)


def _layer(tape: Tape, value: Value, width: Size, reads: Size, name: str, training: Training) -> Value:
    """Run a frozen linear layer over one expert's tokens."""
    site, of, tape.rows = Site(name, MIXTRAL), f"gradient through the {name}", N
    if training.quantize != "none":
        made = packed_linear(tape, value, site, training, width=width, reads=reads)
    else:
        made = op.run(
            tape, value, f"output of the {name}", site, dtype=e, shape=N * width, gradient=of, saves_weight=True,
            tag=Tag(Role.OUTPUT),
        )  # fmt: skip
    tape.rows = T
    return made

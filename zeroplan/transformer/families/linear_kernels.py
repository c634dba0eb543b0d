"""The kernels with which linear attention usually runs: causal-conv1d's convolution, and fla's gated delta rule.

One operator runs the whole recurrence. It keeps its inputs, and makes again in its backward what it made from them. Both packages
allocate in Python, and their kernels allocate nothing: read, and run with kernels that do nothing, not on a GPU.
"""

from zeroplan.expr import NOTHING, Size, ceil
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Block
from zeroplan.transformer.families.delta_rule import CHUNKS, Given
from zeroplan.transformer.families.tape import Arriving, Backward, Site, Store, Tape, Value
from zeroplan.transformer.families.widths import CHUNK
from zeroplan.transformer.symbols import A, D, I, J, T, b, e, r

CONVOLUTION = "causal-conv1d 1.7, causal_conv1d_interface.py, CausalConv1dFn"
RULE = "fla 0.6, ops/gated_delta_rule/chunk.py, ChunkGatedDeltaRuleFunction"
FORWARD = "fla 0.6, ops/gated_delta_rule/chunk.py, chunk_gated_delta_rule_fwd"
BACKWARD = "fla 0.6, ops/gated_delta_rule/chunk.py, chunk_gated_delta_rule_bwd"

#: Elements of queries or keys, of them repeated for each head of values, of values, of the states before all chunks, and of a
#: number for each token and head.
FEW_KEYS, KEYS, VALUES, STATES, HEADS = T * J * D, T * A * D, T * A * I, b * CHUNKS * A * D * I, T * A
#: Tiles of a key's channels, each with its own gradient of the decay: of 128 channels on data-centre GPUs since the A100. A GPU
#: with less shared memory has up to four times as many, of four bytes per token and head.
TILES = ceil(D, 128)


def convolution(
    tape: Tape, value: Value, width: Size, taps: Size, site: Site, *, bias: bool = False, in_order: bool = True
) -> Value:  # fmt: skip
    """Run a depthwise convolution of ``width`` channels over ``taps`` tokens, and SiLU, as one operator that keeps its input.

    Its backward makes gradients of its weights in fp32, even of frozen weights, and casts them. ``in_order``: the gradient comes
    in the memory order of the input; else the operator copies it (csrc/causal_conv1d.cpp, causal_conv1d_bwd).
    """
    made = op.tensor(tape, f"output of the {site.name}", value.dtype, value.shape, CONVOLUTION)
    elements = (width * taps, width) if bias else (width * taps,)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        passed = op.gradient(tape, value, f"gradient through the {site.name}", CONVOLUTION)
        order = f"gradient of the {site.name}, in order", NOTHING if in_order else made.dtype * made.shape
        of_its_weights(tape, elements, order)
        return [(value, passed)]

    tape.add(site.name, (made,), (value,), backward, of=tape.with_weight(value), place=site.place, saves_weight=True)
    return made


def of_its_weights(tape: Tape, elements: tuple[Size, ...], beside: tuple[str, Size]) -> None:
    """Make the gradients of a convolution's weights: all in fp32, ``beside`` a temporary, then each in its weight's dtype."""
    trained, cast = not tape.mode.weights_frozen, not tape.is_wide(r)
    wide = list[Store]()
    for size in elements:
        if trained and not cast:
            tape.weight_gradient(size)
        else:
            wide.append(tape.make(op.TEMPORARY, "gradient of a convolution's weights, in fp32", 4 * size, CONVOLUTION))
    tape.drop(tape.make(op.TEMPORARY, beside[0], beside[1], CONVOLUTION))
    for one, size in zip(wide, elements, strict=False):
        if not cast:
            tape.scratch.append(one)
            continue
        if trained:
            tape.weight_gradient(size)
        else:
            tape.temporary("gradient of a convolution's frozen weights", e * size, CONVOLUTION)
        tape.drop(one)


def gated_delta_rule(tape: Tape, given: Given, block: Block) -> Value:
    """Run ``chunk_gated_delta_rule``. It normalises and keeps queries and keys, and keeps a copy of the values."""
    copies = [
        tape.make(op.TENSOR, f"{name} in order", one.dtype * one.shape, RULE)
        for one, name in zip(given[:3], ("queries", "keys", "values"), strict=True)
    ]
    kept = [*of_unit_length(tape), copies[2], given.beta.store, *_solved(tape)]
    made = _read_out(tape)
    tape.add("linear attention", (made,), tuple(kept), _backward(given, block), of=tuple(given))
    tape.drop(*(one for one in kept if one is not given.beta.store), *copies[:2])
    return made


def of_unit_length(tape: Tape) -> list[Store]:
    """Return queries and keys of unit length, each with a number for each row."""
    made = list[Store]()
    for name in ("queries", "keys"):
        made.append(tape.make(op.TENSOR, f"{name} of unit length", e * FEW_KEYS, RULE))
        made.append(tape.make(op.TENSOR, f"reciprocal length of the {name}", 4 * T * J, RULE))
    return made


def _solved(tape: Tape) -> list[Store]:
    """Return the decay summed up within chunks, and the triangular system of each chunk, solved."""
    return [
        tape.make(op.TENSOR, "decay, summed up within chunks", 4 * HEADS, FORWARD),
        tape.make(op.TENSOR, "triangular system of each chunk, solved", e * HEADS * CHUNK, FORWARD),
    ]


def _read_out(tape: Tape) -> Value:
    """Return the output, made from tensors that end with the function."""
    brief = [tape.make(op.TEMPORARY, reason, e * size, FORWARD) for reason, size in _SCANNED]
    made = op.tensor(tape, "output of linear attention", e, VALUES, FORWARD)
    tape.drop(*brief)
    return made


#: What the forward makes from its inputs, and the backward again.
_SCANNED = (
    ("keys that read the state", KEYS),
    ("new values, without the state", VALUES),
    ("states before chunks", STATES),
    ("new values", VALUES),
)


def _backward(given: Given, block: Block) -> Backward:
    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        held = [tape.make(op.TEMPORARY, reason, e * size, BACKWARD) for reason, size in _SCANNED]
        learnt = _gradient_of_new_values(tape, held)
        query, key, summed = _gradients_of_products(tape, held, block)
        value, beta, terms = _gradients_of_the_system(tape, held, learnt, block)
        decay = _gradient(tape, "gradient of the decay", 4 * HEADS)
        tape.drop(*held, summed, terms)
        query, key = (through_length(tape, one, name) for one, name in ((query, "queries"), (key, "keys")))
        return list(zip(given, (query, key, value, beta, decay), strict=True))

    return backward


def _gradient(tape: Tape, reason: str, size: Size) -> Store:
    return tape.make(op.GRADIENT, reason, size, BACKWARD)


def _gradient_of_new_values(tape: Tape, held: list[Store]) -> Store:
    """Return the gradient of the new values; add that of the states to ``held``."""
    local = _gradient(tape, "gradient of the new values within chunks", e * VALUES)
    held.append(_gradient(tape, "gradient of the states", e * STATES))
    made = _gradient(tape, "gradient of the new values", e * VALUES)
    tape.drop(local)
    return made


def _gradients_of_products(tape: Tape, held: list[Store], block: Block) -> tuple[Store, Store, Store]:
    """Return gradients of queries, keys and summed decay; add that of the keys that read the state to ``held``."""
    query, key = (_gradient(tape, f"gradient of the {name}, for each head", e * KEYS) for name in ("queries", "keys"))
    tiles = _gradient(tape, "gradient of the summed decay, from each tile", 4 * HEADS * TILES)
    held.append(_gradient(tape, "gradient of the keys that read the state", e * KEYS))
    query, key = (_of_each_key(tape, one, name, block) for one, name in ((query, "queries"), (key, "keys")))
    summed = _gradient(tape, "gradient of the summed decay", 4 * HEADS)
    tape.drop(tiles)
    return query, key, summed


def _of_each_key(tape: Tape, per_head: Store, name: str, block: Block) -> Store:
    """Return a gradient summed over the heads of values that share a key, which replaces ``per_head``."""
    if not block.grouped:
        return per_head
    made = _gradient(tape, f"gradient of the {name}", e * FEW_KEYS)
    tape.drop(per_head)
    return made


def _gradients_of_the_system(
    tape: Tape, held: list[Store], learnt: Store, block: Block
) -> tuple[Store, Store, Store]:  # fmt: skip
    """Return gradients of values, beta and the summed decay, from that of the new values; it releases ``learnt``."""
    key = _gradient(tape, "gradient of the keys through the system, for each head", e * KEYS)
    value, terms = (
        _gradient(tape, "gradient of the values", e * VALUES),
        _gradient(tape, "gradient of the summed decay", 4 * HEADS),
    )
    beta = _gradient(tape, "gradient of beta", e * HEADS)
    held.append(_of_each_key(tape, key, "keys through the system", block))
    tape.drop(learnt)
    return value, beta, terms


def through_length(tape: Tape, passed: Store, name: str) -> Store:
    """Return the gradient of rows from that of rows of unit length, which it releases."""
    made = _gradient(tape, f"gradient of the {name} before their length", e * FEW_KEYS)
    tape.drop(passed)
    return made

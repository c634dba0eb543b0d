"""Kimi Delta Attention as fla's kernels run it, in one operator that keeps its inputs.

The package allocates in Python, and its kernels allocate nothing: read, and run with kernels that do nothing, not on a GPU.
"""

from zeroplan.expr import Size, ceil
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.delta_rule import Given
from zeroplan.transformer.families.linear_kernels import HEADS, KEYS, STATES, of_unit_length, through_length
from zeroplan.transformer.families.tape import Arriving, Backward, Store, Tape, Value
from zeroplan.transformer.families.widths import CHUNK
from zeroplan.transformer.symbols import D, e

RULE = "fla 0.6, ops/kda/chunk.py, ChunkKDAFunction"
FORWARD = "fla 0.6, ops/kda/chunk_fwd.py, chunk_kda_fwd"
BACKWARD = "fla 0.6, ops/kda/chunk_bwd.py, chunk_kda_bwd"

#: Bytes of rows of all heads in fp32 and in the compute dtype, and of a row of a chunk's pairs of tokens in both.
_WIDE, _ROWS, _WIDE_PAIRS, _PAIRS = 4 * KEYS, e * KEYS, 4 * HEADS * CHUNK, e * HEADS * CHUNK
#: Tokens of a part of a chunk, whose pairs are in fp32; tiles of a head's channels, each with its own gradient of beta.
_PART, _TILES = 16, ceil(D, 32)


def kimi_delta_rule(tape: Tape, given: Given) -> Value:
    """Run ``chunk_kda``. It keeps queries and keys of unit length, copies of the values, and the decay twice, in fp32."""
    copies = [tape.make(op.TENSOR, f"{name} in order", _ROWS, RULE) for name in ("queries", "keys", "values")]
    units = of_unit_length(tape)
    summed = tape.make(op.TENSOR, "decay, summed up within chunks", _WIDE, FORWARD)
    pairs = [
        tape.make(op.TENSOR, reason, _PAIRS, FORWARD) for reason in ("attention within chunks", "triangular system, solved")
    ]
    part = tape.make(op.TEMPORARY, "triangular system within parts of a chunk", 4 * HEADS * _PART, FORWARD)
    first = [_brief(tape, reason, size, FORWARD) for reason, size in _OF_SYSTEM]
    tape.drop(part)
    rest = [_brief(tape, reason, size, FORWARD) for reason, size in _OF_STATES]
    made = op.tensor(tape, "output of linear attention", e, KEYS, FORWARD)
    tape.drop(*first, *rest)
    kept = (*units, copies[2], summed, given.decay.store, given.beta.store, *pairs)
    tape.add("linear attention", (made,), kept, _backward(given), of=tuple(given))
    tape.drop(*copies, *units, summed, *pairs)
    return made


#: What the forward makes from its inputs, and the backward again.
_OF_SYSTEM = (("keys that read the state", _ROWS), ("new values, without the state", _ROWS), ("keys, decayed", _ROWS))
_OF_STATES = (("states before chunks", e * STATES), ("new values", _ROWS))


def _brief(tape: Tape, reason: str, size: Size, source: str = BACKWARD) -> Store:
    return tape.make(op.TEMPORARY, reason, size, source)


def _gradient(tape: Tape, reason: str, size: Size) -> Store:
    return tape.make(op.GRADIENT, reason, size, BACKWARD)


def _backward(given: Given) -> Backward:
    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        again = (*_OF_SYSTEM[:2], ("queries, decayed", _ROWS), _OF_SYSTEM[2], *_OF_STATES)
        held = [_brief(tape, reason, size) for reason, size in again]
        held.append(_gradient(tape, "gradient of attention within chunks", _WIDE_PAIRS))
        local = _gradient(tape, "gradient of the new values within chunks", _ROWS)
        held.append(_gradient(tape, "gradient of the states", e * STATES))
        learnt = _gradient(tape, "gradient of the new values", _ROWS)
        tape.drop(local)
        query, key = _first_part(tape, "queries"), _first_part(tape, "keys")
        value, decay = _gradient(tape, "gradient of the values", _ROWS), _first_part(tape, "decay")
        beta = _gradient(tape, "gradient of beta, but for pairs within chunks", 4 * HEADS)
        held.append(_gradient(tape, "gradient of the triangular system", _WIDE_PAIRS))
        tape.drop(learnt)
        query, key, decay, beta = _with_pairs(tape, (query, key, decay, beta))
        summed = _gradient(tape, "gradient of the decay", _WIDE)
        tape.drop(decay, *held)
        query, key = (through_length(tape, one, name) for one, name in ((query, "queries"), (key, "keys")))
        narrow = beta if tape.wide else _gradient(tape, "gradient of beta, cast", e * HEADS)
        if narrow is not beta:
            tape.drop(beta)
        return list(zip(given, (query, key, value, narrow, summed), strict=True))

    return backward


def _first_part(tape: Tape, name: str) -> Store:
    return _gradient(tape, f"gradient of the {name}, but for pairs within chunks", _WIDE)


def _with_pairs(tape: Tape, before: tuple[Store, ...]) -> tuple[Store, ...]:
    """Return the gradients of queries, keys, summed decay and beta with those from pairs of tokens. They replace ``before``."""
    query, key = (_gradient(tape, f"gradient of the {name} of unit length", _WIDE) for name in ("queries", "keys"))
    tiles = _gradient(tape, "gradient of beta from each tile", 4 * HEADS * _TILES)
    decay = _gradient(tape, "gradient of the summed decay", _WIDE)
    beta = _gradient(tape, "gradient of beta", 4 * HEADS)
    tape.drop(tiles, *before)
    return query, key, decay, beta

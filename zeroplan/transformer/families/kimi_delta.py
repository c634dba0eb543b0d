"""Kimi Delta Attention, chunk by chunk, in the torch operators that transformers runs without ``fla``.

Each channel of a head has its own decay, so the decay between two tokens of a chunk is a vector: tensors over all pairs of tokens
of a chunk are as wide as a head. Everything is in fp32, except matrix products under autocast. A loop over the chunks carries a
state. As in ``delta_rule.py``, the tape runs the first, the last but one, and the last iteration; the rest save what the last
but one saves, and are counted.
"""

from typing import NamedTuple

from zeroplan.expr import NOTHING, Size, at_least, at_most
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Block
from zeroplan.transformer.families.delta_rule import (
    BETWEEN,
    CHUNK_PAIRS,
    CHUNKS,
    FILLED,
    KEY_ROWS,
    PAIRS,
    STATE,
    Given,
    Iteration,
    Length,
    Times,
    less,
    pairwise,
    part,
    repeated,
    unit_length,
    with_addition,
    written,
)
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value, Width
from zeroplan.transformer.families.widths import CHUNK
from zeroplan.transformer.symbols import A, D, T, b, e

RULE = "transformers 5.23, models/kimi_linear/modeling_kimi_linear.py, chunk_kimi_delta_attention"
L2_NORM = "transformers 5.23, models/kimi_linear/modeling_kimi_linear.py, l2norm"

#: Elements of all heads' queries, padded to whole chunks; of a vector for each pair of tokens of a chunk, of all chunks and of one.
ROWS = FILLED * A * D
VECTORS, CHUNK_VECTORS = ROWS * CHUNK, KEY_ROWS * CHUNK
#: Elements of the rows that solve the triangular system of a chunk: row i has i elements, and reads i² of the rows above.
_SOLVED_ROWS = sum(row + row * row for row in range(1, CHUNK))
_LAST_ROW = CHUNK - 1 + (CHUNK - 1) ** 2
_MASK = NOTHING + CHUNK * CHUNK
_QUOTIENT = Length("length", 8, ("twice the length", 4), L2_NORM)


class _Ready(NamedTuple):
    """What the chunks are computed from. Queries and keys have unit length."""

    query: Value
    key: Value
    value: Value
    """Values, until a variable gets the new ones."""
    decay: Value
    """Cumulative sum of the decay within each chunk."""
    learning: Value
    """Keys times beta."""
    learnt: Value
    """Values times beta."""
    held: tuple[Value, ...]
    """Other tensors that variables hold until the function returns."""


class _Inside(NamedTuple):
    """Tensors that each chunk computes without the state."""

    decays: Value
    """Decay of each channel between every pair of tokens."""
    system: Value
    """The triangular system of each chunk, solved."""
    values: Value
    """The values that a chunk adds to the state."""
    reading: Value
    """Keys that read the state."""
    mask: Store
    """The mask of the triangular system, until a variable gets another."""
    held: tuple[Store, ...]
    """The other mask, and the last row of the system with the rows above, which variables hold until the function returns."""
    below: list[Store]
    """In the backward: the keys that read the state, while a chunk below still needs them."""


def kimi_delta_rule(tape: Tape, given: Given, block: Block) -> Value:
    """Run ``chunk_kimi_delta_attention``. Its variables hold most of its tensors until it returns."""
    ready = _filled_up(tape, given, block)
    inside = _inside_chunks(tape, ready)
    width = _of_products(tape)
    state, core = (
        Value(tape.make(op.TENSOR, reason, width * shape, RULE), width, shape)
        for reason, shape in (("first state of linear attention", STATE), ("output of linear attention, chunk by chunk", ROWS))
    )
    tape.untracked.update((state, core))
    mask = _mask(tape)
    tape.drop(inside.mask)
    done = _loop(tape, ready, inside, Iteration(core, state), mask, several=block.chunks == "several")
    made = _cut(tape, done.core)
    tape.drop(mask, *inside.held)
    tape.release(ready.query, ready.key, *ready[3:6], *ready.held, *inside[:4], *done.new, *done.before)
    return made


def _of_products(tape: Tape) -> Width:
    """Return the bytes of an element of a matrix product."""
    return e if tape.autocast else 4


def _mask(tape: Tape) -> Store:
    tape.drop(tape.make(op.TEMPORARY, "ones of a chunk's mask", _MASK, RULE))
    return tape.make(op.TENSOR, "mask of a chunk, booleans", _MASK, RULE)


# --- before the chunks -------------------------------------------------------------------------------------------------------


def _filled_up(tape: Tape, given: Given, block: Block) -> _Ready:
    names = ("queries", "keys", "values", "beta", "decay")
    wide = list[Value]()
    for value, name in zip(given, names, strict=True):
        wide.append(_by_head(tape, value, name, copied=not (block.one_key and name in ("beta", "decay"))))
    for place, name in enumerate(names[:2]):
        unit = unit_length(tape, wide[place], name, _QUOTIENT, L2_NORM)
        tape.release(wide[place])
        wide[place] = unit
    filled = list[Value]()
    for value, name in zip(wide, names, strict=True):
        reason, shape = f"{name}, filled up to whole chunks", FILLED * A if name == "beta" else ROWS
        longer = op.run(tape, value, reason, RULE, shape=shape, gradient=f"gradient of the {name}")
        tape.release(value)
        filled.append(op.scaled(tape, longer, "queries, scaled", RULE) if name == "queries" else longer)
    query, key, value, beta, bare = filled
    learnt, learning = _times(tape, value, beta, "values times beta"), _times(tape, key, beta, "keys times beta")
    decay = op.run(
        tape, bare, "decay, summed up within chunks", RULE, gradient="gradient of the decay",
        beside=("decay's gradient, flipped and summed up", 8 * ROWS),
    )  # fmt: skip
    tape.release(bare)
    return _Ready(query, key, value, decay, learning, learnt, (beta,))


def _by_head(tape: Tape, value: Value, name: str, *, copied: bool) -> Value:
    """``transpose(1, 2).contiguous().to(torch.float32)``."""
    ordered = value
    if copied:
        ordered = op.run(tape, value, f"{name}, head by head", RULE)
    else:
        tape.hold(value.store)
    made = op.cast(tape, ordered, 4, Site(f"{name} of linear attention", RULE))
    tape.release(ordered)
    return made


def _times(tape: Tape, value: Value, factor: Value, reason: str) -> Value:
    return op.times_per_row(tape, value, factor, reason, 4, RULE)


# --- inside every chunk ------------------------------------------------------------------------------------------------------


def _inside_chunks(tape: Tape, ready: _Ready) -> _Inside:
    masks = _mask(tape), _mask(tape)
    decays = pairwise(tape, ready.decay, masks[1], VECTORS, RULE)
    pair = ready.learning, ready.key
    bare = _scores(tape, pair, decays, "triangular system of a chunk", (VECTORS, PAIRS), masks[0])
    system, last = _solved(tape, op.scaled(tape, bare, "triangular system, negative", RULE))
    values = op.matmul(tape, system, ready.learnt, ("new values", ROWS), Site("new values", RULE))
    tape.release(ready.value)
    growth = op.exponential(tape, ready.decay, "decay since a chunk's beginning", RULE)
    keys = op.product(tape, ready.learning, growth, "keys times beta, decayed", RULE)
    tape.release(growth)
    reading = op.matmul(tape, system, keys, ("keys that read the state", ROWS), Site("keys that read the state", RULE))
    tape.release(keys)
    return _Inside(decays, system, values, reading, masks[0], (masks[1], last), [])


def _scores(
    tape: Tape, pair: tuple[Value, Value], decays: Value, reason: str, shapes: tuple[Size, Size], mask: Store,
    times: Times | None = None,
) -> Value:  # fmt: skip
    """``(x_i * y_j * decay).sum(-1)``, masked, as elementwise products. ``shapes``: elements of the products and of the sums.

    ``times``: of a chunk alone, whose decays it takes from those of all chunks.
    """
    vectors, pairs = shapes
    bare = _outer(tape, *pair, f"{reason}, not decayed", vectors)
    own = decays if times is None else part(tape, decays, CHUNK_VECTORS, times)
    whole = op.product(tape, bare, own, f"{reason}, not summed", RULE)
    tape.release(bare, *(() if times is None else (own,)))
    summed = op.tensor(tape, f"{reason}, summed", 4, pairs, RULE)
    tape.add(f"sum of the {reason}", (summed,), (), op.same_gradient(whole), of=(whole,))
    tape.release(whole)
    made = op.run(tape, summed, reason, RULE, saved=(mask,), gradient=f"gradient of the {reason}, masked")
    tape.release(summed)
    return made


def _outer(tape: Tape, first: Value, second: Value, reason: str, vectors: Size) -> Value:
    """Multiply the rows of every pair of tokens. The backward makes both factors' gradients for each pair, then sums them."""
    made = op.tensor(tape, reason, 4, vectors, RULE)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        terms = [tape.temporary(f"gradient of a factor of the {reason}, not yet summed", 4 * vectors, RULE) for _ in range(2)]
        arriving = list[tuple[Value, Store]]()
        for one, unsummed in zip((first, second), terms, strict=True):
            arriving.append((one, op.gradient(tape, one, f"gradient of a factor of the {reason}", RULE)))
            tape.scratch.remove(unsummed)
            tape.drop(unsummed)
        return arriving

    tape.add(reason, (made,), (first, second), backward, of=(first, second))
    return made


def _solved(tape: Tape, system: Value) -> tuple[Value, Store]:
    """Solve the triangular system row by row, in place, and add ones. It releases ``system``.

    Return the last row and the rows above as well, which variables hold. The backward of the last row needs most: the system's
    gradient without that row, and both gradients of a product, each as large as the rows above.
    """
    earlier = _SOLVED_ROWS - _LAST_ROW if tape.saving else _LAST_ROW  # without a graph, the product of the last row alone
    rows, last = (
        tape.make(op.TENSOR, reason, 4 * number * b * A * CHUNKS, RULE)
        for reason, number in (("rows of the triangular system", earlier), ("last row of the triangular system", _LAST_ROW))
    )
    solved = Value(tape.hold(system.store), 4, PAIRS)
    beside = ("gradients of the last row, and of the rows above", 4 * (2 * _LAST_ROW - CHUNK**2) * b * A * CHUNKS)
    backward = op.makes("gradient of the triangular system", RULE, system, beside=beside)
    tape.add("triangular system: rows", (solved,), (rows, last), backward, of=(system,))
    made = op.run(tape, solved, "triangular system of a chunk, solved", RULE)
    tape.release(solved, system)
    tape.drop(rows)
    return made, last


# --- from chunk to chunk -----------------------------------------------------------------------------------------------------


def _loop(
    tape: Tape, ready: _Ready, inside: _Inside, done: Iteration, mask: Store, *, several: bool
) -> Iteration:  # fmt: skip
    """Run the loop over chunks. With two chunks, the iteration between the first and the last has zero bytes."""
    if several:
        done = _iteration(tape, ready, inside, done, mask, times=1, after=BETWEEN)
        done = done._replace(state=_other_iterations(tape, done.state, inside.below))
        done = _iteration(tape, ready, inside, done, mask, times=BETWEEN)
        width = _of_products(tape)
        size, reason = KEY_ROWS * (1 - BETWEEN), "values that the state knows, until the second of two chunks has its own"
        done = done._replace(new=(*done.new, Value(tape.make(op.TENSOR, reason, width * size, RULE), width, size)))
    return _iteration(tape, ready, inside, done, mask, times=1, last=True)


def _iteration(
    tape: Tape, ready: _Ready, inside: _Inside, done: Iteration, mask: Store, *, times: Times, after: Times = 1,
    last: bool = False,
) -> Iteration:  # fmt: skip
    """Run one chunk: read the state, attend within the chunk, and make the next state. Nothing reads the last state."""
    rows, state = repeated(KEY_ROWS, times), done.state
    wholes = ready.query, ready.key, inside.values, ready.decay
    query, key, values, decay = (part(tape, one, KEY_ROWS, times) for one in wholes)
    grown = op.exponential(tape, decay, "decay since a chunk's beginning, of a chunk", RULE)
    asking = op.product(tape, query, grown, "queries of a chunk, decayed", _site("decay of the queries"))
    tape.release(grown)
    before = op.matmul(tape, asking, state, ("attention to chunks before", rows), _site("attention to the state"))
    tape.release(asking, *done.before)
    shapes = repeated(CHUNK_VECTORS, times), repeated(CHUNK_PAIRS, times)
    within = _scores(tape, (query, key), inside.decays, "attention within a chunk", shapes, mask, times)
    known = _known(tape, inside, state, times, last=last)
    new = less(tape, values, known, RULE)
    both = op.matmul(tape, within, new, ("output within a chunk", rows), _site("output within a chunk"))
    output = op.add(tape, before, both, "output of a chunk", _site("sum of a chunk's output"))
    tape.release(both)
    core = written(tape, done.core, output, rows)
    tape.release(output)
    following = state
    if last:
        unread = "the last state, which nothing reads, and its factors"
        tape.drop(tape.make(op.TEMPORARY, unread, (8 + _of_products(tape)) * (STATE + KEY_ROWS), RULE))
    else:
        following = _next_state(tape, state, (key, decay, new), (times, after))
    tape.release(state, query, key, values, decay, *done.new)
    return Iteration(core, following, (within, known, new), (before,))


def _known(tape: Tape, inside: _Inside, state: Value, times: Times, *, last: bool) -> Value:
    """Return the values that the state knows. All chunks but the first save the same keys, until the lowest of them is done."""
    bare = part(tape, inside.reading, KEY_ROWS, times)
    reading, rest = Value(bare.store, bare.dtype, bare.shape), at_least(0, CHUNKS - (2 if last else 3))

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        tape.scratch += inside.below
        size = bare.dtype * ROWS * at_most(1, rest)
        inside.below[:] = [tape.make(op.TENSOR, "keys that read the state, for the chunks below", size, RULE)]
        return [op.through(bare, grad_outputs[0])]

    tape.add("keys that read the state", (reading,), (), backward, of=(bare,))
    narrow = op.cast(tape, state, _of_products(tape), _site("state"))
    saved = op.factors(tape, (reading, (reading,) if last else ()), (narrow, (narrow,)))
    made = op.run(
        tape, (reading, narrow), "values that the state knows", _site("values known"), shape=repeated(KEY_ROWS, times),
        saved=saved, gradient="gradient of a factor of the values known",
    )  # fmt: skip
    tape.release(bare, narrow)
    return made


def _next_state(tape: Tape, state: Value, of: tuple[Value, Value, Value], often: tuple[Times, Times]) -> Value:
    """``state * exp(g_last) + (k * exp(g_last - g)).T @ new``. ``often``: how many iterations, and results, this counts."""
    (key, decay, new), (times, _) = of, often
    whole = part(tape, decay, b * A * D, times)
    shrunk = op.exponential(tape, whole, "decay of a whole chunk", RULE)
    decayed = op.times_per_row(tape, state, shrunk, "state, decayed", 4, RULE)
    rest = op.tensor(tape, "logarithms of decay to a chunk's end", 4, key.shape, RULE)
    of_rest = op.makes("gradient of the decay to a chunk's end", RULE, decay, whole)
    tape.add("decay to a chunk's end", (rest,), (), of_rest, of=(decay, whole))
    shrinking = op.exponential(tape, rest, "decay to a chunk's end", RULE)
    tape.release(rest)
    writing = op.product(tape, key, shrinking, "keys of a chunk, decayed", _site("decay of the keys"))
    tape.release(shrinking)
    made = with_addition(tape, decayed, (writing, new), often, RULE)
    tape.release(whole, shrunk, writing)
    return made


def _other_iterations(tape: Tape, state: Value, below: list[Store]) -> Value:
    """Count the tensors that the remaining iterations save: all but the first and the last two."""
    width = _of_products(tape)
    states = (4 + 2 * e if tape.autocast else 4) * STATE
    each = (8 + 3 * width) * KEY_ROWS + 4 * CHUNK_VECTORS + width * CHUNK_PAIRS + states + 4 * b * A * D
    kept = tape.make(op.TENSOR, "states and factors of the chunks between", each * at_least(0, CHUNKS - 3), RULE)
    made = Value(tape.hold(state.store), 4, STATE * BETWEEN)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.scratch += below
        return [(state, op.gradient(tape, state, "gradient of a state", RULE))]

    tape.add("chunks between", (made,), (kept,), backward, of=(state,))
    tape.drop(kept)
    tape.release(state)
    return made


def _site(name: str) -> Site:
    return Site(f"chunk: {name}", RULE)


def _cut(tape: Tape, core: Value) -> Value:
    """Return the output in the order of tokens, without padding, and cast. It releases ``core``."""
    whole = op.run(
        tape, core, "output of linear attention, in order", RULE, shape=T * A * D,
        gradient="gradient of the output, filled up",
    )  # fmt: skip
    tape.release(core)
    made = op.cast(tape, whole, e, Site("output of linear attention", RULE))
    tape.release(whole)
    return made

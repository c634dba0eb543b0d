"""Linear attention by the gated delta rule, chunk by chunk, in the torch operators that transformers runs without ``fla``.

Everything is in fp32, except matrix products under autocast. The sequence is padded to whole chunks. A loop over the chunks
carries a state, and each iteration saves tensors for its backward. The tape runs the first, the second last and the last
iteration. The other iterations allocate the same as the second last; the tape counts the tensors that they save.
"""

from typing import NamedTuple, TypeAlias

from zeroplan.expr import NOTHING, Size, at_least, at_most, ceil
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Block
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.families.widths import CHUNK
from zeroplan.transformer.symbols import A, D, I, T, b, e, s

RULE = "transformers 5.23, models/qwen3_next/modeling_qwen3_next.py, torch_chunk_gated_delta_rule"
L2_NORM = "transformers 5.23, models/qwen3_next/modeling_qwen3_next.py, l2norm"

#: Number of chunks of a sequence; tokens of all sequences, with padding.
CHUNKS = ceil(s, CHUNK)
FILLED = CHUNK * b * CHUNKS
#: Elements with one number per head for every pair of tokens of a chunk; elements of the states of all heads.
PAIRS, STATE = FILLED * CHUNK * A, b * A * D * I
#: Elements of one chunk: rows as wide as a key, rows as wide as a value, and pairs of tokens.
KEY_ROWS, VALUE_ROWS, CHUNK_PAIRS = CHUNK * b * A * D, CHUNK * b * A * I, CHUNK * CHUNK * b * A

#: 1 if there is a chunk between the first and the last, else 0.
BETWEEN = at_most(1, CHUNKS - 2)

#: 1 if a sequence is a whole number of chunks, else 0; 1 for several sequences, else 0.
WHOLE, SEQUENCES = 1 - at_most(1, CHUNK * CHUNKS - s), at_most(1, b - 1)

#: How many iterations a tensor represents: a number, or an expression that is 0 or 1 depending on the number of chunks.
Times: TypeAlias = Size | int


class Given(NamedTuple):
    """Inputs of the rule: queries, keys, values, the learning rate beta, and the logarithm of the decay."""

    query: Value
    key: Value
    value: Value
    beta: Value
    decay: Value


def gated_delta_rule(tape: Tape, given: Given, block: Block) -> Value:
    """Run ``torch_chunk_gated_delta_rule``. Its variables hold most of its tensors until it returns."""
    ready = _filled_up(tape, given, block)
    inside = _inside_chunks(tape, ready, block)
    several = block.chunks == "several"
    state = _zeros(tape, "first state of linear attention", STATE)
    core = _zeros(tape, "output of linear attention, filled in chunk by chunk", FILLED * A * I)
    scan = _decayed(tape, ready, inside, state, several=several)
    done = _loop(tape, scan._replace(copied=_copied_in_loop(tape, block)), core, several=several)
    made = _cut(tape, done.core)
    tape.drop(ready.mask)
    tape.release(*ready.held, *inside, *scan.own, *done.new, *done.before)
    return made


# --- before the chunks -----------------------------------------------------------------------------------------------------


class _Ready(NamedTuple):
    """Padded inputs of the rule. Queries and keys have unit length."""

    query: Value
    key: Value
    value: Value
    """Values times beta."""
    learning: Value
    """Keys times beta."""
    decay: Value
    """Cumulative sum of the decay within each chunk."""
    mask: Store
    held: tuple[Value, ...]
    """Tensors that variables hold until the function returns, without queries and keys."""


def _filled_up(tape: Tape, given: Given, block: Block) -> _Ready:
    bare = [
        _for_each_head(tape, one, name, repeated=block.grouped) for one, name in ((given.query, "queries"), (given.key, "keys"))
    ]
    wide = [
        op.cast(tape, one, 4, Site(f"{name} of linear attention", RULE))
        for one, name in zip((*bare, given.value, given.beta), ("queries", "keys", "values", "beta"), strict=True)
    ]
    tape.release(*bare)
    units = [unit_length(tape, one, name, _PRODUCT, RULE) for one, name in zip(wide, ("queries", "keys"), strict=False)]
    scaled = op.multiplied(tape, units[0], "queries, scaled", RULE)
    tape.release(units[0], *wide[:2])
    rows = (scaled, "queries", A * D), (units[1], "keys", A * D), (wide[2], "values", A * I)
    query, key, value = (_longer(tape, one, name, FILLED * width) for one, name, width in rows)
    tape.release(scaled, units[1], wide[2])
    beta, decay = _longer(tape, wide[3], "beta", FILLED * A), _longer(tape, given.decay, "decay", FILLED * A)
    tape.release(wide[3])
    learnt = _times(tape, value, beta, "values times beta")
    learning = _times(tape, key, beta, "keys times beta")
    tape.drop(tape.make(op.TEMPORARY, "ones of a chunk's mask", Size(((CHUNK * CHUNK,),)), RULE))
    mask = tape.make(op.TENSOR, "mask of a chunk, booleans", Size(((CHUNK * CHUNK,),)), RULE)
    summed = op.run(
        tape, decay, "decay, summed up within chunks", RULE, dtype=4, shape=FILLED * A,
        gradient="gradient of the decay", beside=("decay's gradient, flipped and summed up", 8 * FILLED * A),
    )  # fmt: skip
    in_chunks = op.view(tape, query, Site("queries in chunks", RULE)), op.view(tape, key, Site("keys in chunks", RULE))
    tape.summed_anew.add(key)  # the gradient of its chunks is a view
    held = value, beta, decay, learnt, learning, summed
    tape.release(query, key)
    values, keys = _in_chunks(tape, learnt, "values"), _in_chunks(tape, learning, "keys")
    return _Ready(*in_chunks, values, keys, summed, mask, (*held, values, keys))


def _for_each_head(tape: Tape, value: Value, name: str, *, repeated: bool) -> Value:
    """Return queries or keys for every head of values: repeated copies, or a view whose gradient is copied."""
    if not repeated:
        return _in_chunks(tape, value, name)
    reason, of = f"{name}, repeated for each head of values", f"gradient of the {name}"
    return op.run(tape, value, reason, RULE, shape=T * A * D, gradient=of)


def _in_chunks(tape: Tape, value: Value, name: str) -> Value:
    """Return a view whose gradient has another memory order and is copied."""
    return op.slices(tape, value, (value.shape,), Site(f"{name}, in another order", RULE))[0]


class Length(NamedTuple):
    """How a family divides rows by their length: by a product or a quotient."""

    word: str
    """What each row is multiplied or divided by."""
    sums: int
    """Temporaries of the sum over each row. [bytes]"""
    derivative: tuple[str, int]
    """A temporary of its backward: the reason, and bytes for each row."""
    source: str


_PRODUCT = Length("reciprocal length", 4, ("powers of the reciprocal length", 8), L2_NORM)


def unit_length(tape: Tape, value: Value, name: str, length: Length, source: str) -> Value:
    """``x * rsqrt((x * x).sum() + eps)``, or a quotient; ``source``: of the product. ``value`` stays."""
    word, sums, (derivative, size), norm = length
    both = op.makes(f"gradients of both factors of the {name} squared", norm, value, value)
    square = op.run(tape, value, f"{name} squared", norm, dtype=4, saved=(value.store,), backward=both)
    total = tape.make(op.TEMPORARY, f"sums of the {name} squared", sums * T * A, norm)
    tape.release(square)
    root = op.tensor(tape, f"{word} of the {name}", 4, T * A, norm)
    tape.drop(total)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.temporary(derivative, size * T * A, norm)
        return [(square, tape.make(op.GRADIENT, "gradient of the squares, one for each row", 4 * T * A, norm))]

    tape.add(f"{word} of the {name}", (root,), (root.store,), backward, of=(square,))
    made = op.times_per_row(tape, value, root, f"{name} of unit length", 4, source)
    tape.release(root)
    return made


def _longer(tape: Tape, value: Value, name: str, shape: Size) -> Value:
    """``F.pad`` to whole chunks. It copies even if it pads nothing."""
    reason, of = f"{name}, filled up to whole chunks", f"gradient of the {name}"
    return op.run(tape, value, reason, RULE, dtype=4, shape=shape, gradient=of)


def _times(tape: Tape, value: Value, factor: Value, reason: str) -> Value:
    return op.times_per_row(tape, value, factor, reason, 4, RULE)


# --- inside every chunk ------------------------------------------------------------------------------------------------------


class _Inside(NamedTuple):
    """Tensors that each chunk computes without the state."""

    decays: Value
    """Decay between every pair of tokens."""
    system: Value
    """The triangular system of each chunk."""
    attention: Value
    """Attention within each chunk."""
    keys: Value
    """Keys times beta, decayed."""
    values: Value
    """The values that a chunk adds to the state."""
    reading: Value
    """Keys that read the state."""


def _inside_chunks(tape: Tape, ready: _Ready, block: Block) -> _Inside:
    decays, (of_system, of_attention) = pairwise(tape, ready.decay, ready.mask, PAIRS, RULE), _copied(tape, block)
    system = _scores(tape, ready.learning, ready.key, decays, "triangular system of a chunk", of_system)
    attention = _scores(tape, ready.query, ready.key, decays, "attention within a chunk", of_attention)
    growth = op.exponential(tape, ready.decay, "decay since a chunk's beginning", RULE)
    keys = _times(tape, ready.learning, growth, "keys times beta, decayed")
    tape.release(growth)
    values = _solved(tape, system, ready.value, "new values")
    reading = _solved(tape, system, keys, "keys that read the state")
    return _Inside(decays, system, attention, keys, values, reading)


def pairwise(tape: Tape, decay: Value, mask: Store, elements: Size, source: str) -> Value:
    """Return the exponential of ``c_i - c_j`` for each pair of tokens of a chunk, masked: so many ``elements``."""
    negative = "gradient of the differences, negative", 4 * elements
    backward = op.in_turn(op.needs(source, negative), op.makes("gradient of the decay, summed", source, decay, decay))
    site, of = Site("decay between tokens", source), "gradient of the decay between tokens, masked"
    pairs = op.run(tape, decay, "logarithms of decay between tokens", site, dtype=4, shape=elements, backward=backward)
    site = Site("decay between tokens: mask", source)
    masked = op.run(tape, pairs, "logarithms of decay, masked", site, saved=(mask,), gradient=of)
    tape.release(pairs)
    made = op.exponential(tape, masked, "decay between tokens", source)
    tape.release(masked)
    return made


def _copied(tape: Tape, block: Block) -> tuple[Size, Size]:
    """Return the elements of the operand copies in the product of the triangular system, and in that of attention.

    In fp32 ``Tensor.to`` copies nothing, and padding by nothing keeps the memory order, in which a chunk's tokens are not
    neighbours. So both products copy their operands. Where heads share keys and there are several sequences, the loop copies
    its chunks of queries and keys too, and nothing keeps the whole tensors. Each of these has one chunk less, which this
    subtracts.
    """
    rows = 2 * FILLED * A * D * WHOLE
    if not tape.wide:
        return NOTHING, NOTHING
    if block.chunks == "one":
        return (rows * SEQUENCES, rows * SEQUENCES) if block.grouped else (NOTHING, NOTHING)
    return rows, (rows - 2 * KEY_ROWS * WHOLE * SEQUENCES if block.grouped else rows)


def _copied_in_loop(tape: Tape, block: Block) -> Size:
    """Return the bytes of the operand copies in the loop's last products, including those that :func:`_copied` subtracts."""
    if not (tape.wide and block.grouped):
        return NOTHING
    kept = 2 * CHUNKS if tape.saving and block.chunks == "several" else NOTHING
    return 4 * KEY_ROWS * WHOLE * SEQUENCES * (kept + 1)


def _scores(tape: Tape, first: Value, second: Value, decays: Value, reason: str, copied: Size) -> Value:
    copy = tape.make(op.TENSOR, f"operands of the {reason}, in order", 4 * copied, RULE) if copied != NOTHING else None
    site, copies = Site(f"product of the {reason}", RULE), () if copy is None else (copy,)
    bare = op.matmul(tape, first, second, (f"{reason}, not decayed", PAIRS), site, copies)
    for one in copies:
        tape.drop(one)
    made = op.product(tape, bare, decays, reason, RULE)
    tape.release(bare)
    return made


def _solved(tape: Tape, system: Value, right: Value, reason: str) -> Value:
    """``torch.linalg.solve_triangular``. Autograd saves its matrix and its result."""
    made = op.tensor(tape, reason, 4, right.shape, RULE)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        arriving = [(right, op.gradient(tape, right, f"gradient of what the {reason} were solved from", RULE))]
        tape.temporary("gradient of the triangular system, not yet cut", 4 * PAIRS, RULE)
        return [*arriving, (system, op.gradient(tape, system, "gradient of the triangular system", RULE))]

    tape.add(f"solving for the {reason}", (made,), (system.store, made.store), backward, of=(system, right))
    return made


# --- from chunk to chunk -----------------------------------------------------------------------------------------------------


class _Scan(NamedTuple):
    """The tensors of all chunks that the loop slices."""

    values: Value
    reading: Value
    query: Value
    key: Value
    attention: Value
    decay: Value
    """The decay over a whole chunk."""
    state: Value
    """The first state, zeros."""
    own: tuple[Value, ...]
    """Tensors that variables hold until the function returns."""
    copied: Size = NOTHING
    """Bytes of operand copies that are alive in the last iteration."""


def _zeros(tape: Tape, reason: str, shape: Size) -> Value:
    made = Value(tape.make(op.TENSOR, reason, 4 * shape, RULE), 4, shape)
    tape.untracked.add(made)
    return made


def _decayed(tape: Tape, ready: _Ready, inside: _Inside, state: Value, *, several: bool) -> _Scan:
    """Return decayed queries and keys, which read and update the state. With one chunk nothing reads the new state."""
    growth = op.exponential(tape, ready.decay, "decay since a chunk's beginning, for queries", RULE)
    query = _times(tape, ready.query, growth, "queries, decayed")
    tape.release(ready.query, growth)
    keys, decays = (ready.key, ready.decay) if several else (_unfollowed(tape, ready.key), _unfollowed(tape, ready.decay))
    of = "gradient of the decay"
    rest = op.run(tape, decays, "logarithms of decay to a chunk's end", RULE, dtype=4, shape=FILLED * A, gradient=of)
    shrinking = op.exponential(tape, rest, "decay to a chunk's end", RULE)
    tape.release(rest)
    key = _times(tape, keys, shrinking, "keys, decayed")
    saved = not several and tape.saving  # by the graph of the decayed keys, which has no backward
    tape.release(ready.key, *(() if saved else (shrinking,)))
    (last,) = op.slices(tape, decays, (b * A * CHUNKS,), Site("decay of whole chunks", RULE))
    decay = op.exponential(tape, last, "decay of whole chunks", RULE)
    tape.release(last)
    held = (query, key, decay, *((shrinking,) if saved else ()))
    return _Scan(inside.values, inside.reading, query, key, inside.attention, decay, state, held)


def _unfollowed(tape: Tape, value: Value) -> Value:
    """Return the same tensor, detached from autograd on this path."""
    made = Value(value.store, value.dtype, value.shape)
    tape.untracked.add(made)
    return made


class Iteration(NamedTuple):
    """The tensors that variables hold at the end of an iteration."""

    core: Value
    state: Value
    new: tuple[Value, ...] = ()
    """New values, until the next iteration reassigns the variable."""
    before: tuple[Value, ...] = ()
    """Attention to earlier chunks, until the next iteration reassigns the variable."""


def _loop(tape: Tape, scan: _Scan, core: Value, *, several: bool) -> Iteration:
    """Run the loop over chunks. With two chunks, the iteration between the first and the last has zero bytes."""
    done = Iteration(core, scan.state)
    if several:
        done = _iteration(tape, scan, done, times=1, after=BETWEEN)
        done = _iteration(tape, scan, done._replace(state=_other_iterations(tape, done.state)), times=BETWEEN)
        if not tape.autocast:
            tape.summed_anew.add(done.state)  # gradients of products are views
    return _iteration(tape, scan, done, times=1, last=True)


def _iteration(tape: Tape, scan: _Scan, done: Iteration, *, times: Times, after: Times = 1, last: bool = False) -> Iteration:
    """Run one chunk: read the state, run attention within the chunk, and make the next state. The last chunk's state stays unused.

    ``after``: how many next states this iteration represents, without the last iteration's.
    """
    values, reading, state = part(tape, scan.values, VALUE_ROWS, times), part(tape, scan.reading, KEY_ROWS, times), done.state
    known = op.matmul(tape, reading, state, _rows("values that the state knows", times), _site("values known"))
    new = less(tape, values, known, RULE)
    if not tape.autocast:
        tape.summed_anew.add(new)
    tape.release(values, reading, known, *done.new)
    query = part(tape, scan.query, KEY_ROWS, times)
    copied = tape.make(op.TEMPORARY, "queries of a chunk, in order", scan.copied if last else NOTHING, RULE)
    before = op.matmul(tape, query, state, _rows("attention to chunks before", times), _site("attention to the state"))
    tape.drop(copied)
    tape.release(query, *done.before)
    within = part(tape, scan.attention, CHUNK_PAIRS, times)
    inside = op.matmul(tape, within, new, _rows("attention within a chunk", times), _site("attention within a chunk"))
    both = op.add(tape, before, inside, "output of a chunk", _site("sum of a chunk's output"))
    tape.release(within, inside)
    core = written(tape, done.core, both, repeated(VALUE_ROWS, times))
    tape.release(both)
    following = state
    if last:
        tape.drop(
            tape.make(op.TEMPORARY, "the last state, which nothing reads, and its factors", _last_state(tape, scan), RULE)
        )
    else:
        following = _next_state(tape, scan, state, new, (times, after))
    tape.release(state)
    return Iteration(core, following, (new,), (before,))


def _last_state(tape: Tape, scan: _Scan) -> Size:
    """Return the bytes of the decayed state, the addition, their sum, and the product's factors: cast, or keys in order."""
    if tape.autocast:
        return (8 + e) * STATE + e * (KEY_ROWS + VALUE_ROWS)
    return 12 * STATE + scan.copied  # an upper bound: with copied keys not all of it is alive at once


def _rows(reason: str, times: Times) -> tuple[str, Size]:
    return reason, repeated(VALUE_ROWS, times)


def _next_state(tape: Tape, scan: _Scan, state: Value, new: Value, often: tuple[Times, Times]) -> Value:
    """``state * decay + key.T @ new``. ``often``: how many iterations, and how many results, this represents."""
    times, _ = often
    decay, key = part(tape, scan.decay, b * A, times), part(tape, scan.key, KEY_ROWS, times)
    decayed = _times(tape, state, decay, "state, decayed")
    made = with_addition(tape, decayed, (key, new), often, RULE)
    tape.release(decay, key)
    return made


def with_addition(tape: Tape, decayed: Value, pair: tuple[Value, Value], often: tuple[Times, Times], source: str) -> Value:
    """Return the next state: the decayed one, plus what a chunk adds to it, the product of a ``pair``. It releases ``decayed``."""
    times, after = often
    added = op.matmul(
        tape, *pair, ("what a chunk adds to the state", repeated(STATE, times)), Site("chunk: addition to the state", source)
    )
    made = Value(tape.make(op.TENSOR, "state after a chunk", repeated(4 * STATE, after), source), 4, STATE)

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        site = Site("chunk: state after a chunk", source)
        return [op.narrowed(tape, one, grad_outputs[0], made, site) for one in (decayed, added)]

    tape.add("chunk: state", (made,), (), backward, of=(decayed, added))
    tape.release(decayed, added)
    return made


def _other_iterations(tape: Tape, state: Value) -> Value:
    """Count the tensors that the remaining iterations save: all but the first and the last two."""
    others = at_least(0, CHUNKS - 3)
    size = 4 * STATE + (e * (2 * STATE + 3 * KEY_ROWS + 2 * VALUE_ROWS + CHUNK_PAIRS) if tape.autocast else 4 * VALUE_ROWS)
    kept = tape.make(op.TENSOR, "states and new values of the chunks between", size * others, RULE)
    made = Value(tape.hold(state.store), 4, STATE * BETWEEN)
    tape.add("chunks between", (made,), (kept,), op.makes("gradient of a state", RULE, state), of=(state,))
    tape.drop(kept)
    tape.release(state)
    return made


def repeated(size: Size, times: Times) -> Size:
    """Return the size of so many tensors."""
    return size if isinstance(times, int) else size * times


def _site(name: str) -> Site:
    return Site(f"chunk: {name}", RULE)


def part(tape: Tape, whole: Value, shape: Size, times: Times) -> Value:
    """Return one chunk of a tensor as a view. Its backward writes the gradient into zeros of the whole tensor's size."""
    made = Value(tape.hold(whole.store), whole.dtype, repeated(shape, times))

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        size = repeated(whole.dtype * whole.shape, times)
        return [(whole, tape.make(op.GRADIENT, "gradient of a chunk, among zeros", size, RULE))]

    tape.add("part of a chunk", (made,), (), backward, of=(whole,))
    return made


def less(tape: Tape, value: Value, known: Value, source: str) -> Value:
    """``value - known``, in the dtype of ``value``."""
    made = op.tensor(tape, "new values of a chunk", value.dtype, value.shape, source)
    negative = op.makes_widened("gradient of what is known, negative", source, known, made)
    tape.add("chunk: new values", (made,), (), op.in_turn(negative, op.same_gradient(value)), of=(value, known))
    return made


def written(tape: Tape, core: Value, output: Value, rows: Size) -> Value:
    """``core[:, :, i] = output`` in place. Its backward copies the whole gradient. It releases ``core``."""
    made = Value(tape.hold(core.store), core.dtype, core.shape)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        rest = op.gradient(tape, core, "gradient of the output, without a chunk", RULE)
        own = tape.make(op.GRADIENT, "gradient of a chunk's output", core.dtype * rows, RULE)
        if tape.follows(core):
            tape.temporary("zeros in its place", core.dtype * rows, RULE)
        else:
            tape.scratch.append(rest)
        arriving = [(core, rest)] if tape.follows(core) else []
        return [*arriving, (output, op.as_narrow(tape, output, own, made, RULE))]

    tape.add("chunk: its output, written", (made,), (), backward, of=(core, output))
    tape.release(core)
    return made


def _cut(tape: Tape, core: Value) -> Value:
    """Return the output in the order of tokens, unpadded and cast. It releases ``core``."""
    whole = op.run(tape, core, "output of linear attention, in order", RULE, dtype=4)
    tape.release(core)
    made = op.tensor(tape, "output of linear attention", e, T * A * I, RULE)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        if not tape.wide:
            tape.temporary("gradient of the output, cast", 4 * T * A * I, RULE)
        return [(whole, op.gradient(tape, whole, "gradient of the output, filled up", RULE))]

    tape.add("output, cut", (made,), (), backward, of=(whole,))
    tape.release(whole)
    return made

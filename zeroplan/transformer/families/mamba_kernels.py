"""Mamba-2 as mamba_ssm runs it: convolution, scan, norm and output projection in one operator, which keeps its input.

The package allocates in Python, and its kernels allocate nothing: read, and run with kernels that do nothing, not on a GPU. Its
backward makes gradients of all its weights, even of frozen ones.
"""

from zeroplan.expr import NOTHING, Size, Values, call, ceil
from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.linear_kernels import of_its_weights
from zeroplan.transformer.families.operators import PROCESSORS
from zeroplan.transformer.families.tape import Arriving, Backward, Store, Tape, Value, Width
from zeroplan.transformer.symbols import A, D, I, J, Q, T, Z, b, e, h, l, r

SCAN = "mamba 2.3, mamba_ssm/ops/triton/ssd_combined.py, MambaSplitConv1dScanCombinedFn"
FORWARD = "mamba 2.3, mamba_ssm/ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_fwd"
BACKWARD = "mamba 2.3, mamba_ssm/ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_bwd"
NORM = "mamba 2.3, mamba_ssm/ops/triton/layernorm_gated.py, _layer_norm_bwd"

#: Elements of x, of B or C, of all that the convolution makes, of one number per head for tokens in whole chunks and for chunks,
#: of states of all chunks and of the last one, and of a group's pairs of tokens of a chunk.
ROWS, SIDE, CONVOLVED = T * A * I, T * J * D, T * (A * I + 2 * J * D)
FILLED, CHUNKS, LAST, STATES, PAIRS = Q * b * Z * A, b * Z * A, b * A * D * I, b * Z * A * D * I, b * Z * J * Q * Q


def _splits(values: Values) -> Int:
    heads = values["A"] // values["J"]
    each = maximum(minimum(ceil_div(values["b"] * values["Z"] * values["A"], PROCESSORS), heads), 1)
    return ceil_div(heads, each)


def _norm_rows(values: Values) -> Int:
    group = int(values["A"]) * int(values["I"]) // int(values["J"])
    warps = min(8, max(1, (1 << (group - 1).bit_length()) // 256))
    return -(-PROCESSORS * -(-4 // warps) // int(values["J"]))


#: Parts of a group's heads that multiprocessors sum apart; parts of the gradient of the norm's weight.
SPLITS = call(f"ceil(A/J/max(1, min(A/J, ceil(b·Z·A/{PROCESSORS}))))", _splits)
NORM_ROWS = call(f"ceil({PROCESSORS}·ceil(4/max(1, min(8, pow2(A·I/J)/256)))/J)", _norm_rows)


def mixed(tape: Tape, joint: Value, decay: tuple[Store, Store], *, only_gated: bool) -> Value:
    """Run ``mamba_split_conv1d_scan_combined`` on the joint projection. ``decay``: the rates of decay, and their negative.

    Its tensors have the dtype of the joint projection, which Falcon-H1's multipliers widen under autocast. ``only_gated``: the scan
    itself multiplies its output by the gate, and no norm follows.
    """
    of = joint.dtype
    brief = [_brief(tape, "x, B and C after the convolution", of * CONVOLVED, SCAN), *_before_scan(tape, of)]
    scores = _brief(tape, "scores of tokens within chunks", 4 * PAIRS, FORWARD)
    gated = (_brief(tape, "output of the scan times its gate", of * ROWS, FORWARD),) if only_gated else ()
    scanned = tape.make(op.TENSOR, "output of the scan", of * ROWS, FORWARD)
    tape.drop(scores)
    ends = (*gated, scanned) if only_gated else (*_normed(tape, of), scanned)
    out, *saved = ends
    cast = h * A * I if tape.autocast else None
    if cast is not None:
        tape.hold_cast(cast)
    narrow = _narrowed(tape, out, of)
    made = op.tensor(tape, "output of the output projection", e, T * h, SCAN)
    tape.matrix_product(made.store)
    tape.drop(*brief, narrow)
    kept = (joint, *saved, *(decay[1:] if tape.mode.weights_frozen else decay))
    backward = _backward(joint, only_gated=only_gated)
    tape.add("Mamba-2", (made,), kept, backward, of=tape.with_weight(joint), cast=cast, saves_weight=True)
    tape.drop(*saved)
    return made


def _normed(tape: Tape, of: Width) -> tuple[Store, Store]:
    """Return the norm of the scan's output, and the reciprocal root mean squares."""
    made = _brief(tape, "norm of the scan's output", of * ROWS, SCAN)
    return made, tape.make(op.TENSOR, "reciprocal root mean square of the scan's output", 4 * T * J, SCAN)


def _narrowed(tape: Tape, out: Store, of: Width) -> Store:
    """Return the input of the output projection, a cast copy under autocast where ``out`` is wider.

    ``out`` lives until the weight's copy exists, too.
    """
    if not (tape.autocast and tape.is_wide(of)):
        return out
    made = _brief(tape, "input of the output projection, cast", e * ROWS, SCAN)
    tape.drop(out)
    return made


def _brief(tape: Tape, reason: str, size: Size, source: str = BACKWARD) -> Store:
    return tape.make(op.TEMPORARY, reason, size, source)


def _before_scan(tape: Tape, of: Width) -> list[Store]:
    """Return dt and the decay summed up, states before chunks, and the last states, which nothing reads."""
    sums = _brief(tape, "dt, and the decay summed up within chunks", 8 * FILLED, FORWARD)
    own = _brief(tape, "states of chunks, in fp32", 4 * STATES, FORWARD)
    rest = [_brief(tape, "states before chunks", of * STATES, FORWARD), _brief(tape, "last states", 4 * LAST, FORWARD)]
    tape.drop(own)
    return [sums, *rest]


def _backward(joint: Value, *, only_gated: bool) -> Backward:
    of = joint.dtype

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        again = [("output of the scan, again", ROWS), ("x, B and C after the convolution, again", CONVOLVED)]
        for reason, size in again:
            tape.temporary(reason, of * size, SCAN)
        given = op.gradient(tape, joint, "gradient of the joint projection", SCAN)
        tape.temporary("gradients of x, B and C after the convolution", of * CONVOLVED, SCAN)
        tape.temporary("gradient of the output projection's input", e * ROWS, SCAN)
        if not only_gated:
            tape.temporary("gradient of the scan's output", of * ROWS, NORM)
            parts = _brief(tape, "gradients of the norm's weight, in parts", 4 * NORM_ROWS * A * I, NORM)
            _of_weight(tape, "the norm", A * I)
            tape.drop(parts)
        _scan_backwards(tape, of, only_gated=only_gated)
        if tape.mode.weights_frozen:
            tape.temporary("gradients of dt's bias, the rates of decay, and D", (8 + r) * A, BACKWARD)
        cast = _brief(tape, "input of the output projection, cast", e * ROWS) if tape.autocast and tape.is_wide(of) else None
        _of_weight(tape, "the output projection", h * A * I, wide=False)
        tape.drop(*(() if cast is None else (cast,)))
        width = A * I + 2 * J * D
        of_its_weights(tape, (width * l, width), ("", NOTHING))
        for _ in range(3 if not tape.mode.weights_frozen else 0):  # dt's bias, the decay's logarithm, and D
            tape.weight_gradient(A)
        return [(joint, given)]

    return backward


def _of_weight(tape: Tape, of: str, size: Size, *, wide: bool = True) -> None:
    """Make a weight's gradient, then cast it to the weight's dtype. That of a frozen weight ends with the operator."""
    same, trained = tape.is_wide(r) == (wide or tape.wide), not tape.mode.weights_frozen
    made = None
    if not (same and trained):
        made = _brief(tape, f"gradient of the weights of {of}, not yet cast", (4 if wide else e) * size, SCAN)
    if trained:
        tape.weight_gradient(size)
    elif not same:
        tape.temporary(f"gradient of the frozen weights of {of}", r * size, SCAN)
    if made is not None and same:
        tape.scratch.append(made)
    elif made is not None:
        tape.drop(made)


def _scan_backwards(tape: Tape, of: Width, *, only_gated: bool) -> None:
    """Run ``_mamba_chunk_scan_combined_bwd``, all of whose own tensors end with it, but the gated output."""
    held = [
        _brief(tape, reason, size)
        for reason, size in (
            ("dt, copied", of * T * A), ("dt, and the decay summed up within chunks, again", 8 * FILLED),
            ("scores of tokens within chunks, again", 4 * PAIRS),
        )
    ]  # fmt: skip
    held += _states_backwards(tape, of, only_gated=only_gated)
    terms = _brief(tape, "gradients of D from each part of a chunk", 4 * ceil(Q, 32) * CHUNKS)
    held.append(_brief(tape, "gradient of dt", 4 * FILLED))
    held.append(_brief(tape, "gradient of D", r * A))
    tape.drop(terms)
    for name in ("B", "C"):
        held.append(_brief(tape, f"gradient of the decay, from {name}", 4 * FILLED))
        held.append(_summed(tape, f"gradient of {name}", 4 * SIDE))
    held.append(_summed(tape, "gradient of the scores", 4 * PAIRS))
    with_positions = _brief(tape, "gradient of the decay, flipped", 4 * FILLED)
    total = _brief(tape, "gradient of the decay, flipped and summed up", 4 * FILLED)
    tape.drop(with_positions)
    held.append(_brief(tape, "gradient of the decay, summed up", 4 * FILLED))
    tape.drop(total)
    parts = _brief(tape, "gradient of the decay, from each part of a chunk", 4 * FILLED * ceil(Q, 32))
    held.append(_brief(tape, "gradient of the decay within chunks", 4 * FILLED))
    tape.drop(parts)
    held.append(_brief(tape, "both gradients of the decay", 4 * FILLED))
    tape.drop(*held)


def _summed(tape: Tape, reason: str, size: Size) -> Store:
    """Return a sum over the parts of a group's heads."""
    parts = _brief(tape, f"{reason}, from each part of a group's heads", size * SPLITS)
    made = _brief(tape, reason, size)
    tape.drop(parts)
    return made


def _gate_backwards(tape: Tape, of: Width) -> list[Store]:
    """Return the gradient of the scan's output before its gate, and that of D. The gated output lives to the operator's end."""
    parts = _brief(tape, "gradients of D from each part of a chunk, through the gate", 4 * ceil(Q, 32) * CHUNKS)
    tape.temporary("output of the scan times its gate, again", of * ROWS, BACKWARD)
    made = [_brief(tape, "gradient of the scan's output", e * ROWS), _brief(tape, "gradient of D, through the gate", r * A)]
    tape.drop(parts)
    return made


def _states_backwards(tape: Tape, of: Width, *, only_gated: bool) -> list[Store]:
    """Return states and their gradients in the dtype ``of``, the gradient of whole chunks' decay, and the last states."""
    own = _brief(tape, "states of chunks, in fp32, again", 4 * STATES)
    before = _brief(tape, "states before chunks, in fp32", 4 * STATES)
    last = _brief(tape, "last states, again", 4 * LAST)
    tape.drop(own)
    gate = _gate_backwards(tape, of) if only_gated else []
    wide = _brief(tape, "gradients of states, in fp32", 4 * STATES)
    narrow, is_wide = _brief(tape, "gradients of states", of * STATES), tape.is_wide(of)
    states = before if is_wide else _brief(tape, "states before chunks, again", of * STATES)
    parts = _brief(tape, "gradient of whole chunks' decay, in parts", 4 * CHUNKS * ceil(D * I, 64))
    decay = _brief(tape, "gradient of whole chunks' decay", 4 * CHUNKS)
    tape.drop(parts, wide, *(() if is_wide else (before,)))
    return [last, narrow, states, decay, *gate]

"""Mamba-2 (a state space) in the torch operators that transformers runs without ``mamba_ssm`` and ``causal-conv1d``.

Tokens are split into chunks. Within a chunk Mamba-2 is attention with a decay, a matrix per head over all pairs of tokens. A
state carries the rest from chunk to chunk. All chunks run in parallel. Everything is in fp32, except matrix products under
autocast.

Symbols are those of linear attention: the scan's C, B and x are its queries, keys and values, and a group is a head of B and C.
"""

from typing import NamedTuple, TypeAlias

from zeroplan.expr import Size, at_most
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import LLAMA_NORM
from zeroplan.transformer.families.definition import Block
from zeroplan.transformer.families.mamba_kernels import mixed
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value, Width
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params_modules import Parameters, linear, rms_norm
from zeroplan.transformer.symbols import A, D, I, J, Q, T, Z, b, e, h, l, r

GRANITE = "transformers 5.23, models/granitemoehybrid/modeling_granitemoehybrid.py"
MIXER = f"{GRANITE}, GraniteMoeHybridMambaLayer.forward"
SCAN = f"{GRANITE}, mamba2_chunk_scan"
FALCON = "transformers 5.23, models/falcon_h1/modeling_falcon_h1.py, FalconH1Mixer.forward"
SUM = f"{GRANITE}, segment_sum"
NORM = LLAMA_NORM._replace(source=f"{GRANITE}, GraniteMoeHybridRMSNormGated.forward")

#: Tokens of all sequences, padded to whole chunks; elements of x for all heads, of B or C for every head, and of the states.
FILLED = Q * b * Z
VALUES, KEYS, STATES = FILLED * A * I, FILLED * A * D, b * Z * A * D * I
#: 1 for several sequences, else 0.
SEQUENCES = at_most(1, b - 1)


def mixer(tape: Tape, normal: Value, block: Block, *, multiplied: bool = False) -> Value:
    """Run the whole mixer. Its variables hold the results of its convolution and its first projection until it returns.

    ``multiplied``: Falcon-H1's, with multipliers on its input and, in the residual stream's dtype, on its first projection. FSDP2
    leaves the latter in the dtype in which the model was loaded: fp32, or, as the kernels' output projection needs it, the compute
    dtype.
    """
    inner, side = A * I, J * D
    name, site = "input of Mamba-2, scaled", Site("joint projection of gate, x, B, C and dt", MIXER, layer="in_proj")
    entry = op.without_padding(tape, normal, MIXER, padded=block.padded)
    if multiplied:
        entry = op.scaled(tape, entry, name, FALCON)
    joint = op.linear(tape, entry, inner + inner + 2 * side + A, site)
    if multiplied:
        joint = _times_vector(tape, joint, 4 if block.casts_inputs and not block.by_kernels else r)
    if block.by_kernels:
        made = _by_kernels(tape, joint, only_gated=block.only_gated)
        tape.release(joint, entry)
        return made
    gate, bare, rates = op.chunk(tape, joint, (T * inner, T * (inner + 2 * side), T * A), Site("gate, x, B, C and dt", MIXER))
    out = op.convolution(tape, bare, inner + 2 * side, l, Site("convolution", MIXER), bias=True)
    active = op.pointwise(tape, out, "silu of the convolution", MIXER)
    tape.release(out)
    if multiplied:
        wide = op.cast(tape, active, bare.dtype, Site("silu of the convolution, in the dtype of its input", FALCON))
        tape.release(active)
        active = wide
    bare_active, active = active, op.without_padding(tape, active, MIXER, padded=block.padded)
    tape.release(bare_active, entry)
    x, keys, queries = op.chunk(tape, active, (T * inner, T * side, T * side), Site("parts x, B and C", MIXER))
    decay = _rates(tape)
    scanned = _scan(tape, (x, keys, queries, rates), decay, block)
    normed = (_gated if block.only_gated else _gated_norm)(tape, scanned, gate)
    tape.release(scanned)
    narrow = op.cast(tape, normed, r, Site("input of the output projection", MIXER))
    tape.release(normed)
    made = op.linear(tape, narrow, h, Site("output projection", MIXER, layer="out_proj"), reads=inner)
    tape.release(narrow, x, keys, queries, active, gate, bare, rates, joint)
    tape.drop(decay[1])
    return made


def _rates(tape: Tape) -> tuple[Store, Store]:
    """Return the rates of decay and their negative. Autograd saves the former for the gradient of their logarithms alone."""
    made = tape.make(op.TENSOR, "rates of decay", 4 * A, MIXER), tape.make(op.TENSOR, "rates of decay, negative", 4 * A, MIXER)
    tape.drop(*(made[:1] if tape.mode.weights_frozen else ()))
    return made


def _by_kernels(tape: Tape, joint: Value, *, only_gated: bool) -> Value:
    """Run the rest in one operator. No variable holds the rates of decay, only their negative."""
    rates = _rates(tape)
    unsaved = rates[:1] if not (tape.saving or tape.mode.weights_frozen) else ()
    tape.drop(*unsaved)
    made = mixed(tape, joint, rates, only_gated=only_gated)
    tape.drop(*(rates[1:] if tape.mode.weights_frozen or unsaved else rates))
    return made


def _times_vector(tape: Tape, joint: Value, stored: Width) -> Value:
    """Multiply by one number per channel, a buffer in the dtype in which the model is ``stored``; release ``joint``."""
    dtype, of = op.wider(tape, joint.dtype, stored), "gradient of the joint projection"
    made = op.run(tape, joint, "joint projection, scaled", FALCON, dtype=dtype, gradient=of, widened=True)
    tape.release(joint)
    return made


def _gated(tape: Tape, value: Value, gate: Value) -> Value:
    active = op.pointwise(tape, gate, "silu of the gate", FALCON)
    made = op.product(tape, value, active, "scan's output times its gate", FALCON)
    tape.release(active)
    return made


def _gated_norm(tape: Tape, value: Value, gate: Value) -> Value:
    """Multiply by SiLU of the gate in fp32, and normalise each group."""
    wide = op.cast(tape, gate, 4, Site("gate of the norm", MIXER))
    active = op.pointwise(tape, wide, "silu of the gate", MIXER)
    gated = op.product(tape, value, active, "scan's output times its gate", MIXER)
    tape.release(wide, active)
    made = op.norm(tape, gated, "norm of the scan's output", NORM, weight=A * I, rows=T * J)
    tape.release(gated)
    return made


# --- before the chunks -----------------------------------------------------------------------------------------------------


class _Chunked(NamedTuple):
    """Tensors in chunks, for every head: x times dt, A times dt, B and C."""

    x: Value
    decay: Value
    keys: Value
    queries: Value


def _scan(tape: Tape, given: tuple[Value, ...], decay: tuple[Store, Store], block: Block) -> Value:
    """Run ``mamba2_chunk_scan`` on x, B, C, dt and A. Its variables hold most of its tensors until it returns.

    ``decay``: the exponential of A's logarithm, and its negative, which is A.
    """
    step = _step(tape, given[3])
    wide = op.cast(tape, given[0], 4, Site("x", SCAN))
    keys, queries = (_for_each_head(tape, one, name) for one, name in zip(given[1:3], "BC", strict=True))
    skipped = _skipped(tape, wide)
    chunked = _in_chunks(tape, _Chunked(*_times_step(tape, wide, step, decay), keys, queries), block)
    inside, summed, *held = _inside(tape, chunked, block)
    earlier, *also_held = _from_earlier_chunks(tape, chunked, summed, block)
    added = op.add(tape, inside, earlier, "output of the scan", SCAN)
    whole = op.run(tape, added, "output of the scan, in order", SCAN)
    tape.release(added)
    made = op.add(tape, whole, skipped, "output of the scan, and x", SCAN)
    tape.release(whole)
    (cut,) = op.slices(tape, made, (T * A * I,), Site("output, cut", SCAN))
    tape.release(made, skipped, step, summed, inside, earlier, *chunked, *held, *also_held)
    return cut


def _step(tape: Tape, bare: Value) -> Value:
    """Return dt: its bias added, softplus, clamped. Autocast runs softplus in fp32."""
    raised = op.plus_bias(tape, bare, A, "dt and its bias", SCAN)
    wide = op.cast(tape, raised, 4 if tape.autocast else raised.dtype, Site("dt", SCAN))
    tape.release(raised)
    soft = op.pointwise(tape, wide, "softplus of dt", SCAN)
    tape.release(wide)
    beside = ("where no limit of dt was met", 2 * soft.shape)
    made = op.run(tape, soft, "dt", SCAN, saved=(soft,), gradient="gradient of the softplus", beside=beside)
    tape.release(soft)
    return made


def _for_each_head(tape: Tape, value: Value, name: str) -> Value:
    """Return a copy for every head of the group."""
    wide = op.cast(tape, value, 4, Site(f"{name} in fp32", SCAN))
    made = op.run(tape, wide, f"{name}, repeated for each head", SCAN, shape=T * A * D, gradient=f"gradient of {name}")
    tape.release(wide)
    return made


def _skipped(tape: Tape, x: Value) -> Value:
    """``D * x``, padded to whole chunks."""
    filled = _filled_up(tape, x, "x beside the scan", VALUES)
    unsummed = "gradient of its weight, not yet summed", 4 * VALUES, SCAN
    backward = op.in_turn(op.makes("gradient of x beside the scan", SCAN, filled), op.trains(A, unsummed=unsummed))
    saved = () if tape.mode.weights_frozen else (filled,)
    made = op.run(
        tape, filled, "x beside the scan, times its weight", SCAN, dtype=4, saved=saved, backward=backward, weights="own"
    )
    tape.release(filled)
    return made


def _times_step(tape: Tape, x: Value, step: Value, decay: tuple[Store, Store]) -> tuple[Value, Value]:
    """``x * dt`` and ``A * dt``. It releases ``x`` and ``exp(log(A))``, which autograd has saved."""
    once, again = (op.cast(tape, step, 4, Site(f"dt in fp32, for {name}", SCAN)) for name in ("x", "the decay"))
    stepped = op.times_per_row(tape, x, once, "x times dt", 4, SCAN)
    unsummed = "gradient of the rates of decay, not yet summed", 4 * T * A, SCAN
    backward = op.in_turn(op.makes("gradient of dt", SCAN, again), op.trains(A, unsummed=unsummed))
    saved = (decay[1],) if tape.mode.weights_frozen else (again.store, *decay)
    made = op.run(tape, again, "logarithms of decay", SCAN, dtype=4, saved=saved, backward=backward, weights="own")
    tape.release(x, once, again)
    tape.drop(*(() if tape.mode.weights_frozen else decay[:1]))
    return stepped, made


def _filled_up(tape: Tape, value: Value, name: str, shape: Size) -> Value:
    """``F.pad``. It copies even if it pads nothing."""
    return op.run(tape, value, f"{name}, filled up to whole chunks", SCAN, shape=shape, gradient=f"gradient of {name}")


def _in_chunks(tape: Tape, bare: _Chunked, block: Block) -> _Chunked:
    """Pad all four to whole chunks, then release the inputs. Gradients of several chunks are copied into token order."""
    names = ("x times dt", VALUES), ("logarithms of decay", FILLED * A), ("B", KEYS), ("C", KEYS)
    made = list[Value]()
    for value, (name, shape) in zip(bare, names, strict=True):
        filled = _filled_up(tape, value, name, shape)
        is_copied = block.chunks == "several" and value is not bare.decay
        made.append(_with_gradient_in_order(tape, filled, f"{name}, in chunks") if is_copied else filled)
    tape.release(*bare)
    return _Chunked(*made)


def _with_gradient_in_order(tape: Tape, value: Value, name: str) -> Value:
    """Return a view whose gradient has another memory order and is copied. It replaces ``value``."""
    (made,) = op.slices(tape, value, (value.shape,), Site(name, SCAN))
    made.strided = False
    tape.release(value)
    return made


# --- products ----------------------------------------------------------------------------------------------------------------


#: Whether an ``einsum`` copies its first factor, its second factor, and its gradient into the order that ``bmm`` reads.
_Copied: TypeAlias = tuple[bool, bool, bool]


def _einsum(tape: Tape, first: Value, second: Value, reason: str, shape: Size, copied: _Copied) -> Value:
    """Multiply two tensors. Autocast's casts of them live until the ``einsum`` returns."""
    dtype = e if tape.autocast else 4
    narrow = [
        op.cast(tape, one, dtype, Site(f"{which} factor of the {reason}", SCAN))
        for one, which in ((first, "first"), (second, "second"))
    ]
    name = f"factor of the {reason}, in order"
    ordered = [op.run(tape, one, name, SCAN) if is_copied else one for one, is_copied in zip(narrow, copied, strict=False)]
    made = op.matmul(tape, ordered[0], ordered[1], (reason, shape), Site(f"product of the {reason}", SCAN))
    tape.release(*ordered, *(one for one in narrow if one not in ordered))
    return _with_gradient_in_order(tape, made, reason) if copied[2] else made


def _segment_sum(tape: Tape, value: Value, n: Size, name: str) -> Value:
    """``exp(segment_sum(x))`` over rows of ``n``: the decay between each pair. Autograd saves both masks."""
    pairs = value.shape * n
    masks = [tape.make(op.TENSOR, f"{name}: mask, booleans", n * n, SUM) for _ in range(2)]
    spread = Value(tape.hold(value.store), 4, pairs)

    def summed_up(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        return [(value, op.gradient(tape, value, f"gradient of the {name}, summed", SUM))]

    tape.add(f"{name}: rows", (spread,), (), summed_up, of=(value,))
    of = f"gradient of the {name}"
    below = op.run(tape, spread, f"{name}: terms", SUM, shape=pairs, saved=(masks[0],), gradient=of)
    tape.release(spread)
    total = op.run(tape, below, f"{name}: sums", SUM, gradient=of, beside=("gradient flipped and summed up", 8 * pairs))
    masked = op.run(tape, total, f"{name}: logarithms", SUM, saved=(masks[1],), gradient=of)
    tape.drop(*masks)
    tape.release(below, total)
    made = op.exponential(tape, masked, name, SCAN)
    tape.release(masked)
    return made


# --- inside every chunk, and from chunk to chunk -----------------------------------------------------------------------------


def _inside(tape: Tape, given: _Chunked, block: Block) -> tuple[Value, ...]:
    """Return attention within each chunk, the cumulative decay, and other tensors that variables hold."""
    several, single = block.chunks == "several", block.chunks == "single"
    summed = op.run(
        tape, given.decay, "decay, summed up within chunks", SCAN, gradient="gradient of the decay",
        beside=("decay's gradient, flipped and summed up", 8 * FILLED * A),
    )  # fmt: skip
    decays = _segment_sum(tape, given.decay, Q, "decay between tokens")
    copied = (not single, not single, False)
    scores = _einsum(tape, given.queries, given.keys, "scores of tokens", FILLED * Q * A, copied)
    attention = op.product(tape, scores, decays, "scores, decayed", SCAN)
    made = _einsum(tape, attention, given.x, "output within chunks", VALUES, (False, several, not single))
    return made, summed, decays, scores, attention


def _from_earlier_chunks(tape: Tape, given: _Chunked, summed: Value, block: Block) -> tuple[Value, ...]:
    """Return the contribution of earlier chunks to each token, and other tensors that variables hold."""
    several, single = block.chunks == "several", block.chunks == "single"
    rest = op.run(tape, summed, "logarithms of decay to a chunk's end", SCAN, gradient="gradient of the decay to a chunk's end")
    shrinking = op.exponential(tape, rest, "decay to a chunk's end", SCAN)
    tape.release(rest)
    decayed = op.times_per_row(tape, given.keys, shrinking, "B, decayed to a chunk's end", 4, SCAN)
    own = _einsum(tape, given.x, decayed, "states of chunks", STATES, (several, not single, several))
    before, *held = _states_before(tape, own, summed, block)
    growing = op.exponential(tape, summed, "decay since a chunk's beginning", SCAN)
    copied = (not single, several, not single)
    read = _einsum(tape, given.queries, before, "output of earlier chunks, not decayed", VALUES, copied)
    made = op.times_per_row(tape, read, growing, "output of earlier chunks", 4, SCAN)
    return made, shrinking, decayed, growing, read, before, *held


def _states_before(tape: Tape, own: Value, summed: Value, block: Block) -> tuple[Value, ...]:
    """Return each chunk's first state, and the variables' tensors. It releases ``own``."""
    chunks, of_a_chunk = Z + 1, A * D * I
    first = Value(
        tape.make(op.TENSOR, "state before the first chunk", own.dtype * b * of_a_chunk, SCAN), own.dtype, b * of_a_chunk
    )
    states = op.joined(tape, (own,), "states of chunks, after a first one", b * chunks * of_a_chunk, SCAN)
    tape.release(own)
    (last,) = op.slices(tape, summed, (b * A * Z,), Site("decay of whole chunks", SCAN))
    filled = op.run(
        tape, last, "decay of whole chunks, after a first one", SCAN, shape=b * A * chunks,
        gradient="gradient of the decay of whole chunks",
    )  # fmt: skip
    tape.release(last)
    decays = _segment_sum(tape, filled, chunks, "decay between chunks")
    tape.release(filled)
    is_copied = block.chunks != "single"
    carried = _einsum(tape, decays, states, "states after chunks", b * chunks * of_a_chunk, (False, is_copied, is_copied))
    tape.release(states)
    (before,) = op.slices(tape, carried, (STATES,), Site("states before chunks", SCAN))
    tape.release(carried)
    return before, first, decays


# --- parameters ----------------------------------------------------------------------------------------------------------------


def of_mixer(model: ModelSpec, name: str, *, normed: bool = True) -> Parameters:
    """Return the parameters of the mixer ``name``, whose output may have a norm."""
    assert model.linear is not None  # noqa: S101  these families always have it
    own, hidden = model.linear, model.hidden_size
    inner = own.num_value_heads * own.value_head_dim
    through = inner + 2 * own.num_key_heads * own.key_head_dim
    return (
        *(Parameter(f"{name}.{one}", (own.num_value_heads,)) for one in ("dt_bias", "A_log", "D")),
        Parameter(f"{name}.conv1d.weight", (through, 1, own.conv_kernel_dim), autocast=True),
        Parameter(f"{name}.conv1d.bias", (through,), autocast=True),
        *linear(f"{name}.in_proj", hidden, inner + through + own.num_value_heads),
        *(rms_norm(f"{name}.norm", inner) if normed else ()),
        *linear(f"{name}.out_proj", inner, hidden),
    )

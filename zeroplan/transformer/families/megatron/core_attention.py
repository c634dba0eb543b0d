"""Core attention of a Megatron-Core layer: a kernel, or scores, softmax and dropout one by one; also in its own checkpoint."""

from zeroplan.expr import NOTHING, Size
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.megatron.sources import CORE
from zeroplan.transformer.families.megatron.structure import Layer
from zeroplan.transformer.families.megatron.symbols import P_m, P_s, S_r, T_c, T_m, a_r, c_r, k_r, q_r, v_r
from zeroplan.transformer.families.tags import STATISTICS
from zeroplan.transformer.families.tape import Arriving, Backward, Site, Store, Tape, Value, Width
from zeroplan.transformer.symbols import e

CAUSAL = f"{CORE}/transformer/utils.py, get_default_causal_mask"
CHECKPOINT = f"{CORE}/transformer/attention.py, _checkpointed_attention_forward"
UNFUSED = "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/backends.py, UnfusedDotProductAttention.forward"
SOFTMAX = f"{CORE}/fusions/fused_softmax.py, FusedScaleMaskSoftmax.forward_torch_softmax"
MASKED = "torch 2.13, torch/csrc/autograd/functions/tensor.cpp, CopySlices::apply_impl"
FLASH = "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/backends.py, FlashAttention.forward"
FUSED = "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/backends.py, FusedAttnFunc.forward"
EXCHANGED = (
    "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndQKVOA2A.forward"
)


def core(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Core attention without a checkpoint: written out for ``eager``, otherwise by a kernel."""
    return _written_out(tape, joint, structure) if structure.attention == "eager" else _kernel(tape, joint, structure)


def _kernel(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Attention by cuDNN or FlashAttention. FlashAttention's output has sequences first, and is copied for the projection.

    If context-parallel ranks exchange heads, cuDNN also keeps its output from before the exchange.
    """
    flash = structure.attention == "flash"
    source = FLASH if flash else FUSED
    reason = "attention output before heads are exchanged"
    before = (tape.make(op.TENSOR, reason, e * T_c * c_r, EXCHANGED),) if structure.exchanged and not flash else ()
    made = op.tensor(tape, "attention output", e, T_m * c_r, source)
    kept = tape.make(op.TENSOR, "sums of exponentials, fp32", 4 * T_m * a_r, source, STATISTICS)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.temporary("gradient of the queries, added up in fp32", 4 * T_m * q_r, source)
        return [(joint, op.gradient(tape, joint, "gradient of queries, keys and values", source))]

    tape.add("attention", (made,), (joint.store, made.store, kept, *before), backward, of=(joint,))
    tape.drop(kept, *before)
    if not flash:
        return made
    made.store.reason = "FlashAttention's own result, beside the reordered one"
    ordered = op.tensor(tape, "attention output", e, T_m * c_r, source)
    tape.add("order of the output", (ordered,), (), op.makes("gradient in the kernel's order", source, made), of=(made,))
    tape.release(made)
    return ordered


def _written_out(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Unfused attention: scores, softmax, dropout and the product with the values are separate tensors."""
    site = Site("queries and keys, and values", UNFUSED)
    pairs, values = op.chunk(tape, joint, (T_m * (q_r + k_r), T_m * v_r), site)
    return scored(tape, (pairs,), values, S_r, structure, masked=P_m if structure.padded else None)


def scored(
    tape: Tape, pairs: tuple[Value, ...], values: Value, numbers: Size, structure: Layer, *, masked: Size | None
) -> Value:  # fmt: skip
    """Attention over queries and keys with ``numbers`` scores. Releases its inputs."""
    again: list[Store] = []
    soft, scores = _softmax(tape, pairs, numbers, structure, again)
    soft = soft if masked is None else _without_padding(tape, soft, masked)
    dropped = _dropped(tape, soft) if structure.attention_dropout else soft
    raw = op.tensor(tape, "attention output, heads first", e, T_m * c_r, UNFUSED)
    backward = op.makes("gradient of a factor of the context", UNFUSED, values, dropped)
    tape.add("context", (raw,), (dropped.store, values.store), backward, of=(dropped, values))
    tape.release(*pairs, values, dropped)
    made = op.tensor(tape, "attention output", e, T_m * c_r, UNFUSED)
    tape.add("order of the context", (made,), (), _made_again(raw, again, structure), of=(raw,))
    tape.release(raw, scores)
    return made


def _made_again(raw: Value, again: list[Store], structure: Layer) -> Backward:
    """Return the context's backward. A checkpoint keeps the recomputed output and its gradient until its backward ends."""

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        if runs_core_again(structure):
            again.append(
                tape.make(op.TEMPORARY, "attention output, made again, and its gradient", 2 * e * T_m * c_r, CHECKPOINT)
            )
        return [(raw, op.gradient(tape, raw, "gradient of the context, heads first", UNFUSED))]

    return backward


def _softmax(
    tape: Tape, pairs: tuple[Value, ...], numbers: Size, structure: Layer, again: list[Store]
) -> tuple[Value, Value]:  # fmt: skip
    """Return the softmax, and the scores before it, which a local variable keeps alive.

    The product of queries and keys adds to a tensor: a new one in Transformer Engine, a persistent buffer in Megatron.
    """
    buffer = tape.make(op.TEMPORARY, "what scores are added to", NOTHING if structure.local else e * numbers, UNFUSED)
    raw = op.tensor(tape, "scores", e, numbers, UNFUSED)
    tape.drop(buffer)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.drop(*again)
        return [(pair, op.gradient(tape, pair, "gradient of queries and keys", UNFUSED)) for pair in pairs]

    tape.add("scores", (raw,), tuple([pair.store for pair in pairs]), backward, of=pairs)
    dtype: Width = 4 if structure.wide_softmax else e
    mask = _causal_mask(tape) if structure.makes_mask else ()
    masked = _masked(tape, raw, mask) if structure.masks_in_place and not structure.wide_softmax else raw
    read = op.cast(tape, masked, dtype, Site("scores", SOFTMAX))
    if masked is not raw:
        tape.release(masked)
    soft = op.tensor(tape, "attention scores", dtype, numbers, SOFTMAX)
    written_over = structure.local and not structure.masks_in_place  # the fused kernel overwrites the incoming gradient
    through = op.same_gradient(read) if written_over else op.makes("gradient of the scores", SOFTMAX, read)
    tape.add("softmax", (soft,), (soft.store, *mask), through, of=(read,))
    tape.drop(*mask)
    tape.release(read)
    if not structure.wide_softmax:
        return soft, raw
    narrow = op.cast(tape, soft, e, Site("attention scores", SOFTMAX))
    tape.release(soft)
    return narrow, raw


def _causal_mask(tape: Tape) -> tuple[Store]:
    """Return the causal mask, one byte per pair. Megatron makes it from fp32 ones and their upper half."""
    wide = tape.make(op.TEMPORARY, "ones of the causal mask, and their upper half", 8 * P_s, CAUSAL)
    made = tape.make(op.TENSOR, "causal mask", P_s, CAUSAL)
    tape.drop(wide)
    return (made,)


def _without_padding(tape: Tape, soft: Value, pairs: Size) -> Value:
    """``masked_fill`` after the softmax. It returns a new tensor, and keeps the mask."""
    mask = tape.make(op.TENSOR, "mask of padding", pairs, UNFUSED)
    made = op.tensor(tape, "attention scores without padding", e, soft.shape, UNFUSED)
    backward = op.makes("gradient of the scores without padding", UNFUSED, soft)
    tape.add("mask of padding", (made,), (mask,), backward, of=(soft,))
    tape.drop(mask)
    tape.release(soft)
    return made


def _masked(tape: Tape, raw: Value, mask: tuple[Store, ...]) -> Value:
    """``masked_fill_`` on a view. Its backward makes two copies of the whole gradient beside the new one (CopySlices)."""
    made = Value(tape.hold(raw.store), raw.dtype, raw.shape)
    beside = ("gradient of the scores, copied for the mask", 2 * e * raw.shape)
    tape.add(
        "mask of the scores",
        (made,),
        mask,
        op.makes("gradient of the scores before the mask", MASKED, raw, beside=beside),
        of=(raw,),
    )
    return made


def _dropped(tape: Tape, soft: Value) -> Value:
    made = op.tensor(tape, "attention scores after dropout", e, soft.shape, UNFUSED)
    mask = tape.make(op.TENSOR, "mask of the attention scores", soft.shape, UNFUSED)
    tape.add("dropout of scores", (made,), (mask,), op.makes("gradient through the scores' dropout", UNFUSED, soft), of=(soft,))
    tape.drop(mask)
    tape.release(soft)
    return made


def run_again(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Core attention in its own checkpoint, which keeps queries, keys and values."""
    kept, passing = _of_core(structure)
    forward = tape.make(op.TEMPORARY, "what core attention's forward makes and frees again", kept + passing, CHECKPOINT)
    made = op.tensor(tape, "attention output", e, T_m * c_r, CHECKPOINT)
    tape.drop(forward)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.temporary("what core attention keeps, made again", kept + e * T_m * c_r, CHECKPOINT)
        tape.temporary("gradients within core attention", passing, CHECKPOINT)
        return [(joint, op.gradient(tape, joint, "gradient of queries, keys and values", CHECKPOINT))]

    tape.add("core attention, run again", (made,), (joint.store,), backward, of=(joint,))
    return made


def _of_core(structure: Layer) -> tuple[Size, Size]:
    """Return what core attention keeps beside its input and output, and its temporaries at the peak. [bytes]"""
    if structure.attention != "eager":
        flash = structure.attention == "flash"
        again = e * T_m * c_r if flash else e * T_c * c_r if structure.exchanged else NOTHING
        return again + 4 * T_m * a_r, 4 * T_m * q_r
    soft = 4 if structure.wide_softmax else e
    return ((soft + e + 1) * S_r if structure.attention_dropout else soft * S_r), soft * S_r


def runs_core_again(structure: Layer) -> bool:
    """Whether core attention of a local layer has its own checkpoint."""
    return structure.local and "core_attn" in structure.again_too

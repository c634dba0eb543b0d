"""Core attention of a Megatron-Core layer: a kernel, or scores, softmax and dropout one by one; also in its own checkpoint."""

from zeroplan.expr import NOTHING, Size
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.megatron.sources import CORE
from zeroplan.transformer.families.megatron.structure import Layer
from zeroplan.transformer.families.megatron.symbols import P_m, P_s, S_r, T_c, T_m, a_r, c_r, k_r, q_r, v_r
from zeroplan.transformer.families.tags import STATISTICS
from zeroplan.transformer.families.tape import Arriving, Backward, Part, Site, Store, Tape, Value, Width
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
    summed = "gradient of the queries, added up in fp32", 4 * T_m * q_r
    backward = op.makes("gradient of queries, keys and values", source, joint, beside=summed)
    tape.add("attention", (made,), (joint.store, made.store, kept, *before), backward, of=(joint,))
    tape.drop(kept, *before)
    if not flash:
        return made
    made.store.reason = "FlashAttention's own result, beside the reordered one"
    site = Site("order of the output", source)
    ordered = op.run(tape, made, "attention output", site, gradient="gradient in the kernel's order")
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
    part = Part("core_attn")
    with tape.within(part):
        soft, scores = _softmax(tape, pairs, numbers, structure, again)
        soft = soft if masked is None else _without_padding(tape, soft, masked)
        dropped = _dropped(tape, soft) if structure.attention_dropout else soft
        raw = op.run(
            tape, (values, dropped), "attention output, heads first", Site("context", UNFUSED), shape=T_m * c_r,
            saved=(dropped.store, values.store), gradient="gradient of a factor of the context",
        )  # fmt: skip
    tape.release(*pairs, values, dropped)
    made = op.run(
        tape, raw, "attention output", Site("order of the context", UNFUSED), backward=_made_again(raw, again, structure)
    )
    tape.end(part)
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
    copies = "gradient of the scores, copied for the mask", 2 * e * raw.shape
    backward = op.makes("gradient of the scores before the mask", MASKED, raw, beside=copies)
    tape.add("mask of the scores", (made,), mask, backward, of=(raw,))
    return made


def _dropped(tape: Tape, soft: Value) -> Value:
    mask, site = ("mask of the attention scores", soft.shape), Site("dropout of scores", UNFUSED)
    of = "gradient through the scores' dropout"
    made = op.run(tape, soft, "attention scores after dropout", site, dtype=e, keeps=(mask,), gradient=of)
    tape.release(soft)
    return made


def run_again(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Core attention in its own checkpoint, which keeps queries, keys and values."""
    kept, passing = _of_core(structure)
    again = "what core attention keeps, made again", kept + e * T_m * c_r
    backward = op.in_turn(
        op.needs(CHECKPOINT, again, ("gradients within core attention", passing)),
        op.makes("gradient of queries, keys and values", CHECKPOINT, joint),
    )
    return op.run(
        tape, joint, "attention output", Site("core attention, run again", CHECKPOINT), shape=T_m * c_r,
        passing=(("what core attention's forward makes and frees again", kept + passing),), saved=(joint.store,),
        backward=backward,
    )  # fmt: skip


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

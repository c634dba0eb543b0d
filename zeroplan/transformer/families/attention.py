"""Attention from queries, keys and values to its output: the kernels of ``scaled_dot_product_attention``, and eager attention.

With several sequences in a batch, a batched matrix product copies operands that are not contiguous. Autograd saves the copy
instead of the original, so only Python variables keep the original alive.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from zeroplan.expr import Size, at_least, at_most, ceil
from zeroplan.ledger import PLAIN, Kind
from zeroplan.spec.family import families
from zeroplan.spec.releases import Release
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.operators import TEMPORARY, TENSOR, Factor, cast, factors, makes, run, tensor
from zeroplan.transformer.families.tags import CUDA_ALONE, FLASH_BACKWARD, FLASH_SCRATCH, SCRATCH, TWICE_ON_CPU
from zeroplan.transformer.families.tape import Arriving, Beside, Saved, Site, Store, Tape, Value, Width
from zeroplan.transformer.symbols import T, a, b, c, c_a, d, e, k_d, q, r, s, y

SDPA = "transformers 5.23, integrations/sdpa_attention.py, sdpa_attention_forward"
FLASH_2 = "transformers 4.45.2, models/mistral/modeling_mistral.py, MistralFlashAttention2.forward"
EAGER = "transformers 5.23, models/llama/modeling_llama.py, eager_attention_forward"
GPT2 = "transformers 5.23, models/gpt2/modeling_gpt2.py, eager_attention_forward"
FALCON = "transformers 5.23, models/falcon/modeling_falcon.py, FalconAttention.forward"
LLAMA_4 = "transformers 5.23, models/llama4/modeling_llama4.py, eager_attention_forward"
SINKS = "transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward"
CHOICE = "torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, can_use_mem_efficient_attention"
UNPADDED = "transformers 5.23, modeling_flash_attention_utils.py, _flash_attention_forward"
FILLED = "torch 2.13, aten/src/ATen/native/transformers/attention.cpp, pad_last_dim"
MATH = "torch 2.13, aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math"
FLEX_BACKWARD = "torch 2.13, _inductor/kernel/flex/flex_attention.py, flex_attention_backward"
EFFICIENT_BACKWARD = "torch 2.13, aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, workspace_size"


HeadSize = Literal["small", "middle", "large"]
"""Up to 64, up to 128 and beyond: the kernels that CUDA has for a head."""


#: Largest head of the flash kernel; ``integrations/sdpa_attention.py``, ``use_gqa_in_sdpa``, of transformers 5.23 has the same
#: limit.
WIDEST_OF_FLASH = 256


def head_size(widest: int) -> HeadSize:
    """Return the size class of a head whose queries or values, whichever are wider, have ``widest`` elements."""
    return "small" if widest <= 64 else "middle" if widest <= 128 else "large"


class Heads(NamedTuple):
    """Queries, keys and values before attention, and their layout in memory."""

    query: Value
    key: Value
    value: Value
    grouped: bool
    """Several query heads share a key/value head."""
    one_key: bool
    """There is a single key/value head, so repeating it makes a view."""
    joined: bool = False
    """Rotary positions copied queries and keys head by head, so they are contiguous."""
    keys_joined: bool = False
    """The keys are contiguous in any case."""
    joint: bool = False
    """The values are a view of a joint projection's output."""
    repeated: bool = False
    """Keys and values were repeated for each query head. Copies of these are laid out head by head."""


class Attended(NamedTuple):
    """Attention's output, and the attention weights of eager attention."""

    context: Value
    weights: Value | None = None


Attend = Callable[[Tape, Heads], Attended]

# --- kernels of scaled_dot_product_attention ---------------------------------------------------------------------------------


def flash(tape: Tape, heads: Heads, *, size: HeadSize = "small") -> Attended:
    """Run the flash kernel, which does not repeat keys and values for grouped heads.

    Its output has the layout of the queries. If these are laid out head by head, a copy of the output is in token order. The
    kernel saves the output, and the output projection saves the copy.
    """
    operands = _cast_heads(tape, heads.query, heads.key, heads.value)
    copied = heads.joined or tape.offloading
    scratch = (FLASH_SCRATCH, flash_scratch(size, grouped=heads.grouped, copied=copied), FLASH_BACKWARD)
    made = _kernel(tape, heads, operands, scratch, copied=heads.joined)
    return Attended(in_order_of_tokens(tape, made, "attention output in the order of tokens") if heads.joined else made)


def flex(tape: Tape, heads: Heads) -> Attended:
    """Run FlexAttention's compiled kernel. It keeps what flash attention keeps; its backward makes a sum per row first."""
    operands = _cast_heads(tape, heads.query, heads.key, heads.value)
    scratch = ("sums of the rows of output times gradient, fp32 (CUDA)", 4 * T * a, FLEX_BACKWARD)
    return Attended(_kernel(tape, heads, operands, scratch))


def flash_of_filled(tape: Tape, heads: Heads, *, size: HeadSize) -> Attended:
    """Run the flash kernel on copies whose heads are padded to a multiple of 8 elements, and cut its output to their size."""
    bare, head = _cast_heads(tape, heads.query, heads.key, heads.value), 8 * ceil(d, 8)
    rows = (("queries", a), ("keys", k_d), ("values", k_d))
    filled = [
        op.run(
            tape, one, f"{name}, heads filled up", FILLED, shape=T * number * head,
            gradient=f"gradient of the {name}",
        )
        for one, (name, number) in zip(bare, rows, strict=True)
    ]  # fmt: skip
    scratch = (FLASH_SCRATCH, flash_scratch(size, grouped=heads.grouped, copied=True, width=a * head), FLASH_BACKWARD)
    operands = (filled[0], filled[1], filled[2])
    made = _kernel(tape, heads._replace(joined=True), operands, scratch, copied=True, width=a * head)
    tape.release(*bare)
    return Attended(in_order_of_tokens(tape, made, "attention output, cut", of="gradient of the output, filled up"))


def flash_with_padding(tape: Tape, heads: Heads, *, size: HeadSize) -> Attended:
    """Run the flash kernel on copies without the padding, and put its output where the tokens were.

    Counts as many tokens without padding as with it.
    """
    bare = _cast_heads(tape, heads.query, heads.key, heads.value)
    places = tape.make(TENSOR, "places of the tokens that are no padding, int64", 8 * T, UNPADDED)
    query, key, value = (
        run(
            tape, one, f"{name} without padding", UNPADDED, saved=(places,),
            gradient=f"gradient of the {name}",
        )
        for one, name in zip(bare, ("queries", "keys", "values"), strict=True)
    )  # fmt: skip
    scratch = (FLASH_SCRATCH, flash_scratch(size, grouped=heads.grouped), FLASH_BACKWARD)
    made = _kernel(tape, heads, (query, key, value), scratch, copied=True)
    tape.release(*bare)
    padded = run(
        tape, made, "attention output with padding, input of the output projection", UNPADDED, saved=(places,),
        gradient="gradient of the attention output without padding",
    )  # fmt: skip
    tape.drop(places)
    tape.release(made)
    return Attended(padded)


def efficient(tape: Tape, heads: Heads, *, size: HeadSize) -> Attended:
    """Run CUDA's memory-efficient kernel, which supports fp32. Its output is in token order."""
    operands = _cast_heads(tape, heads.query, heads.key, heads.value)
    return Attended(_kernel(tape, heads, operands, _scratch(tape, size), padded=True, twice=heads.joined))


def of_repeated(tape: Tape, heads: Heads, *, kernel: Attend) -> Attended:
    """Run a kernel on keys and values that transformers has repeated for each query head."""
    key, value = _repeated(tape, heads, SDPA)
    made = kernel(tape, heads._replace(key=key, value=value, grouped=False, one_key=False, repeated=heads.grouped))
    if heads.grouped:
        tape.release(key, value)
    return made


def of_a_release(tape: Tape, heads: Heads, *, release: Release, kernel: Attend) -> Attended:
    """Run the kernel on the copies that an older release of transformers makes for it. They live until the kernel has run.

    A repeated single key/value head is a view, which ``contiguous()`` copies for each query head.
    Source: transformers 4.48.1 and 4.55.0, integrations/sdpa_attention.py, sdpa_attention_forward; 4.45.2,
    LlamaSdpaAttention.forward.
    """
    query, key, value = heads.query, heads.key, heads.value
    copies, repeats = [], heads.grouped and (release.repeats_keys or release.masks_all)
    if repeats:
        key, value = _repeated(tape, heads, SDPA)
        copies += [key, value]
    if release.copies_heads:
        copied = repeats and not heads.one_key
        query = _contiguous(tape, query, "queries")
        copies.append(query)
        if not copied:
            key, value = _contiguous(tape, key, "keys"), _contiguous(tape, value, "values")
            copies += [key, value]
    grouped = heads.grouped and not repeats
    made = kernel(tape, Heads(query, key, value, grouped, heads.one_key and grouped, joined=release.copies_heads))
    tape.release(*copies)
    return made


def flash_of_repeated(tape: Tape, heads: Heads, *, size: HeadSize) -> Attended:
    """Run the flash kernel on keys and values that were repeated for each query head.

    Source: transformers 4.45.2, models/mistral/modeling_mistral.py, MistralFlashAttention2.forward.
    """
    key, value = _repeated(tape, heads, FLASH_2)
    made = flash(tape, Heads(heads.query, key, value, grouped=False, one_key=False), size=size)
    tape.release(key, value)
    return made


def _contiguous(tape: Tape, value: Value, name: str) -> Value:
    """Copy heads from token order to head order, as ``contiguous()`` does."""
    return run(tape, value, f"{name}, copied head by head", SDPA)


def with_mask(tape: Tape, heads: Heads, *, size: HeadSize) -> Attended:
    """Run CUDA's memory-efficient kernel with an explicit mask; keys and values are repeated for grouped heads.

    The model passes a boolean mask. Each layer converts it to numbers, in rows padded to 16 elements, and saves them.
    """
    key, value = _repeated(tape, heads, SDPA)
    operands = _cast_heads(tape, heads.query, key, value)
    mask = tape.make(TENSOR, "mask in numbers, rows of 16", 16 * e * b * s * ceil(s, 16), SDPA)
    tape.drop(tape.make(TEMPORARY, "mask, inverted", b * s * s, SDPA))
    unfilled = e * b * s * s * at_most(1, 16 * ceil(s, 16) - s)
    tape.drop(tape.make(TEMPORARY, "mask in numbers, its rows not yet filled up", unfilled, SDPA))
    made = _kernel(tape, heads, operands, _scratch(tape, size), mask, padded=True, twice=heads.joined)
    tape.drop(mask)
    if heads.grouped:
        tape.release(key, value)
    return Attended(made)


def with_numbers(tape: Tape, heads: Heads, *, size: HeadSize, keys: Size = s) -> Attended:
    """Run the memory-efficient kernel with a mask in numbers of the weights' dtype, which the model makes once (Llama 3.2 Vision).

    ``keys``: of a sequence. A layer copies the mask if autocast casts it, or to fill up rows of other than 16 elements.
    """
    operands = _cast_heads(tape, heads.query, heads.key, heads.value)
    filled, unfilled, rest = 16 * e * b * s * ceil(keys, 16), e * b * s * keys, at_most(1, 16 * ceil(keys, 16) - keys)
    cast_too = tape.is_wide(r) and not tape.is_wide(e)
    if cast_too:
        before = tape.make(TEMPORARY, "mask in numbers, cast, its rows not yet filled up", unfilled * rest, SDPA)
    mask = tape.make(TENSOR, "mask in numbers, rows of 16", filled if cast_too else filled * rest, SDPA)
    if cast_too:
        tape.drop(before)
    made = _kernel(tape, heads, operands, _scratch(tape, size), mask, padded=True, twice=heads.joined)
    tape.drop(mask)
    return Attended(made)


Scratch = tuple[str, Size, str]
"""Reason, size and source of the workspace of a kernel's backward."""


def _kernel(
    tape: Tape,
    heads: Heads,
    operands: tuple[Value, Value, Value],
    scratch: Scratch,
    *extra: Store,
    padded: bool = False,
    copied: bool = False,
    twice: bool = False,
    width: Size = c,
) -> Value:
    """Run one kernel. Autograd saves its operands, its output and a log-sum-exp per row, which some kernels pad to rows of 32."""
    reason = "attention output" if copied else "attention output, input of the output projection"
    made = tensor(tape, f"{reason}, twice on a CPU" if twice else reason, e, T * width, SDPA, TWICE_ON_CPU if twice else PLAIN)
    filled = 128 * a * b * ceil(s, 32)
    in_one = filled if padded and tape.offloading else 4 * T * a
    sums = [tape.make(TENSOR, "log-sum-exp of the scores, fp32", in_one, SDPA)]
    if padded and not tape.offloading:
        padding = filled - 4 * T * a
        sums.append(tape.make(TENSOR, "rows that fill up log-sum-exp, on CUDA", padding, CHOICE, CUDA_ALONE))

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        arriving = [(one, op.gradient(tape, one, "gradients of q, k and v", SDPA)) for one in operands]
        tape.temporary(*scratch, SCRATCH)
        return arriving

    query, key, value = operands
    by_token = () if heads.joined else (query, key), () if heads.one_key else (value,), () if copied else (made,)
    strided = tuple([one for some in by_token for one in some if not (heads.one_key and one is key)])
    # The mask is one view for all heads; its copy in host memory has one per head.
    beside = tuple([Beside("mask in numbers, for each head", e * a * T * s, strided=True) for _ in extra if tape.offloading])
    saved: Saved = (*operands, made, *sums, *(() if beside else extra))
    tape.add("attention", (made,), saved, backward, of=operands, strided=strided, beside=beside)
    tape.kernel_output(made.store, *sums)
    tape.drop(*sums)
    tape.release(*operands)
    return made


def _scratch(tape: Tape, size: HeadSize) -> Scratch:
    reason = "scratch of the memory-efficient attention kernel's backward (CUDA)"
    return reason, efficient_scratch(size, half=not tape.wide), EFFICIENT_BACKWARD


def efficient_scratch(size: HeadSize, *, half: bool) -> Size:
    """Return the workspace inside the memory-efficient kernel's backward on CUDA. [bytes]

    It holds blocks of the queries' gradient in fp32, each with 16 bytes beside it, for large heads blocks of the keys' and values'
    gradients, and a sum per row. In fp32 torch makes the sums first, from the product of output and gradient. Blocks are those of
    GPUs with 163 KiB of shared memory (compute capability 8.0, 9.0, 10.0). Other GPUs use smaller ones for heads beyond 64.
    """
    rows, keys = {"small": (64, 64), "middle": (128, 128 if half else 64), "large": (128, 64)}[size]
    workspace = 4 * a * b * ceil(s, rows) * ceil(d, keys) * (rows * keys + 4)
    if size == "large" and half:
        workspace = workspace + 4 * a * b * y * (keys * rows) * (ceil(d, rows) + ceil(c_a, rows))
    sums = 4 * T * a
    if half:
        return sums + workspace
    before = 4 * T * c + 2 * sums
    return before + at_least(0, sums + workspace - before)


def flash_scratch(size: HeadSize, *, grouped: bool, copied: bool = False, width: Size = q) -> Size:
    """Return the workspace inside the flash kernel's backward on CUDA. [bytes]

    It holds the queries' gradients in fp32 and a sum per row. The kernel pads heads to a multiple of 32, and heads beyond 128
    to a multiple of 64. Grouped heads add gradients of keys and values per query head. ``copied``: the output is not in token
    order, so the backward copies it.
    """
    filled = 64 if size == "large" else 32
    grad_outputs = 512 * a * b * ceil(s, 128) * (filled * ceil(d, filled) + 1)
    if grouped:
        grad_outputs = grad_outputs + 2 * e * T * width
    return grad_outputs + e * T * (c if width is q else width) if copied else grad_outputs


def _cast_heads(tape: Tape, query: Value, key: Value, value: Value) -> tuple[Value, Value, Value]:
    return (
        cast(tape, query, e, Site("queries", SDPA)),
        cast(tape, key, e, Site("keys", SDPA)),
        cast(tape, value, e, Site("values", SDPA)),
    )


def in_order_of_tokens(tape: Tape, value: Value, reason: str, *, of: str = "") -> Value:
    """``transpose(1, 2).contiguous()`` if that copies. It releases ``value``. The gradient is a view, else named ``of``."""
    shape = T * c if of else None
    made = run(tape, value, f"{reason}, input of the output projection", SDPA, shape=shape, gradient=of)
    tape.release(value)
    return made


# --- attention in single operators -------------------------------------------------------------------------------------------


def eager(
    tape: Tape, heads: Heads, *, source: str = EAGER, capped: bool = False, sinks: bool = False, narrow: bool = False
) -> Attended:  # fmt: skip
    """Run eager attention. It repeats keys and values for grouped heads, and autograd saves the scores' softmax.

    ``capped``: ``tanh`` caps the scores before the mask (Gemma 2). ``sinks``: each head adds one learned score (gpt-oss).
    ``narrow``: the softmax stays in the dtype of the scores (Llama 4).
    """
    copies = Copies([], [])
    key, value = _repeated(tape, heads, source)
    in_order, one_key = heads.grouped or heads.joined or heads.keys_joined, heads.one_key and heads.grouped
    operands = (
        _operand(tape, heads.query, copies, Site("queries", source), contiguous=heads.joined),
        _operand(tape, key, copies, Site("keys", source), contiguous=in_order, copied_for_several=one_key),
    )
    scores = _scores(tape, operands, copies, Site("attention: scores", source), capped=capped)
    if sinks:
        weights, named = _softmax_with_sinks(tape, scores, value.dtype)
    elif narrow:
        site = Site("attention: softmax", source)
        weights, named = op.pointwise(tape, scores, "softmax of the scores", site, saves_result=True), ()
    else:
        weights, named = softmax(tape, scores, heads.query.dtype, source), ()
    tape.release(scores)
    context = _weighted_values(tape, weights, value, copies, heads, source)
    tape.release(*named)
    if heads.grouped:
        tape.release(key, value)
    return Attended(context, weights)


def in_32_bits(tape: Tape, heads: Heads, *, has_mask: bool = False, broadcast: bool = False) -> Attended:
    """Run torch's attention in fp32 operators, for heads that no kernel supports. ``has_mask``: the model passes a boolean mask.

    On CUDA these are grouped heads in fp32, before compute capability 8.0 also heads in bf16 and grouped heads in fp16, on a CPU
    heads of two sizes in any dtype. It multiplies queries, and keys repeated for each query head, by the root of the scale.
    ``broadcast``: both products broadcast a single key/value head to all query heads. Leaves out the temporaries of
    ``_safe_softmax``.
    """
    names = ("queries", "keys", "values")
    copies, operands = Copies([], []), _cast_heads(tape, heads.query, heads.key, heads.value)
    bare = query_32, *by_key = [
        cast(tape, one, 4, Site(f"{name}, fp32", MATH)) for name, one in zip(names, operands, strict=True)
    ]
    query = _multiplied(tape, query_32, "queries, scaled")
    mask = _in_numbers(tape) if has_mask else _causal(tape)
    if heads.grouped:
        by_key = [_cloned(tape, one, name) for name, one in zip(names[1:], by_key, strict=True)]
    key = _multiplied(tape, by_key[0], "keys, repeated and scaled" if heads.grouped else "keys, scaled")
    scores = _scores_in_32_bits(tape, heads, query, key, copies, broadcast=broadcast)
    with_mask = masked(tape, scores, Site("attention: scores", MATH))
    tape.release(scores)
    weights = softmax(tape, with_mask, 4, MATH)
    tape.release(with_mask)
    unused = tape.make(
        TEMPORARY, "attention weights in 16 bits, which nothing reads", (e * at_most(1, 4 - e)) * a * T * s, MATH
    )
    beside_keys = heads.joint and by_key[1].store is heads.value.store
    value = _operand(
        tape, _broadcast(tape, by_key[1], "values") if broadcast else by_key[1], copies, Site("values", MATH),
        contiguous=heads.grouped or heads.repeated, dtype=4, copied_for_several=beside_keys or broadcast,
    )  # fmt: skip
    made = _product(tape, ((weights, (weights,)), value), copies, "attention output, head by head", T * c, MATH)
    narrow = cast(tape, made, e, Site("attention output, head by head", MATH))
    tape.release(made, weights, *(by_key if heads.grouped else ()), query, *bare, *operands)
    tape.drop(unused, mask)
    return Attended(in_order_of_tokens(tape, narrow, "attention output"))


def _causal(tape: Tape) -> Store:
    """Make the causal mask with ``ones``, ``tril`` and ``where``: first as booleans, then as numbers."""
    ones, booleans = (tape.make(TEMPORARY, f"{name} of the causal mask", s * s, MATH) for name in ("ones", "booleans"))
    tape.drop(ones)
    mask = tape.make(TEMPORARY, "causal mask in numbers", 4 * s * s, MATH)
    tape.drop(booleans)
    return mask


def _in_numbers(tape: Tape) -> Store:
    """Convert a boolean mask to numbers."""
    inverted = tape.make(TEMPORARY, "mask, inverted", b * s * s, MATH)
    mask = tape.make(TEMPORARY, "mask in numbers", e * b * s * s, MATH)
    tape.drop(inverted)
    return mask


def _multiplied(tape: Tape, value: Value, reason: str) -> Value:
    return op.multiplied(tape, value, reason, MATH)


def _cloned(tape: Tape, value: Value, name: str) -> Value:
    """``repeat_interleave``: a copy for each query head, even of a single key/value head."""
    return run(tape, value, f"{name}, repeated for each query head", MATH, shape=T * q, gradient=f"gradient of the {name}")


def of_one_tensor(tape: Tape, heads: Heads) -> Attended:
    """Run GPT-2's eager attention. Queries, keys and values are views of one tensor.

    With several sequences autograd saves copies of the views. The softmax stays in the dtype of the scores.
    """
    joint = heads.query.store
    tape.split_by_batch(joint)
    operands = [_copied(tape, value, name) for value, name in ((heads.query, "queries"), (heads.key, "keys"))]
    scores = run(
        tape, (heads.query, heads.key), "scores", GPT2, dtype=e, shape=a * T * s,
        saved=(joint, *operands), gradient="gradients of queries and keys",
    )  # fmt: skip
    tape.drop(*operands)
    site = Site("attention: scores", GPT2)
    factor = op.scaled(tape, scores, "scores, scaled", site)
    with_mask = masked(tape, factor, site)
    tape.release(factor)
    bent = op.pointwise(tape, with_mask, "softmax of the scores", GPT2, saves_result=True)
    tape.release(with_mask)
    weights = cast(tape, bent, e, Site("softmax of the scores", GPT2))
    tape.release(bent)
    return Attended(_of_copied_values(tape, weights, heads.value), weights)


def _copied(tape: Tape, value: Value, name: str) -> Store:
    return tape.make(TENSOR, f"{name}, copied for the product", e * value.shape * at_most(1, b - 1), GPT2)


def _of_copied_values(tape: Tape, weights: Value, value: Value) -> Value:
    operand = _copied(tape, value, "values")
    by_head = (weights, (weights.store,)), (value, (value.store, operand))
    made = _product(tape, by_head, Copies([operand], []), "attention output, head by head", T * c, GPT2)
    return in_order_of_tokens(tape, made, "attention output")


def of_broadcast_keys(tape: Tape, heads: Heads) -> Attended:
    """Run Falcon's eager attention. Its products broadcast a single key/value head to all query heads.

    The scores are scaled in place. Their variable lives until it holds the softmax, which has the residual stream's dtype.
    """
    copies = Copies([], [])
    query = _operand(tape, heads.query, copies, Site("queries", FALCON), contiguous=False)
    key = _broadcast_operand(tape, heads, heads.key, "keys", copies)
    scores = _product(tape, (query, key), copies, "scores", a * T * s, FALCON, of="gradients of queries and keys")
    scaled = Value(scores.store, scores.dtype, scores.shape)
    tape.add("attention: scores, scaled", (scaled,), (), makes("gradient of the scores", FALCON, scores), of=(scores,))
    with_mask = masked(tape, scaled, Site("attention: scores", FALCON))
    wide = cast(tape, with_mask, r, Site("masked scores", FALCON))
    tape.release(with_mask)
    weights = op.pointwise(tape, wide, "softmax of the scores", FALCON, saves_result=True)
    tape.release(wide, scores)
    by_token = _operand(tape, weights, copies, Site("softmax of the scores", FALCON), contiguous=True)
    by_head = _broadcast_operand(tape, heads, heads.value, "values", copies)
    made = _product(tape, (by_token, by_head), copies, "attention output, head by head", T * c, FALCON)
    return Attended(in_order_of_tokens(tape, made, "attention output"), weights)


#: Families whose eager attention differs from Llama's.
EAGER_OF: dict[str, Attend] = {
    **dict.fromkeys(families(lambda one: one.caps_scores), partial(eager, capped=True)),
    "gpt_oss": partial(eager, source=SINKS, sinks=True),
    "gpt2": of_one_tensor,
    "llama4_text": partial(eager, source=LLAMA_4, narrow=True),
    "falcon": of_broadcast_keys,
}


def _repeated(tape: Tape, heads: Heads, source: str) -> tuple[Value, Value]:
    """``repeat_kv``: copies of keys and values per query head, views of a single head, or the same tensors if ungrouped."""
    if not heads.grouped:
        return heads.key, heads.value
    return _repeat(tape, heads.key, heads, "keys", source), _repeat(tape, heads.value, heads, "values", source)


def _repeat(tape: Tape, value: Value, heads: Heads, name: str, source: str) -> Value:
    reason, of = f"{name}, repeated for each query head", f"gradient of the {name}"
    if not heads.one_key:
        return run(tape, value, reason, source, shape=T * q, gradient=of)
    return _view_for_each(tape, value, name, source)


def _broadcast(tape: Tape, value: Value, name: str) -> Value:
    """Return a product's view of a single key/value head for every query head; no variable holds it."""
    made = _view_for_each(tape, value, name, MATH)
    tape.drop(made.store)
    return made


def _view_for_each(tape: Tape, value: Value, name: str, source: str) -> Value:
    """Return a view of a single key/value head for every query head, whose gradients the backward sums."""
    made = Value(tape.hold(value.store), value.dtype, T * q)
    tape.add(f"{name}, repeated for each query head", (made,), (), makes(f"gradient of the {name}", source, value), of=(value,))
    return made


class Copies(NamedTuple):
    """The copies of its operands that one product makes."""

    own: list[Store]
    """Copies that are freed after the product."""
    in_place: list[tuple[Value, Store]]
    """Originals that the tape counts as saved, each with the copy that is saved instead."""

    def used(self, tape: Tape, product: Value) -> None:
        """Free the copies that nothing needs after the product."""
        tape.drop(*self.own)
        self.own.clear()
        kept = tape.keeps_saved and tape.follows(product)
        for value, copy in self.in_place:
            if kept:
                value.copy = copy  # lives as long as the original's variable
            else:
                tape.drop(copy)
        self.in_place.clear()


def _operand(
    tape: Tape, value: Value, copies: Copies, site: Site, *, contiguous: bool, copied_for_several: bool = False, dtype: Width = e,
) -> Factor:  # fmt: skip
    """Return a factor of a batched product in ``dtype``, with the tensors that the product saves for it.

    ``copied_for_several``: a product of a single sequence reads the tensor itself; one of several reads and saves a copy. A cast
    keeps the order of its argument, so the product copies it once more where that is not ``contiguous``.
    """
    if tape.is_wide(value.dtype) != tape.is_wide(dtype):
        made = cast(tape, value, dtype, site)
        copies.own.append(made.store)
        if not contiguous:
            copies.own.append(_for_the_product(tape, made, site))
        return made, (made,)
    if copied_for_several:
        tape.split_by_batch(value.store)
        copy = _for_the_product(tape, value, site, kind=TENSOR)
        copies.own.append(copy)
        return value, (value,) if tape.offloading else (value.store, copy)
    if not contiguous:
        copies.in_place.append((value, _for_the_product(tape, value, site)))
    return value, (value,)


def _for_the_product(tape: Tape, value: Value, site: Site, *, kind: Kind = TEMPORARY) -> Store:
    """Copy a factor of several sequences into the order that ``bmm`` reads. [bytes: none for a single sequence]"""
    size = value.dtype * value.shape * at_most(1, b - 1)
    return tape.make(kind, f"{site.name}, copied for the product", size, site.source)


def _product(
    tape: Tape, operands: tuple[Factor, Factor], copies: Copies, reason: str, shape: Size, source: str,
    of: str = "gradient of a factor of the product",
) -> Value:  # fmt: skip
    """Run a batched product of two operands, and free the copies that it alone needed.

    The backward of ``bmm`` makes the second operand's gradient first.
    """
    (first, _), (second, _) = operands
    made = run(
        tape, (second, first), reason, source, dtype=first.dtype if source == MATH else e, shape=shape,
        saved=factors(tape, *operands), gradient=of,
    )  # fmt: skip
    copies.used(tape, made)
    return made


def _scores(tape: Tape, operands: tuple[Factor, Factor], copies: Copies, site: Site, *, capped: bool) -> Value:
    made = _product(tape, operands, copies, "scores", a * T * s, site.source, of="gradients of queries and keys")
    factor = op.scaled(tape, made, "scores, scaled", site)
    if capped:
        divided = op.scaled(tape, factor, "scores, divided by the cap", site)
        tanh = Site("attention: tanh of the scores", site.source)
        bent = op.pointwise(tape, divided, "tanh of the scores", tanh, saves_result=True)
        tape.release(divided)
        factor = op.scaled(tape, bent, "scores, capped", site)
    with_mask = masked(tape, factor, site)
    tape.release(factor)
    return with_mask


def _scores_in_32_bits(
    tape: Tape, heads: Heads, query: Value, key: Value, copies: Copies, *, broadcast: bool
) -> Value:  # fmt: skip
    """Multiply queries and keys. It releases the keys."""
    in_order = heads.grouped or heads.repeated or heads.joined or heads.keys_joined
    queries = _operand(tape, query, copies, Site("queries", MATH), contiguous=heads.joined, dtype=4)
    spread = _broadcast(tape, key, "keys") if broadcast else key
    keys = _operand(tape, spread, copies, Site("keys", MATH), contiguous=in_order, dtype=4, copied_for_several=broadcast)
    scores = _product(tape, (queries, keys), copies, "scores", a * T * s, MATH)
    tape.release(key)
    return scores


def _broadcast_operand(tape: Tape, heads: Heads, value: Value, name: str, copies: Copies) -> Factor:
    """Return keys or values as a factor. A single head is first cast, then broadcast."""
    if not heads.one_key:
        return _operand(tape, value, copies, Site(name, FALCON), contiguous=False)
    narrow = cast(tape, value, e, Site(name, FALCON))
    made = _operand(tape, _broadcast(tape, narrow, name), copies, Site(name, FALCON), contiguous=True, copied_for_several=True)
    copies.own.extend(one for one in (narrow.store, narrow.store.twin) if one is not None)
    return made


def masked(tape: Tape, value: Value, site: Site) -> Value:
    """Add the mask, which has the residual stream's dtype and gets no gradient. ``value`` stays."""
    dtype = op.wider(tape, value.dtype, r)
    made = tensor(tape, "scores, masked", dtype, value.shape, site.source)

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        return [op.narrowed(tape, value, grad_outputs[0], made, site)]

    tape.add(site.name, (made,), (), backward, of=(value,))
    return made


def softmax(tape: Tape, scores: Value, dtype: Width, source: str) -> Value:
    """Softmax in fp32, whose result autograd saves, then a cast to ``dtype``. ``scores`` stay."""
    at = Site("masked scores", source), Site("attention: softmax", source)
    made = op.softmax_in_32_bits(tape, scores, "softmax of the scores", *at)
    weights = cast(tape, made, dtype, Site("softmax of the scores", source))
    tape.release(made)
    return weights


def _weighted_values(tape: Tape, weights: Value, value: Value, copies: Copies, heads: Heads, source: str) -> Value:
    several = heads.one_key if heads.grouped else heads.joint
    by_token = _operand(tape, weights, copies, Site("softmax of the scores", source), contiguous=True)
    site = Site("values", source)
    by_head = _operand(tape, value, copies, site, contiguous=heads.grouped, copied_for_several=several)
    made = _product(tape, (by_token, by_head), copies, "attention output, head by head", T * c, source)
    return in_order_of_tokens(tape, made, "attention output")


# --- gpt-oss: one learned score per head, the sink ---------------------------------------------------------------------------


def _softmax_with_sinks(tape: Tape, scores: Value, dtype: Width) -> tuple[Value, tuple[Value, ...]]:
    """Return the softmax of scores and sink, cast to ``dtype`` without the sink, and the tensors of the function's variables."""
    joined = op.plus_bias(tape, scores, a, "scores and sink", SINKS, shape=a * T * (s + 1))
    lowered = _less_the_highest(tape, joined)
    tape.release(joined)
    made = op.pointwise(tape, lowered, "softmax of scores and sink", SINKS, saves_result=True)
    without = Value(tape.hold(made.store), made.dtype, a * T * s)
    backward = makes("gradient of the softmax, with the sink's", SINKS, made)
    tape.add("attention: softmax without the sink", (without,), (), backward, of=(made,))
    return cast(tape, without, dtype, Site("softmax of the scores", SINKS)), (lowered, made, without)


def _less_the_highest(tape: Tape, joined: Value) -> Value:
    """Subtract the highest score of each row. Gradients also flow through that score."""
    highest = run(
        tape, joined, "highest scores", SINKS, shape=T * a,
        keeps=(("places of the highest scores, int64", 8 * T * a),), gradient="gradient of the highest scores, among zeros",
    )  # fmt: skip
    unsummed = "gradient of the highest scores, not yet summed", joined.dtype * joined.shape
    difference = op.in_turn(
        op.needs(SINKS, unsummed), op.same_gradient(joined), makes("gradient of the highest scores", SINKS, highest)
    )
    made = run(tape, (joined, highest), "scores and sink, less the highest", SINKS, backward=difference)
    tape.release(highest)
    return made

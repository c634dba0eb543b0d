"""Attention from queries, keys and values to its output: the kernels that ``scaled_dot_product_attention`` takes, and without one.

Where several sequences make a batch, a matrix product of heads copies operands that are not contiguous: the copy takes the
place of the original among what is saved, so that only names hold both.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from zeroplan.expr import Size, at_least, at_most, ceil
from zeroplan.ledger import PLAIN, OffGpu, Tag
from zeroplan.spec.releases import Release
from zeroplan.transformer.families.attention import (
    CHOICE,
    CUDA_ALONE,
    EAGER,
    FLASH_BACKWARD,
    FLASH_SCRATCH,
    MATH,
    SCRATCH,
    SDPA,
)
from zeroplan.transformer.families.operators import (
    TEMPORARY,
    TENSOR,
    Factor,
    cast,
    factors,
    gradient,
    makes,
    narrowed,
    passes,
    pointwise,
    scaled,
    tensor,
    through,
    wider,
)
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value, Width
from zeroplan.transformer.symbols import T, a, b, c, c_a, d, e, q, r, s, y

GPT2 = "transformers 5.23, models/gpt2/modeling_gpt2.py, eager_attention_forward"
SINKS = "transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward"
EFFICIENT_BACKWARD = "torch 2.13, aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, workspace_size"


HeadSize = Literal["small", "middle", "large"]
"""Up to 64, up to 128 and beyond: the kernels that CUDA has for a head."""


def head_size(widest: int) -> HeadSize:
    """For the wider of a head's queries and values."""
    return "small" if widest <= 64 else "middle" if widest <= 128 else "large"


class Heads(NamedTuple):
    """Queries, keys and values before attention, and how they came about."""

    query: Value
    key: Value
    value: Value
    grouped: bool
    """Several query heads share a key/value head."""
    one_key: bool
    """There is a single key/value head, of which repeating it makes a view."""
    joined: bool = False
    """Rotary positions have copied queries and keys head by head, so that they are contiguous."""
    joint: bool = False
    """The values are a view of the joint projection's output."""


class Attended(NamedTuple):
    """What attention returns: its output, and the weights where they are written out, which the layer holds by name."""

    context: Value
    weights: Value | None = None


Attend = Callable[[Tape, Heads], Attended]


def flash(tape: Tape, heads: Heads, *, size: HeadSize = "small") -> Attended:
    """``scaled_dot_product_attention`` on the flash kernel: keys and values are not repeated for grouped heads.

    Its output has the layout of the queries. Where rotary positions copied these head by head, the output is copied into the
    order of tokens, and both are saved.
    """
    operands = _cast_heads(tape, heads.query, heads.key, heads.value)
    scratch = (FLASH_SCRATCH, flash_scratch(size, grouped=heads.grouped, copied=heads.joined), FLASH_BACKWARD)
    made = _kernel(tape, operands, scratch, copied=heads.joined)
    return Attended(in_order_of_tokens(tape, made, "attention output in the order of tokens") if heads.joined else made)


def efficient(tape: Tape, heads: Heads, *, size: HeadSize) -> Attended:
    """Do it on CUDA's memory-efficient kernel, which 32 bits get. Its output is in the order of tokens."""
    operands = _cast_heads(tape, heads.query, heads.key, heads.value)
    return Attended(_kernel(tape, operands, _scratch(tape, size), padded=True, twice=heads.joined))


def of_a_release(tape: Tape, heads: Heads, *, release: Release, kernel: Attend) -> Attended:
    """Do it as older releases of transformers do, which copy what the kernel is given; the copies live until it has run.

    Source: transformers 4.48.1, integrations/sdpa_attention.py, sdpa_attention_forward; 4.45.2, LlamaSdpaAttention.forward.
    """
    query, key, value = heads.query, heads.key, heads.value
    copies = []
    if release.repeats_keys and heads.grouped:
        key, value = (_repeated(tape, one, heads, Site(name, SDPA)) for one, name in ((key, "keys"), (value, "values")))
        copies += [key, value]
    if release.copies_heads:
        copied = release.repeats_keys and heads.grouped and not heads.one_key
        query = _contiguous(tape, query, "queries")
        copies.append(query)
        if not copied:
            key, value = _contiguous(tape, key, "keys"), _contiguous(tape, value, "values")
            copies += [key, value]
    grouped = heads.grouped and not release.repeats_keys
    made = kernel(tape, Heads(query, key, value, grouped, heads.one_key and grouped, joined=release.copies_heads))
    tape.release(*copies)
    return made


def _contiguous(tape: Tape, value: Value, name: str) -> Value:
    """``contiguous()`` of heads that lie token by token: a copy head by head."""
    made = tensor(tape, f"{name}, copied head by head", value.dtype, value.shape, SDPA)
    tape.add(f"{name}, copied", (made,), (), passes(value), of=(value,))
    return made


def with_mask(tape: Tape, heads: Heads, *, size: HeadSize) -> Attended:
    """Do it with an explicit mask: on CUDA's memory-efficient kernel, keys and values repeated for grouped heads.

    The mask comes as booleans; each layer makes numbers of it, rows padded to 16 elements, and saves them.
    """
    grouped = heads.grouped
    key = _repeated(tape, heads.key, heads, Site("keys", SDPA)) if grouped else heads.key
    value = _repeated(tape, heads.value, heads, Site("values", SDPA)) if grouped else heads.value
    operands = _cast_heads(tape, heads.query, key, value)
    mask = tape.make(TENSOR, "mask in numbers, rows of 16", 16 * e * b * s * ceil(s, 16), SDPA)
    tape.drop(tape.make(TEMPORARY, "mask, inverted", b * s * s, SDPA))
    unfilled = e * b * s * s * at_most(1, 16 * ceil(s, 16) - s)
    tape.drop(tape.make(TEMPORARY, "mask in numbers, its rows not yet filled up", unfilled, SDPA))
    made = _kernel(tape, operands, _scratch(tape, size), mask, padded=True, twice=heads.joined)
    tape.drop(mask)
    if grouped:
        tape.release(key, value)
    return Attended(made)


def in_32_bits(tape: Tape, heads: Heads) -> Attended:
    """Write attention out as torch does in 32 bits where no kernel takes the heads.

    On CUDA these are grouped heads of 32 bits, on a CPU heads of two sizes, in 16 bits too. Queries and keys, repeated for each
    query head, are each scaled by the root of the factor. Leaves out the booleans that the causal mask is made of, and what
    ``_safe_softmax`` takes inside itself.
    """
    copies, operands = Copies([], []), _cast_heads(tape, heads.query, heads.key, heads.value)
    bare = query_32, *by_key = [
        cast(tape, one, 4, Site(f"{name}, fp32", MATH)) for name, one in zip(_NAMES, operands, strict=True)
    ]
    query = _times_a_number(tape, query_32, "queries, scaled")
    mask = tape.make(TEMPORARY, "causal mask in numbers", 4 * s * s, MATH)
    if heads.grouped:
        by_key = [_cloned(tape, one, Site(name, MATH)) for name, one in zip(_NAMES[1:], by_key, strict=True)]
    key = _times_a_number(tape, by_key[0], "keys, repeated and scaled" if heads.grouped else "keys, scaled")
    given = _operand(tape, query, copies, Site("queries", MATH), contiguous=heads.joined, dtype=4), (key, (key.store,))
    scores = _product(tape, given, copies, "scores", a * T * s)
    tape.release(key)
    with_mask = masked(tape, scores, Site("attention: scores", MATH))
    tape.release(scores)
    weights = softmax(tape, with_mask, 4, MATH)
    tape.release(with_mask)
    beside_keys = heads.joint and by_key[1].store is heads.value.store
    value = _operand(tape, by_key[1], copies, Site("values", MATH), contiguous=heads.grouped, joint=beside_keys, dtype=4)
    made = _product(tape, ((weights, (weights.store,)), value), copies, "attention output, head by head", T * c)
    narrow = cast(tape, made, e, Site("attention output, head by head", MATH))
    tape.release(made, weights, *(by_key if heads.grouped else ()), query, *bare, *operands)
    tape.drop(mask, *copies.in_place)
    return Attended(in_order_of_tokens(tape, narrow, "attention output"))


_NAMES = ("queries", "keys", "values")


def _times_a_number(tape: Tape, value: Value, reason: str) -> Value:
    """Scale; the name for ``value`` stays."""
    tape.hold(value.store)
    return scaled(tape, value, reason, Site(f"attention: {reason}", MATH))


def _cloned(tape: Tape, value: Value, site: Site) -> Value:
    """``repeat_interleave``: a copy for each query head, of a single head too."""
    made = tensor(tape, f"{site.name}, repeated for each query head", value.dtype, T * q, site.source)

    backward = makes(f"gradient of the {site.name}", site.source, value)
    tape.add(f"attention: {site.name}, repeated", (made,), (), backward, of=(value,))
    return made


def _product(tape: Tape, operands: tuple[Factor, Factor], copies: "Copies", reason: str, shape: Size) -> Value:
    (first, _), (second, _) = operands
    made = tensor(tape, reason, first.dtype, shape, MATH)
    backward = makes("gradient of a factor of the product", MATH, second, first)
    tape.add(f"attention: {reason}", (made,), factors(tape, *operands), backward, of=(first, second))
    copies.used(tape, made)
    return made


#: Of attention's output where a CPU's kernel leaves it in another order than CUDA's, and it is copied.
_TWICE = Tag(off_gpu=OffGpu.TWICE)
Scratch = tuple[str, Size, str]


def _scratch(tape: Tape, size: HeadSize) -> Scratch:
    reason = "scratch of the memory-efficient attention kernel's backward (CUDA)"
    return reason, efficient_scratch(size, half=not tape.wide), EFFICIENT_BACKWARD


def efficient_scratch(size: HeadSize, *, half: bool) -> Size:
    """What the memory-efficient kernel's backward takes inside itself on CUDA. [bytes]

    Blocks of the queries' gradient in fp32, 16 bytes beside each, for large heads those of keys and values, and a sum for each row.
    In 32 bits torch makes the sums before: the product of output and gradient, its sums, and these in another order. Blocks are
    those of GPUs with 163 KiB of shared memory (compute capability 8.0, 9.0, 10.0); others take smaller ones for heads beyond 64.
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


def _cast_heads(tape: Tape, query: Value, key: Value, value: Value) -> tuple[Value, Value, Value]:
    return (
        cast(tape, query, e, Site("queries", SDPA)),
        cast(tape, key, e, Site("keys", SDPA)),
        cast(tape, value, e, Site("values", SDPA)),
    )


def _kernel(
    tape: Tape,
    operands: tuple[Value, Value, Value],
    scratch: Scratch,
    *extra: Store,
    padded: bool = False,
    copied: bool = False,
    twice: bool = False,
) -> Value:
    """One kernel: it saves its operands, its output and a log-sum-exp per row, on some kernels in rows of 32."""
    reason = "attention output" if copied else "attention output, input of the output projection"
    made = tensor(tape, f"{reason}, twice on a CPU" if twice else reason, e, T * c, SDPA, _TWICE if twice else PLAIN)
    sums = [tape.make(TENSOR, "log-sum-exp of the scores, fp32", 4 * T * a, SDPA)]
    if padded:
        sums.append(
            tape.make(
                TENSOR, "rows that fill up log-sum-exp, on CUDA", 128 * a * b * ceil(s, 32) - 4 * T * a, CHOICE, CUDA_ALONE
            )
        )

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        arriving = [(one, gradient(tape, one, "gradients of q, k and v", SDPA)) for one in operands]
        tape.temporary(*scratch, SCRATCH)
        return arriving

    tape.add("attention", (made,), (*(one.store for one in operands), made.store, *sums, *extra), backward, of=operands)
    tape.by_kernel(made.store, *sums)
    tape.drop(*sums)
    tape.release(*operands)
    return made


def in_order_of_tokens(tape: Tape, value: Value, reason: str) -> Value:
    """``transpose(1, 2).contiguous()`` where that is a copy; the gradient passes as a view."""
    made = tensor(tape, f"{reason}, input of the output projection", value.dtype, value.shape, SDPA)
    tape.add("order of tokens", (made,), (), passes(value), of=(value,))
    tape.release(value)
    return made


def flash_scratch(size: HeadSize, *, grouped: bool, copied: bool = False) -> Size:
    """What the flash kernel's backward takes inside itself on CUDA. [bytes]

    Gradients of the queries in fp32, and a sum for each row; heads are filled up to 32 numbers, those beyond 128 to 64. With
    grouped heads gradients of keys and values for each query head. Where the output is not in the order of tokens (``copied``),
    it is copied.
    """
    filled = 64 if size == "large" else 32
    taken = 512 * a * b * ceil(s, 128) * (filled * ceil(d, filled) + 1)
    if grouped:
        taken = taken + 2 * e * T * q
    return taken + e * T * c if copied else taken


def eager(tape: Tape, heads: Heads, *, source: str = EAGER, capped: bool = False, sinks: bool = False) -> Attended:
    """Attention written out: keys and values repeated for grouped heads, scores and their softmax kept.

    ``capped`` puts the scores through ``tanh`` before the mask, as Gemma 2 does; ``sinks`` joins one more to them for each head,
    as gpt-oss does.
    """
    copies = Copies([], [])
    key = _repeated(tape, heads.key, heads, Site("keys", source)) if heads.grouped else heads.key
    value = _repeated(tape, heads.value, heads, Site("values", source)) if heads.grouped else heads.value
    in_order = heads.grouped or heads.joined
    one_key = heads.one_key and heads.grouped
    operands = (
        _operand(tape, heads.query, copies, Site("queries", source), contiguous=heads.joined),
        _operand(tape, key, copies, Site("keys", source), contiguous=in_order, one_key=one_key),
    )
    scores = _scores(tape, operands, copies, Site("attention: scores", source), capped=capped)
    if sinks:
        weights, named = _softmax_with_sinks(tape, scores, value.dtype)
    else:
        weights, named = softmax(tape, scores, heads.query.dtype, source), ()
    tape.release(scores)
    context = _weighted_values(tape, weights, value, copies, heads, source)
    tape.drop(*copies.in_place)
    tape.release(*named)
    if heads.grouped:
        tape.release(key, value)
    return Attended(context, weights)


def capped_eager(tape: Tape, heads: Heads) -> Attended:
    """Attention of Gemma 2, its scores capped by ``tanh``."""
    return eager(tape, heads, capped=True)


def with_sinks(tape: Tape, heads: Heads) -> Attended:
    """Attention of gpt-oss."""
    return eager(tape, heads, source=SINKS, sinks=True)


def of_one_tensor(tape: Tape, heads: Heads) -> Attended:
    """Attention of GPT-2 written out: queries, keys and values are views of one tensor, of which products of several sequences
    save copies; the softmax stays in the dtype of the scores.
    """  # noqa: D205
    joint = heads.query.store
    tape.part_by_batch(joint)
    operands = [_copied(tape, value, name) for value, name in ((heads.query, "queries"), (heads.key, "keys"))]
    scores = tensor(tape, "scores", e, a * T * s, GPT2)
    backward = makes("gradients of queries and keys", GPT2, heads.query, heads.key)
    tape.add("attention: scores", (scores,), (joint, *operands), backward, of=(heads.query, heads.key))
    tape.drop(*operands)
    site = Site("attention: scores", GPT2)
    factor = scaled(tape, scores, "scores, scaled", site)
    with_mask = masked(tape, factor, site)
    tape.release(factor)
    bent = pointwise(tape, with_mask, "softmax of the scores", Site("attention: softmax", GPT2), saves_result=True)
    tape.release(with_mask)
    weights = cast(tape, bent, e, Site("softmax of the scores", GPT2))
    tape.release(bent)
    return Attended(_of_copied_values(tape, weights, heads.value), weights)


def _copied(tape: Tape, value: Value, name: str) -> Store:
    return tape.make(TENSOR, f"{name}, copied for the product", e * value.shape * at_most(1, b - 1), GPT2)


def _of_copied_values(tape: Tape, weights: Value, value: Value) -> Value:
    operand = _copied(tape, value, "values")
    made = tensor(tape, "attention output, head by head", e, T * c, GPT2)
    backward = makes("gradient of a factor of the product", GPT2, weights, value)
    saved = factors(tape, (weights, (weights.store,)), (value, (value.store, operand)))
    tape.add("attention: product with the values", (made,), saved, backward, of=(weights, value))
    tape.drop(operand)
    return in_order_of_tokens(tape, made, "attention output")


def _repeated(tape: Tape, value: Value, heads: Heads, site: Site) -> Value:
    """``repeat_kv``: a copy for each query head, or a view of a single head; gradients are summed over its copies."""
    reason = f"{site.name}, repeated for each query head"
    if heads.one_key:
        made = Value(tape.hold(value.store), value.dtype, T * q)
    else:
        made = tensor(tape, reason, value.dtype, T * q, site.source)

    tape.add(reason, (made,), (), makes(f"gradient of the {site.name}", site.source, value), of=(value,))
    return made


class Copies(NamedTuple):
    """Copies of operands, which a product makes."""

    own: list[Store]
    """Those that only the product needs."""
    in_place: list[Store]
    """Those that are saved, where the account has the original instead: they stay as long as the original's name does."""

    def used(self, tape: Tape, product: Value) -> None:
        """The product is done."""
        tape.drop(*self.own)
        self.own.clear()
        if not (tape.saving and tape.follows(product)):
            tape.drop(*self.in_place)
            self.in_place.clear()


def _operand(
    tape: Tape, value: Value, copies: Copies, site: Site, *, contiguous: bool, one_key: bool = False, joint: bool = False,
    dtype: Width = e,
) -> Factor:  # fmt: skip
    """Return a factor of a product of heads in ``dtype``, and what the product saves of it."""
    if tape.is_wide(value.dtype) != tape.is_wide(dtype):
        made = cast(tape, value, dtype, site)
        copies.own.append(made.store)
        return made, (made.store,)
    if one_key or joint:
        # Of a single sequence the product takes the tensor as it is, of several a copy, which alone is saved then.
        tape.part_by_batch(value.store)
        copy = tape.make(
            TENSOR, f"{site.name}, copied for the product", value.dtype * value.shape * at_most(1, b - 1), site.source
        )
        copies.own.append(copy)
        return value, (value.store, copy)
    if not contiguous:
        formula = value.dtype * value.shape * at_most(1, b - 1)
        copies.in_place.append(tape.make(TEMPORARY, f"{site.name}, copied for the product", formula, site.source))
    return value, (value.store,)


def _scores(tape: Tape, operands: tuple[Factor, Factor], copies: Copies, site: Site, *, capped: bool) -> Value:
    (query, _), (key, _) = operands
    made = tensor(tape, "scores", e, a * T * s, site.source)

    backward = makes("gradients of queries and keys", site.source, query, key)
    tape.add(site.name, (made,), factors(tape, *operands), backward, of=(query, key))
    copies.used(tape, made)
    factor = scaled(tape, made, "scores, scaled", site)
    if capped:
        divided = scaled(tape, factor, "scores, divided by the cap", site)
        bent = pointwise(
            tape, divided, "tanh of the scores", Site("attention: tanh of the scores", site.source), saves_result=True
        )
        tape.release(divided)
        factor = scaled(tape, bent, "scores, capped", site)
    made_masked = masked(tape, factor, site)
    tape.release(factor)
    return made_masked


def masked(tape: Tape, value: Value, site: Site) -> Value:
    """Add the mask, which has the residual stream's dtype and no gradient. The name for ``value`` stays."""
    dtype = wider(tape, value.dtype, r)
    made = tensor(tape, "scores, masked", dtype, value.shape, site.source)

    def backward(tape: Tape, taken: list[Store]) -> Arriving:
        return [narrowed(tape, value, taken[0], made, site)]

    tape.add(site.name, (made,), (), backward, of=(value,))
    return made


def softmax(tape: Tape, scores: Value, dtype: Width, source: str) -> Value:
    """Softmax in fp32, cast to ``dtype``. The name for the scores stays."""
    wide = cast(tape, scores, 4, Site("masked scores", source))
    made = tensor(tape, "softmax of the scores", 4, scores.shape, source)

    tape.add("attention: softmax", (made,), (made.store,), makes("gradient of the scores", source, wide), of=(wide,))
    tape.release(wide)
    weights = cast(tape, made, dtype, Site("softmax of the scores", source))
    tape.release(made)
    return weights


def _softmax_with_sinks(tape: Tape, scores: Value, dtype: Width) -> tuple[Value, tuple[Value, ...]]:
    """Softmax of the scores and a learned sink, cast to ``dtype`` without it; also what the function holds by name."""
    joined = _with_a_sink(tape, scores)
    lowered = _less_the_highest(tape, joined)
    tape.release(joined)
    made = pointwise(tape, lowered, "softmax of scores and sink", Site("attention: softmax", SINKS), saves_result=True)
    without = Value(tape.hold(made.store), made.dtype, a * T * s)

    backward = makes("gradient of the softmax, with the sink's", SINKS, made)
    tape.add("attention: softmax without the sink", (without,), (), backward, of=(made,))
    return cast(tape, without, dtype, Site("softmax of the scores", SINKS)), (lowered, made, without)


def _with_a_sink(tape: Tape, scores: Value) -> Value:
    made = tensor(tape, "scores and sink", scores.dtype, a * T * (s + 1), SINKS)

    def backward(tape: Tape, taken: list[Store]) -> Arriving:
        tape.weight_gradient(a)
        return [through(scores, taken[0])]

    tape.add("attention: scores and sink", (made,), (), backward, of=None)
    return made


def _less_the_highest(tape: Tape, joined: Value) -> Value:
    """Each row less its highest score, through which gradients flow as well."""
    highest = tensor(tape, "highest scores", joined.dtype, T * a, SINKS)
    place = tape.make(TENSOR, "places of the highest scores, int64", 8 * T * a, SINKS)

    backward = makes("gradient of the highest scores, among zeros", SINKS, joined)
    tape.add("attention: highest scores", (highest,), (place,), backward, of=(joined,))
    tape.drop(place)
    made = tensor(tape, "scores and sink, less the highest", joined.dtype, joined.shape, SINKS)

    def difference(tape: Tape, taken: list[Store]) -> Arriving:
        tape.temporary("gradient of the highest scores, not yet summed", joined.dtype * joined.shape, SINKS)
        return [through(joined, taken[0]), (highest, gradient(tape, highest, "gradient of the highest scores", SINKS))]

    tape.add("attention: difference from the highest", (made,), (), difference, of=(joined, highest))
    tape.release(highest)
    return made


def _weighted_values(tape: Tape, weights: Value, value: Value, copies: Copies, heads: Heads, source: str) -> Value:
    by_token = _operand(tape, weights, copies, Site("softmax of the scores", source), contiguous=True)
    by_head = _operand(
        tape,
        value,
        copies,
        Site("values", source),
        contiguous=heads.grouped,
        one_key=heads.one_key and heads.grouped,
        joint=heads.joint and not heads.grouped,
    )
    made = tensor(tape, "attention output, head by head", e, T * c, source)

    of = by_token[0], by_head[0]
    backward = makes("gradient of a factor of the product", source, *of)
    tape.add("attention: product with the values", (made,), factors(tape, by_token, by_head), backward, of=of)
    copies.used(tape, made)
    return in_order_of_tokens(tape, made, "attention output")

"""Multi-head latent attention (DeepSeek-V2/V3): low-rank projections, heads of two sizes, one rotary key for all heads."""

from functools import partial

from zeroplan.expr import Size
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attend import Attend, Attended, Heads, eager, efficient, in_32_bits
from zeroplan.transformer.families.gated import LLAMA_NORM
from zeroplan.transformer.families.operators import GRADIENT, TEMPORARY, TENSOR
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.symbols import T, a, c, e, h, o, o_2, q, r, u, w

LATENT = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3Attention.forward"
EXPAND = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3Attention.expand_kv"
ROTARY = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, apply_rotary_pos_emb_interleave"
EAGER = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, eager_attention_forward"
COPY = "torch 2.13, torch/csrc/autograd/functions/tensor.cpp, CopySlices::apply_impl"

#: Of all heads the queries without their rotary part, or the keys; and the keys without it beside the values.
BARE = q - a * o
JOINT = q - a * o + c


def latent_attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Attention between its norm and the residual addition; the module holds by name whatever it has made."""
    queries = _queries(tape, normal, block)
    bare, turning = op.chunk(tape, queries, (T * BARE, T * a * o), Site("parts of the queries", LATENT))
    name = "first projection of keys and values"
    compressed = op.linear(tape, normal, w + o, Site(name, LATENT), bias=block.attention_bias)
    latent, rotary_key = op.chunk(tape, compressed, (T * w, T * o), Site("latent and rotary key", LATENT))
    latent_norm = _norm(tape, latent, "norm of the latent", w)
    turned = _turned(tape, turning, "rotary part of the queries", a * o_2), _turned(tape, rotary_key, "rotary key", o_2)
    tape.release(latent, turning, rotary_key)
    query = op.joined(tape, (bare, turned[0]), "queries", T * q, Site("both parts of the queries", LATENT))
    key, value = _expanded(tape, latent_norm, turned[1])
    context, weights = _attend(block)(tape, Heads(query, key, value, grouped=False, one_key=False, joint=True))
    made = op.linear(tape, context, h, Site("output projection", LATENT), reads=c, bias=block.attention_bias)
    tape.release(queries, bare, compressed, latent_norm, *turned, query, key, value, context)
    return Attended(made, weights)


def _attend(block: Block) -> Attend:
    """Which kernel takes heads of two sizes: flash attention refuses them, and a CPU has no other."""
    if block.attention == "eager":
        return partial(_by_head, attend=partial(eager, source=EAGER))
    if block.one_size:
        return partial(_by_head, attend=block.attend)
    return partial(_by_head, attend=in_32_bits) if block.kernels == "cpu" else partial(efficient, size=block.head_size)


def _by_head(tape: Tape, heads: Heads, *, attend: Attend) -> Attended:
    """Do it on queries and keys that were put together head by head, and so are contiguous."""
    return attend(tape, heads._replace(joined=True))


def _queries(tape: Tape, normal: Value, block: Block) -> Value:
    """By one matrix, or by two of a low rank with a norm between them."""
    if not block.compressed:
        return op.linear(tape, normal, q, Site("q projection", LATENT))
    name = "first projection of the queries"
    compressed = op.linear(tape, normal, u, Site(name, LATENT), bias=block.attention_bias)
    latent = _norm(tape, compressed, "norm of the compressed queries", u)
    tape.release(compressed)
    made = op.linear(tape, latent, q, Site("second projection of the queries", LATENT), reads=u)
    tape.release(latent)
    return made


def _norm(tape: Tape, value: Value, name: str, width: Size) -> Value:
    return op.rms_norm(tape, value, name, LLAMA_NORM, weight=width, place=Place(At.NORM))


def _turned(tape: Tape, value: Value, name: str, half: Size) -> Value:
    """Rotary positions of pairs that lie side by side: even and odd elements are turned, and joined."""
    even, odd = op.slices(tape, value, (T * half, T * half), Site(f"even and odd elements of the {name}", ROTARY))
    dtype = op.wider(tape, value.dtype, r)
    halves = tape.make(TEMPORARY, f"{name}: both halves turned", dtype * value.shape, ROTARY)
    made = op.tensor(tape, f"{name}, turned", dtype, value.shape, ROTARY)
    tape.drop(halves)
    backward = op.makes(f"gradient of the {name}, half", ROTARY, even, odd)
    tape.add(f"rotary positions of the {name}", (made,), (), backward, of=(even, odd))
    tape.release(even, odd)
    return made


def _expanded(tape: Tape, latent: Value, rotary_key: Value) -> tuple[Value, Value]:
    """Keys and values of all heads, the values beside the keys' first part; the one rotary key goes to every head."""
    joint = op.linear(tape, latent, JOINT, Site("projection to keys and values", EXPAND), reads=w)
    bare, value = op.chunk(tape, joint, (T * BARE, T * c), Site("keys and values", EXPAND))
    spread = Value(tape.hold(rotary_key.store), rotary_key.dtype, T * a * o)
    summed = op.makes("gradient of the rotary key, summed over heads", EXPAND, rotary_key)
    tape.add("rotary key for every head", (spread,), (), summed, of=(rotary_key,))
    whole = Value(tape.make(TENSOR, "keys", e * T * q, EXPAND), e, T * q)
    first = _copied_into(tape, whole, None, bare, "first part of the keys")
    made = _copied_into(tape, whole, first, spread, "rotary part of the keys")
    tape.release(joint, bare, spread)
    return made, value


def _copied_into(tape: Tape, whole: Value, before: Value | None, part: Value, name: str) -> Value:
    """``whole[...].copy_(part)``; its backward copies the gradient of the whole, and that of the part once more."""
    made = Value(whole.store, whole.dtype, whole.shape)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        copy = tape.make(GRADIENT, "gradient of the keys, copied", made.dtype * made.shape, COPY)
        passed = tape.make(GRADIENT, f"gradient of the {name}", made.dtype * part.shape, COPY)
        if before is None:
            tape.scratch.append(copy)
            return [(part, op.as_narrow(tape, part, passed, made, COPY))]
        tape.temporary("zeros in its place", made.dtype * part.shape, COPY)
        return [(before, copy), (part, op.as_narrow(tape, part, passed, made, COPY))]

    tape.add(name, (made,), (), backward, of=(part,) if before is None else (before, part))
    return made

"""MiniMax-Text-01 and MiniMax-M1: blocks of lightning attention or of full attention, each followed by Mixtral's experts.

Lightning attention splits a sequence into chunks. It attends with a decay within a chunk, and a state carries the rest from chunk
to chunk. A loop over the chunks runs in torch operators; each iteration saves tensors for its backward. The tape runs three
iterations: the first, the last but one, and the last. The rest save the same tensors as the last but one, so it counts them.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from zeroplan.expr import NOTHING, Size, at_least, at_most
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import LLAMA_NORM
from zeroplan.transformer.families.definition import Block, Definition, Program
from zeroplan.transformer.families.keys import JITTER, WITH_EXPERTS
from zeroplan.transformer.families.llama import attention
from zeroplan.transformer.families.mixtral import mlp
from zeroplan.transformer.families.module_names import ATTENTION_MODULES
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value, Width
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, gate_and_experts, patterned, two_norms
from zeroplan.transformer.params_modules import linear, rms_norm
from zeroplan.transformer.symbols import A, D, Q, T, Z, b, e, h, s

MINIMAX = "transformers 5.23, models/minimax/modeling_minimax.py"
LAYER = f"{MINIMAX}, MiniMaxDecoderLayer.forward"
LIGHTNING = f"{MINIMAX}, MiniMaxLightningAttention.forward"

#: Elements of all queries, and of the states of all heads; tokens of the last chunk of several.
ROWS, STATE, REST = T * A * D, b * A * D * D, s - Q * (Z - 1)
#: 1 if there is a chunk between the first and the last, else 0; 1 for several sequences, else 0.
BETWEEN, SEQUENCES = at_most(1, Z - 2), at_most(1, b - 1)

# --- the layer ---------------------------------------------------------------------------------------------------------------


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one layer. Norms' outputs, not their inputs, are the residual stream. What attention returned lives to the end."""
    normal = op.norm(tape, given, "norm before attention", LLAMA_NORM, place=AT_ATTENTION_NORM)
    attended, held = (attention if block.chunks == "none" else _lightning)(tape, normal, block)
    middle = _summed(tape, normal, attended, "residual stream between attention and MLP")
    tape.release(attended)
    normal_of_mlp = op.norm(tape, middle, "norm before the MLP", LLAMA_NORM, place=AT_MLP_NORM)
    tape.release(middle, normal)
    branch = mlp(tape, normal_of_mlp, block)
    made = _summed(tape, normal_of_mlp, branch, "block output")
    tape.release(branch, normal_of_mlp, held)
    return made


def _summed(tape: Tape, residual: Value, branch: Value, reason: str) -> Value:
    """``residual * alpha + branch * beta``."""
    first, second = (
        op.multiplied(tape, one, f"{name} times its factor", LAYER)
        for one, name in ((residual, "residual stream"), (branch, "branch"))
    )
    made = op.add(tape, first, second, reason, LAYER)
    tape.release(first, second)
    return made


# --- lightning attention -----------------------------------------------------------------------------------------------------


def _lightning(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run ``MiniMaxLightningAttention``. It returns the last state as well, with what autograd saved for it."""
    inner = A * D
    joint = op.linear(tape, normal, inner + inner + inner, Site("joint projection of q, k and v", LIGHTNING, layer="qkv_proj"))
    active = op.pointwise(tape, joint, "silu of q, k and v", LIGHTNING)
    tape.release(joint)
    given = op.without_padding(tape, active, LIGHTNING, padded=block.padded)
    tape.release(active)
    parts = op.chunk(tape, given, (ROWS,) * 3, Site("queries, keys and values", LIGHTNING))
    tape.split_by_batch(given.store)  # products read a single sequence's, and copies of several
    done, outputs = _loop(tape, parts, several=block.chunks == "several")
    joined = op.joined(tape, outputs, "output of lightning attention", ROWS, LIGHTNING)
    tape.release(*outputs)
    tape.drop(*done.others)
    context = op.run(tape, joined, "output of lightning attention, in order", LIGHTNING)
    tape.release(joined)
    bare = op.norm(tape, context, "norm of lightning attention", LLAMA_NORM, weight=inner)
    tape.release(context)
    gate = op.linear(tape, normal, inner, Site("gate of the output", LIGHTNING, layer="output_gate"))
    opened = op.pointwise(tape, gate, "sigmoid of the gate", LIGHTNING, saves_result=True)
    tape.release(gate)
    reason = "gated attention, input of the output projection"
    gated = op.product(tape, opened, bare, reason, LIGHTNING)
    tape.release(opened, bare)
    made = op.linear(tape, gated, h, Site("output projection", LIGHTNING, layer="out_proj"), reads=inner)
    tape.release(gated, given, *parts, *done.variables)
    tape.drop(done.decay)
    return Attended(made, done.state)


class _Done(NamedTuple):
    """What the loop's variables hold after an iteration."""

    state: Value
    decay: Store
    """The state's decay over the chunk."""
    variables: tuple[Value, ...] = ()
    """Scores, the output within the chunk, that of the state, and what the chunk adds to the state."""
    others: tuple[Store, ...] = ()
    """Outputs of the iterations that the tape does not run."""


#: How many iterations of the loop allocate a tensor: a number, or an expression that is 0 or 1.
_Times: TypeAlias = Size | int


def _loop(tape: Tape, parts: tuple[Value, ...], *, several: bool) -> tuple[_Done, tuple[Value, ...]]:
    """Run the loop over chunks. Return what its variables hold, and the outputs of the chunks."""
    zeros = Value(tape.make(op.TENSOR, "first state of lightning attention", e * STATE, LIGHTNING), e, STATE)
    tape.untracked.add(zeros)
    done = _Done(zeros, tape.make(op.TENSOR, "decay of the state", NOTHING, LIGHTNING))
    if not several:
        done, output = _iteration(tape, parts, done, s, times=1, is_last=True)
        return done, (output,)
    done, first = _iteration(tape, [_part(tape, one, Q, 1) for one in parts], done, Q, times=1, after=BETWEEN)
    done = _other_iterations(tape, done)
    done, between = _iteration(tape, [_part(tape, one, Q, BETWEEN) for one in parts], done, Q, times=BETWEEN)
    done, last = _iteration(tape, [_part(tape, one, REST, 1) for one in parts], done, REST, times=1, is_last=True)
    return done, (first, between, last)


def _iteration(
    tape: Tape, parts: Sequence[Value], done: _Done, tokens: Size, *, times: _Times, after: _Times = 1, is_last: bool = False
) -> tuple[_Done, Value]:  # fmt: skip
    """Run one chunk of ``tokens``. Return what variables hold after it, and its output. Nothing reads the last state.

    ``after``: how many states for a next chunk this counts.
    """
    query, key, value = parts
    rows, pairs = tokens * b * A * D * times, tokens * tokens * b * A * times
    earlier = done.variables or (None,) * 4
    decay = tape.make(op.TENSOR, "decay of the state", _wide(tape) * A * times, LIGHTNING)
    tape.drop(done.decay)
    scores = _product(tape, (query, key), ("scores of a chunk", pairs), copied=(True, True))
    decayed = _decayed(tape, scores, "scores of a chunk, decayed", pairs)
    tape.release(earlier[0])
    within = _product(tape, (decayed, value), ("attention within a chunk", rows), copied=(False, True))
    tape.release(decayed, earlier[1])
    reading = _decayed(tape, query, "queries of a chunk, decayed", rows)
    before = _product(tape, (reading, done.state), ("attention to chunks before", rows), copied=(True, False))
    tape.release(reading, earlier[2])
    output = op.add(tape, before, within, "output of a chunk", LIGHTNING)
    state = done.state
    if is_last:
        key, value, state = (_unfollowed(tape, one) for one in (key, value, state))
    writing = _decayed(tape, key, "keys of a chunk, decayed", rows)
    added = _product(tape, (writing, value), ("what a chunk adds to the state", STATE * times), copied=(True, True))
    tape.release(writing, earlier[3])
    state = _next_state(tape, state, added, decay, after)
    if is_last:
        tape.hold(output.store)
        state = _with_its_graph(tape, state, rows, decay if tape.follows(done.state) else None)
    tape.release(done.state)
    variables = (scores, within, before, added, *((output,) if is_last else ()))
    return _Done(state, decay, variables, done.others), output


def _wide(tape: Tape) -> Width:
    """Return the bytes of an element of the buffers, and of what they multiply: autocast leaves them in fp32."""
    return 4 if tape.autocast else e


def _part(tape: Tape, whole: Value, tokens: Size, times: _Times) -> Value:
    """Return one chunk as a view that no variable outlives. Its backward writes the gradient into zeros of the whole size."""
    made = Value(whole.store, whole.dtype, tokens * b * A * D * times)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        size = whole.dtype * whole.shape * times
        return [(whole, tape.make(op.GRADIENT, "gradient of a chunk, among zeros", size, LIGHTNING))]

    tape.add("part of a chunk", (made,), (), backward, of=(whole,))
    return made


def _unfollowed(tape: Tape, value: Value) -> Value:
    """Return the same tensor on a path that has no backward."""
    made = Value(value.store, value.dtype, value.shape)
    tape.untracked.add(made)
    return made


def _decayed(tape: Tape, value: Value, reason: str, shape: Size) -> Value:
    """Multiply by a buffer. Autograd saves no more than the buffer."""
    return op.run(
        tape, value, reason, LIGHTNING, dtype=op.wider(tape, value.dtype, _wide(tape)), shape=shape,
        gradient=f"gradient of a factor of the {reason}", widened=True,
    )  # fmt: skip


def _product(tape: Tape, pair: tuple[Value, Value], made_as: tuple[str, Size], *, copied: tuple[bool, bool]) -> Value:
    """Multiply two tensors. ``copied``: of several sequences the product reads and saves a copy in its own order."""
    (reason, shape), dtype = made_as, e if tape.autocast else pair[0].dtype
    casts = [one for one in pair if tape.is_wide(one.dtype) != tape.is_wide(dtype)]
    narrow = {one: op.cast(tape, one, dtype, Site(f"factor of the {reason}", LIGHTNING)) for one in casts}
    first, second = (narrow.get(one, one) for one in pair)
    saved, copies = list[op.Factor](), list[Store]()
    for one, is_copied in zip((first, second), copied, strict=True):
        saved.append((one, (one.store,)))
        if is_copied:
            if one.store.twin is None:
                tape.split_by_batch(one.store)
            name = f"factor of the {reason}, in order"
            copies.append(tape.make(op.TENSOR, name, one.dtype * one.shape * SEQUENCES, LIGHTNING))
            saved[-1] = one, (one.store, copies[-1])
    made = op.run(
        tape, (first, second), reason, LIGHTNING, dtype=dtype, shape=shape,
        saved=op.factors(tape, *saved), gradient=f"gradient of a factor of the {reason}",
    )  # fmt: skip
    tape.drop(*copies)
    tape.release(*narrow.values())
    return made


def _next_state(tape: Tape, state: Value, added: Value, decay: Store, after: _Times) -> Value:
    """``state * decay + added``."""
    site, width = Site("state, decayed", LIGHTNING), _wide(tape)
    decayed = op.run(tape, state, "state, decayed", site, dtype=width, saved=(decay,), gradient="gradient of the state")
    reason = "state of lightning attention after a chunk"
    made = Value(tape.make(op.TENSOR, reason, width * STATE * after, LIGHTNING), width, STATE)

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        return [op.narrowed(tape, one, grad_outputs[0], made, site) for one in (decayed, added) if tape.follows(one)]

    tape.add("state after a chunk", (made,), (), backward, of=(decayed, added))
    tape.release(decayed)
    return made


def _with_its_graph(tape: Tape, state: Value, rows: Size, decay: Store | None) -> Value:
    """Return the last state with what autograd saved for its backward, which never runs: keys, copies of values, any decay."""
    tape.release(state)
    graph = e * rows * (1 + SEQUENCES) + (NOTHING if decay is None else decay.size) if tape.saving else NOTHING
    reason = "last state of lightning attention, and what its graph saves"
    return Value(tape.make(op.TENSOR, reason, state.dtype * STATE + graph, LIGHTNING), state.dtype, STATE)


def _other_iterations(tape: Tape, done: _Done) -> _Done:
    """Count the outputs and saved tensors of the iterations between the first and the last two."""
    others, rows, width = at_least(0, Z - 3), Q * b * A * D, _wide(tape)
    outputs = tape.make(op.TENSOR, "outputs of the chunks between", e * rows * others, LIGHTNING)
    each = e * (rows * (2 + 4 * SEQUENCES) + Q * Q * b * A + STATE) + width * A
    kept = tape.make(op.TENSOR, "states and factors of the chunks between", each * others, LIGHTNING)
    made = Value(tape.hold(done.state.store), done.state.dtype, STATE * BETWEEN)
    tape.add("chunks between", (made,), (kept,), op.makes("gradient of a state", LIGHTNING, done.state), of=(done.state,))
    tape.drop(kept)
    tape.release(done.state)
    return done._replace(state=made, others=(outputs,))


# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    assert model.linear is not None  # noqa: S101  the family always has it
    assert model.moe is not None  # noqa: S101  as above
    hidden, inner = model.hidden_size, model.linear.num_value_heads * model.linear.value_head_dim
    lightning = (
        *rms_norm("self_attn.norm", inner),
        *linear("self_attn.qkv_proj", hidden, 3 * inner),
        *linear("self_attn.out_proj", inner, hidden),
        *linear("self_attn.output_gate", hidden, inner),
    )
    after = (*two_norms(model), *gate_and_experts(model, model.moe))
    return patterned(model, {"linear": (*lightning, *after), "full": (*attention_of(model), *after)})


_FACTORS = tuple(f"{part}_{name}_factor" for part in ("full_attn", "linear_attn", "mlp") for name in ("alpha", "beta"))
_CONFIG = WITH_EXPERTS._replace(required=(*WITH_EXPERTS.required, "head_dim", "layer_pattern")).plus(
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "linear_conv_kernel_dim": 1, "linear_chunk_size": 256,
    },
    fixed={"attention_bias": False, "mlp_bias": False},
    keys={
        "layer_pattern": ("layer_types",),
        "linear_num_key_heads": ("num_attention_heads",), "linear_num_value_heads": ("num_attention_heads",),
        "linear_key_head_dim": ("head_dim",), "linear_value_head_dim": ("head_dim",), "linear_chunk_size": ("block_size",),
    },
    counted_as=JITTER,
    harmless={
        "numbers in a formula, which change no tensor": _FACTORS,
        "of MiniMax's own code": ("attn_type_list", "postnorm", "rotary_dim", "shared_intermediate_size", "shared_moe_mode"),
    },
)  # fmt: skip
_MODULES = (
    "input_layernorm", "self_attn", "self_attn.qkv_proj", "self_attn.act_fn", *ATTENTION_MODULES, "self_attn.norm",
    "self_attn.output_gate", "self_attn.out_proj", "post_attention_layernorm", "mlp", "mlp.gate", "mlp.experts",
    "mlp.experts.act_fn",
)  # fmt: skip
FAMILIES = {"minimax": Definition(Program(_layer, LAYER, LLAMA_NORM), _tensors, _CONFIG, expert_modules=_MODULES)}

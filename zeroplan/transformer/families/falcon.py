"""Falcon: attention and MLP side by side, behind one LayerNorm (7B), or behind one each (40B, 180B).

7B has one key/value head, which ``scaled_dot_product_attention`` broadcasts; no kernel of CUDA does that, so it runs single
operators. 40B and 180B copy their keys and values for each query head first. The model builds a mask for every batch.
"""

from functools import partial

from zeroplan.expr import NOTHING, Size
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads, in_32_bits
from zeroplan.transformer.families.decoder import LAYER_NORM, Rotated, rotated, two_layer_mlp
from zeroplan.transformer.families.definition import Block, Definition, Program
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.tape import Site, Store, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike
from zeroplan.transformer.params_modules import layer_norm, linear
from zeroplan.transformer.symbols import T, a, c, h, k, q, r, s, v

FALCON = "transformers 5.23, models/falcon/modeling_falcon.py"
LAYER = f"{FALCON}, FalconDecoderLayer.forward"
ATTENTION = f"{FALCON}, FalconAttention.forward"
HEADS = f"{FALCON}, FalconAttention._split_heads"
_ONE = NOTHING + 1


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one layer. It also returns its attention weights, which stay alive while the next layer runs."""
    below: tuple[Store, ...] = ()
    if block.attention == "eager" and not tape.saving:
        below = (tape.make(op.TENSOR, "attention weights of the block below, one of its outputs", r * a * T * s, LAYER),)
    normal = wide = op.norm(tape, given, "norm before attention", LAYER_NORM, place=AT_ATTENTION_NORM)
    if not block.one_key:
        wide = op.norm(tape, given, "norm before the MLP", LAYER_NORM, place=AT_MLP_NORM)
    attended, weights = _attention(tape, normal, block)
    branch = _mlp(tape, wide, block)
    both = op.add_in_place(tape, branch, attended, "", Site("addition of the branches", LAYER))
    made = op.add(tape, given, both, "block output", LAYER)
    tape.release(*dict.fromkeys((normal, wide)), both, branch, attended, weights)
    tape.drop(*below)
    return made


_mlp = partial(two_layer_mlp, source=f"{FALCON}, FalconMLP.forward", layers=("dense_h_to_4h", "dense_4h_to_h"), bias=False)


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run attention. The variable of the joint projection lives until it returns."""
    joint = op.linear(tape, normal, (q + k + v), Site("joint q, k and v projection", ATTENTION, layer="query_key_value"))
    query, key, value = _parts(tape, joint, copied=not block.one_key)
    with_positions = _rotated(tape, query, key, block)
    tape.release(query, key)
    attend = partial(in_32_bits, has_mask=True, broadcast=True) if block.one_key and block.attention == "sdpa" else block.attend
    grouped = block.one_key and block.attention != "sdpa"
    context, weights = attend(tape, Heads(*with_positions, value, grouped=grouped, one_key=grouped))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, layer="dense"), reads=c)
    tape.release(joint, value, *with_positions, context)
    return Attended(made, weights)


def _parts(tape: Tape, joint: Value, *, copied: bool) -> tuple[Value, Value, Value]:
    """Return queries, keys and values. An index copies the keys and the values; ``copied``: so are all, for each query head."""
    (query,) = op.slices(tape, joint, (T * q,), Site("slice of the queries", HEADS))
    picked = [_picked(tape, joint, name, T * width) for name, width in (("keys", k), ("values", v))]
    if not copied:
        return query, picked[0], picked[1]
    spread = [_spread(tape, one, name) for one, name in zip(picked, ("keys", "values"), strict=True)]
    made = [_flat(tape, one, name) for one, name in zip((query, *spread), ("queries", "keys", "values"), strict=True)]
    tape.release(query, *spread, *picked)
    return made[0], made[1], made[2]


def _picked(tape: Tape, joint: Value, name: str, shape: Size) -> Value:
    index = tape.make(op.TENSOR, f"place of the {name}, int64", 8 * _ONE, HEADS)
    of = f"gradient of the {name}, among zeros"
    made = op.run(tape, joint, name, HEADS, shape=shape, saved=(index,), gradient=of)
    tape.drop(index)
    return made


def _spread(tape: Tape, value: Value, name: str) -> Value:
    """``broadcast_to`` every query head: a view, whose gradient the backward sums."""
    made = Value(tape.hold(value.store), value.dtype, T * q)
    tape.add(f"{name} for each query head", (made,), (), op.makes(f"gradient of the {name}", HEADS, value), of=(value,))
    return made


def _flat(tape: Tape, value: Value, name: str) -> Value:
    return op.run(tape, value, f"{name}, copied for each query head", HEADS, shape=T * q)


def _rotated(tape: Tape, query: Value, key: Value, block: Block) -> Rotated:
    return rotated(tape, query, key, block, source=ATTENTION)


def _tensors(model: ModelSpec) -> Layout:
    hidden, width, head = model.hidden_size, model.intermediate_size, model.head_dim
    names = ("input_layernorm",) if model.num_key_value_heads == 1 else ("ln_attn", "ln_mlp")
    block = (
        *linear("self_attention.query_key_value", hidden, hidden + 2 * model.num_key_value_heads * head),
        *linear("self_attention.dense", hidden, hidden),
        *linear("mlp.dense_h_to_4h", hidden, width),
        *linear("mlp.dense_4h_to_h", width, hidden),
        *(one for name in names for one in layer_norm(name, hidden)),
    )
    return alike(model, block, layer_norm, ("transformer.word_embeddings", "transformer.ln_f"))


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
    required=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    keys={
        "hidden_size": ("hidden_size", "n_embed"),
        "intermediate_size": ("ffn_hidden_size",),
        "num_key_value_heads": ("num_kv_heads",),
    },
    activation="activation",
    dropout={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    only={"alibi": (False,), "bias": (False,), "parallel_attn": (True,)},
    read=("multi_query", "new_decoder_architecture", "num_ln_in_parallel_attn"),
    harmless={"read by no decoder of these families": ("apply_residual_connection_post_layernorm",)},
)
_MODULES = (
    "input_layernorm", "ln_attn", "ln_mlp", "self_attention", "self_attention.query_key_value", "self_attention.dense", "mlp",
    "mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h",
)  # fmt: skip
FAMILIES = {"falcon": Definition(Program(_layer, LAYER, LAYER_NORM), _tensors, _CONFIG, _MODULES)}

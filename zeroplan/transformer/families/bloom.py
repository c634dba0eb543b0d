"""BLOOM: LayerNorm, a joint projection, eager attention with ALiBi, and a GELU that saves only its input."""

from zeroplan.expr import Size, at_most
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import in_order_of_tokens, masked, softmax
from zeroplan.transformer.families.decoder import LAYER_NORM
from zeroplan.transformer.families.definition import Around, Block, Definition, Held, Program
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM, STATISTICS
from zeroplan.transformer.families.tape import Site, Store, Tape, Value
from zeroplan.transformer.parameters import BlockRun, Layout
from zeroplan.transformer.params_modules import embedding, layer_norm, linear, two_layer_mlp, whole
from zeroplan.transformer.symbols import T, a, b, c, e, f, h, k, q, r, s, v

BLOOM = "transformers 5.23, models/bloom/modeling_bloom.py"
MODEL = f"{BLOOM}, BloomModel.forward"
LAYER = f"{BLOOM}, BloomBlock.forward"
ATTENTION = f"{BLOOM}, BloomAttention.forward"
MLP = f"{BLOOM}, BloomMLP.forward"
GELU = f"{BLOOM}, bloom_gelu_forward and bloom_gelu_back"


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one layer. It also returns its attention weights, which stay alive while the next layer runs."""
    below: tuple[Store, ...] = ()
    if not tape.saving and not block.alone:
        below = (tape.make(op.TENSOR, "attention weights of the block below, one of its outputs", e * a * T * s, LAYER),)
    normal = op.norm(tape, given, "norm before attention", LAYER_NORM, place=AT_ATTENTION_NORM)
    middle, weights = _attention(tape, normal, given)
    tape.release(normal)
    normal = op.norm(tape, middle, "norm before the MLP", LAYER_NORM, place=AT_MLP_NORM)
    inner = op.linear(tape, normal, f, Site("first MLP projection", MLP, layer="dense_h_to_4h"), bias=True)
    active = _gelu(tape, inner)
    tape.release(inner)
    branch = op.linear(tape, active, h, Site("second MLP projection", MLP, layer="dense_4h_to_h"), reads=f, bias=True)
    made = op.add(tape, middle, branch, "block output", LAYER)
    tape.release(branch, active, normal, middle, weights)
    tape.drop(*below)
    return made


def _attention(tape: Tape, normal: Value, given: Value) -> tuple[Value, Value]:
    """Run attention, whose module also adds the residual. Return the sum and the attention weights."""
    joint = op.linear(
        tape, normal, (q + k + v), Site("joint q, k and v projection", ATTENTION, layer="query_key_value"), bias=True
    )
    query, key, value = op.slices(tape, joint, (T * q, T * k, T * v), Site("slices of q, k and v", ATTENTION))
    copies = _flattened(tape, joint)
    tape.release(query, key, value)
    scores = _product(tape, (query, key), (joint.store, *copies[:2]), "scores with ALiBi", a * T * s)
    with_mask = masked(tape, scores, Site("attention: scores", ATTENTION))
    weights = softmax(tape, with_mask, e, ATTENTION)
    by_head = _product(tape, (weights, value), (weights.store, joint.store, copies[2]), "attention output, head by head", T * c)
    context = in_order_of_tokens(tape, by_head, "attention output")
    branch = op.linear(tape, context, h, Site("output projection", ATTENTION, layer="dense"), reads=c, bias=True)
    made = op.add(tape, given, branch, "residual stream between attention and MLP", ATTENTION)
    tape.drop(*copies)
    tape.release(joint, scores, with_mask, context, branch)
    return made, weights


def _flattened(tape: Tape, joint: Value) -> tuple[Store, ...]:
    """``reshape`` of batch and heads into one dimension: a view for a single sequence, a copy for several."""
    tape.split_by_batch(joint.store)
    names = (("queries", q), ("keys", k), ("values", v))
    return tuple(
        tape.make(op.TENSOR, f"{name}, batch and heads in one", e * T * width * at_most(1, b - 1), ATTENTION)
        for name, width in names
    )


def _product(tape: Tape, factors: tuple[Value, Value], saved: tuple[Store, ...], reason: str, shape: Size) -> Value:
    of = "gradient of a factor of the product"
    return op.run(tape, factors, reason, ATTENTION, dtype=e, shape=shape, saved=saved, gradient=of)


def _gelu(tape: Tape, value: Value) -> Value:
    formula = value.dtype * value.shape
    return op.run(
        tape, value, "gelu, input of the second projection", GELU, saved=(value.store,),
        passing=(("terms of tanh GELU", 3 * formula),), gradient="gradient of the input of gelu",
        beside=("terms of tanh GELU's derivative", 4 * formula),
    )  # fmt: skip


def _tensors(model: ModelSpec) -> Layout:
    hidden, token = model.hidden_size, "transformer.word_embeddings"
    block = (
        *layer_norm("input_layernorm", hidden),
        *linear("self_attention.query_key_value", hidden, 3 * hidden, bias=True),
        *linear("self_attention.dense", hidden, hidden, bias=True),
        *layer_norm("post_attention_layernorm", hidden),
        *two_layer_mlp(model),
    )
    return whole(
        model,
        embeddings=(*embedding(token, model.vocab_size, hidden), *layer_norm(f"{token}_layernorm", hidden)),
        runs=(BlockRun("dense", model.num_hidden_layers, block),),
        norm=layer_norm("transformer.ln_f", hidden),
        tied_to=f"{token}.weight",
    )


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
    fixed={"attention_bias": True, "mlp_bias": True},
    required=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    keys={
        "hidden_size": ("hidden_size", "n_embed"),
        "intermediate_size": ("n_inner",),
        "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "max_position_embeddings": ("seq_length",),
    },
    dropout={"hidden_dropout": 0.0, "attention_dropout": 0.0},
    only={"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,)},
    harmless={
        "read by no decoder of these families": (
            "attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion", "unk_token_id", "offset_alibi",
            "skip_bias_add", "skip_bias_add_qkv", "n_positions",
        ),
    },
)  # fmt: skip
_MODULES = (
    "input_layernorm", "self_attention", "self_attention.query_key_value", "self_attention.attention_dropout",
    "self_attention.dense", "post_attention_layernorm", "mlp", "mlp.dense_h_to_4h", "mlp.gelu_impl", "mlp.dense_4h_to_h",
)  # fmt: skip
_AROUND = Around(
    kept=(
        Held(r * T * h, "norm after the embedding: its input", LAYER_NORM.source),
        Held(8 * T, "norm after the embedding: mean and reciprocal standard deviation", LAYER_NORM.source, STATISTICS),
        Held(r * a * T, "ALiBi", MODEL),
    ),
    names_input=False,
)
FAMILIES = {"bloom": Definition(Program(_layer, LAYER, LAYER_NORM), _tensors, _CONFIG, _MODULES, tables=None, around=_AROUND)}

"""GPT-NeoX and Pythia: attention and MLP, each behind a LayerNorm, side by side or one after the other."""

from functools import partial

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import LAYER_NORM, Layer, rotated, two_layer_mlp
from zeroplan.transformer.families.definition import Block, Definition, Program, Tables
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, two_norms
from zeroplan.transformer.params_modules import layer_norm, linear
from zeroplan.transformer.params_modules import two_layer_mlp as mlp_parameters
from zeroplan.transformer.symbols import T, c, d_4, h, k, k_4, q, q_4, r, s, v

NEOX = "transformers 5.23, models/gpt_neox/modeling_gpt_neox.py"
ROTARY = f"{NEOX}, GPTNeoXRotaryEmbedding.forward"
LAYER = f"{NEOX}, GPTNeoXLayer.forward"
ATTENTION = f"{NEOX}, GPTNeoXAttention.forward"


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    return _side_by_side(tape, given, block) if block.parallel else _ONE_AFTER_THE_OTHER.run(tape, given, block)


def _side_by_side(tape: Tape, given: Value, block: Block) -> Value:
    """Run the layer with the parallel residual: both branches read ``given``. The attention weights live to the end."""
    normal = op.norm(tape, given, "norm before attention", LAYER_NORM, place=AT_ATTENTION_NORM)
    attended, weights = _attention(tape, normal, block)
    tape.release(normal)
    normal = op.norm(tape, given, "norm before the MLP", LAYER_NORM, place=AT_MLP_NORM)
    branch = _mlp(tape, normal, block)
    tape.release(normal)
    both = op.add(tape, branch, attended, "sum of MLP and attention", LAYER)
    made = op.add(tape, both, given, "block output", LAYER)
    tape.release(both, branch, attended, weights)
    return made


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    bias = block.attention_bias
    joint = op.linear(
        tape, normal, (q + k + v), Site("joint q, k and v projection", ATTENTION, layer="query_key_value"), bias=bias
    )
    query, key, value = op.chunk(tape, joint, (T * q, T * k, T * v), Site("parts q, k and v", ATTENTION))
    with_positions = rotated(tape, query, key, block, source=ATTENTION, partly=(T * q_4, T * k_4, d_4))
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*with_positions, value, grouped=False, one_key=False, joined=True, joint=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, layer="dense"), reads=c, bias=bias)
    tape.release(joint, value, *with_positions, context)
    return Attended(made, weights)


_mlp = partial(two_layer_mlp, source=f"{NEOX}, GPTNeoXMLP.forward", layers=("dense_h_to_4h", "dense_4h_to_h"))
_ONE_AFTER_THE_OTHER = Layer(LAYER_NORM, _attention, _mlp, LAYER)


def _tensors(model: ModelSpec) -> Layout:
    hidden = model.hidden_size
    block = (
        *two_norms(model, layer_norm),
        *linear("attention.query_key_value", hidden, 3 * hidden, bias=model.attention_bias),
        *linear("attention.dense", hidden, hidden, bias=model.attention_bias),
        *mlp_parameters(model),
    )
    return alike(model, block, layer_norm, ("gpt_neox.embed_in", "gpt_neox.final_layer_norm"))


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 2048, "attention_bias": True},
    fixed={"mlp_bias": True},
    dropout={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    only={"rotary_pct": (0.25,), "partial_rotary_factor": (0.25,)},
    read=("use_parallel_residual",),
    harmless={"for models with another head": ("classifier_dropout",)},
)
_MODULES = (
    "input_layernorm", "attention", "attention.query_key_value", "attention.dense", "post_attention_dropout",
    "post_attention_layernorm", "mlp", "mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h", "post_mlp_dropout",
)  # fmt: skip


#: ``rotary_pct`` of GPTNeoXConfig is 0.25 in every published model.
_TABLES = Tables(2 * r * s * d_4, "rotary cos and sin, of a quarter of each head", ROTARY)
FAMILIES = {"gpt_neox": Definition(Program(_layer, LAYER, LAYER_NORM), _tensors, _CONFIG, _MODULES, tables=_TABLES)}

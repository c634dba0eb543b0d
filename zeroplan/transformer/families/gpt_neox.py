"""Blocks of GPT-NeoX and Pythia: attention and MLP, each behind a LayerNorm, side by side or one after the other."""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.definition import ConfigKeys, Definition, Tables
from zeroplan.transformer.families.norms import LAYER_BEFORE_ATTENTION, LAYER_BEFORE_MLP, LAYER_NORM
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import BlockRun, Layout
from zeroplan.transformer.params_modules import embedding, layer_norm, linear, two_layer_mlp, whole
from zeroplan.transformer.symbols import T, c, d_4, f, h, k, k_4, q, q_4, r, s, v

ROTARY = "transformers 5.23, models/gpt_neox/modeling_gpt_neox.py, GPTNeoXRotaryEmbedding.forward"
LAYER = "transformers 5.23, models/gpt_neox/modeling_gpt_neox.py, GPTNeoXLayer.forward"
ATTENTION = "transformers 5.23, models/gpt_neox/modeling_gpt_neox.py, GPTNeoXAttention.forward"
MLP = "transformers 5.23, models/gpt_neox/modeling_gpt_neox.py, GPTNeoXMLP.forward"
ACTIVE = "activation, input of the second projection"


def gpt_neox(tape: Tape, given: Value, block: Block) -> Value:
    """One layer, with the parallel residual or without; it holds the attention's weights by name to its end."""
    normal = op.layer_norm(tape, given, LAYER_BEFORE_ATTENTION, LAYER_NORM)
    attended, weights = _attention(tape, normal, block)
    tape.release(normal)
    made = (_side_by_side if block.parallel else _one_after_the_other)(tape, given, attended, block)
    if weights is not None:
        tape.release(weights)
    return made


def _side_by_side(tape: Tape, given: Value, attended: Value, block: Block) -> Value:
    normal = op.layer_norm(tape, given, LAYER_BEFORE_MLP, LAYER_NORM)
    branch = _mlp(tape, normal, block)
    tape.release(normal)
    both = op.add(tape, branch, attended, "sum of MLP and attention", Site("addition of the branches", LAYER))
    made = op.add(tape, both, given, "block output", Site("residual addition", LAYER))
    tape.release(both, branch, attended)
    return made


def _one_after_the_other(tape: Tape, given: Value, attended: Value, block: Block) -> Value:
    addition = Site("residual addition", LAYER)
    middle = op.add(tape, attended, given, "residual stream between attention and MLP", addition)
    tape.release(attended)
    normal = op.layer_norm(tape, middle, LAYER_BEFORE_MLP, LAYER_NORM)
    branch = _mlp(tape, normal, block)
    tape.release(normal)
    made = op.add(tape, branch, middle, "block output", addition)
    tape.release(branch, middle)
    return made


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    bias = block.attention_bias
    joint = op.linear(tape, normal, (q + k + v), Site("joint q, k and v projection", ATTENTION), bias=bias)
    query, key, value = op.chunk(tape, joint, (T * q, T * k, T * v), Site("parts q, k and v", ATTENTION))
    turned = (
        op.rotary(tape, query, Site("queries", ATTENTION), part=T * q_4),
        op.rotary(tape, key, Site("keys", ATTENTION), part=T * k_4),
    )
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*turned, value, grouped=False, one_key=False, joined=True, joint=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION), reads=c, bias=bias)
    tape.release(joint, value, *turned, context)
    return Attended(made, weights)


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    inner = op.linear(tape, normal, f, Site("first MLP projection", MLP), bias=True)
    active = activated(tape, inner, block.activation, ACTIVE, MLP)
    tape.release(inner)
    made = op.linear(tape, active, h, Site("second MLP projection", MLP), reads=f, bias=True)
    tape.release(active)
    return made


def _tensors(model: ModelSpec) -> Layout:
    """Rotary positions, so no table."""
    hidden = model.hidden_size
    block = (
        *layer_norm("input_layernorm", hidden),
        *layer_norm("post_attention_layernorm", hidden),
        *linear("attention.query_key_value", hidden, 3 * hidden, bias=model.attention_bias),
        *linear("attention.dense", hidden, hidden, bias=model.attention_bias),
        *two_layer_mlp(model),
    )
    return whole(
        model,
        embeddings=embedding("gpt_neox.embed_in", model.vocab_size, hidden),
        runs=(BlockRun("dense", model.num_hidden_layers, block),),
        norm=layer_norm("gpt_neox.final_layer_norm", hidden),
        tied_to="gpt_neox.embed_in.weight",
    )


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


def _tables(_model: ModelSpec) -> Tables:
    """A quarter of each head is turned (``rotary_pct`` of GPTNeoXConfig, 0.25 in every published model)."""
    return Tables(2 * r * s * d_4, "rotary cos and sin, of a quarter of each head", ROTARY)


FAMILIES = {"gpt_neox": Definition(Program(gpt_neox, LAYER), _tensors, _CONFIG, _MODULES, tables=_tables)}

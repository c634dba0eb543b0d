"""Phi-1, Phi-1.5 and Phi-2: attention and MLP read one LayerNorm side by side, positions rotate 32 elements of each head.

The head has a bias.
"""

from zeroplan.expr import NOTHING
from zeroplan.ledger import Module
from zeroplan.spec.family import TRAITS
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import LAYER_NORM, two_layer_mlp
from zeroplan.transformer.families.definition import Block, Definition, Program, Tables
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params_gated import alike, attention_of
from zeroplan.transformer.params_modules import layer_norm, linear
from zeroplan.transformer.symbols import T, a, c, h, k, q, r, s, v

PHI = "transformers 5.23, models/phi/modeling_phi.py"
LAYER = f"{PHI}, PhiDecoderLayer.forward"
ATTENTION = f"{PHI}, PhiAttention.forward"
ROTARY = TRAITS["phi"].rotary_width
"""Elements of each head that positions rotate, in every published model."""


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one layer. The variables of both branches and of the norm's output live until the sum exists."""
    normal = op.norm(tape, given, "norm before both branches", LAYER_NORM, place=AT_ATTENTION_NORM)
    attended, weights = _attention(tape, normal, block)
    branch = two_layer_mlp(tape, normal, block, f"{PHI}, PhiMLP.forward", layers=("fc1", "fc2"))
    both = op.add(tape, attended, branch, "sum of attention and MLP", LAYER)
    made = op.add(tape, both, given, "block output", LAYER)
    tape.release(both, normal, attended, branch, weights)
    return made


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run attention. Variables hold both parts of the queries and keys until it returns."""
    projected = [
        op.linear(tape, normal, width, Site(f"{name} projection", ATTENTION, module), bias=True)
        for width, name, module in ((q, "q", Module.Q), (k, "k", Module.K), (v, "v", Module.V))
    ]
    query, key, value = projected
    parts = [
        op.slices(tape, one, (T * a * ROTARY, T * (width - a * ROTARY)), Site(f"parts of the {name}", ATTENTION))
        for one, width, name in ((query, q, "queries"), (key, k, "keys"))
    ]
    with_positions = [
        op.rotary(tape, bare, Site(f"rotated part of the {name}", ATTENTION), per_token=NOTHING + ROTARY)
        for (bare, _), name in zip(parts, ("queries", "keys"), strict=True)
    ]
    tape.release(*(bare for bare, _ in parts))
    query, key = (
        op.joined(tape, (first, rest), name, T * width, ATTENTION)
        for first, (_, rest), name, width in zip(with_positions, parts, ("queries", "keys"), (q, k), strict=True)
    )
    tape.release(*projected[:2])
    context, weights = block.attend(tape, Heads(query, key, value, block.grouped, block.one_key, joined=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, Module.O, layer="dense"), reads=c, bias=True)
    tape.release(value, query, key, context, *with_positions, *(rest for _, rest in parts))
    return Attended(made, weights)


def _tensors(model: ModelSpec) -> Layout:
    hidden, width = model.hidden_size, model.intermediate_size
    attention = [one._replace(name=one.name.replace("o_proj", "dense")) for one in attention_of(model, bias=True)]
    mlp = (*linear("mlp.fc1", hidden, width, bias=True), *linear("mlp.fc2", width, hidden, bias=True))
    block = (*attention, *mlp, *layer_norm("input_layernorm", hidden))
    made = alike(model, block, layer_norm, ("model.embed_tokens", "model.final_layernorm"))
    bias = Parameter("lm_head.bias", (model.vocab_size,), autocast=True)
    return made if model.head_rows else made._replace(tail=(*made.tail, bias))


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 2048},
    fixed={"attention_bias": True, "mlp_bias": True},
    dropout={"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    only={"qk_layernorm": (False,)},
    read=("partial_rotary_factor",),
)
_MODULES = (
    "input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense",
    "resid_dropout", "mlp", "mlp.fc1", "mlp.activation_fn", "mlp.fc2", "resid_dropout",
)  # fmt: skip
_TABLES = Tables(2 * r * s * ROTARY, "rotary cos and sin, of a part of each head", f"{PHI}, PhiRotaryEmbedding.forward")
FAMILIES = {"phi": Definition(Program(_layer, LAYER, LAYER_NORM), _tensors, _CONFIG, _MODULES, tables=_TABLES)}

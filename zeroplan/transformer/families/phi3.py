"""Phi-3: Llama's block, with one projection for q, k and v and one for gate and up."""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import joint_mlp, layer, layer_of, rotated
from zeroplan.transformer.families.definition import Block, Definition
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, key_width, query_width, two_norms
from zeroplan.transformer.params_modules import linear
from zeroplan.transformer.symbols import T, c, h, k, q, v

PHI3 = "transformers 5.23, models/phi3/modeling_phi3.py, Phi3"
ATTENTION = f"{PHI3}Attention.forward"


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    joint = op.linear(tape, normal, (q + k + v), Site("joint q, k and v projection", ATTENTION, layer="qkv_proj"))
    query, key, value = op.slices(tape, joint, (T * q, T * k, T * v), Site("slices of q, k and v", ATTENTION))
    with_positions = rotated(tape, query, key, block, source=ATTENTION)
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*with_positions, value, block.grouped, block.one_key, joined=True, joint=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, layer="o_proj"), reads=c)
    tape.release(joint, value, *with_positions, context)
    return Attended(made, weights)


_LAYER = layer(layer_of(PHI3, Norm("cast, then weighted", f"{PHI3}RMSNorm.forward"), _attention, joint_mlp))


def _tensors(model: ModelSpec) -> Layout:
    hidden, width, query = model.hidden_size, model.intermediate_size, query_width(model)
    attention = (
        *linear("self_attn.o_proj", query, hidden),
        *linear("self_attn.qkv_proj", hidden, query + 2 * key_width(model)),
    )
    mlp = (*linear("mlp.gate_up_proj", hidden, 2 * width), *linear("mlp.down_proj", width, hidden))
    return alike(model, (*attention, *mlp, *two_norms(model)))


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 4096},
    fixed={"attention_bias": False, "mlp_bias": False},
    dropout={"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    counted_as={"partial_rotary_factor": (1.0, "rotary positions of a part of each head take less")},
)
_MODULES = (
    "input_layernorm", "self_attn", "self_attn.qkv_proj", "self_attn.o_proj", "resid_attn_dropout",
    "post_attention_layernorm", "mlp", "mlp.gate_up_proj", "mlp.activation_fn", "mlp.down_proj", "resid_mlp_dropout",
)  # fmt: skip
FAMILIES = {"phi3": Definition(_LAYER, _tensors, _CONFIG, _MODULES)}

"""Blocks of the Phi-3 kind: Llama's, with one projection for q, k and v and one for gate and up."""

from functools import partial

from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.definition import ConfigKeys, Definition
from zeroplan.transformer.families.gated import Branches, layer
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, key_width, query_width, two_norms
from zeroplan.transformer.params_modules import linear
from zeroplan.transformer.symbols import T, c, f, h, k, q, v

LAYER = "transformers 5.23, models/phi3/modeling_phi3.py, Phi3DecoderLayer.forward"
ATTENTION = "transformers 5.23, models/phi3/modeling_phi3.py, Phi3Attention.forward"
MLP = "transformers 5.23, models/phi3/modeling_phi3.py, Phi3MLP.forward"
NORM = NormAs(one_plus=False, source="transformers 5.23, models/phi3/modeling_phi3.py, Phi3RMSNorm.forward")


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    joint = op.linear(tape, normal, (q + k + v), Site("joint q, k and v projection", ATTENTION))
    query, key, value = op.slices(tape, joint, (T * q, T * k, T * v), Site("slices of q, k and v", ATTENTION))
    turned = op.rotary(tape, query, Site("queries", ATTENTION)), op.rotary(tape, key, Site("keys", ATTENTION))
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*turned, value, block.grouped, block.one_key, joined=True, joint=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION), reads=c)
    tape.release(joint, value, *turned, context)
    return Attended(made, weights)


def joint_mlp(tape: Tape, normal: Value, block: Block, source: str) -> Value:
    """A gated MLP whose gate and up projections are one matrix."""
    both = op.linear(tape, normal, (f + f), Site("joint gate and up projection", source))
    gate, up = op.chunk(tape, both, (T * f, T * f), Site("gate and up", source))
    tape.release(both)
    active = activated(tape, gate, block.activation, f"{block.activation} of the gate", source)
    inner = op.product(tape, up, active, "gated product, input of the down projection", Site("gated product", source))
    tape.release(active, up)
    made = op.linear(tape, inner, h, Site("down projection", source, Module.DOWN), reads=f)
    tape.release(inner, gate)
    return made


_PARTS = Branches(NORM, _attention, partial(joint_mlp, source=MLP), LAYER)


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
FAMILIES = {"phi3": Definition(layer(_PARTS), _tensors, _CONFIG, _MODULES)}

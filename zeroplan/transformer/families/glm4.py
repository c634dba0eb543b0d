"""Blocks of GLM-4: norms before and after each branch, rotary positions of half of each head, one matrix for gate and up."""

from functools import partial
from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.definition import ConfigKeys, Definition, Tables
from zeroplan.transformer.families.gated import Branches, layer
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.parts import ATTENTION_MODULES
from zeroplan.transformer.families.phi3 import joint_mlp
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, attention_of
from zeroplan.transformer.params_modules import linear, rms_norm
from zeroplan.transformer.symbols import T, c, d_4, h, k, k_4, q, q_4, r, s, v

LAYER = "transformers 5.23, models/glm4/modeling_glm4.py, Glm4DecoderLayer.forward"
ATTENTION = "transformers 5.23, models/glm4/modeling_glm4.py, Glm4Attention.forward"
TURNING = "transformers 5.23, models/glm4/modeling_glm4.py, apply_rotary_pos_emb"
ROTARY = "transformers 5.23, models/glm4/modeling_glm4.py, Glm4RotaryEmbedding.forward"
MLP = "transformers 5.23, models/glm4/modeling_glm4.py, Glm4MLP.forward"
NORM = NormAs(one_plus=False, source="transformers 5.23, models/glm4/modeling_glm4.py, Glm4RMSNorm.forward")


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    bias = block.attention_bias
    query = op.linear(tape, normal, q, Site("q projection", ATTENTION), bias=bias)
    key = op.linear(tape, normal, k, Site("k projection", ATTENTION), bias=bias)
    value = op.linear(tape, normal, v, Site("v projection", ATTENTION), bias=bias)
    turned = _turned(tape, query, key)
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*turned, value, block.grouped, block.one_key, joined=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION), reads=c)
    tape.release(value, *turned, context)
    return Attended(made, weights)


_PARTS = Branches(NORM, _attention, partial(joint_mlp, source=MLP), LAYER, after=(Place(At.NORM), Place(At.NORM)))


# --- positions of pairs that lie side by side, in the first half of each head ---------------------------------------------


def _turned(tape: Tape, query: Value, key: Value) -> tuple[Value, Value]:
    """Queries and keys, head by head. The tables are copied, each angle twice, and the copies are saved."""
    cos, sin = (tape.make(op.TENSOR, f"{name} of each pair", 2 * r * s * d_4, TURNING) for name in ("cos", "sin"))
    queries, keys = _Half("queries", q_4), _Half("keys", k_4)
    both = op.slices(tape, query, (queries.shape,) * 2, queries.site), op.slices(tape, key, (keys.shape,) * 2, keys.site)
    turned = _half_turned(tape, both[0][0], cos, sin, queries), _half_turned(tape, both[1][0], cos, sin, keys)
    query = op.joined(tape, (turned[0], both[0][1]), "queries", 2 * queries.shape, queries.site)
    tape.release(turned[0])
    key = op.joined(tape, (turned[1], both[1][1]), "keys", 2 * keys.shape, keys.site)
    tape.drop(cos, sin)
    tape.release(turned[1], *both[0], *both[1])
    return query, key


class _Half(NamedTuple):
    """Half of each head of the queries, or of the keys; ``quarter`` is the width of a quarter of all heads."""

    name: str
    quarter: Size

    @property
    def shape(self) -> Size:
        return 2 * T * self.quarter

    @property
    def site(self) -> Site:
        return Site(f"halves of the {self.name}", TURNING)


def _half_turned(tape: Tape, half: Value, cos: Store, sin: Store, of: _Half) -> Value:
    """``x·cos + rotate_half(x)·sin``."""
    direct = _times(tape, half, cos, f"{of.name} times cos")
    exchanged = _exchanged(tape, half, of)
    times_sin = _times(tape, exchanged, sin, f"{of.name} times sin")
    tape.release(exchanged)
    made = op.add(tape, direct, times_sin, f"{of.name}, half turned", Site(f"rotary positions of the {of.name}", TURNING))
    tape.release(direct, times_sin)
    return made


def _times(tape: Tape, value: Value, table: Store, reason: str) -> Value:
    made = op.tensor(tape, reason, op.wider(tape, value.dtype, r), value.shape, TURNING)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        passed = tape.make(op.GRADIENT, f"gradient through {reason}", made.dtype * made.shape, TURNING)
        return [(value, op.as_narrow(tape, value, passed, made, TURNING))]

    tape.add(reason, (made,), (table,), backward, of=(value,))
    return made


def _exchanged(tape: Tape, half: Value, of: _Half) -> Value:
    """``stack((-x[1::2], x[::2]))``: the negative is a tensor of its own; gradients are views of one."""
    site = Site(f"even and odd elements of the {of.name}", TURNING)
    even, odd = op.slices(tape, half, (T * of.quarter,) * 2, site)
    negative = op.multiplied(tape, odd, site._replace(name=f"odd elements of the {of.name}, negative"))
    made = op.tensor(tape, f"{of.name}, pairs exchanged", half.dtype, half.shape, TURNING)
    tape.add(f"{of.name}, pairs exchanged", (made,), (), op.passes(negative, even), of=(negative, even))
    tape.release(negative, even, odd)
    return made


# --- tensors, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    hidden, width = model.hidden_size, model.intermediate_size
    attention = attention_of(model, bias=model.attention_bias, output_bias=False)
    mlp = (*linear("mlp.gate_up_proj", hidden, 2 * width), *linear("mlp.down_proj", width, hidden))
    names = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    return alike(model, (*attention, *mlp, *(norm for name in names for norm in rms_norm(name, hidden))))


def _tables(_model: ModelSpec) -> Tables:
    return Tables(4 * r * s * d_4, "rotary cos and sin, of half of each head", ROTARY, copied=True)


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    fixed={"mlp_bias": False},
    only={"partial_rotary_factor": (0.5,)},
)
_MODULES = (
    "input_layernorm", "self_attn", *ATTENTION_MODULES, "post_self_attn_layernorm",
    "post_attention_layernorm", "mlp", "mlp.gate_up_proj", "mlp.activation_fn", "mlp.down_proj", "post_mlp_layernorm",
)  # fmt: skip
FAMILIES = {"glm4": Definition(layer(_PARTS), _tensors, _CONFIG, _MODULES, tables=_tables)}

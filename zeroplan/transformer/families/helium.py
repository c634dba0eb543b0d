"""Helium: Llama's block with norms that multiply by their weight in fp32, and positions that rotate neighbours."""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import Attention, Rotated, gated_mlp, layer, layer_of
from zeroplan.transformer.families.definition import Block, Definition, Tables
from zeroplan.transformer.families.glm4 import Half, rotate
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, dense_block
from zeroplan.transformer.symbols import d, k_2, q_2, r, s

HELIUM = "transformers 5.23, models/helium/modeling_helium.py"
ROTARY = f"{HELIUM}, apply_rotary_pos_emb"


def _rotated(tape: Tape, query: Value, key: Value, _block: Block) -> Rotated:
    """Return queries and keys with positions. The tables are copied, each angle twice, and autograd saves the copies."""
    cos, sin = (tape.make(op.TENSOR, f"{name} of each pair", r * s * d, ROTARY) for name in ("cos", "sin"))
    query = rotate(tape, query, (cos, sin), Half("queries", q_2), "rotated", ROTARY)
    key = rotate(tape, key, (cos, sin), Half("keys", k_2), "rotated", ROTARY)
    tape.drop(cos, sin)
    return query, key


_NORM = Norm("copied weight, then cast", f"{HELIUM}, HeliumRMSNorm.forward")
_ATTENTION = Attention(f"{HELIUM}, HeliumAttention.forward", rotated=_rotated)
_LAYER = layer(layer_of(f"{HELIUM}, Helium", _NORM, _ATTENTION.run, gated_mlp))


def _tensors(model: ModelSpec) -> Layout:
    return alike(model, dense_block(model, output_bias=False))


_CONFIG = ConfigKeys(defaults={"max_position_embeddings": 4096, "num_key_value_heads": 20, "head_dim": 128})
_TABLES = Tables(2 * r * s * d, source=f"{HELIUM}, HeliumRotaryEmbedding.forward", copied=True)
FAMILIES = {"helium": Definition(_LAYER, _tensors, _CONFIG, tables=_TABLES)}

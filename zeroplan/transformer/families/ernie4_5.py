"""ERNIE 4.5, the dense models: Llama with rotary positions on neighbouring elements, in fp32."""

from functools import partial

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import LLAMA_NORM, Attention, Layer, Rotated, gated_mlp, layer
from zeroplan.transformer.families.definition import Block, ConfigKeys, Definition, Tables
from zeroplan.transformer.families.glm4 import Half, exchanged_pairs, times_table
from zeroplan.transformer.families.olmo2 import CAST
from zeroplan.transformer.families.tape import Site, Store, Tape, Value, Width
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, attention_of, gated, two_norms
from zeroplan.transformer.symbols import d, e, k_2, q_2, s

ERNIE = "transformers 5.23, models/ernie4_5/modeling_ernie4_5.py"
ROTARY = f"{ERNIE}, apply_rotary_pos_emb"


def _rotated(tape: Tape, query: Value, key: Value, block: Block) -> Rotated:
    """Return rotated queries and keys. The tables are copied, each angle twice, and autograd saves the copies."""
    tables: Width = e if block.casts_inputs else 4
    if block.casts_inputs:
        tape.history.input_copies += (tape.make(op.TENSOR, "rotary cos and sin, cast", 2 * e * s * d, CAST),)
    cos, sin = (tape.make(op.TENSOR, f"{name} of each pair", tables * s * d, ROTARY) for name in ("cos", "sin"))
    halves = (query, Half("queries", q_2)), (key, Half("keys", k_2))
    turned = [_turned(tape, one, cos, sin, half) for one, half in halves]
    made = [
        op.cast(tape, wide, bare.dtype, Site(f"turned {half.name}", ROTARY))
        for wide, (bare, half) in zip(turned, halves, strict=True)
    ]
    tape.drop(cos, sin)
    tape.release(*turned)
    return made[0], made[1]


def _turned(tape: Tape, value: Value, cos: Store, sin: Store, of: Half) -> Value:
    """``x·cos + rotate_half(x)·sin`` of whole heads, with both factors cast to fp32."""
    wide = op.cast(tape, value, 4, Site(of.name, ROTARY))
    direct = times_table(tape, wide, cos, f"{of.name} times cos")
    tape.release(wide)
    bare = exchanged_pairs(tape, value, of)
    exchanged = op.cast(tape, bare, 4, Site(f"{of.name}, pairs exchanged", ROTARY))
    tape.release(bare)
    times_sin = times_table(tape, exchanged, sin, f"{of.name} times sin")
    tape.release(exchanged)
    made = op.add(tape, direct, times_sin, f"{of.name}, turned", Site(f"rotary positions of the {of.name}", ROTARY))
    tape.release(direct, times_sin)
    return made


def _tensors(model: ModelSpec) -> Layout:
    return alike(model, (*attention_of(model), *gated("mlp", model, model.intermediate_size), *two_norms(model)))


_LAYER = Layer(
    LLAMA_NORM,
    Attention(f"{ERNIE}, Ernie4_5Attention.forward", rotated=_rotated).run,
    partial(gated_mlp, source=f"{ERNIE}, Ernie4_5MLP.forward"),
    f"{ERNIE}, Ernie4_5DecoderLayer.forward",
)
_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
    fixed={"attention_bias": False, "mlp_bias": False},
    dropout={},
    only={"use_bias": (False,)},
)
_TABLES = Tables(
    8 * s * d, "rotary cos and sin, fp32", f"{ERNIE}, Ernie4_5RotaryEmbedding.forward", in_32_bits=True, copied=True
)
FAMILIES = {"ernie4_5": Definition(layer(_LAYER), _tensors, _CONFIG, tables=_TABLES)}

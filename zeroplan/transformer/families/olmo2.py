"""OLMo 2 and 3, EXAONE 4: norms after attention and after the MLP, and norms of queries and keys.

OLMo normalises the queries of all heads together, and computes positions in fp32. EXAONE 4 normalises each head; if it has
layers with a window, its layers without one have no rotary positions.
"""

from zeroplan.spec.family import TRAITS
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import LLAMA_NORM, Attention, Rotated, gated_mlp, layer, layer_of
from zeroplan.transformer.families.definition import Around, Block, Definition, Tables
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import WITH_LATE_NORMS, gated_modules
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tags import AFTER_ATTENTION_AND_MLP
from zeroplan.transformer.families.tape import Site, Tape, Value, Width
from zeroplan.transformer.families.widths import kinds_of_layers
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, dense_block, head_norms, joint_norms
from zeroplan.transformer.params_modules import Parameters
from zeroplan.transformer.symbols import d, e, s

OLMO2 = "transformers 5.23, models/olmo2/modeling_olmo2.py"
ATTENTION = f"{OLMO2}, Olmo2Attention.forward"
ROTARY = f"{OLMO2}, Olmo2RotaryEmbedding.forward"
EXAONE4 = "transformers 5.23, models/exaone4/modeling_exaone4.py, Exaone4"
CAST = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_state.py, FSDPState._pre_forward"
NORM = Norm("weighted, then cast", f"{OLMO2}, Olmo2RMSNorm.forward")


def _rotated(tape: Tape, query: Value, key: Value, block: Block) -> Rotated:
    """Return queries and keys in their own dtype. fp32 tables make fp32 products; the tables that FSDP2 casts make 16-bit ones."""
    tables: Width = e if block.casts_inputs else 4
    copies = (tape.make(op.TENSOR, "rotary cos and sin, cast", 2 * e * s * d, CAST),) if block.casts_inputs else ()
    tape.history.input_copies += copies
    bare = [
        op.rotary(tape, one, Site(f"{name}, rotated", ATTENTION), tables=tables, saved=copies)
        for one, name in ((query, "queries"), (key, "keys"))
    ]
    made = (
        op.cast(tape, bare[0], query.dtype, Site("queries", ATTENTION)),
        op.cast(tape, bare[1], key.dtype, Site("keys", ATTENTION)),
    )
    tape.release(*bare)
    return made


_ATTENTION = Attention(ATTENTION, norm=NORM, norm_at_once=True, norm_over_heads=True, rotated=_rotated)
_OF_EXAONE = Attention(f"{EXAONE4}Attention.forward", norm=LLAMA_NORM)
LAYER, _EXAONE_LAYER = (
    layer(layer_of(of, norm, attention, gated_mlp)._replace(before=None, after=AFTER_ATTENTION_AND_MLP))
    for of, norm, attention in ((f"{OLMO2}, Olmo2", NORM, _ATTENTION.run), (EXAONE4, LLAMA_NORM, _OF_EXAONE.run))
)


def _tensors(model: ModelSpec) -> Layout:
    return alike(model, of_block(model))


def of_block(model: ModelSpec) -> Parameters:
    """Return the parameters of a block of full attention."""
    of_heads = head_norms(model) if model.head_norms else joint_norms(model)
    return dense_block(model, of_heads=of_heads, names=("post_attention_layernorm", "post_feedforward_layernorm"))


TABLES = Tables(8 * s * d, "rotary cos and sin, fp32", ROTARY, in_32_bits=True)


def _tables(model: ModelSpec) -> Tables:
    """Return the position tables. OLMo 3 has one table for its local layers and one for its global layers."""
    if not TRAITS[model.family].angles_of_kinds or kinds_of_layers(model) == 1:
        return TABLES
    return Tables(16 * s * d, "rotary cos and sin, of local and of global layers, fp32", ROTARY, in_32_bits=True)


_CONFIG = ConfigKeys(defaults={"max_position_embeddings": 2048}, fixed={"mlp_bias": False})
_OLMO_3 = _CONFIG._replace(defaults={"max_position_embeddings": 2048, "sliding_window": 4096})
_EXAONE_4 = ConfigKeys(
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "sliding_window": 4096},
    fixed={"attention_bias": False, "mlp_bias": False},
    only={"sliding_window_pattern": (4, "LLLG", 0)},  # 0: transformers writes this if there is no window
)
MODULES = (
    "self_attn", "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_proj", "self_attn.k_norm", "self_attn.v_proj",
    "self_attn.o_proj", "post_attention_layernorm", *gated_modules("mlp"), "post_feedforward_layernorm",
)  # fmt: skip
_OLMO_2 = Definition(LAYER, _tensors, _CONFIG, MODULES, tables=_tables)
FAMILIES = {
    "olmo2": _OLMO_2,
    "olmo3": _OLMO_2._replace(config=_OLMO_3, around=Around(masks=2)),
    "exaone4": Definition(
        _EXAONE_LAYER, _tensors, _EXAONE_4, ("self_attn", *WITH_LATE_NORMS, *MODULES[7:]), around=Around(masks=2)
    ),
}

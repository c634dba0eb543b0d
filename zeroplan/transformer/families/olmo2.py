"""Blocks of OLMo 2 and 3: norms after attention and after the MLP, and over queries and keys of all heads; positions in fp32."""

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.spec.family import TRAITS
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.definition import Around, ConfigKeys, Definition, Tables
from zeroplan.transformer.families.gated import gated_mlp
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.parts import gated_modules
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Site, Tape, Value, Width
from zeroplan.transformer.families.widths import kinds_of_layers
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, attention_of, gated, key_width, query_width
from zeroplan.transformer.params_modules import rms_norm
from zeroplan.transformer.symbols import c, d, e, h, k, q, s, v

LAYER = "transformers 5.23, models/olmo2/modeling_olmo2.py, Olmo2DecoderLayer.forward"
ATTENTION = "transformers 5.23, models/olmo2/modeling_olmo2.py, Olmo2Attention.forward"
MLP = "transformers 5.23, models/olmo2/modeling_olmo2.py, Olmo2MLP.forward"
CAST = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_state.py, FSDPState._pre_forward"
ROTARY = "transformers 5.23, models/olmo2/modeling_olmo2.py, Olmo2RotaryEmbedding.forward"
AFTER_ATTENTION, AFTER_MLP = Place(At.NORM, Module.AFTER_ATTENTION_NORM), Place(At.NORM, Module.AFTER_MLP_NORM)
NORM = NormAs(one_plus=False, wide=True, source="transformers 5.23, models/olmo2/modeling_olmo2.py, Olmo2RMSNorm.forward")


def olmo2(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer; attention and MLP read the residual stream itself."""
    addition = Site("residual addition", LAYER)
    attended, weights = _attention(tape, given, block)
    normal = op.rms_norm(tape, attended, "norm after attention", NORM, place=AFTER_ATTENTION)
    tape.release(attended)
    middle = op.add(tape, given, normal, "residual stream between attention and MLP", addition)
    tape.release(normal)
    branch = gated_mlp(tape, middle, block, MLP)
    normal = op.rms_norm(tape, branch, "norm after the MLP", NORM, place=AFTER_MLP)
    tape.release(branch)
    made = op.add(tape, middle, normal, "block output", addition)
    tape.release(normal, middle)
    if weights is not None:
        tape.release(weights)
    return made


def _attention(tape: Tape, given: Value, block: Block) -> Attended:
    bias = block.attention_bias
    query = _normed(tape, given, q, ("queries", Module.Q, Module.Q_NORM), bias=bias)
    key = _normed(tape, given, k, ("keys", Module.K, Module.K_NORM), bias=bias)
    value = op.linear(tape, given, v, Site("v projection", ATTENTION, Module.V), bias=bias)
    turned_query, turned_key = _turned(tape, query, key, block)
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(turned_query, turned_key, value, block.grouped, block.one_key))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, Module.O), reads=c, bias=bias)
    tape.release(value, turned_query, turned_key, context)
    return Attended(made, weights)


def _turned(tape: Tape, query: Value, key: Value, block: Block) -> tuple[Value, Value]:
    """Queries and keys in their dtype again; tables in fp32 make fp32 of them, tables that a block has a copy of do not."""
    tables: Width = e if block.casts_inputs else 4
    copies = (tape.make(op.TENSOR, "rotary cos and sin, cast", 2 * e * s * d, CAST),) if block.casts_inputs else ()
    tape.course.copied += copies
    bare = [
        op.rotary(tape, one, Site(f"{name}, turned", ATTENTION), tables=tables, saved=copies)
        for one, name in ((query, "queries"), (key, "keys"))
    ]
    made = (
        op.cast(tape, bare[0], query.dtype, Site("queries", ATTENTION)),
        op.cast(tape, bare[1], key.dtype, Site("keys", ATTENTION)),
    )
    tape.release(*bare)
    return made


def _normed(tape: Tape, given: Value, width: Size, of: tuple[str, Module, Module], *, bias: bool) -> Value:
    """Queries or keys of all heads, normalised together."""
    name, linear, norm = of
    bare = op.linear(tape, given, width, Site(f"projection to {name}", ATTENTION, linear), bias=bias)
    made = op.rms_norm(tape, bare, f"norm of the {name}", NORM, weight=width, place=Place(At.NORM, norm))
    tape.release(bare)
    return made


def _tensors(model: ModelSpec) -> Layout:
    norms = (
        *rms_norm("self_attn.q_norm", query_width(model)),
        *rms_norm("self_attn.k_norm", key_width(model)),
    )
    after = (
        *rms_norm("post_attention_layernorm", model.hidden_size),
        *rms_norm("post_feedforward_layernorm", model.hidden_size),
    )
    attention = attention_of(model, bias=model.attention_bias)
    return alike(model, (*attention, *norms, *gated("mlp", model, model.intermediate_size), *after))


def _tables(model: ModelSpec) -> Tables:
    """OLMo 3's local and global layers have tables of their own."""
    if not TRAITS[model.family].angles_of_kinds or kinds_of_layers(model) == 1:
        return Tables(8 * s * d, "rotary cos and sin, fp32", ROTARY, in_32_bits=True)
    return Tables(16 * s * d, "rotary cos and sin, of local and of global layers, fp32", ROTARY, in_32_bits=True)


_CONFIG = ConfigKeys(defaults={"max_position_embeddings": 2048}, fixed={"mlp_bias": False})
_OLMO_3 = _CONFIG._replace(defaults={"max_position_embeddings": 2048, "sliding_window": 4096})
_MODULES = (
    "self_attn", "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_proj", "self_attn.k_norm", "self_attn.v_proj",
    "self_attn.o_proj", "post_attention_layernorm", *gated_modules("mlp"), "post_feedforward_layernorm",
)  # fmt: skip
_OLMO_2 = Definition(Program(olmo2, LAYER, NORM), _tensors, _CONFIG, _MODULES, tables=_tables)
FAMILIES = {"olmo2": _OLMO_2, "olmo3": _OLMO_2._replace(config=_OLMO_3, around=Around(masks=2))}

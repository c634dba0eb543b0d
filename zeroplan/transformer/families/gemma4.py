"""Gemma 4, the dense text models without embeddings of each layer: five layers with a window, then one of full attention.

Layers of full attention have wider heads and fewer of them for keys, and one projection makes keys and values. Values are
normalised over each head, without a weight. A number multiplies each layer's output in place.
"""

from functools import partial

from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import Layer, gated_mlp
from zeroplan.transformer.families.definition import (
    Around,
    Block,
    ConfigKeys,
    Definition,
    Program,
    Tables,
    gated_modules,
)
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tags import AFTER_ATTENTION_AND_MLP, AT_ATTENTION_NORM
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import KINDS_IN_TURN, Layout
from zeroplan.transformer.params_gated import alternating, attention_of, gated, head_norms
from zeroplan.transformer.params_modules import Parameters, rms_norm
from zeroplan.transformer.symbols import T, a, c, d, h, k, k_d, q, r, s, v

GEMMA = "transformers 5.23, models/gemma4/modeling_gemma4.py"
LAYER = f"{GEMMA}, Gemma4TextDecoderLayer.forward"
ATTENTION = f"{GEMMA}, Gemma4TextAttention.forward"
NORM = Norm("power", f"{GEMMA}, Gemma4RMSNorm.forward")
_BARE = NORM._replace(kind="power, no weight")


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run attention. Queries, keys and values each keep their variable through projection, norm and rotation."""
    bias = block.attention_bias
    query = op.linear(tape, normal, q, Site("q projection", ATTENTION, Module.Q), bias=bias)
    query = _turned(tape, _normed(tape, query, "queries", NORM, Module.Q_NORM), "queries")
    bare = op.linear(tape, normal, k, Site("k projection", ATTENTION, Module.K), bias=bias)
    if block.keys_are_values:
        value = bare
        tape.hold(bare.store)
    else:
        value = op.linear(tape, normal, v, Site("v projection", ATTENTION, Module.V), bias=bias)
    key = _turned(tape, _normed(tape, bare, "keys", NORM, Module.K_NORM), "keys")
    value = _normed(tape, value, "values", _BARE, Module.NONE)
    context, weights = block.attend(tape, Heads(query, key, value, block.grouped, block.one_key))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, Module.O), reads=c, bias=block.output_bias)
    tape.release(query, key, value, context)
    return Attended(made, weights)


def _normed(tape: Tape, bare: Value, name: str, norm: Norm, module: Module) -> Value:
    rows = T * (a if name == "queries" else k_d)
    made = op.norm(tape, bare, f"norm of the {name}", norm, weight=d, rows=rows, place=Place(At.NORM, module))
    tape.release(bare)
    return made


def _turned(tape: Tape, bare: Value, name: str) -> Value:
    made = op.rotary(tape, bare, Site(name, ATTENTION))
    tape.release(bare)
    return made


_LAYER = Layer(
    NORM, _attention, partial(gated_mlp, source=f"{GEMMA}, Gemma4TextMLP.forward"), LAYER,
    before=(AT_ATTENTION_NORM, Place(At.NORM, Module.BEFORE_MLP_NORM)), after=AFTER_ATTENTION_AND_MLP,
)  # fmt: skip


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    bare = _LAYER.run(tape, given, block)
    made = Value(bare.store, bare.dtype, bare.shape)
    backward = op.makes("gradient through the layer's number", LAYER, bare)
    tape.add("the layer's number", (made,), (), backward, of=(bare,))
    return made


def _tensors(model: ModelSpec) -> Layout:
    return alternating(model, KINDS_IN_TURN[0], _block(model), _block(model.of_kind("global"), keys_are_values=True))


def _block(model: ModelSpec, *, keys_are_values: bool = False) -> Parameters:
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    attention = attention_of(model, bias=model.attention_bias)
    queries = tuple([one for one in attention if ".q_proj." in one.name])
    others = [one for one in attention if one not in queries and not (keys_are_values and ".v_proj." in one.name)]
    norms = (norm for name in names for norm in rms_norm(name, model.hidden_size))
    return (*queries, *head_norms(model), *others, *gated("mlp", model, model.intermediate_size), *norms)


def _tables(model: ModelSpec) -> Tables:
    size = 2 * r * s * (model.head_dim + model.global_head_dim)
    return Tables(size, "rotary cos and sin, of local and of global layers", f"{GEMMA}, Gemma4TextRotaryEmbedding.forward")


_CONFIG = ConfigKeys(
    defaults={
        "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262144, "tie_word_embeddings": True, "global_head_dim": 512,
    },
    fixed={"mlp_bias": False},
    required=("hidden_size", "intermediate_size", "num_hidden_layers", "global_key_value_heads", "sliding_window"),
    keys={"global_key_value_heads": ("num_global_key_value_heads",)},
    activation="hidden_activation",
    only={
        "use_bidirectional_attention": ("vision",), "hidden_size_per_layer_input": (0,), "attention_k_eq_v": (True,),
        "num_kv_shared_layers": (0,), "enable_moe_block": (False,), "use_double_wide_mlp": (False,),
    },
    not_null=("final_logit_softcapping",),
    read=("num_global_key_value_heads", "global_head_dim"),
    harmless={
        "of embeddings of each layer and of experts, which these models have not": (
            "vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size",
        ),
    },
)  # fmt: skip
_MODULES = (
    "input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.k_norm", "self_attn.v_norm", "self_attn.o_proj", "post_attention_layernorm", "pre_feedforward_layernorm",
    *gated_modules("mlp"), "post_feedforward_layernorm",
)  # fmt: skip
FAMILIES = {
    "gemma4_text": Definition(
        Program(_layer, LAYER, NORM), _tensors, _CONFIG, _MODULES, tables=_tables, around=Around(masks=2),
    )
}  # fmt: skip

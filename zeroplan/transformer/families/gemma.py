"""Gemma: norms that multiply by 1 + weight in fp32; in Gemma 2 and 3 before and after each branch.

Gemma 3 also normalises queries and keys over each head.
"""

from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import Attention, gated_mlp, layer, layer_of
from zeroplan.transformer.families.definition import Around, Block, Definition, Tables
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, WITH_LATE_NORMS, Names, gated_modules
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tags import AFTER_ATTENTION_AND_MLP, AT_ATTENTION_NORM
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.families.widths import kinds_of_layers
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, dense, dense_block, head_norms
from zeroplan.transformer.symbols import d, r, s

GEMMA = "transformers 5.23, models/gemma3/modeling_gemma3.py"
MODEL = f"{GEMMA}, Gemma3TextModel.forward"
NORM = Norm("one plus weight", f"{GEMMA}, Gemma3RMSNorm.forward")
_PLAIN = Attention(f"{GEMMA}, Gemma3Attention.forward")


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    return (_PLAIN._replace(norm=NORM) if block.head_norms else _PLAIN).run(tape, normal, block)


FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
BEFORE = (AT_ATTENTION_NORM, Place(At.NORM, Module.BEFORE_MLP_NORM))
_FIRST_LAYER = layer_of(f"{GEMMA}, Gemma3", NORM, _attention, gated_mlp)
_LAYER = layer(_FIRST_LAYER._replace(before=BEFORE, after=AFTER_ATTENTION_AND_MLP))


def _tensors(model: ModelSpec) -> Layout:
    of_heads = head_norms(model) if model.family == "gemma3_text" else ()
    return alike(model, dense_block(model, of_heads=of_heads, names=FOUR_NORMS))


def _tables(model: ModelSpec) -> Tables:
    """Gemma 3 has one table for its local layers and one for its global ones."""
    if kinds_of_layers(model) == 1:
        return Tables()
    return Tables(4 * r * s * d, "rotary cos and sin, of local and of global layers", MODEL)


def _modules(attention: Names) -> Names:
    inner = ("pre_feedforward_layernorm", *gated_modules("mlp"), "post_feedforward_layernorm")
    return ("input_layernorm", "self_attn", *attention, "post_attention_layernorm", *inner)


_HARMLESS = {
    "numbers in a formula, which change no tensor": ("query_pre_attn_scalar",), "not read by the class": ("hidden_act",),
}  # fmt: skip
_FIRST = ConfigKeys(
    defaults={
        "max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True,
    },
    fixed={"mlp_bias": False},
    only={"use_bidirectional_attention": (False,)},
    harmless={"not read by the class": ("hidden_activation",)},
)  # fmt: skip
_GEMMA_2 = ConfigKeys(
    defaults={
        "max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    fixed={"mlp_bias": False},
    activation="hidden_activation",
    only={"use_bidirectional_attention": (False,)},
    not_null=("final_logit_softcapping", "attn_logit_softcapping"),
    harmless=_HARMLESS,
)  # fmt: skip
_GEMMA_3 = ConfigKeys(
    defaults={
        "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262208, "sliding_window": 4096, "tie_word_embeddings": True,
    },
    fixed={"mlp_bias": False},
    required=("hidden_size", "intermediate_size", "num_hidden_layers"),
    activation="hidden_activation",
    only={
        "use_bidirectional_attention": (False,), "final_logit_softcapping": (), "attn_logit_softcapping": (),
        "sliding_window_pattern": (6,), "_sliding_window_pattern": (6,),
    },
    harmless=_HARMLESS,
)  # fmt: skip
_AROUND = Around(masks=2)  # one for layers with a window, one for the others
FAMILIES = {
    "gemma": Definition(layer(_FIRST_LAYER), dense, _FIRST),
    "gemma2": Definition(_LAYER, _tensors, _GEMMA_2, _modules(ATTENTION_MODULES), around=_AROUND),
    "gemma3_text": Definition(_LAYER, _tensors, _GEMMA_3, _modules(WITH_LATE_NORMS), tables=_tables, around=_AROUND),
}

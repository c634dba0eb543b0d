"""Llama, InternLM3, Mistral, Ministral 3, CWM, Qwen2, 3, Seed-OSS, SmolLM3, Hunyuan, Arcee, Jais 2, Granite, HyperCLOVA X: blocks.

``decoder.py`` has the layer, the attention and the MLP as programs. A trained block saves, in forward order: its input (in
fp32) and the first norm's result; the input that the q, k and v projections share; queries, keys, values, output and a
log-sum-exp per row for the attention kernel; the same for the second norm; and the MLP's gate, activated gate, up projection
and their product. Qwen3 also normalises queries and keys over each head, and saves the inputs of those two norms; Hunyuan does
so after the rotary positions. Every fourth layer of SmolLM3 has no rotary positions. Granite multiplies each branch's output by
a constant; HyperCLOVA X normalises that output first. Arcee's MLP has no gate, nor has that of Jais 2, whose norms are LayerNorms.
Every fourth layer of CWM, from the first on, has no window; nor have the first layers of a Qwen2 or Qwen3 with one. The families
differ in biases, too.
"""

from functools import partial

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import (
    LAYER_NORM,
    LLAMA_NORM,
    Attention,
    Rotated,
    gated_mlp,
    layer,
    layer_of,
    rotated,
    ungated_mlp,
)
from zeroplan.transformer.families.definition import Around, Block, Definition
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, Names, before_and_after, gated_modules
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import TWO_NORMS, NormOf, alike, dense, dense_block, head_norms
from zeroplan.transformer.params_modules import layer_norm, linear, rms_norm

LLAMA = "transformers 5.23, models/llama/modeling_llama.py, Llama"
GRANITE = "transformers 5.23, models/granite/modeling_granite.py, Granite"
CLOVA = "transformers 5.23, models/hyperclovax/modeling_hyperclovax.py, HyperCLOVAX"
ARCEE = "transformers 5.23, models/arcee/modeling_arcee.py, Arcee"
JAIS2 = "transformers 5.23, models/jais2/modeling_jais2.py, Jais2"
MINISTRAL = "transformers 5.23, models/ministral3/modeling_ministral3.py, Ministral3"

# --- the block ---------------------------------------------------------------------------------------------------------------

_PLAIN = Attention(f"{LLAMA}Attention.forward")
_WITH_HEAD_NORMS = Attention(
    "transformers 5.23, models/qwen3/modeling_qwen3.py, Qwen3Attention.forward", norm=LLAMA_NORM, norm_at_once=True
)
NORMS_LAST = Attention(
    "transformers 5.23, models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py, HunYuanDenseV1Attention.forward", norm=LLAMA_NORM,
    norm_last=True,
)  # fmt: skip


def attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run the attention of these families, and of Mixtral and Qwen3-MoE."""
    return (_WITH_HEAD_NORMS if block.head_norms else _PLAIN).run(tape, normal, block)


_LAYER = layer(layer_of(LLAMA, LLAMA_NORM, attention, gated_mlp))
_HUNYUAN_LAYER = layer(layer_of(LLAMA, LLAMA_NORM, NORMS_LAST.run, gated_mlp))
_GRANITE_NORM = Norm("cast, then weighted", f"{GRANITE}RMSNorm.forward")
_GRANITE = layer_of(GRANITE, _GRANITE_NORM, Attention(f"{GRANITE}Attention.forward").run, gated_mlp)
_CLOVA_NORM = Norm("cast, then weighted", f"{CLOVA}RMSNorm.forward")
_CLOVA = layer_of(CLOVA, _CLOVA_NORM, Attention(f"{CLOVA}Attention.forward").run, gated_mlp)
_CLOVA_LAYER = layer(_CLOVA._replace(multiplied=True, after=(Place(At.NORM), Place(At.NORM))))
_ARCEE_LAYER = layer(layer_of(ARCEE, LLAMA_NORM, attention, ungated_mlp))
_JAIS_LAYER = layer(layer_of(JAIS2, LAYER_NORM, attention, ungated_mlp))


def _rotated_and_scaled(tape: Tape, query: Value, key: Value, block: Block) -> Rotated:
    """Return rotated queries and keys. A factor that grows with the position scales each token's queries."""
    source = f"{MINISTRAL}Attention.forward"
    with_positions, key = rotated(tape, query, key, block, source=source)
    return op.scaled_by_position(tape, with_positions, source), key


_MINISTRAL_ATTENTION = Attention(f"{MINISTRAL}Attention.forward", rotated=_rotated_and_scaled)
_MINISTRAL_LAYER = layer(layer_of(MINISTRAL, LLAMA_NORM, _MINISTRAL_ATTENTION.run, gated_mlp))

# --- parameters --------------------------------------------------------------------------------------------------------------


def _hyperclovax(model: ModelSpec) -> Layout:
    return alike(model, dense_block(model, names=(*TWO_NORMS, "post_norm1", "post_norm2")))


def _ungated(model: ModelSpec, norm: NormOf = rms_norm) -> Layout:
    """Arcee and Jais 2."""
    hidden, width, bias = model.hidden_size, model.intermediate_size, model.mlp_bias
    mlp = (*linear("mlp.up_proj", hidden, width, bias=bias), *linear("mlp.down_proj", width, hidden, bias=bias))
    return alike(model, dense_block(model, mlp=mlp, norm=norm), norm)


def _qwen2(model: ModelSpec) -> Layout:
    """Qwen2 and Seed-OSS."""
    return alike(model, dense_block(model, bias=model.attention_bias or model.family == "qwen2", output_bias=False))


def _qwen3(model: ModelSpec, norms: tuple[str, str] = ("q_norm", "k_norm")) -> Layout:
    return alike(model, dense_block(model, of_heads=head_norms(model, norms)))


# --- keys of config.json -----------------------------------------------------------------------------------------------------

_LLAMA = ConfigKeys(defaults={"max_position_embeddings": 2048})
_MISTRAL = ConfigKeys(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    fixed={"attention_bias": False, "mlp_bias": False},
)
_MINISTRAL = _MISTRAL._replace(defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128})
_CWM = ConfigKeys(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192},
    fixed={"attention_bias": False},
    not_null=("sliding_window",),
)
_QWEN2 = ConfigKeys(
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    fixed={"attention_bias": True, "mlp_bias": False},
    optional_window=True,
)
_QWEN3 = ConfigKeys(
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    fixed={"mlp_bias": False},
    optional_window=True,
)
_SEED_OSS = ConfigKeys(
    defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    fixed={"mlp_bias": False},
    dropout={"attention_dropout": 0.1, "residual_dropout": 0.1},
    only={"attention_out_bias": (False,)},
)
_SMOLLM3 = ConfigKeys(
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True},
    optional_window=True,
    in_turn={"no_rope_layers": (1, 0)},
    only={"no_rope_layer_interval": (4,), "use_sliding_window": (False,)},
)
_INTERNLM = ConfigKeys(
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 128},
    keys={"attention_bias": ("attention_bias", "qkv_bias"), "mlp_bias": ("mlp_bias", "bias")},
)
_JAIS = ConfigKeys(defaults={"max_position_embeddings": 8192, "attention_bias": True, "mlp_bias": True})
HUNYUAN = ConfigKeys(
    defaults={"max_position_embeddings": 2048},
    fixed={"mlp_bias": False},
    keys={"head_dim": ("head_dim", "attention_head_dim")},
    only={"use_qk_norm": (True,), "use_cla": (False,)},
    harmless={"special tokens": ("eod_token_id",)},
)
MULTIPLIERS = {
    "numbers in a formula, which change no tensor": (
        "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
    ),
}  # fmt: skip
_GRANITE_KEYS = _LLAMA.plus(harmless=MULTIPLIERS)
_CLOVA_KEYS = _GRANITE_KEYS._replace(only={"use_post_norm": (True,)})

#: Qwen3's modules of attention, in forward order.
WITH_NORMS: Names = (
    "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_proj", "self_attn.k_norm", "self_attn.v_proj", "self_attn.o_proj",
)  # fmt: skip
NORMS_AT_THE_END: Names = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.query_layernorm", "self_attn.key_layernorm",
    "self_attn.o_proj",
)  # fmt: skip
_UNGATED = before_and_after(ATTENTION_MODULES, ("mlp", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj"))
FAMILIES = {
    "llama": Definition(_LAYER, dense, _LLAMA),
    "internlm3": Definition(_LAYER, dense, _INTERNLM),
    "mistral": Definition(_LAYER, dense, _MISTRAL),
    "cwm": Definition(_LAYER, dense, _CWM, around=Around(masks=2)),
    "ministral3": Definition(_MINISTRAL_LAYER, dense, _MINISTRAL),
    "qwen2": Definition(_LAYER, _qwen2, _QWEN2, around=Around(masks=2)),
    "qwen3": Definition(_LAYER, _qwen3, _QWEN3, before_and_after(WITH_NORMS, gated_modules("mlp")), around=Around(masks=2)),
    "seed_oss": Definition(_LAYER, _qwen2, _SEED_OSS),
    "smollm3": Definition(_LAYER, dense, _SMOLLM3),
    "hunyuan_v1_dense": Definition(
        _HUNYUAN_LAYER, partial(_qwen3, norms=("query_layernorm", "key_layernorm")), HUNYUAN,
        before_and_after(NORMS_AT_THE_END, gated_modules("mlp")),
    ),
    "arcee": Definition(_ARCEE_LAYER, _ungated, _LLAMA._replace(defaults={"max_position_embeddings": 4096}), _UNGATED),
    "jais2": Definition(_JAIS_LAYER, partial(_ungated, norm=layer_norm), _JAIS, _UNGATED),
    "granite": Definition(layer(_GRANITE._replace(multiplied=True)), dense, _GRANITE_KEYS, around=Around(scales_embeddings=True)),
    "hyperclovax": Definition(
        _CLOVA_LAYER, _hyperclovax, _CLOVA_KEYS,
        before_and_after((*ATTENTION_MODULES, "post_norm1"), (*gated_modules("mlp"), "post_norm2")),
        around=Around(scales_embeddings=True),
    ),
}  # fmt: skip

"""Blocks of the Llama kind: Llama, Mistral, Qwen2, Qwen3, and Granite, whose branches are multiplied by a number."""

from functools import partial

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.attend import Attended
from zeroplan.transformer.families.definition import Around, ConfigKeys, Definition
from zeroplan.transformer.families.gated import LLAMA_NORM, Branches, gated_mlp, layer, three_projections
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.parts import before_and_after, gated_modules
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, attention_of, gated, head_norms, two_norms

LAYER = "transformers 5.23, models/llama/modeling_llama.py, LlamaDecoderLayer.forward"
ATTENTION = "transformers 5.23, models/llama/modeling_llama.py, LlamaAttention.forward"
HEAD_NORMS = "transformers 5.23, models/qwen3/modeling_qwen3.py, Qwen3Attention.forward"
MLP = "transformers 5.23, models/llama/modeling_llama.py, LlamaMLP.forward"
GRANITE = "transformers 5.23, models/granite/modeling_granite.py"
GRANITE_NORM = NormAs(one_plus=False, source=f"{GRANITE}, GraniteRMSNorm.forward")


def attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Attention of these families, and of those with experts in place of the MLP."""
    if block.head_norms:
        return three_projections(tape, normal, block, HEAD_NORMS, LLAMA_NORM, at_once=True)
    return three_projections(tape, normal, block, ATTENTION)


def _llama(model: ModelSpec) -> Layout:
    mlp = gated("mlp", model, model.intermediate_size, bias=model.mlp_bias)
    return alike(model, (*attention_of(model, bias=model.attention_bias), *mlp, *two_norms(model)))


def _mistral(model: ModelSpec) -> Layout:
    return alike(model, (*attention_of(model), *gated("mlp", model, model.intermediate_size), *two_norms(model)))


def _qwen2(model: ModelSpec) -> Layout:
    attention = attention_of(model, bias=True, output_bias=False)
    return alike(model, (*attention, *gated("mlp", model, model.intermediate_size), *two_norms(model)))


def _qwen3(model: ModelSpec) -> Layout:
    attention = (*attention_of(model, bias=model.attention_bias), *head_norms(model))
    return alike(model, (*attention, *gated("mlp", model, model.intermediate_size), *two_norms(model)))


_LLAMA = ConfigKeys(defaults={"max_position_embeddings": 2048})
_MISTRAL = ConfigKeys(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    fixed={"attention_bias": False, "mlp_bias": False},
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
_GRANITE = _LLAMA._replace(
    harmless={
        "numbers in a formula, which change no tensor": (
            "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
        ),
    },
)  # fmt: skip
#: Qwen3's attention as its modules run.
WITH_NORMS = (
    "self_attn.q_proj", "self_attn.q_norm", "self_attn.k_proj", "self_attn.k_norm", "self_attn.v_proj", "self_attn.o_proj",
)  # fmt: skip
#: The classes of these families differ in biases and in norms over each head alone.
_PROGRAM = layer(Branches(LLAMA_NORM, attention, partial(gated_mlp, source=MLP), LAYER))
_MULTIPLIED = layer(
    Branches(
        GRANITE_NORM,
        partial(three_projections, source=f"{GRANITE}, GraniteAttention.forward"),
        partial(gated_mlp, source=f"{GRANITE}, GraniteMLP.forward"),
        f"{GRANITE}, GraniteDecoderLayer.forward",
        multiplied=True,
    )
)
FAMILIES = {
    "llama": Definition(_PROGRAM, _llama, _LLAMA),
    "mistral": Definition(_PROGRAM, _mistral, _MISTRAL),
    "qwen2": Definition(_PROGRAM, _qwen2, _QWEN2),
    "qwen3": Definition(_PROGRAM, _qwen3, _QWEN3, before_and_after(WITH_NORMS, gated_modules("mlp"))),
    "granite": Definition(_MULTIPLIED, _llama, _GRANITE, around=Around(scales_embeddings=True)),
}

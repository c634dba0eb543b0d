"""Small models with experts. All widths differ, so that no two can be confused."""

from __future__ import annotations

from dataclasses import replace

from zeroplan.spec.family import LATENT_FAMILIES, LINEAR_FAMILIES, ONE_WIDTH_FAMILIES, PATTERNED, SHARED_EXPERTS, TRAITS
from zeroplan.spec.model import LinearSpec, MlaSpec, ModelSpec, MoeSpec, lightning

#: Width of an expert's MLP.
WIDTH = 56
#: The letters of the layers of hybrid families, where they are not two of Mamba-2.
_PATTERNS = {
    "llama4_text": "LG", "exaone_moe": "L", "nemotron_h": "ME", "falcon_h1": "H", "lfm2_moe": "C*", "kimi_linear": "M*",
}  # fmt: skip
LINEAR = LinearSpec(num_key_heads=3, num_value_heads=6, key_head_dim=10, value_head_dim=14)


def linear_of(family: str, hidden: int, heads: int, head_dim: int) -> LinearSpec | None:
    """Describe linear attention; heads of a state space are twice as wide together as the residual stream."""
    if family == "minimax":
        return lightning(heads, head_dim, 32)
    if family == "kimi_linear":
        return replace(lightning(3, 10, 64), conv_kernel_dim=4)
    if family in PATTERNED and family in LINEAR_FAMILIES:
        return replace(LINEAR, num_key_heads=2, num_value_heads=4, value_head_dim=hidden // 2, chunk_size=32)
    return LINEAR if family in LINEAR_FAMILIES else None


def moe_spec(family: str, shape: tuple[int, ...], *, latent_queries: bool = True) -> ModelSpec:
    """Describe a two-layer model of a shape of ``test_activations``; DeepSeek-V3 gets two shared experts and no dense layer."""
    _, _, heads, kv_heads, head_dim, ffn, vocab, hidden = shape
    deepseek = family in LATENT_FAMILIES
    mla = MlaSpec(
        q_lora_rank=48 if latent_queries else None,
        kv_lora_rank=40,
        qk_nope_head_dim=head_dim,
        qk_rope_head_dim=head_dim // 2,
        v_head_dim=head_dim + 6,
        **({"index_n_heads": 3, "index_head_dim": head_dim + 2, "index_topk": 24} if TRAITS[family].indexed else {}),
    )
    return ModelSpec(
        family=family,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads if deepseek else kv_heads,
        head_dim=head_dim + head_dim // 2 if deepseek else head_dim,
        vocab_size=vocab,
        max_position_embeddings=512,
        attention_bias=family == "gpt_oss",
        sliding_window=512 if family == "exaone_moe" else None,
        moe=MoeSpec(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=ffn if family in ONE_WIDTH_FAMILIES else WIDTH,
            num_shared_experts=2 if family in SHARED_EXPERTS else 0,
        ),
        mla=mla if deepseek else None,
        linear=linear_of(family, hidden, heads, head_dim),
        layer_pattern=_PATTERNS.get(family, "MM") if family in PATTERNED else "",
        rotary=family != "nemotron_h",
    )

"""Matrices of a model, counted by hand."""

from __future__ import annotations

from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.flops import matmul_parameters
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter

HIDDEN, FFN, VOCAB, LAYERS, EXPERTS, TOP_K = 64, 160, 1000, 3, 8, 2


def model(*, tied: bool) -> ModelSpec:
    return ModelSpec(
        family="mixtral",
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
        moe=MoeSpec(num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=FFN),
    )


def layout(*, tied: bool) -> Layout:
    block = (
        Parameter("norm.weight", (HIDDEN,)),
        Parameter("qkv.weight", (3 * HIDDEN, HIDDEN), autocast=True),
        Parameter("experts.weight", (EXPERTS, FFN, HIDDEN), active_share=(TOP_K, EXPERTS)),
    )
    head = () if tied else (Parameter("lm_head.weight", (VOCAB, HIDDEN), autocast=True),)
    embeddings = (Parameter("embed.weight", (VOCAB, HIDDEN)),)
    return Layout(embeddings, (BlockRun("moe", LAYERS, block),), (Parameter("norm.weight", (HIDDEN,)), *head))


BLOCK = 3 * HIDDEN * HIDDEN + TOP_K * FFN * HIDDEN


def test_counts_the_matrices_a_token_meets() -> None:
    assert matmul_parameters(model(tied=False), layout(tied=False)) == LAYERS * BLOCK + VOCAB * HIDDEN


def test_a_tied_head_counts_like_an_untied_one() -> None:
    assert matmul_parameters(model(tied=True), layout(tied=True)) == matmul_parameters(model(tied=False), layout(tied=False))

"""Counts the operations of a model's matrices by hand."""

from __future__ import annotations

from zeroplan.transformer.flops import block_matrices
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter

HIDDEN, FFN, VOCAB, LAYERS, EXPERTS, TOP_K = 64, 160, 1000, 3, 8, 2


def test_counts_the_matrices_of_blocks_that_a_token_meets() -> None:
    block = (
        Parameter("norm.weight", (HIDDEN,)),
        Parameter("qkv.weight", (3 * HIDDEN, HIDDEN), autocast=True),
        Parameter("experts.weight", (EXPERTS, FFN, HIDDEN), active_share=(TOP_K, EXPERTS)),
    )
    head, embeddings = (
        Parameter("lm_head.weight", (VOCAB, HIDDEN), autocast=True),
        (Parameter("embed.weight", (VOCAB, HIDDEN)),),
    )
    whole = Layout(embeddings, (BlockRun("moe", LAYERS, block),), (Parameter("norm.weight", (HIDDEN,)), head))
    assert block_matrices(whole) == LAYERS * (3 * HIDDEN * HIDDEN + TOP_K * FFN * HIDDEN)

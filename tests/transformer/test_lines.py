"""Checks every line of a block or head: its formula gives its bytes, and a column equals its points. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from tests.combined import every_case
from tests.formulas import WITHOUT_FORMULA, evaluate
from zeroplan.ledger import Line, total_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.family import (
    DENSE_LAYERS,
    FAMILIES,
    LATENT_FAMILIES,
    LINEAR_FAMILIES,
    MOE_FAMILIES,
    ONE_WIDTH_FAMILIES,
    PATTERNED,
    PLAIN_HEADS,
    SHARED_EXPERTS,
    TRAITS,
)
from zeroplan.spec.model import LinearSpec, MlaSpec, ModelSpec, MoeSpec, lightning
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BlockPass, Compute, HeadPass
from zeroplan.transformer.families.widths import CHUNK
from zeroplan.transformer.head import head_pass
from zeroplan.transformer.legend import SYMBOLS, legend
from zeroplan.transformer.parameters import KINDS_IN_TURN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zeroplan.spec.recipe import Recompute

COMPUTES = [
    Compute(element_bytes, autocast, attention)
    for element_bytes, autocast in ((2, False), (4, False), (2, True))
    for attention in ("sdpa", "flash", "eager")
]


#: The letters of the layers of hybrid families, where they are not those of Granite 4.
_PATTERNS = {
    "llama4_text": "LGD",
    "exaone_moe": "DLG",
    "nemotron_h": "ME*",
    "falcon_h1": "H",
    "lfm2": "C*C",
    "lfm2_moe": "cD*C",
    "kimi_linear": "mM*D",
}


class Column(NamedTuple):
    micro_batch_size: NDArray[np.int64]
    seq_len: NDArray[np.int64]
    grad_accum_steps: NDArray[np.int64]


def _indexer(family: str) -> dict[str, int]:
    return {"index_n_heads": 3, "index_head_dim": 14, "index_topk": 16} if TRAITS[family].indexed else {}


def _linear(family: str) -> LinearSpec:
    if family == "minimax":
        return lightning(6, 16, 64)
    if family == "kimi_linear":
        return replace(lightning(3, 10, 64), conv_kernel_dim=4)
    return LinearSpec(num_key_heads=2, num_value_heads=6, key_head_dim=10, value_head_dim=32 if family in PATTERNED else 14)


def spec(family: str) -> ModelSpec:
    gpt2 = family in PLAIN_HEADS
    moe = family in MOE_FAMILIES
    head_dim = 16 + TRAITS[family].rotary_width
    return ModelSpec(
        family=family,
        hidden_size=6 * head_dim,
        intermediate_size=24 * head_dim if family == "bloom" else 160,
        num_hidden_layers=6 if family == "gemma4_text" else 3,
        num_attention_heads=6,
        num_key_value_heads=6 if gpt2 or family in LATENT_FAMILIES else 2,
        head_dim=head_dim,
        vocab_size=211,
        positions=64 if gpt2 else 0,
        attention_bias=family == "qwen2",
        sliding_window=9 if family in ("gemma4_text", "exaone_moe") else None,
        **({"global_head_dim": 32, "global_key_value_heads": 1} if family == "gemma4_text" else {}),
        moe=MoeSpec(
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=160 if family in ONE_WIDTH_FAMILIES else 56,
            num_dense_layers=1 if family in DENSE_LAYERS else 0,
            num_shared_experts=2 if family in SHARED_EXPERTS else 0,
        )
        if moe
        else None,
        mla=MlaSpec(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=12, **_indexer(family))
        if family in LATENT_FAMILIES
        else None,
        layer_pattern=_PATTERNS.get(family, "M*M") if family in PATTERNED else "",
        linear=_linear(family) if family in LINEAR_FAMILIES else None,
    )


def kinds(model: ModelSpec) -> tuple[str, ...]:
    if model.linear is not None:
        return KINDS_IN_TURN[1]
    if model.global_head_dim:
        return KINDS_IN_TURN[0]
    return ("dense",) if model.moe is None else ("dense", "moe")


def block_lines(block: BlockPass) -> list[tuple[Line, ...]]:
    lists = [block.saved, block.checkpoint, block.selective, block.forward, block.forward_recompute]
    return [*lists, block.checkpoint_in_backward, *(point.lines for point in block.points)]


def head_lines(head: HeadPass) -> list[tuple[Line, ...]]:
    lists = [
        head.shared,
        head.saved,
        head.loss_forward,
        head.output,
        head.forward,
        head.first_input,
    ]
    return [*lists, head.loss, *(point.lines for point in head.points)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("batch", [(1, 24), (3, 129), *([(2, 40)] if every_case() else [])])
def test_formulas_give_their_numbers(family: str, compute: Compute, batch: tuple[int, int]) -> None:
    model, size = spec(family), BatchSpec(micro_batch_size=batch[0], seq_len=batch[1])
    values = legend(model, compute, size)  # a symbol means the same in all kinds of layers
    assert set(values) == set(SYMBOLS)
    passes = {kind: block_lines(block_pass(model, kind, compute, size)) for kind in kinds(model)}
    for lists in (head_lines(head_pass(model, compute, size)), *passes.values()):
        for line in {line for lines in lists for line in lines}:
            if line.reason in WITHOUT_FORMULA:
                assert not line.formula
            else:
                assert evaluate(line.formula, values) == line.n_bytes, line


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", COMPUTES)
def test_a_column_is_its_points(family: str, compute: Compute) -> None:
    model = spec(family)
    sizes = [(1, 24 if model.linear is None else CHUNK + 1), (3, 200)]
    column = Column(*(np.array(values, dtype=np.int64) for values in (*zip(*sizes, strict=True), (1, 1))))
    points = [BatchSpec(micro_batch_size=b, seq_len=s) for b, s in sizes]
    for kind in kinds(model):
        whole = block_lines(block_pass(model, kind, compute, column))
        parts = [block_lines(block_pass(model, kind, compute, point)) for point in points]
        assert_columns(whole, parts)
    assert_columns(head_lines(head_pass(model, compute, column)), [head_lines(head_pass(model, compute, p)) for p in points])


def test_a_column_of_which_some_sequences_are_one_chunk_is_as_high_as_its_points() -> None:
    """A block of linear attention has other moments if a sequence is one chunk; the column contains both cases."""
    model, sizes = spec("qwen3_next"), [(1, CHUNK), (3, CHUNK + 1)]
    column = Column(*(np.array(values, dtype=np.int64) for values in (*zip(*sizes, strict=True), (1, 1))))
    whole = block_pass(model, "linear", COMPUTES[0], column)
    for at, (b, s) in enumerate(sizes):
        point = block_pass(model, "linear", COMPUTES[0], BatchSpec(micro_batch_size=b, seq_len=s))
        assert np.asarray(total_bytes(whole.saved))[at] == total_bytes(point.saved)
        highest = max(np.broadcast_to(total_bytes(one.lines), (2,))[at] for one in whole.points)
        assert highest == max(total_bytes(one.lines) for one in point.points)


@pytest.mark.parametrize(
    ("family", "kind", "recompute"),
    [("qwen3_next", "linear", "full"), ("qwen3_next", "linear", "selective"), ("mistral", "dense", "none")],
)
def test_a_column_with_offloaded_activations_is_its_points(family: str, kind: str, recompute: Recompute) -> None:
    """The column contains batches with another graph: of one chunk, or of sequences within the window."""
    model = replace(spec(family), sliding_window=CHUNK + 1 if family == "mistral" else None)
    sizes = [(1, CHUNK), (3, CHUNK + 1)]
    compute = COMPUTES[0]._replace(offloaded=True, recompute=recompute)
    column = Column(*(np.array(values, dtype=np.int64) for values in (*zip(*sizes, strict=True), (1, 1))))
    points = [BatchSpec(micro_batch_size=b, seq_len=s) for b, s in sizes]
    whole, *parts = (block_pass(model, kind, compute, batch) for batch in (column, *points))
    of_all, *of_parts = ([one.kept(recompute), one.entered, one.on_host, one.checkpoint_in_backward] for one in (whole, *parts))
    assert_columns(of_all, of_parts)
    assert all(one.on_host for one in parts)


def assert_columns(whole: list[tuple[Line, ...]], parts: list[list[tuple[Line, ...]]]) -> None:
    for index, lines in enumerate(whole):
        total = np.broadcast_to(np.asarray(total_bytes(lines)), (2,))
        assert total.tolist() == [total_bytes(part[index]) for part in parts]


def test_a_llama_block_by_hand() -> None:
    """Three moments of a bf16 Llama block, added up from tensor sizes: A hidden states, F MLP, K keys, N fp32 states."""
    model = spec("llama")
    block = block_pass(model, "dense", Compute(2, autocast=False, attention="sdpa"), BatchSpec(micro_batch_size=2, seq_len=40))
    tokens, hidden, keys, ffn = 80, 96, 32, 160
    a, n, k, f, lse = 2 * tokens * hidden, 4 * tokens * hidden, 2 * tokens * keys, 2 * tokens * ffn, 4 * tokens * 6
    saved = 2 * n + 6 * a + 2 * k + lse + 4 * f + 8 * tokens
    assert total_bytes(block.saved) == saved
    points = {point.name: point for point in block.points}
    assert total_bytes(points["gated product"].lines) == saved + a + 2 * f
    assert total_bytes(points["norm before the MLP"].lines) == saved + a - 4 * f - 2 * a + 5 * n - 4 * tokens
    at_end = a + saved - 4 * f - lse - 6 * a - 2 * k + 4 * n - 8 * tokens
    assert total_bytes(points["norm before attention"].lines) == at_end
    matrices = 3 * hidden * ffn + 2 * hidden * hidden + 2 * hidden * keys
    assert points["norm before attention"].gradients == matrices + 2 * hidden
    assert total_bytes(block.selective) == a + (2 + 1) * a - a + k + lse + f + a  # input, q, output; v; lse; gate; down

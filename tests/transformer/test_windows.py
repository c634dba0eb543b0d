"""Checks layers with a sliding window: the mask, what attention keeps with it, and models with local and global layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from zeroplan.catalog.model import model as find_model
from zeroplan.ledger import total_bytes
from zeroplan.numeric import Int
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.head import head_pass
from zeroplan.transformer.params import layout

BF16 = Compute(2, autocast=False, attention="sdpa")


class Column(NamedTuple):
    micro_batch_size: Int
    seq_len: Int
    grad_accum_steps: Int


def local(family: str = "gemma3_text", *, layers: int = 12, window: int | None = 64) -> ModelSpec:
    return ModelSpec(
        family=family,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=211,
        sliding_window=window,
    )


@pytest.mark.parametrize(
    ("family", "layers", "expected"),
    [
        ("gemma3_text", 12, [("local", 10), ("global", 2)]),
        ("gemma3_text", 26, [("global", 4), ("local", 22)]),
        ("gemma3_text", 5, [("local", 5)]),
        ("gemma2", 4, [("local", 2), ("global", 2)]),
        ("gemma2", 5, [("global", 2), ("local", 3)]),
        ("phi3", 3, [("dense", 3)]),
    ],
)
def test_kinds_of_layers_add_up_and_the_last_layers_kind_is_last(
    family: str, layers: int, expected: list[tuple[str, int]]
) -> None:
    assert [(run.kind, run.layers) for run in layout(local(family, layers=layers)).runs] == expected


def test_without_a_window_all_layers_are_alike() -> None:
    assert [run.kind for run in layout(local(window=None)).runs] == ["dense"]


def test_a_window_longer_than_the_sequence_is_none() -> None:
    short, model = BatchSpec(micro_batch_size=2, seq_len=63), local()
    assert block_pass(model, "local", BF16, short) == block_pass(model, "global", BF16, short)
    assert head_pass(model, BF16, short).forward == head_pass(local(window=None), BF16, short).forward


def test_a_window_keeps_a_mask_and_repeats_keys_by_hand() -> None:
    """Two sequences of 64 tokens: 32 more key and value heads of width 16, a mask of 2 bytes, no padded rows."""
    batch, model = BatchSpec(micro_batch_size=2, seq_len=64), local()
    whole, window = (total_bytes(block_pass(model, kind, BF16, batch).saved) for kind in ("global", "local"))
    tokens, repeated = 128, 2 * (96 - 32)
    assert window - whole == 2 * tokens * repeated + 2 * 2 * 64 * 64
    masks = [line for line in head_pass(model, BF16, batch).forward if "window" in line.reason]
    assert [line.n_bytes for line in masks] == [64 * 64]


def test_eager_attention_has_the_same_for_every_layer() -> None:
    eager, batch, model = Compute(2, autocast=False, attention="eager"), BatchSpec(micro_batch_size=2, seq_len=64), local()
    assert block_pass(model, "local", eager, batch) == block_pass(model, "global", eager, batch)


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "mistral"])
def test_a_column_across_the_window_is_its_points(family: str) -> None:
    sizes, model = [(1, 24), (3, 200)], local(family)
    batches, lengths, steps = (np.array(values, dtype=np.int64) for values in (*zip(*sizes, strict=True), (1, 1)))
    whole = block_pass(model, "local", BF16, Column(batches, lengths, steps))
    for at, (batch, tokens) in enumerate(sizes):
        point = block_pass(model, "local", BF16, BatchSpec(micro_batch_size=batch, seq_len=tokens))
        assert _totals(whole, at) == _totals(point, 0)


def _totals(block: BlockPass, at: int) -> list[int]:
    lists = (block.saved, block.checkpoint, block.selective, block.forward, block.forward_recompute)
    sums = [int(np.broadcast_to(np.asarray(total_bytes(lines)), (2,))[at]) for lines in lists]
    peaks = [int(np.broadcast_to(np.asarray(total_bytes(point.lines)), (2,))[at]) for point in block.points]
    return [*sums, max(peaks)]


@pytest.mark.parametrize("name", ["gemma-3-1b", "gemma-3-12b", "phi-3-mini"])
def test_the_catalogue_knows_its_windows(name: str) -> None:
    model = find_model(name)
    assert model.sliding_window is not None
    masks = [
        sum(line.reason.startswith("mask in numbers") for line in block_pass(model, "local", BF16, batch).saved)
        for batch in (BatchSpec(micro_batch_size=1, seq_len=model.sliding_window + less) for less in (-1, 0))
    ]
    assert masks == [0, 1]

"""Compares the published formulas with the figures that their papers print."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.published_activations import (
    first_stage_activation_bytes,
    layer_activation_bytes,
    parameter_and_optimizer_bytes,
    split_layer_activation_bytes,
    zero_activation_bytes,
)
from zeroplan.ledger import total_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.published import megatron_layer_lines
from zeroplan.units import GB, GIB

GOLDEN: dict[str, list[dict[str, Any]]] = tomllib.loads(
    (Path(__file__).parents[1] / "golden" / "activations.toml").read_text(encoding="utf-8")
)
FIGURE_7_READING_ERROR = 0.15
"""Percentage points: the figure has bars without numbers; the encoded values scatter by this much around the ratios."""


@pytest.mark.parametrize("row", GOLDEN["figure_1"], ids=lambda row: f"{row['model']} {row['recompute']}")
def test_agrees_with_figure_1_of_korthikanti(row: dict[str, Any]) -> None:
    size = {key: row[key] for key in ("micro_batch", "seq_len", "hidden", "heads", "tp", "sequence_parallel", "recompute")}
    stage = first_stage_activation_bytes(
        split_layer_activation_bytes(**size),
        layers=row["layers"],
        pipeline_stages=row["pipeline_stages"],
        interleave=row["interleave"],
    )
    assert stage / GIB == pytest.approx(row["activations_gib"], abs=1e-9)
    states = parameter_and_optimizer_bytes(
        hidden=row["hidden"], layers=row["layers"], tp=row["tp"], pipeline_stages=row["pipeline_stages"]
    )
    assert states / GIB == pytest.approx(row["parameters_and_optimizer_gib"], abs=1e-8)


@pytest.mark.parametrize("row", GOLDEN["table_2"], ids=lambda row: row["configuration"])
def test_agrees_with_table_2_of_korthikanti(row: dict[str, Any]) -> None:
    seq_len, micro_batch, hidden, heads, tp = 2048, 2, 12288, 96, row["tp"]
    tokens = seq_len * micro_batch
    printed = tokens * (hidden * (row["whole"] * tp + row["split"]) + row["scores"] * heads * seq_len) // tp
    technique = {key: row[key] for key in ("tp", "sequence_parallel", "recompute")}
    size = {"micro_batch": micro_batch, "seq_len": seq_len, "hidden": hidden, "heads": heads}
    assert split_layer_activation_bytes(**size, **technique) == printed


@pytest.mark.parametrize("row", GOLDEN["figure_7"], ids=lambda row: row["model"])
@pytest.mark.parametrize(
    ("column", "technique"),
    [
        ("sequence_parallel_percent", {"sequence_parallel": True}),
        ("selective_percent", {"recompute": "selective"}),
        ("both_percent", {"sequence_parallel": True, "recompute": "selective"}),
        ("full_percent", {"recompute": "full"}),
    ],
)
def test_agrees_with_figure_7_of_korthikanti(row: dict[str, Any], column: str, technique: dict[str, Any]) -> None:
    size = {key: row[key] for key in ("seq_len", "hidden", "heads", "tp")}
    share = split_layer_activation_bytes(micro_batch=1, **size, **technique)
    whole = split_layer_activation_bytes(micro_batch=1, **size)
    assert 100 * share / whole == pytest.approx(row[column], abs=FIGURE_7_READING_ERROR)


@pytest.mark.parametrize("row", GOLDEN["zero_section_3_2"], ids=lambda row: row["model"])
def test_agrees_with_section_3_2_of_the_zero_paper(row: dict[str, Any]) -> None:
    bytes_ = zero_activation_bytes(hidden=row["hidden"], layers=row["layers"], seq_len=row["seq_len"], batch=row["micro_batch"])
    assert bytes_ / GB == pytest.approx(row["activations_gb"], abs=0.5)


def test_one_rank_splits_nothing() -> None:
    size = {"micro_batch": 3, "seq_len": 100, "hidden": 70, "heads": 7}
    assert split_layer_activation_bytes(**size, tp=1) == layer_activation_bytes(**size)
    assert split_layer_activation_bytes(**size, tp=1, sequence_parallel=True) == layer_activation_bytes(**size)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_lines_add_up_to_the_form(sequence_parallel: bool, recompute: str) -> None:
    model = ModelSpec(
        family="gpt2", positions=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=16, head_dim=64, vocab_size=100,
    )  # fmt: skip
    technique: dict[str, Any] = {"sequence_parallel": sequence_parallel, "recompute": recompute}
    lines = megatron_layer_lines(model, MeshSpec(tp=4), BatchSpec(micro_batch_size=2, seq_len=128), **technique)
    form = split_layer_activation_bytes(micro_batch=2, seq_len=128, hidden=1024, heads=16, tp=4, **technique)
    assert total_bytes(lines) == form

"""Megatron-LM's own functional tests of dense GPTs, against engine megatron: what the last rank holds and where it peaks.

Nothing in the engine was fitted to them. They are toys of 12 layers of width 512, of which buffers of pipelines and a kernel's own
choices are one or two parts in a hundred; most are too low by that.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from zeroplan.catalog.gpu import gpu
from zeroplan.engines.device import workspace
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Phase
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.hardware import ClusterSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import MegatronOptions, RecipeSpec
from zeroplan.units import MIB

CONFIGURATIONS = tomllib.loads(Path(__file__).with_name("megatron_runs.toml").read_text())["configuration"]
_GPUS = {"A100": "a100-sxm-80gb", "H100": "h100-sxm-80gb", "GB200": "gb200-186gb"}


class Run(NamedTuple):
    """One row, what is said of it, and what was measured. [bytes]"""

    asked: dict[str, Any]
    gpu: str
    image: str
    dp: int
    micro_batches: int
    peak: int
    held: int


RUNS = [Run(one, *run) for one in CONFIGURATIONS for run in one["runs"]]


def _model(asked: dict[str, Any]) -> ModelSpec:
    layers, hidden, heads, width, seq_len, _ = asked["shape"]
    return ModelSpec(
        family="gpt2", hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=hidden // heads, vocab_size=50257, tie_word_embeddings=not asked.get("untied"),
        positions=1 if asked.get("rotary") else seq_len,  # the table is not on the last rank; GPT-2 must have one
    )  # fmt: skip


def _attention(run: Run) -> str:
    """As configured; else FlashAttention before Hopper (pytorch/attention/dot_product_attention/utils.py, get_attention_backend).

    The image of January 2024 had none that is deterministic.
    """
    if run.asked.get("local"):
        return "eager"
    if "attention" in run.asked:
        return run.asked["attention"]
    if run.image == "24.01" and run.asked.get("deterministic"):
        return "eager"
    return "flash" if run.gpu == "A100" else "sdpa"


def _answer(run: Run) -> Estimate:
    asked, dropout = run.asked, run.asked["dropout"]
    *_, seq_len, size = asked["shape"]
    stages = asked.get("stages_per_rank")
    recipe = RecipeSpec(
        engine="megatron", zero_stage=1 if asked.get("distributed_optimizer") else 0, precision=asked["precision"],
        attention=_attention(run), sequence_parallel=asked.get("sequence_parallel", False) and asked["tp"] > 1,
        pipeline_schedule="interleaved-1f1b" if stages else None, pipeline_stages_per_rank=stages,
        megatron=MegatronOptions(
            transformer_impl="local" if asked.get("local") else "transformer_engine", hidden_dropout=dropout,
            attention_dropout=dropout, cross_entropy_fusion_impl=asked.get("cross_entropy_fusion_impl"),
            create_attention_mask_in_dataloader=not asked.get("no_mask"),
        ),
    )  # fmt: skip
    job = JobSpec(
        model=_model(asked), recipe=recipe, cluster=ClusterSpec(gpu=gpu(_GPUS[run.gpu])),
        mesh=MeshSpec(dp_shard=run.dp, tp=asked["tp"], pp=asked["pp"], cp=asked.get("cp", 1)),
        batch=BatchSpec(micro_batch_size=size, seq_len=seq_len, grad_accum_steps=run.micro_batches),
    )  # fmt: skip
    return estimate(job, pipeline_rank=asked["pp"] - 1) if asked["pp"] > 1 else estimate(job)


def _cublas(run: Run) -> int:
    """What ``CUBLAS_WORKSPACE_CONFIG`` gives two handles more than torch's default. [bytes]"""
    return 2 * (32 * MIB - workspace(gpu(_GPUS[run.gpu]))[0]) if run.asked.get("cublas") else 0


def _errors(run: Run) -> tuple[float, float]:
    """Of the peak and of what is held, as shares of what was measured."""
    answer, more = _answer(run), _cublas(run)
    held = next(moment.total_bytes for moment in answer.moments if moment.phase is Phase.STEP)
    return (answer.peak_bytes + more) / run.peak - 1, (held + more) / run.held - 1


@pytest.fixture(scope="module")
def errors() -> list[tuple[Run, float, float]]:
    return [(run, *_errors(run)) for run in RUNS]


def test_peaks_are_within_two_percent(errors: list[tuple[Run, float, float]]) -> None:
    """Half of them within 1.2 %. The lowest by far are two without Transformer Engine installed: why was not found."""
    assert len(errors) > 140
    assert median(abs(peak) for _, peak, _ in errors) < 0.012
    lowest = sorted((peak, run.asked["name"]) for run, peak, _ in errors)
    assert lowest[0][0] > -0.104
    assert all(peak > -0.031 for peak, name in lowest if "uninstall_te" not in name)
    assert lowest[-1][0] < 0.046  # torch before 2.13 gave Blackwell a smaller workspace, 48 MiB less in all


def test_what_is_held_is_within_a_few_percent(errors: list[tuple[Run, float, float]]) -> None:
    """Too low by what a pipeline's queues keep of hidden states; too high where Blackwell had the smaller workspace."""
    assert median(abs(held) for *_, held in errors) < 0.0225
    assert min(held for *_, held in errors) > -0.08
    assert max(held for *_, held in errors) < 0.143


def test_without_those_terms_they_were_off_by_an_eighth(errors: list[tuple[Run, float, float]]) -> None:
    """16-bit logits alone are a tenth of the peak of most of these."""
    without = []
    for run, peak, _ in errors:
        logits = [line.n_bytes for line in _answer(run).peak.lines if "in 16 bits" in line.reason]
        without.append(peak - sum(logits) / run.peak)
    assert median(without) < -0.1

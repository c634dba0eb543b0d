"""Megatron-LM's own functional tests, against engine megatron: what the last rank holds and where it peaks.

Nothing in the engine was fitted to them. Most are toys of 12 layers of width 512. The allocator counts a block whole of which less
than a MiB is left over, which is most of what they are too low by.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from tests.measured.megatron_golden import Scored, job_of, kept, score
from zeroplan.estimator import estimate

RUNS = kept()


@pytest.fixture(scope="module")
def scores() -> list[Scored]:
    return score(RUNS)[0]


def test_the_notes_say_what_was_found(scores: list[Scored]) -> None:
    """Their figures are those of these runs."""
    experts = [one.peak for one in _of(scores, "moe")]
    notes = " ".join(scores[0].answer.notes) + " ".join(_of(scores, "moe")[0].answer.notes)
    off = median(abs(one.peak) for one in scores)
    assert f"{len(scores)} runs of Megatron-LM's own tests ({off:.1%} off".replace("%", " %") in notes
    assert f"of {len(experts)} runs of Megatron-LM's tests with experts" in notes
    assert f"from {-min(experts):.0%} too low to {max(experts):.0%} too high".replace("%", " %") in notes


def _of(scores: list[Scored], kind: str) -> list[Scored]:
    return [one for one in scores if one.run.kind == kind]


def test_dense_peaks_are_within_two_percent(scores: list[Scored]) -> None:
    """The highest are on Blackwell: torch before 2.13 gave it a smaller workspace, 48 MiB less in all."""
    dense = sorted(_of(scores, "dense-gpt"), key=lambda one: one.peak)
    assert len(dense) > 150
    assert median(abs(one.peak) for one in dense) < 0.01
    assert dense[0].peak > -0.024
    assert dense[-1].peak < 0.049


def test_peaks_with_experts_are_within_five_percent(scores: list[Scored]) -> None:
    """The highest are of March 2025, when routing weights were applied behind the experts; four are Mixtrals of 64 to 128 GPUs."""
    experts = sorted(_of(scores, "moe"), key=lambda one: one.peak)
    assert len(experts) > 35
    assert abs(median(one.peak for one in experts)) < 0.005
    assert median(abs(one.peak) for one in experts) < 0.011
    assert experts[0].peak > -0.038
    assert experts[-1].peak < 0.057


def test_what_is_held_is_within_a_few_percent(scores: list[Scored]) -> None:
    """Too low where a pipeline's blocks are counted whole; too high where Blackwell had the smaller workspace."""
    assert median(abs(one.held) for one in scores) < 0.018
    assert min(one.held for one in scores) > -0.079
    assert max(one.held for one in scores) < 0.143


@pytest.mark.parametrize(
    ("option", "instead", "least"),
    [
        ("swiglu", True, 0.05), ("deterministic_mode", False, -0.1), ("expert_tensor_parallel_size", 1, 0.05),
        ("moe_grouped_gemm", False, -0.1), ("gradient_accumulation_fusion", True, 0.005),
    ],
)  # fmt: skip
def test_each_option_of_experts_matters(option: str, instead: object, least: float) -> None:
    """One of the runs, with one of its options otherwise."""
    run = next(run for run in RUNS if run.name.endswith("te_8experts2parallel_ddp_average_in_collective") and run.gpu == "H100")
    job = job_of(run)
    other = replace(job, recipe=replace(job.recipe, megatron=replace(job.recipe.megatron, **{option: instead})))
    change = (estimate(other).peak_bytes - estimate(job).peak_bytes) / run.peak
    assert change > least if least > 0 else least < change < -0.005

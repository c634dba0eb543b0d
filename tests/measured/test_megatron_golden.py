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
from zeroplan.units import KIB, MIB

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


#: What two cuBLAS workspaces of torch before February 2026 lack on Blackwell (pytorch pull request 175344). [bytes]
SMALLER = 2 * (32 * MIB - (2 * 4096 + 8 * 16) * KIB)


def _had_small_workspaces(one: Scored) -> bool:
    """Whether a run on Blackwell holds less by nearly as much as small workspaces would explain."""
    asked = "CUBLAS_WORKSPACE_CONFIG" in one.run.environment
    return one.run.gpu == "GB200" and not asked and one.held * one.run.held > 0.7 * SMALLER


def test_dense_peaks_are_within_two_percent(scores: list[Scored]) -> None:
    """Those on Blackwell under an older torch would be, too, with its smaller workspaces."""
    dense = sorted(_of(scores, "dense-gpt"), key=lambda one: one.peak)
    assert len(dense) > 150
    assert median(abs(one.peak) for one in dense) < 0.0045
    assert dense[0].peak > -0.023
    small = [one for one in dense if _had_small_workspaces(one)]
    assert len(small) == 15
    assert all(-0.018 < one.peak - SMALLER / one.run.peak < 0 for one in small)
    assert max(one.peak for one in dense if one not in small) < 0.01


def test_peaks_under_expandable_segments_are_exact(scores: list[Scored]) -> None:
    """There the allocator splits every block, so nothing is counted beside tensors; a run can have changed the settings since."""
    expandable = [one for one in _of(scores, "dense-gpt") if one.run.features.get("expandable")]
    exact = [one for one in expandable if abs(one.peak * one.run.peak) < 64 * KIB and abs(one.held * one.run.held) < 64 * KIB]
    assert (len(exact), len(expandable)) == (12, 26)


def test_peaks_with_experts_are_within_five_percent(scores: list[Scored]) -> None:
    """The highest are of March 2025, when routing weights were applied behind the experts; four are Mixtrals of 64 to 128 GPUs."""
    experts = sorted(_of(scores, "moe"), key=lambda one: one.peak)
    assert len(experts) > 35
    assert abs(median(one.peak for one in experts)) < 0.005
    assert median(abs(one.peak) for one in experts) < 0.009
    assert experts[0].peak > -0.036
    assert experts[-1].peak < 0.057


def test_what_is_held_is_within_a_few_percent(scores: list[Scored]) -> None:
    """Too low where a pipeline's blocks are counted whole; too high where Blackwell had the smaller workspace."""
    assert median(abs(one.held) for one in scores) < 0.0055
    assert min(one.held for one in scores) > -0.034
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

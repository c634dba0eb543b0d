"""Engine megatron compared with Megatron-LM's own functional tests: held bytes and peak of the last rank.

Nothing in the engine was fitted to them. Most are small models with 12 layers of width 512. Most estimates are too low, mainly
because the allocator does not split a block if less than a MiB would be left, and counts all of it.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from statistics import median

import pytest

from tests.measured.megatron_blocks import beyond, placed
from tests.measured.megatron_golden import Scored, job_of, kept, more_than_default, score
from zeroplan.engines.reserved_shares import missed_by
from zeroplan.estimator import estimate
from zeroplan.units import KIB

RUNS = kept()


@pytest.fixture(scope="module")
def scores() -> list[Scored]:
    return score(RUNS)[0]


def test_the_notes_say_what_was_found(scores: list[Scored]) -> None:
    """The figures in the notes match the errors for these runs."""
    experts, decoders = [one.peak for one in _of(scores, "moe")], _decoders(scores)
    notes = " ".join(note for kind in ("moe", "bert", "t5") for note in _of(scores, kind)[0].answer.notes)
    off = median(abs(one.peak) for one in decoders)
    assert f"{len(decoders)} runs of Megatron-LM's own tests ({off:.1%} off".replace("%", " %") in notes
    for kind, named in (("bert", "runs of BERT in"), ("t5", "runs in")):
        peaks = [one.peak for one in _of(scores, kind)]
        said = (
            f"for {len(peaks)} {named} Megatron-LM's tests the estimate was from {-max(peaks):.0%} to {-min(peaks):.0%} too low"
        )
        assert said.replace("%", " %") in notes
    assert f"For {len(experts)} runs with experts of Megatron-LM's tests" in notes
    assert f"from {-min(experts):.0%} too low to {max(experts):.0%} too high".replace("%", " %") in notes


def _decoders(scores: list[Scored]) -> list[Scored]:
    return [one for one in scores if one.run.kind not in ("bert", "t5")]


def _of(scores: list[Scored], kind: str) -> list[Scored]:
    return [one for one in scores if one.run.kind == kind]


def test_dense_peaks_are_within_two_and_a_half_percent(scores: list[Scored]) -> None:
    """Nearly all estimates are too low, by the rests of blocks that the allocator does not split."""
    dense = sorted(_of(scores, "dense-gpt"), key=lambda one: one.peak)
    assert len(dense) > 160
    assert median(abs(one.peak) for one in dense) < 0.0035
    assert dense[0].peak > -0.023
    assert dense[-1].peak < 0.004


def test_peaks_under_expandable_segments_are_exact(scores: list[Scored]) -> None:
    """With them the allocator splits every block, so it counts only tensors. 12 of 26 runs match within 64 KiB.

    The settings of a test may have changed since it was measured.
    """
    expandable = [one for one in _of(scores, "dense-gpt") if one.run.features.get("expandable")]
    exact = [one for one in expandable if abs(one.peak * one.run.peak) < 64 * KIB and abs(one.held * one.run.held) < 64 * KIB]
    assert (len(exact), len(expandable)) == (12, 26)


def test_peaks_with_experts_are_within_two_and_a_half_percent(scores: list[Scored]) -> None:
    """Runs with experts, except one outlier and seven Mixtrals.

    The outlier is of November 2025, before Megatron-LM released the tensors of an overlapped micro-batch (a56a0b001d, 5da641cf5f).
    The Mixtrals ran on 64 to 128 GPUs with real text, whose routing is uneven: one grew by 1,644 MiB after its fifth step.
    """
    real = [one for one in _of(scores, "moe") if one.run.name.startswith("mixtral/")]
    lowest, *experts = sorted((one for one in _of(scores, "moe") if one not in real), key=lambda one: one.peak)
    assert "a2a_ovlp" in lowest.run.name
    assert (len(experts), len(real)) == (40, 7)
    assert abs(median(one.peak for one in experts)) < 0.005
    assert median(abs(one.peak) for one in experts) < 0.009
    assert experts[0].peak > -0.023
    assert experts[-1].peak < 0.021
    assert all(-0.088 < one.peak < 0 and abs(one.held) < 0.005 for one in real)


def test_predictions_layouts_and_mamba_are_within_three_percent(scores: list[Scored]) -> None:
    """Runs with a pipeline layout and multi-token prediction on 8 to 128 GPUs, and runs with hybrid patterns."""
    predicting, hybrid = [one for one in _of(scores, "mla-moe") if one.run.features.get("layout")], _of(scores, "hybrid")
    assert (len(predicting), len(hybrid)) == (5, 4)
    assert all(-0.024 < one.peak < 0 and abs(one.held) < 0.009 for one in predicting)
    assert all(-0.010 < one.peak < 0 for one in hybrid)


def test_megatron_fsdp_and_fp8_are_within_two_and_a_half_percent(scores: list[Scored]) -> None:
    """Megatron-FSDP releases gathered weights when it logs their norm; since 30 May 2026 only those of layers.

    FP8 weights have bf16 gradients, which the step copies to fp32. Gradients of other weights are fp32.
    """
    sharded = [one for one in scores if one.run.features.get("fsdp")]
    assert [bool(one.run.features.get("fp8")) for one in sharded] == [True, True, False, False]
    assert all(-0.02 < one.peak < 0.025 for one in sharded)
    assert all(abs(one.held) < 0.004 for one in sharded[2:])


def test_verdicts_leave_the_room_that_these_runs_took(scores: list[Scored]) -> None:
    """For BERT, T5 and experts the verdict adds the largest error of these runs. Dense models need only the expected reserve."""
    for kinds in (("bert",), ("t5",), ("moe", "mla-moe")):
        ones = [one for kind in kinds for one in _of(scores, kind)]
        missed = missed_by(ones[0].answer.job.model, ones[0].answer.job.recipe)
        took = ((one.run.peak - more_than_default(one.run)) / one.answer.peak_bytes for one in ones)
        assert missed == ceil(1000 * (max(took) - 1))
    assert all(one.run.peak <= one.reserved for one in scores)


def test_nine_in_ten_configurations_have_an_estimate(scores: list[Scored]) -> None:
    """The other configurations have models, optimizers or precisions without an option in zeroplan."""
    assert len(scores) / len(RUNS) > 0.9


def test_what_is_held_is_within_a_few_percent(scores: list[Scored]) -> None:
    """Estimates are too low for pipelines whose blocks the allocator counts whole.

    With overlapped micro-batches, a layer's schedule still refers to some tensors of the last one. Which tensors is unknown.
    """
    overlapped = [one.held for one in _of(scores, "moe") if "a2a_ovlp" in one.run.name]
    held = [one.held for one in _decoders(scores) if "a2a_ovlp" not in one.run.name and not one.run.features.get("fp8")]
    assert len(overlapped) == 4
    assert max(overlapped) < -0.035
    assert median(map(abs, held)) < 0.0055
    assert min(held) > -0.034
    assert max(held) < 0.005


def test_bert_s_and_t5_s_peaks_are_within_three_percent(scores: list[Scored]) -> None:
    """Exceptions are BERTs of half a GiB on 64 or more ranks, and a T5 whose memory rose by 424 MiB at its 56,405th step.

    T5's estimates lack the rests of blocks that the allocator does not split. A dry run of its code peaks 36 MiB higher with them,
    and these estimates are 35 MiB too low.
    """
    for kind, runs, off, exceptions in (("bert", 15, 0.026, 5), ("t5", 19, 0.017, 1)):
        peaks = sorted(one.peak for one in _of(scores, kind))
        assert len(peaks) == runs
        assert median(map(abs, peaks)) < off
        assert all(-0.028 < peak < 0 for peak in peaks[exceptions:])
        assert peaks[exceptions - 1] < -0.05


def test_what_is_missing_between_steps_is_in_blocks_that_the_allocator_does_not_split(scores: list[Scored]) -> None:
    """Placing the blocks of the states explains most of the error. Where the first step left other blocks is unknown."""
    plain = [one for one in scores if placed(one.run) and one.run.features["precision"] == "bf16"]
    assert len(plain) > 110
    assert median(one.held for one in plain) < -0.006
    assert median(abs(one.held + beyond(one.run) / one.run.held) for one in plain) < 0.003
    berts = [one.held + beyond(one.run) / one.run.held for one in plain if one.run.kind == "bert" and one.run.gpu == "A100"]
    assert len(berts) == 5
    assert max(map(abs, berts)) < 0.0007


def test_held_bytes_with_blocks_are_within_a_third_of_a_percent(scores: list[Scored]) -> None:
    """This includes the runs whose blocks cannot be placed."""
    assert median(abs(one.held + beyond(one.run) / one.run.held) for one in scores) < 0.0033


@pytest.mark.parametrize(
    ("option", "instead", "least"),
    [
        ("swiglu", True, 0.05), ("deterministic_mode", False, -0.1), ("expert_tensor_parallel_size", 1, 0.05),
        ("moe_grouped_gemm", False, -0.1), ("gradient_accumulation_fusion", True, 0.005),
    ],
)  # fmt: skip
def test_each_option_of_experts_matters(option: str, instead: object, least: float) -> None:
    """A run's estimate changes if one of its options is set differently."""
    run = next(run for run in RUNS if run.name.endswith("te_8experts2parallel_ddp_average_in_collective") and run.gpu == "H100")
    job = job_of(run)
    other = replace(job, recipe=replace(job.recipe, megatron=replace(job.recipe.megatron, **{option: instead})))
    change = (estimate(other).peak_bytes - estimate(job).peak_bytes) / run.peak
    assert change > least if least > 0 else least < change < -0.005

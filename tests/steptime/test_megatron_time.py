"""The time of Megatron-Core's steps: by hand, in columns, and held against published runs that no constant was fitted on."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from tests.steptime.published_megatron import built_on, runs
from tests.steptime.published_runs import Run, predicted
from zeroplan import JobSpec, MegatronOptions, estimate, job
from zeroplan.planner import Fixed, plan, time_of
from zeroplan.planner.search import job_at, search
from zeroplan.steptime import StepTime, efficiency

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
SAID = {"model": "llama-3.1-8b", "gpu": "a100-sxm-80gb", "engine": "megatron", "stage": 1, "seq_len": 4096}


def seconds(found: StepTime, name: str) -> float:
    return next(float(one.seconds) for one in found.parts if one.name.startswith(name))


# Published runs


def error(run: Run) -> float:
    return abs(float(predicted(run).tokens_per_s) / run.tokens_per_s - 1)


def test_the_page_has_the_errors_of_both_halves() -> None:
    """The aim is a median of 15 % on the half that nothing was fitted on."""
    held = [run for run in runs() if run.group not in built_on()]
    assert median(error(run) for run in held) < 0.15
    for name, half in (("fitted on", [run for run in runs() if run.group in built_on()]), ("held back", held)):
        ordered = sorted(error(run) for run in half)
        figures = (median(ordered), sum(ordered) / len(ordered), ordered[int(0.9 * len(ordered))], ordered[-1])
        row = f"| Megatron-LM, {name} | {len(ordered)} | {' | '.join(f'{100 * figure:.1f} %' for figure in figures)} |"
        assert row in PAGE, row


def test_of_two_layouts_the_quicker_one_is_told_in_nine_of_ten_pairs() -> None:
    """Pairs of the same model and source in the half not fitted on, whose measured rates differ by more than 5 %."""
    rates = [(run.group, run.tokens_per_s, float(predicted(run).tokens_per_s)) for run in runs() if run.group not in built_on()]
    pairs = [(a, b) for a, b in combinations(rates, 2) if a[0] == b[0] and max(a[1], b[1]) > 1.05 * min(a[1], b[1])]
    right = [(a, b) for a, b in pairs if (a[1] > b[1]) == (a[2] > b[2])]
    assert len(right) > 0.9 * len(pairs)
    assert f"in {len(right)} of {len(pairs)} pairs of Megatron-LM's" in PAGE


# Parts


def test_a_tensor_parallel_step_by_hand() -> None:
    """Eight A100: an eighth of the matrices each; 32 layers gather and scatter 4,096 x 4,096 twice each forward, at 240 GB/s."""
    one = job(**SAID, gpus=8, tensor_parallel=8, sequence_parallel=True)
    found, share = time_of(one), efficiency("Ampere", "megatron").matrices
    assert seconds(found, "matrix") == pytest.approx(3 * 2 * 7_504_658_432 * 4096 / 8 / (share * 312e12))
    call = 7 / 8 * 2 * 4096 * 4096 / 240e9 + 8.4e-6 + 7 * 3.4e-6
    forward, backward = 32 * 4 * call, 32 * 2 * call  # of a backward's six the column-parallel four hide
    assert seconds(found, "waiting for tensor") == pytest.approx(forward + backward)
    assert found.tokens == 4096 / 8


def test_a_bubble_by_hand_and_the_slowest_rank_has_the_head() -> None:
    """Four ranks of eight layers: the last one sets the pace, the others wait for one micro-batch of each."""
    asked = {**SAID, "gpus": 4, "pipeline_parallel": 4}
    few, many = (time_of(job(**asked, grad_accum=count)) for count in (8, 64))
    assert seconds(few, "pipeline bubble") == pytest.approx(seconds(many, "pipeline bubble"))
    head, block = 4096 * 128256, (7_504_658_432 - 4096 * 128256) / 4
    busiest = 8 * 6 * 4096 * (block + head) / (efficiency("Ampere", "megatron").matrices * 312e12)
    assert seconds(few, "matrix") == pytest.approx(busiest)
    halved = time_of(job(**asked, grad_accum=8, pipeline_schedule="interleaved-1f1b", pipeline_stages_per_rank=2))
    assert seconds(halved, "pipeline bubble") == pytest.approx(seconds(few, "pipeline bubble") / 2, rel=0.01)
    assert seconds(halved, "waiting for sends") == 0 < seconds(few, "waiting for sends")


def test_what_overlaps_is_waited_for_no_longer() -> None:
    one = job(**SAID, gpus=64, tensor_parallel=2, sequence_parallel=True, grad_accum=4)
    name = "collectives around the optimizer step"
    plain = seconds(time_of(one), name)
    beside = MegatronOptions(overlap_grad_reduce=True, overlap_param_gather=True)
    assert seconds(time_of(replace(one, recipe=replace(one.recipe, megatron=beside))), name) < 0.5 * plain


def test_attention_is_recomputed_alone() -> None:
    said = {**SAID, "gpus": 8, "tensor_parallel": 8, "sequence_parallel": True}
    none, selective, full = (time_of(job(**said, recompute=what)) for what in ("none", "selective", "full"))
    assert seconds(none, "recomputation") == 0
    assert seconds(selective, "recomputation") == pytest.approx(seconds(none, "attention") / 3.5)
    assert seconds(full, "recomputation") > seconds(none, "matrix") / 4


# Planned


@pytest.mark.parametrize("model", ["llama-3.2-1b", "mixtral-8x7b"])
def test_a_layout_of_the_search_is_the_job(model: str) -> None:
    """Memory to the byte and time to rounding, on a random sample of layouts, pipelines in columns among them."""
    base = job(model=model, gpu="h100", gpus=32, seq_len=2048)
    found = search(base, Fixed(engine="megatron", global_batch_size=192)).found
    every = [(one, at) for one in found for at in range(one.grid.layouts)]
    assert {one.grid.pp for one, _ in every} >= {1, 2, 4}
    for index in np.random.default_rng(7).choice(len(every), 30, replace=False):
        one, at = every[index]
        alone = job_at(base, one.recipe, one.grid, at)
        answer = estimate(alone)
        assert answer.least_bytes == one.least_bytes[at], alone
        assert float(time_of(alone).seconds) == pytest.approx(float(one.seconds[at]), rel=1e-9), alone


def test_a_plan_ranks_megatron_by_time() -> None:
    """The best is the quickest of all that fit, with sequence parallelism and what overlaps."""
    base, fixed = job(model="llama-3.1-8b", gpu="h100", gpus=16, seq_len=8192), Fixed(engine="megatron", global_batch_size=64)
    best = plan(base, fixed).best
    assert best is not None
    found = search(base, fixed).found
    room = 80 * 2**30
    quickest = min(float(one.seconds[one.comfortable_bytes <= room].min(initial=np.inf)) for one in found)
    assert best.layout.seconds == pytest.approx(quickest, rel=0.01)
    recipe, mesh = best.layout.job.recipe, best.layout.job.mesh
    assert recipe.megatron.overlap_grad_reduce
    assert recipe.sequence_parallel == (mesh.tp > 1)


def test_layers_that_divide_with_embedding_and_loss_are_cut_so() -> None:
    """Llama 3.1 405B has 126 layers: on 16 ranks seven at the ends and eight between them, as its training had."""
    one: JobSpec = job(model="llama-3.1-405b", gpu="h100", gpus=128, engine="megatron", stage=1, tensor_parallel=8,
                       pipeline_parallel=16, grad_accum=16, sequence_parallel=True, seq_len=4096)  # fmt: skip
    answer = estimate(one)
    stages = {rank.rank: rank.stages for rank in answer.pipeline}
    assert stages[0] == "embedding, blocks 1 to 7"
    assert stages[1] == "blocks 8 to 15"
    assert stages[15] == "blocks 120 to 126, norm and head"
    assert any("--account-for-embedding-in-pipeline-split" in note for note in answer.notes)

"""Which schedules of a pipeline are searched, and that the search has the numbers of the job."""

from __future__ import annotations

import pytest

from zeroplan.estimator import estimate
from zeroplan.job_time import time_of
from zeroplan.planner.asking import Question, ask
from zeroplan.resolve import Request

ASKED = Request(model="llama-3.1-8b", gpu="h200", gpus=8, seq_len=4096, pipeline_parallel=4, engine="fsdp2")


def test_with_few_micro_batches_weights_that_fill_the_bubble_are_the_quickest():
    plan = ask(ASKED, Question(global_batch=16))
    assert plan.best is not None
    best, answer = plan.best.layout, plan.best.estimate
    assert best.job.recipe.pipeline_schedule == "zbv"
    assert estimate(best.job).comfortable_bytes == best.comfortable_bytes == answer.comfortable_bytes
    assert float(time_of(best.job).seconds) == pytest.approx(float(best.seconds), rel=1e-9)
    split = [recipe for recipe in plan.cloud.recipes if recipe.pipeline_schedule in {"interleaved-zero-bubble", "zbv"}]
    assert {(recipe.zero_stage, recipe.recompute) for recipe in split} == {(2, "none")}

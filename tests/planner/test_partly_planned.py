"""Where none of the blocks recomputed is too few and all are more than needed, the planner takes the least number that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan import SpecError, estimate
from zeroplan.export.files import inexpressible_in
from zeroplan.planner.asking import Question, ask
from zeroplan.planner.result import Plan
from zeroplan.resolve import Request

ASKED = Request(
    model="llama-3.1-70b", gpu="h100-sxm-80gb", gpus=64, seq_len=4096, stage=3, tensor_parallel=1, context_parallel=1,
    pipeline_parallel=1, micro_batch=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def planned() -> Plan:
    return ask(ASKED, Question(global_batch=1024))


def test_as_few_as_fit_are_recomputed(planned: Plan):
    assert planned.best is not None
    best, whole = planned.best.layout, planned.best.estimate.capacity_bytes
    layers = best.job.recipe.recompute_layers
    assert whole is not None
    room = 0.95 * whole
    assert layers is not None
    assert best.comfortable_bytes <= room
    assert estimate(best.job).comfortable_bytes == best.comfortable_bytes
    fewer = replace(best.job, recipe=replace(best.job.recipe, recompute_layers=layers - 1))
    assert estimate(fewer).comfortable_bytes > room


def test_it_is_quicker_than_all_blocks_and_found_only_unasked(planned: Plan):
    assert planned.best is not None
    whole = ask(replace(ASKED, recompute=planned.best.layout.job.recipe.recompute), Question(global_batch=1024)).best
    assert whole is not None
    assert whole.layout.job.recipe.recompute_layers is None
    assert whole.layout.tokens_per_s < planned.best.layout.tokens_per_s


def test_a_file_that_cannot_say_it_is_not_planned():
    plan = ask(ASKED, Question(global_batch=1024), inexpressible=inexpressible_in("torchtitan"))
    assert all(recipe.recompute_layers is None for recipe in plan.cloud.recipes)


def test_so_many_as_are_asked_for():
    plan = ask(replace(ASKED, recompute_layers=75), Question(global_batch=1024))
    assert {recipe.recompute_layers for recipe in plan.cloud.recipes} == {75}
    assert plan.best is not None
    with pytest.raises(SpecError, match="more than the 80 layers"):
        ask(replace(ASKED, recompute_layers=81), Question(global_batch=1024))

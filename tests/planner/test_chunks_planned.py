"""Pipelines with more chunks per rank, beside a search of every number of them."""

from dataclasses import replace

import pytest

from zeroplan.planner import Plan
from zeroplan.planner.asking import Question, ask
from zeroplan.planner.objectives import TIE
from zeroplan.resolve import Request

ASKED = Request(
    model="llama-3.1-70b", gpu="h100-sxm-80gb", gpus=64, seq_len=8192, engine="megatron", tensor_parallel=4, context_parallel=2,
    pipeline_parallel=4, recompute="none",
)  # fmt: skip
BATCH = Question(global_batch=128)


@pytest.fixture(scope="module")
def planned() -> Plan:
    return ask(ASKED, BATCH)


def test_no_number_of_chunks_is_clearly_faster(planned: Plan):
    assert planned.best is not None
    best = planned.best.layout
    assert best.job.recipe.pipeline_schedule == "interleaved-1f1b"
    rates = {}
    for chunks in (2, 4, 5, 10, 20):
        pinned = ask(replace(ASKED, pipeline_schedule="interleaved-1f1b", pipeline_stages_per_rank=chunks), BATCH).best
        if pinned is not None and not pinned.tight:
            rates[chunks] = pinned.layout.tokens_per_s
    assert len(rates) > 1
    assert best.tokens_per_s * (1 + TIE) >= max(rates.values())


def test_it_is_faster_than_one_chunk(planned: Plan):
    whole = ask(replace(ASKED, pipeline_schedule="1f1b"), BATCH).best
    assert planned.best is not None
    assert whole is not None
    assert planned.best.layout.tokens_per_s > (1 + TIE) * whole.layout.tokens_per_s


def test_so_many_as_are_asked_for():
    pinned = ask(replace(ASKED, pipeline_schedule="interleaved-1f1b", pipeline_stages_per_rank=4), BATCH)
    assert {recipe.pipeline_stages_per_rank for recipe in pinned.cloud.recipes} == {4}
    one = ask(replace(ASKED, pipeline_schedule="1f1b"), BATCH)
    assert {recipe.pipeline_schedule for recipe in one.cloud.recipes} == {"1f1b"}


def test_micro_batches_that_do_not_fill_the_ranks_leave_one_chunk():
    """Megatron interleaves only multiples of the ranks: here three micro-batches in each of two groups of four ranks."""
    odd = ask(ASKED, Question(global_batch=2 * 3)).cloud.recipes
    assert {recipe.pipeline_schedule for recipe in odd} <= {None, "1f1b"}

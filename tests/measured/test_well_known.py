"""Published layouts of well-known runs: each can be said and fits, but for those whose cause the page names."""

import pytest

from tests.measured.well_known import CASES, PAGE, START, Case, table
from zeroplan import estimate

#: Runs in programs that free earlier what Megatron keeps.
TOO_LARGE = ("Llama 3 405B on 16,384 H100",)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_published_layout_can_be_said_and_fits(case: Case):
    answer = estimate(case.published())
    sequences = answer.job.mesh.world_size // answer.job.mesh.model_ranks
    sequences *= answer.job.batch.micro_batch_size * answer.job.batch.grad_accum_steps
    assert sequences == case.global_batch
    assert answer.fits is (case.name not in TOO_LARGE)


def test_the_page_has_every_case_and_its_source():
    page = PAGE.read_text(encoding="utf-8").partition(START)[2]
    for case in CASES:
        assert page.count(f"| {case.name} |") == 1
        assert f"- {case.name}: {case.source}." in page


def test_the_page_is_what_the_command_writes():
    assert table() in PAGE.read_text(encoding="utf-8")

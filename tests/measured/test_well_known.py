"""Checks published layouts of well-known runs: options can express each, and it fits."""

import pytest

from tests.measured.well_known import CASES, PAGE, START, Case, published, room_of, table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_published_layout_can_be_said_and_fits(case: Case):
    found = published(case)
    mesh, batch = found.job.mesh, found.job.batch
    assert mesh.world_size // mesh.model_ranks * batch.micro_batch_size * batch.grad_accum_steps == case.global_batch
    assert found.least_bytes <= room_of(found.job)


def test_a_program_that_shards_gradients_holds_those_of_two_chunks_and_a_share():
    """Llama 3 405B: 8 layers on a rank between the ends, of 126; 8-way tensor parallelism, fp32; 128 ranks share."""
    case = next(one for one in CASES if one.shards_gradients)
    of_a_layer = (2 * 16_384**2 + 2 * 16_384 * 1024 + 3 * 16_384 * 53_248) // 8 + 2 * 16_384
    held = 4 * 8 * of_a_layer
    assert case.released() == pytest.approx(held * (1 - 2 / 8 - 1 / 128), rel=1e-6)


def test_the_page_has_every_case_and_its_source():
    page = PAGE.read_text(encoding="utf-8").partition(START)[2]
    for case in CASES:
        assert page.count(f"| {case.name} |") == 1
        assert f"- {case.name}: {case.source}." in page


def test_the_page_is_what_the_command_writes():
    assert table() in PAGE.read_text(encoding="utf-8")

"""The gradients that DeepSpeed's stages 0 to 2 hold, event by event. Expected figures are derived by hand from its source."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan.engines.deepspeed import course as courses
from zeroplan.engines.deepspeed.course import Course, Held, Seen, corners, course_of
from zeroplan.engines.deepspeed.gradients import Plan, copies_of, distinct_micro_batches
from zeroplan.engines.deepspeed.stage12_backward import received_before
from zeroplan.engines.rows import Placed, row
from zeroplan.spec.model import ModelSpec

TINY = ModelSpec(
    family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4, vocab_size=10,
)  # fmt: skip
WHOLE = row(TINY)
EMBEDDING, NORM, MLP, BLOCK = 80, 8, 128, 592
TOTAL = 1352
TOUCHED = EMBEDDING + BLOCK + 64
"""Elements of all parameters in the first rank's share of 676, which ends within the second block's first matrix."""


def plan(stage: int, n_ranks: int = 2, **said: object) -> Plan:
    default = Plan(
        WHOLE, (0,) * WHOLE.n_blocks, collects=False, stage=stage, element=2, bucket_size=200, overlaps=False, contiguous=True,
        scatters=True, sums_in_fp32=False, offloads=False, ranks=n_ranks, micro_batches=1,
    )  # fmt: skip
    return default._replace(**said)  # type: ignore[arg-type]


def end(course: Course, event: str) -> Held:
    return course["end", event][0].held


def copied_elements(plan: Plan, inside: tuple[Placed, ...]) -> int:
    return max(copies_of(plan, inside), default=0)


def at_block(course: Course, block: int, count: int) -> Held:
    seen = (*course["between", 0, count], *course["before", 0, count])
    return max((each for each in seen if each.block == block), key=lambda each: each.n_bytes).held


def test_the_model_has_the_sizes_that_these_tests_assume():
    assert WHOLE.n_elements == TOTAL
    assert {each.end - each.start for each in WHOLE.placed} == {EMBEDDING, NORM, MLP, 64, 32}


def test_a_gradient_moves_into_the_bucket_as_it_arrives():
    head = course_of(plan(2))["between", 1, 1][0].held
    assert head == Held(buckets=400)


def test_with_overlap_stage_1_moves_gradients_in_the_last_micro_batch_too():
    """Gradients outside of buckets are not held to the end of the backward: the last block's first gradient frees them."""
    several = course_of(plan(1, overlaps=True, micro_batches=3))
    assert several["forward",][0].held == Held(buckets=800, gradients=2 * TOTAL)
    last = several["between", 1, 1]
    assert {seen.held.gradients for seen in last} == {2 * TOTAL}
    once = course_of(plan(1, overlaps=True))
    assert at_block(once, 1, 1).gradients == 0
    assert end(once, "reduced").gradients == 0


def test_without_overlap_stage_1_moves_gradients_after_the_backward():
    course = course_of(plan(1))
    assert at_block(course, 0, 1).gradients == 2 * (EMBEDDING + NORM + BLOCK + MLP)
    assert ("during", "reduced") not in course
    first = Held(
        buckets=400, gradients=2 * (TOTAL - EMBEDDING - 64 - 32), own=2 * TOUCHED
    )  # the bucket has the embedding, q and k
    assert end(course, "kept") == first


def test_further_micro_batches_do_not_change_the_peaks():
    for stage, overlaps in ((0, False), (1, False), (1, True), (2, False), (2, True)):
        few = distinct_micro_batches(stage, overlaps=overlaps)
        some = plan(stage, overlaps=overlaps, collects=stage == 0)
        highest = [_peaks(course_of(some._replace(micro_batches=number))) for number in (few, few + 1, few + 4)]
        assert highest[0] == highest[1] == highest[2]


def _peaks(course: Course) -> list[int]:
    return [max(seen.n_bytes for seen in place) for place in course.values()]


def test_without_a_contiguous_bucket_a_lone_gradient_is_not_copied():
    alone = plan(2, contiguous=False, bucket_size=100)
    one, two = (tuple(each for each in WHOLE.placed if each.end - each.start == MLP)[:count] for count in (1, 2))
    assert copied_elements(alone, one) == 0
    assert copied_elements(alone, two) == 2 * MLP
    assert copied_elements(alone._replace(scatters=False), two) == 2 * MLP


def test_without_a_contiguous_bucket_kept_gradients_are_not_moved():
    course = course_of(plan(2, contiguous=False))
    assert all(seen.held.own == 0 for seen in course["during", "kept"])
    assert end(course, "kept").gradients == 2 * TOUCHED
    contiguous = end(course_of(plan(2)), "kept")
    assert (contiguous.gradients, contiguous.own) == (0, 2 * TOUCHED)


def test_with_fp32_sums_each_gradient_of_this_rank_is_a_slice():
    ours = WHOLE.placed[0], WHOLE.placed[1]
    assert copied_elements(plan(2), ours) == 0
    assert copied_elements(plan(2, sums_in_fp32=True), ours) == EMBEDDING + ours[1].end - ours[1].start
    assert copied_elements(plan(2, sums_in_fp32=True), ours[:1]) == 0


def test_with_fp32_sums_a_reduced_gradient_is_cast_and_a_large_one_stays():
    course = course_of(plan(2, sums_in_fp32=True, bucket_size=100))
    last = end(course, "reduced")
    assert last.cast == 4 * EMBEDDING
    assert last.own == 4 * TOTAL // 2
    assert last.gradients == 2 * 3 * MLP
    plain = end(course_of(plan(2, bucket_size=100)), "reduced")
    assert plain.gradients == 0


def test_at_stage_1_a_large_gradient_of_another_rank_stays_to_the_end():
    large = [each for each in WHOLE.placed if each.end - each.start > 100]
    others = [each for each in large if each.start >= TOTAL // 2]
    after = end(course_of(plan(1, bucket_size=100)), "kept")
    assert after.gradients >= 2 * sum(each.end - each.start for each in others)
    assert end(course_of(plan(2, bucket_size=100)), "kept").gradients == 0


@pytest.mark.parametrize(
    ("bucket", "ranks", "copied"),
    [
        (1000, 1, 0),  # one slice, reduced in place
        (1100, 4, TOTAL),  # four slices of 338 together
        (1000, 4, 1014),  # three slices together, then one alone
        (338, 4, 676),  # two slices exceed the bucket, then the next two
        (337, 4, 0),  # each slice exceeds the bucket
    ],
)
def test_slices_are_copied_together_until_they_exceed_a_bucket(bucket: int, ranks: int, copied: int):
    everything = plan(2, ranks, bucket_size=bucket)
    assert copied_elements(everything, WHOLE.placed) == copied


def test_with_offload_large_gradients_are_copied_and_own_ones_leave_in_fp64():
    course = course_of(plan(2, offloads=True, bucket_size=100))
    assert max(seen.held.copy for seen in course["during", "copied"]) == 2 * MLP
    assert end(course, "leaves").copy == 8 * EMBEDDING
    assert end(course, "leaves").own == 0
    first_of_two = course_of(plan(2, offloads=True, micro_batches=2))
    assert first_of_two["forward",][0].held.earlier == 0


def test_the_corners_include_the_highest_for_any_bytes_kept_per_block():
    seen = [Seen(block, 0, 0, value, Held(gradients=value)) for block, value in enumerate((90, 95, 60, 70, 40, 45, 20, 5))]
    few = corners(seen, (0,) * 8)
    assert [each.block for each in few] == [7, 5, 1]
    for kept in range(40):
        assert max(kept * each.block + each.held.gradients for each in seen) == max(
            kept * each.block + each.held.gradients for each in few
        )


def test_a_gradient_arrives_when_its_operator_is_done():
    assert received_before(((0, 0), (100, 100), (108, 8), (108, 0)), (100, 8)) == (0, 0, 1, 2)


def test_gradients_add_up_if_nothing_reduces_them():
    course = course_of(plan(0, collects=True, micro_batches=2))
    assert course["forward",][0].held == Held(gradients=2 * TOTAL)
    assert max(seen.held.gradients for seen in course["during", "arrives"]) == 2 * (TOTAL + MLP)
    assert not any(place[0] == "end" for place in course)


def test_a_wider_model_is_computed_anew():
    wider = row(replace(TINY, vocab_size=1000))
    assert course_of(plan(2)._replace(whole=wider))["end", "kept"][0].held.earlier == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("said", [{}, {"overlaps": True}, {"contiguous": False}, {"sums_in_fp32": True}, {"offloads": True}])
def test_micro_batches_that_are_left_out_never_have_the_peak(stage: int, said: dict, monkeypatch: pytest.MonkeyPatch):
    some = plan(stage, **{**said, "collects": stage == 0}, bucket_size=150, micro_batches=3)
    some = some._replace(overlaps=some.overlaps and not some.collects, sums_in_fp32=some.sums_in_fp32 and stage == 2)
    short = _peaks(course_of(some))
    monkeypatch.setattr(Plan, "highest", property(lambda one: range(one.micro_batches)))
    course_of.cache_clear()
    courses._during_the_backward.cache_clear()
    whole = _peaks(course_of(some))
    course_of.cache_clear()
    courses._during_the_backward.cache_clear()
    assert short == whole

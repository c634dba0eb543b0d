"""The listed changes add up to the difference of the peaks, for random pairs of jobs, records and snapshots."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.measured import stored
from tests.measured_twins import twin
from tests.snapshots.written import Written, step
from zeroplan import SpecError, diff, estimate, job
from zeroplan.differences import Changed, Difference, Held, Side, between, of_estimate
from zeroplan.differences.difference import changes
from zeroplan.differences.measured import of_record, of_snapshot
from zeroplan.differences.settings import settings_of
from zeroplan.differences.side import At
from zeroplan.report.difference import difference_markdown, difference_payload, difference_text
from zeroplan.report.screen import LINES
from zeroplan.report.words import COLUMNS
from zeroplan.snapshots.reading import read_snapshot

if TYPE_CHECKING:
    from pathlib import Path

#: How many pairs of random jobs are compared.
PAIRS = 32


def drawn(number: int) -> Side | None:
    """Return the estimate of a random job, or None if no engine supports the job."""
    try:
        return of_estimate(estimate(strategies.job(Random(number))), f"job {number}")  # noqa: S311  a draw of tests
    except SpecError:
        return None


def reconciles(found: Difference) -> None:
    """Check that every list of changes adds up to the difference that it explains, and contains nothing that did not change."""
    for rows in (found.changes, found.kinds):
        assert sum(row.change_bytes for row in rows) == found.peak.change_bytes
        before = found.peak.before_bytes - sum(row.before_bytes for row in rows)
        assert before == found.peak.after_bytes - sum(
            row.after_bytes for row in rows
        )  # unchanged lines are equal on both sides
        assert all(row.change_bytes for row in rows)
        assert [abs(row.change_bytes) for row in rows] == sorted((abs(row.change_bytes) for row in rows), reverse=True)
    for moment in found.same_moments:
        if moment.changes:
            assert sum(row.change_bytes for row in moment.changes) == moment.after.n_bytes - moment.before.n_bytes
    if found.before.held is not None and found.after.held is not None:
        held = [sum(line.n_bytes for line in side.held or ()) for side in (found.before, found.after)]
        assert sum(row.change_bytes for row in found.held) == held[1] - held[0]


def turned(rows: tuple[Changed, ...]) -> set[tuple[str, int, int]]:
    return {(row.kind, row.after_bytes, row.before_bytes) for row in rows}


def fits_a_screen(found: Difference) -> None:
    text = difference_text(found, limit=0.01).splitlines()
    assert len(text) <= LINES
    assert max(map(len, text)) <= COLUMNS


@pytest.mark.parametrize("first", range(0, PAIRS, 8))
def test_changes_add_up_for_random_pairs_of_jobs(first: int):
    pairs = [(drawn(2 * number), drawn(2 * number + 1)) for number in range(first, first + 8)]
    answered = [(one, other) for one, other in pairs if one is not None and other is not None]
    assert len(answered) >= 3
    for one, other in answered:
        found, back = between(one, other), between(other, one)
        reconciles(found)
        assert turned(found.changes) == {(row.kind, row.before_bytes, row.after_bytes) for row in back.changes}
        fits_a_screen(found)
        assert between(one, one).equal
        for rendered in (difference_text(found, verbose=True), difference_markdown(found), str(difference_payload(found))):
            assert one.name in rendered


def test_changes_add_up_between_records_estimates_and_snapshots(tmp_path: Path):
    records = [of_record(one, f"record {at}") for at, one in enumerate(stored.records(stored.PEERS)[:6])]
    card = Written()
    step(card, states=True)
    snapshot = of_snapshot(read_snapshot(card.to(tmp_path / "s.pickle")), "s.pickle")
    sides = [*records, snapshot, of_estimate(estimate(job(model="gpt2", gpus=4, stage=2)))]
    for one in sides:
        for other in sides:
            found = between(one, other)
            reconciles(found)
            fits_a_screen(found)
            assert found.equal == (one is other)


lines = st.lists(
    st.builds(
        Held, st.sampled_from(["parameters", "activations"]), st.sampled_from(["a 1", "a 2", "b", ""]), st.integers(0, 99)
    ),
    max_size=6,
).map(tuple)


@settings(max_examples=80, deadline=None)
@given(lines, lines, st.sampled_from(["tensor", "kind"]))
def test_changes_add_up_for_any_lines(before: tuple[Held, ...], after: tuple[Held, ...], grain: str):
    found = changes(before, after, grain)  # type: ignore[arg-type]
    assert sum(row.change_bytes for row in found) == sum(line.n_bytes for line in after) - sum(line.n_bytes for line in before)


def test_by_kind_gradients_of_activations_count_as_temporaries():
    before, after = (Held("activation gradients", "a", 5), Held("temporaries", "b", 2)), (Held("temporaries", "", 9),)
    assert [(row.kind, row.before_bytes, row.after_bytes) for row in changes(before, after, "kind")] == [("temporaries", 7, 9)]


def test_collectives_of_a_single_rank_send_nothing():
    measured = twin()
    assert of_record(measured).sent
    alone = replace(measured, collectives=tuple(replace(one, group=1) for one in measured.collectives))
    assert of_record(alone).sent == ()


def side(*held: Held, name: str = "backward", others: tuple[At, ...] = ()) -> Side:
    peak = At(name, "backward", sum(line.n_bytes for line in held), held)
    return Side(name="made up", is_a="estimate", grain="tensor", peak=peak, moments=(peak, *others))


def test_a_change_grew_shrank_came_or_went():
    before = side(Held("gradients", "a", 5), Held("gradients", "b", 7), Held("gradients", "c", 2), Held("parameters", "", 4))
    after = side(Held("gradients", "a", 9), Held("gradients", "b", 1), Held("activations", "d", 3), Held("parameters", "", 4))
    found = {row.what: row.happened for row in between(before, after).changes}
    assert found == {"a": "grew", "b": "shrank", "c": "went", "d": "came"}


def test_two_names_that_differ_only_in_a_number_are_one_row_unless_ambiguous():
    found = changes(
        (Held("activations", "inputs of 24 blocks", 5),), (Held("activations", "inputs of 32 blocks", 9),), "tensor"
    )
    assert [(row.what, row.happened, row.change_bytes) for row in found] == [("inputs of 32 blocks", "grew", 4)]
    several = (Held("activations", "block 1", 5), Held("activations", "block 2", 6))
    assert {row.happened for row in changes(several, (Held("activations", "block 3", 9),), "tensor")} == {"came", "went"}


def test_a_line_that_left_the_peak_may_exist_at_another_moment():
    early = At("forward", "forward", 3, (Held("activations", "d", 3),))
    found = between(side(Held("activations", "d", 3)), side(Held("gradients", "a", 9), others=(early,)))
    assert {row.what: row.elsewhere for row in found.changes} == {"d": "forward", "a": ""}
    assert "B has it at another moment: forward" in difference_text(found, verbose=True)


def test_peaks_at_different_moments_are_compared_at_each():
    early = At("forward of block 1", "forward", 2, (Held("activations", "d", 2),))
    other = At("forward of block 1", "forward", 5, (Held("activations", "d", 5),))
    before = side(Held("gradients", "a", 9), others=(early,))
    after = Side(name="b", is_a="estimate", grain="tensor", peak=other, moments=(other, before.peak))
    found = between(before, after)
    assert [(one.of_before, one.before.n_bytes, one.after.n_bytes) for one in found.same_moments] == [
        (True, 9, 9),
        (False, 2, 5),
    ]
    text = " ".join(difference_text(found).split())
    assert "The peaks are at different moments. At A's (backward) B has 9 B, as much." in text
    assert "At B's (forward of block 1) A has 2 B, 3 B less, most of it activations: d (-3 B)." in text


def test_last_blocks_of_models_of_different_depth_are_the_same_moment():
    last, of_few, first = (At(f"backward of block {at}", "backward", 1) for at in ("1,031 of 1,032", "23 of 24", "2 of 24"))
    assert not between(peaked(last), peaked(of_few)).same_moments
    found = between(peaked(last), peaked(first, of_few))
    assert [(one.of_before, one.before.name, one.after.name) for one in found.same_moments] == [
        (True, last.name, of_few.name), (False, last.name, first.name),
    ]  # fmt: skip
    one, other = (job(model=name, gpus=8, stage=3, recompute="full", seq_len=512) for name in ("llama-2-7b", "llama-2-13b"))
    assert not diff(one, other).same_moments


def peaked(peak: At, *others: At) -> Side:
    return Side(name="made up", is_a="estimate", grain="tensor", peak=peak, moments=(peak, *others))


def test_settings_are_named_as_flags_are():
    one = job(model="gpt2", gpus=8, stage=3)
    other = job(model="gpt2", gpus=8, stage=3, engine="deepspeed", deepspeed=one.recipe.deepspeed, recompute="full")
    named = {setting.name: (setting.before, setting.after) for setting in diff(one, other).settings}
    assert named == {"engine": ("fsdp2", "deepspeed"), "recompute": ("none", "full")}
    assert settings_of(one)["model.num_hidden_layers"] == "12"


def test_another_model_is_shown_by_name_and_in_full_with_verbose():
    found = diff(job(model="gpt2", gpus=8), job(model="llama-2-7b", gpus=8))
    assert "model gpt2 -> llama-2-7b" in difference_text(found)
    assert "hidden_size" not in difference_text(found)
    assert "model.hidden_size: 768 -> 4,096" in difference_text(found, verbose=True)


def test_two_engines_are_compared_by_kind_on_the_screen():
    found = diff(job(model="gpt2", gpus=8, stage=2), job(model="gpt2", gpus=8, stage=2, engine="deepspeed"))
    assert "At the peaks, by kind (-v: by tensor)" in difference_text(found)
    assert "At the peaks, by tensor" in difference_text(found, verbose=True)
    assert {row.what for row in found.sent} == {""}


def test_growth_is_relative_to_the_first_peak():
    assert between(side(Held("gradients", "a", 4)), side(Held("gradients", "a", 5))).growth == 0.25
    assert between(side(), side(Held("gradients", "a", 5))).growth == float("inf")
    assert between(side(), side()).growth == 0


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="takes jobs, estimates and paths"):
        diff(3, 4)  # type: ignore[arg-type]


def test_an_estimate_equals_its_job():
    one = job(model="gpt2", gpus=8, stage=3)
    assert diff(one, estimate(one)).equal

"""The comparison of two checkouts asks both the same questions, and prints what differs and by how much."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.answers import compare
from tests.answers.figures import Moved, moved


def test_a_checkout_equals_itself_and_a_changed_peak_is_printed():
    asked = [*islice(compare.questions(0, 0), 2), *(one for case in range(12) for one in compare._drawn(case))]
    assert any(len(one.jobs) > 1 for one in asked)
    now = compare.answers(compare.HERE, asked)
    assert list(now) == [one.name for one in asked]
    assert not compare.differences(now, now)
    name = asked[0].name
    phase, peak = next(iter(now[name]["peak"].items()))
    before = {**now, name: {**now[name], "peak": {phase: peak - 7}}}
    lines = list(compare.told(compare.differences(before, now), len(asked), 20))
    assert lines == [f"1 of {len(asked)} answers differ", name, f"    peak, {phase}: {peak - 7:,} -> {peak:,} (+7, 0.00%)"]


def test_a_figure_of_one_side_only_is_a_difference_of_its_full_size():
    found = moved({"sent": {"calls": 2}, "peak": {"loss": 5}}, {"sent": {"calls": 2}, "peak": {"backward": 8}})
    assert found == [Moved("peak", "backward", 0, 8), Moved("peak", "loss", 5, 0)]
    assert [one.share for one in found] == [1, 1]


def test_a_folder_without_a_checkout_is_refused_in_one_line(tmp_path: Path):
    with pytest.raises(SystemExit, match="neither a folder with a checkout nor a revision"):
        compare.main([str(tmp_path), "--random", "0"])

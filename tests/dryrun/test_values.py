"""Values that scripts need: whole numbers that ranks exchange, choices of experts, sizes that follow from both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dryrun.running import SCRIPTS, Run, dry_run
from zeroplan.report.dryrun import dry_run_text
from zeroplan.script_run import DryRun
from zeroplan.spec.base import read

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

Seen = tuple[Run, dict[str, Any]]


@pytest.fixture(scope="module", params=["1", "1.5"])
def routed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Run, dict[str, Any]]:
    """One expert per rank on 8, and how many times the even share of tokens it receives."""
    folder = tmp_path_factory.mktemp("experts")
    script = str(SCRIPTS / "experts.py")
    run = dry_run("--imbalance", request.param, "--gpus", "8", "--", script, str(folder / "seen.json"), folder=folder)
    assert run.code == 0, run.errors
    return float(request.param), run, json.loads((folder / "seen.json").read_text())


def test_every_expert_receives_the_even_share_or_so_many_times_that(routed: tuple[float, Run, dict[str, Any]]):
    """1,024 tokens with two experts each are 256 for each of 8 experts, from each of 8 ranks."""
    times, run, seen = routed
    assert seen["sent"] == [256] * 8
    assert seen["mask"] == 256
    assert seen["received"] == 2048 * times
    forward = next(phase for phase in run.answer["steps"][-1]["phases"] if phase["phase"] == "forward")
    kept = 4 * 256 * (2 * 2048 + seen["received"] * (1 + 4 + 1))  # the rows sent and received back, and the expert's own
    assert forward["peak_bytes"] == pytest.approx(run.answer["steps"][0]["held_bytes"] + kept, rel=0.2)


def test_the_answer_says_beside_its_numbers_what_they_depend_on(routed: tuple[float, Run, dict[str, Any]]):
    times, run, _ = routed
    assert run.answer["imbalance"] == times
    text = dry_run_text(read(DryRun, {key: value for key, value in run.answer.items() if key != "zeroplan"}, where="answer"))
    said = "every expert is chosen as often" if times == 1 else "receive 1.5 times the even share"
    first, _, third = text.replace("\n", " ").partition("Peak allocated:")
    assert said in first
    assert said in third.partition("On the card")[0]
    assert {"a choice among scores"} <= {one["read"] for one in run.answer["made_up"]}


def test_whole_numbers_on_the_gpu_are_exact_where_ranks_do_the_same(routed: tuple[float, Run, dict[str, Any]]):
    """Sums of 8 ranks, what all have; what comes of unknown numbers is made up, and listed. No other rank runs for it."""
    _, run, seen = routed
    assert seen["frames"] == [24, 28, 32]
    assert seen["distinct"] == [4, 24]
    assert (seen["total"], seen["everyone"]) == (24, [24] * 8)
    assert (seen["unknown"], seen["like"], run.answer["companions"]) == ([1, 1, 1], [0, 0], [])
    assert ("int64", "1") in {(one["read"], one["said"]) for one in run.answer["made_up"]}


def test_an_imbalance_below_one_is_refused(tmp_path: Path):
    (tmp_path / "script.py").write_text("")
    run = dry_run("--imbalance", "0.5", "--", "script.py", folder=tmp_path)
    assert (run.code, run.last_line) == (2, "zeroplan: --imbalance '0.5' is not a factor from 1 on; write 1.5")

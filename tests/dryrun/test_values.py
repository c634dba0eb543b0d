"""Values that scripts read in a dry run: integers that ranks exchange, choices of experts, and sizes that depend on them."""

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
    """Run the script with one expert on each of 8 ranks; return the imbalance, the run, and what the script saw."""
    folder = tmp_path_factory.mktemp("experts")
    script = str(SCRIPTS / "experts.py")
    run = dry_run("--imbalance", request.param, "--gpus", "8", "--", script, str(folder / "seen.json"), folder=folder)
    assert run.code == 0, run.errors
    return float(request.param), run, json.loads((folder / "seen.json").read_text())


def test_an_expert_receives_the_even_share_times_the_imbalance(routed: tuple[float, Run, dict[str, Any]]):
    """With two experts for each of 1,024 tokens, every rank sends 256 tokens to each of 8 experts."""
    times, run, seen = routed
    assert seen["sent"] == [256] * 8
    assert seen["mask"] == 256
    assert seen["received"] == 2048 * times
    forward = next(phase for phase in run.answer["steps"][-1]["phases"] if phase["phase"] == "forward")
    kept = 4 * 256 * (2 * 2048 + seen["received"] * (1 + 4 + 1))  # rows sent and returned, and the expert's own
    assert forward["peak_bytes"] == pytest.approx(run.answer["steps"][0]["held_bytes"] + kept, rel=0.2)


def test_the_answer_names_the_assumed_balance_of_experts(routed: tuple[float, Run, dict[str, Any]]):
    times, run, _ = routed
    assert run.answer["imbalance"] == times
    text = dry_run_text(read(DryRun, {key: value for key, value in run.answer.items() if key != "zeroplan"}, where="answer"))
    said = "every expert is chosen as often" if times == 1 else "receive 1.5 times the even share"
    first, _, third = text.replace("\n", " ").partition("Peak allocated:")
    assert said in first
    assert said in third.partition("On the card")[0]
    assert {"a choice among scores"} <= {one["read"] for one in run.answer["made_up"]}


def test_integers_on_the_gpu_are_exact_if_all_ranks_have_the_same(routed: tuple[float, Run, dict[str, Any]]):
    """Sums and gathers over 8 ranks are exact, without running another rank. Results of unknown numbers are assumed and listed."""
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

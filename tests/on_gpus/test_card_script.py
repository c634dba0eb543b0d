"""The script for a card at hand: order, time limit, worst exit code. Its Python is fake and only prints its arguments."""

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.dryrun.running import Run
from tests.dryrun.survey import Program
from tests.on_gpus import card_scripts
from zeroplan.verify.cases.matrix import read_matrix

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "benchmarks" / "card.sh"
PLAYED = """#!/bin/sh
echo "asked: $*"
case "$*" in
*--snapshot*) touch "$FOLDER/it.snapshot.pickle" ;;
*one-140gb*) exit 3 ;;
*calibrate*) exit 2 ;;
esac
"""
pytestmark = pytest.mark.skipif(any(shutil.which(name) is None for name in ("bash", "timeout")), reason="no bash or no timeout")


def called(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    played = folder / "python"
    played.write_text(PLAYED)
    played.chmod(0o755)
    said = {**os.environ, "PYTHON": str(played), "FOLDER": str(folder / "kept"), **environment}
    return subprocess.run([SCRIPT, "kept", *arguments], cwd=folder, env=said, capture_output=True, text=True, check=False)


def steps(done: "subprocess.CompletedProcess[str]") -> list[str]:
    return [line.split(" after ")[0] for line in done.stdout.splitlines() if line.startswith("== ")]


def test_all_parts_run_in_order_whatever_fails_and_the_worst_exit_code_is_returned(tmp_path: Path):
    done = called(tmp_path)
    assert steps(done) == [
        "== machine: exit 0", "== smoke: exit 0", "== operators: exit 0", "== snapshot: exit 0", "== diagnose: exit 0",
        "== scripts: exit 0", "== matrix: exit 3", "== tests: exit 0", "== complete: exit 0", "== figures: exit 2",
    ]  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "kept" / "log.txt").read_text() == done.stdout
    assert f"verify --matrix one-140gb --backend cuda --record-dir {tmp_path}/kept" in done.stdout


def test_a_second_call_takes_no_second_snapshot(tmp_path: Path):
    called(tmp_path)
    assert "== snapshot: exit 0" not in steps(called(tmp_path))


def test_the_script_ends_in_time_and_lists_the_parts_left_out(tmp_path: Path):
    done = called(tmp_path, "10")
    left_out = ("machine", "smoke", "operators", "snapshot", "scripts", "matrix", "tests", "complete", "figures")
    assert steps(done) == [f"== {name}: no time left" for name in left_out]
    assert done.returncode == 5


def test_a_card_of_80_gb_runs_its_own_matrix(tmp_path: Path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 81559\n")
    driver.chmod(0o755)
    done = called(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "verify --matrix one-80gb --backend cuda" in done.stdout


def test_without_a_gpu_the_script_can_be_tried_with_another_backend(tmp_path: Path):
    done = called(tmp_path, BACKEND="simulate", MATRIX="mine.toml")
    assert steps(done) == ["== machine: exit 0", "== smoke: exit 0", "== matrix: exit 0"]
    assert "--matrix mine.toml --backend simulate" in done.stdout


def test_the_smoke_matrix_has_a_small_job_of_each_engine_and_stage():
    path = Path(__file__).with_name("smoke.toml")
    jobs = [case.task.job for case in read_matrix(path, tensors="cuda")]
    assert {(job.recipe.engine, job.recipe.zero_stage) for job in jobs} == {
        ("fsdp2", 2), ("fsdp2", 3), ("ddp", 0), ("ddp", 1), ("fsdp1", 2), ("fsdp1", 3),
        *(("deepspeed", stage) for stage in range(4)),
    }  # fmt: skip
    assert all(job.model.num_hidden_layers <= 2 for job in jobs)
    assert tomllib.loads(path.read_text())["defaults"]["gpus"] == 2


def test_scripts_of_the_survey_run_on_the_card_and_kept_answers_name_no_path(tmp_path: Path, monkeypatch):
    seen = []

    def run(program: Program, _: Path, *, on_card: tuple[str, ...]) -> Run:
        seen.append((program.name, on_card[:2]))
        code = 3 if program.gpus == 8 else 0
        figures = dict.fromkeys(("gpu", "gpus", "rank", "environment", "allocator", "stood_in", "command", "lines"), "/home/me")
        return Run(code, json.dumps({"agrees": not code, "predicted": {**figures, "gpu": "h200"}}), "")

    monkeypatch.setattr(card_scripts, "run", run)
    monkeypatch.setattr(card_scripts, "lacking", lambda program: [] if program.name == card_scripts.NAMES[0] else ["deepspeed"])
    assert len(card_scripts.wanted()) == len(card_scripts.NAMES)
    assert card_scripts.main(tmp_path / "scripts") == 3
    assert card_scripts.main(tmp_path / "scripts") == 0, "it goes on where it was"
    assert seen == [(card_scripts.NAMES[0], ("--backend", "cuda"))]
    (path,) = (tmp_path / "scripts").iterdir()
    found = json.loads(path.read_text())
    assert (path.name, found["agrees"], found["command"]) == ("fsdp2-a-plain-loop.json", False, "fsdp2.py 4 512 512")
    assert set(found["predicted"]).isdisjoint(("command", "lines"))

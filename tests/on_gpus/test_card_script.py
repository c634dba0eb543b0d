"""The script for a card at hand, with an interpreter that only says what it is asked: order, time, the worst exit code."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from zeroplan.verify.cases.matrix import read_matrix

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "card.sh"
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


def test_all_there_is_is_run_in_order_whatever_fails_and_the_worst_is_told(tmp_path: Path):
    done = called(tmp_path)
    assert steps(done) == [
        "== machine: exit 0", "== smoke: exit 0", "== snapshot: exit 0", "== diagnose: exit 0", "== matrix: exit 3",
        "== tests: exit 0", "== complete: exit 0", "== figures: exit 2",
    ]  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "kept" / "log.txt").read_text() == done.stdout
    assert f"verify --matrix one-140gb --backend cuda --record-dir {tmp_path}/kept" in done.stdout


def test_called_again_it_takes_no_second_snapshot(tmp_path: Path):
    called(tmp_path)
    assert "== snapshot: exit 0" not in steps(called(tmp_path))


def test_it_ends_in_time_and_says_what_it_left_out(tmp_path: Path):
    done = called(tmp_path, "10")
    left_out = ("machine", "smoke", "snapshot", "matrix", "tests", "complete", "figures")
    assert steps(done) == [f"== {name}: no time left" for name in left_out]
    assert done.returncode == 5


def test_without_a_gpu_it_is_tried_on_other_tensors(tmp_path: Path):
    done = called(tmp_path, BACKEND="simulate", MATRIX="mine.toml")
    assert steps(done) == ["== machine: exit 0", "== smoke: exit 0", "== matrix: exit 0"]
    assert "--matrix mine.toml --backend simulate" in done.stdout


def test_the_smoke_is_every_engine_and_stage_small():
    path = Path(__file__).with_name("smoke.toml")
    jobs = [case.task.job for case in read_matrix(path, tensors="cuda")]
    assert {(job.recipe.engine, job.recipe.zero_stage) for job in jobs} == {
        ("fsdp2", 2), ("fsdp2", 3), ("ddp", 0), ("ddp", 1), *(("deepspeed", stage) for stage in range(4)),
    }  # fmt: skip
    assert all(job.model.num_hidden_layers <= 2 for job in jobs)
    assert tomllib.loads(path.read_text())["defaults"]["gpus"] == 2

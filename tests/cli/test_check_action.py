"""The GitHub action's last step runs ``zeroplan check``: it annotates the file, and fails if the job does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ACTION = Path(__file__).parents[2] / "docs/action/action.yml"


@pytest.mark.parametrize(("gpus", "code", "said"), [(8, 0, "::notice file=job.toml"), (1, 1, "::error file=job.toml")])
def test_the_last_step_annotates_the_file_and_sets_the_exit_code(tmp_path: Path, gpus: int, code: int, said: str):
    step = yaml.safe_load(ACTION.read_text())["runs"]["steps"][-1]
    (tmp_path / "job.toml").write_text('model = "llama-3.1-8b"\nseq_len = 4096\nrecompute = "full"\n')
    inputs = {"FILES": "job.tom*", "GPU": "h100-sxm-80gb", "ARGS": f"--gpus {gpus}"}
    assert step["env"].keys() == inputs.keys()
    (tmp_path / "zeroplan").write_text(f'#!/bin/sh\nexec {sys.executable} -m zeroplan "$@"\n')
    (tmp_path / "zeroplan").chmod(0o755)
    env = {**os.environ, **inputs, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ACTION.parents[2])}
    ran = subprocess.run(["bash", "-c", step["run"]], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    assert ran.stdout.startswith(said)

"""Dry runs of random scripts take their steps or end in one line; `python -m tests.dryrun.nightly` runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dryrun.nightly import fault
from tests.dryrun.random_scripts import random_script
from tests.dryrun.running import dry_run

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")


@pytest.mark.parametrize("seed", range(6))
def test_a_random_script_takes_its_steps_or_ends_in_one_line(tmp_path: Path, seed: int):
    script = random_script(seed)
    (tmp_path / "script.py").write_text(script.code)
    run = dry_run("--gpus", str(script.gpus), "--", "script.py", folder=tmp_path)
    assert not fault(run)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]

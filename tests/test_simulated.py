"""The fake GPU's process ends with the test process, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = "import os\nfrom tests.simulated import on_the_fake_gpu\nprint(on_the_fake_gpu(os.getpid), flush=True)\nos._exit(0)\n"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
def test_nothing_is_left_where_the_tests_are_ended():
    """Ends like a worker of xdist: without notifying the children."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=True, timeout=300)
    process = Path(f"/proc/{int(done.stdout)}")
    for _ in range(600):
        if not process.is_dir() or "Z" in process.joinpath("stat").read_text().split(")")[1][:3]:
            return
        time.sleep(0.1)
    pytest.fail(f"process {process.name} goes on")

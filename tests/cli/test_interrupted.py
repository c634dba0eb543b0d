"""Ctrl-C while a command still imports its modules ends it without a traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeroplan.current_folder import environment

SLOW = "import pathlib, time\npathlib.Path({!r}).touch()\ntime.sleep(60)\n"
PROGRAM = (sys.executable, "-c", "from zeroplan.__main__ import main; main()")


@pytest.mark.parametrize("command", [PROGRAM, (sys.executable, "-m", "zeroplan")], ids=["program", "module"])
def test_an_interrupted_import_prints_no_traceback(tmp_path: Path, command: tuple[str, ...]):
    begun = tmp_path / "begun"
    (tmp_path / "typer.py").write_text(SLOW.format(str(begun)))
    said = environment()
    said["PYTHONPATH"] = os.pathsep.join((str(tmp_path), said["PYTHONPATH"]))
    process = subprocess.Popen(
        [*command, "models"], env=said, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  as in test_verify_command
    )  # fmt: skip
    until = time.monotonic() + 300
    while not begun.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, "", "")

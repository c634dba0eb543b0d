"""Sends questions to a process with DeepSpeed (``tests/verify/training/deepspeed_runs.py``), which serves all tests of a worker.

Importing DeepSpeed takes as long as several runs. The process ends when its standard input closes, at the latest with the tests.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests import stale_lock

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCRIPT = Path(__file__).parent / "verify" / "training" / "deepspeed_runs.py"


def asked(questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answer to each question, in order; skips the test if DeepSpeed is absent."""
    pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    process, errors = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    told = []
    for question in questions:
        before = errors.seek(0, 2)
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or "{}")
        errors.seek(before)
        assert answer, errors.read()
        told.append(answer)
    return told


@cache
def _process() -> tuple[subprocess.Popen[str], IO[str]]:
    """The process, and its file of standard error."""
    folder = tempfile.TemporaryDirectory()
    errors = Path(folder.name, "errors.txt").open("w+", encoding="utf-8")  # noqa: SIM115  open as long as the process
    environment = stale_lock.environment(Path(folder.name))
    process = subprocess.Popen(
        [sys.executable, _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )
    atexit.register(_end, process, folder)
    return process, errors


def _end(process: subprocess.Popen[str], folder: tempfile.TemporaryDirectory[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    folder.cleanup()

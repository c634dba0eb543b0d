"""Runs `zeroplan dryrun` for tests, in a new process or a fork, and returns its exit code and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.combined import every_case
from tests.dryrun import forked

SCRIPTS = Path(__file__).parent / "scripts"


class Run(NamedTuple):
    """The exit code, standard output and standard error of a command."""

    code: int
    output: str
    errors: str

    @property
    def answer(self) -> dict[str, Any]:
        """The answer of a command with ``--json``; fails if the exit code is not 0."""
        assert self.code == 0, self.errors
        return json.loads(self.output)

    @property
    def last_line(self) -> str:
        """The last line of standard error, which names the error if there is no answer."""
        return self.errors.strip().splitlines()[-1]

    @property
    def peak_bytes(self) -> int:
        """The peak of the last step."""
        return max(phase["peak_bytes"] for phase in self.answer["steps"][-1]["phases"])


def forked_run(
    *arguments: str, folder: Path, environment: dict[str, str] | None = None, replaced: dict[str, str | None] | None = None
) -> Run:
    """Run `zeroplan dryrun` in a fork of a process with torch (:mod:`tests.dryrun.forked`)."""
    with tempfile.TemporaryDirectory() as beside:
        output, errors = Path(beside) / "output", Path(beside) / "errors"
        order = forked.Order(("dryrun", *arguments), str(folder), str(output), str(errors), environment or {}, replaced or {})
        return Run(forked.run(order), output.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8"))


def dry_run(
    *typed: str, folder: Path, flags: tuple[str, ...] = ("--json", "-q"), environment: dict[str, str] | None = None
) -> Run:
    """Run `zeroplan dryrun` with flags, then the command, in a folder.

    By day it runs in a fork of a process with torch, which is faster. It needs a new process if ``environment`` is set or with
    ``--eager``, because torch reads these settings when it is imported.
    """
    if environment is None and "--eager" not in flags and not every_case():
        return forked_run(*flags, *typed, folder=folder)
    command = [sys.executable, "-m", "zeroplan", "dryrun", *flags, *typed]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **(environment or {})}
    )
    return Run(done.returncode, done.stdout, done.stderr)

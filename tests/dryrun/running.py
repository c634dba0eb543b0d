"""A dry run as a user starts it: a process of its own, its answer and what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"


class Run(NamedTuple):
    """What came of it."""

    code: int
    output: str
    errors: str

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON of an answer."""
        assert self.code == 0, self.errors
        return json.loads(self.output)

    @property
    def last_line(self) -> str:
        """The line that says why there is no answer."""
        return self.errors.strip().splitlines()[-1]

    @property
    def peak_bytes(self) -> int:
        """The most alive in the last step."""
        return max(phase["peak_bytes"] for phase in self.answer["steps"][-1]["phases"])


def dry_run(
    *typed: str, folder: Path, flags: tuple[str, ...] = ("--json", "-q"), environment: dict[str, str] | None = None
) -> Run:
    """Run `zeroplan dryrun` with flags, then the command, in a folder."""
    command = [sys.executable, "-m", "zeroplan", "dryrun", *flags, *typed]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **(environment or {})}
    )
    return Run(done.returncode, done.stdout, done.stderr)

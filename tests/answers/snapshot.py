"""Writes the snapshot of zeroplan's answers and prints what has changed: ``python -m tests.answers.snapshot``.

The snapshot contains zeroplan's own output, not measurements. It shows when a change of the code changes a number. Whether the
numbers are right is tested in ``tests/measured`` and against the engines.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from tests.answers.figures import answered, moved
from tests.answers.jobs import kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.answers.figures import Figures

PATH = Path(__file__).with_name("snapshot.toml")


def answers() -> dict[str, Figures]:
    """Return the figures of every job of the snapshot as they are now, by the job's words."""
    return {one.words: answered([one.job]) for one in kept()}


def stored() -> dict[str, Figures]:
    """Return the figures in the snapshot file."""
    return tomllib.loads(PATH.read_text(encoding="utf-8"))


def differences(before: dict[str, Figures], now: dict[str, Figures]) -> Iterator[str]:
    """Yield a line with the largest differences of each job that changed."""
    for job in dict.fromkeys((*before, *now)):
        if job not in before:
            yield f"new: {job}"
        elif job not in now:
            yield f"gone: {job}"
        elif found := moved(before[job], now[job]):
            more = f"; {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            yield f"{job}: {'; '.join(map(str, found[:_SHOWN]))}{more}"


#: Differences that a line shows for one job.
_SHOWN = 3


def text(found: dict[str, Figures]) -> str:
    """Return the snapshot as TOML, with one line for each section of a job's figures."""
    return "\n".join(f"[{json.dumps(job)}]\n{_sections(figures)}" for job, figures in found.items())


def _sections(figures: Figures) -> str:
    return "".join(f"{_key(section)} = {{{_row(row)}}}\n" for section, row in figures.items())


def _row(row: dict[str, int]) -> str:
    return ", ".join(f"{_key(name)} = {figure:_}" for name, figure in row.items())


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else json.dumps(name)


def _write() -> None:
    now = answers()
    for line in differences(stored() if PATH.exists() else {}, now):
        sys.stdout.write(f"{line}\n")
    PATH.write_text(text(now), encoding="utf-8")


if __name__ == "__main__":
    _write()

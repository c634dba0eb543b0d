"""Runs of other people's programs, from their own settings: ``python -m tests.on_gpus.others`` estimates all of them again.

``others.jsonl`` begins with the sources, and the rows that zeroplan cannot express. Every other line is a run: what was measured,
the program's own file (``file``) or the flags that say the same (``request``), the answer before we compared the first with the
measurement (``first``), and today's (``predicted``). No setting was chosen by an answer.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from zeroplan import estimate
from zeroplan.resolve import Request, resolve
from zeroplan.units import GIB

KEPT = Path(__file__).with_name("others.jsonl")
#: Bytes in a unit of a source's figures, if that is not GiB.
_UNITS = {"litgpt's tables": 10**9}


class Others(NamedTuple):
    """What is kept: sources (name, where, counter), their runs, and the numbers of rows that zeroplan cannot express."""

    sources: list[list[str]]
    rows: list[dict[str, Any]]
    refused: list[tuple[int, str, int]]

    def refused_of(self, source: int) -> Counter[str]:
        """Return the numbers of rows of a source by the reason why zeroplan cannot express them."""
        return Counter({reason: count for of, reason, count in self.refused if of == source})


def kept() -> Others:
    """Return the kept runs."""
    first, *lines = map(json.loads, KEPT.read_text(encoding="utf-8").splitlines())
    return Others(first["sources"], lines, first["refused"])


def predicted(row: dict[str, Any], source: str) -> float:
    """Return the estimated peak of a run, in its source's unit, as a user gets it from the file."""
    with tempfile.TemporaryDirectory() as folder:
        said = dict(row["request"])
        if "file" in row:
            path = Path(folder) / "mine.json"
            path.write_text(json.dumps(row["file"]), encoding="utf-8")
            said["from_file"] = str(path)
        answer = estimate(resolve(Request(**said)).job)
    return round(int(answer.peak_bytes) / _UNITS.get(source, GIB), 2)


def write() -> None:
    """Estimate every run again and save the answers."""
    found = kept()
    for row in found.rows:
        row["predicted"] = predicted(row, found.sources[row["source"]][0])
    first = json.dumps({"sources": found.sources, "refused": found.refused}, ensure_ascii=False)
    KEPT.write_text("\n".join([first, *(json.dumps(row, ensure_ascii=False) for row in found.rows)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()

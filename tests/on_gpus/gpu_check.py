"""Checks that records from GPUs are complete and contain nothing private: ``python -m tests.on_gpus.gpu_check FILE...``

A record is refused with all reasons, one per line. The file is not changed. Needs no torch.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
import sys
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from tests.on_gpus.gpu_records import results
from zeroplan.errors import ZeroplanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zeroplan.measurement import Measurement
    from zeroplan.verify.cases.results import Result

_PRIVATE = {
    "a path": re.compile(r"(?:^|[\s'\"(=:])(?:/(?:home|Users|root|mnt|data|tmp|var|opt|scratch|work|lustre|gpfs|nfs|srv|private|"
                         r"workspace)\b[^\s'\"]*|[A-Za-z]:\\\S+|file://\S+)"),
    "an address": re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]+|(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"),
    "a host": re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|localdomain|internal|intranet|lan|corp|cluster|amazonaws\.com)\b"),
}  # fmt: skip
_NEEDED = ("zeroplan", "torch", "transformers")
#: Names that many machines and users share, and that records contain as words.
_COMMON = ("localhost", "root", "user", "ubuntu", "admin", "runner", "jupyter", "default")
_SHORTEST_NAME = 4


def problems(path: Path) -> list[str]:
    """Return the reasons to refuse a file; empty if there are none."""
    try:
        found = results(path)
    except ZeroplanError as error:
        return [str(error)]
    if not any(one.record is not None for one in found):
        return [f"{path.name} holds no case that was measured"]
    return [*_private(path), *(problem for one in found for problem in _of_result(one))]


def _of_result(one: Result) -> Iterator[str]:
    task = one.task
    if task.workload or task.snapshots or task.store or task.folder:
        yield f"{one.name}: it names a workload, a folder or a file of the machine it ran on; run it without"
    if one.outcome == "out of memory" and not (one.card and one.card_bytes):
        yield f"{one.name}: it ran out of memory on a card that is not named"
    if one.record is not None:
        yield from (f"{one.name}: {missing}" for missing in _of_record(one.record))


def _of_record(record: Measurement) -> Iterator[str]:
    if record.backend != "cuda" or record.tensors != "cuda":
        yield f"it is of backend {record.backend}, and only what ran on a GPU is kept here"
        return
    environment, card = record.environment, record.card
    needed = (*_NEEDED, "deepspeed") if record.job.recipe.engine == "deepspeed" else _NEEDED
    if absent := [name for name in needed if not environment.packages.get(name)]:
        yield f"the environment lacks the version of {', '.join(absent)}"
    if not environment.python or not environment.platform:
        yield "the environment lacks Python or the platform"
    if not _is_day(environment.date):
        yield f"the environment's date {environment.date!r} is no day; a record of this version of zeroplan has one"
    if card is None or not card.name or not card.total_bytes or not card.driver or not card.cuda:
        yield "the card lacks its name, memory, driver or CUDA"
    if any(phase.blocks is None for phase in record.steady.phases) or any(one.modelled for one in record.allocator):
        yield "the last step was not counted by the GPU's allocator"
    if record.workload:
        yield "it is of a workload of somebody's own, which nobody else can run"


def _is_day(text: str) -> bool:
    with suppress(ValueError):
        return date.fromisoformat(text).year >= 2020
    return False


def _private(path: Path) -> Iterator[str]:
    """Yield a problem for each text in the file that identifies a machine or a person."""
    for text in sorted({text for line in path.read_text(encoding="utf-8").splitlines() for text in _texts(line)}):
        for what, pattern in (*_PRIVATE.items(), *_names_of_this_machine()):
            if found := pattern.search(text):
                yield f"it names {what}: {found[0].strip()!r}; put another word in its place"


def _texts(line: str) -> Iterator[str]:
    """Yield all texts in a line of JSON, or the line itself if it is only a part of a JSON text."""
    try:
        pending: list[object] = [json.loads(line)]
    except ValueError:
        yield line
        return
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            pending.extend((*one, *one.values()))
        elif isinstance(one, list):
            pending.extend(one)


def _names_of_this_machine() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield patterns for this machine's host and user, which the record names if it is from here."""
    for what, name in (("this host", socket.gethostname()), ("its user", _user())):
        if len(name) >= _SHORTEST_NAME and name.lower() not in _COMMON:
            yield what, re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.IGNORECASE)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have no entry for its user
        return ""


def main(paths: list[str]) -> int:
    """Check files and print for each whether it is complete. Return 2 if one is refused or none is given."""
    refused = 0
    for path in map(Path, paths):
        found = problems(path)
        refused += bool(found)
        print(f"{path}: {'refused' if found else 'complete'}", *(f"  {problem}" for problem in found), sep="\n")  # noqa: T201
    return 2 if refused or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Stores the results of dry runs in a file, one JSON object per line, and runs some or all of them again."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Named(Protocol):
    """Something to run that has a name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, or none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def run_again(
    path: Path,
    listed: Sequence[N],
    wanted: Sequence[str],
    lacking: Callable[[N], list[str]],
    row: Callable[[N, Path], dict[str, Any]],
) -> None:
    """Run those whose names contain one of the wanted words, or all if there are none, and update their rows in the file.

    ``lacking`` returns the missing packages of one; ``row`` runs it in an empty folder and returns its row.
    """
    found = {one["name"]: one for one in rows(path)}
    for one in listed:
        if wanted and not any(word in one.name for word in wanted):
            continue
        if missing := lacking(one):
            print(f"{one.name}: left out, {', '.join(missing)} not installed")  # noqa: T201
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[one.name] = row(one, Path(folder))
        print(found[one.name])  # noqa: T201
    kept = [found[one.name] for one in listed if one.name in found]
    path.write_text("".join(json.dumps(one) + "\n" for one in kept), encoding="utf-8")

"""What came of many dry runs: a file with a JSON object on every line, by name; some of them are run again at a time."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Named(Protocol):
    """Something to run: its name, and what it needs."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def run_again(
    path: Path,
    listed: Sequence[N],
    wanted: Sequence[str],
    lacking: Callable[[N], list[str]],
    row: Callable[[N, Path], dict[str, Any]],
) -> None:
    """Run those whose names have one of the wanted words, or all, and write their rows beside the others'.

    ``lacking`` returns the packages that are missing for one, ``row`` runs it in an empty folder.
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

"""Files that are there complete or not at all: written under another name beside their own, which they are given when they are."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """The other name, of a file to be moved to ``path``; what has not been moved by then is gone afterwards."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield beside
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text over what is there. Raises OSError where it cannot be written."""
    with unfinished(path) as beside:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)

"""Gives a process one temporary folder for all its files, because making a folder for each case takes longer than the case."""

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


@cache
def folder(name: str = "") -> Path:
    """Return the temporary folder, or a folder of this name in it; it is removed when the process ends."""
    if name:
        inside = folder() / name
        inside.mkdir()
        return inside
    made = TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)

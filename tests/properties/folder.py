"""A folder of this process, for files that are written over and over: to make one for each takes longer than to answer."""

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


@cache
def folder(name: str = "") -> Path:
    """The folder, or one in it; gone when the process ends."""
    if name:
        inside = folder() / name
        inside.mkdir()
        return inside
    made = TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)

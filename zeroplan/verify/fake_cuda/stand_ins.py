"""Lists the unknown values that a script read: the assumed value, and the line of code that read it."""

import sys
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PACKAGE = str(Path(__file__).parents[2])
_OURS_OR_TORCHS = {"torch", "zeroplan", "contextlib", "functools", "runpy", "importlib"}


class StandIn(NamedTuple):
    """One assumed value: the dtype or operator of the read, the value, and the line of code that read it."""

    read: str
    said: str
    line: str


class StandIns:
    """Every assumed value so far, and how often it was read."""

    def __init__(self) -> None:
        self.counts: Counter[StandIn] = Counter()
        self.sizes_of_choices = False
        """Whether sizes may depend on assumed choices among scores."""

    def note(self, read: str, said: str) -> None:
        """Note a read of an unknown value."""
        self.counts[StandIn(read, said, line_of(frame_to_name(sys._getframe(1))))] += 1

    def note_choice(self, assumed: int, *, sized: bool) -> None:
        """Note a read of a value that follows from an assumed choice among scores; ``sized`` if it may decide sizes."""
        if assumed:
            self.note("a choice among scores", "every candidate is chosen equally often")
            self.sizes_of_choices |= sized


def frame_to_name(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, else the innermost of a library."""
    library: FrameType | None = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "user":
            return frame
        ours = frame.f_code.co_filename.startswith(_PACKAGE)
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if kind == "library" and library is None and not ours and package not in _OURS_OR_TORCHS:
            library = frame
        frame = frame.f_back
    return library


def line_of(frame: FrameType | None) -> str:
    """A frame in readable form: ``train.py:31``; in a library's module ``trl.trainer.sft_trainer:412``."""
    if frame is None:
        return ""
    name = str(frame.f_globals.get("__name__", ""))
    if _kind(frame.f_code.co_filename) == "user" or name == "__main__":
        name = shown_file(frame.f_code.co_filename)
    return f"{name}:{frame.f_lineno}"


def line_at(filename: str, number: int) -> str:
    """A line of a file in readable form."""
    return f"{shown_file(filename)}:{number}"


def user_line(filename: str, number: int) -> str:
    """A line of a user's file in readable form; empty for a library's file."""
    return line_at(filename, number) if _kind(filename) == "user" else ""


def count_as_library(folder: str) -> None:
    """Treat files in a folder as a library's, such as code that a compiler wrote."""
    _GENERATED.append(folder.rstrip("/") + "/")
    _kind.cache_clear()


def count_as_user(folder: str) -> None:
    """Treat files in a folder as the user's, such as an installed package that is run with ``-m``."""
    _USERS.append(folder.rstrip("/") + "/")
    _kind.cache_clear()
    shown_file.cache_clear()


_USERS: list[str] = []
_GENERATED: list[str] = []
_LIBRARIES = tuple(
    {path + "/" for path in (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), _PACKAGE)}
)


@cache
def _kind(filename: str) -> str:
    if any(filename.startswith(folder) for folder in _USERS):
        return "user"
    if (
        filename.startswith(("<", *_GENERATED))
        or filename.startswith(_LIBRARIES)
        or "/site-packages/" in filename
        or "/dist-packages/" in filename
    ):
        return "library"
    return "user"


@cache
def shown_file(filename: str) -> str:
    """The user's file in readable form: its path from the current folder or its package, else its name."""
    for folder in (*(Path(one).parent for one in _USERS), Path.cwd()):
        if Path(filename).is_relative_to(folder):
            return str(Path(filename).relative_to(folder))
    return Path(filename).name

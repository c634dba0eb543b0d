"""What a script read that no tensor has, what it was given instead, and where in its code that was."""

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
    """One value that was made up: what was read, what it was said to be, and the line that read it."""

    read: str
    said: str
    line: str


class StandIns:
    """Every value that was made up so far, and how often."""

    def __init__(self) -> None:
        self.counts: Counter[StandIn] = Counter()
        self.sizes_of_choices = False
        """Whether sizes may depend on choices among scores, which were assumed."""

    def note(self, read: str, said: str) -> None:
        """Note that somebody reads what is not there."""
        self.counts[StandIn(read, said, line_of(whose_line(sys._getframe(1))))] += 1

    def note_choice(self, assumed: int, *, sized: bool) -> None:
        """Note that somebody reads what follows from an assumed choice among scores; ``sized`` says that it may decide sizes."""
        if assumed:
            self.note("a choice among scores", "every candidate is chosen as often as any other")
            self.sizes_of_choices |= sized


def whose_line(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code; of a library's, where none of the user's is on the stack."""
    library: FrameType | None = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "user":
            return frame
        ours = frame.f_code.co_filename.startswith(_PACKAGE)
        if kind == "library" and library is None and not ours and _package(frame) not in _OURS_OR_TORCHS:
            library = frame
        frame = frame.f_back
    return library


def line_of(frame: FrameType | None) -> str:
    """A frame as a person writes it: ``train.py:31``; of a library's module ``trl.trainer.sft_trainer:412``."""
    if frame is None:
        return ""
    name = str(frame.f_globals.get("__name__", ""))
    if _kind(frame.f_code.co_filename) == "user" or name == "__main__":
        name = shown_file(frame.f_code.co_filename)
    return f"{name}:{frame.f_lineno}"


def line_at(filename: str, number: int) -> str:
    """A line of a file as a person writes it."""
    return f"{shown_file(filename)}:{number}"


def user_line(filename: str, number: int) -> str:
    """The same, where the file is the user's own; empty where it is a library's."""
    return line_at(filename, number) if _kind(filename) == "user" else ""


def count_as_library(folder: str) -> None:
    """Take what lies in a folder for a library's: programs that a compiler has written."""
    _GENERATED.append(folder.rstrip("/") + "/")
    _kind.cache_clear()


def count_as_user(folder: str) -> None:
    """Take what lies in a folder for the user's own code: a package that is run with ``-m``, which may be installed."""
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
    """A file of the user's own as a person writes it: its path from here or within its package, else its name."""
    for folder in (*(Path(one).parent for one in _USERS), Path.cwd()):
        if Path(filename).is_relative_to(folder):
            return str(Path(filename).relative_to(folder))
    return Path(filename).name


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

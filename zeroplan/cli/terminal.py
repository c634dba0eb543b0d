"""How wide is the reader's terminal? An answer has a hundred columns; on a narrower one its lines are folded between words.

A file and a pipe get every line as it is, and so does what is there to be copied: a command, flags, a formula.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator

import typer

from zeroplan.report.words import WIDTH

#: A gap between columns: the last column that has room for words is folded under itself.
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
_ROOM = 18
_TO_COPY = ("zeroplan ", "--", "accelerate ", "torchrun ", "deepspeed ", "= ", "source: ")


def show(text: str, columns: int = WIDTH) -> None:
    """Print an answer written for this many columns, folded where it goes to a terminal that is narrower."""
    typer.echo(fitted(text, shutil.get_terminal_size().columns, columns) if sys.stdout.isatty() else text)


def fitted(text: str, width: int, columns: int = WIDTH) -> str:
    """The text, written for ``columns``, folded to a width below that; a sentence of several lines is folded as one.

    >>> print(fitted("  gradients   1.00  an example of a row with words", 40))
      gradients   1.00  an example of a row
                        with words
    """
    return text if width >= columns else "\n".join(_folded(text.split("\n"), width, columns))


def _folded(lines: list[str], width: int, columns: int) -> Iterator[str]:
    sentence = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        sentence = f"{sentence} {line.lstrip()}" if sentence else line
        if not _goes_on(line, following, columns):
            yield from _wrapped(sentence, width)
            sentence = ""


def _goes_on(line: str, following: str, columns: int) -> bool:
    """Whether the following line is the rest of a sentence: its first word had no room any more."""
    prose = following.strip() and not _GAP.search(line) and not _GAP.search(following)
    full = prose and len(line) + 1 + len(following.split(maxsplit=1)[0]) > columns
    return bool(full) and _indent(following) == _hanging(line) and not line.lstrip().startswith(_TO_COPY)


def _wrapped(line: str, width: int) -> list[str]:
    columns = [gap.end() for gap in _GAP.finditer(line)]
    if len(line) <= width or (line.lstrip().startswith(_TO_COPY) and not columns):
        return [line]
    under = max((end for end in columns if end <= width - _ROOM), default=_hanging(line))
    return textwrap.wrap(line, width, subsequent_indent=" " * under, break_long_words=False, break_on_hyphens=False)


def _hanging(line: str) -> int:
    """Where a sentence goes on: under its beginning, behind the dash of a list."""
    return _indent(line) + 2 * line.lstrip().startswith("- ")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())

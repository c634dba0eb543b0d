"""Wraps an answer's lines, which have up to 100 columns, for a narrower terminal.

Files and pipes get the lines unchanged. Commands, flags and formulas are never wrapped, since users copy them.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator

import typer

from zeroplan.report.words import WIDTH

#: A gap between columns. Text wraps under the last column that leaves enough room.
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
_ROOM = 18
_TO_COPY = ("zeroplan ", "--", "accelerate ", "torchrun ", "deepspeed ", "= ", "source: ")


def show(text: str, columns: int = WIDTH) -> None:
    """Print an answer that was written for ``columns``; on a narrower terminal its lines are wrapped."""
    typer.echo(fitted(text, shutil.get_terminal_size().columns, columns) if sys.stdout.isatty() else text)


def fitted(text: str, width: int, columns: int = WIDTH) -> str:
    """Return the text, which was written for ``columns``, wrapped to ``width``. A sentence of several lines is wrapped as one.

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
    """Whether the following line continues the sentence: its first word had no room on this line."""
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
    """The indent of a sentence's next line: that of its first word, after the dash of a list."""
    return _indent(line) + 2 * line.lstrip().startswith("- ")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())

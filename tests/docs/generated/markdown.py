"""Writes tables, lists and numbers as Markdown."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A colon at the end of a column's name aligns the column to the right, and is not printed."""
    rules = ["---:" if name.endswith(":") else "---" for name in head]
    named = [name.removesuffix(":") for name in head]
    return (
        "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (named, rules, *rows)) + "\n"
    )


def code(text: str) -> str:
    """Return a text as code, or an empty string. A text with ``|`` needs HTML, since ``|`` divides the cells of a table."""
    if "|" in text:
        return f"<code>{escape(text).replace('|', '&#124;')}</code>"
    return f"`{text}`" if text else ""


def gigabytes(n_bytes: int) -> str:
    """Return a size in GB (10^9 bytes), without the unit."""
    return "<0.01" if 0 < n_bytes < 5_000_000 else f"{n_bytes / 1e9:,.2f}"


def once(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """Return the rows, with the first cell empty if it equals the one above."""
    before, kept = None, []
    for first, *rest in rows:
        kept.append(("" if first == before else first, *rest))
        before = first
    return kept


def prose(text: str) -> str:
    """Return a text with ``*`` and ``<`` escaped, except between backquotes."""
    parts = text.split("`")
    return "`".join(part if at % 2 else part.replace("*", r"\*").replace("<", "&lt;") for at, part in enumerate(parts))


def one_line(text: str | None) -> str:
    """Return a docstring's first paragraph on one line, with single instead of double backquotes."""
    return prose(" ".join((text or "").partition("\n\n")[0].split()).replace("``", "`"))


class Sources:
    """Numbers the sources of a table's lines."""

    def __init__(self) -> None:
        """Start without sources."""
        self._numbers: dict[str, int] = {}

    def number(self, source: str) -> str:
        """Return the number of a source, which is a new one if the source is new; return an empty string for no source."""
        return str(self._numbers.setdefault(source, len(self._numbers) + 1)) if source else ""

    def listed(self) -> str:
        """Return the numbered list of sources."""
        return "\n".join(["Sources:", "", *(f"{number}. {code(source)}" for source, number in self._numbers.items()), ""])

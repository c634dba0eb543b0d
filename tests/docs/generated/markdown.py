"""Tables, lists and numbers as the pages write them."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns whose name ends in a colon are set to the right, and lose it."""
    rules = ["---:" if name.endswith(":") else "---" for name in head]
    named = [name.removesuffix(":") for name in head]
    return (
        "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (named, rules, *rows)) + "\n"
    )


def code(text: str) -> str:
    """A text in the letters of a machine; nothing stays nothing. A table's own sign has to be said in another way."""
    if "|" in text:
        return f"<code>{escape(text).replace('|', '&#124;')}</code>"
    return f"`{text}`" if text else ""


def gigabytes(n_bytes: int) -> str:
    """GB (10^9 bytes)."""
    return "<0.01" if 0 < n_bytes < 5_000_000 else f"{n_bytes / 1e9:,.2f}"


def once(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """Rows in which the first cell stands only where it changes."""
    before, kept = None, []
    for first, *rest in rows:
        kept.append(("" if first == before else first, *rest))
        before = first
    return kept


def prose(text: str) -> str:
    """A text from elsewhere, whose stars and brackets are no markup; what stands between backquotes stays."""
    parts = text.split("`")
    return "`".join(part if at % 2 else part.replace("*", r"\*").replace("<", "&lt;") for at, part in enumerate(parts))


def one_line(text: str | None) -> str:
    """A docstring's first paragraph on one line, its double backquotes made single."""
    return prose(" ".join((text or "").partition("\n\n")[0].split()).replace("``", "`"))


class Sources:
    """The places that lines of a table come from, by number."""

    def __init__(self) -> None:
        """Begin with none."""
        self._numbers: dict[str, int] = {}

    def number(self, source: str) -> str:
        """A source's number, a new one where it has none; nothing for no source."""
        return str(self._numbers.setdefault(source, len(self._numbers) + 1)) if source else ""

    def listed(self) -> str:
        """Every source behind its number."""
        return "\n".join(["Sources:", "", *(f"{number}. {code(source)}" for source, number in self._numbers.items()), ""])

"""What the README shows of the validation page, which is itself held against the records."""

from __future__ import annotations

from pathlib import Path

from tests.docs.generated.markdown import table

_PAGE = Path(__file__).parents[3] / "docs" / "validation.md"


def validation() -> str:
    """The errors by engine: jobs, median, nineteen in twenty, lowest and highest."""
    return table([head + ":" * (at > 0) for at, head in enumerate(_rows()[0])], _rows()[2:])


def _rows() -> list[list[str]]:
    after = _PAGE.read_text(encoding="utf-8").partition("## By engine\n\n")[2]
    lines = after.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")][:_COLUMNS] for line in lines]


_COLUMNS = 6

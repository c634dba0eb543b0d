"""What pages show of the records: the errors of the validation page, and how the band of what is reserved compares."""

from __future__ import annotations

from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING

from tests.docs.generated.markdown import table
from tests.measured import stored
from tests.measured.errors import engine_of
from zeroplan import estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAGE = Path(__file__).parents[3] / "docs" / "validation.md"


def validation() -> str:
    """The errors by engine: jobs, median, nineteen in twenty, lowest and highest."""
    return table([head + ":" * (at > 0) for at, head in enumerate(_rows()[0])], _rows()[2:])


def _rows() -> list[list[str]]:
    after = _PAGE.read_text(encoding="utf-8").partition("## By engine\n\n")[2]
    lines = after.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")][:_COLUMNS] for line in lines]


_COLUMNS = 6


def reserved() -> str:
    """The expected figure of what is reserved over what the model of the allocator shows, by engine and setting."""
    shares: dict[str, dict[str, list[float]]] = {}
    for record in stored.records():
        expected = estimate(record.job).reserved.expected_bytes
        of = shares.setdefault(engine_of(record.job), {"default": [], "expandable_segments": []})
        for shown in record.allocator:
            of[shown.settings].append(expected / shown.reserved_bytes)
    rows = [(engine, *(_median_and_eight_of_ten(some) for some in of.values())) for engine, of in sorted(shares.items())]
    return table(("engine", "default settings", "expandable segments"), rows)


def _median_and_eight_of_ten(shares: Sequence[float]) -> str:
    tenths = quantiles(shares, n=10)
    return f"{tenths[4]:.0%} ({100 * tenths[0]:.0f} to {100 * tenths[8]:.0f})"

"""Draws the figure of the validation page: zeroplan's own plot of the records of the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.measured.errors import EVERY, MOST, Held
from zeroplan.report.palette import THEMES
from zeroplan.report.series.validation import validation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def draw(all_held: Sequence[Held], path: Path) -> None:
    """Draw all jobs into the file."""
    from zeroplan.report.plots.frame import blank, style, written
    from zeroplan.report.plots.validation import draw_validation

    with style(THEMES["light"]):
        figure = blank()
        draw_validation(figure, validation(all_held, limits=(MOST, EVERY)), THEMES["light"])
        written(figure, path, force=True)

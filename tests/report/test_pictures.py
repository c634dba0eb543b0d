"""Compares every kind of picture with its reference in ``pictures/``, which people have looked at.

If a picture changes on purpose, draw its reference again and look at it: ``python -m pytest tests/report/test_pictures.py
--mpl-generate-path tests/report/pictures``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from tests.report import pictured
from zeroplan.report.palette import THEMES

mpl = pytest.importorskip("matplotlib")
pytest.importorskip("pytest_mpl")
from zeroplan.report.plots import frame  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN_WITH = (3, 11)
"""Of another version letters are shaped otherwise, and nothing can be said about the rest."""
TOLERANCE = 0.25
"""Of 255, root mean square over the picture: what another processor's rounding may do. A tick's label is more."""
PICTURES = (("stages", "light"), ("phases", "light"), ("stacks", "light"), ("timeline", "light"), ("scaling", "light"),
            ("scaling", "dark"), ("heat", "light"), ("pareto", "light"), ("validation", "light"))  # fmt: skip


def pictures() -> list[object]:
    return [
        pytest.param(
            kind, theme, id=f"{kind}-{theme}",
            marks=pytest.mark.mpl_image_compare(
                baseline_dir="pictures", filename=f"{kind}-{theme}.png", style=frame.settings(THEMES[theme]), tolerance=TOLERANCE,
                savefig_kwargs={"dpi": 64},
            ),
        )
        for kind, theme in PICTURES
    ]  # fmt: skip


@pytest.mark.skipif(mpl.__version_info__[:2] != DRAWN_WITH, reason=f"the references were drawn with matplotlib {DRAWN_WITH}")
@pytest.mark.parametrize(("kind", "theme"), pictures())
def test_a_picture_is_its_reference(kind: str, theme: str) -> Figure:
    figure = frame.blank()
    getattr(import_module(f"zeroplan.report.plots.{kind}"), f"draw_{kind}")(figure, getattr(pictured, kind)(), THEMES[theme])
    return figure

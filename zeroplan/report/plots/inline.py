"""Draws pictures in memory, for notebook cells and for the browser's page."""

import io
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from zeroplan.report.palette import THEMES, Theme
from zeroplan.report.plots.frame import blank, saved, stamped, style
from zeroplan.report.plots.heat import draw_heat
from zeroplan.report.plots.pareto import draw_pareto
from zeroplan.report.plots.run import draw_run
from zeroplan.report.plots.scaling import draw_scaling
from zeroplan.report.plots.stacks import draw_stacks
from zeroplan.report.plots.stages import draw_stages
from zeroplan.report.plots.timeline import draw_timeline
from zeroplan.report.series.heat import HeatSeries
from zeroplan.report.series.pareto import ParetoSeries
from zeroplan.report.series.run import RunSeries
from zeroplan.report.series.scaling import ScalingSeries
from zeroplan.report.series.stacks import StacksSeries
from zeroplan.report.series.stages import StagesSeries
from zeroplan.report.series.timeline import TimelineSeries

Series = HeatSeries | ParetoSeries | RunSeries | ScalingSeries | StacksSeries | StagesSeries | TimelineSeries
_DRAW: dict[type[Series], Callable[..., None]] = {
    HeatSeries: draw_heat, ParetoSeries: draw_pareto, RunSeries: draw_run, ScalingSeries: draw_scaling,
    StacksSeries: draw_stacks,
    StagesSeries: draw_stages, TimelineSeries: draw_timeline,
}  # fmt: skip
#: Resolution of a notebook's screen, on which a figure keeps its size in inches.
_SCREEN_DOTS_PER_INCH = 96


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """A PNG picture and its width on screen. [pixels]"""

    png: bytes
    width: int

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The PNG and its width, as Jupyter requests them."""
        return self.png, {"width": self.width}


def picture(series: Series, *, theme: str = "light") -> Picture:
    """Draw a series of :mod:`zeroplan.report.series`.

    >>> from zeroplan import job
    >>> from zeroplan.report.series.stages import stages
    >>> picture(stages(job(model="gpt2", gpus=8, stage=3, seq_len=128))).width
    768
    """
    look, draw = THEMES[theme], _DRAW[type(series)]
    return drawn(lambda figure: draw(figure, series, look), theme=look)


def svg(series: Series) -> bytes:
    """Return a series as SVG, like ``zeroplan plot -o FILE.svg``."""
    held, look, draw = io.BytesIO(), THEMES["light"], _DRAW[type(series)]
    with style(look):
        figure = blank()
        draw(figure, series, look)
        stamped(figure, look)
        saved(figure, held, "svg")
    return held.getvalue()


def drawn(draw: Callable[[Figure], None], *, theme: Theme = THEMES["light"]) -> Picture:
    """Call ``draw`` with an empty figure in zeroplan's style, and return the picture."""
    held = io.BytesIO()
    with style(theme):
        figure = blank()
        draw(figure)
        saved(figure, held, "png")
    return Picture(held.getvalue(), round(figure.get_figwidth() * _SCREEN_DOTS_PER_INCH))

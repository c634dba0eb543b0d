"""A picture in memory: what a notebook's cell returns and Jupyter shows, and what the page hands out."""

import io
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from zeroplan.report.palette import THEMES, Theme
from zeroplan.report.plots.frame import blank, saved, style
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
#: Of a notebook's screen, on which a figure keeps the size that it has on paper.
_SCREEN_DOTS_PER_INCH = 96


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """A picture as PNG, and the width at which it is shown. [pixels]"""

    png: bytes
    width: int

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """What Jupyter asks a value for."""
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
    """Draw a series as SVG, as ``zeroplan plot -o FILE.svg`` writes it."""
    held, look, draw = io.BytesIO(), THEMES["light"], _DRAW[type(series)]
    with style(look):
        figure = blank()
        draw(figure, series, look)
        saved(figure, held, "svg")
    return held.getvalue()


def drawn(draw: Callable[[Figure], None], *, theme: Theme = THEMES["light"]) -> Picture:
    """Hand a function an empty figure in the product's style, and show what it draws."""
    held = io.BytesIO()
    with style(theme):
        figure = blank()
        draw(figure)
        saved(figure, held, "png")
    return Picture(held.getvalue(), round(figure.get_figwidth() * _SCREEN_DOTS_PER_INCH))

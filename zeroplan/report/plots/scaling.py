"""Draws memory against the number of GPUs, a line per stage on logarithmic axes; a ring marks the first number that fits."""

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from zeroplan.report.palette import STAGES, Theme
from zeroplan.report.plots.frame import PLAIN, UNIT, LegendEntry, framed, legend
from zeroplan.report.series.scaling import ScalingLine, ScalingSeries
from zeroplan.report.words import plural
from zeroplan.units import GIB

_LONG_NUMBERS = 2**15
_A_DECADE = 12
_FEW, _MANY = (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
"""Labelled multiples of powers of ten, for more than a decade and for less."""


def draw_scaling(figure: Figure, series: ScalingSeries, theme: Theme) -> None:
    """Draw all stages into the figure."""
    framed(figure, series.caption, width=8.0, height=4.4)
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="GPUs, N (each line doubles)", ylabel=f"{UNIT}, logarithmic")
    drawn = [line for line in series.lines if line.points]
    for line in drawn:
        look = STAGES[line.stage]
        axes.plot(*_places(line), color=look.colour, marker=look.mark, linestyle=look.dashes, markersize=4, linewidth=1.5)
    _scales(axes, series, theme)
    for line in drawn:
        _begins_to_fit(axes, line, theme)
    own = series.own
    axes.plot(
        [own.gpus], [own.needed_bytes / GIB], marker="*", markersize=13, color=theme.ink, markeredgecolor=theme.paper, zorder=6
    )
    legend(axes, list(_entries(axes, series, theme)))


def _places(line: ScalingLine) -> tuple[list[int], list[float]]:
    return [point.gpus for point in line.points], [point.needed_bytes / GIB for point in line.points]


def _scales(axes: Axes, series: ScalingSeries, theme: Theme) -> None:
    """Label powers of two below and round numbers at the side; leave room above the highest line."""
    every = [gib for line in series.lines for gib in _places(line)[1]]
    limits = [] if series.capacity_bytes is None else [series.capacity_bytes / GIB]
    axes.set_ylim(min([*every, *limits]) / 1.6, max([*every, *limits]) * 1.35)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=16 if axes.get_xlim()[1] < _LONG_NUMBERS else 8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=_FEW if high > _A_DECADE * low else _MANY))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color=theme.faint, alpha=0.25, linewidth=0.6)


def _begins_to_fit(axes: Axes, line: ScalingLine, theme: Theme) -> None:
    at = line.fits_from
    if at is None or at.gpus == line.points[0].gpus:  # it fits on every number of GPUs
        return
    look = STAGES[line.stage]
    axes.plot([at.gpus], [at.needed_bytes / GIB], "o", markersize=10, markerfacecolor="none", markeredgecolor=look.colour,
              markeredgewidth=1.6, zorder=5)  # fmt: skip
    axes.annotate(
        f"{at.gpus:,}", (at.gpus, at.needed_bytes / GIB), (0, -9), textcoords="offset points", fontsize=PLAIN, fontweight="bold",
        ha="center", va="top", color=theme.ink, zorder=7, path_effects=[withStroke(linewidth=2.5, foreground=theme.paper)],
    )  # fmt: skip


def _entries(axes: Axes, series: ScalingSeries, theme: Theme) -> Iterator[LegendEntry]:
    if series.capacity_bytes is not None:
        gib = series.capacity_bytes / GIB
        yield (axes.axhline(gib, color=theme.warn, linewidth=1.4, linestyle="--"),), f"the GPU's {gib:.1f} GiB"
    for line in series.lines:
        look = STAGES[line.stage]
        handle = Line2D([], [], color=look.colour, marker=look.mark, linestyle=look.dashes, markersize=4, linewidth=1.5)
        yield (handle,), f"stage {line.stage}: {_engine(line)}\n{_from(line, series)}"
    star = Line2D([], [], marker="*", markersize=11, linestyle="none", color=theme.ink, markeredgecolor=theme.paper)
    yield (star,), f"this job, {plural(series.own.gpus, 'GPU')}"


def _engine(line: ScalingLine) -> str:
    return line.engine.replace(", ", ",\n").replace(" + ", " +\n")


def _from(line: ScalingLine, series: ScalingSeries) -> str:
    if not line.points:
        return "not offered"
    if series.capacity_bytes is None:
        return f"{line.points[-1].needed_bytes / GIB:,.1f} GiB on {plural(line.points[-1].gpus, 'GPU')}"
    return line.fits_words

"""Micro-batch against sequence length: memory as shades and contours, what does not fit under hatching."""

from collections.abc import Iterator
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from zeroplan.report.palette import VERMILLION, Theme
from zeroplan.report.plots.frame import SMALL, UNIT, LegendEntry, framed, legend
from zeroplan.report.series.heat import HeatSeries
from zeroplan.units import GIB

_SHADES = "cividis"  # made for the colour-blind, and lightness alone tells its shades apart
_LEVELS = tuple(float(one * 10**power) for power in range(-2, 7) for one in (1, 2, 5))
_LIMIT = VERMILLION
_BRIGHTEST = 8
"""What needs more than so many times the GPU's memory, or the job's, is as bright as that."""


def draw_heat(figure: Figure, series: HeatSeries, theme: Theme) -> None:
    """Draw the grid into the figure."""
    framed(figure, series.caption, width=8.0, height=4.6)
    axes = figure.subplots()
    across, up = list(series.seq_lens), list(series.micro_batches)
    gib = [[n_bytes / GIB for n_bytes in row] for row in series.needed_bytes]
    low, high = min(map(min, gib)), max(map(max, gib))
    brightest = min(high, _BRIGHTEST * max(series.capacity_bytes or 0, series.own_bytes) / GIB)
    norm = LogNorm(low, max(brightest, 1.01 * low))
    shades = axes.pcolormesh(_edges(across), _edges(up), gib, cmap=_SHADES, norm=norm, rasterized=True)
    axes.set(xscale="log", yscale="log", xlabel="tokens per sequence", ylabel="sequences per GPU and micro-batch")
    if min(len(across), len(up)) > 1:
        axes.set(xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))
    _ticks(axes, series)
    _contours(axes, across, up, gib, highest=brightest)
    bar = figure.colorbar(shades, ax=axes, pad=0.02, fraction=0.05, extend="max" if brightest < high else "neither")
    bar.set_label(UNIT)
    bar.ax.yaxis.set_major_locator(FixedLocator([level for level in _LEVELS if low <= level <= brightest]))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    _limits(axes, series, across, up, gib)
    axes.plot([series.own[1]], [series.own[0]], marker="*", markersize=14, color="#FFFFFF", markeredgecolor="#000000", zorder=6,
              clip_on=False)  # fmt: skip
    legend(axes, list(_entries(series, theme)), loc="lower left", at=(0.0, 1.01), columns=2)


def _edges(values: list[int]) -> list[float]:
    """Where cells meet: half-way on a logarithmic axis; the outer ones as far out as the next is in."""
    between = [(one * other) ** 0.5 for one, other in pairwise(values)]
    if not between:
        return [values[0] / 2**0.5, values[0] * 2**0.5]
    return [values[0] ** 2 / between[0], *between, values[-1] ** 2 / between[-1]]


def _ticks(axes: Axes, series: HeatSeries) -> None:
    """Doublings, from the least value up."""
    for axis, values in ((axes.xaxis, series.seq_lens), (axes.yaxis, series.micro_batches)):
        axis.set_major_locator(FixedLocator(_doublings(values)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_locator(NullLocator())


def _doublings(values: tuple[int, ...]) -> list[float]:
    least, most = values[0], values[-1]
    return [float(least << power) for power in range((most // least).bit_length()) if least << power <= most]


def _contours(axes: Axes, across: list[int], up: list[int], gib: list[list[float]], *, highest: float) -> None:
    levels = [level for level in _LEVELS if min(map(min, gib)) < level < highest]
    if not levels or min(len(across), len(up)) < 2:  # contours need a surface
        return
    lines = axes.contour(across, up, gib, levels=levels, colors="#FFFFFF", linewidths=0.8, alpha=0.85)
    labels = axes.clabel(lines, fmt=lambda level: f"{level:,.10g} GiB", fontsize=SMALL)
    for label in labels or ():
        label.set_path_effects([withStroke(linewidth=2, foreground="#333333")])


def _limits(axes: Axes, series: HeatSeries, across: list[int], up: list[int], gib: list[list[float]]) -> None:
    """Hatch what does not fit; between the two lines it fits tightly."""
    if series.capacity_bytes is None or min(len(across), len(up)) < 2:
        return
    limit, highest = series.capacity_bytes / GIB, max(map(max, gib))
    comfortable = [[n_bytes / GIB for n_bytes in row] for row in series.comfortable_bytes]
    if highest > limit:
        over = axes.contourf(across, up, gib, levels=[limit, max(highest, limit) * 2], colors="none", hatches=["///"])
        over.set_edgecolor("#1A1A1A")
        over.set_linewidth(0)
    for surface, dashes in ((gib, "solid"), (comfortable, "dashed")):
        if min(map(min, surface)) < limit < max(map(max, surface)):
            axes.contour(across, up, surface, levels=[limit], colors=_LIMIT, linewidths=2.2, linestyles=dashes)


def _entries(series: HeatSeries, theme: Theme) -> Iterator[LegendEntry]:
    star = Line2D([], [], marker="*", markersize=11, linestyle="none", color="#FFFFFF", markeredgecolor="#000000")
    batch, length = series.own
    yield (star,), f"this job, {batch:,} x {length:,}: {series.own_bytes / GIB:,.1f} GiB"
    if series.capacity_bytes is not None:
        gib = series.capacity_bytes / GIB
        yield (Line2D([], [], color=_LIMIT, linewidth=2.2),), f"the GPU's {gib:.1f} GiB"
        yield (Line2D([], [], color=_LIMIT, linewidth=2.2, linestyle="dashed"),), "the same, with the allocator's freed blocks"
        yield (Patch(facecolor="none", edgecolor=theme.ink, linewidth=0, hatch="////"),), "does not fit"

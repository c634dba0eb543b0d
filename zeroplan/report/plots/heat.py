"""Draws memory by micro-batch and sequence length as shades and contours; hatching marks sizes that do not fit."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from zeroplan.report.palette import VERMILLION, Theme
from zeroplan.report.plots.frame import SMALL, UNIT, LegendEntry, framed, legend
from zeroplan.report.series.heat import HeatSeries
from zeroplan.units import GIB

#: A colour map for colour-blind readers, whose shades differ in lightness: light is little memory, dark is much.
_SHADES = "cividis_r"
_LEVELS = tuple(float(one * 10**power) for power in range(-2, 7) for one in (1, 2, 5))
_LIMIT, _SHADOW = VERMILLION, "#333333"
_SPAN = 8
"""The middle shade is the GPU's memory, or the job's; the colour bar ends at this factor below and above."""

_CROSSED: dict[str, Any] = {"facecolor": "none", "edgecolor": "#FFFFFF", "linewidth": 0, "hatch": "xxxx"}
"""The look of sizes that run out of memory in a replay."""
_EDGE = 0.06
"""Closer to an edge than this fraction of the axes, a contour's label would be cut off."""

Surface = list[list[float]]


def draw_heat(figure: Figure, series: HeatSeries, theme: Theme) -> None:  # noqa: ARG001  shades are the same on any paper
    """Draw the grid into the figure."""
    framed(figure, series.caption, width=8.0, height=4.6)
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="tokens per sequence", ylabel="sequences per GPU and micro-batch")
    needed = _surface(series.needed_bytes)
    _shades(figure, axes, series, needed)
    if min(len(series.seq_lens), len(series.micro_batches)) > 1:  # contours need two rows and columns
        axes.set(xlim=(series.seq_lens[0], series.seq_lens[-1]), ylim=(series.micro_batches[0], series.micro_batches[-1]))
        _limits(axes, series, needed)
        _contours(axes, series, needed)
    _ticks(axes, series)
    axes.plot([series.own[1]], [series.own[0]], marker="*", markersize=14, color="#FFFFFF", markeredgecolor="#000000", zorder=6,
              clip_on=False)  # fmt: skip
    legend(axes, list(_entries(series)), loc="lower left", at=(0.0, 1.01), columns=2)


def _surface(rows: tuple[tuple[int, ...], ...]) -> Surface:
    return [[n_bytes / GIB for n_bytes in row] for row in rows]


def _ends(surface: Surface) -> tuple[float, float]:
    return min(map(min, surface)), max(map(max, surface))


def _shades(figure: Figure, axes: Axes, series: HeatSeries, needed: Surface) -> None:
    """Draw a cell per pair; cells darker than the GPU's memory do not fit."""
    middle = (series.capacity_bytes or series.own_bytes) / GIB
    low, high = middle / _SPAN, middle * _SPAN
    shades = axes.pcolormesh(
        _edges(series.seq_lens), _edges(series.micro_batches), needed, cmap=_SHADES, norm=LogNorm(low, high), rasterized=True
    )
    bar = figure.colorbar(shades, ax=axes, pad=0.02, fraction=0.05, extend="both")
    bar.set_label(UNIT)
    bar.ax.yaxis.set_major_locator(FixedLocator([level for level in _LEVELS if low <= level <= high]))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _edges(values: tuple[int, ...]) -> list[float]:
    """Cell borders: half-way on a logarithmic axis; the outer ones as far outside as the next inside."""
    between = [(one * other) ** 0.5 for one, other in pairwise(values)]
    if not between:
        return [values[0] / 2**0.5, values[0] * 2**0.5]
    return [values[0] ** 2 / between[0], *between, values[-1] ** 2 / between[-1]]


def _ticks(axes: Axes, series: HeatSeries) -> None:
    """Label doublings, beginning with the smallest value."""
    for axis, values in ((axes.xaxis, series.seq_lens), (axes.yaxis, series.micro_batches)):
        axis.set_major_locator(FixedLocator(_doublings(values)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_locator(NullLocator())


def _doublings(values: tuple[int, ...]) -> list[float]:
    least, most = values[0], values[-1]
    return [float(least << power) for power in range((most // least).bit_length()) if least << power <= most]


def _contours(axes: Axes, series: HeatSeries, needed: Surface) -> None:
    low, high = _ends(needed)
    levels = [level for level in _LEVELS if low < level < min(high, _SPAN * (series.capacity_bytes or series.own_bytes) / GIB)]
    if not levels:
        return
    lines = axes.contour(series.seq_lens, series.micro_batches, needed, levels=levels, colors="#FFFFFF", linewidths=0.9)
    lines.set_path_effects([withStroke(linewidth=1.7, foreground=_SHADOW)])
    for label in axes.clabel(lines, fmt=lambda level: f"{level:,.10g} GiB", fontsize=SMALL) or ():
        label.set_path_effects([withStroke(linewidth=2, foreground=_SHADOW)])
        if _is_cut(axes, label.get_position()):
            label.remove()


def _is_cut(axes: Axes, place: tuple[float, float]) -> bool:
    """Whether the axes would cut a label at this place."""
    across, up = axes.transLimits.transform(axes.transScale.transform(place))
    return not (_EDGE < across < 1 - _EDGE and _EDGE < up < 1 - _EDGE)


def _limits(axes: Axes, series: HeatSeries, needed: Surface) -> None:
    """Hatch sizes that do not fit; sizes between the two lines fit tightly."""
    if series.capacity_bytes is None:
        return
    limit, (_, high) = series.capacity_bytes / GIB, _ends(needed)
    if high > limit:
        over = axes.contourf(
            series.seq_lens, series.micro_batches, needed, levels=[limit, 2 * high], colors="none", hatches=["///"]
        )
        over.set_edgecolor("#FFFFFF")
        over.set_linewidth(0)
    _runs_out(axes, series)
    for surface, dashes in _crossing(series):
        axes.contour(
            series.seq_lens, series.micro_batches, surface, levels=[limit], colors=_LIMIT, linewidths=2.2, linestyles=dashes
        )


def _runs_out(axes: Axes, series: HeatSeries) -> None:
    """Cross-hatch the sizes whose peak fits, and which run out of memory in a replay."""
    across, up = _edges(series.seq_lens), _edges(series.micro_batches)
    for row, at in series.runs_out:
        left, low = across[at], up[row]
        axes.add_patch(Rectangle((left, low), across[at + 1] - left, up[row + 1] - low, **_CROSSED))


def _crossing(series: HeatSeries) -> Iterator[tuple[Surface, str]]:
    """Yield each surface that crosses the GPU's memory, and its line style."""
    limit = (series.capacity_bytes or 0) / GIB
    for rows, dashes in ((series.needed_bytes, "solid"), (series.comfortable_bytes, "dashed")):
        low, high = _ends(_surface(rows))
        if low < limit < high:
            yield _surface(rows), dashes


def _entries(series: HeatSeries) -> Iterator[LegendEntry]:
    star = Line2D([], [], marker="*", markersize=11, linestyle="none", color="#FFFFFF", markeredgecolor="#000000")
    batch, length = series.own
    yield (star,), f"this job, {batch:,} x {length:,}: {series.own_bytes / GIB:,.1f} GiB"
    if series.capacity_bytes is None:
        return
    words = {
        "solid": f"the GPU's {series.capacity_bytes / GIB:.1f} GiB",
        "dashed": "the same, with the allocator's freed blocks",
    }
    for _, dashes in _crossing(series):
        yield (Line2D([], [], color=_LIMIT, linewidth=2.2, linestyle="-" if dashes == "solid" else "--"),), words[dashes]
    if _ends(_surface(series.needed_bytes))[1] > series.capacity_bytes / GIB:
        hatched = Patch(facecolor="#3D4A6B", edgecolor="#FFFFFF", linewidth=0, hatch="////")
        yield (hatched,), f"does not fit the GPU's {series.capacity_bytes / GIB:.1f} GiB"
    if series.runs_out:
        yield (Patch(**{**_CROSSED, "facecolor": "#3D4A6B"}),), "runs out of memory: pieces of the cache are too small"

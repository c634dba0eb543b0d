"""Draws a column of bands per ZeRO stage, and a line at the GPU's capacity."""

import textwrap
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from zeroplan.estimator import Verdict
from zeroplan.report.palette import LOOKS, Theme, on
from zeroplan.report.plots.frame import SMALL, UNIT, LegendEntry, framed, kind_entries, legend
from zeroplan.report.series.parts import Part, kinds_of
from zeroplan.report.series.stages import StageColumn, StagesSeries
from zeroplan.units import GIB

_WIDTH = 0.62
_HIGHEST = 4.0
"""If a column exceeds this many times the capacity, or the lowest column, a second panel shows the others larger."""
_WHOLE = 2.0
"""In that panel, a column of up to twice that height is whole."""
_UNDER = 22
"""Characters per line below a column."""
_SPARE = 1.06
"""The height of the second panel relative to the highest column that is whole there."""
_ABOVE = 1.13
"""The axis's height relative to the columns, with room for the sizes above them."""
READABLE = 0.045
"""A band below this fraction of the axis has no room for its number."""


def draw_stages(figure: Figure, series: StagesSeries, theme: Theme) -> None:
    """Draw all stages into the figure; if one is far higher than the GPU, in a narrow panel, and zoomed in beside it."""
    tallest, top = _heights(series)
    framed(figure, series.caption, width=8.0 if top == tallest else 9.6, height=4.6)
    if top < tallest:
        small, axes = figure.subplots(1, 2, width_ratios=(1, 5))
        _overview(small, series, tallest, theme)
        axes.set_title(f"zoomed in: the lowest {top:,.0f} GiB", fontsize=SMALL, pad=26, loc="left")
    else:
        axes = figure.subplots()
        axes.set_ylabel(UNIT)
    axes.set(xlim=(-0.5, len(series.columns) - 0.5), ylim=(0, top if top < tallest else top * _ABOVE))
    for at, column in enumerate(series.columns):
        _column(axes, at, column, top, theme)
    axes.set_xticks(range(len(series.columns)), [_under(column) for column in series.columns], fontsize=SMALL - 0.5)
    axes.tick_params(axis="x", length=0)
    kinds = kinds_of(tuple(column.parts for column in series.columns))
    legend(axes, [*_lines(axes, series, theme), *kind_entries(kinds, theme)])


def _heights(series: StagesSeries) -> tuple[float, float]:
    """The tallest column, and the height that shows the lowest, the GPU's capacity, and columns of similar height. [GiB]"""
    columns = [column for column in series.columns if column.parts]
    heights = [max(column.needed_bytes / GIB, _comfortable(column)) for column in columns]
    lines = [] if series.capacity_bytes is None else [series.capacity_bytes / GIB]
    reference = max([min(heights, default=1.0), *lines])
    tallest = max([*heights, *lines], default=1.0)
    if tallest <= _HIGHEST * reference:
        return tallest, tallest
    whole = [tall for one, tall in zip(columns, heights, strict=True) if one.needed_bytes / GIB <= _WHOLE * reference]
    return tallest, _SPARE * max([reference, *whole])


def _overview(axes: Axes, series: StagesSeries, tallest: float, theme: Theme) -> None:
    """Draw all columns to one scale, without their numbers."""
    axes.set(xlim=(-0.5, len(series.columns) - 0.5), ylim=(0, tallest * 1.02), ylabel=UNIT)
    for at, column in enumerate(series.columns):
        for part, bottom in _bands(column.parts):
            band(axes, at, bottom, part.n_bytes / GIB, part.what, theme)
    axes.set_xticks(range(len(series.columns)), [str(column.stage) for column in series.columns])
    axes.set_xlabel("stage")
    axes.tick_params(axis="x", length=0)
    if series.capacity_bytes is not None:
        axes.axhline(series.capacity_bytes / GIB, color=theme.warn, linewidth=1.4, linestyle="--", zorder=4)


def _column(axes: Axes, at: int, column: StageColumn, top: float, theme: Theme) -> None:
    if not column.parts:
        words = "\n".join(textwrap.wrap(column.refusal, _UNDER))
        axes.text(at, top * 0.03, words, ha="center", va="bottom", fontsize=SMALL - 1, style="italic", color=theme.faint)
        return
    stacked(axes, at, column.parts, top, theme)
    _cache(axes, at, column, theme)
    height = min(top, max(column.needed_bytes / GIB, _comfortable(column)))
    above(axes, at, column.needed_bytes, column.verdict, height, theme)


def stacked(axes: Axes, at: int, parts: Sequence[Part], top: float, theme: Theme) -> None:
    """Draw the bands of column ``at``, with their sizes where there is room on an axis up to ``top``. [GiB]"""
    for part, bottom in _bands(parts):
        tall = part.n_bytes / GIB
        band(axes, at, bottom, tall, part.what, theme)
        shown = min(tall, top - bottom)
        if shown > READABLE * top:
            _number(axes, at, part, bottom + shown / 2)


def _bands(parts: Sequence[Part]) -> Iterator[tuple[Part, float]]:
    """Every part of a column with its bottom. [GiB]"""
    bottom = 0.0
    for part in parts:
        yield part, bottom
        bottom += part.n_bytes / GIB


def _number(axes: Axes, at: int, part: Part, height: float) -> None:
    colour = LOOKS[part.what].colour
    axes.text(at, height, figure_of(part.n_bytes), ha="center", va="center", fontsize=SMALL, color=on(colour),
              zorder=5, bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0})  # fmt: skip


def band(axes: Axes, at: int, bottom: float, tall: float, what: str, theme: Theme) -> None:
    """Draw a band of a kind into column ``at``. [GiB]"""
    look = LOOKS[what]
    axes.bar(at, tall, _WIDTH, bottom, color=look.colour, edgecolor=theme.paper, linewidth=0.6, label=what)
    if look.hatch:
        axes.bar(at, tall, _WIDTH, bottom, color="none", edgecolor=on(look.colour), linewidth=0, hatch=look.hatch)


def _comfortable(column: StageColumn) -> float:
    return column.comfortable_bytes / GIB


def _cache(axes: Axes, at: int, column: StageColumn, theme: Theme) -> None:
    """Draw a line for the freed blocks that the allocator caches if memory allows."""
    low, high = column.needed_bytes / GIB, _comfortable(column)
    axes.plot([at, at], [low, high], color=theme.faint, linewidth=1.0, marker="_", markevery=[1], markersize=9)


def above(axes: Axes, at: int, needed_bytes: int, verdict: Verdict, height: float, theme: Theme) -> None:
    """Write the needed memory and the verdict above column ``at``, which is ``height`` GiB tall."""
    short = verdict == "does not fit"
    verdict_line = "" if verdict == "unknown" else f"\n{verdict}"
    axes.annotate(
        f"{figure_of(needed_bytes)} GiB{verdict_line}", (at, height), (0, 3), textcoords="offset points", ha="center", va="bottom",
        fontsize=SMALL + 0.5, fontweight="bold", color=theme.warn if short else theme.ink, zorder=6,
        path_effects=[withStroke(linewidth=3, foreground=theme.paper)],
    )  # fmt: skip


def figure_of(n_bytes: int) -> str:
    """Return a size with as many digits as a picture needs. [GiB]"""
    gib = n_bytes / GIB
    return f"{gib:,.0f}" if gib >= 1000 else f"{gib:,.1f}" if gib >= 1 else f"{gib:.2f}"


def _under(column: StageColumn) -> str:
    peak = [] if not column.moment else textwrap.wrap(f"peak: {column.moment}", _UNDER)
    return "\n".join([f"stage {column.stage}", *_wrapped(column.engine), *peak])


def _wrapped(engine: str) -> list[str]:
    """An engine's name in lines, also broken after underscores, since option names are long."""
    return [line.replace("_ ", "_") for line in textwrap.wrap(engine.replace("_", "_ "), _UNDER, break_long_words=False)]


def _lines(axes: Axes, series: StagesSeries, theme: Theme) -> Iterator[LegendEntry]:
    yield from capacity_line(axes, series.capacity_bytes, theme)
    cache = Line2D([], [], color=theme.faint, linewidth=1.0, marker="|", markersize=6)
    yield (cache,), "up to here with the\nallocator's freed blocks"


def capacity_line(axes: Axes, capacity_bytes: int | None, theme: Theme) -> Iterator[LegendEntry]:
    """Draw a line at the GPU's memory and yield its entry for the legend; nothing without a GPU."""
    if capacity_bytes is not None:
        gib = capacity_bytes / GIB
        capacity = axes.axhline(gib, color=theme.warn, linewidth=1.4, linestyle="--", zorder=4)
        yield (capacity,), f"the GPU's {gib:.1f} GiB"

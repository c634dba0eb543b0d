"""Stages side by side: a column of bands each, and the GPU's capacity across them."""

import textwrap
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from zeroplan.report.palette import LOOKS, Theme, on
from zeroplan.report.plots.frame import SMALL, UNIT, LegendEntry, framed, kind_entries, legend
from zeroplan.report.series.parts import kinds_of
from zeroplan.report.series.stages import StageColumn, StagesSeries
from zeroplan.units import GIB

_ZIGZAG = Path([(-2.0, -0.4), (-1.0, 0.4), (0.0, -0.4), (1.0, 0.4), (2.0, -0.4)])
_WIDTH = 0.62
_HIGHEST = 4.0
"""A column of more than so many times the capacity, or the lowest column, is cut: the others could not be read beside it."""
_CUT_AT = 2.0
_UNDER = 22
"""Signs that fit below a column."""
_TEAR = 0.9
"""Where a cut column is torn, in parts of its height."""
READABLE = 0.045
"""A band of less than this part of the axes has no room for its number."""


def draw_stages(figure: Figure, series: StagesSeries, theme: Theme) -> None:
    """Draw all stages into the figure."""
    framed(figure, series.caption, width=8.0, height=4.6)
    axes = figure.subplots()
    top = _top(series)
    axes.set(xlim=(-0.5, len(series.columns) - 0.5), ylim=(0, top * 1.13), ylabel=UNIT)
    for at, column in enumerate(series.columns):
        _column(axes, at, column, top, theme)
    axes.set_xticks(range(len(series.columns)), [_under(column) for column in series.columns], fontsize=SMALL - 0.5)
    axes.tick_params(axis="x", length=0)
    kinds = kinds_of(tuple(column.parts for column in series.columns))
    legend(axes, [*_lines(axes, series, theme), *kind_entries(kinds, theme)])


def _top(series: StagesSeries) -> float:
    """Where the tallest column ends; cut where the others would vanish beside it. [GiB]"""
    heights = [max(column.needed_bytes, column.comfortable_bytes) / GIB for column in series.columns if column.parts]
    lines = [] if series.capacity_bytes is None else [series.capacity_bytes / GIB]
    reference = max([min(heights, default=1.0), *lines])
    tallest = max([*heights, *lines], default=1.0)
    return tallest if tallest <= _HIGHEST * reference else _CUT_AT * max([reference, *(h for h in heights if h <= reference)])


def _column(axes: Axes, at: int, column: StageColumn, top: float, theme: Theme) -> None:
    if not column.parts:
        words = "\n".join(textwrap.wrap(column.refusal, _UNDER))
        axes.text(at, top * 0.03, words, ha="center", va="bottom", fontsize=SMALL - 1, style="italic", color=theme.faint)
        return
    height = column.needed_bytes / GIB
    cut = height > top
    scale, bottom = (top / height if cut else 1.0), 0.0
    for part in column.parts:
        tall = part.n_bytes / GIB * scale
        band(axes, at, bottom, tall, part.what, theme)
        if tall > READABLE * top:
            colour = LOOKS[part.what].colour
            middle = _beside_the_tear(bottom, tall, top) if cut else bottom + tall / 2
            axes.text(at, middle, _figure(part.n_bytes), ha="center", va="center", fontsize=SMALL, color=on(colour), zorder=5,
                      bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0})  # fmt: skip
        bottom += tall
    if cut:
        _torn(axes, at, top, theme)
    else:
        _cache(axes, at, column, theme)
    _above(axes, at, column, min(max(height, _comfortable(column)), top), theme)


def band(axes: Axes, at: int, bottom: float, tall: float, what: str, theme: Theme) -> None:
    """Put a band of a kind into a column. [GiB]"""
    look = LOOKS[what]
    axes.bar(at, tall, _WIDTH, bottom, color=look.colour, edgecolor=theme.paper, linewidth=0.6, label=what)
    if look.hatch:
        axes.bar(at, tall, _WIDTH, bottom, color="none", edgecolor=on(look.colour), linewidth=0, hatch=look.hatch)


def _beside_the_tear(bottom: float, tall: float, top: float) -> float:
    """The middle of a band, or of what is below the tear where that runs through it."""
    low, high = (_TEAR - 0.045) * top, (_TEAR + 0.07) * top
    middle = bottom + tall / 2
    return (bottom + low) / 2 if low < middle < high else middle


def _torn(axes: Axes, at: int, top: float, theme: Theme) -> None:
    """A column that goes on above: its bands keep their proportions, not their heights."""
    steps = [at - _WIDTH / 2 + _WIDTH * step / 8 for step in range(9)]
    heights = [top * (_TEAR + 0.012 * (-1) ** step) for step in range(9)]
    axes.fill_between(steps, heights, [height + 0.022 * top for height in heights], color=theme.paper, linewidth=0, zorder=3)


def _comfortable(column: StageColumn) -> float:
    return column.comfortable_bytes / GIB


def _cache(axes: Axes, at: int, column: StageColumn, theme: Theme) -> None:
    """What the allocator's freed blocks take on top, where nothing forces it to give them back."""
    low, high = column.needed_bytes / GIB, _comfortable(column)
    axes.plot([at, at], [low, high], color=theme.faint, linewidth=1.0, marker="_", markevery=[1], markersize=9)


def _above(axes: Axes, at: int, column: StageColumn, height: float, theme: Theme) -> None:
    short = column.verdict == "does not fit"
    verdict = "" if column.verdict == "unknown" else f"\n{column.verdict}"
    axes.annotate(
        f"{_figure(column.needed_bytes)} GiB{verdict}", (at, height), (0, 3), textcoords="offset points", ha="center", va="bottom",
        fontsize=SMALL + 0.5, fontweight="bold", color=theme.warn if short else theme.ink, zorder=6,
        path_effects=[withStroke(linewidth=3, foreground=theme.paper)],
    )  # fmt: skip


def _figure(n_bytes: int) -> str:
    gib = n_bytes / GIB
    return f"{gib:,.0f}" if gib >= 1000 else f"{gib:,.1f}" if gib >= 1 else f"{gib:.2f}"


def _under(column: StageColumn) -> str:
    peak = [] if not column.moment else textwrap.wrap(f"peak: {column.moment}", _UNDER)
    return "\n".join([f"stage {column.stage}", *_wrapped(column.engine), *peak])


def _wrapped(engine: str) -> list[str]:
    """Broken after underscores, too: an option's name may be longer than a column is wide."""
    return [line.replace("_ ", "_") for line in textwrap.wrap(engine.replace("_", "_ "), _UNDER, break_long_words=False)]


def _lines(axes: Axes, series: StagesSeries, theme: Theme) -> Iterator[LegendEntry]:
    if series.capacity_bytes is not None:
        gib = series.capacity_bytes / GIB
        capacity = axes.axhline(gib, color=theme.warn, linewidth=1.4, linestyle="--", zorder=4)
        yield (capacity,), f"the GPU's {gib:.1f} GiB"
    if any(column.needed_bytes / GIB > _top(series) for column in series.columns):
        torn = Line2D([], [], color=theme.ink, linewidth=1.0, marker=_ZIGZAG, markersize=12, linestyle="none")
        yield (torn,), "torn: goes on above, bands\nin proportion, not to scale"
    cache = Line2D([], [], color=theme.faint, linewidth=1.0, marker="|", markersize=6)
    yield (cache,), "up to here with the\nallocator's freed blocks"

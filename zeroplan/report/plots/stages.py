"""Draws a column of bands per ZeRO stage, and a line at the GPU's capacity."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from zeroplan.report.palette import LOOKS, Theme, on
from zeroplan.report.plots.frame import SMALL, UNIT, LegendEntry, framed, kind_entries, legend
from zeroplan.report.series.parts import Part, kinds_of
from zeroplan.report.series.stages import StageColumn, StagesSeries
from zeroplan.units import GIB

_ZIGZAG = Path([(-2.0, -0.4), (-1.0, 0.4), (0.0, -0.4), (1.0, 0.4), (2.0, -0.4)])
_WIDTH = 0.62
_HIGHEST = 4.0
"""High columns are torn if one exceeds this many times the capacity, or the lowest column; else the others are unreadable."""
_WHOLE = 2.0
"""A column of up to twice that height stays whole."""
_UNDER = 22
"""Characters per line below a column."""
_TEAR, _GAP = 0.64, 0.045
"""The height of the tear, and its width, as fractions of a torn column."""
_SPARE = 1.06
"""The tear's height relative to the highest whole column."""
_ABOVE = 1.13
"""The axis's height relative to the columns, with room for the sizes above them."""
READABLE = 0.045
"""A band below this fraction of the axis has no room for its number."""


class _Axis(NamedTuple):
    """The height of the highest column, and of the tear; ``tear`` equals ``top`` if no column is torn. [GiB]"""

    top: float
    tear: float

    @property
    def rest(self) -> float:
        """The height at which a torn column continues above the tear."""
        return self.tear + _GAP * self.top

    def tears(self, column: StageColumn) -> bool:
        """Whether a column is too high to be drawn to scale."""
        return self.tear < self.top and column.needed_bytes / GIB > self.tear


class _Band(NamedTuple):
    """A drawn piece of a column: its kind with all its bytes, its bottom and its height. [GiB]"""

    part: Part
    bottom: float
    tall: float


def draw_stages(figure: Figure, series: StagesSeries, theme: Theme) -> None:
    """Draw all stages into the figure."""
    framed(figure, series.caption, width=8.0, height=4.6)
    axes, scale = figure.subplots(), _axis(series)
    axes.set(xlim=(-0.5, len(series.columns) - 0.5), ylim=(0, scale.top * _ABOVE), ylabel=UNIT)
    for at, column in enumerate(series.columns):
        _column(axes, at, column, scale, theme)
    axes.set_xticks(range(len(series.columns)), [_under(column) for column in series.columns], fontsize=SMALL - 0.5)
    axes.tick_params(axis="x", length=0)
    if scale.tear < scale.top:
        _end_of_scale(axes, scale)
    kinds = kinds_of(tuple(column.parts for column in series.columns))
    legend(axes, [*_lines(axes, series, scale, theme), *kind_entries(kinds, theme)])


def _axis(series: StagesSeries) -> _Axis:
    """A scale for the lowest column, the GPU's capacity, and columns of similar height."""
    columns = [column for column in series.columns if column.parts]
    heights = [max(column.needed_bytes / GIB, _comfortable(column)) for column in columns]
    lines = [] if series.capacity_bytes is None else [series.capacity_bytes / GIB]
    reference = max([min(heights, default=1.0), *lines])
    tallest = max([*heights, *lines], default=1.0)
    if tallest <= _HIGHEST * reference:
        return _Axis(top=tallest, tear=tallest)
    whole = [tall for one, tall in zip(columns, heights, strict=True) if one.needed_bytes / GIB <= _WHOLE * reference]
    tear = _SPARE * max([reference, *whole])
    return _Axis(top=tear / _TEAR, tear=tear)


def _end_of_scale(axes: Axes, scale: _Axis) -> None:
    """End the vertical axis at the tear, since heights above it are not to scale."""
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= scale.tear])
    axes.spines["left"].set_bounds(0, scale.tear)
    axes.yaxis.label.set_y(_TEAR / _ABOVE / 2)


def _column(axes: Axes, at: int, column: StageColumn, scale: _Axis, theme: Theme) -> None:
    if not column.parts:
        words = "\n".join(textwrap.wrap(column.refusal, _UNDER))
        axes.text(at, scale.top * 0.03, words, ha="center", va="bottom", fontsize=SMALL - 1, style="italic", color=theme.faint)
        return
    torn = scale.tears(column)
    bands = list(_torn(column, scale) if torn else _whole(column))
    for one in bands:
        band(axes, at, one.bottom, one.tall, one.part.what, theme)
    for one in _largest_of_each(bands):
        if one.tall > READABLE * scale.top:
            _number(axes, at, one)
    if torn:
        _tear(axes, at, scale, theme)
    else:
        _cache(axes, at, column, theme)
    _above(axes, at, column, scale.top if torn else max(column.needed_bytes / GIB, _comfortable(column)), theme)


def _whole(column: StageColumn) -> Iterator[_Band]:
    bottom = 0.0
    for part in column.parts:
        yield _Band(part, bottom, part.n_bytes / GIB)
        bottom += part.n_bytes / GIB


def _torn(column: StageColumn, scale: _Axis) -> Iterator[_Band]:
    """Bands to scale up to the tear; the rest above it, to a smaller scale."""
    shrunk = (scale.top - scale.rest) / (column.needed_bytes / GIB - scale.tear)
    for part, bottom, tall in _whole(column):
        if bottom < scale.tear:
            yield _Band(part, bottom, min(tall, scale.tear - bottom))
        left = min(tall, bottom + tall - scale.tear)
        if left > 0:
            yield _Band(part, scale.rest + max(bottom - scale.tear, 0.0) * shrunk, left * shrunk)


def _largest_of_each(bands: Sequence[_Band]) -> Iterator[_Band]:
    """The piece of each kind that carries its number: the larger one if the tear cuts it in two."""
    for _, pieces in groupby(bands, key=lambda one: one.part.what):
        yield max(pieces, key=lambda one: one.tall)


def _number(axes: Axes, at: int, one: _Band) -> None:
    colour = LOOKS[one.part.what].colour
    axes.text(at, one.bottom + one.tall / 2, _figure(one.part.n_bytes), ha="center", va="center", fontsize=SMALL, color=on(colour),
              zorder=5, bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0})  # fmt: skip


def band(axes: Axes, at: int, bottom: float, tall: float, what: str, theme: Theme) -> None:
    """Draw a band of a kind into column ``at``. [GiB]"""
    look = LOOKS[what]
    axes.bar(at, tall, _WIDTH, bottom, color=look.colour, edgecolor=theme.paper, linewidth=0.6, label=what)
    if look.hatch:
        axes.bar(at, tall, _WIDTH, bottom, color="none", edgecolor=on(look.colour), linewidth=0, hatch=look.hatch)


def _tear(axes: Axes, at: int, scale: _Axis, theme: Theme) -> None:
    """Draw both edges of the tear as zigzags."""
    steps = [at - _WIDTH / 2 + _WIDTH * step / 8 for step in range(9)]
    for edge in (scale.tear, scale.rest):
        waves = [edge + 0.012 * scale.top * (-1) ** step for step in range(9)]
        inside = scale.tear + _GAP * scale.top / 2
        axes.fill_between(steps, waves, [inside] * len(steps), color=theme.paper, linewidth=0, zorder=3)


def _comfortable(column: StageColumn) -> float:
    return column.comfortable_bytes / GIB


def _cache(axes: Axes, at: int, column: StageColumn, theme: Theme) -> None:
    """Draw a line for the freed blocks that the allocator caches if memory allows."""
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
    """An engine's name in lines, also broken after underscores, since option names are long."""
    return [line.replace("_ ", "_") for line in textwrap.wrap(engine.replace("_", "_ "), _UNDER, break_long_words=False)]


def _lines(axes: Axes, series: StagesSeries, scale: _Axis, theme: Theme) -> Iterator[LegendEntry]:
    if series.capacity_bytes is not None:
        gib = series.capacity_bytes / GIB
        capacity = axes.axhline(gib, color=theme.warn, linewidth=1.4, linestyle="--", zorder=4)
        yield (capacity,), f"the GPU's {gib:.1f} GiB"
    if any(scale.tears(column) for column in series.columns):
        torn = Line2D([], [], color=theme.ink, linewidth=1.0, marker=_ZIGZAG, markersize=12, linestyle="none")
        yield (torn,), "torn: above the tear, bands\nare in proportion only"
    cache = Line2D([], [], color=theme.faint, linewidth=1.0, marker="|", markersize=6)
    yield (cache,), "up to here with the\nallocator's freed blocks"

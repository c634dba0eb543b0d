"""Draws a step from left to right: bands of memory at every named moment, the peak marked, a measured record as a line."""

from collections.abc import Iterator
from itertools import groupby
from math import ceil
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from zeroplan.report.palette import LOOKS, Theme, on
from zeroplan.report.plots.frame import SMALL, UNIT, LegendEntry, framed, kind_entries, legend
from zeroplan.report.series.levels import Level
from zeroplan.report.series.parts import kinds_of
from zeroplan.report.series.timeline import TimelineSeries
from zeroplan.report.words import plural
from zeroplan.units import GIB

_NEAR = 1.6
"""A capacity above this many times the peak is not drawn, since it would flatten the bands."""
_GAP = 2.0
"""Width of a gap for blocks without moments, in moments."""
_PER_MOMENT, _WIDEST = 0.15, 12.0
"""Width of a moment with a name, and largest width of the figure; beyond that some names are left out. [inches]"""
_BESIDE = 3.0
_LONGEST_NAME = 40
_MEASURED = 1.6
"""Width of the measured line. [points]"""
_BOLD_SIGN, _POINTS_PER_INCH = 0.66, 72
"""Mean width of a character of DejaVu Sans Bold, as a fraction of the font size."""
_PREFIXES = (
    "initialisation: ", "first micro-batch: ", "second micro-batch: ", "forward: ", "forward of ", "backward: ", "backward of ",
    "optimizer step: ",
)  # fmt: skip


class _Places(NamedTuple):
    """The left end of each moment on the axis."""

    lefts: tuple[float, ...]

    @classmethod
    def of(cls, series: TimelineSeries) -> "_Places":
        lefts, at = [], 0.0
        for instant in series.instants:
            at += _GAP if instant.skipped else 0.0
            lefts.append(at)
            at += 1.0
        return cls(tuple(lefts))

    @property
    def end(self) -> float:
        return self.lefts[-1] + 1.0

    def middle(self, at: int) -> float:
        return self.lefts[at] + 0.5


def draw_timeline(figure: Figure, series: TimelineSeries, theme: Theme) -> None:
    """Draw the step into the figure."""
    places = _Places.of(series)
    width = min(max(8.0, _BESIDE + _PER_MOMENT * places.end), _WIDEST)
    framed(figure, series.caption, width=width, height=5.0)
    axes = figure.subplots()
    axes.set(xlim=(0, places.end), ylim=(0, _top(series)), ylabel=UNIT)
    kinds = kinds_of(tuple(instant.parts for instant in series.instants))
    _bands(axes, series, places, kinds, theme)
    room = (width - _BESIDE) / places.end
    _names(axes, series, places, room=room)
    _phases(axes, series, places, theme)
    _peak(axes, series, places, theme, room=room)
    legend(axes, [*_lines(axes, series, places, theme), *kind_entries(kinds, theme)])


def _room(series: TimelineSeries) -> float | None:
    """The GPU's memory for the allocator [GiB]; None if it is too far above the peak to be drawn."""
    highest = series.instants[series.peak].total_bytes
    near = series.room_bytes is not None and series.room_bytes <= _NEAR * highest
    return series.room_bytes / GIB if near and series.room_bytes is not None else None


def _top(series: TimelineSeries) -> float:
    highest = max([instant.total_bytes for instant in series.instants] + [one.n_bytes for one in series.measured]) / GIB
    return max(1.22 * highest, 1.16 * (_room(series) or 0.0))


def _bands(axes: Axes, series: TimelineSeries, places: _Places, kinds: tuple[str, ...], theme: Theme) -> None:
    """Draw a band per kind: level at each moment, sloping over skipped blocks between."""
    edges = [edge for left in places.lefts for edge in (left, left + 1.0)]
    bottoms = [0.0] * len(edges)
    for what in kinds:
        heights = [sum(part.n_bytes for part in instant.parts if part.what == what) / GIB for instant in series.instants]
        twice = [height for height in heights for _ in range(2)]
        tops = [bottom + height for bottom, height in zip(bottoms, twice, strict=True)]
        look = LOOKS[what]
        axes.fill_between(edges, bottoms, tops, facecolor=look.colour, edgecolor=theme.paper, linewidth=0.3, label=what)
        if look.hatch:
            axes.fill_between(edges, bottoms, tops, facecolor="none", edgecolor=on(look.colour), linewidth=0, hatch=look.hatch)
        bottoms = tops
    for at, instant in enumerate(series.instants):
        if instant.skipped:
            axes.axvspan(places.lefts[at] - _GAP, places.lefts[at], facecolor=theme.paper, alpha=0.5, linewidth=0, zorder=2)
            axes.text(places.lefts[at] - _GAP / 2, 0.02 * _top(series), f"{plural(instant.skipped, 'block')}, alike", rotation=90,
                      ha="center", va="bottom", fontsize=SMALL - 1, color=theme.ink, zorder=3)  # fmt: skip


def _names(axes: Axes, series: TimelineSeries, places: _Places, *, room: float) -> None:
    """Write each moment's name below it; if room is short, the peak's and then the highest moments'."""
    apart = ceil(_PER_MOMENT * 0.8 / room)
    order = sorted(range(len(series.instants)), key=lambda at: (at != series.peak, -series.instants[at].total_bytes, at))
    chosen: list[int] = []
    for at in order:
        if all(abs(places.lefts[at] - places.lefts[other]) >= apart for other in chosen):
            chosen.append(at)
    chosen.sort()
    axes.set_xticks([places.middle(at) for at in chosen], [_short(series.instants[at].name) for at in chosen], rotation=90)
    axes.tick_params(axis="x", length=2, labelsize=SMALL - 0.5)


def _short(name: str) -> str:
    """A moment's name without its phase, which is written above."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    short = name.removeprefix(prefix)
    return short if len(short) <= _LONGEST_NAME else f"{short[: _LONGEST_NAME - 1]}…"


def _phases(axes: Axes, series: TimelineSeries, places: _Places, theme: Theme) -> None:
    """Name the phases above, with a line between them; names of short phases alternate between two levels."""
    for number, (phase, group) in enumerate(groupby(range(len(series.instants)), key=lambda at: series.instants[at].phase)):
        indices = list(group)
        left, right = places.lefts[indices[0]], places.lefts[indices[-1]] + 1.0
        narrow = right - left < places.end / 8
        axes.annotate(
            phase, ((left + right) / 2, 1.0), (0, 3 + (11 if narrow and number % 2 else 0)), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", fontsize=SMALL, color=theme.ink, annotation_clip=False,
        )  # fmt: skip
        if indices[0]:
            axes.axvline(left, color=theme.faint, linewidth=0.8, linestyle=":", zorder=3)


def _peak(axes: Axes, series: TimelineSeries, places: _Places, theme: Theme, *, room: float) -> None:
    """Draw an arrow to the peak from its name and size, which are as close as the axis allows."""
    instant = series.instants[series.peak]
    at, gib, size = places.middle(series.peak), instant.total_bytes / GIB, SMALL + 0.5
    words = f"peak {gib:,.2f} GiB: {instant.name}"
    long = len(words) * size * _BOLD_SIGN / _POINTS_PER_INCH / room
    begin = max(min(at - long / 2, places.end - long), 0.3)
    along = min((at - begin) / long, 1.0)
    axes.annotate(
        words, (at, gib), (begin, 0.965 * _top(series)), ha="left", va="top", fontsize=size, fontweight="bold", zorder=7,
        path_effects=[withStroke(linewidth=3, foreground=theme.paper)],
        arrowprops={"arrowstyle": "-|>", "color": theme.ink, "shrinkA": 1, "shrinkB": 0, "relpos": (along, 0.0)},
    )  # fmt: skip


def _lines(axes: Axes, series: TimelineSeries, places: _Places, theme: Theme) -> Iterator[LegendEntry]:
    room = _room(series)
    if room is not None:
        line = axes.axhline(room, color=theme.warn, linewidth=1.4, linestyle="--", zorder=4)
        yield (line,), f"what the GPU leaves to\nthe allocator: {room:.1f} GiB"
    for edges, heights in _measured(series, places):
        axes.plot(edges, heights, color=theme.ink, linewidth=_MEASURED, zorder=5, solid_joinstyle="miter",
                  path_effects=[withStroke(linewidth=_MEASURED + 1.2, foreground=theme.paper)])  # fmt: skip
    if series.measured:
        figures = "\n".join(f"  {one.phase} {one.n_bytes / GIB:,.2f} GiB" for one in series.measured)
        each = "of each block" if series.levels else "of a phase"
        yield (Line2D([], [], color=theme.ink, linewidth=_MEASURED),), f"measured, highest {each}\n{figures}"


def _measured(series: TimelineSeries, places: _Places) -> Iterator[tuple[list[float], list[float]]]:
    """Yield a line of measured peaks for every phase: one level per phase, or per block if known. [GiB]"""
    for one in series.measured:
        levels = [level for level in series.levels if one.first <= level.first <= one.last]
        whole = Level(first=one.first, last=one.last, n_bytes=one.n_bytes)
        stairs = [stair for level in levels or [whole] for stair in _stairs(series, level, places)]
        yield [edge for left, right, _ in stairs for edge in (left, right)], [gib for _, _, gib in stairs for _ in range(2)]


def _stairs(series: TimelineSeries, level: Level, places: _Places) -> Iterator[tuple[float, float, float]]:
    """Yield left end, right end and height of a level, after those of the skipped blocks before it."""
    left = places.lefts[level.first]
    if series.instants[level.first].skipped:
        wide = _GAP / max(len(level.skipped), 1)
        for at, n_bytes in enumerate(level.skipped):
            yield left - _GAP + at * wide, left - _GAP + (at + 1) * wide, n_bytes / GIB
    yield left, places.lefts[level.last] + 1.0, level.n_bytes / GIB

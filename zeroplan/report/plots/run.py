"""Draws a step or run from left to right: bands of memory by kind, phases above, the peak marked, collectives below."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from zeroplan.report.palette import LOOKS, Theme, on
from zeroplan.report.plots.frame import SMALL, framed, kind_entries, legend
from zeroplan.report.series.run import RunSeries, Stretch
from zeroplan.units import GIB, MIB

_NEAR = 1.6
"""A capacity above this many times the peak is not drawn, since it would flatten the bands."""
_WIDTH, _HEIGHT = 11.0, 4.6
"""[inches]"""
_LANES = 16
"""The height of the memory axes, in rows of operations."""
_LETTER = 0.0085
"""Width of a letter in a phase's name, as a fraction of the axis."""


def draw_run(figure: Figure, series: RunSeries, theme: Theme) -> None:
    """Draw the run into the figure."""
    framed(figure, series.caption, width=_WIDTH, height=_HEIGHT)
    axes, lanes = _axes(figure, series)
    highest = int(series.n_bytes.sum(axis=0).max())
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    columns = np.arange(series.n_bytes.shape[1])
    near = 0 < series.capacity_bytes <= _NEAR * highest
    top = max(1.22 * highest, 1.1 * series.capacity_bytes if near else 0) / unit
    axes.set(xlim=(0, max(len(columns) - 1, 1)), ylim=(0, top), ylabel=f"{name} per GPU")
    axes.tick_params(bottom=False, labelbottom=False)
    if lanes is not None:
        _lanes(lanes, series, theme)
    _bands(axes, series, theme, unit)
    _phases(axes, series, theme)
    _peak(axes, series, theme, unit, name)
    entries = kind_entries(series.kinds, theme)
    if near:
        line = axes.axhline(series.capacity_bytes / unit, color=theme.warn, linewidth=1.4, linestyle="--", zorder=4)
        entries.insert(0, ((line,), f"{series.limit}: {series.capacity_bytes / unit:,.1f} {name}"))
    legend(axes, entries)


def _axes(figure: Figure, series: RunSeries) -> tuple[Axes, Axes | None]:
    """The memory axes, and below them the collectives' axes if there are any."""
    if not series.calls:
        return figure.subplots(), None
    axes, lanes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [_LANES, len(series.calls)]})
    return axes, lanes


def _lanes(axes: Axes, series: RunSeries, theme: Theme) -> None:
    """Draw a row for each operation, with a mark where a collective begins."""
    names = list(series.calls)
    axes.eventplot(
        [list(series.calls[name]) for name in names], lineoffsets=range(len(names)), linelengths=0.6, linewidths=1.2,
        colors=theme.ink,
    )  # fmt: skip
    axes.set(ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), [name.replace("_", "-") for name in names], fontsize=SMALL)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _bands(axes: Axes, series: RunSeries, theme: Theme, unit: int) -> None:
    bottoms = np.zeros(series.n_bytes.shape[1])
    columns = np.arange(series.n_bytes.shape[1])
    for kind, row in zip(series.kinds, series.n_bytes, strict=True):
        tops, look = bottoms + row / unit, LOOKS[kind]
        axes.fill_between(columns, bottoms, tops, step="post", facecolor=look.colour, edgecolor=theme.paper, linewidth=0.1)
        if look.hatch:
            axes.fill_between(
                columns, bottoms, tops, step="post", facecolor="none", edgecolor=on(look.colour), linewidth=0, hatch=look.hatch
            )
        bottoms = tops


def _phases(axes: Axes, series: RunSeries, theme: Theme) -> None:
    """Name the phases above, with a line where one begins."""
    whole = max(series.n_bytes.shape[1] - 1, 1)
    for one, (name, level) in zip(series.stretches, _phase_names(series.stretches, _LETTER * whole), strict=True):
        axes.annotate(
            name, ((one.first + one.last) / 2, 1.0), (0, 3 + 11 * level), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", fontsize=SMALL, color=theme.ink, annotation_clip=False,
        )  # fmt: skip
        if one.first:
            axes.axvline(one.first, color=theme.faint, linewidth=0.8, linestyle=":", zorder=3)


def _phase_names(stretches: Sequence[Stretch], letter: float) -> list[tuple[str, int]]:
    """Return each phase's name and level: two levels if names overlap in one; only F and B, as in schedules, if they still do."""
    reach = [((one.first + one.last) / 2, len(one.name) * letter / 2) for one in stretches]
    for levels in (1, 2):
        neighbours = zip(reach, reach[levels:], strict=False)
        if all(middle + half <= after - half_after for (middle, half), (after, half_after) in neighbours):
            return [(one.name, at % levels) for at, one in enumerate(stretches)]
    last = len(stretches) - 1  # the last name may extend beyond the axis
    has_room = [at == last or one.last - one.first >= len(one.name) * letter for at, one in enumerate(stretches)]
    return [(one.name if room else one.name[0].upper(), 0) for one, room in zip(stretches, has_room, strict=True)]


def _peak(axes: Axes, series: RunSeries, theme: Theme, unit: int, name: str) -> None:
    """Draw an arrow from the peak's size and place to its column."""
    whole, height = max(series.n_bytes.shape[1] - 1, 1), int(series.n_bytes[:, series.peak].sum()) / unit
    side = "left" if series.peak < whole / 3 else "right" if series.peak > whole * 2 / 3 else "center"
    axes.annotate(
        f"peak {height:,.2f} {name}: {series.where}", (series.peak, height), (series.peak, 0.965 * axes.get_ylim()[1]), ha=side,
        va="top", fontsize=SMALL + 0.5, fontweight="bold", zorder=7, path_effects=[withStroke(linewidth=3, foreground=theme.paper)],
        arrowprops={"arrowstyle": "-|>", "color": theme.ink, "shrinkA": 1, "shrinkB": 0},
    )  # fmt: skip

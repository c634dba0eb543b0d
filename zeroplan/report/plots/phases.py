"""Draws a column of bands per phase of a loop with a line at the GPU's capacity, and beside it the node's host memory."""

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zeroplan.report.palette import Theme
from zeroplan.report.plots.frame import SMALL, UNIT, framed, kind_entries, legend
from zeroplan.report.plots.stages import above, capacity_line, figure_of, stacked
from zeroplan.report.series.parts import kinds_of
from zeroplan.report.series.phases import HostColumn, PhasesSeries
from zeroplan.units import GIB

_UNDER = 20
"""Characters per line below a column."""
_ABOVE = 1.13
"""The axis's height relative to the columns, with room for the sizes above them."""
_EACH = 1.35
"""Width of a column with its surroundings. [inches]"""
_BESIDE = 3.0
"""Width of axis labels and legend together. [inches]"""
_WIDTH = 0.62


def draw_phases(figure: Figure, series: PhasesSeries, theme: Theme) -> None:
    """Draw all phases into the figure, and the node's host memory into a panel of its own."""
    on_gpu, on_host = len(series.columns), len(series.host)
    framed(figure, series.caption, width=_BESIDE + _EACH * (on_gpu + on_host), height=4.6)
    if on_host:
        beside, axes = figure.subplots(1, 2, width_ratios=(on_host, on_gpu))
        _host(beside, series.host, theme)
    else:
        axes = figure.subplots()
    heights = [one.needed_bytes / GIB for one in series.columns]
    top = _ABOVE * max([*heights, *([] if series.capacity_bytes is None else [series.capacity_bytes / GIB])])
    axes.set(xlim=(-0.5, on_gpu - 0.5), ylim=(0, top), ylabel=UNIT)
    for at, (one, height) in enumerate(zip(series.columns, heights, strict=True)):
        stacked(axes, at, one.parts, top, theme)
        above(axes, at, one.needed_bytes, one.verdict, height, theme)
    _named(axes, [f"{one.name}\npeak: {one.moment}" for one in series.columns])
    kinds = kinds_of(tuple(one.parts for one in series.columns))
    legend(axes, [*capacity_line(axes, series.capacity_bytes, theme), *kind_entries(kinds, theme)])


def _host(axes: Axes, host: tuple[HostColumn, ...], theme: Theme) -> None:
    top = _ABOVE * max(1.0, *(one.n_bytes / GIB for one in host))
    axes.set(xlim=(-0.5, len(host) - 0.5), ylim=(0, top), ylabel="GiB of host memory per node")
    for at, one in enumerate(host):
        tall = one.n_bytes / GIB
        axes.bar(at, tall, _WIDTH, color=theme.faint, edgecolor=theme.paper)
        axes.annotate(f"{figure_of(one.n_bytes)} GiB", (at, tall), (0, 3), textcoords="offset points", ha="center",
                      fontsize=SMALL + 0.5, fontweight="bold", color=theme.ink)  # fmt: skip
    _named(axes, [f"{one.when}\n{one.processes} process{'es' * (one.processes > 1)}" for one in host])


def _named(axes: Axes, names: list[str]) -> None:
    wrapped = ["\n".join(line for part in name.split("\n") for line in textwrap.wrap(part, _UNDER)) for name in names]
    axes.set_xticks(range(len(names)), wrapped, fontsize=SMALL - 0.5)
    axes.tick_params(axis="x", length=0)

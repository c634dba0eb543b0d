"""Columns of bands, one per case, and what the GPU has across them."""

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from zeroplan.report.palette import LOOKS, Theme, on
from zeroplan.report.plots.frame import SMALL, LegendEntry, framed, kind_entries, legend
from zeroplan.report.plots.stages import READABLE, band
from zeroplan.report.series.parts import kinds_of
from zeroplan.report.series.stacks import Stack, StacksSeries
from zeroplan.units import GIB, MIB

_UNDER = 84
"""Signs below all columns together."""
_ABOVE = 1.13
_SMALL_GIB = 1.0
"""Where all columns are lower, the axis is in MiB."""


def draw_stacks(figure: Figure, series: StacksSeries, theme: Theme) -> None:
    """Draw all columns into the figure."""
    framed(figure, series.caption, width=8.0, height=4.2)
    axes = figure.subplots()
    heights = [stack.total_bytes for stack in series.stacks]
    heights += [] if series.capacity_bytes is None else [series.capacity_bytes]
    unit, name = (GIB, "GiB") if max(heights) >= _SMALL_GIB * GIB else (MIB, "MiB")
    top = max(heights) / unit
    axes.set(xlim=(-0.5, len(series.stacks) - 0.5), ylim=(0, top * _ABOVE), ylabel=f"{name} per GPU")
    for at, stack in enumerate(series.stacks):
        _column(axes, at, stack, (unit, top, name), theme)
    signs = _UNDER // len(series.stacks)
    axes.set_xticks(range(len(series.stacks)), ["\n".join(textwrap.wrap(stack.name, signs)) for stack in series.stacks])
    axes.tick_params(axis="x", length=0)
    entries = kind_entries(kinds_of(tuple(stack.parts for stack in series.stacks)), theme)
    legend(axes, [*_capacity(axes, series, (unit, name), theme), *entries])


def _column(axes: Axes, at: int, stack: Stack, scale: tuple[int, float, str], theme: Theme) -> None:
    (unit, top, name), bottom = scale, 0.0
    for part in stack.parts:
        tall, colour = part.n_bytes / unit, LOOKS[part.what].colour
        band(axes, at, bottom, tall, part.what, theme)
        if tall > READABLE * top:
            axes.text(at, bottom + tall / 2, f"{tall:,.1f}", ha="center", va="center", fontsize=SMALL, color=on(colour), zorder=5,
                      bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0})  # fmt: skip
        bottom += tall
    short = stack.verdict == "does not fit"
    verdict = "" if stack.verdict == "unknown" else f"\n{stack.verdict}"
    axes.annotate(
        f"{bottom:,.1f} {name}{verdict}", (at, bottom), (0, 3), textcoords="offset points", ha="center", va="bottom",
        fontsize=SMALL + 0.5, fontweight="bold", color=theme.warn if short else theme.ink, zorder=6,
        path_effects=[withStroke(linewidth=3, foreground=theme.paper)],
    )  # fmt: skip


def _capacity(axes: Axes, series: StacksSeries, scale: tuple[int, str], theme: Theme) -> list[LegendEntry]:
    if series.capacity_bytes is None:
        return []
    height = series.capacity_bytes / scale[0]
    line = axes.axhline(height, color=theme.warn, linewidth=1.4, linestyle="--", zorder=4)
    return [((line,), f"the GPU's {height:.1f} {scale[1]}")]

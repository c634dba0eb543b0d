"""Draws a column of bands per case, and a line at the GPU's memory."""

import textwrap
from typing import NamedTuple

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
"""Characters per line below all columns together."""
_ABOVE = 1.15
_WORDS = 0.04
"""Height of a line of text above a column, as a fraction of the axis."""
_BYTES = {"GiB": "2³⁰", "MiB": "2²⁰"}


class _Scale(NamedTuple):
    """The axis's unit in bytes, its name, and in that unit the axis's top and the GPU's memory."""

    unit: int
    name: str
    top: float
    capacity: float | None


def draw_stacks(figure: Figure, series: StacksSeries, theme: Theme) -> None:
    """Draw all columns into the figure."""
    framed(figure, series.caption, width=8.0, height=4.2)
    axes, scale = figure.subplots(), _scale(series)
    axes.set(
        xlim=(-0.5, len(series.stacks) - 0.5),
        ylim=(0, scale.top),
        ylabel=f"{scale.name} per GPU (1 {scale.name} = {_BYTES[scale.name]} bytes)",
    )
    for at, stack in enumerate(series.stacks):
        _column(axes, at, stack, scale, theme)
    signs = _UNDER // len(series.stacks)
    axes.set_xticks(range(len(series.stacks)), ["\n".join(textwrap.wrap(stack.name, signs)) for stack in series.stacks])
    axes.tick_params(axis="x", length=0)
    entries = kind_entries(kinds_of(tuple(stack.parts for stack in series.stacks)), theme)
    legend(axes, [*_capacity(axes, scale, theme), *entries])


def _scale(series: StacksSeries) -> _Scale:
    """The axis in GiB; in MiB if all columns are below a GiB."""
    capacity = series.capacity_bytes
    highest = max([*(stack.total_bytes for stack in series.stacks), capacity or 0])
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    return _Scale(unit, name, highest / unit * _ABOVE, None if capacity is None else capacity / unit)


def _column(axes: Axes, at: int, stack: Stack, scale: _Scale, theme: Theme) -> None:
    bottom = 0.0
    for part in stack.parts:
        tall, colour = part.n_bytes / scale.unit, LOOKS[part.what].colour
        band(axes, at, bottom, tall, part.what, theme)
        if tall > READABLE * scale.top:
            axes.text(at, bottom + tall / 2, f"{tall:,.1f}", ha="center", va="center", fontsize=SMALL, color=on(colour), zorder=5,
                      bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0})  # fmt: skip
        bottom += tall
    short = stack.verdict == "does not fit"
    words = [f"{bottom:,.1f} {scale.name}", *([] if stack.verdict == "unknown" else [stack.verdict])]
    axes.annotate(
        "\n".join(words), (at, _clear_of_the_line(bottom, len(words), scale)), (0, 3), textcoords="offset points",
        ha="center", va="bottom", fontsize=SMALL + 0.5, fontweight="bold", color=theme.warn if short else theme.ink, zorder=6,
        path_effects=[withStroke(linewidth=3, foreground=theme.paper)],
    )  # fmt: skip


def _clear_of_the_line(height: float, words: int, scale: _Scale) -> float:
    """The height at which text above a column begins: above the GPU's line if that would cross the text."""
    line = scale.capacity
    return line if line is not None and height < line < height + words * _WORDS * scale.top else height


def _capacity(axes: Axes, scale: _Scale, theme: Theme) -> list[LegendEntry]:
    if scale.capacity is None:
        return []
    line = axes.axhline(scale.capacity, color=theme.warn, linewidth=1.4, linestyle="--", zorder=4)
    return [((line,), f"the GPU's {scale.capacity:.1f} {scale.name}")]

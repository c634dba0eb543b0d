"""Draws layouts by memory and speed: a marker for each, filled if it fits, the Pareto front joined, the best one named."""

import textwrap
from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from zeroplan.report.palette import ENGINES, Theme
from zeroplan.report.plots.frame import UNIT, LegendEntry, framed, legend
from zeroplan.report.series.pareto import Named, ParetoSeries, Spot
from zeroplan.units import GIB

_BESIDE = 34
"""Characters per line of the legend."""
_SIZE = 5.5
_LETTERS = "ABC"
_BELOW = 0.7
"""The speed axis begins at this fraction of the slowest layout, or at 0."""
_FACES: dict[str, str] = {"fits": "filled", "tight": "hollow", "does not fit": "small"}


def draw_pareto(figure: Figure, series: ParetoSeries, theme: Theme) -> None:
    """Draw every layout into the figure."""
    framed(figure, series.caption, width=8.5, height=4.6)
    axes = figure.subplots()
    for engine in ENGINES:
        for verdict in _FACES:
            _marks(axes, [spot for spot in series.spots if (spot.engine, spot.verdict) == (engine, verdict)], theme)
    front = sorted((one.needed_bytes / GIB, one.tokens_per_s) for one in series.front)
    axes.plot([gib for gib, _ in front], [rate for _, rate in front], color=theme.ink, linewidth=1.2, zorder=4,
              drawstyle="steps-post")  # fmt: skip
    axes.plot([gib for gib, _ in front], [rate for _, rate in front], "o", color="none", markeredgecolor=theme.ink, markersize=9,
              markeredgewidth=1.1, zorder=5)  # fmt: skip
    for letter, one in zip(_LETTERS, series.knees, strict=False):
        axes.annotate(letter, (one.needed_bytes / GIB, one.tokens_per_s), (-9, 6), textcoords="offset points", color=theme.ink,
                      fontsize=9, fontweight="bold", ha="right", zorder=6)  # fmt: skip
    if series.best is not None:
        axes.plot([series.best.needed_bytes / GIB], [series.best.tokens_per_s], "*", **_star(theme), zorder=6)
    largest = max([series.capacity_bytes, *(spot.needed_bytes for spot in series.spots)]) / GIB
    axes.set(xlim=(0, 1.04 * largest), ylim=_rates(series), xlabel=UNIT, ylabel="tokens per second and GPU")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.grid(color=theme.faint, alpha=0.25, linewidth=0.6)
    legend(axes, list(_entries(axes, series, theme)))


def _rates(series: ParetoSeries) -> tuple[float, float]:
    """The limits of the speed axis: it begins at 0, or a little below the slowest layout if all are similar."""
    rates = [spot.tokens_per_s for spot in series.spots]
    low, high = min(rates, default=0.0), max(rates, default=1.0)
    return (_BELOW * low if low > high / 2 else 0.0), high * 1.04


def _star(theme: Theme) -> dict[str, Any]:
    return {"markersize": 15, "color": theme.ink, "markeredgecolor": theme.paper}


def _marks(axes: Axes, spots: list[Spot], theme: Theme) -> None:
    if spots:
        places = [spot.needed_bytes / GIB for spot in spots], [spot.tokens_per_s for spot in spots]
        axes.plot(*places, linestyle="none", **_look(spots[0].engine, spots[0].verdict, theme))


def _look(engine: str, verdict: str, theme: Theme) -> dict[str, Any]:
    """Marker style: filled if the layout fits, hollow if tight, small and faint if it does not fit."""
    look, face = ENGINES[engine], _FACES[verdict]
    colour = theme.faint if face == "small" else look.colour
    return {
        "marker": look.mark, "markersize": 3.0 if face == "small" else _SIZE, "markeredgecolor": colour, "markeredgewidth": 0.8,
        "markerfacecolor": "none" if face != "filled" else colour, "alpha": 0.75, "zorder": 2 if face == "small" else 3,
    }  # fmt: skip


def _entries(axes: Axes, series: ParetoSeries, theme: Theme) -> Iterator[LegendEntry]:
    gib = series.capacity_bytes / GIB
    yield (axes.axvline(gib, color=theme.warn, linewidth=1.4, linestyle="--", zorder=1),), f"the GPU's {gib:.1f} GiB"
    if series.best is not None:
        star = Line2D([], [], linestyle="none", marker="*", **_star(theme))
        yield (star,), _words(f"best for {series.objective}", series.best)
        ring = Line2D([], [], color=theme.ink, linewidth=1.2, marker="o", markerfacecolor="none", markersize=8)
        yield (ring,), f"the front: nothing that fits is\nboth quicker and smaller ({len(series.front):,})"
    for letter, one in zip(_LETTERS, series.knees, strict=False):
        yield (Line2D([], [], linestyle="none", marker=f"${letter}$", color=theme.ink, markersize=7),), _words("a knee", one)
    for engine in ENGINES:
        counts = {
            face: sum(spot.layouts for spot in series.spots if (spot.engine, spot.verdict) == (engine, face)) for face in _FACES
        }
        for verdict, count in counts.items():
            if count:
                mark = Line2D([], [], linestyle="none", **_look(engine, verdict, theme))
                yield (mark,), f"{engine}, {verdict} ({count:,})"


def _words(what: str, one: Named) -> str:
    figures = f"{one.needed_bytes / GIB:,.1f} GiB, {one.tokens_per_s:,.0f} tokens/s"
    words = one.words.replace(" x ", "\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}")  # "1 x 32" stays on one line
    return "\n".join((f"{what}: {figures}", *textwrap.wrap(words, _BESIDE)))

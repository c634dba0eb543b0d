"""Draws predicted against measured peaks, and the errors: their distribution for many runs, each run by name for a few."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator

from zeroplan.report.comparison import percent
from zeroplan.report.palette import ENGINES, Theme
from zeroplan.report.plots.frame import SMALL, framed
from zeroplan.report.series.validation import ValidationSeries
from zeroplan.units import GIB

_LINES = ("-", "--", ":", "-.")
_LEAST = 1e-7
"""Smaller errors, including 0, are drawn at this value."""
_TWO_DECADES = 100
_A_FEW = 16
"""Up to this many runs are drawn by name."""


def draw_validation(figure: Figure, series: ValidationSeries, theme: Theme) -> None:
    """Draw all runs into the figure."""
    named = len(series.runs) <= _A_FEW
    framed(figure, series.caption, width=10.5, height=4.2)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _scatter(left, series, theme)
    (_by_name if named else _distribution)(right, series, theme)


def _scatter(axes: Axes, series: ValidationSeries, theme: Theme) -> None:
    for engine, look in ENGINES.items():
        some = [run for run in series.runs if run.engine == engine]
        if some:
            axes.plot(
                [run.measured_bytes / GIB for run in some], [run.predicted_bytes / GIB for run in some], look.mark,
                color=look.colour, markersize=4.5, alpha=0.7, markeredgewidth=0, label=f"{engine} ({len(some):,})",
            )  # fmt: skip
    peaks = [run.measured_bytes / GIB for run in series.runs] + [run.predicted_bytes / GIB for run in series.runs]
    ends = [min(peaks) / 1.3, max(peaks) * 1.3]
    axes.plot(ends, ends, color=theme.faint, linewidth=0.8, zorder=0, label="equal")
    axes.set(xscale="log", yscale="log", xlabel="peak measured, GiB per GPU", ylabel="peak predicted, GiB per GPU")
    for axis in (axes.xaxis, axes.yaxis):
        if ends[1] < _TWO_DECADES * ends[0]:
            axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(FuncFormatter(lambda _value, _position: ""))
    axes.set_title("Predicted against measured", loc="left", fontsize=SMALL + 1, pad=14)
    axes.legend()


def _distribution(axes: Axes, series: ValidationSeries, theme: Theme) -> None:
    """Draw, for each engine and stage, the share of runs with at most a given error."""
    for number, group in enumerate(sorted({run.group for run in series.runs})):
        some = sorted(max(abs(run.error), _LEAST) * 100 for run in series.runs if run.group == group)
        shares = [rank / len(some) * 100 for rank in range(1, len(some) + 1)]
        colour, dashes = ENGINES[group.partition(" ")[0]].colour, _LINES[number % len(_LINES)]
        axes.step(some, shares, where="post", color=colour, linestyle=dashes, linewidth=1.4, label=group)
    for limit in series.limits:
        axes.axvline(limit * 100, color=theme.faint, linewidth=0.8, zorder=0)
        axes.annotate(
            f"{limit * 100:g} %", (limit * 100, 103), ha="center", annotation_clip=False, color=theme.faint, fontsize=SMALL
        )
    most = max([20.0, *(abs(run.error) * 200 for run in series.runs)])
    axes.set(
        xscale="log",
        xlim=(_LEAST * 100, most),
        ylim=(0, 102),
        xlabel="error of the peak, %",
        ylabel="runs with no larger error, %",
    )
    axes.set_title("How large the errors are", loc="left", fontsize=SMALL + 1, pad=14)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def _by_name(axes: Axes, series: ValidationSeries, theme: Theme) -> None:
    """Draw each run's error as a line from 0, and the limits on both sides."""
    for at, run in enumerate(series.runs):
        look = ENGINES[run.engine]
        axes.plot([0, run.error * 100], [at, at], color=look.colour, linewidth=1.4)
        axes.plot([run.error * 100], [at], look.mark, color=look.colour, markersize=5)
        axes.annotate(
            percent(run.error), (run.error * 100, at), (0, 5), textcoords="offset points", ha="center", fontsize=SMALL, zorder=5,
            path_effects=[withStroke(linewidth=2.5, foreground=theme.paper)],
        )  # fmt: skip
    axes.axvline(0, color=theme.ink, linewidth=0.8)
    for limit in series.limits:
        for side in (-limit, limit):
            axes.axvline(side * 100, color=theme.warn, linewidth=1.0, linestyle="--")
    reach = 130 * max([*series.limits, *(abs(run.error) for run in series.runs)])
    axes.set(
        xlim=(-reach, reach),
        ylim=(len(series.runs) - 0.4, -0.8),
        xlabel="error of the peak, %; right of 0 predicted is more than measured",
    )
    axes.set_yticks(range(len(series.runs)), [run.name for run in series.runs], fontsize=SMALL)
    axes.set_title(f"Errors; dashed: {_limits(series)}", loc="left", fontsize=SMALL + 1, pad=14)


def _limits(series: ValidationSeries) -> str:
    return ", ".join(f"{limit * 100:g} %" for limit in series.limits)

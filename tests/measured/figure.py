"""The figure of the validation page: predicted against measured, and how large the errors are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.measured.errors import EVERY, MOST, Held, engine_of
from zeroplan.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

#: Okabe and Ito's colours, told apart by the colour-blind, with a mark each for print.
_LOOKS = {
    "ddp": ("#000000", "o"), "fsdp2": ("#0072B2", "s"), "deepspeed": ("#D55E00", "^"),
}  # fmt: skip
_LINES = ("-", "--", ":", "-.")
_LEAST = 1e-7
"""Smaller errors, and none, are drawn here."""


def draw(all_held: list[Held], path: Path) -> None:
    """Draw all jobs into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _scatter(left, all_held)
    _errors(right, all_held)
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def _scatter(axes: Axes, all_held: list[Held]) -> None:
    for engine, (colour, mark) in _LOOKS.items():
        some = [one.found.peak for one in all_held if one.measured.job.recipe.engine == engine]
        measured, predicted = [one.measured / GIB for one in some], [one.predicted / GIB for one in some]
        axes.plot(
            measured, predicted, mark, color=colour, markersize=4, alpha=0.6, markeredgewidth=0, label=f"{engine} ({len(some)})"
        )
    ends = [min(one.found.peak.measured for one in all_held) / GIB, max(one.found.peak.measured for one in all_held) / GIB]
    axes.plot(ends, ends, color="#999999", linewidth=0.8, zorder=0, label="equal")
    axes.set(xscale="log", yscale="log", xlabel="peak measured, GiB per GPU", ylabel="peak predicted, GiB per GPU")
    axes.set_title("Predicted against measured", loc="left", pad=14)
    axes.legend(frameon=False)


def _errors(axes: Axes, all_held: list[Held]) -> None:
    """Of each engine and stage the share of jobs whose error is no larger."""
    names = sorted({engine_of(one.measured.job) for one in all_held})
    for number, name in enumerate(names):
        some = sorted(max(abs(one.error), _LEAST) * 100 for one in all_held if engine_of(one.measured.job) == name)
        shares = [rank / len(some) * 100 for rank in range(1, len(some) + 1)]
        colour = _LOOKS[name.partition(" ")[0]][0]
        axes.step(some, shares, where="post", color=colour, linestyle=_LINES[number % len(_LINES)], linewidth=1.4, label=name)
    for limit in (MOST, EVERY):
        axes.axvline(limit * 100, color="#999999", linewidth=0.8, zorder=0)
        axes.annotate(f"{limit * 100:g} %", (limit * 100, 103), ha="center", annotation_clip=False, color="#555555", fontsize=8)
    axes.set(
        xscale="log",
        xlim=(_LEAST * 100, 20),
        ylim=(0, 102),
        xlabel="error of the peak, %",
        ylabel="jobs with no larger error, %",
    )
    axes.set_title("How large the errors are", loc="left", pad=14)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))

"""What ``verify`` and ``compare`` print of a comparison: one rendering for one record or several."""

from typing import NamedTuple

from zeroplan.cli import json_text
from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.measurement import Measurement
from zeroplan.report.comparison import comparison_markdown, comparison_payload, comparison_text, rank_line, summary_line

SCHEMA_VERSION = 1


class Held(NamedTuple):
    """A measurement and what the estimate makes of its job."""

    measurement: Measurement
    comparison: Comparison

    @classmethod
    def of(cls, measurement: Measurement) -> "Held":
        """Estimate the job of a measurement and hold the two against each other."""
        return cls(measurement, compare_with_estimate(measurement))


def judged(held: tuple[Held, ...]) -> tuple[Held, ...]:
    """Of each run, the record of the fullest rank, which the estimate is about.

    Ranks of one run are told by job, workload and backend. Engines that hand out whole tensors or leave the last rank short
    do not fill ranks alike.
    """
    fullest: dict[str, Held] = {}
    for one in held:
        run = repr((one.measurement.job, one.measurement.backend, one.measurement.process_group, one.measurement.workload))
        if run not in fullest or one.comparison.peak.measured > fullest[run].comparison.peak.measured:
            fullest[run] = one
    return tuple(fullest.values())


def printed(held: tuple[Held, ...], *, tolerance: float, as_json: bool, as_markdown: bool = False) -> str:
    """Return the comparison of each run, a line for its other ranks, and for several runs a line that sums them up."""
    if as_json:
        rows = [comparison_payload(one.comparison, one.measurement, tolerance=tolerance) for one in held]
        return json_text({"schema_version": SCHEMA_VERSION, "comparisons": rows})
    rendering = comparison_markdown if as_markdown else comparison_text
    chosen = judged(held)
    parts = [rendering(one.comparison, one.measurement, tolerance=tolerance) for one in chosen]
    others = [rank_line(one.comparison, one.measurement) for one in held if one not in chosen]
    if others:
        parts.append("\n".join(("Other ranks of these runs (the estimate is of the fullest rank)", *others)))
    if len(chosen) > 1:
        parts.append(summary_line(tuple(one.comparison for one in chosen), tolerance=tolerance))
    return "\n\n".join(parts)

"""What ``verify`` and ``compare`` print of a comparison: one rendering for one record or several."""

import json
from typing import NamedTuple

from zeroplan.comparison import Comparison, compare
from zeroplan.estimator import estimate
from zeroplan.measurement import Measurement
from zeroplan.report.comparison import comparison_markdown, comparison_payload, comparison_text, summary_line

SCHEMA_VERSION = 1


class Held(NamedTuple):
    """A measurement and what the estimate makes of its job."""

    measurement: Measurement
    comparison: Comparison

    @classmethod
    def of(cls, measurement: Measurement) -> "Held":
        """Estimate the job of a measurement and hold the two against each other."""
        return cls(measurement, compare(estimate(measurement.job), measurement))


def printed(held: tuple[Held, ...], *, tolerance: float, as_json: bool, as_markdown: bool = False) -> str:
    """Return all comparisons, and for several a line that sums them up."""
    if as_json:
        rows = [comparison_payload(one.comparison, one.measurement, tolerance=tolerance) for one in held]
        return json.dumps({"schema_version": SCHEMA_VERSION, "comparisons": rows}, indent=2, ensure_ascii=False)
    rendering = comparison_markdown if as_markdown else comparison_text
    parts = [rendering(one.comparison, one.measurement, tolerance=tolerance) for one in held]
    if len(held) > 1:
        parts.append(summary_line(tuple(one.comparison for one in held), tolerance=tolerance))
    return "\n\n".join(parts)

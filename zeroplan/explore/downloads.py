"""The files that users download from the page: the report, and pictures of the charts."""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.explore.answers import command, resolved_of
from zeroplan.explore.report import report_html
from zeroplan.report.series.scaling import scaling
from zeroplan.report.series.stages import stages
from zeroplan.report.series.step import step
from zeroplan.report.series.timeline import timeline
from zeroplan.spec.job import JobSpec

if TYPE_CHECKING:
    from zeroplan.report.plots.inline import Series

#: matplotlib's settings are global, so only one picture is drawn at a time.
_ONE = threading.Lock()


def report_of(fields: Mapping[str, str]) -> bytes:
    """Return the job of the controls as one HTML file, as ``zeroplan report`` writes it."""
    return report_html(resolved_of(fields), command(fields)).encode()


def picture_of(fields: Mapping[str, str]) -> bytes:
    """Return a picture of the controls' job as SVG, as ``zeroplan plot`` draws it; the key ``picture`` selects the kind."""
    from zeroplan.report.plots.inline import svg  # noqa: PLC0415  the page starts without matplotlib

    kind = fields.get("picture", "")
    if kind not in PICTURES:
        raise SpecError(f"the page has no picture {kind!r}; it has {', '.join(PICTURES)}")
    job = resolved_of({name: text for name, text in fields.items() if name != "picture"}).job
    with _ONE:
        return svg(PICTURES[kind](job))


def _timeline(job: JobSpec) -> "Series":
    """The step request by request; if zeroplan does not know its requests, moment by moment."""
    from zeroplan.report.series.run import run_of_step  # noqa: PLC0415  it needs NumPy, which a report does not

    moments = timeline(job)
    found = step(estimate(job), moments)
    return run_of_step(found) if found.requests else moments


#: The charts that can be downloaded as pictures, by name.
PICTURES: "dict[str, Callable[[JobSpec], Series]]" = {"stages": stages, "timeline": _timeline, "scaling": scaling}

"""The output of ``verify`` and ``compare``: one run in full, or many in a table."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.cli import json_text
from zeroplan.cli.case_table import Row, table, table_markdown
from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.measurement import Measurement
from zeroplan.records import files_of, is_results, read_record
from zeroplan.report.comparison import comparison_markdown, comparison_payload, comparison_text, rank_line

if TYPE_CHECKING:
    from zeroplan.verify.cases.results import Result

SCHEMA_VERSION = 1


class Held(NamedTuple):
    """A measurement and its comparison with the estimate of its job."""

    measurement: Measurement
    comparison: Comparison
    name: str = ""
    """The name of its file."""

    @classmethod
    def of(cls, measurement: Measurement, name: str = "") -> "Held":
        """Compare a measurement with the estimate of its job."""
        return cls(measurement, compare_with_estimate(measurement), name)

    def row(self, tolerance: float) -> Row:
        """The row in the table."""
        return Row(self.name, self.comparison.peak.predicted, self.comparison, self.comparison.agrees(tolerance))


class ComparedFiles(NamedTuple):
    """The content of some files: records of single runs, and the last result of each case of a matrix."""

    held: tuple[Held, ...]
    results: "tuple[Result, ...]"

    @property
    def measured(self) -> tuple[Held, ...]:
        """The results with a record, compared with the estimates of their jobs."""
        return tuple(Held.of(one.record, one.name) for one in self.results if one.record is not None)


def read_files(records: list[str]) -> ComparedFiles:
    """Return the records and results at the paths; raises :class:`~zeroplan.errors.SpecError` for the first other file."""
    held: list[Held] = []
    results: list[Result] = []
    for path in (file for record in records for file in files_of(Path(record))):
        if is_results(path):
            from zeroplan.verify.cases.results import last_results  # noqa: PLC0415  only a matrix's results need it

            results += last_results(path)
        else:
            held.append(Held.of(read_record(path), path.stem))
    return ComparedFiles(tuple(held), tuple(results))


def judged(held: tuple[Held, ...]) -> tuple[Held, ...]:
    """Return the record of each run's fullest rank, which the estimate describes.

    Records with the same job, workload and backend are ranks of one run. Ranks differ if an engine assigns whole tensors to them
    or gives the last one less.
    """
    fullest: dict[str, Held] = {}
    for one in held:
        run = repr((one.measurement.job, one.measurement.backend, one.measurement.process_group, one.measurement.workload))
        if run not in fullest or one.comparison.peak.measured > fullest[run].comparison.peak.measured:
            fullest[run] = one
    return tuple(fullest.values())


def rows_of(found: ComparedFiles, *, tolerance: float) -> list[Row]:
    """Return a row for each run and each case of a matrix."""
    runs = [one.row(tolerance) for one in judged(found.held)]
    if not found.results:
        return runs
    from zeroplan.verify.cases.verdicts import judged as judged_result  # noqa: PLC0415  only a matrix's results need it

    return [*runs, *(Row.of(judged_result(one, tolerance=tolerance)) for one in found.results)]


def printed(held: tuple[Held, ...], *, tolerance: float, as_json: bool) -> str:
    """Return the comparison of each run in full, or as JSON."""
    return (
        as_data(ComparedFiles(held, ()), tolerance=tolerance)
        if as_json
        else in_full(ComparedFiles(held, ()), tolerance=tolerance)
    )


def printed_of_many(found: ComparedFiles, rows: list[Row], *, tolerance: float, verbose: bool, as_markdown: bool) -> str:
    """Return one run in full, or several as a table; ``verbose`` adds each run in full above the table."""
    parts, alone = [], len(rows) == 1 and rows[0].comparison is not None
    if alone or verbose:
        parts.append(in_full(found, tolerance=tolerance, as_markdown=as_markdown))
    if not alone:
        others = len(found.held) + len(found.results) - len(rows)
        parts.append(_tabled(rows, others, tolerance=tolerance, as_markdown=as_markdown))
    return "\n\n".join(part for part in parts if part)


def in_full(found: ComparedFiles, *, tolerance: float, as_markdown: bool = False) -> str:
    """Return every run's comparison in full, and one line for each of its other ranks."""
    rendering = comparison_markdown if as_markdown else comparison_text
    chosen = judged(found.held)
    shown = (*chosen, *found.measured)
    parts = [rendering(one.comparison, one.measurement, tolerance=tolerance) for one in shown]
    others = [rank_line(one.comparison, one.measurement) for one in found.held if one not in chosen]
    if others:
        parts.append("\n".join(("Other ranks of these runs (the estimate is of the fullest rank)", *others)))
    return "\n\n".join(parts)


def _tabled(rows: list[Row], others: int, *, tolerance: float, as_markdown: bool) -> str:
    """Return the table and summary, with a remark on the ``others`` records of further ranks."""
    text = (table_markdown if as_markdown else table)(rows, tolerance=tolerance)
    if not others:
        return text
    ranks = "1 record is of another rank" if others == 1 else f"{others:,} records are of other ranks"
    remark = f"{ranks} of these runs; each line has the fullest rank, which the estimate is of."
    return f"{text}\n{'- ' if as_markdown else ''}{remark}"


def as_data(found: ComparedFiles, *, tolerance: float) -> str:
    """Return every comparison as JSON, and the cases of a matrix without a record."""
    every = (*found.held, *found.measured)
    rows = [{"name": one.name, **comparison_payload(one.comparison, one.measurement, tolerance=tolerance)} for one in every]
    without = [{"name": one.name, "outcome": one.outcome, "says": one.says} for one in found.results if one.record is None]
    return json_text({"schema_version": SCHEMA_VERSION, "comparisons": rows, "without_record": without})

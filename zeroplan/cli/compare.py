"""``zeroplan compare``: does the estimate agree with these records? Needs no torch."""

from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import CANNOT_RUN, DISAGREES
from zeroplan.cli.flags import TOLERANCE, AsJson, AsMarkdown, Tolerance, parse_tolerance, switch

if TYPE_CHECKING:
    from zeroplan.cli.case_table import Row

#: Outcomes of cases that neither confirm nor contradict the estimate.
UNSETTLED = ("refused", "failed")


Records = Annotated[
    list[str],
    typer.Argument(
        metavar="RECORD...",
        help="Records or matrix results from `zeroplan verify --record-dir`, or folders of them.",
    ),
]


def compare_command(
    records: Records,
    *,
    tolerance: Tolerance = TOLERANCE,
    verbose: Annotated[bool, switch("--verbose", "Print each of several runs in full.", short="-v")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> int:
    """Compare records with the estimates of their jobs. Exit code 3: one differs by more than --tolerance."""
    from zeroplan.cli.comparing import as_data, printed_of_many, read_files, rows_of  # noqa: PLC0415  only this command

    limit = parse_tolerance(tolerance)
    found = read_files(records)
    rows = rows_of(found, tolerance=limit)
    if as_json:
        typer.echo(as_data(found, tolerance=limit))
    else:
        typer.echo(printed_of_many(found, rows, tolerance=limit, verbose=verbose, as_markdown=as_markdown))
    return exit_code(rows)


def exit_code(rows: "list[Row]") -> int:
    """3 if a case disagrees, else 4 if a case was refused or failed, else 0; the same as for ``verify --matrix``."""
    if any(row.agrees is False for row in rows):
        return DISAGREES
    return CANNOT_RUN if any(row.outcome in UNSETTLED for row in rows) else 0

"""``zeroplan compare``: does the estimate agree with these records? Needs no torch."""

from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import CANNOT_RUN, DISAGREES
from zeroplan.errors import SpecError
from zeroplan.units import parse_fraction

if TYPE_CHECKING:
    from zeroplan.cli.case_table import Row

TOLERANCE = "0.02"
#: Outcomes of a case that says nothing of the estimate.
UNSETTLED = ("refused", "failed")


def compare_command(
    records: Annotated[
        list[str],
        typer.Argument(
            metavar="RECORD...",
            help="Records or results of a matrix that `zeroplan verify --record-dir` wrote, or folders of them.",
        ),
    ],
    *,
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="FRACTION", help="How far peak, held bytes and collectives may be apart.")
    ] = TOLERANCE,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Each run in full, where there are several.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Versioned JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Markdown.")] = False,
) -> int:
    """Compare records with the estimates of their jobs: one in full, several in a table; exit with 3 beyond the tolerance."""
    from zeroplan.cli.comparing import as_data, given, printed_of_many, rows_of  # noqa: PLC0415  only this command

    limit = parse_tolerance(tolerance)
    found = given(records)
    rows = rows_of(found, tolerance=limit)
    if as_json:
        typer.echo(as_data(found, tolerance=limit))
    else:
        typer.echo(printed_of_many(found, rows, tolerance=limit, verbose=verbose, as_markdown=as_markdown))
    return exit_code(rows)


def exit_code(rows: "list[Row]") -> int:
    """3 where a case disagrees, 4 where none does and one was refused or failed, else 0: as ``verify --matrix`` exits."""
    if any(row.agrees is False for row in rows):
        return DISAGREES
    return CANNOT_RUN if any(row.outcome in UNSETTLED for row in rows) else 0


def parse_tolerance(text: str) -> float:
    """Read a tolerance as a fraction: ``0.02``, or ``2%``."""
    value = parse_fraction(text)
    if value is None or not 0 <= value <= 1:
        raise SpecError(f"--tolerance {text!r} is not a fraction from 0 to 1; write 0.02 or 2%")
    return value

"""``zeroplan compare``: does the estimate agree with these records? Needs no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import DISAGREES
from zeroplan.errors import SpecError
from zeroplan.units import parse_fraction

if TYPE_CHECKING:
    from zeroplan.measurement import Measurement

TOLERANCE = "0.02"


def compare_command(
    records: Annotated[
        list[str],
        typer.Argument(metavar="RECORD...", help="Records that `zeroplan verify --record-dir` wrote, or folders of them."),
    ],
    *,
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="FRACTION", help="How far peak, held bytes and collectives may be apart.")
    ] = TOLERANCE,
    as_json: Annotated[bool, typer.Option("--json", help="Versioned JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Markdown.")] = False,
) -> int:
    """Hold the estimate of each record's job against what the record measured; exit with 3 beyond the tolerance."""
    from zeroplan.cli.comparing import Held, judged, printed  # noqa: PLC0415  the other commands need none of it

    limit = parse_tolerance(tolerance)
    held = tuple(Held.of(measured) for record in records for measured in _records(Path(record)))
    typer.echo(printed(held, tolerance=limit, as_json=as_json, as_markdown=as_markdown))
    return 0 if all(one.comparison.agrees(limit) for one in judged(held)) else DISAGREES


def _records(path: Path) -> "list[Measurement]":
    """The records that a path stands for: those of a folder, of a matrix's results, or the file itself."""
    if path.suffix == ".jsonl" and not path.is_dir():
        from zeroplan.verify.cases.results import read_results  # noqa: PLC0415

        return [one.record for one in read_results(path) if one.record is not None]
    from zeroplan.records import read_record, record_paths  # noqa: PLC0415

    return [read_record(one) for one in record_paths(path)]


def parse_tolerance(text: str) -> float:
    """Read a tolerance as a fraction: ``0.02``, or ``2%``."""
    value = parse_fraction(text)
    if value is None or not 0 <= value <= 1:
        raise SpecError(f"--tolerance {text!r} is not a fraction from 0 to 1; write 0.02 or 2%")
    return value

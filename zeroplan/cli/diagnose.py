"""``zeroplan diagnose``: what held the memory? Reads a snapshot of torch's allocator. Needs no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import json_text
from zeroplan.cli.job_flags import takes_a_job
from zeroplan.resolve import Resolved
from zeroplan.units import parse_count

if TYPE_CHECKING:
    from zeroplan.comparison import Compared
    from zeroplan.snapshots.diagnosis import Diagnosis


def _diagnose(
    *,
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="SNAPSHOT", help="What torch.cuda.memory._dump_snapshot wrote, or `zeroplan verify --snapshot`."
        ),
    ],
    resolved: Resolved | None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="N", help="Which GPU of the snapshot. (default: the busiest)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Versioned JSON.")] = False,
) -> None:
    """Say what held a GPU's memory when it was highest or ran out, and with a job what its estimate had said."""
    from zeroplan.snapshots.diagnosis import diagnose  # noqa: PLC0415  start-up is part of every command's time
    from zeroplan.snapshots.reading import read_snapshot  # noqa: PLC0415

    found = diagnose(read_snapshot(Path(snapshot), device=_device(device)))
    rows, job = ((), "") if resolved is None else _against(resolved, found)
    typer.echo(_printed(found, snapshot, rows, job, as_json=as_json))


diagnose_command = takes_a_job(_diagnose, or_none=True)


def _device(text: str | None) -> int | None:
    if text is None or text.strip() == "0":
        return None if text is None else 0
    return parse_count(text, what="--device", examples="0 or 3")


def _against(resolved: Resolved, found: "Diagnosis") -> "tuple[tuple[Compared, ...], str]":
    """What the estimate of the job had at its peak, beside what was in use."""
    from zeroplan.comparison import against_kinds  # noqa: PLC0415
    from zeroplan.estimator import estimate  # noqa: PLC0415
    from zeroplan.report.words import headline  # noqa: PLC0415

    answer = estimate(resolved.job)
    return against_kinds(answer, {held.kind: held.n_bytes for held in found.held}, found.live_bytes), headline(answer)


def _printed(found: "Diagnosis", where: str, rows: "tuple[Compared, ...]", job: str, *, as_json: bool) -> str:
    from zeroplan.report.diagnosis import diagnosis_payload, diagnosis_text  # noqa: PLC0415

    if not as_json:
        return diagnosis_text(found, where=where, rows=rows, job=job)
    return json_text(diagnosis_payload(found, where=where, rows=rows))

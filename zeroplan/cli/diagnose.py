"""``zeroplan diagnose``: what held the memory? Reads a snapshot of torch's allocator, or torch's message. Needs no torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import json_text
from zeroplan.cli.flags import AsJson
from zeroplan.cli.job_flags import with_job_flags
from zeroplan.errors import SpecError
from zeroplan.resolve import Resolved
from zeroplan.snapshots.message import LONGEST_BYTES
from zeroplan.units import parse_count

if TYPE_CHECKING:
    from zeroplan.comparison import Compared
    from zeroplan.snapshots.diagnosis import Diagnosis

_PICKLE = b"\x80"
"""The first byte of a snapshot, which is a pickle."""


def _diagnose(
    *,
    snapshot: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="A snapshot from torch.cuda.memory._dump_snapshot, or a text with torch's message 'CUDA out of memory …'; - "
            "or nothing reads it from standard input. The message itself, in quotes, will do.",
            show_default=False,
        ),
    ] = None,
    resolved: Resolved | None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="N", help="The GPU in the snapshot. (default: the one with most requests)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain what was in a GPU's memory when it ran out or was highest. With a job, compare with its estimate.

    From a snapshot, or from the error message: zeroplan diagnose error.txt --model llama-3.1-8b --gpus 8 --stage 2
    """
    snapshot = snapshot or _piped()
    text = _text(snapshot)
    if text is not None:
        typer.echo(_of_message(text, snapshot, resolved, as_json=as_json))
        return
    from zeroplan.snapshots.diagnosis import diagnose  # noqa: PLC0415  start-up is part of every command's time
    from zeroplan.snapshots.reading import read_snapshot  # noqa: PLC0415

    found = diagnose(read_snapshot(Path(snapshot), device=_device(device)))
    rows, job = ((), "") if resolved is None else _against(resolved, found)
    typer.echo(_printed(found, snapshot, rows, job, as_json=as_json))


diagnose_command = with_job_flags(_diagnose, or_none=True)


def _piped() -> str:
    """Return ``-`` for standard input; raises SpecError if it is a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        raise SpecError("no file is named; give a snapshot or a text with torch's message, or pipe the message in")
    return "-"


def _text(name: str) -> str | None:
    """Return the end of a text file, standard input, or the argument if it is the message itself; None for a snapshot."""
    if name == "-":
        return sys.stdin.read()
    if "tried to allocate" in name.lower():  # torch's words, which are no file's name
        return name
    path = Path(name)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(1) == _PICKLE:
            return None
        file.seek(max(0, path.stat().st_size - LONGEST_BYTES))
        return file.read().decode("utf-8", errors="replace")


def _of_message(text: str, where: str, resolved: Resolved | None, *, as_json: bool) -> str:
    """Return the explanation of torch's message; with a job also the request that failed."""
    from zeroplan.report.out_of_memory import explained, message_payload, message_text  # noqa: PLC0415  only a message pays for it
    from zeroplan.snapshots.message import read_message  # noqa: PLC0415  the same

    message = read_message(text, where="standard input" if where == "-" else f"{where[:40]!r}")
    found = explained(message, None if resolved is None else resolved.job)
    return json_text(message_payload(found)) if as_json else message_text(found)


def _device(text: str | None) -> int | None:
    if text is None or text.strip() == "0":
        return None if text is None else 0
    return parse_count(text, what="--device", examples="0 or 3")


def _against(resolved: Resolved, found: "Diagnosis") -> "tuple[tuple[Compared, ...], str]":
    """The estimate's peak by kind compared with the memory in use, and the job's headline."""
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

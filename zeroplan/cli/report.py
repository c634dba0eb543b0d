"""``zeroplan report``: writes one answer as an HTML file."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from zeroplan.cli.flags import Force, flag
from zeroplan.cli.job_flags import with_job_flags
from zeroplan.errors import SpecError
from zeroplan.resolve import Resolved
from zeroplan.whole import refuse_target, unwritten, write_whole


@with_job_flags
def report_command(
    *,
    resolved: Resolved,
    out: Annotated[str, flag("--out", "FILE", "Where to write it.", short="-o", shown=True)] = "report.html",
    force: Force = False,
) -> None:
    """Write the answer as one HTML file with charts, ledger and command line. The file loads nothing."""
    from zeroplan.explore.report import report_html  # noqa: PLC0415  start-up is part of every command's time

    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise SpecError(f"--out {out!r} does not end in .html; write an .html file, which a browser can print as PDF")
    refuse_target(path, "--out", force=force)
    try:
        write_whole(path, report_html(resolved, _command()), force=force)
    except OSError as error:
        raise unwritten(error) from None
    typer.echo(f"wrote {out}")


def _command() -> str:
    """Return the typed command as ``zeroplan estimate``, without the report's own flags."""
    words, kept = iter(sys.argv[2:]), []
    for word in words:
        if word in ("--out", "-o"):
            next(words, None)
        elif word != "--force" and not word.startswith(("--out=", "-o")):
            kept.append(word)
    return shlex.join(["zeroplan", "estimate", *kept])

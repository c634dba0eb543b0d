"""``zeroplan record``: prepares records of measurements for sharing with other people."""

from pathlib import Path
from typing import Annotated

import typer

from zeroplan.catalog.text import shown
from zeroplan.cli.flags import flag
from zeroplan.errors import SpecError
from zeroplan.whole import reason, write_all

record_app = typer.Typer(help="Prepare records of measurements for other people.", no_args_is_help=True)
#: The most left-out texts that are listed; further ones are only counted.
_SHOWN = 40


@record_app.callback()
def _records() -> None:
    """Keep `share` a subcommand: without a callback, typer would make a single command the program itself."""


@record_app.command("share")
def share_records(
    files: Annotated[list[str], typer.Argument(
        metavar="FILE...",
        help="Records or results of `zeroplan verify --record-dir`, or what `zeroplan dryrun --backend cuda --json` printed.",
    )],
    *,
    out: Annotated[str, flag("--out", "DIR", "Write the copies to this folder; no file in it is replaced.", short="-o")],
) -> None:  # fmt: skip
    """Copy records without paths, names of machines and people, messages, and names of models that are not in the catalogue.

    A text is kept only if zeroplan knows it: a name of the catalogue, a word of its own, or a version. Sizes and times are
    kept. The originals stay as they are. Prints what each copy leaves out.
    """
    from zeroplan.verify.cases.sharing import shared  # noqa: PLC0415  keeps the help fast

    contents: dict[Path, str | bytes] = {}
    lines: list[str] = []
    for file in files:
        name, content, left_out = shared(Path(file))
        path = Path(out) / name
        path = path.with_name(f"{len(contents) + 1}-{name}") if path in contents else path
        contents[path] = content
        lines.append(f"{file} -> {path}")
        lines += (f"  left out: {at}{f': {shown(text)}' if text else ''}{f'; kept {shown(kept)}' if kept else ''}"
                 for at, text, kept in left_out[:_SHOWN])  # fmt: skip
        lines += [f"  left out: {len(left_out) - _SHOWN:,} more texts"] if len(left_out) > _SHOWN else []
    try:
        write_all(contents, force=False)
    except (OSError, ValueError) as error:
        why = "has such a file, and no file is replaced" if isinstance(error, FileExistsError) else reason(error)
        raise SpecError(f"--out {out!r} cannot be written to: {why}; name another folder") from None
    typer.echo("\n".join(lines))
    typer.echo("The copies keep the shape of the model and all sizes and times. Read them before you pass them on.")

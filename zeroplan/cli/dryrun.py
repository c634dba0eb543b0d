"""``zeroplan dryrun``: how much GPU memory would my training script need? Runs it as one rank of N, without a GPU."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import typer

from zeroplan.cli import NO, json_text
from zeroplan.cli.dryrun_files import printable, saved_at, show_saved
from zeroplan.cli.dryrun_flags import Flags, Words
from zeroplan.cli.dryrun_on_card import Limits, ScriptRun, on_card
from zeroplan.cli.dryrun_task import dry_run_of
from zeroplan.cli.flags import TOLERANCE, parse_tolerance, with_fields
from zeroplan.dryrun.command import read_command
from zeroplan.units import Unit, unit_named

if TYPE_CHECKING:
    from zeroplan.script_run import DryRun
    from zeroplan.script_trace import SavedRun


@with_fields
def dryrun_command(*, words: Words = None, flags: Flags) -> int:
    """Run your training script as one rank of N without a GPU, and print the GPU memory: zeroplan dryrun --gpus 8 -- train.py

    The script really runs, with all that it does beside training. Its output goes to standard error, the answer to standard output.
    """
    sizes = unit_named(flags.unit or "gib")
    flags.refuse()
    before = None if flags.against is None else saved_at(flags.against)
    if flags.on_card:
        script_run = ScriptRun(
            read_command(words or []), flags.ranks, Limits(parse_tolerance(flags.tolerance or TOLERANCE), flags.seconds),
            imbalance=flags.times, eager=flags.eager, quiet=flags.quiet,
        )  # fmt: skip
        compared = None if before is None else (str(flags.against), before)
        return on_card(script_run, flags.wanted, compared, sizes, as_json=flags.as_json)
    found = _run(words, flags) if flags.show is None else show_saved(flags.show, words)
    flags.wanted.write(found)
    typer.echo(_answered(found.run, flags, sizes) if before is None else _changed(before, found, flags, sizes))
    from zeroplan.report.dryrun import fits  # noqa: PLC0415  start-up is part of every command's time

    return NO if flags.check and not fits(found.run) else 0


def _run(words: list[str] | None, flags: Flags) -> "SavedRun":
    """Run the script; record its blocks of memory if a file or a comparison needs them."""
    task = replace(
        flags.ranks.task(read_command(words or [])),
        traced=bool(flags.wanted.named or flags.against),
        eager=flags.eager,
        imbalance=flags.times,
        profiled=flags.profile,  # type: ignore[arg-type]  # it is one of two
        until_end=int(flags.seconds) if flags.until_end else 0,
    )
    return dry_run_of(task, flags.seconds, quiet=flags.quiet)


def _answered(run: "DryRun", flags: Flags, sizes: Unit) -> str:
    from zeroplan.report.dryrun import dry_run_text  # noqa: PLC0415  as above

    return json_text(asdict(run)) if flags.as_json else printable(dry_run_text(run, verbose=flags.verbose, unit=sizes))


def _changed(before: "SavedRun", after: "SavedRun", flags: Flags, sizes: Unit) -> str:
    from zeroplan.report.dryrun_changes import changes, changes_text  # noqa: PLC0415  as above

    if not flags.as_json:
        return printable(changes_text(before, after, where=str(flags.against), unit=sizes))
    rows = [row._asdict() | {"change_bytes": row.change_bytes} for row in changes(before, after)]
    return json_text({"schema_version": 1, "against": flags.against, "changes": rows, "run": asdict(after.run)})

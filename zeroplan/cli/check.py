"""``zeroplan check``: do the jobs of these files fit? For CI, a pre-commit hook, or the first line of a job script."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import BAD_INPUT, NO, say
from zeroplan.cli.flags import flag, switch
from zeroplan.cli.job_flags import Shared, with_flags_of_two_jobs
from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.report.checks import FORMATS, Checked, Format, Outcome, checked, loop_beside, refused, shown, summary

if TYPE_CHECKING:
    from zeroplan.resolve import Request


def _check(
    *,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="Job files and other programs' configuration files; the flags of a job apply to each. Without a file, the "
            "flags are the job.",
            show_default=False,
        ),
    ] = None,
    shared: Shared,
    how: Annotated[str, flag("--format", "NAME", "text, json, junit or github (annotations).", shown=True)] = "text",
    careful: Annotated[
        bool,
        switch(
            "--careful",
            "Also fail a job that fits only tightly, or a file with keys that may take memory and are not modelled.",
        ),
    ] = False,
) -> int:
    """Check whether the jobs in files fit their GPU. Exit code 0: all fit; 1: one does not; 2: a file contains no job.

    zeroplan check configs/*.yaml --model llama-3.1-8b --gpu h100-sxm-80gb
    """
    named = _format(how)
    outcomes: tuple[Outcome, ...] = ("does not fit", "needs expandable segments", "invalid", "tight", "not all counted")
    fails = frozenset(outcomes if careful else outcomes[:3])
    rows = [_checked(name, shared) for name in files or [""]]
    typer.echo(shown(rows, named, fails=fails))
    if len(rows) > 1:
        say(summary(rows, fails))
    if any(row.outcome == "invalid" for row in rows):
        return BAD_INPUT
    return NO if any(row.outcome in fails for row in rows) else 0


check_command = with_flags_of_two_jobs(_check)


def _format(text: str) -> Format:
    for one in FORMATS:
        if text == one:
            return one
    raise SpecError(f"--format {text!r} is none of {', '.join(FORMATS)}")


def _checked(name: str, shared: Shared) -> Checked:
    """Return the result of one file; an empty name stands for the job of the flags."""
    from zeroplan.estimator import judged  # noqa: PLC0415  start-up is part of every command's time

    try:
        request = _request(name) if name else None
        resolved = shared.resolved(request, name)
        if resolved.job.cluster.gpu is None:
            raise SpecError("no GPU is named; add --gpu NAME (`zeroplan gpus` lists them)")
        matters, too_low = _not_counted(request)
        answer, loop = judged(resolved.job), loop_beside(resolved.job, resolved.loop)
        return checked(name or "the job", answer, matters, may_be_too_low=too_low, loop=loop)
    except ZeroplanError as error:
        return refused(name or "the job", str(error))


def _not_counted(request: "Request | None") -> tuple[tuple[str, ...], bool]:
    """Return the file's keys that change memory and are not modelled, and whether any of them may need more memory."""
    from zeroplan.resolve import with_setup  # noqa: PLC0415  only a file pays for it

    if request is None:
        return (), False
    found = with_setup(request)
    return tuple(found.setup.matters), not found.setup.matters.keys() <= found.setup.saves


def _request(name: str) -> "Request":
    from zeroplan.differences.reading import opened  # noqa: PLC0415  only a file pays for it

    found = opened(Path(name))
    if found.request is None:
        raise SpecError(f"this is a {found.what}, not a job; give a job file or a configuration file")
    return found.request

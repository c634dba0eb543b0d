"""``zeroplan diff``: what changed between two jobs or files, and why do their peaks differ? Needs no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import NO, json_text
from zeroplan.cli.flags import AsJson, AsMarkdown, UnitName, flag, refuse_two_renderings, switch
from zeroplan.cli.job_flags import Shared, with_flags_of_two_jobs
from zeroplan.errors import SpecError
from zeroplan.units import Unit, parse_fraction, unit_named

if TYPE_CHECKING:
    from zeroplan.differences import Difference, Side
    from zeroplan.differences.reading import Opened

_BEFORE = ("-v", "--verbose", "--unit", "--json", "--markdown", "--fail-above")
_TWO = "give two files (zeroplan diff A B), or flags of B after -- (zeroplan diff job.toml -- --stage 2)"


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="A [B] [-- FLAGS OF B]",
        help="Job files, configuration files, answers (--json), records, saved dry runs, snapshots, traces. Flags before -- apply "
        "to both.",
        show_default=False,
    ),
]
Verbose = Annotated[bool, switch("--verbose", "Every tensor, moment, collective, setting and note.", short="-v")]
FailAbove = Annotated[
    str | None,
    flag("--fail-above", "FRACTION", "Exit with 1 if B's peak is higher than A's by more than this, such as 1%."),
]


def _diff(
    *,
    words: Words = None,
    shared: Shared,
    verbose: Verbose = False,
    unit: UnitName = "gib",
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    fail_above: FailAbove = None,
) -> int:
    """Compare the peaks of A and B tensor by tensor, what is held between steps and sent, and which settings differ.

    B is a second file, or A with the flags after --: zeroplan diff job.toml -- --stage 2,
    zeroplan diff --model gpt2 -- --seq-len 512
    """
    refuse_two_renderings(as_json=as_json, as_markdown=as_markdown)
    sizes, limit = unit_named(unit), _limit(fail_above)
    from zeroplan.differences import between  # noqa: PLC0415  start-up is part of every command's time

    found = between(*_sides(words or [], shared))
    if as_json:
        from zeroplan.report.difference import difference_payload  # noqa: PLC0415  only the chosen rendering is loaded

        typer.echo(json_text(difference_payload(found, limit=limit)))
    else:
        _show(found, sizes, limit, verbose=verbose, as_markdown=as_markdown)
    return NO if limit is not None and found.growth > limit else 0


diff_command = with_flags_of_two_jobs(_diff)


def _limit(text: str | None) -> float | None:
    """Return the value of ``--fail-above`` as a fraction."""
    if text is None:
        return None
    value = parse_fraction(text)
    if value is None or not 0 <= value < float("inf"):
        raise SpecError(f"--fail-above {text!r} is not a fraction from 0 on; write 0.01 or 1%")
    return value


def _show(found: "Difference", sizes: Unit, limit: float | None, *, verbose: bool, as_markdown: bool) -> None:
    from zeroplan.cli.dryrun_files import printable  # noqa: PLC0415  only the chosen rendering is loaded
    from zeroplan.cli.terminal import show  # noqa: PLC0415
    from zeroplan.report.difference import difference_markdown, difference_text  # noqa: PLC0415
    from zeroplan.report.words import COLUMNS, WIDTH  # noqa: PLC0415

    if as_markdown:
        typer.echo(printable(difference_markdown(found, limit=limit)))
    else:
        show(printable(difference_text(found, sizes, limit=limit, verbose=verbose)), WIDTH if verbose else COLUMNS)


def _sides(words: list[str], shared: Shared) -> "tuple[Side, Side]":
    """Return A and B: two files, one file without and with flags, the flags' job and a measured file, or two lists of flags."""
    from zeroplan.differences.reading import opened  # noqa: PLC0415  see above

    files, flags = _split(words)
    if len(files) > 2:
        raise SpecError(f"these are {len(files)} files; {_TWO}")
    found = [opened(Path(file)) for file in files]
    pair: list[Opened | None] = [*found, *([None] * (2 - len(found)))]
    if len(found) == 1 and flags:
        pair[1] = found[0]
    elif len(found) == 1 and found[0].request is None and shared.said:
        pair = [None, found[0]]
    elif len(found) < 2 and not flags:
        raise SpecError(f"diff compares two; {_TWO}")
    if shared.said and all(one is not None and one.request is None for one in pair):
        raise SpecError(f"flags of a job change nothing of {' and '.join(files)}, which are no jobs; leave them out")
    return _side(pair[0], shared, (), ""), _side(pair[1], shared, tuple(flags), _behind(flags, pair))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the files, and the flags of B, which begin at the first flag."""
    at = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    if "--" in words:
        raise SpecError("-- is there twice; write the flags of A before one --, and those of B after it")
    for word in words[at:]:
        if word.partition("=")[0] in _BEFORE:
            raise SpecError(f"{word} is not a flag of a job, and only those of B come after --; write it before --")
    return words[:at], words[at:]


def _behind(flags: list[str], pair: "list[Opened | None]") -> str:
    """The name of B if it has flags; else empty, and B has the name of its file."""
    if not flags:
        return ""
    second = pair[1]
    return f"{'A' if pair[0] is second or second is None else second.name} with {' '.join(flags)}"


def _side(found: "Opened | None", shared: Shared, flags: tuple[str, ...], name: str) -> "Side":
    """Return A or B: a file's figures, or the estimate of a job with the flags."""
    from zeroplan.differences import of_estimate  # noqa: PLC0415  see above
    from zeroplan.estimator import judged  # noqa: PLC0415

    name = name or ("" if found is None else found.name)
    if found is not None and found.side is not None and found.request is None:
        if flags:
            raise SpecError(f"{found.name} is a {found.what}, which flags do not change; leave out {' '.join(flags)}")
        return found.side
    mine = shared.beside(flags)
    if found is not None and found.side is not None and not mine.said:
        return found.side
    resolved = mine.resolved(None if found is None else found.request, name)
    return of_estimate(judged(resolved.job), name)._replace(notes=resolved.notes)

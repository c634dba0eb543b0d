"""The commands of ``zeroplan plot``: each computes a series, then draws it into a file, on the screen or in the terminal."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from zeroplan.cli import NO, say_notes
from zeroplan.cli.compare import Records
from zeroplan.cli.flags import TOLERANCE, Force, flag, parse_tolerance, switch, with_fields
from zeroplan.cli.job_flags import JobRequest, with_job_flags, with_request_flags
from zeroplan.cli.plan import Asked, Mfu
from zeroplan.cli.quick import QuickCommand
from zeroplan.cli.searching import shown_if_slow
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.installation import not_installed
from zeroplan.report.palette import THEMES
from zeroplan.resolve import Resolved
from zeroplan.whole import refuse_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zeroplan.report.bars import Row
    from zeroplan.report.series.timeline import TimelineSeries
    from zeroplan.spec.job import JobSpec

kinds_app = typer.Typer()
_ENDINGS = (".png", ".svg", ".pdf")


class Where(NamedTuple):
    """Where and how to draw a picture, as typed."""

    out: Annotated[
        str | None,
        flag("-o", "FILE", "The picture to write: a .png, .svg or .pdf. (default: show it on the screen)", short="--out"),
    ] = None
    theme: Annotated[str, flag("--theme", "light|dark", "Colours for a light or a dark page.", shown=True)] = "light"
    text: Annotated[bool, switch("--text", "Draw bars of text in the terminal.")] = False
    force: Force = False

    def check(self) -> None:
        """Raise SpecError, before the computation, for a picture that could not be drawn."""
        out, text = self.out, self.text
        if self.theme not in THEMES:
            raise SpecError(f"--theme {self.theme!r} is neither light nor dark")
        if text and out is not None:
            raise SpecError(
                "--text goes to the terminal and -o to a file; choose one (`zeroplan plot ... --text > FILE` keeps the text)"
            )
        if out is not None and Path(out).suffix.lower() not in _ENDINGS:
            raise SpecError(f"-o {out!r} does not end in .png, .svg or .pdf; the ending chooses the format")
        if self.force and out is None:
            raise SpecError("--force overwrites a file, but none is named; add -o FILE.png")
        if out is not None:
            refuse_target(Path(out), "-o", force=self.force)
        if not text and (lacking := not_installed("matplotlib", by="drawing")):
            raise MeasurementError(f"{lacking}, or use --text")
        has_display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if not text and out is None and not has_display:
            raise SpecError("there is no display to draw on; write a file with -o FILE.png, or use --text")


def drawn(kind: str, series: object, where: Where) -> None:
    """Draw a series of this kind."""
    if where.text:
        _print(kind, series)
        return
    try:
        from zeroplan.report.plots import frame  # noqa: PLC0415  only pictures need matplotlib
    except (ImportError, ValueError) as error:  # a broken installation, or invalid settings of matplotlib
        raise MeasurementError(f"matplotlib cannot be loaded: {error}; fix that, or use --text") from error
    drawing: Callable[..., None] = getattr(import_module(f"zeroplan.report.plots.{kind}"), f"draw_{kind}")
    theme = THEMES[where.theme]

    def draw(figure: "Figure") -> None:
        drawing(figure, series, theme)
        frame.stamped(figure, theme)

    with frame.style(theme):
        if where.out is None:
            frame.shown(draw)
            return
        figure = frame.blank()
        draw(figure)
        frame.written(figure, Path(where.out), force=where.force)
    typer.echo(f"wrote {where.out}")


def _print(kind: str, series: object) -> None:
    from rich.console import Console  # noqa: PLC0415  only --text needs it
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=True)
    signs = (console.encoding or "").lower().startswith("utf")
    rows: Callable[..., list[Row]] = getattr(import_module("zeroplan.report.bars"), f"{kind}_bars")
    for row in rows(series, width=console.width, signs=signs):
        console.print(Text.assemble(*((part.text, part.colour or "") for part in row)))


def _job_picture(kind: str) -> Callable[..., int | None]:
    """Return the command for a kind of picture that needs only a job."""

    def command(*, resolved: Resolved, where: Where) -> None:
        where.check()
        series: Callable[[Any], object] = getattr(import_module(f"zeroplan.report.series.{kind}"), kind)
        with shown_if_slow():
            made = series(resolved.job)
        say_notes(resolved.notes)
        drawn(kind, made, where)

    command.__doc__ = _HELP[kind]
    return with_job_flags(with_fields(command, "where"))


_HELP = {
    "stages": "One GPU's memory at its peak under ZeRO stages 0 to 3, by kind, and the GPU's capacity.",
    "scaling": "One GPU's memory by number of GPUs under stages 0 to 3, and the smallest number that fits.",
    "heat": "One GPU's memory by micro-batch and sequence length, and which of them fit.",
}

for _kind in _HELP:
    kinds_app.command(_kind, cls=QuickCommand)(_job_picture(_kind))


def _pareto(*, job_request: JobRequest, asked: Asked, mfu: Mfu = None, where: Where) -> int:
    """Every layout that `zeroplan plan` computes, by memory and speed, with the best one marked. Exit code 1: nothing fits."""
    from zeroplan.planner.asking import ask  # noqa: PLC0415  only this kind pays for the planner
    from zeroplan.report.series.pareto import pareto  # noqa: PLC0415

    where.check()
    with shown_if_slow():
        answer = ask(job_request.request, asked.question(mfu), extra=job_request.extra)
    drawn("pareto", pareto(answer), where)
    return NO if answer.best is None else 0


kinds_app.command("pareto", cls=QuickCommand)(with_request_flags(with_fields(_pareto, "asked", "where")))


_Record = Annotated[
    str | None,
    typer.Option("--record", metavar="FILE", help="A record of `zeroplan verify --record-dir`, drawn over the estimate. Without "
                 "flags of a job, its own job is drawn.", show_default=False),
]  # fmt: skip


_Run = Annotated[
    str | None,
    typer.Option("--run", metavar="FILE", help="A saved run (`zeroplan dryrun --save`): draw its last step, block by block.",
                 show_default=False),
]  # fmt: skip
_Whole = Annotated[bool, typer.Option("--whole", help="With --run: draw everything from the start, not only the last step.")]


def _timeline(
    *, resolved: Resolved | None, record: _Record = None, run: _Run = None, whole: _Whole = False, where: Where
) -> None:
    """Memory over one step by kind, with collectives and the peak. With --record, also what the engine allocated."""
    from zeroplan.records import read_record  # noqa: PLC0415  only this kind needs them
    from zeroplan.report.series.timeline import timeline  # noqa: PLC0415

    where.check()
    if run is not None or whole:
        _draw_run(run, where, whole=whole, other=resolved is not None or record is not None)
        return
    measured = None if record is None else read_record(Path(record))
    if resolved is not None:
        made = timeline(resolved.job, measured, where=f"record {record!r}")
        say_notes(resolved.notes)
        if measured is None and not where.text and _draw_step(resolved.job, made, where):
            return
    elif measured is not None:
        made = timeline(measured.job, measured)
    else:
        raise SpecError("a timeline needs a job, a record or both; add flags of a job such as --model NAME, or --record FILE")
    drawn("timeline", made, where)


def _draw_step(job: "JobSpec", moments: "TimelineSeries", where: Where) -> bool:
    """Draw a step request by request; returns False if zeroplan does not know its requests."""
    from zeroplan.estimator import estimate  # noqa: PLC0415  only this kind needs them
    from zeroplan.report.series.run import run_of_step  # noqa: PLC0415
    from zeroplan.report.series.step import step  # noqa: PLC0415

    found = step(estimate(job), moments)
    if found.requests:
        drawn("run", run_of_step(found), where)
    return found.requests


def _draw_run(run: str | None, where: Where, *, whole: bool, other: bool) -> None:
    from zeroplan.report.series.run import phases  # noqa: PLC0415  only this kind needs them
    from zeroplan.report.series.run import run as series_of  # noqa: PLC0415
    from zeroplan.saved_runs.files import read_saved  # noqa: PLC0415

    if run is None:
        raise SpecError("--whole applies to a saved run; add --run FILE")
    if other:
        raise SpecError(f"--run {run!r} has a job of its own; leave out --record and the flags of a job")
    saved = read_saved(Path(run))
    if where.text:
        drawn("timeline", phases(saved), where)
        return
    drawn("run", series_of(saved, whole=whole), where)


kinds_app.command("timeline", cls=QuickCommand)(with_job_flags(with_fields(_timeline, "where"), or_none=True))


def _validation(
    *,
    records: Records,
    tolerance: Annotated[str, typer.Option("--tolerance", metavar="FRACTION", help="The limit that is drawn.")] = TOLERANCE,
    where: Where,
) -> None:
    """Predicted and measured peaks of the records of `zeroplan verify`, and the errors."""
    from zeroplan.cli.comparing import judged, read_files  # noqa: PLC0415  only this kind needs them
    from zeroplan.report.series.validation import validation  # noqa: PLC0415

    where.check()
    limit = parse_tolerance(tolerance)
    found = read_files(records)
    pairs = [(one.measurement, one.comparison) for one in (*judged(found.held), *found.measured)]
    drawn("validation", validation(pairs, limits=(limit,)), where)


kinds_app.command("validation", cls=QuickCommand)(with_fields(_validation, "where"))

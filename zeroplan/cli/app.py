"""The program: its commands, and the one place where an error becomes a line on stderr and an exit code."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

import typer

from zeroplan.cli.advise import advise_command
from zeroplan.cli.compare import compare_command
from zeroplan.cli.diagnose import diagnose_command
from zeroplan.cli.doctor import doctor_command
from zeroplan.cli.estimate import estimate_command
from zeroplan.cli.explore import explore_command
from zeroplan.cli.gpus import gpus_app
from zeroplan.cli.job_flags import takes_a_job
from zeroplan.cli.models import models_app
from zeroplan.cli.plan import plan_command
from zeroplan.cli.plot import plot_app
from zeroplan.cli.profile import profile_command
from zeroplan.cli.quick import QuickCommand, QuickGroup
from zeroplan.cli.report import report_command
from zeroplan.cli.verify import INTERRUPTED, verify_command
from zeroplan.errors import MeasurementError, ZeroplanError

BAD_INPUT, CANNOT_RUN = 2, 4
#: A value of thousands of signs is shown by its two ends.
_LONGEST_MESSAGE = 600

app = typer.Typer(
    name="zeroplan",
    cls=QuickGroup,
    help="Per-GPU memory of ZeRO and FSDP training, byte by byte, before you rent the GPU.",
    pretty_exceptions_enable=False,
)
app.command("estimate", cls=QuickCommand)(estimate_command)
app.command("plan", cls=QuickCommand)(plan_command)
app.command("advise", cls=QuickCommand)(advise_command)
app.command("verify", cls=QuickCommand)(verify_command)
app.command("profile", cls=QuickCommand)(profile_command)
app.command("compare", cls=QuickCommand)(compare_command)
app.command("diagnose", cls=QuickCommand)(takes_a_job(diagnose_command, or_none=True))
app.add_typer(plot_app, name="plot")
app.command("explore", cls=QuickCommand)(explore_command)
app.command("report", cls=QuickCommand)(report_command)
app.command("doctor", cls=QuickCommand)(doctor_command)
app.add_typer(models_app, name="models")
app.add_typer(gpus_app, name="gpus")

#: The base class of what the parser raises: click's own, which newer releases of typer carry inside.
_UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, *, version: bool = typer.Option(default=False, help="Print the version and exit.", is_eager=True)
) -> None:
    if version:
        from importlib.metadata import version as installed  # noqa: PLC0415  only this flag needs it

        typer.echo(installed("zeroplan"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 answered, 1 no, 2 bad input, 3 a measurement disagrees, 4 it cannot run here."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a sign still gets the numbers
    code = _run(arguments)
    _drop_unwritten(sys.stderr)
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    if sys.stdout is None:
        return _refuse("standard output is closed, there is nowhere to answer; leave it open or send it to a file")
    try:
        result = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone (`| head`), for which typer leaves with a code that here means "no".
        _drop_unwritten(sys.stdout)
        return 0
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except (ZeroplanError, _UsageError, OSError) as error:
        _drop_unwritten(sys.stdout)
        return _refuse(_message(error), CANNOT_RUN if isinstance(error, MeasurementError) else BAD_INPUT)
    return result if isinstance(result, int) else 0


def _message(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"the answer cannot be written: {error.strerror}; send it elsewhere"
    return str(error) if isinstance(error, ZeroplanError) else _usage(error)


def _usage(error: Exception) -> str:
    """What the parser says, and the command whose help says more."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    names: list[str] = []
    context = getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        names, context = [context.info_name, *names], context.parent
    return f"{message.rstrip('.')}; `{' '.join(['zeroplan', *names, '--help'])}` says what it takes"


def _refuse(message: str, code: int = BAD_INPUT) -> int:
    folded = "".join(sign if sign.isprintable() else " " for sign in " ".join(message.split()))
    if len(folded) > _LONGEST_MESSAGE:
        folded = f"{folded[: _LONGEST_MESSAGE // 2]} … {folded[-_LONGEST_MESSAGE // 2 :]}"
    if sys.stderr is not None:  # print would take stdout instead
        with suppress(OSError):  # where nothing can be written, the exit code has to do
            print(f"zeroplan: {folded}", file=sys.stderr, flush=True)
    return code


def _drop_unwritten(stream: TextIO | None) -> None:
    """Flush a stream, or where that fails let what is left in it vanish: the interpreter flushes again when it exits."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

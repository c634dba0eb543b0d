"""The program: its commands, and the one place where an error becomes a line on stderr and an exit code."""

import os
import sys
from collections.abc import Sequence

import typer

from zeroplan.cli.compare import compare_command
from zeroplan.cli.estimate import estimate_command
from zeroplan.cli.gpus import gpus_app
from zeroplan.cli.models import models_app
from zeroplan.cli.quick import QuickCommand, QuickGroup
from zeroplan.cli.verify import verify_command
from zeroplan.errors import MeasurementError, ZeroplanError

BAD_INPUT, CANNOT_RUN = 2, 4

app = typer.Typer(
    name="zeroplan",
    cls=QuickGroup,
    help="Per-GPU memory of ZeRO and FSDP training, byte by byte, before you rent the GPU.",
    pretty_exceptions_enable=False,
)
app.command("estimate", cls=QuickCommand)(estimate_command)
app.command("verify", cls=QuickCommand)(verify_command)
app.command("compare", cls=QuickCommand)(compare_command)
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
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        result = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); say nothing more, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except (ZeroplanError, _UsageError) as error:
        return _refuse(error)
    return result if isinstance(result, int) else 0


def _refuse(error: Exception) -> int:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    shown = "".join(sign if sign.isprintable() else " " for sign in " ".join(message.split()))
    print(f"zeroplan: {shown}", file=sys.stderr)
    return CANNOT_RUN if isinstance(error, MeasurementError) else BAD_INPUT

"""The program with its commands. Here every error becomes one line on stderr and an exit code."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

import typer

from zeroplan.cli import BAD_INPUT, CANNOT_RUN, INTERRUPTED
from zeroplan.cli.quick import Commands, QuickGroup
from zeroplan.errors import MeasurementError, ZeroplanError

#: Longer messages are shortened in the middle.
_LONGEST_MESSAGE = 600

#: Every command in the order of the help, with its module and function.
COMMANDS = {
    **{name: (f"zeroplan.cli.{name}", f"{name}_command") for name in (
        "estimate", "check", "time", "dryrun", "plan", "advise", "verify", "profile", "compare", "diff", "diagnose",
        "explore", "report", "mcp", "doctor",
    )},
    **{name: (f"zeroplan.cli.{name}", f"{name}_app") for name in ("workflow", "plot", "models", "gpus", "record")},
}  # fmt: skip


class _Program(QuickGroup):
    """The program's group of commands, imported on use."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401  click's
        super().__init__(**attributes)
        self.commands = Commands(COMMANDS)  # type: ignore[assignment]  # nothing adds to them

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002  click's context, whose home has moved
        """Return the names of all commands."""
        return list(COMMANDS)


app = typer.Typer(
    name="zeroplan",
    cls=_Program,
    help="Per-GPU memory of ZeRO and FSDP training, byte by byte, before you rent the GPU.",
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)

#: The base class of the parser's errors: click's, or typer's copy of it in newer releases.
_UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
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
            stream.reconfigure(errors="replace")  # replace characters that the terminal cannot encode
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
        # The reader closed the pipe (`| head`). typer would exit with 1, which means "no" here.
        _drop_unwritten(sys.stdout)
        return 0
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except (ZeroplanError, _UsageError, OSError) as error:
        _drop_unwritten(sys.stdout)
        return _refuse(_message(error), CANNOT_RUN if isinstance(error, MeasurementError) else BAD_INPUT)
    return result if isinstance(result, int) else 0


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)!r} cannot be read or written: {error.strerror}; check the path and its permissions"
    if isinstance(error, OSError):
        return f"the answer cannot be written: {error.strerror}; send it elsewhere"
    return str(error) if isinstance(error, ZeroplanError) else _usage(error)


def _usage(error: Exception) -> str:
    """The parser's message, and the command that lists the arguments or, of a group, the commands."""
    from zeroplan.cli.wrong_flags import in_our_words  # noqa: PLC0415  only an error pays for it

    message = error.format_message() if hasattr(error, "format_message") else str(error)
    names: list[str] = []
    context = getattr(error, "ctx", None)
    message = in_our_words(error, context) or message
    listed = "commands" if hasattr(getattr(context, "command", None), "list_commands") else "arguments"
    while context is not None and context.parent is not None:
        names, context = [context.info_name, *names], context.parent
    return f"{message.rstrip('.')}; `{' '.join(['zeroplan', *names, '--help'])}` lists its {listed}"


def _refuse(message: str, code: int = BAD_INPUT) -> int:
    folded = "".join(sign if sign.isprintable() else " " for sign in " ".join(message.split()))
    if len(folded) > _LONGEST_MESSAGE:
        folded = f"{folded[: _LONGEST_MESSAGE // 2]} … {folded[-_LONGEST_MESSAGE // 2 :]}"
    if sys.stderr is not None:  # print would use stdout instead
        with suppress(OSError):  # if stderr cannot be written, only the exit code remains
            print(f"zeroplan: {folded}", file=sys.stderr, flush=True)
    return code


def _drop_unwritten(stream: TextIO | None) -> None:
    """Flush a stream. If that fails, redirect it to the null device, since the interpreter flushes again at exit."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

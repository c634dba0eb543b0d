"""The command line, which alone prints. Each command has a file; this one has the exit codes and helpers of all commands."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: Exit codes beside 0 (answered): the answer is no; bad input; a measurement disagrees; the command cannot run here.
NO, BAD_INPUT, DISAGREES, CANNOT_RUN = 1, 2, 3, 4
#: The shell's exit code after SIGINT, 128 + 2.
INTERRUPTED = 130


def json_text(payload: object) -> str:
    """Return an answer as indented JSON, without escaped characters."""
    import json  # noqa: PLC0415  imports only the requested format

    return json.dumps(payload, indent=2, ensure_ascii=False)


def say(text: str) -> None:
    """Print a message on standard error. If standard error is closed, the run continues."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def said_if_slow(text: str, *, after_s: float = 2) -> Iterator[None]:
    """Print a message on standard error, if that is a terminal, once the block has run for this long."""
    from threading import Timer  # noqa: PLC0415  start-up is part of every command's time

    waiting = Timer(after_s, say, [text])
    waiting.daemon = True
    if sys.stderr.isatty():
        waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def say_notes(notes: tuple[str, ...]) -> None:
    """Print notes on standard error."""
    for note in notes:
        say(f"note: {note}")

"""The command line: one file per command, and the only place that prints. Here is what all commands share."""

import sys
from contextlib import suppress

#: What an exit code says, beside 0, answered: no; bad input; a measurement disagrees; it cannot run here.
NO, BAD_INPUT, DISAGREES, CANNOT_RUN = 1, 2, 3, 4
#: What a shell makes of SIGINT, 128 + 2.
INTERRUPTED = 130


def json_text(payload: object) -> str:
    """Return an answer as indented JSON, without escaped characters."""
    import json  # noqa: PLC0415  only the rendering asked for is loaded

    return json.dumps(payload, indent=2, ensure_ascii=False)


def say(text: str) -> None:
    """Print a message on standard error. If standard error is closed, the run continues."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def say_notes(notes: tuple[str, ...]) -> None:
    """Say what was filled in."""
    for note in notes:
        say(f"note: {note}")

"""Reads one TOML entry of a catalogue; errors have one line."""

import tomllib
from pathlib import Path

from zeroplan.catalog.text import one_line, read_text
from zeroplan.errors import SpecError


def read_toml(path: Path, *, what: str) -> dict[str, object]:
    """Return one TOML entry as tables; raises ``SpecError`` in one line with the error's position.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile(suffix=".toml") as file:
    ...     _ = file.write(b"layers = 2"), file.flush()
    ...     read_toml(Path(file.name), what="toy")
    {'layers': 2}
    """
    text = read_text(path, what=what)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise SpecError(f"{what} {str(path)!r} is nested too deep to read; write it flat") from None
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise SpecError(f"{what} {str(path)!r} is not TOML: {one_line(str(error))}") from None

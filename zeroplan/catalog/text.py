"""Reads text and JSON files of the user strictly, and prints values in one line."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from zeroplan.errors import SpecError
from zeroplan.units import MIB

#: Larger than any config.json.
LARGEST_FILE_BYTES = 16 * MIB
_SHOWN = 60
_SAVED_RUN = b'{"content":"zeroplan dryrun"'
_NOT_THIS = (
    "is compressed or a saved dry run; of that, `zeroplan dryrun --show FILE` prints the answer, `--against FILE` compares, "
    "`zeroplan plot timeline --run FILE` draws, and `zeroplan explore FILE` shows it"
)

Key = TypeVar("Key")


def read_text(path: Path, *, what: str, most: int = LARGEST_FILE_BYTES) -> str:
    """Return the text of a regular UTF-8 file of at most ``most`` bytes; raises SpecError in one line."""
    try:
        fault = _fault(path, what, most)
        if fault:
            raise SpecError(f"{what} {str(path)!r} {fault}")
        with path.open("rb") as file:
            content = file.read(most)
        if content.startswith((b"\x1f\x8b", _SAVED_RUN)):
            raise SpecError(f"{what} {str(path)!r} {_NOT_THIS}")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{what} {str(path)!r} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise SpecError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from None


def is_there(path: Path) -> bool:
    """Whether a path exists; False for a name that is too long or contains a NUL."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _fault(path: Path, what: str, most: int) -> str | None:
    """Return why ``path`` cannot be read; None if it can."""
    if "\0" in str(path) or not path.exists():
        return "does not exist; check the path"
    if not path.is_file():
        return "is not a file; give the path of one"
    if path.stat().st_size > most:
        return f"is larger than {most // MIB} MiB; that is no {what}"
    return None


def strict_json(text: str | bytes, where: str, *, written: str = "") -> object:
    """Return the content of a JSON file without duplicate keys; ``where``: the file's name in errors.

    ``written``: the kind of file, if zeroplan itself writes such files.
    """
    import json  # noqa: PLC0415  keeps start-up fast

    try:
        return json.loads(text, object_pairs_hook=lambda pairs: each_key_once(pairs, where))
    except RecursionError:
        raise SpecError(f"{where} is nested too deep{f' to be a {written}' if written else ''}") from None
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(f"{where} is not {'complete ' if written else ''}JSON: {one_line(str(error))}") from None


def each_key_once(pairs: Iterable[tuple[Key, object]], where: str) -> dict[Key, object]:
    """Return keys and values as a dict; raises SpecError for a duplicate key (Python's json would silently keep the last)."""
    together: dict[Key, object] = {}
    for key, value in pairs:
        if key in together:
            raise SpecError(f"{where} has {shown(key)} twice; keep one")
        together[key] = value
    return together


def written_json(path: Path, *, what: str) -> object:
    """Return the JSON of a file that zeroplan writes itself; ``what``: the kind of file, for errors."""
    return strict_json(read_text(path, what=what), f"{what} {str(path)!r}", written=what)


def shown(value: object) -> str:
    """Return a value as text for a one-line message, at most 60 characters.

    >>> shown("llama"), shown(10**10000)
    ("'llama'", 'a number of thousands of digits')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a number of thousands of digits" if isinstance(value, int) else "a value too deep to show"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def one_line(text: str) -> str:
    """Return ``text`` with line breaks and runs of spaces folded to single spaces."""
    return " ".join(text.split())

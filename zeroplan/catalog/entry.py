"""How one TOML entry of a catalogue becomes a checked object, and a fault in it one line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from zeroplan.errors import SpecError
from zeroplan.units import MIB

Entry = TypeVar("Entry", bound=BaseModel)
#: No entry or config.json comes near it; whatever is larger is something else.
LARGEST_FILE_BYTES = 16 * MIB


def read_text(path: Path, *, what: str) -> str:
    """Read a regular UTF-8 file of at most ``LARGEST_FILE_BYTES``, or say in one line why not."""
    try:
        fault = _fault(path, what)
        if fault:
            raise SpecError(f"{what} {str(path)!r} {fault}")
        with path.open("rb") as file:
            return file.read(LARGEST_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{what} {str(path)!r} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise SpecError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from None


def _fault(path: Path, what: str) -> str | None:
    """Say why ``path`` is not to be opened: asked before anything is read."""
    if "\0" in str(path) or not path.exists():
        return "does not exist; check the path"
    if not path.is_file():
        return "is not a file; give the path of one"
    if path.stat().st_size > LARGEST_FILE_BYTES:
        return f"is larger than {LARGEST_FILE_BYTES // MIB} MiB; that is no {what}"
    return None


def read_toml(path: Path, *, what: str) -> dict[str, object]:
    """Read one TOML entry, or say in one line where it breaks."""
    text = read_text(path, what=what)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise SpecError(f"{what} {str(path)!r} is nested too deep to read; write it flat") from None
    except ValueError as error:  # tomllib.TOMLDecodeError, or a number with thousands of digits
        raise SpecError(f"{what} {str(path)!r} is not TOML: {one_line(str(error))}") from None


def checked(kind: type[Entry], fields: Mapping[str, object], *, where: str) -> Entry:
    """Make a ``kind`` of ``fields``, or say in one line which field is at fault."""
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise SpecError(f"{where}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """Name the first fault of a validation: field, value found, what is wrong."""
    fault = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    message = one_line(fault["msg"].removeprefix("Value error, "))
    if not field:
        return message
    return f"{field}: {message}" if fault["type"] == "missing" else f"{field}={shown(fault['input'])}: {message}"


def shown(value: object) -> str:
    """Show a value in a one-line message: at most 60 characters.

    >>> shown("llama"), shown(10**10000)
    ("'llama'", 'a number of thousands of digits')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a number of thousands of digits" if isinstance(value, int) else "a value too deep to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(text: str) -> str:
    """``text`` with its line breaks and runs of spaces folded to single spaces."""
    return " ".join(text.split())

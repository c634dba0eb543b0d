"""How a user's file is read, and how what stands in it is shown in one line."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from zeroplan.errors import SpecError
from zeroplan.units import MIB

#: No config.json comes near it; whatever is larger is something else.
LARGEST_FILE_BYTES = 16 * MIB
_SHOWN = 60


def read_text(path: Path, *, what: str) -> str:
    """Read a regular UTF-8 file of at most ``LARGEST_FILE_BYTES``, or say in one line why not."""
    try:
        fault = _fault(path, what)
        if fault:
            raise SpecError(f"{what} {shown(str(path))} {fault}")
        with path.open("rb") as file:
            return file.read(LARGEST_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{what} {shown(str(path))} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise SpecError(f"{what} {shown(str(path))} cannot be read: {error.strerror}") from None


def _fault(path: Path, what: str) -> str | None:
    """Say why ``path`` is not to be opened: asked before anything is read."""
    if "\0" in str(path) or not path.exists():
        return "does not exist; check the path"
    if not path.is_file():
        return "is not a file; give the path of one"
    if path.stat().st_size > LARGEST_FILE_BYTES:
        return f"is larger than {LARGEST_FILE_BYTES // MIB} MiB; that is no {what}"
    return None


def first_fault(error: ValidationError) -> str:
    """Name the first fault of a validation: field, value found, what is wrong.

    >>> from zeroplan.spec.model import MoeSpec
    >>> try:
    ...     MoeSpec(num_experts=4, num_experts_per_tok=0, moe_intermediate_size=8)
    ... except ValidationError as error:
    ...     print(first_fault(error))
    num_experts_per_tok=0: Input should be greater than 0
    """
    fault = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    message = one_line(fault["msg"].removeprefix("Value error, "))
    return f"{field}={shown(fault['input'])}: {message}" if field else message


def shown(value: object) -> str:
    """Show a value in a one-line message: at most 60 characters of it.

    >>> shown("llama"), shown(10**10000)
    ("'llama'", 'a number of thousands of digits')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a number of thousands of digits" if isinstance(value, int) else "a value too deep to show"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def one_line(text: str) -> str:
    """``text`` with its line breaks and runs of spaces folded to single spaces."""
    return " ".join(text.split())

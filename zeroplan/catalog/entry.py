"""How a catalogue file becomes a description: TOML in, a validated spec or one line of complaint out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from zeroplan.errors import SpecError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Model = TypeVar("Model", bound=BaseModel)
_SHOWN = 40


def read_entry(file: "Traversable") -> dict[str, object]:
    """Return the tables of a TOML file, arrays as tuples; ``SpecError`` if it cannot be read or is not TOML."""
    import tomllib  # noqa: PLC0415  who looks nothing up pays nothing

    if not file.is_file():
        raise SpecError(f"{file} is not a file; name a readable TOML file")
    try:
        tables = tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise SpecError(f"{file} cannot be read ({error.strerror}); name a readable TOML file") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except ValueError as error:  # TOMLDecodeError, and a number of thousands of digits
        raise SpecError(_flat(f"{file} is not TOML: {error}; correct that place")) from None
    except RecursionError:
        raise SpecError(f"{file} nests too deeply; an entry has two levels of tables") from None
    return {key: _frozen(value) for key, value in tables.items()}


def as_model(kind: type[Model], fields: Mapping[str, object], *, file: str, way_out: str) -> Model:
    """Return ``fields`` as a ``kind``; ``SpecError`` names the file, the first wrong key and the way out."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise SpecError(f"{file}: {one_line(error)}; {way_out}") from None


def one_line(error: ValidationError) -> str:
    """Return the first complaint of a validation, with key and value, and how many follow.

    >>> from pydantic import TypeAdapter
    >>> try:
    ...     TypeAdapter(dict[str, int]).validate_python({"gpus": "eight"})
    ... except ValidationError as error:
    ...     print(one_line(error))
    key 'gpus': Input should be a valid integer, unable to parse string as an integer, not 'eight'
    """
    first, *others = error.errors(include_url=False, include_context=False)
    key = ".".join(str(part) for part in first["loc"]) or "(whole entry)"
    shown = "" if first["type"] in {"missing", "extra_forbidden"} else f", not {_short(first['input'])}"
    more = f" (and {len(others)} more)" if others else ""
    return _flat(f"key {key!r}: {first['msg']}{shown}{more}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _flat(text: str) -> str:
    return " ".join(text.split())


def _frozen(value: object) -> object:
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value

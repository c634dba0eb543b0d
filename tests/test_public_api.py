"""Checks the public API: names, parameters and fields of ``import zeroplan`` are those in ``public_api.txt``.

After an intended change, write the file anew with ``python -m tests.test_public_api`` and mention it in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zeroplan

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMISED = Path(__file__).with_name("public_api.txt")


def test_nothing_public_has_changed_unsaid():
    assert described() == PROMISED.read_text(encoding="utf-8")


def described() -> str:
    return "".join(f"{line}\n" for name in sorted(zeroplan.__all__) for line in _lines(name, getattr(zeroplan, name)))


def _lines(name: str, value: object) -> Iterator[str]:
    if not isinstance(value, type):
        yield f"{name}{_parameters(value)}" if callable(value) else f"{name}: {type(value).__name__}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {name}({bases})"
    if is_dataclass(value):
        yield from (f"  {field.name}" for field in fields(value))
    else:
        yield from (f"  {one}" for one in getattr(value, "_fields", ()))
    for one, what in sorted(vars(value).items()):
        if one.startswith("_") or one in getattr(value, "__dataclass_fields__", ()) or one in getattr(value, "_fields", ()):
            continue
        if isinstance(what, staticmethod | classmethod):
            yield f"  {one}{_parameters(what.__func__)}"
        elif inspect.isfunction(what):
            yield f"  {one}{_parameters(what)}"
        else:
            yield f"  {one}"


def _parameters(value: object) -> str:
    """Names, kinds and defaults of parameters; without types, whose spelling differs among Python versions."""
    assert callable(value)
    names = []
    for one in inspect.signature(value).parameters.values():
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        names.append(f"{star}{one.name}" + ("" if one.default is one.empty else "=..."))
        if one.kind is one.KEYWORD_ONLY and "*" not in names:
            names.insert(-1, "*")
    return f"({', '.join(names)})"


if __name__ == "__main__":
    PROMISED.write_text(described(), encoding="utf-8")

"""Flags of several commands, helpers to declare flags, and parsers of typed values."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from zeroplan.errors import SpecError
from zeroplan.units import parse_fraction

OUTPUT = "Output"
"""The help's panel of flags for the format of an answer and its files."""


def flag(
    name: str, value: str | None, says: str, *, short: str = "", panel: str = OUTPUT, shown: bool = False
) -> typer.models.OptionInfo:
    """Declare a flag. Without a ``name`` it has its parameter's name; ``value`` is the help's placeholder for the user's value.

    ``shown``: the help prints the default.
    """
    names = tuple(filter(None, (name, short)))
    option: typer.models.OptionInfo = typer.Option(*names, metavar=value, help=says, rich_help_panel=panel, show_default=shown)
    return option


def switch(name: str, says: str, *, short: str = "", panel: str = OUTPUT) -> typer.models.OptionInfo:
    """Declare a flag without a value."""
    return flag(name, None, says, short=short, panel=panel)


def keyword(name: str, annotation: object, default: object) -> inspect.Parameter:
    """Return a keyword-only parameter for a command's signature."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def with_fields(command: Callable[..., int | None], *names: str) -> Callable[..., int | None]:
    """Return ``f(*, flags, ...)`` as a command with a flag for each field of the NamedTuple that annotates ``flags``.

    ``names``: other parameters than ``flags`` of which that holds.
    """
    parameters = dict(inspect.signature(command).parameters)
    tuples: dict[str, Any] = {name: parameters.pop(name).annotation for name in names or ("flags",)}
    fields = {name: _fields(cls) for name, cls in tuples.items()}

    def run(**given: object) -> int | None:
        made = {name: cls(**{field: given.pop(field) for field in fields[name]}) for name, cls in tuples.items()}
        return command(**made, **given)

    own = [one for each in fields.values() for one in each.values()]
    return described(run, [*parameters.values(), *own], command.__doc__)


def _fields(cls: Any) -> dict[str, inspect.Parameter]:  # noqa: ANN401  the class of a NamedTuple
    hints = get_type_hints(cls, include_extras=True)
    return {name: keyword(name, hint, cls._field_defaults[name]) for name, hint in hints.items()}


def described(
    run: Callable[..., int | None], parameters: list[inspect.Parameter], says: str | None
) -> Callable[..., int | None]:
    """Return the function with these parameters and this help, which typer reads."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = says
    return run


UnitName = Annotated[str, flag("--unit", None, "Unit of sizes as text: gib or gb.", shown=True)]
AsJson = Annotated[bool, switch("--json", "Versioned JSON.")]
AsMarkdown = Annotated[bool, switch("--markdown", "Markdown.")]
Force = Annotated[bool, switch("--force", "Overwrite existing files.")]
Catalog: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--catalog",
        metavar="DIR",
        help="Your own catalogue: a folder with models/*.toml and gpus/*.toml.",
        envvar="ZEROPLAN_CATALOG",
        show_default=False,
    ),
]


def folder(catalog: str | None) -> Path | None:
    """Return the folder of ``--catalog``."""
    if catalog == "":  # Path("") would be the current folder
        raise SpecError("--catalog '' names no folder; give one that holds models/*.toml or gpus/*.toml")
    return None if catalog is None else Path(catalog)


def refuse_two_renderings(*, as_json: bool, as_markdown: bool) -> None:
    """Raise SpecError if two formats are requested."""
    if as_json and as_markdown:
        raise SpecError("--json and --markdown are two formats; choose one")


def refuse_given(others: Mapping[str, object], why: str) -> None:
    """Raise SpecError, with the reason, for the first given flag of ``others``."""
    if (given := next((name for name, value in others.items() if value is not None), None)) is not None:
        raise SpecError(f"{given} {why}")


def number(text: str, what: str, low: float, high: float, otherwise: str) -> float:
    """Return the typed number; raises SpecError if it is not a number from ``low`` to ``high``, ``otherwise`` in words."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise SpecError(f"{what} {text!r} is not {otherwise}")
    return value


TOLERANCE = "0.02"
Tolerance = Annotated[
    str, flag("--tolerance", "FRACTION", "Allowed difference of peak, held memory and collectives.", shown=True)
]


def parse_tolerance(text: str) -> float:
    """Return a tolerance as a fraction, from ``0.02`` or ``2%``."""
    value = parse_fraction(text)
    if value is None or not 0 <= value <= 1:
        raise SpecError(f"--tolerance {text!r} is not a fraction from 0 to 1; write 0.02 or 2%")
    return value

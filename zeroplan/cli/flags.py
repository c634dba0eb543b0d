"""Flags of several commands, helpers to declare a flag, and parsers of typed values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

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

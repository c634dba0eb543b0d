"""The flag that names a user's own catalogue."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from zeroplan.errors import SpecError

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
    """The folder that the flag names."""
    if catalog == "":  # which a path would take for the current folder
        raise SpecError("--catalog '' names no folder; give one that holds models/*.toml or gpus/*.toml")
    return None if catalog is None else Path(catalog)

"""The flag that names a user's own catalogue, and what it means for each kind of entry."""

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


def own_folder(catalog: str | None, kind: str) -> Path | None:
    """Return the sub-folder of a user's catalogue for ``models`` or ``gpus``; None where there is none.

    Raises SpecError where the catalogue itself is no folder.
    """
    if catalog is None:
        return None
    folder = Path(catalog)
    if not folder.is_dir():
        raise SpecError(f"--catalog {catalog!r} is not a folder; give one that holds models/*.toml or gpus/*.toml")
    inside = folder / kind
    return inside if inside.is_dir() else None

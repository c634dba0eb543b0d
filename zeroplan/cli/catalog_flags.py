"""The flag that names a user's own catalogue."""

from typing import Annotated, TypeAlias

import typer

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

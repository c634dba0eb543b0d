"""Which models does zeroplan know by name, and where do their shapes come from?

One TOML file per model in ``models/`` holds the keys of its ``config.json``; ``models/README.md`` tells their lineage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from zeroplan.catalog.config import model_from_config
from zeroplan.catalog.entry import as_model, read_entry
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError, unknown_name
from zeroplan.spec.base import Spec
from zeroplan.spec.hardware import Figure
from zeroplan.spec.model import ModelSpec

_SHIPPED = Path(__file__).parent / "models"
_WAY_OUT = "zeroplan/catalog/models/README.md shows every key"


class ModelEntry(Spec):
    """One model of the catalogue: its shape, where it is published, and what its makers say it counts."""

    spec: ModelSpec
    source: str
    released: int
    aliases: tuple[str, ...] = ()
    published_parameters: Figure | None = None
    """All parameters. The note says ``exact``, or how the figure is printed and what it leaves out."""
    published_active_parameters: Figure | None = None
    """Parameters one token uses, for a mixture of experts."""

    @property
    def name(self) -> str:
        """The name in the catalogue: that of the file."""
        return self.spec.name


class _Written(Spec):
    """A TOML entry as it is written."""

    model_type: str
    config: dict[str, object]
    source: str
    released: Annotated[int, Field(ge=1900, le=2999)]
    aliases: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()
    """Keys of the config that are null, which TOML cannot say."""
    published_parameters: Figure | None = None
    published_active_parameters: Figure | None = None


def model(name: str, *, extra: Path | None = None) -> ModelSpec:
    """Return the shape of the model called ``name``: a canonical name or an alias.

    Case, blanks and underscores do not matter, and a repository on the Hub may be named with its owner or without. ``extra``
    is a folder of entries that come before the shipped ones.

    >>> model("Llama 3.1 8B").num_key_value_heads, model("meta-llama/Llama-3.1-8B-Instruct").name
    (8, 'llama-3.1-8b')
    """
    return model_entry(name, extra=extra).spec


def model_entry(name: str, *, extra: Path | None = None) -> ModelEntry:
    """Return a model's whole entry: its shape, where it is published, and what its makers say it counts."""
    wanted, own = _normal(name), _own_files(extra)
    file = own.get(wanted) or _own_alias(wanted, own) or _shipped_files().get(wanted) or _shipped_alias(wanted)
    if file is not None:
        return _entry(file)
    asked = name if len(name) <= 60 else f"{name[:59]}…"
    raise unknown_name("model", asked, model_names(extra=extra), "`zeroplan models` lists all; a config.json works too")


def model_names(*, extra: Path | None = None) -> tuple[str, ...]:
    """Return every canonical name, sorted; reads no entry.

    >>> model_names()[:3]
    ('bloom-176b', 'bloom-1b7', 'bloom-3b')
    """
    return tuple(sorted({*_shipped_files(), *_own_files(extra)}))


def models(*, extra: Path | None = None) -> tuple[ModelEntry, ...]:
    """Return every entry, sorted by name; one of ``extra`` stands in for the shipped one of its name.

    >>> len(models()) == len(model_names())
    True
    """
    files = {**_shipped_files(), **_own_files(extra)}
    return tuple(_entry(files[name]) for name in sorted(files))


def _normal(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


@cache
def _shipped_files() -> Mapping[str, Path]:
    return _named(_SHIPPED.iterdir())


def _own_files(folder: Path | None) -> Mapping[str, Path]:
    if folder is None:
        return {}
    try:
        files = list(folder.iterdir())
    except (OSError, ValueError):
        raise SpecError(f"catalogue folder {shown(str(folder))} cannot be listed; name a folder of model entries") from None
    return _named(files)


def _named(files: Iterable[Path]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for file in sorted(file for file in files if file.suffix == ".toml"):
        name = _normal(file.stem)
        if name in named:
            raise SpecError(f"{named[name]} and {file} both mean {name!r}; rename one")
        named[name] = file
    return named


def _own_alias(wanted: str, own: Mapping[str, Path]) -> Path | None:
    matches = [file for file in own.values() if wanted in _read_aliases(file)]
    if len(matches) > 1:
        raise SpecError(f"{matches[0]} and {matches[1]} both have the alias {shown(wanted)}; remove it from one")
    return matches[0] if matches else None


def _shipped_alias(wanted: str) -> Path | None:
    # An alias belongs to one entry only; most repositories begin with an entry's name, so those entries are read first.
    repository = wanted.rpartition("/")[2]
    likely_first = sorted(_shipped_files(), key=lambda name: not repository.startswith(name))
    return next((file for file in map(_shipped_files().__getitem__, likely_first) if wanted in _shipped_aliases(file)), None)


@cache
def _shipped_aliases(file: Path) -> frozenset[str]:
    return _read_aliases(file)


def _read_aliases(file: Path) -> frozenset[str]:
    """Read an entry's aliases; those that are repositories with their owner and without."""
    aliases = [_normal(alias) for alias in _written(file).aliases]
    return frozenset((*aliases, *(alias.rpartition("/")[2] for alias in aliases)))


def _entry(file: Path) -> ModelEntry:
    return _shipped_entry(file) if file.parent == _SHIPPED else _read_model(file)


@cache
def _shipped_entry(file: Path) -> ModelEntry:
    return _read_model(file)


def _read_model(file: Path) -> ModelEntry:
    written = _written(file)
    config = {**written.config, **dict.fromkeys(written.nulls), "model_type": written.model_type}
    try:
        spec = model_from_config(config, name=_normal(file.stem))
    except SpecError as error:
        raise SpecError(f"{file}: {error}") from None
    return ModelEntry(
        spec=spec,
        source=written.source,
        released=written.released,
        aliases=written.aliases,
        published_parameters=written.published_parameters,
        published_active_parameters=written.published_active_parameters,
    )


def _written(file: Path) -> _Written:
    return as_model(_Written, read_entry(file), file=str(file), way_out=_WAY_OUT)

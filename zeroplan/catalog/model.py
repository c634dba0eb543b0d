"""Which models does zeroplan know by name, and where do their shapes come from?

One TOML file per model in ``models/`` holds the keys of its ``config.json``; ``models/README.md`` tells their lineage.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from zeroplan.catalog.config import model_from_config
from zeroplan.catalog.entry import read_toml
from zeroplan.catalog.text import read_text
from zeroplan.errors import SpecError, unknown_name
from zeroplan.spec.base import Range, Spec, read
from zeroplan.spec.hardware import Figure
from zeroplan.spec.model import ModelSpec

_FOLDER = Path(__file__).parent / "models"
_WHAT = "model entry"
_CANONICAL = re.compile(r"[a-z0-9][a-z0-9._-]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written(Spec):
    """A TOML entry as it is written."""

    model_type: str
    config: dict[str, object]
    source: str
    released: Annotated[int, Range(1900, 2999)]
    aliases: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()
    """Keys of the config that are null, which TOML cannot say."""
    published_parameters: Figure | None = None
    published_active_parameters: Figure | None = None


def model(name: str, *, extra: Path | None = None) -> ModelSpec:
    """Find the shape of a model by its name or an alias, in any case; a repository on the Hub with its owner or without.

    ``extra`` is a folder of the user's own entries, which come first.

    >>> model("llama-3.1-8b").num_key_value_heads, model("meta-llama/Llama-3.1-8B").name
    (8, 'llama-3.1-8b')
    """
    path = _path(name, extra)
    return _shipped_spec(path) if path.parent == _FOLDER else _read_entry(path).spec


def model_entry(name: str, *, extra: Path | None = None) -> ModelEntry:
    """Find a model's whole entry, like :func:`model`."""
    return _entry(_path(name, extra))


def _path(name: str, extra: Path | None) -> Path:
    for folder in _folders(extra):
        path = _file_of(folder, name.strip().lower())
        if path is not None:
            return path
    raise unknown_name("model", name, model_names(extra=extra), "`zeroplan models` lists all; a config.json works too")


def model_names(*, extra: Path | None = None) -> tuple[str, ...]:
    """Every model's name, sorted; reads no file."""
    return tuple(sorted({path.stem.lower() for folder in _folders(extra) for path in folder.glob("*.toml")}))


def models(*, extra: Path | None = None) -> tuple[ModelEntry, ...]:
    """Every model's entry, sorted by name; an entry of ``extra`` replaces the one of the same name."""
    paths = {path.stem.lower(): path for folder in reversed(_folders(extra)) for path in folder.glob("*.toml")}
    return tuple(_entry(paths[name]) for name in sorted(paths))


def _folders(extra: Path | None) -> tuple[Path, ...]:
    if extra is None:
        return (_FOLDER,)
    if not extra.is_dir():
        raise SpecError(f"folder of model entries {str(extra)!r} does not exist; create it or give another")
    return (extra, _FOLDER)


def _file_of(folder: Path, key: str) -> Path | None:
    """Find the entry of ``folder`` that is called ``key`` or has it among its aliases."""
    if folder == _FOLDER and _CANONICAL.fullmatch(key):
        path = folder / f"{key}.toml"
        if path.exists():
            return path
    elif folder != _FOLDER:
        for path in sorted(folder.glob("*.toml")):
            if path.stem.lower() == key:
                return path
    return next((path for path in sorted(folder.glob("*.toml")) if _is_alias(path, key)), None)


def _is_alias(path: Path, key: str) -> bool:
    """Whether the entry at ``path`` lists ``key``; a file that does not even contain it is not parsed."""
    if key not in read_text(path, what=_WHAT).lower():
        return False
    aliases = read_toml(path, what=_WHAT).get("aliases", [])
    names = [str(alias).lower() for alias in aliases] if isinstance(aliases, list) else []
    return key in names or key in [name.rpartition("/")[2] for name in names]


def _entry(path: Path) -> ModelEntry:
    return _shipped_entry(path) if path.parent == _FOLDER else _read_entry(path)


@lru_cache(maxsize=256)
def _shipped_entry(path: Path) -> ModelEntry:
    """Read one of zeroplan's own entries, which do not change while it runs."""
    return _read_entry(path)


def _read_entry(path: Path) -> ModelEntry:
    where = f"{_WHAT} {str(path)!r}"
    written = read(_Written, read_toml(path, what=_WHAT), where=where)
    return ModelEntry(
        spec=_shape(written.model_type, written.config, written.nulls, path),
        source=written.source,
        released=written.released,
        aliases=written.aliases,
        published_parameters=written.published_parameters,
        published_active_parameters=written.published_active_parameters,
    )


@lru_cache(maxsize=256)
def _shipped_spec(path: Path) -> ModelSpec:
    """Read the shape alone of one of zeroplan's own entries: its fields are tested, so that an answer need not check them."""
    written = read_toml(path, what=_WHAT)
    return _shape(str(written["model_type"]), written["config"], written.get("nulls", ()), path)  # type: ignore[arg-type]


def _shape(model_type: str, config: Mapping[str, object], nulls: Iterable[str], path: Path) -> ModelSpec:
    whole = {**config, **dict.fromkeys(nulls), "model_type": model_type}
    try:
        return model_from_config(whole, name=path.stem.lower())
    except SpecError as error:
        raise SpecError(f"{_WHAT} {str(path)!r}: {error}") from None

"""Finds a model by name, with its shape.

``models/`` has one TOML file per model with the keys of its ``config.json``; ``models/README.md`` describes the sources.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from zeroplan.catalog.config import model_from_config
from zeroplan.catalog.entry import read_toml
from zeroplan.catalog.lookup import Section, files, find, normal
from zeroplan.errors import SpecError
from zeroplan.spec.base import Range, Spec, read
from zeroplan.spec.hardware import Figure
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.vision import VisionSpec

#: Flags that name a model. A job has exactly one of them.
WAYS_TO_NAME = ("model", "params", "config", "profile")
_WHAT = "model entry"
_FOLDER = Path(__file__).parent / "models"
#: Owners on the Hub that publish copies of others' models, whole or quantised.
_MIRRORS = (
    "nousresearch", "unsloth", "llm-research", "ai-modelscope", "modelscope", "mlx-community", "lmstudio-community",
    "hugging-quants",
)  # fmt: skip


class ModelEntry(Spec):
    """One model of the catalogue: its shape, its source, and its makers' own counts."""

    spec: ModelSpec
    source: str
    released: Annotated[int, Range(1900, 2999)]
    aliases: tuple[str, ...] = ()
    published_parameters: Figure | None = None
    """The number of parameters. The note is ``exact``, or describes the figure's rounding and what it leaves out."""
    published_active_parameters: Figure | None = None
    """The parameters that one token uses, for a mixture of experts."""

    @property
    def name(self) -> str:
        """The name in the catalogue, which is the file's."""
        return self.spec.name


class _Written(Spec):
    """The content of a TOML entry."""

    model_type: str
    config: dict[str, object]
    source: str
    released: Annotated[int, Range(1900, 2999)]
    aliases: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()
    """Keys of the config that are null, which TOML cannot express."""
    published_parameters: Figure | None = None
    published_active_parameters: Figure | None = None
    vision_tower: str = ""
    """The part of the published model that the entry leaves out, such as a vision tower."""
    vision_config: dict[str, object] | None = None
    """The sizes of that tower, if zeroplan knows them."""


def model(name: str, *, extra: Path | None = None) -> ModelSpec:
    """Return the shape of the model called ``name``: a canonical name or an alias.

    Ignores case, blanks and underscores. A repository on the Hub may be named with its owner or without. ``extra``: a folder of
    entries that override the shipped ones.

    >>> model("Llama 3.1 8B").num_key_value_heads, model("meta-llama/Llama-3.1-8B-Instruct").name
    (8, 'llama-3.1-8b')
    """
    file = find(_SECTION, name, extra=extra)
    return _shipped_shape(file) if file.parent == _FOLDER else _entry(file).spec


def model_entry(name: str, *, extra: Path | None = None) -> ModelEntry:
    """Return a model's whole entry: its shape, its source, and its makers' own counts."""
    return _entry(find(_SECTION, name, extra=extra))


def tower_left_out(name: str, *, extra: Path | None = None) -> str:
    """Return the part of the published model that its text-only entry leaves out; empty if none.

    >>> tower_left_out("gemma-3-1b"), tower_left_out("qwen3.5-9b")
    ('', 'a vision tower')
    """
    return str(read_toml(find(_SECTION, name, extra=extra), what=_WHAT).get("vision_tower", ""))


def tower_beside(name: str, *, extra: Path | None = None) -> VisionSpec | None:
    """Return the vision tower that a text-only entry leaves out; None if it does not give the tower's sizes.

    >>> tower_beside("qwen3.5-9b").hidden_size, tower_beside("gemma-3-4b")
    (1152, None)
    """
    written = read_toml(find(_SECTION, name, extra=extra), what=_WHAT)
    config = {"model_type": str(written["model_type"]).removesuffix("_text"), "vision_config": written.get("vision_config")}
    text = written["config"]
    from zeroplan.catalog.towers import vision_of  # noqa: PLC0415  keeps start-up fast

    return vision_of(config, text) if isinstance(text, Mapping) else None


def is_listed(name: str, *, extra: Path | None = None) -> bool:
    """Return whether the catalogue lists a model's name with its owner; else the model is taken for one of the same name.

    A name without an owner, and a known mirror's, count as listed.

    >>> is_listed("Qwen/Qwen3-8B"), is_listed("unsloth/Qwen3-8B"), is_listed("models/Qwen3-8B")
    (True, True, False)
    """
    owner = normal(name).rpartition("/")[0]
    if owner in ("", *_MIRRORS):
        return True
    return owner in {alias.rpartition("/")[0] for alias in _aliases(find(_SECTION, name, extra=extra)) if "/" in alias}


def model_names(*, extra: Path | None = None) -> tuple[str, ...]:
    """Return every canonical name, sorted, without reading entries.

    >>> model_names()[0], "llama-3.1-8b" in model_names()
    ('afm-4.5b', True)
    """
    return tuple(files(_SECTION, extra=extra))


def models(*, extra: Path | None = None) -> tuple[ModelEntry, ...]:
    """Return every entry, sorted by name; an entry of ``extra`` replaces the shipped one of its name.

    >>> len(models()) == len(model_names())
    True
    """
    return tuple(_entry(file) for file in files(_SECTION, extra=extra).values())


def _entry(file: Path) -> ModelEntry:
    return _shipped_entry(file) if file.parent == _FOLDER else _checked_entry(file)


@cache
def _shipped_entry(file: Path) -> ModelEntry:
    return _checked_entry(file)


def _checked_entry(file: Path) -> ModelEntry:
    written = read(_Written, read_toml(file, what=_WHAT), where=f"{_WHAT} {str(file)!r}")
    return ModelEntry(
        spec=_shape(file, written.model_type, written.config, written.nulls),
        source=written.source,
        released=written.released,
        aliases=written.aliases,
        published_parameters=written.published_parameters,
        published_active_parameters=written.published_active_parameters,
    )


@cache
def _shipped_shape(file: Path) -> ModelSpec:
    """Return only the shape of one of zeroplan's own entries; a test compares each with the checked entry."""
    fields = read_toml(file, what=_WHAT)
    return _shape(file, str(fields["model_type"]), fields["config"], fields.get("nulls", ()))  # type: ignore[arg-type]


def _shape(file: Path, model_type: str, config: Mapping[str, object], nulls: Iterable[str]) -> ModelSpec:
    whole = {**config, **with_nulls(nulls), "model_type": model_type}
    try:
        return model_from_config(whole, name=normal(file.stem))
    except SpecError as error:
        raise SpecError(f"{_WHAT} {str(file)!r}: {error}") from None


def with_nulls(names: Iterable[str]) -> dict[str, object]:
    """Return null keys of a config; of a name with a dot, the second part is the key of an object.

    >>> with_nulls(["mamba_d_ssm", "rope_parameters.rope_theta"])
    {'mamba_d_ssm': None, 'rope_parameters': {'rope_theta': None}}
    """
    split = [name.partition(".") for name in names]
    return {name: {inner: None} if inner else None for name, _, inner in split}


def _aliases(file: Path) -> frozenset[str]:
    """Return aliases for look-up; repositories with their owner and without."""
    written = read_toml(file, what=_WHAT).get("aliases", ())
    named = [normal(str(alias)) for alias in written] if isinstance(written, list) else []
    return frozenset((*named, *(alias.rpartition("/")[2] for alias in named)))


_SECTION = Section("model", _FOLDER, _aliases, "`zeroplan models` lists all; --config takes its config.json", any_owner=True)

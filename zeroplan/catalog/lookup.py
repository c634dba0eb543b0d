"""Finds the TOML file of a model or GPU by its name.

The file's stem is the canonical name, and the file lists aliases. A user's folder takes precedence.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from zeroplan.errors import SpecError, unknown_name

_LONGEST_SHOWN = 60
_TUNED = re.compile(
    r"(-(instruct|chat|it|base|hf|pt|thinking|deduped|sft|2507|awq|gptq|int4|int8|4bit|8bit|nf4|nvfp4|fp8|bf16|fp16|bnb|unsloth"
    r"|dequantized))+$"
)
"""Suffixes of tuned or quantised models, which have the base model's shape."""


class Section(NamedTuple):
    """One kind of entry: its name in errors, the folder of shipped entries, and the function that reads an entry's aliases."""

    what: str
    folder: Path
    aliases: Callable[[Path], frozenset[str]]
    way_out: str
    any_owner: bool = False
    """A name may have an owner or a folder in front that no entry lists."""


def normal(name: str) -> str:
    """Return a name without case, blanks and underscores.

    >>> normal(" RTX_4090 24GB")
    'rtx-4090-24gb'
    """
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def find(section: Section, name: str, *, extra: Path | None) -> Path:
    """Return the file of the entry called ``name``, canonically or by an alias; an entry of ``extra`` wins.

    A canonical name opens no file. For an alias, entries with the same prefix are opened first. Suffixes of tuned models, and an
    owner or folder that no entry lists, are left out. Hyphens may be missing if only one entry matches. Raises UnknownNameError
    with the nearest names.
    """
    wanted, own, shipped = normal(name), own_files(extra), shipped_files(section.folder)
    file = own.get(wanted) or _own_alias(section, wanted, own) or shipped.get(wanted)
    if file is None:
        last = wanted.rpartition("/")[2] if section.any_owner else wanted
        attempts = dict.fromkeys((wanted, _TUNED.sub("", wanted), last, _TUNED.sub("", last)))
        found = (_shipped_alias(section, name) for name in attempts)
        meant = next((one for one in found if one is not None), None) or _but_for_hyphens(section, _TUNED.sub("", last))
        file = None if meant is None else own.get(meant, shipped[meant])
    if file is None:
        shown = name if len(name) <= _LONGEST_SHOWN else f"{name[: _LONGEST_SHOWN - 1]}…"
        raise unknown_name(section.what, shown, {*shipped, *own}, section.way_out)
    return file


def files(section: Section, *, extra: Path | None) -> dict[str, Path]:
    """Return every entry's file by its canonical name, sorted, without opening them."""
    together = {**shipped_files(section.folder), **own_files(extra)}
    return {name: together[name] for name in sorted(together)}


@cache
def shipped_files(folder: Path) -> Mapping[str, Path]:
    """Return zeroplan's own entries; cached, since they do not change."""
    return _named(folder.iterdir())


def own_files(folder: Path | None) -> Mapping[str, Path]:
    """Return the entries of a user's own folder."""
    if folder is None:
        return {}
    try:
        inside = list(folder.iterdir())
    except (OSError, ValueError):
        raise SpecError(f"catalogue folder {str(folder)!r} cannot be listed; name a folder of entries") from None
    return _named(inside)


def _named(candidates: Iterable[Path]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for file in sorted((one for one in candidates if one.suffix == ".toml"), key=lambda one: one.name):  # quicker than paths
        name = normal(file.stem)
        if name in named:
            raise SpecError(f"{named[name]} and {file} both mean {name!r}; rename one")
        named[name] = file
    return named


def _own_alias(section: Section, wanted: str, own: Mapping[str, Path]) -> Path | None:
    matches = [file for file in own.values() if wanted in section.aliases(file)]
    if len(matches) > 1:
        raise SpecError(f"{matches[0]} and {matches[1]} both have the alias {wanted!r}; remove it from one")
    return matches[0] if matches else None


def _shipped_alias(section: Section, wanted: str) -> str | None:
    shipped, last = shipped_files(section.folder), wanted.rpartition("/")[2]
    likely_first = sorted(shipped, key=lambda name: not (name.startswith(wanted) or last.startswith(name)))
    return next((name for name in likely_first if wanted == name or wanted in section.aliases(shipped[name])), None)


def _but_for_hyphens(section: Section, wanted: str) -> str | None:
    """Return the only entry with the same name or alias apart from hyphens: ``rtx4090``, ``llama3-8b``."""
    plain = wanted.replace("-", "")
    named = ((name, (name, *section.aliases(file))) for name, file in shipped_files(section.folder).items())
    meant = [name for name, called in named if plain in {one.replace("-", "") for one in called}]
    return meant[0] if len(meant) == 1 else None

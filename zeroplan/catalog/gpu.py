"""Which accelerator is meant by a name, and its published figures.

One TOML file per accelerator in ``gpus/``; the file's stem is the canonical name. A folder of one's own adds entries and
wins over the shipped ones.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from zeroplan.catalog.entry import read_toml
from zeroplan.errors import SpecError, unknown_name
from zeroplan.spec.base import read
from zeroplan.spec.hardware import ByteFigure, Figure, GpuSpec

_LIST_ALL = "`zeroplan gpus` lists all"
_WHAT = "GPU entry"
_FOLDER = Path(__file__).parent / "gpus"


def gpu(name: str, *, extra: Path | None = None) -> GpuSpec:
    """Return the accelerator called ``name``: a canonical name, an alias or what torch calls the device.

    Case, blanks and underscores do not matter. ``extra`` is a folder of entries that come before the shipped ones.

    >>> gpu("H100").name, gpu("rtx 4090").name, gpu("NVIDIA A100-SXM4-80GB").name
    ('h100-sxm-80gb', 'rtx-4090-24gb', 'a100-sxm-80gb')
    """
    wanted = _normal(name)
    own = _own_files(extra)
    if wanted in own:
        return _entry(wanted, own[wanted])
    if wanted in _shipped_files():
        return _shipped(wanted)
    found = _own_alias(wanted, own) or _shipped_alias(wanted)
    if found is None:
        raise unknown_name("GPU", name, gpu_names(extra=extra), _LIST_ALL)
    return _entry(found, own[found]) if found in own else _shipped(found)


def gpu_names(*, extra: Path | None = None) -> tuple[str, ...]:
    """Return every canonical name, sorted; reads no entry.

    >>> gpu_names()[:3]
    ('a10-24gb', 'a100-pcie-40gb', 'a100-pcie-80gb')
    """
    return tuple(sorted({*_shipped_files(), *_own_files(extra)}))


def gpus(*, extra: Path | None = None) -> tuple[GpuSpec, ...]:
    """Return every accelerator, sorted by name.

    >>> len(gpus()) == len(gpu_names())
    True
    """
    own = _own_files(extra)
    return tuple(_entry(name, own[name]) if name in own else _shipped(name) for name in gpu_names(extra=extra))


def _normal(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def _entry(name: str, file: Path) -> GpuSpec:
    fields = read_toml(file, what=_WHAT)
    where = f"{_WHAT} {str(file)!r}"
    if "name" in fields:
        raise SpecError(f"{where}: key 'name' is not needed, the file's name is the GPU's; remove it")
    return read(GpuSpec, {"name": name, **fields}, where=where)


def _named(files: Iterator[Path]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for file in sorted((file for file in files if file.name.endswith(".toml")), key=lambda file: file.name):
        name = _normal(file.name.removesuffix(".toml"))
        if name in named:
            raise SpecError(f"{named[name]} and {file} both mean {name!r}; rename one")
        named[name] = file
    return named


def _own_files(folder: Path | None) -> dict[str, Path]:
    if folder is None:
        return {}
    try:
        return _named(folder.iterdir())
    except OSError as error:
        raise SpecError(f"catalogue folder {folder} cannot be listed ({error.strerror}); name a folder of entries") from None


def _own_alias(wanted: str, own: Mapping[str, Path]) -> str | None:
    matches = [name for name, file in own.items() if wanted in map(_normal, _entry(name, file).aliases)]
    if len(matches) > 1:
        raise SpecError(f"{own[matches[0]]} and {own[matches[1]]} both have the alias {wanted!r}; remove it from one")
    return matches[0] if matches else None


@cache
def _shipped_files() -> Mapping[str, Path]:
    return _named(_FOLDER.iterdir())


@cache
def _shipped(name: str) -> GpuSpec:
    """Build one of zeroplan's own entries; they are tested with every check, so that an answer need not wait for them."""
    fields = read_toml(_shipped_files()[name], what=_WHAT)
    built = {key: _figure(key, value) if isinstance(value, dict) else value for key, value in fields.items()}
    built["aliases"] = tuple(fields.get("aliases", ()))  # type: ignore[arg-type]
    return GpuSpec(name=name, **built)  # type: ignore[arg-type]


def _figure(key: str, table: dict[str, object]) -> object:
    if key == "dense_flops_per_s":
        return {dtype: Figure(**figure) for dtype, figure in table.items()}  # type: ignore[arg-type]
    return (ByteFigure if key == "memory_bytes" else Figure)(**table)  # type: ignore[arg-type]


def _shipped_alias(wanted: str) -> str | None:
    # An alias belongs to one entry only; most are the beginning of its name, so those entries are read first.
    likely_first = sorted(_shipped_files(), key=lambda name: not name.startswith(wanted))
    return next((name for name in likely_first if wanted in _shipped(name).aliases), None)

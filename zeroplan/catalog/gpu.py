"""Finds an accelerator by name, with its published figures.

``gpus/`` has one TOML file per accelerator. The file's stem is the canonical name, and ``gpus/README.md`` describes the
sources.
"""

import re
from functools import cache
from pathlib import Path

from zeroplan.catalog.entry import read_toml
from zeroplan.catalog.lookup import Section, files, find, normal
from zeroplan.errors import SpecError, UnknownNameError
from zeroplan.spec.base import read
from zeroplan.spec.hardware import ByteFigure, Figure, GpuSpec

_WHAT = "GPU entry"
_FOLDER = Path(__file__).parent / "gpus"


def gpu(name: str, *, extra: Path | None = None) -> GpuSpec:
    """Return the accelerator called ``name``: a canonical name, an alias or torch's name of the device.

    Ignores case, blanks and underscores. A name with a number of GPUs, such as Slurm's ``a100:4``, is refused.
    ``extra``: a folder of entries that override the shipped ones.

    >>> gpu("H100").name, gpu("rtx4090").name, gpu("NVIDIA A100-SXM4-80GB").name, gpu("6000 ada").name
    ('h100-sxm-80gb', 'rtx-4090-24gb', 'a100-sxm-80gb', 'rtx-6000-ada-48gb')
    """
    if counted := re.fullmatch(r"((?:gres/)?gpu[:=].+|[\w-]+):(\d+)", name.strip()):
        only = re.sub(r"^(?:gres/)?gpu[:=]", "", counted[1])
        raise SpecError(f"GPU {name!r} contains two values; write --gpu {only} --gpus {counted[2]}")
    try:
        return _entry(find(_SECTION, name, extra=extra))
    except UnknownNameError:
        plain = _plain(name)
    try:
        return _entry(find(_SECTION, _by_words(plain) or plain, extra=extra))
    except UnknownNameError:
        return _entry(find(_SECTION, name, extra=extra))  # raises with the name as it was given


def _plain(name: str) -> str:
    """Return a name in the catalogue's spelling: without Slurm's prefix and the vendor, and with the unit of memory.

    >>> _plain("gpu:a100"), _plain("NVIDIA A100 40G"), _plain("a100-40"), _plain("rtx-4090")
    ('a100', 'a100-40gb', 'a100-40gb', 'rtx-4090')
    """
    text = re.sub(r"^(?:gres/)?gpu[:=]", "", normal(name))
    return re.sub(r"-(\d{2,3})(?:g|gib|-gb)?$", r"-\1gb", re.sub(r"^(?:nvidia|tesla|amd)-", "", text))


def _by_words(plain: str) -> str | None:
    """Return the only shipped entry whose name or alias contains all words of a name; None for a single word.

    >>> _by_words("6000-ada"), _by_words("rtx-pro-6000"), _by_words("a100-80gb")
    ('rtx-6000-ada-48gb', 'rtx-pro-6000-blackwell-96gb', None)
    """
    words = set(plain.split("-"))
    found = [file for file in files(_SECTION, extra=None).values() if any(
        words <= set(called.split("-")) for called in (file.stem, *_aliases(file)))]  # fmt: skip
    return found[0].stem if len(found) == 1 and len(words) > 1 else None


def gpu_names(*, extra: Path | None = None) -> tuple[str, ...]:
    """Return every canonical name, sorted; reads no entry.

    >>> gpu_names()[:3]
    ('a10-24gb', 'a100-pcie-40gb', 'a100-pcie-80gb')
    """
    return tuple(files(_SECTION, extra=extra))


def gpus(*, extra: Path | None = None) -> tuple[GpuSpec, ...]:
    """Return every accelerator, sorted by name.

    >>> len(gpus()) == len(gpu_names())
    True
    """
    return tuple(_entry(file) for file in files(_SECTION, extra=extra).values())


def _entry(file: Path) -> GpuSpec:
    return _shipped(file) if file.parent == _FOLDER else checked_entry(file)


def checked_entry(file: Path) -> GpuSpec:
    """Return one entry with every check; ``SpecError`` names the file, the key and the value in one line."""
    fields = read_toml(file, what=_WHAT)
    where = f"{_WHAT} {str(file)!r}"
    if "name" in fields:
        raise SpecError(f"{where}: key 'name' is not needed, the file's name is the GPU's; remove it")
    return read(GpuSpec, {"name": normal(file.stem), **fields}, where=where)


@cache
def _shipped(file: Path) -> GpuSpec:
    """Return one of zeroplan's own entries without checks; a test compares each with :func:`checked_entry`."""
    fields = read_toml(file, what=_WHAT)
    built = {key: _figure(key, value) if isinstance(value, dict) else value for key, value in fields.items()}
    built["aliases"] = tuple(fields.get("aliases", ()))  # type: ignore[arg-type]
    return GpuSpec(name=file.stem, **built)  # type: ignore[arg-type]


def _figure(key: str, table: dict[str, object]) -> object:
    if key == "dense_flops_per_s":
        return {dtype: Figure(**figure) for dtype, figure in table.items()}  # type: ignore[arg-type]
    return (ByteFigure if key == "memory_bytes" else Figure)(**table)  # type: ignore[arg-type]


def _aliases(file: Path) -> frozenset[str]:
    return frozenset(normal(alias) for alias in _entry(file).aliases)


_SECTION = Section("GPU", _FOLDER, _aliases, "`zeroplan gpus` lists all")

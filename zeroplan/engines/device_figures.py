"""Figures of a GPU that only a measurement shows, each with its record or public report (``device_figures.toml``).

None of them is computed.
"""

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from zeroplan.errors import SpecError
from zeroplan.ledger import Band

What = Literal["context", "process", "communicator", "workspace", "reserved"]
_FILE = Path(__file__).with_suffix(".toml")
_TEXTS = ("torch", "cuda", "as_of", "source", "nccl", "driver", "engine")


class DeviceFigure(NamedTuple):
    """One figure, the GPUs and versions for which it holds, and its source. In bytes; ``reserved`` in thousandths."""

    what: What
    gpus: tuple[str, ...]
    value: int
    torch: str
    cuda: str
    as_of: str
    source: str
    nccl: str = ""
    driver: str = ""
    engine: str = ""
    """The engine of a ``reserved`` figure."""

    @property
    def where(self) -> str:
        """Return the known versions and the date of the measurement, in a few words."""
        versions = (("torch", self.torch), ("CUDA", self.cuda), ("NCCL", self.nccl), ("driver", self.driver))
        return ", ".join((*(f"{name} {version}" for name, version in versions if version), self.as_of))


@cache
def figures(path: Path = _FILE) -> tuple[DeviceFigure, ...]:
    """Return all figures of a file, in its order. Raises SpecError with the number of a malformed table."""
    from zeroplan.catalog.entry import read_toml  # noqa: PLC0415  an estimate without a GPU reads no file

    tables = read_toml(path, what="device figures").get("figure", [])
    if not isinstance(tables, list):
        raise SpecError(f"device figures {str(path)!r}: figure is no list of tables; write [[figure]]")
    return tuple(_figure(table, f"device figures {str(path)!r}, figure {number}") for number, table in enumerate(tables, 1))


def _figure(table: dict[str, object], where: str) -> DeviceFigure:
    unknown = [key for key in table if key not in DeviceFigure._fields]
    missing = [key for key in DeviceFigure._fields if key not in table and key not in DeviceFigure._field_defaults]
    if unknown or missing:
        raise SpecError(f"{where}: {'no such key ' + repr(unknown[0]) if unknown else repr(missing[0]) + ' is missing'}")
    what, gpus, value = table["what"], table["gpus"], table["value"]
    if what not in get_args(What) or not isinstance(gpus, list) or not isinstance(value, int) or value <= 0:
        raise SpecError(
            f"{where}: what is one of {', '.join(get_args(What))}, gpus a list of names, value a positive whole number"
        )
    texts = {key: str(table[key]) for key in _TEXTS if key in table}
    if not texts["source"] or not texts["as_of"]:
        raise SpecError(f"{where}: the figure has no source or no date; name the record or the public report")
    return DeviceFigure(what=cast("What", what), gpus=tuple(map(str, gpus)), value=value, **texts)


@cache
def of_gpu(what: What, gpu: str, engine: str = "") -> tuple[DeviceFigure, ...]:
    """Return the figures of one kind that were seen on a GPU, by its canonical name; none for most GPUs.

    If several versions of torch have figures, the newest counts, which is nearest to the modelled one. Figures without a
    version are used last.

    >>> [figure.value for figure in of_gpu("communicator", "a100-sxm-80gb")], of_gpu("process", "t4-16gb")
    ([544000000, 688000000], ())
    """
    found = [one for one in figures() if one.what == what and gpu in one.gpus and one.engine == engine]
    newest = max((_version(one.torch) for one in found), default=())
    return tuple(one for one in found if _version(one.torch) == newest)


def _version(torch: str) -> tuple[int, ...]:
    """Return major and minor version for comparisons; an empty tuple, which sorts first, without a version.

    >>> _version("2.9.1") < _version("2.11.0+cu130"), _version("")
    (True, ())
    """
    return tuple(int(part) for part in torch.split(".")[:2]) if torch else ()


def band_of(found: tuple[DeviceFigure, ...]) -> Band:
    """Return the band from the smallest to the largest figure; the median is expected, the larger of two.

    >>> band_of(of_gpu("communicator", "a100-sxm-80gb"))
    Band(low_bytes=544000000, expected_bytes=688000000, high_bytes=688000000)
    """
    values = sorted(figure.value for figure in found)
    return Band(values[0], values[len(values) // 2], values[-1])


def sources(found: tuple[DeviceFigure, ...]) -> str:
    """Return the sources of figures in one line."""
    return "; ".join(f"{figure.source} ({figure.where})" for figure in found)

"""Records of measurements as files, read without torch: a record, or one line that says why it is none."""

from pathlib import Path

from zeroplan.catalog.text import shown, written_json
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.measurement import SCHEMA_VERSION, Measurement
from zeroplan.spec.base import read

#: How a file of many results is named, which ``verify --matrix`` writes, one result per line.
RESULTS = ".jsonl"


def is_results(path: Path) -> bool:
    """Whether a path names results of a matrix; any other file is one record."""
    return path.suffix == RESULTS


def files_of(path: Path) -> list[Path]:
    """Return the files that a path stands for: every record and every matrix's results of a folder by name, or the file itself."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in (".json", RESULTS) and not file.name.startswith("."))
    if not found:
        raise SpecError(
            f"folder {str(path)!r} holds no record; `zeroplan verify --record-dir` writes records as *.json, "
            "and results of a matrix as *.jsonl"
        )
    return found


def record_paths(path: Path) -> list[Path]:
    """Return the files of single records that a path stands for."""
    return [file for file in files_of(path) if not is_results(file)]


def read_record(path: Path) -> Measurement:
    """Read the record at ``path``.

    Raises :class:`~zeroplan.errors.SpecError`, in one line, for everything that is
    no record: no file, a folder, not UTF-8, a JSON cut short, another JSON, a record of a newer zeroplan, figures out of range.
    """
    data = written_json(path, what="record")
    if not isinstance(data, dict) or "schema_version" not in data or "steps" not in data:
        raise SpecError(
            f"record {str(path)!r} is JSON, but not a record of `zeroplan verify`: it has no schema_version and steps"
        )
    version = data["schema_version"]
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SpecError(
            f"record {str(path)!r} has schema version {shown(version)}, and this zeroplan reads up to {SCHEMA_VERSION}; "
            "update zeroplan"
        )
    try:
        return read(Measurement, data, where=f"record {str(path)!r}")
    except MeasurementError as error:
        raise SpecError(f"record {str(path)!r}: {error}") from None

"""Reads records of measurements from files, without torch; other files raise a one-line error."""

from pathlib import Path

from zeroplan.catalog.text import shown, written_json
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.measurement import SCHEMA_VERSION, Measurement
from zeroplan.spec.base import read

#: The suffix of files with many results, which ``verify --matrix`` writes, one result per line.
RESULTS = ".jsonl"


def is_results(path: Path) -> bool:
    """Whether the path is a file of matrix results; any other file contains one record."""
    return path.suffix == RESULTS


def files_of(path: Path) -> list[Path]:
    """The record and result files in a folder, sorted by name; a file is returned as it is."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in (".json", RESULTS) and not file.name.startswith("."))
    if not found:
        raise SpecError(
            f"folder {str(path)!r} contains no record; `zeroplan verify --record-dir` writes records as *.json, "
            "and results of a matrix as *.jsonl"
        )
    return found


def record_paths(path: Path) -> list[Path]:
    """The files of a path that contain a single record."""
    return [file for file in files_of(path) if not is_results(file)]


def read_record(path: Path) -> Measurement:
    """The record at ``path``.

    Raises :class:`~zeroplan.errors.SpecError`, in one line, for any other file: missing, a folder, not UTF-8, cut off, other
    JSON, from a newer zeroplan, or with figures out of range.
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

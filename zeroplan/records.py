"""Records of measurements as files, read without torch: a record, or one line that says why it is none."""

from pathlib import Path

from zeroplan.catalog.text import shown, written_json
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.measurement import SCHEMA_VERSION, Measurement
from zeroplan.spec.base import read


def record_paths(path: Path) -> list[Path]:
    """Return the records that a path stands for: those of a folder by name, or the file itself."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise SpecError(f"folder {str(path)!r} holds no record; `zeroplan verify --out` writes them as *.json")
    return found


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

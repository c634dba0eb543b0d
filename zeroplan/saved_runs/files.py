"""Saves and reads dry runs as JSON, compressed if the name ends in ``.gz``. Reading checks every value."""

import gzip
import json
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from zeroplan.catalog.text import shown, strict_json
from zeroplan.errors import SpecError
from zeroplan.memory_limit import no_more_memory_than
from zeroplan.script_trace import SCHEMA_VERSION, SavedRun, as_data
from zeroplan.spec.base import read
from zeroplan.units import MIB
from zeroplan.whole import unwritten, write_whole

LARGEST_BYTES = 64 * MIB
"""Limit of the uncompressed JSON, about a million blocks. [bytes]"""
_AT_LEAST_BYTES, _TIMES = 512 * MIB, 48
"""The memory limit for reading: a base plus a multiple of the JSON's size. In the worst case, a list of empty lists, Python needs
half the multiple, and the check needs the other half."""
_GZIP = b"\x1f\x8b"


def save(saved: SavedRun, path: Path, *, force: bool) -> None:
    """Write a run completely or not at all. Raises SpecError if it cannot be written, or is too large to read back."""
    content = json.dumps(saved, default=as_data, separators=(",", ":")).encode()
    if len(content) > LARGEST_BYTES:
        blocks = len(saved.trace.blocks.n_bytes) if saved.trace else 0
        raise SpecError(
            f"the run has {blocks:,} blocks of memory, more than a file of {LARGEST_BYTES // MIB} MiB can hold; run fewer "
            "--steps"
        )
    write(path, content, force=force)


def write(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file completely, compressed if its name ends in ``.gz``. Raises SpecError in one line."""
    try:
        write_whole(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content, force=force)
    except OSError as error:
        raise unwritten(error) from None


def read_saved(path: Path) -> SavedRun:
    """The saved run at ``path``.

    Raises :class:`~zeroplan.errors.SpecError`, in one line, for any other file: missing, cut off, too large, other JSON, from a
    newer zeroplan, or with contradictory blocks.
    """
    where = f"saved run {str(path)!r}"
    content = content_of(path, where)
    try:
        with no_more_memory_than(_AT_LEAST_BYTES + _TIMES * len(content)):
            return run_of(strict_json(content, where, written="saved run"), where)
    except MemoryError:
        raise SpecError(f"{where} needs more memory than its size justifies; it was not read") from None


def run_of(data: object, where: str) -> SavedRun:
    """Return the run in a file's JSON. Raises SpecError, in one line, for other JSON."""
    if not isinstance(data, dict) or data.get("content") != "zeroplan dryrun":
        raise SpecError(f"{where} is JSON, but not a run that `zeroplan dryrun --save` wrote")
    version = data.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SpecError(
            f"{where} has schema version {shown(version)}, and this zeroplan reads up to {SCHEMA_VERSION}; update zeroplan"
        )
    return read(SavedRun, data, where=where)


def content_of(path: Path, where: str, what: str = "saved run") -> bytes:
    """Return a file's JSON, uncompressed. Raises SpecError, in one line, for a missing, damaged or too large file."""
    try:
        if fault := _fault(path):
            raise SpecError(f"{where} {fault}")
        with path.open("rb") as file:
            compressed = file.read(2) == _GZIP
            file.seek(0)
            content = (cast("BinaryIO", gzip.GzipFile(fileobj=file)) if compressed else file).read(LARGEST_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise SpecError(f"{where} is cut off or damaged; save the run again") from None
    except OSError as error:
        raise SpecError(f"{where} cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_BYTES:
        raise SpecError(f"{where} contains more than {LARGEST_BYTES // MIB} MiB, so it is not a {what}")
    return content


def _fault(path: Path) -> str | None:
    if "\0" in str(path) or not path.exists():
        return "does not exist; check the path"
    return None if path.is_file() else "is not a file; give the path of a file"

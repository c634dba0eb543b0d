"""A dry run as a file: JSON, compressed where the name ends in ``.gz``. Reading believes nothing that it has not checked."""

import gzip
import json
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from zeroplan.catalog.text import complete_json, shown
from zeroplan.errors import SpecError
from zeroplan.memory_limit import no_more_memory_than
from zeroplan.script_trace import SCHEMA_VERSION, SavedRun, as_data
from zeroplan.spec.base import read
from zeroplan.units import MIB
from zeroplan.whole import unwritten, write_whole

LARGEST_BYTES = 64 * MIB
"""Of the JSON, uncompressed: about a million blocks."""
_AT_LEAST_BYTES, _TIMES = 512 * MIB, 48
"""How much memory reading may take, and how much more per byte of JSON: what a list of empty lists takes in Python, and again
as much for the check."""
_GZIP = b"\x1f\x8b"


def save(saved: SavedRun, path: Path, *, force: bool) -> None:
    """Write a run, the whole file or none. Raises SpecError where it cannot be written, or is larger than can be read again."""
    content = json.dumps(saved, default=as_data, separators=(",", ":")).encode()
    if len(content) > LARGEST_BYTES:
        raise SpecError(
            f"the run has {_blocks(saved):,} blocks of memory, more than a file of {LARGEST_BYTES // MIB} MiB holds; take fewer "
            "--steps"
        )
    write(path, content, force=force)


def write(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file whole, compressed where its name ends in ``.gz``. Raises SpecError in one line."""
    try:
        write_whole(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content, force=force)
    except OSError as error:
        raise unwritten(error) from None


def _blocks(saved: SavedRun) -> int:
    return 0 if saved.trace is None else len(saved.trace.blocks.n_bytes)


def read_saved(path: Path) -> SavedRun:
    """Read the run at ``path``.

    Raises :class:`~zeroplan.errors.SpecError`, in one line, for everything that is none: no file, one that is cut off or too
    large, another JSON, a run of a newer zeroplan, blocks that contradict each other.
    """
    where = f"saved run {str(path)!r}"
    content = content_of(path, where)
    try:
        with no_more_memory_than(_AT_LEAST_BYTES + _TIMES * len(content)):
            return run_of(complete_json(content, what="saved run", where=where), where)
    except MemoryError:
        raise SpecError(f"{where} asks for more memory than a run of its size can; it was not read") from None


def run_of(data: object, where: str) -> SavedRun:
    """The run that a file's JSON says. Raises SpecError, in one line, where it says another thing."""
    if not isinstance(data, dict) or data.get("content") != "zeroplan dryrun":
        raise SpecError(f"{where} is JSON, but not a run that `zeroplan dryrun --save` wrote")
    version = data.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SpecError(
            f"{where} has schema version {shown(version)}, and this zeroplan reads up to {SCHEMA_VERSION}; update zeroplan"
        )
    return read(SavedRun, data, where=where)


def content_of(path: Path, where: str, what: str = "saved run") -> bytes:
    """The bytes of a file's JSON, never more than are allowed. Raises SpecError, in one line, where there are none."""
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
        raise SpecError(f"{where} holds more than {LARGEST_BYTES // MIB} MiB; that is no {what}")
    return content


def _fault(path: Path) -> str | None:
    if "\0" in str(path) or not path.exists():
        return "does not exist; check the path"
    return None if path.is_file() else "is not a file; give the path of one"

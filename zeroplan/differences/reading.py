"""Reads any file that can be compared, and recognises its type by its content. The file is untrusted."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from zeroplan.catalog.text import read_text, strict_json
from zeroplan.differences.side import Side
from zeroplan.errors import SpecError
from zeroplan.memory_limit import no_more_memory_than
from zeroplan.resolve import Request
from zeroplan.units import MIB

_HEAD = 64
"""Enough bytes to recognise snapshots, saved runs and traces. [bytes]"""
_PICKLE, _GZIP = b"\x80", b"\x1f\x8b"
_RUN, _TRACE = b'{"content":"zeroplan dryrun"', b'{"traceEvents"'
_AT_LEAST_BYTES, _TIMES = 512 * MIB, 48
"""The memory limit for reading: a base plus a multiple of the size, as for a saved run."""
_OF_A_MODEL = ("model_type", "architectures")


class Opened(NamedTuple):
    """The content of a file: a job, which flags may override, or figures, or both."""

    name: str
    side: Side | None
    request: Request | None = None
    what: str = "job"


def opened(path: Path) -> Opened:
    """Return the content of a job, a configuration, an answer, a record, a dry run, a snapshot or a trace.

    Raises :class:`~zeroplan.errors.SpecError`, in one line, for any other file, and for a file whose reading needs more memory than
    its size justifies.
    """
    head = head_of(path)
    if is_snapshot(path, head):
        return _snapshot(path)
    if is_run_or_trace(head):
        return _of_data(large_data(path), path, f"file {str(path)!r}")
    if path.suffix == ".jsonl":
        raise SpecError(f"file {str(path)!r} has the results of many cases; give one record, as `zeroplan verify` writes it")
    return _small(path)


def is_snapshot(path: Path, head: bytes) -> bool:
    """Whether a file is a pickle, by its first bytes or its name."""
    return head.startswith(_PICKLE) or path.suffix in (".pickle", ".pkl")


def is_run_or_trace(head: bytes) -> bool:
    """Whether a file is a saved dry run, zeroplan's trace, or compressed, by its first bytes."""
    return head.startswith((_GZIP, _RUN, _TRACE))


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file; raises SpecError if it cannot be read."""
    where = f"file {str(path)!r}"
    try:
        if "\0" in str(path) or not path.exists():
            raise SpecError(f"{where} does not exist; check the path{_no_file_but_a_name(path)}")
        if not path.is_file():
            raise SpecError(f"{where} is not a file; give the path of one")
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise SpecError(f"{where} cannot be read: {error.strerror}") from None


def _no_file_but_a_name(path: Path) -> str:
    return "" if path.suffix else "; a model is named with --model, and flags of B alone come after --"


def _snapshot(path: Path) -> Opened:
    from zeroplan.differences.measured import of_snapshot  # noqa: PLC0415  imports only the reader for this type
    from zeroplan.snapshots.reading import read_snapshot  # noqa: PLC0415

    return Opened(path.name, of_snapshot(read_snapshot(path), path.name), what="snapshot")


def large_data(path: Path) -> object:
    """Return the JSON of a saved dry run or a trace, which may be compressed and have tens of megabytes."""
    from zeroplan.saved_runs.files import content_of  # noqa: PLC0415  see above

    where = f"file {str(path)!r}"
    content = content_of(path, where, "dry run or trace")
    with _limited(len(content), where):
        return strict_json(_decoded(content, where), where)


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{where} is not UTF-8 text (byte {error.start})") from None


def _small(path: Path) -> Opened:
    where = f"file {str(path)!r}"
    text = read_text(path, what="file")
    if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
        with _limited(len(text), where):
            return _of_data(strict_json(text, where), path, where)
    return _job(path)


@contextmanager
def _limited(n_bytes: int, where: str) -> Iterator[None]:
    """Limit the memory for reading a file of this size; raises SpecError beyond."""
    try:
        with no_more_memory_than(_AT_LEAST_BYTES + _TIMES * n_bytes):
            yield
    except MemoryError:
        raise SpecError(f"{where} asks for more memory than a file of its size can; it was not read") from None


def _of_data(data: object, path: Path, where: str) -> Opened:
    """Recognise a JSON file by its keys, and read it."""
    keys = data if isinstance(data, dict) else {}
    if keys.get("content") == "zeroplan dryrun" or {"command", "steps", "modules"} <= keys.keys():
        return _dry_run(keys, path.name, where)
    if "traceEvents" in keys:
        from zeroplan.differences.perfetto import of_trace  # noqa: PLC0415  see above

        return Opened(path.name, of_trace(keys, where, path.name), what="trace")
    if {"schema_version", "steps"} <= keys.keys():
        return _record(path)
    if {"schema_version", "job", "peak"} <= keys.keys():
        return _answer(keys, path.name, where)
    if not isinstance(keys.get("model"), dict) and any(key in keys for key in _OF_A_MODEL):
        raise SpecError(f"{where} is a model's config.json; give it to --config")
    return _job(path)


def _dry_run(data: Mapping[str, object], name: str, where: str) -> Opened:
    from zeroplan.differences.measured import of_dry_run  # noqa: PLC0415  see above
    from zeroplan.saved_runs.files import run_of  # noqa: PLC0415
    from zeroplan.script_run import DryRun  # noqa: PLC0415
    from zeroplan.spec.base import read  # noqa: PLC0415

    run = run_of(data, where).run if "content" in data else read(DryRun, data, where=where)
    return Opened(name, of_dry_run(run, name), what="dry run")


def _record(path: Path) -> Opened:
    from zeroplan.differences.measured import of_record  # noqa: PLC0415  see above
    from zeroplan.records import read_record  # noqa: PLC0415

    return Opened(path.name, of_record(read_record(path), path.name), what="record")


def _answer(data: Mapping[str, object], name: str, where: str) -> Opened:
    from zeroplan.differences.estimated import job_of_answer, of_answer  # noqa: PLC0415  see above
    from zeroplan.resolve import request_of  # noqa: PLC0415

    return Opened(name, of_answer(data, where, name), request_of(job_of_answer(data, where)), "answer")


def _job(path: Path) -> Opened:
    """Read a job file, or another program's configuration."""
    from zeroplan.catalog.setups.reading import is_setup  # noqa: PLC0415  see above
    from zeroplan.job_file import read_job_file  # noqa: PLC0415

    if is_setup(path):
        return Opened(path.name, None, Request(from_file=str(path)), "configuration file")
    return Opened(path.name, None, read_job_file(path))

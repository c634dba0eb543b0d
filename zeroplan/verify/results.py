"""Results of many cases in one file, a JSON object per line, each line whole: a kill loses at most the running case."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from zeroplan.errors import MeasurementError, SpecError
from zeroplan.measurement import SCHEMA_VERSION, Measurement
from zeroplan.spec.base import Count, CountOrZero, Range, Spec, read
from zeroplan.verify.task import Task

Outcome = Literal["measured", "out of memory", "refused", "failed"]
_BEGINNING = b'{"schema_version":'
#: What need not be run again.
SETTLED: tuple[Outcome, ...] = ("measured", "out of memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Spec):
    """What came of one case: the record of the fullest rank, or why there is none.

    ``card_bytes`` is the memory of the GPU it ran on, where it did. [bytes]
    """

    schema_version: Annotated[int, Range(1, SCHEMA_VERSION)] = SCHEMA_VERSION
    name: str
    task: Task
    outcome: Outcome
    says: str = ""
    card: str = ""
    card_bytes: CountOrZero | None = None
    record: Measurement | None = None
    ranks: Count = 1
    """How many ranks left a record."""
    seconds: Annotated[float, Range(0, 1e9)] = 0.0


def what_is_run(task: Task) -> Task:
    """A task by which results are found again: without where and how patiently it was run."""
    return replace(task, store="", folder="", timeout_s=300.0)


class Results:
    """The results in a file, and a way to append one."""

    def __init__(self, descriptor: int, path: Path, found: list[Result]) -> None:
        self._descriptor, self.path = descriptor, path
        self.found = found

    def of(self, task: Task) -> Result | None:
        """The last result of a case, where there is one."""
        return next((one for one in reversed(self.found) if what_is_run(one.task) == what_is_run(task)), None)

    def append(self, result: Result) -> None:
        """Write one line, whole and on the disk before this returns."""
        line = memoryview((json.dumps(asdict(result), ensure_ascii=False, separators=(",", ":")) + "\n").encode())
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise MeasurementError(f"results cannot be written to {str(self.path)!r}: {error.strerror}") from None
        self.found.append(result)


@contextmanager
def opened(path: Path, *, say: Callable[[str], None]) -> Iterator[Results]:
    """Open a file of results, made where there is none, for one writer at a time.

    A last line that a killed run left half-written is cut off, and ``say`` told. Raises SpecError where the file holds anything
    else, and MeasurementError where another run has it open or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise MeasurementError(f"results cannot be written to {str(path)!r}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MeasurementError(
                f"another run is writing to {str(path)!r}; wait for it, or name another --record-dir"
            ) from None
        yield Results(descriptor, path, _found(descriptor, path, say))
    finally:
        os.close(descriptor)


def read_results(path: Path) -> list[Result]:
    """The results in a file, without a last line that is half written. Raises SpecError in one line for any other file."""
    if not path.is_file():
        raise SpecError(f"results {str(path)!r} is not a file; give the path of a .jsonl that `zeroplan verify --matrix` wrote")
    try:
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except OSError as error:
        raise SpecError(f"results {str(path)!r} cannot be read: {error.strerror}") from None
    return [_result(line, f"results {str(path)!r}, line {number}") for number, line in enumerate(lines, 1)]


def _found(descriptor: int, path: Path, say: Callable[[str], None]) -> list[Result]:
    data = path.read_bytes()
    half = data[data.rfind(b"\n") + 1 :]
    found = read_results(path)
    if half[: len(_BEGINNING)] != _BEGINNING[: len(half)]:
        raise SpecError(f"results {str(path)!r} ends in something that is no result; take it out, or name another --record-dir")
    if half:
        os.ftruncate(descriptor, len(data) - len(half))
        say(
            f"results {str(path)!r}: the last line was half written ({len(half):,} bytes) and is dropped; its case is run again"
        )
    return found


def _result(line: bytes, where: str) -> Result:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise SpecError(f"{where} is not JSON; take the line out, or name another --record-dir") from None
    if not isinstance(data, dict):
        raise SpecError(f"{where} is no result; take the line out, or name another --record-dir")
    return read(Result, data, where=where)

"""Reads and writes the results of many cases: one JSON object per line, so a kill loses at most the running case.

A marker file beside it names the running case. If the marker exists at opening, the last run was killed in that case.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

from zeroplan.catalog.text import each_key_once
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.measurement import SCHEMA_VERSION, Measurement
from zeroplan.spec.base import Count, CountOrZero, Range, Spec, read
from zeroplan.verify.task import Task
from zeroplan.whole import write_whole

Outcome = Literal["measured", "out of memory", "refused", "failed"]
_BEGINNING = b'{"schema_version":'
#: Outcomes that need no further run.
SETTLED: tuple[Outcome, ...] = ("measured", "out of memory")


class Result(Spec):
    """The result of one case: the record of the rank with the highest peak, or the reason why there is none.

    ``card_bytes`` is the memory of the GPU on which it ran, if any. [bytes]
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
    """How many ranks wrote a record."""
    seconds: Annotated[float, Range(0, 1e9)] = 0.0


def without_run_options(task: Task) -> Task:
    """The task without folder, store and timeout, which do not change the result."""
    return replace(task, store="", folder="", timeout_s=300.0)


class Results:
    """The results in a file, and a way to append to them.

    ``found`` are the results already in the file; ``dropped`` is the size of a half-written last line that was removed [bytes];
    ``broken_off`` is the case in which the last run was killed, if any.
    """

    def __init__(self, descriptor: int, path: Path, found: list[Result], *, dropped: int = 0) -> None:
        self._descriptor, self.path = descriptor, path
        self.found, self.dropped = found, dropped
        self.broken_off = _broken_off(self._mark, len(found))

    @property
    def _mark(self) -> Path:
        return self.path.with_name(f".{self.path.name}.running")

    def of(self, task: Task) -> Result | None:
        """The last result of a case; None without one."""
        return next((one for one in reversed(self.found) if without_run_options(one.task) == without_run_options(task)), None)

    def begin(self, name: str) -> None:
        """Write the name of the case that is about to run into the marker file."""
        try:
            write_whole(self._mark, json.dumps({"case": name, "after": len(self.found)}), force=True)
        except OSError as error:
            raise _unwritten(self.path, error) from None

    def append(self, result: Result) -> None:
        """Append one line and flush it to disk; if that fails, remove the part written."""
        line = memoryview((json.dumps(asdict(result), ensure_ascii=False, separators=(",", ":")) + "\n").encode())
        before = os.fstat(self._descriptor).st_size
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise _unwritten(self.path, error) from None
        self.found.append(result)

    def end(self) -> None:
        """Remove the marker: this run was not killed."""
        with suppress(OSError):
            self._mark.unlink(missing_ok=True)


def _unwritten(path: Path, error: OSError) -> MeasurementError:
    return MeasurementError(f"results cannot be written to {str(path)!r}: {error.strerror}")


def _broken_off(mark: Path, found: int) -> str | None:
    """The case in the marker file; None if its result has been written since, empty if the marker is incomplete."""
    try:
        marker = json.loads(mark.read_text(encoding="utf-8"))
        return None if int(marker["after"]) < found else str(marker["case"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        return ""


@contextmanager
def opened(path: Path, *, say: Callable[[str], None]) -> Iterator[Results]:
    """Open a file of results for one writer at a time; create it if missing.

    Removes a last line that a killed run left half-written. Raises SpecError if the file contains anything else, and
    MeasurementError if another run has it open or it cannot be written. ``say`` receives a warning if the file system has no locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise _unwritten(path, error) from None
    try:
        _hold(descriptor, path, say)
        found, dropped = _found(descriptor, path)
        results = Results(descriptor, path, found, dropped=dropped)
        try:
            yield results
        finally:
            results.end()
            if not os.fstat(descriptor).st_size:  # no case has run
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


#: Errors of a lock that another process holds; any other error means that the file system has no locks.
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


def _hold(descriptor: int, path: Path, say: Callable[[str], None]) -> None:
    """Lock the file until it is closed or this process ends."""
    import fcntl  # noqa: PLC0415  absent on Windows, where results can still be read

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise MeasurementError(
                f"another run is writing to {str(path)!r}; wait for it, or name another --record-dir"
            ) from None
        say(f"the file system of {str(path)!r} has no locks ({error.strerror}): make sure that no other run writes there")


def read_results(path: Path) -> list[Result]:
    """The results in a file, without a half-written last line. Raises SpecError for any other file."""
    if not path.is_file():
        raise SpecError(f"results {str(path)!r} is not a file; give the path of a .jsonl that `zeroplan verify --matrix` wrote")
    try:
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except OSError as error:
        raise SpecError(f"results {str(path)!r} cannot be read: {error.strerror}") from None
    return [_result(line, f"results {str(path)!r}, line {number}") for number, line in enumerate(lines, 1)]


def last_results(path: Path) -> list[Result]:
    """The last result of each case in a file; a failed case may have several."""
    return list({without_run_options(one.task): one for one in read_results(path)}.values())


def _found(descriptor: int, path: Path) -> tuple[list[Result], int]:
    """The complete lines, and the size of a half-written one, which is removed. [bytes]"""
    data = path.read_bytes()
    half = data[data.rfind(b"\n") + 1 :]
    found = read_results(path)
    written = half.rstrip(b"\0")  # a power failure may leave NUL bytes
    if written[: len(_BEGINNING)] != _BEGINNING[: len(written)]:
        raise SpecError(f"results {str(path)!r} ends in a line that is not a result; remove it, or name another --record-dir")
    if half:
        os.ftruncate(descriptor, len(data) - len(half))
    return found, len(half)


def _result(line: bytes, where: str) -> Result:
    try:
        data = json.loads(line, object_pairs_hook=lambda pairs: each_key_once(pairs, where))
    except SpecError:
        raise
    except (ValueError, RecursionError):
        raise SpecError(f"{where} is not JSON; remove the line, or name another --record-dir") from None
    if not isinstance(data, dict):
        raise SpecError(f"{where} is not a result; remove the line, or name another --record-dir")
    return read(Result, data, where=where)

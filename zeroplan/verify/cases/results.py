"""Results of many cases in one file, a JSON object per line, each line whole: a kill loses at most the running case.

Beside the file stands a mark that says which case is running. Who finds one when it opens the file knows that the last run was
ended in the middle of that case.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
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
    """The results in a file, and a way to append one.

    ``found`` are those that the file held, ``dropped`` what of its last line was cut off [bytes], and ``broken_off`` the case in
    whose middle the last run was ended, where it was.
    """

    def __init__(self, descriptor: int, path: Path, found: list[Result], *, dropped: int = 0) -> None:
        self._descriptor, self.path = descriptor, path
        self.found, self.dropped = found, dropped
        self.broken_off = _broken_off(self._mark, len(found))

    @property
    def _mark(self) -> Path:
        return self.path.with_name(f".{self.path.name}.running")

    def of(self, task: Task) -> Result | None:
        """The last result of a case, where there is one."""
        return next((one for one in reversed(self.found) if what_is_run(one.task) == what_is_run(task)), None)

    def begin(self, name: str) -> None:
        """Note which case is run now, before any time is spent on it."""
        try:
            write_whole(self._mark, json.dumps({"case": name, "after": len(self.found)}), force=True)
        except OSError as error:
            raise _unwritten(self.path, error) from None

    def append(self, result: Result) -> None:
        """Write one line, whole and on the disk before this returns; where that fails, nothing of it stays."""
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
        """Take the mark away: this run was not killed."""
        with suppress(OSError):
            self._mark.unlink(missing_ok=True)


def _unwritten(path: Path, error: OSError) -> MeasurementError:
    return MeasurementError(f"results cannot be written to {str(path)!r}: {error.strerror}")


def _broken_off(mark: Path, found: int) -> str | None:
    """What a mark says, which is stale where the result has been written since; empty where it was half written itself."""
    try:
        said = json.loads(mark.read_text(encoding="utf-8"))
        return None if int(said["after"]) < found else str(said["case"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        return ""


@contextmanager
def opened(path: Path, *, say: Callable[[str], None]) -> Iterator[Results]:
    """Open a file of results, made where there is none, for one writer at a time.

    A last line that a killed run left half-written is cut off. Raises SpecError where the file holds anything else, and
    MeasurementError where another run has it open or it cannot be written. ``say`` is told where the file system has no locks.
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
            if not os.fstat(descriptor).st_size:  # nothing came of it
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


#: What a lock fails with where another holds it; anything else says that there are no locks to be had.
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


def _hold(descriptor: int, path: Path, say: Callable[[str], None]) -> None:
    """Lock the file until it is closed or this process is gone, however it goes: no lock outlives its holder."""
    import fcntl  # noqa: PLC0415  Windows, where results are read and compared, has none

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise MeasurementError(
                f"another run is writing to {str(path)!r}; wait for it, or name another --record-dir"
            ) from None
        say(f"the file system of {str(path)!r} has no locks ({error.strerror}): see to it that no other run writes there")


def read_results(path: Path) -> list[Result]:
    """The results in a file, without a last line that is half written. Raises SpecError in one line for any other file."""
    if not path.is_file():
        raise SpecError(f"results {str(path)!r} is not a file; give the path of a .jsonl that `zeroplan verify --matrix` wrote")
    try:
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except OSError as error:
        raise SpecError(f"results {str(path)!r} cannot be read: {error.strerror}") from None
    return [_result(line, f"results {str(path)!r}, line {number}") for number, line in enumerate(lines, 1)]


def last_results(path: Path) -> list[Result]:
    """The last result of each case in a file: one that failed may have been run again."""
    return list({what_is_run(one.task): one for one in read_results(path)}.values())


def _found(descriptor: int, path: Path) -> tuple[list[Result], int]:
    """The whole lines, and how much of a half-written one was cut off. [bytes]"""
    data = path.read_bytes()
    half = data[data.rfind(b"\n") + 1 :]
    found = read_results(path)
    written = half.rstrip(b"\0")  # a loss of power may leave room that was never filled
    if written[: len(_BEGINNING)] != _BEGINNING[: len(written)]:
        raise SpecError(f"results {str(path)!r} ends in something that is no result; take it out, or name another --record-dir")
    if half:
        os.ftruncate(descriptor, len(data) - len(half))
    return found, len(half)


def _result(line: bytes, where: str) -> Result:
    try:
        data = json.loads(line, object_pairs_hook=lambda pairs: each_key_once(pairs, where))
    except SpecError:
        raise
    except (ValueError, RecursionError):
        raise SpecError(f"{where} is not JSON; take the line out, or name another --record-dir") from None
    if not isinstance(data, dict):
        raise SpecError(f"{where} is no result; take the line out, or name another --record-dir")
    return read(Result, data, where=where)

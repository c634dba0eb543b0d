"""Runs all checks on random jobs: ``python -m tests.properties.nightly --cases 1000000 --seconds 28800 --seed 0``.

A case is a number. It is the seed of a random job, on which every check runs, and of an invalid input. ``--workers`` processes take
cases in order from ``--seed`` on. At the end the run prints the next number, with which another run can continue. When a check
fails, the run prints the command that repeats the case, and continues with the other checks. At the end it prints counts: how often
each check held, which did not apply and why, which draws were no jobs, and how often every choice was drawn.

A check of one case has limits: seconds of a core, seconds in all, and memory. Processes are replaced after some time. If one dies,
that is a failure of its cases.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests import strategies
from tests.properties.checks import CHECKS, Refused
from tests.properties.invalid import refuses
from tests.properties.tally import Tally, kinds

#: Cases that a process takes at once, and how many times it does so before a new process replaces it.
CHUNK, CHUNKS = 50, 200
#: Limits of one check of one case. [s of a core, s, bytes beyond what the process has at its start]
MOST_CPU, MOST_SECONDS, MOST_BYTES = 60, 600, 4 << 30
#: Characters of a job that a failure shows.
LONGEST = 4000
#: Seconds between two lines of progress.
EVERY = 60
#: The name of the check with invalid input, which zeroplan must refuse in one line.
INVALID = "refuses"
COMMAND = "python -m tests.properties.nightly --case {} --check {}"


class TooLong(BaseException):  # not an Exception, which zeroplan's code could catch
    """A check took longer than it may."""


class Failure(NamedTuple):
    """A check that failed, its case, and the text to print."""

    check: str
    case: int
    said: str


class Chunk(NamedTuple):
    """The counts and failures of some cases, the first of which is ``first``."""

    first: int
    tally: Tally
    failures: tuple[Failure, ...]


def drawn(case: int) -> Random:
    """Return the random generator of a case."""
    return Random(case)  # noqa: S311  nothing secret is drawn


def failures(case: int, names: Iterable[str], tally: Tally) -> Iterator[Failure]:
    """Yield the checks that fail for a case, and count all."""
    try:
        job, refused = strategies.drawing(drawn(case))
    except Exception:  # noqa: BLE001  any error is a failure to report
        yield Failure("drawing", case, traceback.format_exc())
        return
    tally.count("cases", "drawn")
    for reason in refused:
        tally.reason("draws that contradict themselves, and were drawn again", reason)
    for section, choice in kinds(job):
        tally.count(section, choice)
    checks: dict[str, Callable[[], str | None]] = {name: lambda ask=ask: ask(job, drawn(case)) for name, ask in CHECKS.items()}  # type: ignore[misc]
    checks[INVALID] = lambda: refuses(case)
    for name in names:
        began = time.process_time()
        try:
            with _limited():
                told = checks[name]()
            tally.count("held", name)
            if told:
                tally.count(f"{name}: what was asked", told)
        except Refused as reason:
            tally.count("not asked", name)
            tally.reason(f"not asked: {name}", str(reason))
        except (Exception, TooLong):  # noqa: BLE001  any error is a failure to report
            tally.count("failed", name)
            yield Failure(name, case, f"{traceback.format_exc()}\n{str(job)[:LONGEST] if name != INVALID else ''}")
        tally.count("milliseconds of a core", name, round(1000 * (time.process_time() - began)))


def held(case: int, names: Iterable[str] = (*CHECKS, INVALID)) -> str | None:
    """Return None if every check holds, or the text of the first failure."""
    return next((told(failure) for failure in failures(case, names, Tally())), None)


def told(failure: Failure) -> str:
    """Return a failure as text: the command that repeats it, and its traceback."""
    return f"{COMMAND.format(failure.case, failure.check)}\n\n{failure.said}"


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TooLong if the body takes too many seconds, of a core or in all."""

    def raises(*_: object) -> None:
        raise TooLong

    kept = [(one, signal.signal(one, raises)) for one in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for one, before in kept:
            signal.signal(one, before)


# --- processes -----------------------------------------------------------------------------------------------------------


def _bound_memory() -> None:
    """Limit the memory of this process to ``MOST_BYTES`` more than it has; beyond it, allocations raise MemoryError."""
    has = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def work(asked: Connection) -> None:
    """Run the cases that arrive on a connection until it is closed; this is the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _bound_memory()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # without this, garbage collection of the caches takes a sixth of the time
    with suppress(EOFError, BrokenPipeError):  # the parent process has ended
        while True:
            first, count, names = asked.recv()
            tally, found = Tally(), list[Failure]()
            for case in range(first, first + count):
                found += failures(case, [name for name in names if name not in {one.check for one in found}], tally)
            asked.send(Chunk(first, tally, tuple(found)))


class _Worker:
    """A worker process, the cases that it has now, and how many chunks it will still take."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.connection, there = context.Pipe()
        self.process: BaseProcess = context.Process(target=work, args=(there,), daemon=True)
        self.process.start()
        there.close()
        self.first, self.count, self.left = 0, 0, CHUNKS

    def ask(self, first: int, count: int, names: Iterable[str]) -> None:
        self.first, self.count, self.left = first, count, self.left - 1
        self.connection.send((first, count, tuple(names)))

    def answer(self) -> Chunk:
        try:
            return self.connection.recv()  # type: ignore[no-any-return]
        except EOFError:
            self.process.join()
            self.left = 0
            said = f"its process ended with {self.process.exitcode} in one of {self.count} cases from here on"
            return Chunk(self.first, Tally(), (Failure("process", self.first, said),))

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()


class Night:
    """A run: its workers, the counts and failures so far, and the checks that still run."""

    def __init__(self, first: int, cases: int, seconds: float) -> None:
        self.began, self.seconds = time.monotonic(), seconds
        self.next, self.stop = first, first + cases
        self.names = [*CHECKS, INVALID]
        self.tally, self.failed = Tally(), dict[str, Failure]()
        self.out = dict[Connection, _Worker]()

    def run(self, workers: int) -> None:
        """Take cases in order until the time is over or no cases are left."""
        said = time.monotonic()
        while self._fill(workers):
            for connection in wait(list(self.out), timeout=1):
                self._take(self.out.pop(connection))  # type: ignore[arg-type]
            if time.monotonic() - said > EVERY:
                said = time.monotonic()
                self.say()
            if time.monotonic() - self.began > self.seconds:
                break

    def say(self) -> None:
        """Print the progress."""
        done, busy = self.tally.sections["cases"]["drawn"], sum(self.tally.sections["milliseconds of a core"].values()) / 1000
        rate = f"{done / (time.monotonic() - self.began):.0f} a second, {done / max(busy, 0.001):.0f} per second of a core"
        print(f"{done:,} cases, {rate}; failing: {', '.join(self.failed) or 'none'}", flush=True)  # noqa: T201

    @property
    def undone(self) -> int:
        """The first case without a result."""
        return min([self.next, *(worker.first for worker in self.out.values())])

    def _fill(self, workers: int) -> bool:
        """Start workers up to the limit; return whether any is running."""
        while self.next < self.stop and len(self.out) < workers and self.names:
            self._ask(_Worker())
        return bool(self.out)

    def _ask(self, worker: _Worker) -> None:
        count = min(CHUNK, self.stop - self.next)
        worker.ask(self.next, count, self.names)
        self.next += count
        self.out[worker.connection] = worker

    def _take(self, worker: _Worker) -> None:
        chunk = worker.answer()
        self.tally.add(chunk.tally)
        for failure in chunk.failures:
            if failure.check not in self.failed:
                self.failed[failure.check] = failure
                print(f"\n{failure.check} fails; to repeat it alone:\n\n    {told(failure)}", flush=True)  # noqa: T201
            if failure.check in self.names:
                self.names.remove(failure.check)
        if worker.left and self.next < self.stop and self.names:
            self._ask(worker)
        else:
            worker.end()


def run(first: int, cases: int, seconds: float, workers: int) -> int:
    """Run the cases, print the results, and return the exit code."""
    night = Night(first, cases, seconds)
    try:
        night.run(workers)
    except KeyboardInterrupt:
        print("interrupted")  # noqa: T201
    undone = night.undone
    for worker in night.out.values():
        worker.end()
    print("\n".join(night.tally.lines()))  # noqa: T201
    night.say()
    for failure in night.failed.values():
        print(f"fails: {COMMAND.format(failure.case, failure.check)}")  # noqa: T201
    print(f"go on with --seed {undone}")  # noqa: T201
    return 1 if night.failed else 0


def main() -> int:
    """Read the command line, run the cases or one case, and return the exit code."""
    reading = argparse.ArgumentParser(prog="python -m tests.properties.nightly", description=__doc__)
    reading.add_argument("--cases", type=int, default=1_000_000, help="how many at most")
    reading.add_argument("--seconds", type=float, default=8 * 3600, help="how long at most")
    reading.add_argument("--seed", type=int, default=0, help="the first case")
    reading.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    reading.add_argument("--case", type=int, help="this one alone")
    reading.add_argument("--check", choices=(*CHECKS, INVALID), help="of the one case, this check alone")
    asked = reading.parse_args()
    if asked.case is None:
        return run(asked.seed, asked.cases, asked.seconds, asked.workers)
    failure = held(asked.case) if asked.check is None else held(asked.case, (asked.check,))
    print(failure or "it holds")  # noqa: T201
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())

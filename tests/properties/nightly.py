"""As many random cases as there is time for: ``python -m tests.properties.nightly --cases 1000000 --seconds 28800 --seed 0``.

A case is a number: of the job that is drawn with it, of which every check is asked, and of the invalid input that is made with it.
Cases are taken in order from ``--seed`` on, on every core (``--processes``), so that a run goes on where another one ended: it says
with which number. The first case that fails ends it, and is printed as the command that repeats it alone.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable
from random import Random

from tests import strategies
from tests.properties.checks import CHECKS, Refused
from tests.properties.invalid import refuses

#: Cases that a process takes at once.
CHUNK = 50
#: What is asked beside the checks: input that is broken is refused in one line.
INVALID = "refuses"
COMMAND = "python -m tests.properties.nightly --case {} --check {}"


def drawn(case: int) -> Random:
    """Where a case draws from."""
    return Random(case)  # noqa: S311  nothing secret is drawn


def held(case: int, names: Iterable[str] = (*CHECKS, INVALID)) -> str | None:
    """Nothing where every check holds; else what to run, and what it says."""
    job = strategies.job(drawn(case))
    for name in names:
        try:
            refuses(case) if name == INVALID else CHECKS[name](job, drawn(case))
        except Refused:
            continue
        except Exception:  # noqa: BLE001  whatever it is, it is told
            return f"{COMMAND.format(case, name)}\n{job}\n{traceback.format_exc()}"
    return None


def chunk(first: int) -> tuple[int, str | None]:
    """The first failure among so many cases from this one on."""
    told = next((told for case in range(first, first + CHUNK) if (told := held(case))), None)
    return first, told


def run(first: int, cases: int, seconds: float, processes: int) -> int:
    """Take cases in order until one fails, time is over, or there are no more; the exit status."""
    started, done, failure = time.monotonic(), 0, None
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for at, failure in pool.imap(chunk, range(first, first + cases, CHUNK)):
            if failure is not None or time.monotonic() > started + seconds:
                break
            done = at + CHUNK - first
            if done % (20 * CHUNK) == 0:
                print(f"{done:,} cases hold, {done / (time.monotonic() - started):.0f} a second", flush=True)  # noqa: T201
        pool.terminate()
    if failure is not None:
        print(f"a case fails; to repeat it alone:\n\n    {failure}")  # noqa: T201
        return 1
    print(f"{done:,} cases hold; go on with --seed {first + done}")  # noqa: T201
    return 0


def main() -> int:
    """Read the command line."""
    reading = argparse.ArgumentParser(prog="python -m tests.properties.nightly", description=__doc__)
    reading.add_argument("--cases", type=int, default=1_000_000, help="how many at most")
    reading.add_argument("--seconds", type=float, default=8 * 3600, help="how long at most")
    reading.add_argument("--seed", type=int, default=0, help="the first case")
    reading.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    reading.add_argument("--case", type=int, help="this one alone")
    reading.add_argument("--check", choices=(*CHECKS, INVALID), help="of the one case, this check alone")
    told = reading.parse_args()
    if told.case is None:
        return run(told.seed, told.cases, told.seconds, told.processes)
    failure = held(told.case) if told.check is None else held(told.case, (told.check,))
    print(failure or "it holds")  # noqa: T201
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())

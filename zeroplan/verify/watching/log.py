"""The collectives that a process called, and which part of the run it was. Data alone."""

import time
from bisect import bisect_right
from typing import NamedTuple

from zeroplan.errors import MeasurementError

_STEP_NS = 10**8
"""Smaller corrections of a clock are made by letting it run a little faster or slower, and both clocks share those: ntpd steps
from 128 ms on. [ns]"""


class Call(NamedTuple):
    """One collective: bytes of its largest buffer, the phase it began in, and how long it took where that is known."""

    operation: str
    dtype: str
    group: int
    n_bytes: int
    phase: str
    seconds: float | None = None


class Log:
    """The collectives of this process, in order; ``phase`` is set by whoever runs the step."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._since: list[tuple[int, str]] = [(0, "")]
        self._ahead: list[tuple[int, int]] = []
        """By how much at least and at most the clock of the system was ahead of the one that only counts. [ns]"""

    @property
    def phase(self) -> str:
        """Which part of the run it is."""
        return self._since[-1][1]

    @phase.setter
    def phase(self, phase: str) -> None:
        self._since.append((self._now(), phase))

    def phase_at(self, time_ns: int) -> str:
        """Which part of the run it was then, by the clock of the system."""
        return self._since[bisect_right(self._since, (time_ns, "\uffff")) - 1][1]

    def _now(self) -> int:
        before, now, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        self._ahead.append((now - after, now - before))
        return now

    def require_a_steady_clock(self) -> None:
        """Raise MeasurementError where the clock of the system was set since the first phase.

        torch's profiler and flight recorder put what happened in order by that clock.
        """
        self._now()
        if max(low for low, _ in self._ahead) - min(high for _, high in self._ahead) > _STEP_NS:
            raise MeasurementError("this machine's clock was set during the run, which mixes up what was seen; run it again")

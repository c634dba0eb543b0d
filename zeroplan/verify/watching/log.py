"""Stores a process's collectives and phases."""

import time
from bisect import bisect_right
from typing import NamedTuple

from zeroplan.errors import MeasurementError

_STEP_NS = 10**8
"""Larger clock changes raise an error. ntpd slews smaller ones, which affects both clocks alike, and steps from 128 ms. [ns]"""


class Call(NamedTuple):
    """One collective: bytes of its largest buffer, the phase in which it began, its duration if known."""

    operation: str
    dtype: str
    group: int
    n_bytes: int
    phase: str
    seconds: float | None = None


class Log:
    """The collectives of this process, in order; the training loop sets ``phase``."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._since: list[tuple[int, str]] = [(0, "")]
        self._ahead: list[tuple[int, int]] = []
        """Bounds of the lead of the system clock over the monotonic clock, at each reading. [ns]"""

    @property
    def phase(self) -> str:
        """The current phase of the run."""
        return self._since[-1][1]

    @phase.setter
    def phase(self, phase: str) -> None:
        self._since.append((self._now(), phase))

    def phase_at(self, time_ns: int) -> str:
        """The phase of the run at a time of the system clock."""
        return self._since[bisect_right(self._since, (time_ns, "\uffff")) - 1][1]

    def _now(self) -> int:
        before, now, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        self._ahead.append((now - after, now - before))
        return now

    def require_a_steady_clock(self) -> None:
        """Raise MeasurementError if the system clock was set since the first phase.

        torch's profiler and flight recorder order events by that clock.
        """
        self._now()
        if max(low for low, _ in self._ahead) - min(high for _, high in self._ahead) > _STEP_NS:
            raise MeasurementError(
                "this machine's clock was set during the run, so the order of events is unknown; run it again"
            )

"""The collectives that a process called, and which part of the run it was. Data alone."""

import time
from bisect import bisect_right
from typing import NamedTuple


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

    @property
    def phase(self) -> str:
        """Which part of the run it is."""
        return self._since[-1][1]

    @phase.setter
    def phase(self, phase: str) -> None:
        self._since.append((time.time_ns(), phase))

    def phase_at(self, time_ns: int) -> str:
        """Which part of the run it was then, by the clock of the system."""
        return self._since[bisect_right(self._since, (time_ns, "\uffff")) - 1][1]

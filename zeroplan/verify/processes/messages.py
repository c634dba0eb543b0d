"""Messages from a rank's process to its launcher, and its end when the launcher ends."""

import fcntl
import json
import os
import signal
import sys
import threading
from pathlib import Path


class Messenger:
    """Writes messages to the standard output at its creation: one JSON object per line, with the rank.

    Ranks under elastic's agent share one pipe, so a lock on the task's file protects each line.
    """

    def __init__(self, order: Path, rank: int) -> None:
        self._order, self._rank = order, rank
        self._to = os.dup(1)

    def send(self, **message: str) -> None:
        """Send one message."""
        line = (json.dumps({"rank": str(self._rank), **message}) + "\n").encode()
        with self._order.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            while line:
                line = line[os.write(self._to, line) :]

    def say(self, text: str) -> None:
        """Send a progress report."""
        self.send(say=text)

    def keep_standard_output(self) -> None:
        """Redirect everything printed from now on, as DeepSpeed does, to this rank's file of standard error."""
        sink = os.open(self._order.with_name(f"rank{self._rank}.stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(sink, 1)
        os.dup2(sink, 2)


def leave_with_the_parent() -> None:
    """End this process and its children when the parent closes standard input."""
    threading.Thread(target=_leave, daemon=True).start()


def _leave() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)

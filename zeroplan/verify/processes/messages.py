"""How a rank's process talks to the one that launched it, and goes when that one is gone."""

import fcntl
import json
import os
import signal
import sys
import threading
from pathlib import Path


class Teller:
    """Writes messages to the standard output that was there when it was made: one JSON object per line, with the rank.

    Ranks that elastic's agent started share one pipe, so each line is written under a lock of the task's file.
    """

    def __init__(self, order: Path, rank: int) -> None:
        self._order, self._rank = order, rank
        self._to = os.dup(1)

    def tell(self, **message: str) -> None:
        """Send one message."""
        line = (json.dumps({"rank": str(self._rank), **message}) + "\n").encode()
        with self._order.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            while line:
                line = line[os.write(self._to, line) :]

    def say(self, text: str) -> None:
        """Tell how far it is."""
        self.tell(say=text)

    def keep_standard_output(self) -> None:
        """Send what is printed from now on, as DeepSpeed does, to this rank's own file of standard error."""
        sink = os.open(self._order.with_name(f"rank{self._rank}.stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(sink, 1)
        os.dup2(sink, 2)


def leave_with_the_parent() -> None:
    """End this process and those it started when standard input, which the parent holds open, is closed."""
    threading.Thread(target=_leave, daemon=True).start()


def _leave() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)

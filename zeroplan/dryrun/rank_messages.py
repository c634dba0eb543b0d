"""Carries messages between the ranks of one dry run as files in the run's folder. Needs no torch.

A rank that waits for a message writes a request for the sender. The launcher (:mod:`zeroplan.dryrun.companions`) starts that
rank, and notes ranks that have ended. Sending never waits; unread messages stay.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from zeroplan.dryrun.task import Failed
from zeroplan.errors import MeasurementError, ZeroplanError
from zeroplan.spec.base import read

_WANTED, _ENDED, _WAITS = "wanted-", "ended-", "waits-"
_FIRST_S, _LONGEST_S = 0.001, 0.05
"""The first and the longest pause between two looks for a message. [s]"""


class CompanionError(ZeroplanError):
    """A rank that ran beside this one failed, so its message never comes."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.text)
        self.failed = failed


class ExpectedMessage(NamedTuple):
    """An expected message: its sender and its file."""

    sender: int
    file: str


class RankMessages:
    """One rank's messages. The receiver reads messages of one kind and group in the order of sending."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._count: Counter[str] = Counter()

    def send(self, to: int, group: Sequence[int], kind: str, content: bytes | None) -> None:
        """Send a message; a message without content is only counted, since no rank reads it."""
        file = self._next(kind, self._rank, to, group)
        if content is not None:
            _write(self._folder / file, content)

    def expect(self, sender: int, group: Sequence[int], kind: str) -> ExpectedMessage:
        """The next message of a rank, which may not exist yet."""
        return ExpectedMessage(sender, self._next(kind, sender, self._rank, group))

    def _next(self, kind: str, sender: int, to: int, group: Sequence[int]) -> str:
        name = f"{kind}-{sender}-{to}-{sha256(str(tuple(group)).encode()).hexdigest()[:12]}"
        self._count[name] += 1
        return f"{name}-{self._count[name]}"

    def read(self, message: ExpectedMessage) -> bytes:
        """The content of a message; requests the sender if it is not running yet.

        Raises CompanionError if that rank failed, MeasurementError if it ended without sending the message.
        """
        path = self._folder / message.file
        if not path.exists():
            (self._folder / f"{_WANTED}{message.sender}").touch()
            waits = self._folder / f"{_WAITS}{self._rank}"
            _write(waits, str(message.sender).encode())
            self._wait(message, path)
            waits.unlink()
        return path.read_bytes()

    def _wait(self, message: ExpectedMessage, path: Path) -> None:
        ended, pause = self._folder / f"{_ENDED}{message.sender}", _FIRST_S
        while not path.exists():
            if ended.exists() and not path.exists():
                raise self._no_message_error(message, ended)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)

    def _no_message_error(self, message: ExpectedMessage, ended: Path) -> ZeroplanError:
        if text := ended.read_text(encoding="utf-8"):
            return CompanionError(read(Failed, json.loads(text), where="answer"))
        return MeasurementError(
            f"rank {self._rank} waits for a message of rank {message.sender}, which ended without sending it; each receive needs a "
            f"send of the other rank"
        )

    @property
    def companions(self) -> tuple[int, ...]:
        """The requested ranks, without the measured one."""
        return wanted(self._folder)


def wanted(folder: Path) -> tuple[int, ...]:
    """The ranks whose messages are requested, in order."""
    return tuple(sorted(int(path.name.removeprefix(_WANTED)) for path in folder.glob(f"{_WANTED}*")))


def awaited_rank(folder: Path, rank: int) -> str:
    """The rank that a rank waits for now; empty if it waits for none."""
    waits = folder / f"{_WAITS}{rank}"
    return waits.read_text(encoding="utf-8") if waits.exists() else ""


def note_ended(folder: Path, rank: int, failed: Failed | None) -> None:
    """Note that a rank has ended, and why it failed."""
    _write(folder / f"{_ENDED}{rank}", b"" if failed is None else json.dumps(asdict(failed)).encode())


def _write(path: Path, content: bytes) -> None:
    """Write a file and give it its name when it is complete."""
    beside = path.with_name(f"part-{path.name}")
    beside.write_bytes(content)
    beside.rename(path)

"""What zeroplan answers for every kept job today: ``python -m tests.answers.snapshot`` writes it, and says what has moved.

A snapshot of our own output, not a measurement: it is there so that no change moves a number unseen. Whether a number is right is
asked in ``tests/measured`` and beside the engines.
"""

from __future__ import annotations

import sys
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.answers.jobs import kept
from zeroplan import estimate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zeroplan import Estimate
    from zeroplan.ledger import Line

PATH = Path(__file__).with_name("snapshot.txt")


class Answer(NamedTuple):
    """The peak [bytes], a digest of all numbers, one of all words, and the job."""

    peak_bytes: int
    numbers: str
    words: str
    job: str

    def __str__(self) -> str:
        """One line of the file."""
        return f"{self.peak_bytes:>15} {self.numbers} {self.words} {self.job}"


def answers() -> Iterator[Answer]:
    """Today's, of every kept job."""
    for words, job in kept():
        yield answer(words, estimate(job))


def answer(words: str, given: Estimate) -> Answer:
    """The answer in short."""
    return Answer(given.peak_bytes, _digest(_numbers(given)), _digest(_words(given)), words)


def stored() -> Iterator[Answer]:
    """Those of the file."""
    for line in PATH.read_text(encoding="utf-8").splitlines():
        peak, numbers, words, job = line.split(maxsplit=3)
        yield Answer(int(peak), numbers, words, job)


def moved(before: Iterable[Answer], now: Iterable[Answer]) -> Iterator[str]:
    """Say of each job what is no longer as it was, one line each."""
    old = {one.job: one for one in before}
    for one in now:
        was = old.pop(one.job, None)
        if was is None:
            yield f"new: {one.job}"
        elif was.peak_bytes != one.peak_bytes:
            yield f"peak {was.peak_bytes:,} -> {one.peak_bytes:,} bytes: {one.job}"
        elif was.numbers != one.numbers:
            yield f"numbers beside the peak: {one.job}"
        elif was.words != one.words:
            yield f"words alone: {one.job}"
    yield from (f"gone: {job}" for job in old)


def _numbers(given: Estimate) -> Iterator[object]:
    for moment in given.moments:
        yield moment.phase, sorted((line.kind, line.n_bytes) for line in moment.lines if line.n_bytes)
    yield [(line.kind, line.n_bytes) for line in (*given.states, *given.held, *given.host, *given.nvme)]
    yield [(one.operation, one.group, one.calls, one.payload_bytes, one.sent_bytes) for one in given.traffic.collectives]
    yield given.traffic[1:], given.pipeline, given.outside, given.reserved, given.verdict


def _words(given: Estimate) -> Iterator[object]:
    for moment in given.moments:
        yield moment.name, sorted(_told(line) for line in moment.lines)
    yield [(one.what, one.when, one.source) for one in given.traffic.collectives], given.symbols, given.notes


def _told(line: Line) -> tuple[str, str, str]:
    return line.reason, line.formula, line.source


def _digest(parts: Iterable[object]) -> str:
    made = blake2s(digest_size=5)
    for part in parts:
        made.update(repr(part).encode())
    return made.hexdigest()


def _write() -> None:
    now = list(answers())
    for line in moved(stored() if PATH.exists() else (), now):
        sys.stdout.write(f"{line}\n")
    PATH.write_text("".join(f"{one}\n" for one in now), encoding="utf-8")


if __name__ == "__main__":
    _write()

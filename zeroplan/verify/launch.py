"""Starts one process per rank, listens to them, and sees to it that all are gone when it returns, whatever happens."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from zeroplan.errors import MeasurementError, SpecError, ZeroplanError
from zeroplan.measurement import Measurement
from zeroplan.records import read_record
from zeroplan.verify.failures import workload_raised
from zeroplan.verify.task import Task

_GRACE_S = 2.0
_TAIL_LINES = 15
_PROGRESS_AFTER_S = 3.0
_SAID_WHY = 1
"""Exit code of a rank that has told what failed."""


class _Rank(NamedTuple):
    """One process, and where its standard error goes."""

    number: int
    process: "subprocess.Popen[str]"
    errors: Path


class _Message(NamedTuple):
    """What a rank said; ``None`` when it has hung up."""

    rank: int
    said: dict[str, str] | None


def launch(task: Task, *, keep: Callable[[Measurement], None], say: Callable[[str], None]) -> None:
    """Run a task: every rank over gloo, or the one rank under the fake group. ``keep`` is given each record as it comes.

    Raises SpecError where the workload is not there, and MeasurementError where a rank fails, dies, or is silent for the
    task's ``timeout_s``; the tail of what the failing rank wrote has gone to ``say`` by then. All processes are gone on return.
    """
    with tempfile.TemporaryDirectory(prefix="zeroplan-") as folder:
        mine = replace(task, store=str(Path(folder) / "store"), folder=folder)
        order = Path(folder) / "task.json"
        order.write_text(json.dumps(asdict(mine)), encoding="utf-8")
        with _running(task, order) as ranks:
            _listen(task, ranks, keep, say)


def _listen(task: Task, ranks: list[_Rank], keep: Callable[[Measurement], None], say: Callable[[str], None]) -> None:
    messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
    for rank in ranks:
        threading.Thread(target=_read, args=(rank, messages), daemon=True).start()
    started = time.monotonic()
    waiting = {rank.number: rank for rank in ranks}
    while waiting:
        try:
            # A collective that hangs fails in its own rank after timeout_s; silence is judged a little later, to hear of that.
            message = messages.get(timeout=task.timeout_s + 2 * _GRACE_S)
        except queue.Empty:
            _show_tails(list(waiting.values()), say)
            silent = ", ".join(map(str, waiting))
            raise MeasurementError(
                f"no rank made progress for {task.timeout_s:g} s (waiting for rank {silent}); ended"
            ) from None
        _heed(message, waiting, keep, say)
        if message.said is not None and "say" in message.said and time.monotonic() - started > _PROGRESS_AFTER_S:
            say(f"rank {message.rank}: {message.said['say']}")


def _heed(
    message: _Message, waiting: dict[int, _Rank], keep: Callable[[Measurement], None], say: Callable[[str], None]
) -> None:
    rank = waiting.get(message.rank)
    if rank is None:
        return
    if message.said is None:
        raise _death(rank, say)
    if "record" in message.said:
        del waiting[message.rank]
        keep(read_record(Path(message.said["record"])))
    if "failed" in message.said:
        if message.said["failed"] == "engine" and (dead := _dead_within(_GRACE_S, waiting, but=rank)) is not None:
            raise _death(dead, say)  # of which this failure is the consequence: its peer is gone
        raise _failure(rank, message.said, say)


def _death(rank: _Rank, say: Callable[[str], None]) -> MeasurementError:
    code = rank.process.wait()
    _show_tails([rank], say)
    return MeasurementError(f"rank {rank.number} died ({_how(code)}) before it left a record; the other ranks were ended")


def _dead_within(seconds: float, waiting: dict[int, _Rank], *, but: _Rank) -> _Rank | None:
    """A rank that ends within a moment without a word: who fails in a collective hears of it before its death is seen."""
    until = time.monotonic() + seconds
    others = [rank for rank in waiting.values() if rank is not but]
    while others and time.monotonic() < until:
        for rank in others:
            if rank.process.poll() not in (None, _SAID_WHY):
                return rank
        time.sleep(0.02)
    return None


def _failure(rank: _Rank, said: dict[str, str], say: Callable[[str], None]) -> ZeroplanError:
    whose, text = said["failed"], said["text"]
    if whose == "input":
        return SpecError(text)
    if whose == "here":
        return MeasurementError(text)
    if whose == "workload":
        return workload_raised(text, rank=rank.number, say=say)
    _show_tails([rank], say)
    return MeasurementError(f"rank {rank.number} failed: {text.splitlines()[0] if text else 'it did not say why'}")


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _show_tails(ranks: list[_Rank], say: Callable[[str], None]) -> None:
    for rank in ranks:
        lines = rank.errors.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        if lines:
            say("\n".join((f"--- last lines of rank {rank.number}'s standard error ---", *lines, "--- end ---")))


def _read(rank: _Rank, messages: "queue.SimpleQueue[_Message]") -> None:
    assert rank.process.stdout is not None  # noqa: S101  it was started with a pipe
    for line in rank.process.stdout:
        with suppress(ValueError):
            messages.put(_Message(rank.number, json.loads(line)))
    messages.put(_Message(rank.number, None))


@contextmanager
def _running(task: Task, order: Path) -> Iterator[list[_Rank]]:
    """The processes of a task, each in a session of its own; none is left afterwards."""
    count = task.job.mesh.world_size if task.transport == "gloo" else 1
    ranks: list[_Rank] = []
    try:
        for number in range(count):  # one by one: whatever has started must be ended
            ranks.append(_started(number if task.rank is None else task.rank, task, order))  # noqa: PERF401
        yield ranks
    finally:
        _end(ranks)


def _started(number: int, task: Task, order: Path) -> _Rank:
    errors = order.with_name(f"rank{number}.stderr")
    with errors.open("wb") as sink:
        process = subprocess.Popen(  # noqa: S603  our own interpreter and module
            [sys.executable, "-m", "zeroplan.verify.worker", str(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            start_new_session=True,
            env=_environment(number, task.job.mesh.world_size),
        )
    return _Rank(number, process, errors)


def _environment(rank: int, ranks: int) -> dict[str, str]:
    """What a launcher sets. Ranks meet in a file, so that no port can be taken; gloo talks over the loopback."""
    path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])) if part)
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "PYTHONPATH": path,
    }


def _end(ranks: list[_Rank]) -> None:
    """Ask the processes to go, and after a moment make them; an interrupt meanwhile cannot stop this."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if threading.current_thread() is threading.main_thread() else None
    try:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for rank in ranks:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, sign)
            until = time.monotonic() + _GRACE_S
            while time.monotonic() < until and any(rank.process.poll() is None for rank in ranks):
                time.sleep(0.02)
        for rank in ranks:
            rank.process.wait()
            for pipe in (rank.process.stdin, rank.process.stdout):
                if pipe is not None:
                    with suppress(OSError, ValueError):
                        pipe.close()
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)

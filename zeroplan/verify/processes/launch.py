"""Starts the ranks of a task, receives their messages, and ends all processes before it returns.

It starts one process: the rank itself under the fake process group, else torch elastic's agent
(:mod:`zeroplan.verify.processes.elastic`), which starts one per rank. Only those processes import torch.
"""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from zeroplan.current_folder import environment
from zeroplan.errors import MeasurementError, SpecError, ZeroplanError
from zeroplan.measurement import Measurement
from zeroplan.records import read_record
from zeroplan.verify.failures import FailedError, NotHereError, nccl_error, ran_out_of_memory, workload_raised
from zeroplan.verify.processes.scratch import ORDER, no_temporary_folder, scratch
from zeroplan.verify.task import Card, Task

_GRACE_S = 2.0
_LOST_S = 30.0
"""How long the agent may take, on a busy machine, to report a rank cause connection is gone. [s]"""
_PEER_IS_GONE = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe|remote (?:worker|process)")
_TAIL_LINES = 15
_PROGRESS_AFTER_S = 3.0
#: Standard error of the started process, until a rank has a file of its own.
STARTED_STDERR = "started.stderr"
Message = dict[str, str]


class Listener(NamedTuple):
    """Receives each record, progress and error reports, and the GPU that a rank found."""

    keep: Callable[[Measurement], None]
    say: Callable[[str], None]
    progress: Callable[[str], None] = lambda _text: None
    card: Callable[[Card], None] = lambda _card: None


class Started(NamedTuple):
    """A process, the queue of its messages (None at the end), and the folder with the ranks' standard error."""

    process: "subprocess.Popen[str]"
    messages: "queue.SimpleQueue[Message | None]"
    folder: Path


def launch(task: Task, *, keep: Callable[[Measurement], None], say: Callable[[str], None]) -> None:
    """Run a task: every rank over gloo or NCCL, or one rank under the fake group. ``keep`` receives each record at once.

    Raises SpecError if the workload is missing, and MeasurementError if a rank fails, dies, or sends nothing for ``timeout_s``;
    ``say`` then receives the last lines of the failing rank's standard error. All processes have ended on return.
    """
    with ordered(task) as order, running(command_of(task, order), task, order) as started:
        listen(task, started, Listener(keep, say, progress=say))


@contextmanager
def ordered(task: Task) -> Iterator[Path]:
    """Write the task into a file in a temporary folder, where ranks meet and write their records; yield the file."""
    with scratch() as folder:
        order = folder / ORDER
        placed = replace(task, store=str(folder / "store"), folder=str(folder))
        try:
            order.write_text(json.dumps(asdict(placed)), encoding="utf-8")
        except OSError as error:
            raise no_temporary_folder(error) from None
        yield order


def command_of(task: Task, order: Path) -> list[str]:
    """The command that runs a task."""
    if task.transport == "fake":
        return [sys.executable, "-m", "zeroplan.verify.processes.worker", str(order)]
    return [sys.executable, "-m", "zeroplan.verify.processes.elastic", str(order)]


def listen(task: Task, started: Started, to: Listener) -> None:
    """Receive the messages of a task's ranks until each has written its record."""
    began = time.monotonic()
    waiting = set(range(task.job.mesh.world_size)) if task.transport != "fake" else {task.rank or 0}
    while waiting:
        try:
            # A hanging collective fails in its own rank after timeout_s, so the parent waits a little longer to receive that.
            message = started.messages.get(timeout=task.timeout_s + 2 * _GRACE_S)
        except queue.Empty:
            raise _timeout_error(task, waiting, started, to.say) from None
        if message is None:
            raise _launcher_died(task, waiting, started, to.say)
        if int(message.get("rank", -1)) not in waiting:
            continue
        _handle(message, waiting, started, to)
        if "say" in message and time.monotonic() - began > _PROGRESS_AFTER_S:
            to.progress(f"rank {message['rank']}: {message['say']}")


def _timeout_error(task: Task, waiting: set[int], started: Started, say: Callable[[str], None]) -> FailedError:
    for rank in sorted(waiting):
        _show_tail(rank, started, say)
    names = ", ".join(map(str, sorted(waiting)))
    return FailedError(
        f"no rank made progress for {task.timeout_s:g} s (waiting for rank {names}), so all were ended; try a longer --timeout"
    )


def _launcher_died(task: Task, waiting: set[int], started: Started, say: Callable[[str], None]) -> FailedError:
    """The error if the started process ended without a message: the rank itself, or the launcher of the ranks."""
    how = how_ended(started.process.wait())
    if task.transport == "fake":
        return _died(min(waiting), how, started, say)
    _show(started.folder / STARTED_STDERR, "the launcher", say)
    for rank in sorted(waiting):
        _show(_errors_of(rank, started), f"rank {rank}", say)
    why = next(filter(None, (_of_its_transport(rank, started) for rank in sorted(waiting))), "")
    ranks = f"rank{'s' if waiting - {min(waiting)} else ''} {', '.join(map(str, sorted(waiting)))}"
    return FailedError(
        f"the launcher of the ranks died ({how}{'; ' + why if why else ''}) before {ranks} left a record; the ranks were ended"
    )


def _handle(message: Message, waiting: set[int], started: Started, to: Listener) -> None:
    if "record" in message:
        waiting.discard(int(message["rank"]))
        to.keep(read_record(Path(message["record"])))
    if "card" in message:
        to.card(Card(name=message["card"], total_bytes=int(message["total_bytes"])))
    if "ended" in message:
        started.messages.put(message)  # the caller waits for it as well
        raise _died(int(message["rank"]), message["ended"], started, to.say)
    if "died" in message:
        raise _died(int(message["rank"]), message["died"], started, to.say)
    if "failed" in message:
        raise _failure(message, started, to.say)


def _died(rank: int, how: str, started: Started, say: Callable[[str], None]) -> FailedError:
    _show_tail(rank, started, say)
    why = _of_its_transport(rank, started)
    return FailedError(
        f"rank {rank} died ({how}{'; ' + why if why else ''}) before it left a record; the other ranks were ended"
    )


def _of_its_transport(rank: int, started: Started) -> str:
    return nccl_error(_written(_errors_of(rank, started)))


def _failure(message: Message, started: Started, say: Callable[[str], None]) -> ZeroplanError:
    rank, text = int(message["rank"]), message["text"]
    match message["failed"]:
        case "memory":
            return ran_out_of_memory(rank, text)
        case "workload" if not _PEER_IS_GONE.search(text):
            return workload_raised(text, rank=rank, say=say)
        case cause if cause in _ONE_LINE:
            return _ONE_LINE[cause](text)
    if (lost := _lost_before(rank, started, _LOST_S if _PEER_IS_GONE.search(text) else _GRACE_S)) is not None:
        return _died(int(lost["rank"]), lost["died"], started, say)
    if message["failed"] == "workload":
        return workload_raised(text, rank=rank, say=say)
    _show_tail(rank, started, say)
    return FailedError(f"rank {rank} failed: {text.splitlines()[0] if text else 'it gave no reason'}")


_ONE_LINE: dict[str, type[ZeroplanError]] = {"input": SpecError, "machine": NotHereError, "here": MeasurementError}


def _lost_before(failed: int, started: Started, wait_s: float) -> Message | None:
    """The agent's message about a rank that died and so broke the failed rank's collective; it may arrive a moment later."""
    failed_ranks, until = {failed}, time.monotonic() + wait_s
    with suppress(queue.Empty):
        while (message := started.messages.get(timeout=max(0.0, until - time.monotonic()))) is not None:
            if "failed" in message:
                failed_ranks.add(int(message["rank"]))
            if "died" in message and int(message["rank"]) not in failed_ranks:
                return message
    return None


def how_ended(code: int) -> str:
    """An exit code in words.

    >>> how_ended(-9)
    'killed by SIGKILL'
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _show_tail(rank: int, started: Started, say: Callable[[str], None]) -> None:
    """Print the last lines of a rank's standard error; of the started process's if the rank has no file yet."""
    if not _show(_errors_of(rank, started), f"rank {rank}", say):
        _show(started.folder / STARTED_STDERR, f"rank {rank}", say)


def _errors_of(rank: int, started: Started) -> Path:
    return started.folder / f"rank{rank}.stderr"


def _show(path: Path, writer: str, say: Callable[[str], None]) -> bool:
    """Print the last lines of a file; return whether there were any."""
    lines = _written(path).splitlines()[-_TAIL_LINES:]
    if lines:
        say("\n".join((f"--- last lines of {writer}'s standard error ---", *lines, "--- end ---")))
    return bool(lines)


def _written(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _read(process: "subprocess.Popen[str]", messages: "queue.SimpleQueue[Message | None]") -> None:
    assert process.stdout is not None  # noqa: S101  it was started with a pipe
    for line in process.stdout:
        with suppress(ValueError):
            messages.put(json.loads(line))
    messages.put(None)


@contextmanager
def running(command: list[str], task: Task, order: Path) -> Iterator[Started]:
    """Start the process of a task in its own session; end it and its ranks afterwards."""
    process = _started(command, task, order)
    try:
        messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, messages), daemon=True).start()
        yield Started(process, messages, order.parent)
    finally:
        end_session(process)


def _started(command: list[str], task: Task, order: Path) -> "subprocess.Popen[str]":
    try:
        with (order.parent / STARTED_STDERR).open("wb") as sink:
            return start_process(
                command, environment_of(task), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink.fileno()
            )
    except OSError as error:
        raise no_temporary_folder(error) from None


def start_process(
    command: Sequence[str], env: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
) -> "subprocess.Popen[str]":  # fmt: skip
    """Start a process in a session of its own. Raises NotHereError if this machine cannot start one."""
    try:
        return subprocess.Popen(  # noqa: S603  our own interpreter and module
            command, text=True, start_new_session=True, env=env, stdin=stdin, stdout=stdout, stderr=stderr
        )
    except OSError as error:
        hint = "free memory or raise the limit of processes"
        raise NotHereError(f"no process can be started here: {error.strerror}; {hint}") from None


def environment_of(task: Task) -> dict[str, str]:
    """The environment of a task's process; elastic's agent adds each rank's own. gloo uses the loopback."""
    ranks = str(task.job.mesh.world_size)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if task.tensors == "fake" else {}  # a real GPU would replace the fake one
    return {
        **environment(),
        **hidden,
        "RANK": str(task.rank or 0),
        "LOCAL_RANK": "0" if task.tensors == "cuda" else str(task.rank or 0),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def end_session(process: "subprocess.Popen[str]") -> None:
    """End a process and its session: close standard input, then SIGTERM, then SIGKILL. Interrupts are delayed until it is done.

    A rank ends itself when its standard input closes.
    """
    with _interrupts_later():
        _close(process.stdin)
        _wait_until(lambda: process.poll() is not None)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sign)
            _wait_until(lambda: process.poll() is not None)
        process.wait()
        _close(process.stdout)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay an interrupt until the block ends; only the main thread receives any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if heard:
        signal.raise_signal(signal.SIGINT)


def _wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until and not done():
        time.sleep(0.02)


def _close(pipe: object) -> None:
    if pipe is not None:
        with suppress(OSError, ValueError):
            pipe.close()  # type: ignore[attr-defined]  # a text stream

"""Starts the process of a dry run, waits for its answer, and ends all its processes. Needs no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from zeroplan.dryrun.companions import Companions
from zeroplan.dryrun.task import DryRunTask, Failed, environment
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.script_trace import SavedRun
from zeroplan.spec.base import read
from zeroplan.verify.failures import FailedError
from zeroplan.verify.processes.launch import end_session, how_ended, start_process
from zeroplan.verify.processes.scratch import ORDER, scratch

_TAIL_LINES = 15
_LOOK_S = 0.05
_TO_ANSWER_S = 60
"""Extra time for a script with ``until_end``, which stops itself at the limit and then builds its answer. [s]"""
MARK = "ZEROPLAN_DRY_RUN"
"""An environment variable that marks a run's processes."""


class Process(NamedTuple):
    """A process to start: its command, its extra environment, and the text that marks it and its children."""

    command: tuple[str, ...]
    environment: dict[str, str]
    mark: str


def dry_run(task: DryRunTask, *, timeout_s: float, quiet: bool = False) -> SavedRun:
    """Run a script as one rank and return the result, with its trace if the task wants one.

    The script's output goes to standard error, with ``quiet`` nowhere; if the script fails, its last lines are printed. Raises
    SpecError if the script itself fails, MeasurementError if it cannot run without a GPU or does no step in time.
    """
    with scratch() as folder:
        task = replace(task, answer=str(folder / "answer.json"), messages=str(folder / "messages"))
        Path(task.messages).mkdir()
        companions = Companions(task, lambda one, output: _started(_child(one, folder, mark=task.answer), output))
        with shown(folder / "printed", quiet=quiet, worked=lambda: _worked(task)) as output:
            longest = timeout_s + (_TO_ANSWER_S if task.until_end else 0)
            child = _child(task, folder, mark=task.answer)
            code = ended(child, output, timeout_s=longest, late=_late(task, timeout_s), companions=companions)
        if not _worked(task):
            companions.show(_TAIL_LINES)
        return _answer(task, code)


def _child(task: DryRunTask, folder: Path, *, mark: str) -> Process:
    order = folder / (f"rank{task.rank}-{ORDER}" if task.companion else ORDER)
    order.write_text(json.dumps(asdict(task)), encoding="utf-8")
    return Process((sys.executable, "-m", "zeroplan.dryrun.child", str(order)), environment(task), mark)


def ended(child: Process, output: int, *, timeout_s: float, late: str, companions: Companions | None = None) -> int:
    """Run a process to its end and return its exit code; end all its children and companions.

    Raises FailedError after ``timeout_s``.
    """
    with ExitStack() as ends:
        ends.callback(_end_marked, child.mark)
        if companions is not None:
            ends.callback(companions.end)
        process = _started(child, output)
        ends.callback(end_session, process)
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, _LOOK_S) if companions is not None else left)
            if companions is not None:
                companions.look()
        raise FailedError(late if companions is None else late + companions.waiting)


@contextmanager
def shown(printed: Path, *, quiet: bool, worked: Callable[[], bool]) -> Iterator[int]:
    """Yield the descriptor for a script's output: standard error, or with ``quiet`` a file, printed in part if the script fails."""
    with printed.open("wb") as sink:
        yield sink.fileno() if quiet else _standard_error(sink.fileno())
    if quiet and not worked():
        lines = printed.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        sys.stderr.write("\n".join((*lines, "")))


def _started(child: Process, output: int) -> "subprocess.Popen[str]":
    env = {**os.environ, **child.environment, "PYTHONUNBUFFERED": "1", MARK: child.mark}
    return start_process(child.command, env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _standard_error(otherwise: int) -> int:
    """The descriptor of standard error; ``otherwise`` if there is none, as in a notebook."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return otherwise


def _end_marked(text: str) -> None:
    """End the script's processes in other sessions, found by the mark in their environment."""
    mark = f"{MARK}={text}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's process, or one that has ended
            if mark in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _late(task: DryRunTask, timeout_s: float) -> str:
    return (
        f"the script did not complete {task.steps} optimizer steps within {timeout_s:g} s and was ended; allow more time with "
        f"--timeout, or check that its loop ends (in a dry run every loss is 1)"
    )


def _worked(task: DryRunTask) -> bool:
    return Path(task.answer).is_file() and b'"cause"' not in Path(task.answer).read_bytes()[:200]


def _answer(task: DryRunTask, code: int) -> SavedRun:
    path = Path(task.answer)
    if not path.is_file():
        raise FailedError(f"the script's process ended without an answer: {how_ended(code)}; its output may show why")
    found = json.loads(path.read_text(encoding="utf-8"))
    refuse(found)
    return read(SavedRun, found, where="answer")


def refuse(found: dict[str, object]) -> None:
    """Raise the error that a process wrote instead of an answer: SpecError for a script's own error, else MeasurementError."""
    if "cause" in found:
        failed = read(Failed, found, where="answer")
        raise (SpecError if failed.cause == "script" else MeasurementError)(failed.text)

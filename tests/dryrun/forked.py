"""Runs dry runs as forks of a process that has imported torch, which saves about 4 s per run.

The child process of a dry run first imports torch and its compiler, and then patches torch permanently to report a
GPU. Here the command and that child are forks of a process with only these imports; everything else is as in a normal run. ``python
-m tests.dryrun.forked`` reads an :class:`Order` from each line of standard input, and prints its exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.dryrun import launch
from zeroplan.dryrun.launch import MARK
from zeroplan.dryrun.task import DryRunTask, environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from zeroplan.dryrun.launch import Process

ROOT = Path(__file__).parents[2]
_BEGIN_WITH_TORCH = ("zeroplan.dryrun.child", "tests.dryrun.fake_card")
_STARTED = launch._started


class Order(NamedTuple):
    """What to run: the arguments of ``zeroplan``, the folder, and the files for its output and its errors.

    ``environment`` is added to this worker's environment. ``replaced`` maps names of the package to a string that replaces them, or
    to None for a function that does nothing.
    """

    arguments: tuple[str, ...]
    folder: str
    output: str
    errors: str
    environment: dict[str, str] = {}  # noqa: RUF012  nobody changes it
    replaced: dict[str, str | None] = {}  # noqa: RUF012


def run(order: Order) -> int:
    """Run ``zeroplan`` in a fork of this worker's process and return its exit code."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.dryrun.forked"]
    read_at_import = environment(
        DryRunTask(target="any.py", gpus=1, gpus_per_node=1, gpu="h100-sxm-80gb", answer="answer.json")
    )
    started = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | read_at_import
    )
    atexit.register(_end, started)
    return started


def _end(server: subprocess.Popen[str]) -> None:
    """Kill the process, which waits for a line."""
    with server:
        server.kill()


# In the server process


def _serve() -> None:
    warnings.simplefilter("ignore")
    import torch._dynamo  # noqa: F401  the child's own first imports

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = Order(*json.loads(line))
        command = _forked(lambda: _command(order))  # noqa: B023  it is over before the next
        answers.write(f"{command.wait()}\n")
        answers.flush()


class _Forked:
    """A forked process with the part of :class:`subprocess.Popen`'s interface that a dry run uses."""

    stdin = stdout = None

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None and self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        until = time.monotonic() + (timeout or 0)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            time.sleep(0.02)
        return code


def _forked(call: Callable[[], object]) -> _Forked:
    """Call a function in a fork, which exits afterwards."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return _Forked(pid)
    code = 1
    try:
        call()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:  # noqa: BLE001  a fork ends here, whatever it was
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _command(order: Order) -> NoReturn:
    from zeroplan.cli import app

    for number, path in ((1, order.output), (2, order.errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order.folder)
    os.environ.update(order.environment)
    launch._started = _child  # type: ignore[assignment]
    for name, value in order.replaced.items():
        module, _, attribute = name.rpartition(".")
        setattr(import_module(module), attribute, value if value is not None else lambda *_, **__: None)
    app.main(list(order.arguments))
    raise AssertionError("the program exits")


def _child(child: Process, output: int) -> _Forked | subprocess.Popen[str]:
    """Fork the child of a dry run or of the fake GPU, which both start with these imports; start any other child normally."""
    if child.command[2] not in _BEGIN_WITH_TORCH:
        return _STARTED(child, output)
    return _forked(lambda: _as_child(child, output))


def _as_child(child: Process, output: int) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.update(child.environment | {"PYTHONUNBUFFERED": "1", MARK: child.mark})
    _, _, module, *arguments = child.command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve()

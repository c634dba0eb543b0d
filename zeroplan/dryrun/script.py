"""Runs a user's script in this process as Python would run it."""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from zeroplan.dryrun import from_launcher
from zeroplan.dryrun.task import DryRunTask
from zeroplan.errors import ZeroplanError
from zeroplan.spec.base import Spec


def run_script(task: DryRunTask, arguments: Sequence[str]) -> None:
    """Run the task's file or module with its arguments and what its launcher adds."""
    from zeroplan.verify.fake_cuda.stand_ins import count_as_user  # noqa: PLC0415  torch must be imported later

    os.environ.update(from_launcher.environment(task))
    sys.argv = [task.target, *from_launcher.arguments(task), *arguments]
    if not task.module:
        sys.path.insert(0, str(Path(task.target).absolute().parent))
        runpy.run_path(task.target, run_name="__main__")
        return
    sys.path.insert(0, str(Path.cwd()))
    spec = find_spec(task.target.partition(".")[0])
    if spec is not None and spec.origin is not None:
        count_as_user(str(Path(spec.origin).parent))
    runpy.run_module(task.target, run_name="__main__", alter_sys=True)


def answer_or_failure(make_answer: Callable[[], Spec]) -> Spec:
    """The answer, or the failure of whatever the script raised; prints the traceback of the script's own errors."""
    try:
        return make_answer()
    except BaseException as error:  # noqa: BLE001  every error is reported to the parent
        from zeroplan.dryrun.failures import failure, show  # noqa: PLC0415  it imports torch

        if not isinstance(error, (ZeroplanError, SystemExit)):
            show(error)
        return failure(error)


def leave(code: int) -> NoReturn:
    """End this process at once, without waiting for threads and atexit of a stopped script."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)

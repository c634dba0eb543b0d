"""Runs functions on the fake GPU for tests: in one separate process, since faking CUDA cannot be undone.

The process stays for all tests of a worker, so it imports torch and transformers once. DeepSpeed patches torch permanently, so
its jobs run in other processes (:mod:`tests.deepspeed_forks`).
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from zeroplan.measurement import Measurement
    from zeroplan.spec.job import JobSpec

P, T = ParamSpec("P"), TypeVar("T")


def on_the_fake_gpu(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a module-level function with picklable arguments in the process with the fake GPU; return its result."""
    return _process().submit(_called, function, args, kwargs).result()


def _called(function: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
    """Call the function there. An exception that cannot be pickled would end the process for all later tests: raise its text."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  made here
        except Exception:  # noqa: BLE001  any class of a library
            raise RuntimeError(repr(error)) from None
        raise


def simulate(job: JobSpec, **options: object) -> Measurement:
    """Run :func:`zeroplan.verify.backends.simulate.simulate` in that process."""
    return on_the_fake_gpu(_simulated, job, options)


def command_there(*arguments: str) -> tuple[int, str, str]:
    """Run ``zeroplan`` in that process and this folder, for commands that trace a module: exit code, stdout, stderr."""
    return on_the_fake_gpu(_command, arguments, str(Path.cwd()))


def _command(arguments: tuple[str, ...], folder: str) -> tuple[int, str, str]:
    from zeroplan.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def _simulated(job: JobSpec, options: dict[str, object]) -> Measurement:
    from zeroplan.verify.backends.simulate import simulate

    return simulate(job, **options)  # type: ignore[arg-type]


def in_a_process_of_its_own(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function as :func:`on_the_fake_gpu` does, in a new process that ends afterwards."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin) as process:
        return process.submit(function, *args, **kwargs).result()


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)


def _begin() -> None:
    """Initialise the process: no warnings, and it ends with the test process, whose children xdist does not notify."""
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_with_the_tests, daemon=True).start()


def _end_with_the_tests() -> None:
    tests = parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)

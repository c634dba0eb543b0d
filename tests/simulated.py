"""What runs on the fake GPU in tests: in one process beside theirs, which believes in CUDA as theirs must not.

It stays for all tests of a worker, so that torch and transformers are imported once. DeepSpeed patches torch for good: its jobs
have processes of their own (:mod:`tests.deepspeed_forks`).
"""

from __future__ import annotations

import contextlib
import io
import os
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
    """Call a function of a module, whose arguments can be pickled, in the process that believes in CUDA."""
    return _process().submit(function, *args, **kwargs).result()


def simulate(job: JobSpec, **options: object) -> Measurement:
    """:func:`zeroplan.verify.backends.simulate.simulate`, there."""
    return on_the_fake_gpu(_simulated, job, options)


def command_there(*arguments: str) -> tuple[int, str, str]:
    """Run ``zeroplan`` with arguments in this folder, there: its exit code, stdout and stderr. For what traces a module."""
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


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)


def _begin() -> None:
    """Begin the process: quiet, and over with the tests' own, which xdist ends without a word to its children."""
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_with_the_tests, daemon=True).start()


def _end_with_the_tests() -> None:
    tests = parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)

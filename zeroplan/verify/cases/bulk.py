"""Runs many cases one after the other, each in its own process, and yields a result for each."""

import json
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from zeroplan.errors import MeasurementError, SpecError, ZeroplanError
from zeroplan.measurement import Measurement
from zeroplan.verify.cases.matrix import Case
from zeroplan.verify.cases.results import Outcome, Result
from zeroplan.verify.failures import FailedError, NotHereError, OutOfMemoryError
from zeroplan.verify.processes.launch import Listener, Message, Started, command_of, environment_of, listen, ordered, running
from zeroplan.verify.task import Card, Task

_WARM = [sys.executable, "-m", "zeroplan.verify.processes.warm"]
_REAPED_S = 10.0
"""How long a copy of the warm process may take to end after its last message. [s]"""


_Kind = tuple[str, str]


def _kind(task: Task) -> _Kind:
    """The kind of warm process a task needs: its tensors, and the engine, since DeepSpeed patches torch."""
    return task.tensors, "deepspeed" if task.job.recipe.engine == "deepspeed" else "torch"


class Runner:
    """Runs cases; forks single-process cases from a warm process. Leaving the context ends all processes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stack = ExitStack()
        self._cold: set[_Kind] = set()
        self._warm: tuple[_Kind, Started] | None = None

    def __enter__(self) -> Self:
        """Begin; the first case that needs a warm process starts it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the warm process and its forks."""
        self._stop()

    def run(self, case: Case) -> Result:
        """Run one case and return its result.

        Raises :class:`~zeroplan.verify.failures.NotHereError` if this machine cannot run any case.
        """
        began = time.monotonic()
        records: list[Measurement] = []
        cards: list[Card] = []
        outcome, message = self._outcome(case.task, Listener(records.append, self._say, card=cards.append))
        fullest = max(records, key=lambda one: one.steady.peak.peak_bytes, default=None)
        return Result(
            name=case.name,
            task=case.task,
            outcome=outcome,
            says=message,
            card=cards[0].name if cards else "",
            card_bytes=cards[0].total_bytes if cards else None,
            record=fullest if outcome == "measured" else None,
            ranks=max(1, len(records)),
            seconds=round(time.monotonic() - began, 2),
        )

    def _outcome(self, task: Task, to: Listener) -> tuple[Outcome, str]:
        try:
            self._run(task, to)
        except NotHereError:
            if task.tensors != "cuda" or not self._may_be_forked(task):
                raise
            self._stop()  # a library may have touched CUDA before the fork: run once more in a new process
            self._cold.add(_kind(task))
            return self._outcome(task, to)
        except OutOfMemoryError as error:
            return "out of memory", str(error)
        except FailedError as error:
            return "failed", str(error)
        except (SpecError, MeasurementError) as error:
            return "refused", str(error)
        return "measured", ""

    def _run(self, task: Task, to: Listener) -> None:
        with ordered(task) as order:
            if not self._may_be_forked(task):
                self._stop()  # the warm process holds memory, and no other process may use the GPU
                with running(command_of(task, order), task, order) as started:
                    listen(task, started, to)
                return
            started = self._warm_for(task)
            self._order(started, task, order)
            try:
                listen(task, started._replace(folder=order.parent), to)
            except ZeroplanError:
                self._reap(started)
                raise
            except BaseException:
                self._stop()
                raise
            self._reap(started)

    def _warm_for(self, task: Task) -> Started:
        """The warm process to fork; starts a new one if the kind differs or the last one ended."""
        if self._warm is not None and self._warm[0] == _kind(task) and self._warm[1].process.poll() is None:
            return self._warm[1]
        self._stop()
        started = self._stack.enter_context(_warm(task))
        self._warm = _kind(task), started
        return started

    def _may_be_forked(self, task: Task) -> bool:
        """False for tasks with real ranks, which torch elastic starts, and after a fork of this kind has failed."""
        return task.transport == "fake" and _kind(task) not in self._cold

    def _order(self, started: Started, task: Task, order: Path) -> None:
        mine = {name: value for name, value in environment_of(task).items() if os.environ.get(name) != value}
        assert started.process.stdin is not None  # noqa: S101  it was started with a pipe
        try:
            started.process.stdin.write(json.dumps({"task": str(order), **mine}) + "\n")
            started.process.stdin.flush()
        except OSError:
            self._stop()
            raise MeasurementError(
                "the process that runs the cases died before this one; run the command again to continue"
            ) from None

    def _reap(self, started: Started) -> None:
        """Wait until the fork has ended and freed its GPU memory; if it does not end, restart the warm process."""
        until = time.monotonic() + _REAPED_S
        message: Message | None = {} if started.process.poll() is None else None
        while message is not None and "ended" not in message:
            try:
                message = started.messages.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                message = None
        if message is None:
            self._stop()

    def _stop(self) -> None:
        self._warm = None
        self._stack.close()


@contextmanager
def _warm(task: Task) -> Iterator[Started]:
    with ordered(task) as order, running([*_WARM, *_kind(task)], task, order) as started:
        yield started


def run_cases(
    cases: tuple[Case, ...], *, timeout_s: float, say: Callable[[str], None], begin: Callable[[Case], None] = lambda _case: None
) -> Iterator[Result]:
    """Run cases in order and yield their results; ``begin`` is called with each case before it runs."""
    with Runner(say) as runner:
        for case in cases:
            begin(case)
            yield runner.run(case._replace(task=replace(case.task, timeout_s=timeout_s)))

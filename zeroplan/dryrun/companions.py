"""Runs further ranks of a script beside the measured one, each in its own process. Needs no torch.

A later pipeline stage receives from the stage before it; with several stages per rank the dependence is circular. So zeroplan
starts a rank when another rank waits for its message, and all run at the same time.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zeroplan.dryrun.rank_messages import awaited_rank, note_ended, wanted
from zeroplan.dryrun.task import DryRunTask, Failed
from zeroplan.spec.base import read
from zeroplan.verify.processes.launch import how_ended

MOST = 31
"""Limit of further ranks; each needs about half a gigabyte of this machine's memory."""
_STEPS_AHEAD = 1
"""Companions run one step more than the measured rank, which may receive data of its next step early."""


class Companions:
    """The further ranks of a run; ``start`` starts one in its own folder."""

    def __init__(self, task: DryRunTask, start: "Callable[[DryRunTask, int], subprocess.Popen[str]]") -> None:
        self._task, self._start = task, start
        self._messages = Path(task.messages)
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._met = {task.rank}
        self._failed: dict[int, str] = {}

    def look(self) -> None:
        """Start the ranks that others wait for, and note the ranks that have ended."""
        for rank in wanted(self._messages):
            if rank not in self._met:
                self._met.add(rank)
                self._begin(rank)
        for rank, process in list(self._running.items()):
            if (code := process.poll()) is not None:
                del self._running[rank]
                note_ended(self._messages, rank, self._why(rank, code))

    def _begin(self, rank: int) -> None:
        if rank >= self._task.gpus or len(self._met) > MOST + 1:
            note_ended(self._messages, rank, Failed(cause="here", text=self._too_many(rank)))
            return
        folder = self._folder(rank)
        folder.mkdir()
        task = replace(
            self._task, rank=rank, companion=True, steps=self._task.steps + _STEPS_AHEAD, answer=str(folder / "answer.json"),
            traced=False, profiled=None,
        )  # fmt: skip
        with (folder / "printed").open("wb") as sink:
            self._running[rank] = self._start(task, sink.fileno())

    def _too_many(self, rank: int) -> str:
        if rank >= self._task.gpus:
            return f"the script receives from rank {rank}, and there are {self._task.gpus} ranks"
        return (
            f"rank {self._task.rank} depends on messages of more than {MOST} other ranks, and each needs its own process; choose a "
            f"rank of an earlier pipeline stage (--as-rank), or use fewer stages"
        )

    def _folder(self, rank: int) -> Path:
        return self._messages.with_name(f"rank{rank}")

    def _why(self, rank: int, code: int) -> Failed | None:
        """Why a rank failed; that rank's message if it only repeats another rank's failure."""
        path = self._folder(rank) / "answer.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if found is not None and "cause" not in found:
            return None
        failed = Failed(cause="here", text=f"its process ended: {how_ended(code)}") if found is None else read(
            Failed, found, where="answer"
        )  # fmt: skip
        if failed.text in self._failed.values():
            return failed
        passed_on = replace(failed, text=f"rank {rank}, which ran beside rank {self._task.rank}, failed: {failed.text}")
        self._failed[rank] = passed_on.text
        return passed_on

    @property
    def waiting(self) -> str:
        """The end of a sentence that names the rank for which the measured rank waits; empty if it waits for none."""
        other = awaited_rank(self._messages, self._task.rank)
        return other and f"; it was waiting for a message of rank {other}"

    def show(self, lines: int) -> None:
        """Print the last lines of the failed ranks' output."""
        for rank in self._failed:
            printed = (self._folder(rank) / "printed").read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
            sys.stderr.write("\n".join((f"--- rank {rank} printed ---", *printed, "--- end ---", "")))

    def end(self) -> None:
        """End the ranks that still run, and all processes they started."""
        for process in self._running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._running.values():
            process.wait()

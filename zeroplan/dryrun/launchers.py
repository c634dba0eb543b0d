"""Replaces launchers inside a script (``mp.spawn``): the ranks' function runs in this process, as this rank."""

import os
import sys
from collections.abc import Callable

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.launcher import api

from zeroplan.dryrun.replacements import note, noting
from zeroplan.dryrun.task import DryRunTask
from zeroplan.verify.replaced import always, put

_HERE = "its function runs in this process, as this rank"


class _Ended:
    """The result of ``mp.spawn(..., join=False)``: processes that have ended."""

    processes: tuple[object, ...] = ()
    join = always(True)
    pids = always([])


def run_ranks_here(task: DryRunTask) -> None:
    """Replace ``torch.multiprocessing.spawn`` and torch's elastic launcher, which ``notebook_launcher`` uses."""

    def spawn(
        fn: Callable[..., object], args: tuple[object, ...] = (), nprocs: int = 1, join: bool = True,  # noqa: FBT001, FBT002
        *_: object, **__: object,
    ) -> _Ended | None:  # fmt: skip
        note("torch.multiprocessing.spawn", _HERE)
        before = dist.is_initialized()
        fn(min(task.local_rank, nprocs - 1), *args)
        if dist.is_initialized() and not before:
            dist.destroy_process_group()  # a real rank's group ends with its process
        return None if join else _Ended()

    def launch(launcher: "api.elastic_launch", *args: object) -> dict[int, object]:
        run: object = launcher._entrypoint
        if not callable(run):
            raise TypeError(f"the script launches {run!r} with torch's elastic launcher; name that script behind -- instead")
        os.environ.update({"RANK": str(task.rank), "LOCAL_RANK": str(task.local_rank)})
        return {task.local_rank: run(*args)}

    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        put(owner, spawn=spawn, start_processes=spawn)
    put(api.elastic_launch, __call__=noting("torch's elastic launcher", _HERE, launch))

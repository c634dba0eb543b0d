"""Runs one rank under any launcher: checks that the machine can run it, joins the other ranks, measures."""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from zeroplan.errors import MeasurementError
from zeroplan.measurement import Measurement
from zeroplan.verify.release import as_installed
from zeroplan.verify.task import Task

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from zeroplan.verify.training.workload import Workload

_JOINED = "zeroplan/joined"


def measure(
    task: Task,
    *,
    rank: int,
    say: Callable[[str], None],
    card: Callable[[str, int], None] = lambda _name, _bytes: None,
    store: "Store | None" = None,
) -> Measurement:
    """Measure a task as one of its ranks. ``card`` receives the GPU; ranks meet in ``store``, else in the task's file.

    Raises MeasurementError if no GPU is available, or if a rank does not join in time.
    """
    if task.workload and task.job.mesh.pp > 1:
        raise MeasurementError("--workload cannot be split into pipeline stages; leave --workload or --pipeline-parallel out")
    os.environ.update(DS_ACCELERATOR="cpu" if task.tensors == "cpu" else "cuda", HF_HUB_OFFLINE="1")
    task = replace(task, job=as_installed(task.job))
    found = _simulated(task, rank, say) if task.tensors == "fake" else _measured(task, rank, store, say, card)
    return replace(found, workload=task.workload)


def _simulated(task: Task, rank: int, say: Callable[[str], None]) -> Measurement:
    from zeroplan.verify.backends.simulate import simulate  # noqa: PLC0415  its errors are reported by the caller
    from zeroplan.verify.training.user_workload import user_workload  # noqa: PLC0415

    make = user_workload(task.workload, task.job) if task.workload else None
    return simulate(task.job, rank=rank, steps=task.steps, all_layers=task.all_layers, say=say, make=make)


def _measured(
    task: Task, rank: int, store: "Store | None", say: Callable[[str], None], card: Callable[[str, int], None]
) -> Measurement:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from zeroplan.verify.training.user_workload import user_workload  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if task.tensors == "cuda":
        from zeroplan.verify.backends.gpu_ready import ready  # noqa: PLC0415

        card(*ready(task))
    met = store or _new_store(task)
    if task.transport != "fake":
        _await_all(met, rank=rank, ranks=task.job.mesh.world_size, timeout_s=task.timeout_s)
    made = user_workload(task.workload, task.job) if task.workload else None
    found = _on_cuda(task, rank, met, made, say) if task.tensors == "cuda" else _on_cpu(task, rank, met, made, say)
    dist.destroy_process_group()
    return found


def _new_store(task: Task) -> "Store":
    from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]  # noqa: PLC0415

    store: Store = HashStore() if task.transport == "fake" else FileStore(task.store, task.job.mesh.world_size)
    return store


def _await_all(store: "Store", *, rank: int, ranks: int, timeout_s: float) -> None:
    """Wait until every rank has joined, so that an error can name the missing ones."""
    from torch.distributed import DistStoreError  # noqa: PLC0415

    names = [f"{_JOINED}/{number}" for number in range(ranks)]
    store.set(names[rank], "")
    try:
        store.wait(names, timedelta(seconds=timeout_s))
    except (DistStoreError, RuntimeError):
        missing = ", ".join(str(number) for number, name in enumerate(names) if not store.check([name]))
        raise MeasurementError(
            f"rank {missing} of {ranks:,} did not join within {timeout_s:g} s; look at its node and its log"
        ) from None


def _on_cpu(
    task: Task, rank: int, store: "Store", made: "Callable[[], Workload] | None", say: Callable[[str], None]
) -> Measurement:
    from zeroplan.verify.backends.cpu import measured  # noqa: PLC0415
    from zeroplan.verify.training.engine import stored_dtype  # noqa: PLC0415
    from zeroplan.verify.training.workload import with_weights, workload  # noqa: PLC0415
    from zeroplan.verify.watching.group import join  # noqa: PLC0415

    build = made or (lambda: with_weights(workload(task.job, dtype=stored_dtype(task.job.recipe))))
    log = join(task.transport, store, rank=rank, ranks=task.job.mesh.world_size, timeout_s=task.timeout_s)
    return measured(task.job, build, rank=rank, transport=task.transport, log=log, steps=task.steps, say=say)


def _on_cuda(
    task: Task, rank: int, store: "Store", made: "Callable[[], Workload] | None", say: Callable[[str], None]
) -> Measurement:
    from zeroplan.verify.backends.cuda import measured_on_gpu  # noqa: PLC0415
    from zeroplan.verify.backends.gpu import SNAPSHOT, Gpu  # noqa: PLC0415
    from zeroplan.verify.record import run_name  # noqa: PLC0415
    from zeroplan.verify.watching.group import join  # noqa: PLC0415

    gpu = Gpu.current()
    log = join(task.transport, store, rank=rank, ranks=task.job.mesh.world_size, timeout_s=task.timeout_s)
    name = run_name(task.job, task.workload, rank)
    snapshot = Path(task.snapshots) / f"{name}{SNAPSHOT}" if task.snapshots else None
    return measured_on_gpu(
        task.job, made, rank=rank, transport=task.transport, log=log, steps=task.steps, say=say, gpu=gpu.joined(),
        snapshot=snapshot,
    )  # fmt: skip

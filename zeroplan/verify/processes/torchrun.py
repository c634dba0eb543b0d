"""Runs a rank under torchrun, or another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, on any nodes.

``torchrun --nnodes 2 --nproc-per-node 8 ... -m zeroplan.verify.worker JOB --record-dir DIR``. Every rank measures and writes its
record. Rank 0 receives all of them through the ranks' store, so folders need not be shared, and prints the comparison.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from zeroplan.current_folder import environment
from zeroplan.errors import MeasurementError, SpecError, ZeroplanError
from zeroplan.job_file import read_job_file
from zeroplan.measurement import Measurement
from zeroplan.resolve import resolve
from zeroplan.spec.base import read
from zeroplan.spec.job import JobSpec
from zeroplan.verify.failures import OutOfMemoryError, cause_of, ran_out_of_memory, text_of
from zeroplan.verify.release import with_installed_kernels
from zeroplan.verify.task import Task, refuse_unrunnable
from zeroplan.whole import refuse_folder

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_BAD_INPUT, _CANNOT_RUN = 2, 4
_RECORD = "zeroplan/record"
_SET_BY_A_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(arguments: Sequence[str]) -> int:
    """Measure a job as rank ``RANK`` of ``WORLD_SIZE``; rank 0 prints the comparison. Returns the command's exit code."""
    warnings.filterwarnings("ignore")
    options = _parsed(arguments)
    try:
        task = _task(options)
        return _measure(task, options)
    except (Exception, SystemExit) as error:  # noqa: BLE001  every error becomes one line
        return _report(error)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m zeroplan.verify.worker",
        description="Measure one rank of a job under torchrun, and compare it with the estimate.",
    )
    parser.add_argument("job", metavar="JOB", type=Path, help="a job as a TOML or JSON file, as for `zeroplan estimate`")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda", help="GPUs over NCCL, or CPU tensors over gloo")
    parser.add_argument("--record-dir", metavar="DIR", type=Path, help="folder for each rank's record")
    parser.add_argument("--steps", metavar="N", type=int, default=3, help="optimizer steps; the last counts (3)")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=300.0, help="how long ranks wait for each other (300)"
    )
    parser.add_argument("--tolerance", metavar="FRACTION", default="0.02", help="largest accepted difference (0.02)")
    parser.add_argument("--workload", metavar="PACKAGE.MODULE:FUNCTION", default="", help="your own module instead")
    return parser.parse_args(arguments)


def _task(options: argparse.Namespace) -> Task:
    missing = [name for name in _SET_BY_A_LAUNCHER if name not in os.environ]
    if missing:
        raise MeasurementError(f"{', '.join(missing)} is not set: start this with torchrun, or use `zeroplan verify`")
    request, ranks = read_job_file(options.job), int(os.environ["WORLD_SIZE"])
    if request.gpus not in (None, ranks):
        raise SpecError(
            f"job file {str(options.job)!r} is for {request.gpus:,} GPUs, and {ranks:,} ranks were started; make them equal"
        )
    return task_of(with_installed_kernels(resolve(replace(request, gpus=ranks)).job), options)


def task_of(job: JobSpec, options: argparse.Namespace) -> Task:
    """The task of all ranks of a job whose processes already run."""
    refuse_unrunnable(job)
    return Task(
        job=job,
        transport="nccl" if options.backend == "cuda" else "gloo",
        tensors=options.backend,
        steps=options.steps,
        workload=options.workload,
        timeout_s=options.timeout,
    )


def _measure(task: Task, options: argparse.Namespace) -> int:
    if options.record_dir is not None:
        refuse_folder(options.record_dir, "--record-dir")
    rank, store = int(os.environ["RANK"]), meeting(task)
    found = measured_as_rank(task, store=store, folder=options.record_dir)
    if rank:
        return 0
    folder = options.record_dir
    with tempfile.TemporaryDirectory(prefix="zeroplan-") as temporary:
        from zeroplan.verify.record import write_record  # noqa: PLC0415  keeps errors in the job fast

        for record in (found, *_of_others(task, store)):
            write_record(record, Path(temporary))
        command = [sys.executable, "-m", "zeroplan", "compare", temporary, "--tolerance", options.tolerance]
        done = subprocess.run(command, env=environment(), check=False)  # noqa: S603  our own interpreter and module
    if folder is not None:
        print(f"records: {folder}", file=sys.stderr)  # noqa: T201  this is a program
    return done.returncode


def meeting(task: Task) -> "Store":
    """The store where the ranks meet, by the launcher's environment variables.

    Raises MeasurementError if rank 0's node cannot be reached.
    """
    import torch.distributed as dist  # noqa: PLC0415  keeps errors in the job fast

    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(
            dist.rendezvous(  # type: ignore[attr-defined]
                "env://", timeout=timedelta(seconds=task.timeout_s)
            )
        )
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        raise MeasurementError(
            f"rank 0's node did not answer at {where} within {task.timeout_s:g} s: {first}; check MASTER_ADDR and MASTER_PORT"
        ) from None
    store.set_timeout(timedelta(seconds=task.timeout_s))
    return store  # type: ignore[no-any-return]


def measured_as_rank(task: Task, *, store: "Store", folder: Path | None) -> Measurement:
    """Measure as this rank, write the record into ``folder`` if given, and send it to rank 0."""
    from zeroplan.verify.processes.rank import measure  # noqa: PLC0415
    from zeroplan.verify.record import write_record  # noqa: PLC0415

    rank = int(os.environ["RANK"])
    found = measure(task, rank=rank, say=_say if rank == 0 else lambda _text: None, store=store)
    if folder is not None:
        write_record(found, folder)
    if rank:
        store.set(f"{_RECORD}/{rank}", json.dumps(asdict(found)))
    return found


def _of_others(task: Task, store: "Store") -> list[Measurement]:
    found = []
    for rank in range(1, task.job.mesh.world_size):
        name = f"{_RECORD}/{rank}"
        try:
            store.wait([name], timedelta(seconds=task.timeout_s))
        except RuntimeError:
            raise MeasurementError(f"rank {rank} sent no record within {task.timeout_s:g} s; look at its output") from None
        found.append(read(Measurement, json.loads(store.get(name)), where=f"rank {rank}'s record"))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  this is a program


def _report(error: BaseException) -> int:
    if not isinstance(error, ZeroplanError):
        traceback.print_exc()
    rank = os.environ.get("RANK", "?")
    text = text_of(error)
    if cause_of(error) == "memory" and not isinstance(error, OutOfMemoryError):
        text = str(ran_out_of_memory(rank, text))
    _say(f"zeroplan: {' '.join(text.split()) if isinstance(error, ZeroplanError) else f'rank {rank}: {text.splitlines()[-1]}'}")
    return _BAD_INPUT if isinstance(error, SpecError) else _CANNOT_RUN

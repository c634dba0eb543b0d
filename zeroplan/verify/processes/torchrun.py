"""A rank under torchrun, or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: any number of nodes.

``torchrun --nnodes 2 --nproc-per-node 8 ... -m zeroplan.verify.worker JOB --record-dir DIR``. Every rank measures and writes its
record; rank 0 hears of all of them over the store through which ranks meet, so folders need not be shared, and prints the
comparison.
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
from zeroplan.verify.failures import OutOfMemoryError, ran_out_of_memory, text_of, whose
from zeroplan.verify.task import Task, refuse_unrunnable
from zeroplan.whole import refuse_folder

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_BAD_INPUT, _CANNOT_RUN = 2, 4
_RECORD = "zeroplan/record"
_SET_BY_A_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(arguments: Sequence[str]) -> int:
    """Measure a job as rank ``RANK`` of ``WORLD_SIZE``; rank 0 prints the comparison. Returns the exit code, as the command's."""
    warnings.filterwarnings("ignore")
    asked = _asked(arguments)
    try:
        task = _task(asked)
        return _answered(task, asked)
    except (Exception, SystemExit) as error:  # noqa: BLE001  one line, whatever it is
        return _refused(error)


def _asked(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m zeroplan.verify.worker",
        description="One rank of a job, under torchrun: measured, and held against the estimate.",
    )
    parser.add_argument("job", metavar="JOB", type=Path, help="a job as a TOML or JSON file, as `zeroplan estimate` takes it")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda", help="GPUs over NCCL, or CPU tensors over gloo")
    parser.add_argument("--record-dir", metavar="DIR", type=Path, help="where each rank writes its record")
    parser.add_argument("--steps", metavar="N", type=int, default=3, help="optimizer steps; the last counts (3)")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=300.0, help="how long ranks wait for each other (300)"
    )
    parser.add_argument("--tolerance", metavar="FRACTION", default="0.02", help="how far the two may be apart (0.02)")
    parser.add_argument("--workload", metavar="PACKAGE.MODULE:FUNCTION", default="", help="your own module instead")
    return parser.parse_args(arguments)


def _task(asked: argparse.Namespace) -> Task:
    missing = [name for name in _SET_BY_A_LAUNCHER if name not in os.environ]
    if missing:
        raise MeasurementError(f"{', '.join(missing)} is not set: start this with torchrun, or use `zeroplan verify`")
    request, ranks = read_job_file(asked.job), int(os.environ["WORLD_SIZE"])
    if request.gpus not in (None, ranks):
        raise SpecError(
            f"job file {str(asked.job)!r} is of {request.gpus:,} GPUs, and {ranks:,} ranks were started; make them equal"
        )
    return task_of(resolve(replace(request, gpus=ranks)).job, asked)


def task_of(job: JobSpec, asked: argparse.Namespace) -> Task:
    """The task of all ranks of a job, in processes that are there already."""
    refuse_unrunnable(job)
    return Task(
        job=job,
        transport="nccl" if asked.backend == "cuda" else "gloo",
        tensors=asked.backend,
        steps=asked.steps,
        workload=asked.workload,
        timeout_s=asked.timeout,
    )


def _answered(task: Task, asked: argparse.Namespace) -> int:
    if asked.record_dir is not None:
        refuse_folder(asked.record_dir, "--record-dir")
    rank, store = int(os.environ["RANK"]), meeting(task)
    found = measured_as_rank(task, store=store, folder=asked.record_dir)
    if rank:
        return 0
    folder = asked.record_dir
    with tempfile.TemporaryDirectory(prefix="zeroplan-") as temporary:
        from zeroplan.verify.record import write_record  # noqa: PLC0415  a bad job needs none of it

        for record in (found, *_of_others(task, store)):
            write_record(record, Path(temporary))
        command = [sys.executable, "-m", "zeroplan", "compare", temporary, "--tolerance", asked.tolerance]
        done = subprocess.run(command, env=environment(), check=False)  # noqa: S603  our own interpreter and module
    if folder is not None:
        print(f"records: {folder}", file=sys.stderr)  # noqa: T201  this is a program
    return done.returncode


def meeting(task: Task) -> "Store":
    """Where the ranks meet, as the launcher's environment says.

    Raises MeasurementError where rank 0's node is not to be reached.
    """
    import torch.distributed as dist  # noqa: PLC0415  a bad job is told at once

    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(
            dist.rendezvous(  # type: ignore[attr-defined]
                "env://", timeout=timedelta(seconds=task.timeout_s)
            )
        )
    except dist.DistError as error:
        first = str(error).splitlines()[0]
        raise MeasurementError(f"rank 0's node does not answer at {where} within {task.timeout_s:g} s: {first}") from None
    store.set_timeout(timedelta(seconds=task.timeout_s))
    return store  # type: ignore[no-any-return]


def measured_as_rank(task: Task, *, store: "Store", folder: Path | None) -> Measurement:
    """Measure as this rank, write the record where a folder is named, and leave it for rank 0."""
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
            raise MeasurementError(f"rank {rank} left no record within {task.timeout_s:g} s") from None
        found.append(read(Measurement, json.loads(store.get(name)), where=f"rank {rank}'s record"))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  this is a program


def _refused(error: BaseException) -> int:
    if not isinstance(error, ZeroplanError):
        traceback.print_exc()
    rank = os.environ.get("RANK", "?")
    text = text_of(error)
    if whose(error) == "memory" and not isinstance(error, OutOfMemoryError):
        text = str(ran_out_of_memory(rank, text))
    _say(f"zeroplan: {' '.join(text.split()) if isinstance(error, ZeroplanError) else f'rank {rank}: {text.splitlines()[-1]}'}")
    return _BAD_INPUT if isinstance(error, SpecError) else _CANNOT_RUN

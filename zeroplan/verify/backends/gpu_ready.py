"""Checks, before it builds a model, that this rank can run on a GPU of this machine; the error says why not.

Every rank checks for itself, so the check also works under torchrun and Slurm.
"""

import csv
import os
import re
import subprocess
import time
from typing import NamedTuple

import torch

from zeroplan.estimator import estimate
from zeroplan.units import format_gb
from zeroplan.verify.failures import NotHereError
from zeroplan.verify.task import Task

_OWN_CONTEXT = 700_000_000
"""Most memory of this process's own CUDA context (zeroplan.engines.device); less in use means no other process. [bytes]"""
_MATTERS = 100
"""Ignore other processes that hold up to 1/100 of a GPU's memory: the estimate's error is larger."""
_LEAVES_S = 5.0
"""How long the driver may take to free the memory of a process that has ended. [s]"""
_OTHERWISE = "use --backend simulate, which needs no GPU"

_WITHOUT_CUDA = f"this torch ({torch.__version__}) is built without CUDA; install one that has it"


class Memory(NamedTuple):
    """Free and total memory of a GPU. [bytes]"""

    free: int
    total: int


class Holder(NamedTuple):
    """Another process that holds memory of a GPU, as the driver reports it. [bytes]"""

    pid: int
    name: str
    n_bytes: int


def ready(task: Task) -> tuple[str, int]:
    """Select this rank's GPU, and return its name and total memory. [bytes]

    Raises :class:`~zeroplan.verify.failures.NotHereError` if torch has no CUDA, the driver is missing or too old, there are
    fewer GPUs than local ranks, or other processes hold so much memory that the job would not fit.
    """
    refuse_without_gpus(1 if task.transport == "fake" else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    index = int(os.environ.get("LOCAL_RANK", "0")) if task.transport != "fake" else 0
    memory = _refuse_busy(index, needed=estimate(task.job).least_bytes)
    return name_of(index), memory.total


def why_not() -> str:
    """The reason why no rank can run on a GPU here; empty if one can."""
    try:
        refuse_without_gpus(1)
    except NotHereError as refusal:
        return str(refusal)
    return ""


def refuse_without_gpus(ranks: int, *, otherwise: str = _OTHERWISE) -> None:
    """Raise NotHereError if there are fewer GPUs than ranks; ``otherwise`` is the advice."""
    if not built_for_gpus():
        raise NotHereError(f"{_WITHOUT_CUDA}, or {otherwise}")
    _refuse_too_few(ranks, otherwise)


def _refuse_too_few(ranks: int, otherwise: str) -> None:
    found = count()
    if found >= ranks:
        return
    reason = why_none() if not found else ""
    _refuse_too_old(reason)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if not found:
        raise NotHereError(f"torch finds no GPU here{only}{': ' + reason if reason else ''}; {otherwise}")
    raise NotHereError(
        f"{ranks} ranks on this node need {ranks} GPUs, and it has {found}{only}; start fewer, or run one rank with --as-rank"
    )


def _refuse_too_old(message: str) -> None:
    """Raise NotHereError if torch's message reports a driver that is too old; NVML may still have counted GPUs."""
    if old := re.search(r"driver on your system is too old \(found version (\d+)\)", message):
        supported = f"CUDA {int(old[1]) // 1000}.{int(old[1]) % 1000 // 10}"
        raise NotHereError(
            f"the NVIDIA driver is too old: it supports {supported}, and this torch was built for CUDA {torch.version.cuda}; "
            f"update it, or install a torch built for {supported} or older"
        )


def _refuse_busy(index: int, *, needed: int) -> Memory:
    """A GPU's memory; raises NotHereError if other processes hold so much that the job could not fit."""
    until = time.monotonic() + _LEAVES_S
    while (held := (memory := memory_of(index)).total - memory.free) > max(_OWN_CONTEXT, memory.total // _MATTERS):
        if needed <= memory.free:
            break
        if time.monotonic() > until:
            raise NotHereError(_busy(index, memory, needed, held))
        time.sleep(0.25)
    return memory


def _busy(index: int, memory: Memory, needed: int, held: int) -> str:
    processes = ", ".join(f"{one.name} (pid {one.pid}) {format_gb(one.n_bytes)}" for one in holders(index))
    holder = f"it is held by {processes}" if processes else f"nvidia-smi does not list the holder of {format_gb(held)}"
    return (
        f"GPU {index} is busy: {format_gb(memory.free)} of {format_gb(memory.total)} are free, and the job needs "
        f"{format_gb(needed)}; {holder}"
    )


# Single queries to torch and the driver


def built_for_gpus() -> bool:
    """Whether this torch has CUDA or ROCm."""
    return torch.version.cuda is not None or torch.version.hip is not None


def count() -> int:
    """The number of GPUs that torch sees."""
    return torch.cuda.device_count()


def why_none() -> str:
    """The first sentence of the driver's error message; empty if CUDA starts."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return re.split(r"(?<=[a-z)])\.\s|\n", str(error).strip())[0].rstrip(".")
    return ""


def memory_of(index: int) -> Memory:
    """The driver's count of a GPU's memory; also makes that GPU this process's current device."""
    try:
        torch.cuda.set_device(index)
        return Memory(*torch.cuda.mem_get_info(index))
    except RuntimeError as error:
        _refuse_too_old(str(error))
        raise NotHereError(f"GPU {index} cannot be used: {str(error).splitlines()[0]}") from None


def name_of(index: int) -> str:
    """The GPU's name."""
    return str(torch.cuda.get_device_name(index))


def holders(index: int) -> list[Holder]:
    """Other processes on a GPU, the largest first; empty if nvidia-smi is absent or sees none, as in a container."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits"]
    try:
        table = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    return holders_of(table, str(torch.cuda.get_device_properties(index).uuid))


def holders_of(table: str, uuid: str) -> list[Holder]:
    r"""Other processes on one GPU, read from nvidia-smi's table.

    >>> holders_of("GPU-12-34, 77, 4096, python\nGPU-56, 78, 9, other", "12-34")
    [Holder(pid=77, name='python', n_bytes=4294967296)]
    """
    rows = [[part.strip() for part in row] for row in csv.reader(table.splitlines())]
    found = [
        Holder(int(row[1]), row[3], int(row[2]) * 2**20)
        for row in rows
        if len(row) == 4 and row[0].endswith(uuid) and row[1].isdigit() and row[2].isdigit() and int(row[1]) != os.getpid()
    ]
    return sorted(found, key=lambda one: -one.n_bytes)

"""Can this rank run on a GPU here? If not, why: one line, before a model is built.

Every rank asks for itself, so that it holds under a launcher of our own, torchrun and Slurm alike. What torch and the driver say
is asked through small functions, each of one fact.
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
"""What a process's own CUDA context may take (zeroplan.engines.device): less in use is nobody else's. [bytes]"""
_MATTERS = 100
"""Nor does it matter whose the hundredth part of a card is, which is within what a verdict may be off."""
_LEAVES_S = 5.0
"""How long the memory of a process that has just ended may still be held. [s]"""
_OTHERWISE = "use --backend simulate, which needs none"

_WITHOUT_CUDA = f"this torch ({torch.__version__}) is built without CUDA; install one that has it"


class Memory(NamedTuple):
    """Of a card: what is free, and all of it. [bytes]"""

    free: int
    total: int


class Holder(NamedTuple):
    """A process that holds memory of a card, as the driver tells: its name and how much. [bytes]"""

    pid: int
    name: str
    n_bytes: int


def ready(task: Task) -> tuple[str, int]:
    """Take this rank's GPU, and return its name and memory. [bytes]

    Raises :class:`~zeroplan.verify.failures.NotHereError` in one line: a torch without CUDA, a driver that is missing or
    too old, no GPU, fewer than the ranks of this node, or one that others hold so much of that the job would not fit.
    """
    refuse_without_gpus(1 if task.transport == "fake" else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    index = int(os.environ.get("LOCAL_RANK", "0")) if task.transport != "fake" else 0
    memory = _refuse_busy(index, needed=estimate(task.job).least_bytes)
    return name_of(index), memory.total


def why_not() -> str:
    """Why no rank can run on a GPU here, in a line; empty where one can."""
    try:
        refuse_without_gpus(1)
    except NotHereError as refusal:
        return str(refusal)
    return ""


def refuse_without_gpus(ranks: int, *, otherwise: str = _OTHERWISE) -> None:
    """Raise NotHereError, in one line, where fewer GPUs are to be had than ranks; ``otherwise`` is what to do instead."""
    if not built_for_gpus():
        raise NotHereError(f"{_WITHOUT_CUDA}, or {otherwise}")
    _refuse_too_few(ranks, otherwise)


def _refuse_too_few(ranks: int, otherwise: str) -> None:
    found = count()
    if found >= ranks:
        return
    said = why_none() if not found else ""
    _refuse_too_old(said)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if not found:
        raise NotHereError(f"no GPU is to be had here{only}{': ' + said if said else ''}; {otherwise}")
    raise NotHereError(
        f"{ranks} ranks on this node need {ranks} GPUs, and it has {found}{only}; start fewer, or be one of them with --as-rank"
    )


def _refuse_too_old(said: str) -> None:
    """Of a driver that is too old torch says so when it first needs it, though NVML may have counted GPUs before."""
    if old := re.search(r"driver on your system is too old \(found version (\d+)\)", said):
        speaks = f"CUDA {int(old[1]) // 1000}.{int(old[1]) % 1000 // 10}"
        raise NotHereError(
            f"the NVIDIA driver is too old: it speaks {speaks}, and this torch was built for CUDA {torch.version.cuda}; update it, "
            f"or install a torch built for {speaks} or older"
        )


def _refuse_busy(index: int, *, needed: int) -> Memory:
    """A card's memory; refused where others hold so much that running out of it would say nothing of the job."""
    until = time.monotonic() + _LEAVES_S
    while (held := (memory := memory_of(index)).total - memory.free) > max(_OWN_CONTEXT, memory.total // _MATTERS):
        if needed <= memory.free:
            break
        if time.monotonic() > until:
            raise NotHereError(_busy(index, memory, needed, held))
        time.sleep(0.25)
    return memory


def _busy(index: int, memory: Memory, needed: int, held: int) -> str:
    who = ", ".join(f"{one.name} (pid {one.pid}) {format_gb(one.n_bytes)}" for one in holders(index))
    return (
        f"GPU {index} is busy: {format_gb(memory.free)} of {format_gb(memory.total)} are free, and the job needs "
        f"{format_gb(needed)}; {'it is held by ' + who if who else f'nvidia-smi does not say who holds the {format_gb(held)}'}"
    )


# What torch and the driver say


def built_for_gpus() -> bool:
    """Whether this torch has CUDA, or ROCm in its place."""
    return torch.version.cuda is not None or torch.version.hip is not None


def count() -> int:
    """How many GPUs torch sees."""
    return torch.cuda.device_count()


def why_none() -> str:
    """The driver's reason why no GPU can be used: its first sentence."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return re.split(r"(?<=[a-z)])\.\s|\n", str(error).strip())[0].rstrip(".")
    return ""


def memory_of(index: int) -> Memory:
    """What the driver says of a card, which becomes this process's own."""
    try:
        torch.cuda.set_device(index)
        return Memory(*torch.cuda.mem_get_info(index))
    except RuntimeError as error:
        _refuse_too_old(str(error))
        raise NotHereError(f"GPU {index} cannot be used: {str(error).splitlines()[0]}") from None


def name_of(index: int) -> str:
    """What the card is called."""
    return str(torch.cuda.get_device_name(index))


def holders(index: int) -> list[Holder]:
    """Other processes on a card, the largest first; none where nvidia-smi is absent or sees none, as in a container."""
    asked = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    return holders_of(said, uuid_of(index))


def uuid_of(index: int) -> str:
    """The card as nvidia-smi names it, without its prefix."""
    return str(torch.cuda.get_device_properties(index).uuid)


def holders_of(table: str, uuid: str) -> list[Holder]:
    r"""Read what nvidia-smi tells of one card, without this process.

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

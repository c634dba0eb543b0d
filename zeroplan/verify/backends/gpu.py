"""A GPU as a measurement sees it: the counts of torch's caching allocator, the driver's, and what the card is called."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import torch

from zeroplan.measurement import AllocatorSettings, BlocksMeasured, CardMeasured
from zeroplan.whole import put_numbered, unfinished

_COUNTS = ("allocated", "requested", "active", "reserved")
_MOST_EVENTS = 1_000_000
_DRIVER = Path("/proc/driver/nvidia/version")
SNAPSHOT = ".snapshot.pickle"
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Gpu(NamedTuple):
    """The current device of torch's CUDA, and what its driver counted outside the allocator: alone, and in its group. [bytes]"""

    device: str = "cuda"
    context_bytes: int | None = None
    joined_bytes: int | None = None

    @classmethod
    def current(cls) -> Self:
        """The process's GPU, with its context made, so that what follows is the job's own."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return cls(context_bytes=outside_bytes())

    def joined(self) -> Self:
        """The same GPU, when the process group is there."""
        return self._replace(joined_bytes=outside_bytes())

    @contextmanager
    def remembered(self, path: Path) -> Iterator[None]:
        """Have the allocator note every request and who made it, and write it down when the block ends, however it ends.

        An earlier snapshot of the same name stays: the new one is numbered.

        Noting takes about two microseconds a request, in which the step's time has its share.
        """
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_EVENTS)
        try:
            yield
        finally:
            with unfinished(path) as beside:
                torch.cuda.memory._dump_snapshot(str(beside))  # type: ignore[no-untyped-call]
                put_numbered(beside, path.parent, path.name.removesuffix(SNAPSHOT), SNAPSHOT)
            torch.cuda.memory._record_memory_history(enabled=None)

    def synchronize(self) -> None:
        """Wait until everything asked for is done."""
        torch.cuda.synchronize()

    def forget_peaks(self) -> None:
        """Begin to count peaks anew."""
        torch.cuda.reset_peak_memory_stats()

    def counted(self, seconds: float) -> tuple[BlocksMeasured, int]:
        """The peaks since they were forgotten, after so many seconds, and the blocks in use now. [bytes]"""
        stats = torch.cuda.memory_stats()
        peaks = {f"{name}_bytes": int(stats[f"{name}_bytes.all.peak"]) for name in _COUNTS}
        return BlocksMeasured(**peaks, seconds=seconds), int(stats["allocated_bytes.all.current"])

    def taken(self) -> CardMeasured:
        """What the driver says of the whole card now."""
        free, total = torch.cuda.mem_get_info()
        return CardMeasured(
            name=torch.cuda.get_device_name(),
            total_bytes=total,
            used_bytes=total - free,
            outside_bytes=outside_bytes(),
            driver=driver_version(),
            cuda=torch.version.cuda or "",
            nccl=nccl_version(),
            context_bytes=self.context_bytes,
            joined_bytes=self.joined_bytes,
        )

    def words(self) -> str:
        """The card in words, for the record's environment."""
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, driver {driver_version() or 'unknown'}"

    def settings(self) -> AllocatorSettings:
        """Which of the allocator's settings hold, as far as they are told apart."""
        return settings_of(next((os.environ[name] for name in _SETTINGS if name in os.environ), ""))


def outside_bytes() -> int:
    """What the driver counts as used on the card beyond what the caching allocator took. [bytes]"""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())


def nccl_version() -> str:
    """Of the NCCL that torch speaks; empty where it has none."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ""


def settings_of(configuration: str) -> AllocatorSettings:
    """The settings that an allocator's configuration asks for.

    >>> settings_of("max_split_size_mb:128,expandable_segments:True")
    'expandable_segments'
    """
    return "expandable_segments" if re.search(r"expandable_segments:\s*[Tt]rue", configuration) else "default"


def driver_version() -> str:
    """The version of NVIDIA's kernel driver; empty where it does not say."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""

"""Reads a GPU's counters during a measurement: torch's caching allocator, the driver, and the GPU's name."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import torch

from zeroplan.measurement import BlocksMeasured, CardMeasured
from zeroplan.spec.hardware import AllocatorSettings
from zeroplan.whole import put_numbered, unfinished

_COUNTS = ("allocated", "requested", "active", "reserved")
_MOST_EVENTS = 1_000_000
_DRIVER = Path("/proc/driver/nvidia/version")
SNAPSHOT = ".snapshot.pickle"
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Gpu(NamedTuple):
    """The current CUDA device, with its memory outside the allocator before and after joining the process group. [bytes]"""

    device: str = "cuda"
    context_bytes: int | None = None
    joined_bytes: int | None = None

    @classmethod
    def current(cls) -> Self:
        """This process's GPU. Its CUDA context is created here, so all memory used later belongs to the job."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return cls(context_bytes=outside_bytes())

    def joined(self) -> Self:
        """The same GPU with ``joined_bytes``, once the process group exists."""
        return self._replace(joined_bytes=outside_bytes())

    @contextmanager
    def remembered(self, path: Path) -> Iterator[None]:
        """Record every request with its Python stack, and write a snapshot when the block ends or raises.

        The new file gets a number if one of that name exists. Recording adds about two microseconds per request to the
        step's time.
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
        """Wait until the GPU is idle."""
        torch.cuda.synchronize()

    def forget_peaks(self) -> None:
        """Reset the allocator's peaks."""
        torch.cuda.reset_peak_memory_stats()

    def counted(self, seconds: float) -> tuple[BlocksMeasured, int]:
        """The allocator's peaks since the last reset, together with ``seconds``, and the bytes allocated now. [bytes]"""
        stats = torch.cuda.memory_stats()
        peaks = {f"{name}_bytes": int(stats[f"{name}_bytes.all.peak"]) for name in _COUNTS}
        return BlocksMeasured(**peaks, seconds=seconds), int(stats["allocated_bytes.all.current"])

    def figures(self) -> CardMeasured:
        """The driver's figures of the whole GPU now."""
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
        """The GPU's name, CUDA version and driver, for the record's environment."""
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, driver {driver_version() or 'unknown'}"

    def settings(self) -> AllocatorSettings:
        """The allocator settings of this process, as far as zeroplan distinguishes them."""
        return settings_of(next((os.environ[name] for name in _SETTINGS if name in os.environ), ""))


def outside_bytes() -> int:
    """Memory in use on the GPU outside the caching allocator, by the driver's count. [bytes]"""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())


def nccl_version() -> str:
    """The version of torch's NCCL; empty without NCCL."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ""


def settings_of(configuration: str) -> AllocatorSettings:
    """The settings in a configuration of the allocator.

    >>> settings_of("max_split_size_mb:128,expandable_segments:True")
    'expandable_segments'
    """
    return "expandable_segments" if re.search(r"expandable_segments:\s*[Tt]rue", configuration) else "default"


def driver_version() -> str:
    """The version of NVIDIA's kernel driver; empty if unknown."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""

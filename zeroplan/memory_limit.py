"""Limits this process's memory while it reads an untrusted file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_more_memory_than(n_bytes: int) -> Iterator[None]:
    """Let the process allocate at most this much more, since a small malicious file can make its reader allocate gigabytes.

    Beyond the limit Python raises MemoryError. Systems other than Linux get no limit.
    """
    if sys.platform != "linux":
        yield
        return
    import resource  # noqa: PLC0415  absent on Windows

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    allowed = pages * resource.getpagesize() + n_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (allowed if before[1] == resource.RLIM_INFINITY else min(allowed, before[1]), before[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

"""A ceiling on what this process may take while it reads what a stranger wrote."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_more_memory_than(n_bytes: int) -> Iterator[None]:
    """Let the process grow by so much and no further: a small file can ask for gigabytes of places to remember things.

    Past it Python raises MemoryError. Where the system sets no such limit, nothing is done.
    """
    if sys.platform != "linux":
        yield
        return
    import resource  # noqa: PLC0415  not everywhere

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

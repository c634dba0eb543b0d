"""Memory in reference cycles is released when the collector runs: here at the beginning of each phase, and never in between."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_when_told() -> Iterator[None]:
    """Leave it to the enclosed code to call ``gc.collect``.

    What was dropped before goes first, or it would be released into the recording. What is still there is left alone: torch's own
    objects are many, and would be gone through at every call; code that runs often asks for this once, around everything.
    """
    gc.collect()
    if not gc.isenabled():
        yield
        return
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()

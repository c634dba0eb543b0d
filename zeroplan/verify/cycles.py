"""Memory in reference cycles is released when the collector runs: here at the beginning of each phase, and never in between."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_when_told() -> Iterator[None]:
    """Leave it to the enclosed code to call ``gc.collect``.

    What was dropped before goes first, or it would be released into the recording. What is still there is left alone: torch's own
    objects are many, and would be gone through at every call. Where code around has asked for this already, nothing is to be done;
    what a program has frozen for good stays so.
    """
    if not gc.isenabled():
        yield
        return
    frozen_already = gc.get_freeze_count() > 0
    gc.collect()
    if not frozen_already:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not frozen_already:
            gc.unfreeze()

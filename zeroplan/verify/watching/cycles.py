"""Runs the garbage collector only at ``gc.collect``, so memory in reference cycles ends at fixed moments."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def manual_garbage_collection() -> Iterator[None]:
    """Turn automatic garbage collection off inside the block, so that only ``gc.collect`` runs it.

    Earlier garbage is collected first; otherwise its release would appear in the recording. ``gc.freeze`` then exempts torch's many
    objects from every later collection. Code that runs often should wrap everything in one such block.
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

"""Peaks of CUDA's caching allocator since two moments: the beginning of a phase, and the script's own last reset.

torch keeps one peak, which must be reset when a phase begins. The script's own queries get the peaks since its own reset.
"""

from collections.abc import Callable

import torch

from zeroplan.measurement import BlocksMeasured
from zeroplan.verify.replaced import put

_COUNTS = ("allocated", "requested", "active", "reserved")
_NOTHING = BlocksMeasured.highest(())


class Peaks:
    """Counts the process's current GPU, without creating a CUDA context."""

    def __init__(self) -> None:
        self._stats: Callable[..., dict[str, int]] = torch.cuda.memory_stats
        self._forget: Callable[..., None] = torch.cuda.reset_peak_memory_stats
        self._of_phase = self._of_script = _NOTHING

    def seen(self) -> tuple[BlocksMeasured, int]:
        """The phase's peaks so far, and the bytes allocated now; resets torch's own peaks. [bytes]"""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._of_phase, 0
        stats = self._stats()
        blocks = BlocksMeasured(**{f"{name}_bytes": int(stats[_peak(name)]) for name in _COUNTS})
        self._forget()
        self._of_phase, self._of_script = (BlocksMeasured.highest((one, blocks)) for one in (self._of_phase, self._of_script))
        return self._of_phase, int(stats["allocated_bytes.all.current"])

    def next_phase(self) -> None:
        """Begin a phase."""
        self._of_phase = _NOTHING

    def answer_the_script(self) -> None:
        """Make ``torch.cuda`` return the script's own peaks, for the rest of the process."""

        def memory_stats(*args: object, **kwargs: object) -> dict[str, int]:
            found = dict(self._stats(*args, **kwargs))
            for name in _COUNTS:
                if _peak(name) in found:
                    found[_peak(name)] = max(found[_peak(name)], getattr(self._of_script, f"{name}_bytes"))
            return found

        def most(name: str) -> Callable[..., int]:
            return lambda *args, **kwargs: memory_stats(*args, **kwargs).get(_peak(name), 0)

        def forget(*_: object, **__: object) -> None:
            self.seen()
            self._of_script = _NOTHING

        for owner in (torch.cuda, torch.cuda.memory, torch.accelerator):
            put(
                owner, memory_stats=memory_stats, max_memory_allocated=most("allocated"), max_memory_reserved=most("reserved"),
                reset_peak_memory_stats=forget,
            )  # fmt: skip


def _peak(name: str) -> str:
    return f"{name}_bytes.all.peak"

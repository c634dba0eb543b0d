"""How far is a replay of predicted requests from what engines reserve, as measured?

Two sources. The requests of real engines, recorded on fake tensors, were replayed through the model of CUDA's allocator (the jobs
of ``tests/measured/*.jsonl``), and so were the requests that :mod:`zeroplan.engines.requests` predicts for the same jobs. And
``tests/on_gpus/records`` has what a GPU reserved for a job. A block of a few bytes can change where the allocator puts later
blocks, so a prediction has two ends (:meth:`zeroplan.replay.StepReplay.ends`), and single jobs are still off by some percent.

``python -m tests.measured.replayed`` derives these figures from every fourth record, all of FSDP1's, and all of GPUs. A band leaves
out one job in 20 below its lower end, and one in a hundred above its upper end, because too low is the worse error. Figures that
others published are not used; they test the band (``tests/measured/test_reserved_on_gpus.py``).
"""

from typing import NamedTuple

from zeroplan.spec.hardware import SETTINGS, AllocatorSettings


class Beyond(NamedTuple):
    """How far a reserve lies beyond a prediction's ends. [thousandths]"""

    low: int
    """Smallest ratio of what was reserved to the lower end, at most 1000."""
    high: int
    """Largest ratio to the upper end, at least 1000."""


RECORDED: tuple[Beyond, Beyond] = (
    # derived: python -m tests.measured.replayed
    Beyond(low=998, high=1011),
    Beyond(low=997, high=1007),
    # end
)
"""Of recorded runs of all engines, with the same settings."""

ON_GPUS = Beyond(
    # derived: python -m tests.measured.replayed
    low=967,
    high=1007,
    # end
)
"""Of runs on a GPU, all with the default settings."""


def off_by(settings: AllocatorSettings) -> Beyond:
    """Return the wider of the ends of recorded runs and of runs on a GPU. [thousandths]"""
    recorded = RECORDED[SETTINGS.index(settings)]
    return Beyond(min(recorded.low, ON_GPUS.low), max(recorded.high, ON_GPUS.high))

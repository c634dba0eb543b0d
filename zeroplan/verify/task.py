"""What a rank is told to do: the message between the process that launches and those that measure."""

from dataclasses import dataclass
from typing import Annotated, Literal

from zeroplan.spec.base import Count, CountOrZero, Range, Spec
from zeroplan.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Spec):
    """One run on CPU tensors: with ``transport`` gloo one process per rank, with fake a single one that is ``rank``."""

    job: JobSpec
    transport: Literal["gloo", "fake"]
    rank: CountOrZero | None = None
    steps: Count = 3
    workload: str = ""
    timeout_s: Annotated[float, Range(0.1, 1e6)] = 300.0
    store: str = ""
    """File over which the ranks find each other; no port is needed for it."""
    folder: str = ""
    """Where the ranks leave their records."""

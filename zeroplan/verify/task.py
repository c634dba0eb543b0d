"""What a rank is told to do: the message between the process that launches and those that measure."""

from dataclasses import dataclass
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.measurement import Tensors
from zeroplan.spec.base import Count, CountOrZero, Range, Spec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import ON_PAPER

Transport = Literal["gloo", "nccl", "fake"]
"""How ranks talk: over gloo or NCCL, or with a fake process group, in which there is only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(Spec):
    """The GPU that a rank found. [bytes]"""

    name: str
    total_bytes: CountOrZero


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Spec):
    """One run in processes of its own: with ``transport`` gloo or nccl one per rank, with fake a single one that is ``rank``.

    On ``tensors`` of the CPU, of GPUs, or on fake ones, with all layers or a few.
    """

    job: JobSpec
    transport: Transport
    tensors: Tensors = "cpu"
    all_layers: bool = True
    rank: CountOrZero | None = None
    steps: Count = 3
    workload: str = ""
    timeout_s: Annotated[float, Range(0.1, 1e6)] = 300.0
    store: str = ""
    """File over which the ranks find each other; no port is needed for it."""
    folder: str = ""
    """Where the ranks leave their records."""
    snapshots: str = ""
    """Where, on GPUs, they leave what the allocator remembers; nowhere if empty."""


def refuse_on_paper(job: JobSpec) -> None:
    """Raise SpecError for an engine that is a formula: there is nothing to run."""
    if job.recipe.engine in ON_PAPER:
        raise SpecError(
            f"engine {job.recipe.engine!r} is an account on paper, there is nothing to run; use ddp, fsdp1, fsdp2 or deepspeed"
        )

"""The result of a workflow: its phases, what stays on the GPU between them, and the host's memory."""

from typing import NamedTuple

from zeroplan.estimator import Estimate, Verdict, verdict
from zeroplan.ledger import Band, Kind, Line, total_bytes

DRY_RUN = "TRL 1.16's own trainer in a dry run"
ON_A_CPU = "from_pretrained on a CPU, resident memory of the process"


class LoopPhase(NamedTuple):
    """A phase at its highest moment."""

    name: str
    moment: str
    """What happens then."""
    lines: tuple[Line, ...]
    """All that torch or another engine holds on the GPU then."""
    compared_with: str = ""
    """The code that its bytes were compared with; empty where it was read and not run."""

    @property
    def total_bytes(self) -> int:
        """The sum of the lines. [bytes]"""
        return int(total_bytes(self.lines))


class HostUse(NamedTuple):
    """Memory of a node at a time."""

    when: str
    each_bytes: int
    """What one process takes. [bytes]"""
    processes: int
    """How many of the node take as much."""
    reason: str
    source: str
    compared_with: str = ""
    """As in :class:`LoopPhase`."""

    @property
    def total_bytes(self) -> int:
        """What the node must have. [bytes]"""
        return self.each_bytes * self.processes


class Loop(NamedTuple):
    """A loop of phases that share a GPU."""

    workflow: str
    answer: Estimate
    """Of the training step alone."""
    phases: tuple[LoopPhase, ...]
    resident: tuple[Line, ...]
    """What stays on the GPU from one phase to the next."""
    host: tuple[HostUse, ...]
    notes: tuple[str, ...]

    @property
    def highest(self) -> LoopPhase:
        """The phase with the highest peak: the one that breaks first."""
        return max(self.phases, key=lambda one: one.total_bytes)

    @property
    def outside(self) -> Band:
        """CUDA context and communicators, which every phase needs too."""
        return self.answer.outside_band

    @property
    def least_bytes(self) -> int:
        """What must fit: the highest phase, and what is outside the allocators. [bytes]"""
        return self.highest.total_bytes + int(self.outside.expected_bytes)

    @property
    def verdict(self) -> Verdict:
        """Whether every phase fits. The allocator's cache beyond the peak need not fit."""
        return verdict(self.least_bytes, self.least_bytes, self.answer.capacity_bytes)

    def fits(self, phase: LoopPhase) -> bool | None:
        """Whether a phase fits the GPU; None where no GPU is named."""
        capacity = self.answer.capacity_bytes
        return None if capacity is None else phase.total_bytes + int(self.outside.expected_bytes) <= capacity


def renamed(lines: tuple[Line, ...], whose: str) -> tuple[Line, ...]:
    """Return lines of another model beside the trained one. Everything of it counts as parameters or temporaries."""
    kept = {Kind.PARAMETERS, Kind.GATHER, Kind.UNSHARDED_PARAMETERS, Kind.WEIGHT_CASTS}
    return tuple(
        line._replace(kind=line.kind if line.kind in kept else Kind.TEMPORARY, reason=f"{whose}: {line.reason}")
        for line in lines
    )

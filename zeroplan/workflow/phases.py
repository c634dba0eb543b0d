"""The result of a workflow: its phases, the memory that stays on the GPU between them, and the host's memory."""

from typing import NamedTuple

from zeroplan.estimator import Estimate, Verdict, verdict
from zeroplan.ledger import Band, Kind, Line, total_bytes

DRY_RUN = "TRL 1.16's own trainer in a dry run"
ON_A_CPU = "from_pretrained on a CPU, resident memory of the process"


class LoopPhase(NamedTuple):
    """The peak of a phase."""

    name: str
    moment: str
    """The moment of the peak, in words."""
    lines: tuple[Line, ...]
    """All memory that torch or another engine holds on the GPU at the peak."""
    compared_with: str = ""
    """The code whose run was compared with these bytes; empty if it was only read."""

    @property
    def total_bytes(self) -> int:
        """The sum of the lines. [bytes]"""
        return int(total_bytes(self.lines))


class HostUse(NamedTuple):
    """A node's host memory at one time."""

    when: str
    each_bytes: int
    """The memory of one process. [bytes]"""
    processes: int
    """The number of such processes on the node."""
    reason: str
    source: str
    compared_with: str = ""
    """As in :class:`LoopPhase`."""

    @property
    def total_bytes(self) -> int:
        """The memory of all processes. [bytes]"""
        return self.each_bytes * self.processes


class Loop(NamedTuple):
    """A loop of phases that share a GPU."""

    workflow: str
    answer: Estimate
    """The estimate of the training step."""
    phases: tuple[LoopPhase, ...]
    resident: tuple[Line, ...]
    """The lines that stay on the GPU between phases."""
    host: tuple[HostUse, ...]
    notes: tuple[str, ...]

    @property
    def highest(self) -> LoopPhase:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda one: one.total_bytes)

    @property
    def outside(self) -> Band:
        """CUDA context and communicators, which every phase needs too."""
        return self.answer.outside_band

    @property
    def least_bytes(self) -> int:
        """The minimum that must fit: the highest phase, plus context and communicators. [bytes]"""
        return self.highest.total_bytes + int(self.outside.expected_bytes)

    @property
    def verdict(self) -> Verdict:
        """Whether every phase fits; the allocator's cache does not count."""
        return verdict(self.least_bytes, self.least_bytes, self.answer.capacity_bytes)

    def fits(self, phase: LoopPhase) -> bool | None:
        """Whether a phase fits the GPU; None if the job names no GPU."""
        capacity = self.answer.capacity_bytes
        return None if capacity is None else phase.total_bytes + int(self.outside.expected_bytes) <= capacity


def renamed(lines: tuple[Line, ...], whose: str) -> tuple[Line, ...]:
    """Return another model's lines with its name in the reasons. All but its parameters count as temporaries."""
    kept = {Kind.PARAMETERS, Kind.GATHER, Kind.UNSHARDED_PARAMETERS, Kind.WEIGHT_CASTS}
    return tuple(
        line._replace(kind=line.kind if line.kind in kept else Kind.TEMPORARY, reason=f"{whose}: {line.reason}")
        for line in lines
    )

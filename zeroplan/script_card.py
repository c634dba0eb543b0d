"""The memory that a script used on real GPUs, rank by rank, as data. Reading it needs no torch."""

from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.measurement import CardMeasured, Environment, PhaseMeasured, StepMeasured
from zeroplan.spec.base import Count, CountOrZero, Range, Spec
from zeroplan.spec.hardware import AllocatorSettings

SCHEMA_VERSION = 1

EndedOnCard = Literal["steps taken", "script ended", "out of memory"]


class RankOnCard(Spec):
    """One rank on a GPU of its own: the peaks of every phase as CUDA's allocator counted them. [bytes]

    ``alone``: the process group sent nothing, and the other ranks were assumed to do the same as this rank. A phase's
    ``peak_bytes`` is ``torch.cuda.max_memory_allocated``, its ``blocks`` are the allocator's other counters. ``said`` is torch's
    message when the GPU ran out of memory. Kinds and modules are unknown here.
    """

    schema_version: Annotated[int, Range(1, SCHEMA_VERSION)] = SCHEMA_VERSION
    rank: CountOrZero
    gpus: Count
    alone: bool
    ended: EndedOnCard
    environment: Environment
    settings: AllocatorSettings
    card: CardMeasured
    initialisation: PhaseMeasured
    steps: tuple[StepMeasured, ...]
    said: str = ""

    def check_rules(self) -> None:
        """Raise SpecError for a run that ended normally without a step."""
        if self.ended != "out of memory" and not (self.steps and all(step.phases for step in self.steps)):
            raise SpecError("the run on the GPU has no step, or a step without a phase")

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at any moment, the script's start included. [bytes]"""
        return max(self.initialisation.peak_bytes, *(step.peak.peak_bytes for step in self.steps), 0)

    @property
    def reserved_bytes(self) -> int:
        """The most bytes reserved at any moment. [bytes]"""
        phases = (self.initialisation, *(phase for step in self.steps for phase in step.phases))
        return max((phase.blocks.reserved_bytes for phase in phases if phase.blocks is not None), default=0)

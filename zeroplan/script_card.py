"""What a user's own script took on real GPUs, rank by rank, as data. Reading it needs no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.measurement import AllocatorSettings, CardMeasured, Environment, PhaseMeasured, StepMeasured
from zeroplan.spec.base import Count, CountOrZero, Range, Spec

SCHEMA_VERSION = 1

EndedOnCard = Literal["steps taken", "script ended", "out of memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOnCard(Spec):
    """One rank on a GPU of its own: the peaks of every phase as CUDA's caching allocator counted them. [bytes]

    ``alone`` says that the process group sent nothing and that other ranks were taken to do what this one does. A phase's
    ``peak_bytes`` is ``torch.cuda.max_memory_allocated``, its ``blocks`` are the allocator's other counts. ``said`` is what torch
    said of a card that was full. Kinds and modules are not known here.
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
        """Refuse a run that took its steps and has none."""
        if self.ended != "out of memory" and not (self.steps and all(step.phases for step in self.steps)):
            raise SpecError("the run on the card holds no step, or a step without a phase")

    @property
    def peak_bytes(self) -> int:
        """The most allocated at any moment, the start of the script included. [bytes]"""
        return max(self.initialisation.peak_bytes, *(step.peak.peak_bytes for step in self.steps), 0)

    @property
    def reserved_bytes(self) -> int:
        """The most reserved at any moment. [bytes]"""
        phases = (self.initialisation, *(phase for step in self.steps for phase in step.phases))
        return max((phase.blocks.reserved_bytes for phase in phases if phase.blocks is not None), default=0)

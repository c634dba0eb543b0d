"""What a user's own script took as one rank of N, as data. Reading it needs no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.measurement import AllocatorMeasured, CollectiveMeasured, Environment, PhaseMeasured, StepMeasured
from zeroplan.spec.base import Count, CountOrZero, Range, Spec

SCHEMA_VERSION = 1

Ended = Literal["steps taken", "script ended", "time over"]
"""The script was stopped after its steps, came to its own end, or was stopped when its time was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Spec):
    """Bytes alive at the peak of the steps, by a name: a module of the model, or a line of code."""

    name: str
    kind: str
    n_bytes: CountOrZero


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseOfRun(Spec):
    """The highest moment of what a script did beside its steps: loading, evaluation, generation, saving.

    ``kinds`` is the ledger of what was alive then; ``module``, ``operation`` and ``line`` say where in the program it was.
    ``after_step`` is how many steps were done by then, and ``times`` how often the phase began. ``counted_bytes`` is what
    ``memory_allocated`` would count. [bytes]
    """

    phase: str
    peak_bytes: CountOrZero
    counted_bytes: CountOrZero
    kinds: dict[str, int]
    module: str = ""
    operation: str = ""
    line: str = ""
    after_step: CountOrZero = 0
    times: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorsOfStep(Spec):
    """What the operators of the last step do, on this rank: operations by torch's formulas, and the bytes that they read and write.

    ``recomputed_flops`` are those of forwards that run again within the backward; the rest are the model's. Collectives are not
    among the bytes.
    """

    count: CountOrZero
    streams: CountOrZero
    flops: Annotated[int, Range(0, 10**30)]
    recomputed_flops: Annotated[int, Range(0, 10**30)]
    read_bytes: Annotated[int, Range(0, 10**30)]
    written_bytes: Annotated[int, Range(0, 10**30)]

    @property
    def model_flops(self) -> int:
        """Operations without those that are done again."""
        return self.flops - self.recomputed_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUp(Spec):
    """A value that no fake tensor has: what was read, what the script was given, on which line, and how often."""

    read: str
    said: str
    line: str
    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StoodIn(Spec):
    """Code of a library that cannot run without a GPU: what it was, what took its place, and how often the script used that."""

    what: str
    by: str
    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideBuffer(Spec):
    """What a library takes from the card beside torch's allocator: at least, as expected, and at most. [bytes]"""

    what: str
    low_bytes: CountOrZero
    expected_bytes: CountOrZero
    high_bytes: CountOrZero
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving(Spec):
    """A change that would make the last step's peak lower, by so much at most; ``of`` names modules or lines with most of it."""

    change: str
    of: tuple[str, ...]
    at_most_bytes: CountOrZero


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(Spec):
    """One script as one rank of N: every step, what is alive at the highest moment of the last, and what was made up.

    ``phases`` are what the script did beside its steps. With ``compiler_left_out`` it calls ``torch.compile``, and its code ran
    as it is. With ``before_capture`` the run was stopped in what looks like the warm-up of a CUDA graph.
    ``steps`` are as a record of ``zeroplan verify`` has them; the first makes the optimizer's state. ``allocator`` is a model of
    CUDA's caching allocator, which followed every request from the start of the script. ``stood_in`` names the
    library code that something else replaced. ``companions`` are further ranks that ran beside this one for what they send it.
    ``imbalance`` is how many times the even share of tokens the rank's
    experts are assumed to receive, where sizes may depend on choices among scores; otherwise None. ``kept_by_graphs_bytes`` is
    how much higher the peak is with what CUDA graphs keep free in their pools, which nothing else can have.
    ``outside_buffers`` is what libraries held beside the allocator, when it was the most. [bytes]
    """

    schema_version: Annotated[int, Range(1, SCHEMA_VERSION)] = SCHEMA_VERSION
    command: tuple[str, ...]
    gpus: Count
    rank: CountOrZero
    gpu: str
    environment: Environment
    ended: Ended
    initialisation: PhaseMeasured
    steps: tuple[StepMeasured, ...]
    modules: tuple[Part, ...]
    lines: tuple[Part, ...]
    collectives: tuple[CollectiveMeasured, ...]
    allocator: tuple[AllocatorMeasured, ...]
    made_up: tuple[MadeUp, ...]
    stood_in: tuple[StoodIn, ...]
    remarks: tuple[str, ...] = ()
    companions: tuple[CountOrZero, ...] = ()
    savings: tuple[Saving, ...] = ()
    phases: tuple[PhaseOfRun, ...] = ()
    operators: OperatorsOfStep | None = None
    compiler_left_out: bool = False
    before_capture: bool = False
    imbalance: Annotated[float, Range(1, 1e6)] | None = None
    kept_by_graphs_bytes: CountOrZero = 0
    outside_buffers: tuple[OutsideBuffer, ...] = ()
    host_bytes: CountOrZero | None = None
    seconds: Annotated[float, Range(0, 1e9)] = 0.0

    def check_rules(self) -> None:
        """Refuse an answer without a step, a phase or an allocator, which none has."""
        if not self.steps or not all(step.phases for step in self.steps):
            raise SpecError("the run holds no step, or a step without a phase")
        if not self.allocator or not self.command:
            raise SpecError("the run says nothing of its command or of the allocator")

    @property
    def peak_bytes(self) -> int:
        """The most alive at any moment, what lies beside the steps included. [bytes]"""
        beside = (phase.peak_bytes for phase in self.phases)
        return max(self.initialisation.peak_bytes, *beside, *(step.peak.peak_bytes for step in self.steps))

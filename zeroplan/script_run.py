"""The result of a dry run: a script that ran as one rank of N, as data. Reading it needs no torch."""

from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.measurement import AllocatorMeasured, CollectiveMeasured, Environment, PhaseMeasured, StepMeasured
from zeroplan.spec.base import Count, CountOrZero, Range, Spec

SCHEMA_VERSION = 1

Ended = Literal["steps taken", "script ended", "time over"]
"""Whether the script was stopped after its steps, ended by itself, or was stopped at its time limit."""


class Part(Spec):
    """Bytes alive at the steps' peak, of a module or a line of code."""

    name: str
    kind: str
    n_bytes: CountOrZero


class PhaseOfRun(Spec):
    """The peak of a part of the run beside its steps: loading, evaluation, generation, saving.

    ``kinds`` are the bytes alive then; ``module``, ``operation`` and ``line`` are the place in the program. ``after_step`` is
    the number of completed steps, ``times`` how often the part began. ``counted_bytes`` is what ``memory_allocated`` would
    return. [bytes]
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


class OperatorsOfStep(Spec):
    """The totals of the last step's operators on this rank: operations by torch's formulas, and bytes read and written.

    ``recomputed_flops`` are of forwards repeated within the backward. Collectives are not in the bytes.
    """

    count: CountOrZero
    streams: CountOrZero
    flops: Annotated[int, Range(0, 10**30)]
    recomputed_flops: Annotated[int, Range(0, 10**30)]
    read_bytes: Annotated[int, Range(0, 10**30)]
    written_bytes: Annotated[int, Range(0, 10**30)]

    @property
    def model_flops(self) -> int:
        """The operations without recomputation."""
        return self.flops - self.recomputed_flops


class MadeUp(Spec):
    """A value that the script read from a fake tensor and the dry run made up: what was read, the value, the line, how often."""

    read: str
    said: str
    line: str
    count: Count


class StoodIn(Spec):
    """Library code that needs a GPU and was replaced: its name, the replacement, and how often the script used it."""

    what: str
    by: str
    count: Count


class OutsideBuffer(Spec):
    """GPU memory that a library allocates outside torch's allocator: at least, expected, at most. [bytes]"""

    what: str
    low_bytes: CountOrZero
    expected_bytes: CountOrZero
    high_bytes: CountOrZero
    source: str


class Saving(Spec):
    """A change that would lower the last step's peak by at most this many bytes; ``of`` names modules or lines with most of it."""

    change: str
    of: tuple[str, ...]
    at_most_bytes: CountOrZero


class DryRun(Spec):
    """One script as one rank of N: every step, the bytes alive at the last step's peak, and the assumptions.

    ``phases`` are the parts beside the steps. ``compiler_left_out``: the script calls ``torch.compile``, and its code ran
    uncompiled. ``before_capture``: the run was stopped in a likely warm-up of a CUDA graph. ``steps`` are as in a record of
    ``zeroplan verify``; the first makes the optimizer's state. ``allocator`` models CUDA's caching allocator, with every
    request from the script's start. ``stood_in`` lists replaced library code. ``companions`` are ranks that ran beside this one
    for their messages. ``imbalance`` is the assumed multiple of the even share of tokens for the rank's experts, if sizes may
    depend on choices among scores; else None. ``kept_by_graphs_bytes`` is how much higher the peak is with the free memory that
    CUDA graphs keep in their pools. ``outside_buffers`` is what libraries held outside the allocator at their highest total.
    [bytes]
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
        """Raise SpecError for a result without a step, a phase or an allocator."""
        if not self.steps or not all(step.phases for step in self.steps):
            raise SpecError("the run has no step, or a step without a phase")
        if not self.allocator or not self.command:
            raise SpecError("the run has no command, or no allocator figures")

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any moment, beside the steps as well. [bytes]"""
        beside = (phase.peak_bytes for phase in self.phases)
        return max(self.initialisation.peak_bytes, *beside, *(step.peak.peak_bytes for step in self.steps))

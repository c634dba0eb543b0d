"""What a run of the real engine measured. Estimating and measuring meet only in this data, and reading it needs no torch.

A record is one JSON object; within a schema version keys are added, never renamed or removed.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from zeroplan.errors import MeasurementError
from zeroplan.spec.base import Count, CountOrZero, Range, Spec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import Kernels

SCHEMA_VERSION = 1

Backend = Literal["simulate", "cpu", "cuda"]
Tensors = Literal["fake", "cpu", "cuda"]
ProcessGroup = Literal["fake", "gloo", "nccl", "none"]
AllocatorSettings = Literal["default", "expandable_segments"]
SETTINGS: tuple[AllocatorSettings, ...] = ("default", "expandable_segments")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(Spec):
    """Where it ran, and on which day (UTC, ``2026-11-20``): versions by package, and the machine in words."""

    python: str
    platform: str
    packages: dict[str, str]
    device: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksMeasured(Spec):
    """What CUDA's caching allocator counted at most in one phase, each peak at its own moment, and how long the phase took.

    ``torch.cuda.memory_stats``: requests as they were made, the blocks they were given, blocks that another stream may still use,
    and what was taken from the card. [bytes], [s]
    """

    allocated_bytes: CountOrZero
    requested_bytes: CountOrZero
    active_bytes: CountOrZero
    reserved_bytes: CountOrZero
    seconds: Annotated[float, Range(0, 1e9)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMeasured(Spec):
    """The GPU, and what was taken from it when the run was over. [bytes]

    ``outside_bytes`` is what its driver counts as used beyond the caching allocator: the context, kernels, NCCL's buffers, and
    what other processes hold. ``context_bytes`` is what it was when the context had just been made, ``joined_bytes`` when the
    process group was there, before any of the job's kernels was loaded.
    """

    name: str
    total_bytes: CountOrZero
    used_bytes: CountOrZero
    outside_bytes: CountOrZero
    driver: str = ""
    cuda: str = ""
    nccl: str = ""
    context_bytes: CountOrZero | None = None
    joined_bytes: CountOrZero | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMeasured(Spec):
    """Which operators computed attention, and the most that one of them asked for and gave back before it was done. [bytes]"""

    operators: tuple[str, ...]
    scratch_bytes: CountOrZero


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseMeasured(Spec):
    """The highest moments along a forward or backward pass: before its first block, in each block, and after the last. [bytes]

    ``blocks`` are in the order of the model, in which a backward comes to them from the last to the first. What is asked for
    between two blocks counts to the one that was at work before. Of several micro-batches blocks are those of the last, as an
    estimate's are, and before and after the highest of all.
    """

    before_bytes: CountOrZero
    blocks: tuple[CountOrZero, ...]
    after_bytes: CountOrZero


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMeasured(Spec):
    """The highest moment of one phase of one step.

    ``kinds`` is the ledger of what was alive then, by :class:`zeroplan.ledger.Kind`; ``module`` and ``operation`` say where in
    the program it was. ``counted_bytes`` is what ``memory_allocated`` would count (blocks, not requests), where known;
    ``host_bytes`` the most in host memory beside it, at whatever moment, where something is offloaded. On a GPU ``peak_bytes``
    is ``torch.cuda.max_memory_allocated`` of the phase, and ``blocks`` the other counts. ``course`` is how memory went within the
    phase, of the last step, where modules were told apart.
    """

    phase: str
    peak_bytes: CountOrZero
    kinds: dict[str, int]
    module: str = ""
    operation: str = ""
    counted_bytes: CountOrZero | None = None
    host_bytes: CountOrZero | None = None
    blocks: BlocksMeasured | None = None
    course: CourseMeasured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured(Spec):
    """One optimizer step: its phases in order, and what is held when it ends, by kind.

    ``host_pinned_bytes`` is what torch's allocator of pinned memory has taken by then beyond the tensors in it, by a model of it;
    ``host_taken_bytes`` the most of host memory that is taken at any moment, free blocks of pinned memory among it.
    """

    phases: tuple[PhaseMeasured, ...]
    held_bytes: CountOrZero
    held_kinds: dict[str, int]
    host_held_bytes: CountOrZero | None = None
    host_pinned_bytes: CountOrZero | None = None
    host_taken_bytes: CountOrZero | None = None

    @property
    def peak(self) -> PhaseMeasured:
        """The phase with the highest moment; the earliest of equals."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def seconds(self) -> float | None:
        """How long the step took on a GPU; None elsewhere, where time says nothing."""
        timed = [phase.blocks.seconds for phase in self.phases if phase.blocks is not None]
        return sum(timed) if timed else None

    @property
    def host_bytes(self) -> int | None:
        """The most in host memory during the step, pinned memory with what it takes beyond its tensors; None where unknown."""
        if self.host_taken_bytes is not None:
            return self.host_taken_bytes
        seen = [phase.host_bytes for phase in self.phases if phase.host_bytes is not None]
        return max(seen) + (self.host_pinned_bytes or 0) if seen else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveMeasured(Spec):
    """Collectives of one kind in one step: how many calls on how many ranks, and the bytes of their largest buffers together."""

    operation: str
    dtype: str
    phase: str
    group: Count
    calls: Count
    n_bytes: CountOrZero
    seconds: Annotated[float, Range(0, 1e9)] | None = None
    """How long they took together, where NCCL moved data and its times were kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCardMeasured(Spec):
    """What came of a run's requests in a replay with a card of the job's size. [bytes]

    ``room_bytes`` is what that card has for the allocator, context and communicators taken off. Where the card is full, the
    allocator gives cached blocks back and tries again: ``retries`` counts that over the run, ``retries_in_last_step`` in the
    steady state. Where nothing helps, ``fits`` is False and ``phase`` says in which the run would have ended.
    ``reserved_bytes`` is the most that was reserved.
    """

    room_bytes: CountOrZero
    fits: bool
    reserved_bytes: CountOrZero
    retries: CountOrZero = 0
    retries_in_last_step: CountOrZero = 0
    phase: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorMeasured(Spec):
    """What CUDA's caching allocator shows after the run: ``max_memory_allocated`` of the last step, ``max_memory_reserved`` of all.

    On a GPU it is what torch reports; elsewhere the recorded requests replayed through a model of the allocator
    (:mod:`zeroplan.allocator`). ``workspace_bytes`` of cuBLAS are among them. ``card`` is a replay with a card of the job's size,
    where the job names a GPU; ``least_room_bytes`` the smallest room in which the replay goes through, where that was looked for.
    """

    settings: AllocatorSettings
    allocated_bytes: CountOrZero
    reserved_bytes: CountOrZero
    workspace_bytes: CountOrZero = 0
    modelled: bool = True
    card: OnCardMeasured | None = None
    least_room_bytes: CountOrZero | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Spec):
    """One run: the job, how and where it ran, every step, and the collectives of the last one.

    The last step is the steady state: the first creates the optimizer state, and some engines settle only in the third.
    ``kernels`` says whose dtypes and saved tensors a run shows; fake tensors may stand for either device's.
    ``remarks`` say what a reader must know to judge the figures (collectives that moved no data, layers that were extended).
    """

    schema_version: Annotated[int, Range(1, SCHEMA_VERSION)] = SCHEMA_VERSION
    job: JobSpec
    backend: Backend
    tensors: Tensors
    kernels: Kernels = "cpu"
    process_group: ProcessGroup
    rank: CountOrZero
    workload: str = ""
    """A user's own, ``package.module:function``, that was run in place of the job's model."""
    environment: Environment
    initialisation: PhaseMeasured | None = None
    steps: tuple[StepMeasured, ...]
    collectives: tuple[CollectiveMeasured, ...] = ()
    allocator: tuple[AllocatorMeasured, ...] = ()
    nvme_bytes: CountOrZero | None = None
    """What was written to NVMe, file by file, where something is offloaded there."""
    card: CardMeasured | None = None
    attention: AttentionMeasured | None = None
    """On a GPU, where the choice of the kernel is its library's."""
    remarks: tuple[str, ...] = ()
    seconds: Annotated[float, Range(0, 1e9)] = 0.0

    def check_rules(self) -> None:
        """Refuse a record without a step, or with a step of nothing."""
        if not self.steps:
            raise MeasurementError("the record holds no step; measure at least one")
        if not all(step.phases for step in self.steps):
            raise MeasurementError(
                "the record holds a step without a phase; a step has a forward, a backward and an optimizer step"
            )

    @property
    def steady(self) -> StepMeasured:
        """The last step."""
        return self.steps[-1]

"""The record of a run of a real engine, as data; reading it needs no torch. ``comparison.py`` compares it with an estimate.

A record is one JSON object. Within a schema version keys are added, never renamed or removed.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from zeroplan.errors import MeasurementError
from zeroplan.spec.base import Count, CountOrZero, Range, Spec
from zeroplan.spec.hardware import AllocatorSettings, Kernels
from zeroplan.spec.job import JobSpec

SCHEMA_VERSION = 1

Backend = Literal["simulate", "cpu", "cuda"]
Tensors = Literal["fake", "cpu", "cuda"]
ProcessGroup = Literal["fake", "gloo", "nccl", "none"]


class Environment(Spec):
    """The machine and package versions of a run, and its date (UTC, ``2026-11-20``)."""

    python: str
    platform: str
    packages: dict[str, str]
    device: str = ""
    date: str = ""


class BlocksMeasured(Spec):
    """The peaks that CUDA's caching allocator counted in one phase, each at its own moment, and the phase's duration.

    From ``torch.cuda.memory_stats``: the requested bytes, the blocks allocated for them, blocks that another stream may still
    use, and the memory reserved. [bytes], [s]
    """

    allocated_bytes: CountOrZero
    requested_bytes: CountOrZero
    active_bytes: CountOrZero
    reserved_bytes: CountOrZero
    seconds: Annotated[float, Range(0, 1e9)] = 0.0

    @classmethod
    def highest(cls, several: Iterable["BlocksMeasured"]) -> "BlocksMeasured":
        """Return the maximum of each count and the sum of the seconds; zeros for an empty input."""
        found = list(several)
        names = ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes")
        counts = {name: max((getattr(one, name) for one in found), default=0) for name in names}
        return cls(**counts, seconds=sum(one.seconds for one in found))


class CardMeasured(Spec):
    """The GPU, and its memory in use at the end of the run. [bytes]

    ``outside_bytes`` is what the driver counts beyond the caching allocator: the context, kernels, NCCL's buffers, and other
    processes. ``context_bytes`` is the same right after the context was made, ``joined_bytes`` after joining the process group,
    before any kernel of the job was loaded.
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


class AttentionMeasured(Spec):
    """The operators that computed attention, and the most scratch that one of them held inside. [bytes]"""

    operators: tuple[str, ...]
    scratch_bytes: CountOrZero


class CourseMeasured(Spec):
    """The peaks along a forward or backward pass: before the first block, in each block, and after the last. [bytes]

    ``blocks`` are in the model's order, which a backward visits in reverse. Requests between two blocks count to the block that
    ran before. Of several micro-batches, blocks are those of the last, as in an estimate; before and after are the highest of
    all.
    """

    before_bytes: CountOrZero
    blocks: tuple[CountOrZero, ...]
    after_bytes: CountOrZero


class PhaseMeasured(Spec):
    """The peak of one phase of one step.

    ``kinds`` are the bytes alive then, by :class:`zeroplan.ledger.Kind`; ``module`` and ``operation`` are the place in the
    program. ``counted_bytes`` is what ``memory_allocated`` would return (blocks, not requests), if known. ``host_bytes`` is the
    peak of host memory with offload, at its own moment. On a GPU ``peak_bytes`` is the phase's
    ``torch.cuda.max_memory_allocated``, and ``blocks`` the other counts. ``course`` has the peaks along the phase in the last
    step, if modules were told apart.
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


class StepMeasured(Spec):
    """One optimizer step: its phases in order, and the bytes held at its end, by kind.

    ``host_pinned_bytes`` is what the modelled pinned allocator then holds beyond its tensors; ``host_taken_bytes`` the peak of
    all host memory, free pinned blocks included.
    """

    phases: tuple[PhaseMeasured, ...]
    held_bytes: CountOrZero
    held_kinds: dict[str, int]
    host_held_bytes: CountOrZero | None = None
    host_pinned_bytes: CountOrZero | None = None
    host_taken_bytes: CountOrZero | None = None

    @property
    def peak(self) -> PhaseMeasured:
        """The phase with the highest peak; the earliest of equals."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def seconds(self) -> float | None:
        """The step's duration on a GPU; None elsewhere. [s]"""
        timed = [phase.blocks.seconds for phase in self.phases if phase.blocks is not None]
        return sum(timed) if timed else None

    @property
    def host_bytes(self) -> int | None:
        """The peak of host memory in the step, with the pinned allocator's overhead; None if unknown. [bytes]"""
        if self.host_taken_bytes is not None:
            return self.host_taken_bytes
        seen = [phase.host_bytes for phase in self.phases if phase.host_bytes is not None]
        return max(seen) + (self.host_pinned_bytes or 0) if seen else None


class CollectiveMeasured(Spec):
    """Equal collectives of one step: number of calls, ranks, and the sum of their largest buffers. [bytes]"""

    operation: str
    dtype: str
    phase: str
    group: Count
    calls: Count
    n_bytes: CountOrZero
    seconds: Annotated[float, Range(0, 1e9)] | None = None
    """Their total duration, if NCCL moved data and recorded times. [s]"""


class OnCardMeasured(Spec):
    """The result of replaying a run's requests on a GPU of the job's size. [bytes]

    ``room_bytes`` is the memory for the allocator, without context and communicators. If the GPU is full, the allocator frees
    its cache and retries: ``retries`` counts that over the run, ``retries_in_last_step`` in the steady state. If that does not
    help, ``fits`` is False and ``phase`` is the phase in which the run would fail. ``reserved_bytes`` is the highest reserved
    memory.
    """

    room_bytes: CountOrZero
    fits: bool
    reserved_bytes: CountOrZero
    retries: CountOrZero = 0
    retries_in_last_step: CountOrZero = 0
    phase: str = ""


class AllocatorMeasured(Spec):
    """The allocator's figures after the run: ``max_memory_allocated`` of the last step, ``max_memory_reserved`` of all.

    On a GPU torch reports them; elsewhere the recorded requests are replayed through a model (:mod:`zeroplan.allocator`). They
    include cuBLAS's ``workspace_bytes``. ``card`` is a replay on a GPU of the job's size, if the job names one;
    ``least_room_bytes`` is the smallest room in which the replay succeeds, if it was searched for.
    """

    settings: AllocatorSettings
    allocated_bytes: CountOrZero
    reserved_bytes: CountOrZero
    workspace_bytes: CountOrZero = 0
    modelled: bool = True
    card: OnCardMeasured | None = None
    least_room_bytes: CountOrZero | None = None


class Measurement(Spec):
    """One run: the job, how and where it ran, every step, and the collectives of the last one.

    The last step is the steady state: the first creates the optimizer state, and some engines need three steps. ``kernels``
    says whose dtypes and saved tensors a run has; fake tensors may represent either device. ``remarks`` qualify the figures
    (collectives that moved no data, layers that were extended).
    """

    schema_version: Annotated[int, Range(1, SCHEMA_VERSION)] = SCHEMA_VERSION
    job: JobSpec
    backend: Backend
    tensors: Tensors
    kernels: Kernels = "cpu"
    process_group: ProcessGroup
    rank: CountOrZero
    workload: str = ""
    """A user's own workload, ``package.module:function``, that ran instead of the job's model."""
    environment: Environment
    initialisation: PhaseMeasured | None = None
    first_micro_batches: PhaseMeasured | None = None
    """The forward and backward passes of the first step, if their peak is another one than in the last step; of simulations."""
    steps: tuple[StepMeasured, ...]
    collectives: tuple[CollectiveMeasured, ...] = ()
    allocator: tuple[AllocatorMeasured, ...] = ()
    nvme_bytes: CountOrZero | None = None
    """Bytes written to NVMe with NVMe offload."""
    card: CardMeasured | None = None
    attention: AttentionMeasured | None = None
    """Measured on a GPU only, where the library chooses the kernel."""
    remarks: tuple[str, ...] = ()
    seconds: Annotated[float, Range(0, 1e9)] = 0.0

    def check_rules(self) -> None:
        """Raise MeasurementError for a record without steps or with an empty step."""
        if not self.steps:
            raise MeasurementError("the record has no step; measure at least one")
        if not all(step.phases for step in self.steps):
            raise MeasurementError(
                "the record has a step without a phase; a step needs a forward, a backward and an optimizer step"
            )

    @property
    def steady(self) -> StepMeasured:
        """The last step."""
        return self.steps[-1]

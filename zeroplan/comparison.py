"""Compares an estimate with a measurement, figure by figure. Needs no torch, so records can be compared anywhere."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan.engines.precisions import compute_of
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Band, Kind, Line, Moment, OffGpu, Phase, Tag, bytes_by_kind, total_bytes
from zeroplan.measurement import AllocatorMeasured, Measurement, OnCardMeasured, StepMeasured, Tensors
from zeroplan.spec.hardware import AllocatorSettings, Kernels
from zeroplan.spec.recipe import Loss
from zeroplan.timeline import Sizes, reserved, sizes_of
from zeroplan.transformer.blocks import Compute

#: Library workspaces exist with CUDA's kernels only.
_ONLY_ON_CUDA = (Kind.WORKSPACE,)
_A_THOUSANDTH = 1000


class Compared(NamedTuple):
    """One figure, predicted and measured. [bytes]"""

    what: str
    predicted: int
    measured: int

    @property
    def difference(self) -> int:
        """Predicted minus measured. [bytes]"""
        return self.predicted - self.measured

    @property
    def error(self) -> float:
        """The difference divided by the measured value; infinite if something was predicted and nothing measured."""
        if self.measured:
            return self.difference / self.measured
        return 0.0 if not self.predicted else float("inf")


class Reserved(NamedTuple):
    """The memory that the caching allocator reserved, and the estimate's band for it. [bytes]

    ``card`` is the result of the same requests on a GPU of the job's size, if they were replayed.
    """

    settings: AllocatorSettings
    band: Band
    measured: int
    card: OnCardMeasured | None = None

    @property
    def inside(self) -> bool:
        """Whether the measured value is in the band."""
        return int(self.band.low_bytes) <= self.measured <= int(self.band.high_bytes)


class Comparison(NamedTuple):
    """An estimate compared with a measurement: the peak, each phase, held bytes, each kind at the peak, each collective.

    ``allocator`` is what CUDA's allocator counts at the peak, if recorded, and ``reserved`` what it reserved, with the
    estimate's bands. Values outside a band are named, but do not decide whether the two agree. ``contradicted`` does: the
    estimate fits the GPU, but a replay on a GPU of that size runs out of memory. ``host`` is host memory per rank and ``nvme``
    the size of files, with offload. ``first`` is the peak of the first micro-batch, if the estimate or the measurement has it above
    the peak of a later step, and the measurement has the first step.
    """

    peak: Compared
    phases: tuple[Compared, ...]
    held: Compared
    kinds: tuple[Compared, ...]
    collectives: tuple[Compared, ...]
    allocator: tuple[Compared, ...] = ()
    host: Compared | None = None
    nvme: Compared | None = None
    reserved: tuple[Reserved, ...] = ()
    contradicted: bool = False
    first: Compared | None = None

    def agrees(self, tolerance: float) -> bool:
        """Whether peaks, held bytes and collectives are all within ``tolerance`` (0.02 for 2 %), and no replay contradicts."""
        return not self.beyond(tolerance) and not self.contradicted

    @property
    def of_first(self) -> tuple[Compared, ...]:
        """The peak of the first micro-batch, where compared."""
        return () if self.first is None else (self.first,)

    @property
    def off_gpu(self) -> tuple[Compared, ...]:
        """The figures of host memory and NVMe, where compared."""
        return tuple(row for row in (self.host, self.nvme) if row is not None)

    def beyond(self, tolerance: float) -> tuple[Compared, ...]:
        """The figures that differ by more than ``tolerance``, the largest difference first.

        Peaks, held and host bytes are judged by their own size, a collective by the bytes of all collectives of the step: a flag
        or norm that is not predicted is shown, but does not outweigh the gradients. A difference below 1/1000 of the peak does
        not count, such as a batch of token ids where nothing else is held.
        """
        moved = sum(max(row.predicted, row.measured) for row in self.collectives)
        matters = self.peak.measured // _A_THOUSANDTH
        sizes = (self.peak, *self.of_first, self.held, *self.off_gpu)
        found = [row for row in sizes if abs(row.error) > tolerance and abs(row.difference) > matters]
        found += [row for row in self.collectives if abs(row.difference) > tolerance * moved]
        return tuple(sorted(found, key=lambda row: -abs(row.difference)))


def compare_with_estimate(measured: Measurement, *, has_scratch: bool = False) -> Comparison:
    """The comparison of a measurement with the estimate of its job, with the kernels that ran.

    In a pipeline, the estimate is of the rank that ran; stages are the outermost dimension of ranks. ``has_scratch`` as in
    :func:`compare`.
    """
    as_run = replace(measured.job, recipe=replace(measured.job.recipe, kernels=measured.kernels))
    return compare(estimate(as_run, pipeline_rank=stage_of(measured)), measured, has_scratch=has_scratch)


def stage_of(measured: Measurement) -> int | None:
    """The pipeline stage of the rank that ran; None without a pipeline."""
    mesh = measured.job.mesh
    return None if mesh.pp == 1 else measured.rank // (mesh.world_size // mesh.pp)


def compare(answer: Estimate, measured: Measurement, *, has_scratch: bool = False) -> Comparison:
    """The comparison of an estimate with the steady state of a measurement, and with its first step where that can be the peak.

    On other tensors than CUDA's, the prediction leaves out what only CUDA's kernels allocate (workspaces, scratch of
    attention). If a CPU's kernels ran, it counts tensors in their dtypes. ``has_scratch``: memory inside kernels was counted
    anyway, as in a dry run. Kinds are compared at each side's own peak.
    """
    steady = measured.steady
    as_run = moments_as_run(answer, measured, has_scratch=has_scratch)
    totals = [(moment, int(moment.total_bytes)) for moment in as_run if moment.phase not in (Phase.INIT, Phase.FIRST)]
    highest, highest_bytes = max(totals, key=lambda pair: pair[1])
    return Comparison(
        peak=Compared("peak allocated", highest_bytes, steady.peak.peak_bytes),
        phases=tuple(_phases(totals, steady, loss=answer.job.recipe.loss)),
        held=Compared("held between steps", _held_bytes(answer, highest), steady.held_bytes),
        kinds=tuple(_by_kind(highest.lines, steady.peak.kinds)),
        collectives=tuple(_collectives(answer, measured)),
        allocator=tuple(_allocator(measured, highest=highest_bytes)),
        host=None if steady.host_bytes is None else Compared("host memory", answer.host_bytes, steady.host_bytes),
        nvme=None if measured.nvme_bytes is None else Compared("NVMe", answer.nvme_bytes, measured.nvme_bytes),
        reserved=tuple(_reserved(answer, as_run, measured)),
        contradicted=answer.verdict == "fits" and any(_ran_out(shown) for shown in measured.allocator),
        first=_first(as_run, measured, highest_bytes),
    )


def _first(as_run: tuple[Moment, ...], measured: Measurement, later_bytes: int) -> Compared | None:
    """The peak of the first micro-batch, predicted and measured; None if neither is above the peak of a later step.

    A record has the first step, or only the peak of its passes.
    """
    passes = (Phase.FORWARD.value, Phase.BACKWARD.value)
    begun = measured.steps[0].phases if len(measured.steps) > 1 else ()
    early = [phase for phase in begun if phase.phase in passes]
    early += [] if measured.first_micro_batches is None else [measured.first_micro_batches]
    if not early:
        return None
    seen = max(phase.peak_bytes for phase in early)
    predicted = max((int(moment.total_bytes) for moment in as_run if moment.phase is Phase.FIRST), default=0)
    if not predicted and seen <= measured.steady.peak.peak_bytes:
        return None
    return Compared("peak of the first micro-batches", predicted or later_bytes, seen)


def _held_bytes(answer: Estimate, as_run: Moment) -> int:
    """Bytes that a run holds between steps; a GPU also keeps the workspaces of matrix products."""
    workspaces = (line for line in as_run.lines if line.kind is Kind.WORKSPACE and line.tag.off_gpu is not OffGpu.KEPT)
    return int(total_bytes((*answer.held, *workspaces)))


def against_kinds(answer: Estimate, seen: dict[str, int], live_bytes: int) -> tuple[Compared, ...]:
    """The peak of an estimate and its kinds, compared with the bytes in use on a GPU by kind. [bytes]"""
    whole = Compared("peak allocated", int(answer.peak_bytes), live_bytes)
    return (whole, *_by_kind(answer.peak.lines, seen))


def moments_as_run(answer: Estimate, measured: Measurement, *, has_scratch: bool = False) -> tuple[Moment, ...]:
    """The estimate's moments with each line's bytes in this run, which are fewer without CUDA."""
    recipe = answer.job.recipe
    as_run = _AsRun(
        measured.tensors, measured.kernels, compute_of(recipe), recipe.recompute == "selective", has_scratch
    ).with_blocks(answer.kept)
    if measured.tensors == "cuda":
        return answer.moments
    lines = {id(line): line for moment in answer.moments for line in moment.lines}  # most are in many moments
    made = {key: as_run.line(line) for key, line in lines.items()}
    return tuple(moment._replace(lines=tuple(made[id(line)] for line in moment.lines)) for moment in answer.moments)


def cpu_bytes(lines: tuple[Line, ...], compute: Compute) -> int:
    """The sum of the lines as on a CPU. [bytes]"""
    return int(total_bytes(_AsRun("cpu", "cpu", compute).lines(lines)))


class _AsRun(NamedTuple):
    """Converts predicted lines to a run's: every known difference from a GPU, by name.

    Without a GPU there are no library workspaces and no scratch inside kernels. A CPU's kernels also keep 16 bits where CUDA's
    autocast computes in fp32, and their norms keep statistics in the input's dtype.
    """

    tensors: Tensors
    kernels: Kernels
    compute: Compute
    selective: bool = False
    """Selective checkpointing keeps operators' outputs, not copies made of them."""
    has_scratch: bool = False
    """Whether memory inside kernels was counted."""
    of_blocks: tuple[tuple[str, int], ...] = ()
    """For each kind of block, how much more or less it keeps than a line that sums up whole blocks."""

    def with_blocks(self, kept: tuple[tuple[str, tuple[Line, ...]], ...]) -> "_AsRun":
        """Return a copy with ``of_blocks``, computed from the blocks' own lines (``Estimate.kept``)."""
        found = ((kind, int(total_bytes(self.lines(lines)) - total_bytes(lines))) for kind, lines in kept)
        return self._replace(of_blocks=tuple((kind, more) for kind, more in found if more))

    def lines(self, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        """The lines with their bytes in this run."""
        return lines if self.tensors == "cuda" else tuple(map(self.line, lines))

    def line(self, line: Line) -> Line:
        """The line with its bytes in this run."""
        return line._replace(n_bytes=self._bytes(line))

    def _bytes(self, line: Line) -> int:
        of_library = line.kind in _ONLY_ON_CUDA and line.tag.off_gpu is not OffGpu.KEPT
        if of_library or (line.tag.off_gpu is OffGpu.NO_TENSOR and not self.has_scratch):
            return 0
        n_bytes = int(line.n_bytes) + self._of_blocks(line.tag)
        return n_bytes if self.kernels != "cpu" else self._on_cpu(line.tag.off_gpu, n_bytes)

    def _of_blocks(self, tag: Tag) -> int:
        """How much more the blocks of a line keep than it states. [bytes]"""
        if not (self.of_blocks and tag.blocks):
            return 0
        more = dict(self.of_blocks)
        return sum(count * more.get(kind, 0) for kind, count in tag.blocks)

    def _on_cpu(self, instead: OffGpu, n_bytes: int) -> int:
        """The bytes that a CPU's kernels keep instead of ``n_bytes`` on a GPU. [bytes]"""
        if instead is OffGpu.NOTHING:
            return 0
        if instead is OffGpu.TWICE:
            return n_bytes if self.selective else 2 * n_bytes
        if instead is OffGpu.HALF:
            return n_bytes // 2
        if instead is OffGpu.COMPUTE_DTYPE and not self.compute.autocast:
            return n_bytes * self.compute.element_bytes // 4
        return n_bytes


def _phases(totals: list[tuple[Moment, int]], steady: StepMeasured, *, loss: Loss) -> list[Compared]:
    rows = []
    for phase in steady.phases:
        predicted = [n_bytes for moment, n_bytes in totals if phase_as_run(moment, loss).value == phase.phase]
        if predicted:
            rows.append(Compared(phase.phase, max(predicted), phase.peak_bytes))
    return rows


def phase_as_run(moment: Moment, loss: Loss) -> Phase:
    """The pass to which a run assigns a moment of the loss; a chunked loss begins the backward."""
    if moment.phase is Phase.LOSS:
        return Phase.FORWARD if moment.of_forward and loss != "chunked" else Phase.BACKWARD
    return moment.phase


def _by_kind(lines: tuple[Line, ...], measured: dict[str, int]) -> list[Compared]:
    predicted: dict[str, int] = {}
    for kind, n_bytes in bytes_by_kind(lines).items():
        what = Kind.TEMPORARY if kind is Kind.ACTIVATION_GRADIENTS else kind  # a run cannot tell them apart
        predicted[what.value] = predicted.get(what.value, 0) + int(n_bytes)
    rows = [Compared(kind, predicted.get(kind, 0), measured.get(kind, 0)) for kind in {**predicted, **measured}]
    return sorted(rows, key=lambda row: -abs(row.difference))


def _collectives(answer: Estimate, measured: Measurement) -> list[Compared]:
    """Bytes sent and received; calls within a single rank, which DeepSpeed issues, move nothing."""
    predicted: dict[str, int] = {}
    for call in answer.traffic.collectives:
        if call.sent_bytes:
            name = _plain(call.operation)
            predicted[name] = predicted.get(name, 0) + int(call.payload_bytes)
    found: dict[str, int] = {}
    for seen in measured.collectives:
        if seen.group == 1:
            continue
        name = _plain(seen.operation)
        found[name] = found.get(name, 0) + seen.n_bytes
    return [Compared(name, predicted.get(name, 0), found.get(name, 0)) for name in {**predicted, **found}]


def _allocator(measured: Measurement, *, highest: int) -> Iterator[Compared]:
    """The peak in blocks with the workspaces, for each setting of the allocator."""
    for shown in measured.allocator:
        where = "expandable segments" if shown.settings == "expandable_segments" else "default"
        beside = shown.workspace_bytes if shown.modelled else 0  # a GPU's workspaces are part of its estimate
        yield Compared(f"allocated, {where}", highest + beside, shown.allocated_bytes)


def _reserved(answer: Estimate, as_run: tuple[Moment, ...], measured: Measurement) -> Iterator[Reserved]:
    recipe = answer.job.recipe
    sizes: dict[int, Sizes] = {}  # by the replay's workspaces, which are most often those of its other settings
    for shown in measured.allocator:
        if not shown.modelled:
            yield Reserved(shown.settings, answer.reserved_with(shown.settings), shown.reserved_bytes, shown.card)
            continue
        if shown.workspace_bytes not in sizes:
            sizes[shown.workspace_bytes] = sizes_of(moments_in_replay(as_run, shown), recipe)
        band = reserved(sizes[shown.workspace_bytes], recipe, shown.settings)
        yield Reserved(shown.settings, band, shown.reserved_bytes, shown.card)


def moments_in_replay(as_run: tuple[Moment, ...], shown: AllocatorMeasured) -> tuple[Moment, ...]:
    """The moments of a replay: those of steps from :func:`moments_as_run`, with the replay's workspaces."""
    beside = Line(Kind.WORKSPACE, shown.workspace_bytes, "workspaces of the replay")
    steps = (moment for moment in as_run if moment.phase is not Phase.INIT)
    return tuple(moment._replace(lines=(*moment.lines, beside)) for moment in steps)


def _ran_out(shown: AllocatorMeasured) -> bool:
    """Whether a replay with default settings ran out of memory on a GPU of the job's size."""
    return shown.settings == "default" and shown.card is not None and not shown.card.fits


def _plain(operation: str) -> str:
    """An operation with underscores: engines write all-reduce, torch writes all_reduce."""
    return operation.replace("-", "_").replace(" ", "_")

"""Does the estimate agree with what was measured, and where not? Needs no torch: records are replayed anywhere."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan.engines.precisions import compute_of
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Band, Kind, Line, Moment, OffGpu, Phase, Tag, bytes_by_kind, total_bytes
from zeroplan.measurement import AllocatorMeasured, AllocatorSettings, Measurement, OnCardMeasured, StepMeasured, Tensors
from zeroplan.spec.recipe import Kernels, Loss
from zeroplan.timeline import reserved
from zeroplan.transformer.blocks import Compute

#: Library workspaces come with CUDA's kernels; a run on other tensors has none.
_ONLY_ON_CUDA = (Kind.WORKSPACE,)
_A_THOUSANDTH = 1000


class Compared(NamedTuple):
    """One figure, predicted and measured. [bytes]"""

    what: str
    predicted: int
    measured: int

    @property
    def difference(self) -> int:
        """Predicted minus measured."""
        return self.predicted - self.measured

    @property
    def error(self) -> float:
        """Difference over measured; infinite where something was predicted and nothing measured."""
        if self.measured:
            return self.difference / self.measured
        return 0.0 if not self.predicted else float("inf")


class Reserved(NamedTuple):
    """What the caching allocator reserved, and the band that the estimate gives for it. [bytes]

    ``card`` is what came of the same requests on a card of the job's size, where one was replayed.
    """

    settings: AllocatorSettings
    band: Band
    measured: int
    card: OnCardMeasured | None = None

    @property
    def inside(self) -> bool:
        """Whether it lies in the band."""
        return int(self.band.low_bytes) <= self.measured <= int(self.band.high_bytes)


class Comparison(NamedTuple):
    """An estimate held against a measurement: the peak, each phase, what is held, each kind at the peak, each collective.

    ``allocator`` is what CUDA's allocator counts at the peak, where the record has it, and ``reserved`` what it reserved, each
    with the estimate's band: both are shown, and what lies outside a band is named, but neither decides whether the two agree.
    What does is ``contradicted``: the estimate fits the GPU, and a replay with a card of its size runs out of memory. ``host`` is
    host memory per rank and ``nvme`` what is in files, where something is offloaded and the record says how much there was.
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

    def agrees(self, tolerance: float) -> bool:
        """Whether peak, held bytes and collectives are all within ``tolerance`` (0.02 for 2 %), and no replay contradicts."""
        return not self.beyond(tolerance) and not self.contradicted

    @property
    def outside_the_band(self) -> tuple[Reserved, ...]:
        """What the allocator reserved where the estimate does not expect it."""
        return tuple(one for one in self.reserved if not one.inside)

    @property
    def away(self) -> tuple[Compared, ...]:
        """What is away from the GPU."""
        return tuple(row for row in (self.host, self.nvme) if row is not None)

    def beyond(self, tolerance: float) -> tuple[Compared, ...]:
        """What is not within ``tolerance``, the largest difference first.

        Peak, held and host bytes are judged by their own size, a collective by what all collectives of the step move: a flag or a
        norm that is not predicted is shown, but does not outweigh the gradients. Nor does a batch of token ids where nothing
        else is held: less than a thousandth of the peak is no difference.
        """
        moved = sum(max(row.predicted, row.measured) for row in self.collectives)
        matters = self.peak.measured // _A_THOUSANDTH
        sizes = (self.peak, self.held, *self.away)
        found = [row for row in sizes if abs(row.error) > tolerance and abs(row.difference) > matters]
        found += [row for row in self.collectives if abs(row.difference) > tolerance * moved]
        return tuple(sorted(found, key=lambda row: -abs(row.difference)))


def compare_with_estimate(measured: Measurement, *, has_scratch: bool = False) -> Comparison:
    """Estimate the job of a measurement, with the kernels that ran, and hold the two against each other.

    Of a pipeline, the rank that ran; its stages are the outermost dimension of the ranks. ``has_scratch`` as in :func:`compare`.
    """
    recipe, mesh = replace(measured.job.recipe, kernels=measured.kernels), measured.job.mesh
    stage = None if mesh.pp == 1 else measured.rank // (mesh.world_size // mesh.pp)
    return compare(estimate(replace(measured.job, recipe=recipe), pipeline_rank=stage), measured, has_scratch=has_scratch)


def compare(answer: Estimate, measured: Measurement, *, has_scratch: bool = False) -> Comparison:
    """Hold an estimate against the steady state of a measurement.

    On tensors that are not CUDA's, what only CUDA's kernels take (workspaces, the attention kernel's scratch) is left out of the
    prediction, and where a CPU's kernels ran, what they leave in other dtypes is counted so. ``has_scratch`` says that what kernels
    take inside themselves was counted all the same, as a dry run does.
    Kinds are compared at each side's own peak.
    """
    steady = measured.steady
    as_run = moments_as_run(answer, measured, has_scratch=has_scratch)
    totals = {moment: int(moment.total_bytes) for moment in as_run if moment.phase is not Phase.INIT}
    highest = max(totals, key=lambda moment: totals[moment])
    return Comparison(
        peak=Compared("peak allocated", totals[highest], steady.peak.peak_bytes),
        phases=tuple(_phases(totals, steady, loss=answer.job.recipe.loss)),
        held=Compared("held between steps", int(total_bytes(answer.held)), steady.held_bytes),
        kinds=tuple(_by_kind(highest.lines, steady.peak.kinds)),
        collectives=tuple(_collectives(answer, measured)),
        allocator=tuple(_allocator(measured, highest=totals[highest])),
        host=None if steady.host_bytes is None else Compared("host memory", answer.host_bytes, steady.host_bytes),
        nvme=None if measured.nvme_bytes is None else Compared("NVMe", answer.nvme_bytes, measured.nvme_bytes),
        reserved=tuple(_reserved(answer, as_run, shown) for shown in measured.allocator),
        contradicted=answer.verdict == "fits" and any(_ran_out(shown) for shown in measured.allocator),
    )


def against_kinds(answer: Estimate, seen: dict[str, int], live_bytes: int) -> tuple[Compared, ...]:
    """The peak of an estimate and what it is made of, held against what a GPU had in use by kind. [bytes]"""
    whole = Compared("peak allocated", int(answer.peak_bytes), live_bytes)
    return (whole, *_by_kind(answer.peak.lines, seen))


def moments_as_run(answer: Estimate, measured: Measurement, *, has_scratch: bool = False) -> tuple[Moment, ...]:
    """The estimate's moments with what this run takes for each line, which is less where it is not on CUDA."""
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
    """Sum the lines as a CPU would have them. [bytes]"""
    return int(total_bytes(_AsRun("cpu", "cpu", compute).lines(lines)))


class _AsRun(NamedTuple):
    """Predicted lines as a run has them: every known difference from a GPU, by name.

    What is not on a GPU has no library workspaces and no scratch inside kernels. A CPU's kernels also leave in 16 bits what
    CUDA's autocast computes in fp32, and their norms keep statistics in the input's dtype.
    """

    tensors: Tensors
    kernels: Kernels
    compute: Compute
    selective: bool = False
    """Checkpointing keeps what operators return, not copies that are made of it."""
    has_scratch: bool = False
    """What kernels take inside themselves was counted."""
    of_blocks: tuple[tuple[str, int], ...] = ()
    """By how much a block of each kind keeps more or less than a line says that sums up whole blocks."""

    def with_blocks(self, kept: tuple[tuple[str, tuple[Line, ...]], ...]) -> "_AsRun":
        """Know what blocks keep, line by line (``Estimate.kept``), for lines that sum it up."""
        found = ((kind, int(total_bytes(self.lines(lines)) - total_bytes(lines))) for kind, lines in kept)
        return self._replace(of_blocks=tuple((kind, more) for kind, more in found if more))

    def lines(self, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        """The lines, each with the bytes that this run takes for it."""
        return lines if self.tensors == "cuda" else tuple(map(self.line, lines))

    def line(self, line: Line) -> Line:
        """The line with the bytes that this run takes for it."""
        return line._replace(n_bytes=self._bytes(line))

    def _bytes(self, line: Line) -> int:
        if line.kind in _ONLY_ON_CUDA or (line.tag.off_gpu is OffGpu.NO_TENSOR and not self.has_scratch):
            return 0
        n_bytes = int(line.n_bytes) + self._of_blocks(line.tag)
        return n_bytes if self.kernels == "cuda" else self._on_cpu(line.tag.off_gpu, n_bytes)

    def _of_blocks(self, tag: Tag) -> int:
        """How much more the blocks that a line sums up keep than it says."""
        if not (self.of_blocks and tag.blocks):
            return 0
        more = dict(self.of_blocks)
        return sum(count * more.get(kind, 0) for kind, count in tag.blocks)

    def _on_cpu(self, instead: OffGpu, n_bytes: int) -> int:
        """What a CPU's kernels take in place of so much on a GPU."""
        if instead is OffGpu.NOTHING:
            return 0
        if instead is OffGpu.TWICE:
            return n_bytes if self.selective else 2 * n_bytes
        if instead is OffGpu.HALF:
            return n_bytes // 2
        if instead is OffGpu.COMPUTE_DTYPE and not self.compute.autocast:
            return n_bytes * self.compute.element_bytes // 4
        return n_bytes


def _phases(totals: dict[Moment, int], steady: StepMeasured, *, loss: Loss) -> list[Compared]:
    rows = []
    for phase in steady.phases:
        predicted = [n_bytes for moment, n_bytes in totals.items() if phase_as_run(moment, loss).value == phase.phase]
        if predicted:
            rows.append(Compared(phase.phase, max(predicted), phase.peak_bytes))
    return rows


def phase_as_run(moment: Moment, loss: Loss) -> Phase:
    """The loss's own moments belong to the pass they happen in, as a run measures them; a chunked loss begins the backward."""
    if moment.phase is Phase.LOSS:
        return Phase.FORWARD if moment.of_forward and loss != "chunked" else Phase.BACKWARD
    return moment.phase


def _by_kind(lines: tuple[Line, ...], measured: dict[str, int]) -> list[Compared]:
    predicted: dict[str, int] = {}
    for kind, n_bytes in bytes_by_kind(lines).items():
        what = Kind.TEMPORARY if kind is Kind.ACTIVATION_GRADIENTS else kind  # which a run cannot tell apart
        predicted[what.value] = predicted.get(what.value, 0) + int(n_bytes)
    rows = [Compared(kind, predicted.get(kind, 0), measured.get(kind, 0)) for kind in {**predicted, **measured}]
    return sorted(rows, key=lambda row: -abs(row.difference))


def _collectives(answer: Estimate, measured: Measurement) -> list[Compared]:
    """What is sent and received: calls that an engine issues among a single rank, as DeepSpeed does, move nothing."""
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
    """The peak in blocks with the workspaces, for each of the allocator's settings."""
    for shown in measured.allocator:
        where = "expandable segments" if shown.settings == "expandable_segments" else "default"
        beside = shown.workspace_bytes if shown.modelled else 0  # a GPU's are in the estimate of it
        yield Compared(f"allocated, {where}", highest + beside, shown.allocated_bytes)


def _reserved(answer: Estimate, as_run: tuple[Moment, ...], shown: AllocatorMeasured) -> Reserved:
    moments, recipe = moments_in_replay(as_run, shown), answer.job.recipe
    band = reserved(moments, recipe, shown.settings) if shown.modelled else answer.reserved_with(shown.settings)
    return Reserved(shown.settings, band, shown.reserved_bytes, shown.card)


def moments_in_replay(as_run: tuple[Moment, ...], shown: AllocatorMeasured) -> tuple[Moment, ...]:
    """What a replay of the requests has of :func:`moments_as_run`: those of steps, and its workspaces."""
    beside = Line(Kind.WORKSPACE, shown.workspace_bytes, "workspaces of the replay")
    steps = (moment for moment in as_run if moment.phase is not Phase.INIT)
    return tuple(moment._replace(lines=(*moment.lines, beside)) for moment in steps)


def _ran_out(shown: AllocatorMeasured) -> bool:
    """Whether the requests were too many for a card of the job's size, with the settings that a job has by default."""
    return shown.settings == "default" and shown.card is not None and not shown.card.fits


def _plain(operation: str) -> str:
    """One spelling of an operation: engines and their users write all-reduce, torch writes all_reduce."""
    return operation.replace("-", "_").replace(" ", "_")

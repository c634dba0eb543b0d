"""Invented series for pictures, so that changes of the memory model do not change them."""

from __future__ import annotations

from zeroplan.ledger import Kind
from zeroplan.report.palette import OUTSIDE
from zeroplan.report.series.heat import HeatSeries
from zeroplan.report.series.levels import Level
from zeroplan.report.series.pareto import Named, ParetoSeries, Spot
from zeroplan.report.series.parts import Caption, Part
from zeroplan.report.series.phases import HostColumn, PhaseColumn, PhasesSeries
from zeroplan.report.series.scaling import Point, ScalingLine, ScalingSeries
from zeroplan.report.series.stacks import Stack, StacksSeries
from zeroplan.report.series.stages import StageColumn, StagesSeries
from zeroplan.report.series.timeline import Instant, Measured, TimelineSeries
from zeroplan.report.series.validation import Run, ValidationSeries
from zeroplan.units import GIB

CAPACITY = 40 * GIB
_JOB = ("a model of 7 billion parameters on 8 GPUs; bf16-mixed, adamw, 1 x 4,096 tokens",)


def _about(title: str) -> Caption:
    return Caption(title=title, lines=_JOB)


def _parts(**gib: float) -> tuple[Part, ...]:
    """Return kinds by their names in the ledger, in the order of a stack. [GiB]"""
    return tuple(Part(Kind[name.upper()].value, round(size * GIB)) for name, size in gib.items())


def _column(stage: int, engine: str, **gib: float) -> StageColumn:
    parts = (*_parts(**gib), Part(OUTSIDE, GIB))
    needed = sum(part.n_bytes for part in parts)
    comfortable = needed + 2 * GIB
    verdict = "fits" if comfortable <= CAPACITY else "tight" if needed <= CAPACITY else "does not fit"
    return StageColumn(
        stage=stage, engine=engine, parts=parts, moment="optimizer step", needed_bytes=needed, comfortable_bytes=comfortable,
        verdict=verdict,
    )  # fmt: skip


def stages() -> StagesSeries:
    """Return one column that is far higher, one that fits tightly, and one that is refused."""
    return StagesSeries(
        caption=_about("Memory of one GPU at the peak, by ZeRO stage"),
        columns=(
            _column(0, "DistributedDataParallel", parameters=60, optimizer_state=120, gradients=60, activations=8),
            StageColumn(stage=1, engine="ZeroRedundancyOptimizer", refusal="engine 'ddp' has no LoRA at stage 1"),
            _column(2, "fully_shard, reshard_after_forward=False", parameters=4, optimizer_state=8, gradients=4,
                    unsharded_parameters=14, activations=8),
            _column(3, "fully_shard", parameters=4, optimizer_state=8, gradients=4, gather=2, activations=8, logits=3),
        ),
        capacity_bytes=CAPACITY,
    )  # fmt: skip


def _phase(name: str, moment: str, **gib: float) -> PhaseColumn:
    parts = (*_parts(**gib), Part(OUTSIDE, GIB))
    needed = sum(part.n_bytes for part in parts)
    verdict = "fits" if needed <= CAPACITY else "does not fit"
    return PhaseColumn(name=name, moment=moment, parts=parts, needed_bytes=needed, verdict=verdict)


def phases() -> PhasesSeries:
    """Return one phase that does not fit, one with a long name, and a node that loads in every process."""
    return PhasesSeries(
        caption=_about("Memory in the phases of grpo: one GPU at its peaks, and its node"),
        columns=(
            _phase("loading", "the largest unit is cut", parameters=4, temporary=8),
            _phase("weight synchronisation", "both copies of the weights", parameters=18, optimizer_state=8),
            _phase("training step", "backward of the loss", parameters=18, optimizer_state=8, activations=12, logits=3),
        ),
        host=(
            HostColumn(when="loading", n_bytes=240 * GIB, processes=8),
            HostColumn(when="saving", n_bytes=30 * GIB, processes=1),
        ),
        capacity_bytes=CAPACITY,
    )


def stacks() -> StacksSeries:
    """Return one case that fits below the line, one whose label moves to avoid it, and one that does not fit."""
    small, near, large = (
        {"parameters": 8, "activations": 6},
        {"parameters": 12, "logits": 26},
        {"optimizer_state": 40, "activations": 12},
    )
    return StacksSeries(
        caption=_about("Three ways, and a name that is long"),
        stacks=(
            Stack(name="this", parts=_parts(**small), verdict="fits"),
            Stack(name="that, but with other numbers", parts=_parts(**near), verdict="tight"),
            Stack(name="neither", parts=_parts(**large), verdict="does not fit"),
        ),
        capacity_bytes=CAPACITY,
    )


def _instant(name: str, phase: str, skipped: int = 0, **gib: float) -> Instant:
    parts = _parts(**gib)
    return Instant(name=name, phase=phase, parts=parts, total_bytes=sum(part.n_bytes for part in parts), skipped=skipped)


def timeline() -> TimelineSeries:
    """Return a step of four phases without its middle blocks, a run to compare, and the GPU's room."""
    held = {"parameters": 4.0, "optimizer_state": 8.0}
    return TimelineSeries(
        caption=_about("Memory over one step"),
        instants=(
            _instant("initialisation: optimizer", "initialisation", **held),
            _instant("forward of block 1 of 32", "forward", **held, gather=2, activations=1),
            _instant("forward of block 32 of 32", "forward", 30, **held, gather=2, activations=10),
            _instant("forward: loss", "forward", **held, activations=10, logits=4),
            _instant("backward: loss", "backward", **held, activations=10, logits=8),
            _instant("backward of block 32 of 32", "backward", **held, unsharded_gradients=2, activations=10, temporary=3),
            _instant("backward of block 1 of 32", "backward", 30, **held, gradients=4, activations=1, temporary=3),
            _instant("optimizer step", "optimizer step", **held, gradients=4, optimizer_temporary=4),
        ),
        peak=4,
        room_bytes=38 * GIB,
        measured=tuple(
            Measured(phase=phase, first=first, last=last, n_bytes=round(gib * GIB))
            for phase, first, last, gib in (
                ("initialisation", 0, 0, 11.5), ("forward", 1, 3, 26.5), ("backward", 4, 6, 29), ("optimizer step", 7, 7, 20.5),
            )
        ),
        levels=(
            _level(1, 1, 15), _level(2, 2, 24, *(15.25 + 0.3 * block for block in range(30))), _level(3, 3, 26.5), _level(4, 4, 29),
            _level(5, 5, 26.5), _level(6, 6, 19.5, *(26.25 - 0.23 * block for block in range(30))),
        ),
    )  # fmt: skip


def _level(first: int, last: int, gib: float, *skipped: float) -> Level:
    return Level(first=first, last=last, n_bytes=round(gib * GIB), skipped=tuple(round(size * GIB) for size in skipped))


def _line(stage: int, engine: str, *gib: float, fits_from: int | None = None) -> ScalingLine:
    points = tuple(
        Point(gpus=2**at, needed_bytes=round(size * GIB), verdict="fits" if size * GIB <= CAPACITY else "does not fit")
        for at, size in enumerate(gib)
    )
    begins = None if fits_from is None else Point(gpus=fits_from, needed_bytes=CAPACITY, verdict="fits")
    return ScalingLine(stage=stage, engine=engine, points=points, fits_from=begins)


def scaling() -> ScalingSeries:
    """Return one stage that never fits, two that fit from some number of GPUs on, and one that does not exist."""
    return ScalingSeries(
        caption=_about("Memory of one GPU against the number of GPUs, by ZeRO stage"),
        lines=(
            _line(0, "DistributedDataParallel", *[130.0] * 11),
            ScalingLine(stage=1, engine="ZeroRedundancyOptimizer", refusal="not with LoRA"),
            _line(2, "fully_shard, reshard_after_forward=False", *(30 + 100 / 2**at for at in range(11)), fits_from=10),
            _line(3, "fully_shard", *(10 + 120 / 2**at for at in range(11)), fits_from=4),
        ),
        own=Point(gpus=8, needed_bytes=25 * GIB, verdict="fits"),
        capacity_bytes=CAPACITY,
    )


def heat() -> HeatSeries:
    """Return a map with a corner that does not fit and a strip that fits tightly."""
    batches, lengths = (1, 2, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192, 16384)
    needed = tuple(tuple(8 * GIB + batch * length * 2**20 for length in lengths) for batch in batches)
    return HeatSeries(
        caption=_about("Memory of one GPU by batch and sequence"), micro_batches=batches, seq_lens=lengths, needed_bytes=needed,
        comfortable_bytes=tuple(tuple(n_bytes * 5 // 4 for n_bytes in row) for row in needed), own=(2, 4096), own_bytes=16 * GIB,
        capacity_bytes=CAPACITY,
    )  # fmt: skip


def pareto() -> ParetoSeries:
    """Return three engines, tight and non-fitting layouts, and a front whose best layout is not its fastest."""
    named = tuple(
        Named(words=f"{name}, recomputation none, 1 x 8 sequences per GPU", needed_bytes=gib * GIB, tokens_per_s=rate)
        for name, gib, rate in (("DDP", 38, 900.0), ("DeepSpeed stage 2", 30, 890.0), ("FSDP2", 12, 600.0))
    )
    spots = tuple(
        Spot(engine=engine, needed_bytes=gib * GIB, tokens_per_s=rate, verdict=verdict, layouts=layouts)
        for engine, gib, rate, verdict, layouts in (
            ("ddp", 38, 900.0, "fits", 1),
            ("ddp", 46, 930.0, "does not fit", 12),
            ("deepspeed", 30, 890.0, "fits", 3),
            ("deepspeed", 39, 700.0, "tight", 2),
            ("fsdp2", 12, 600.0, "fits", 1),
            ("fsdp2", 20, 500.0, "fits", 40),
        )
    )
    return ParetoSeries(
        caption=_about("Speed against memory: every layout"), objective="throughput", spots=spots, front=named, knees=named[2:],
        best=named[1], capacity_bytes=CAPACITY,
    )  # fmt: skip


def validation() -> ValidationSeries:
    """Return three engines with errors on both sides of the limits."""
    runs = tuple(
        Run(name=f"{name}, N = 8", engine=engine, group=f"{engine} {stage}", predicted_bytes=round(gib * error * GIB),
            measured_bytes=gib * GIB)
        for name, engine, stage, gib, error in (
            ("small", "ddp", 0, 2, 1.004), ("medium", "fsdp2", 2, 10, 0.985), ("large", "fsdp2", 3, 50, 1.0),
            ("largest", "deepspeed", 3, 200, 1.027),
        )
    )  # fmt: skip
    caption = Caption(title="Predicted and measured peaks", lines=("4 runs made up for a picture",))
    return ValidationSeries(caption=caption, runs=runs, limits=(0.02,))

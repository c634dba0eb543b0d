"""How much do predicted peaks differ from measured ones, run by run?"""

from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.comparison import Comparison
from zeroplan.measurement import Measurement
from zeroplan.report.series.parts import Caption
from zeroplan.report.words import model_words, plural
from zeroplan.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: its job and engine, and its predicted and measured peak. [bytes]"""

    name: str
    engine: str
    group: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSeries:
    """All runs, and the allowed errors as fractions of the measured peak."""

    caption: Caption
    runs: tuple[Run, ...]
    limits: tuple[float, ...]


def validation(held: Sequence[tuple[Measurement, Comparison]], *, limits: tuple[float, ...]) -> ValidationSeries:
    """The peaks of several runs, each with its comparison; runs without a measured peak are left out."""
    runs = tuple(_run(measured, found) for measured, found in held if found.peak.measured)
    how = sorted({f"backend {measured.backend} on {measured.tensors} tensors" for measured, _ in held})
    return ValidationSeries(
        caption=Caption(title="Predicted and measured peaks", lines=(f"{plural(len(runs), 'run')}: {', '.join(how)}",)),
        runs=runs,
        limits=limits,
    )


def _run(measured: Measurement, found: Comparison) -> Run:
    job = measured.job
    return Run(
        name=_name(measured),
        engine=job.recipe.engine,
        group=group_of(job),
        predicted_bytes=found.peak.predicted,
        measured_bytes=found.peak.measured,
    )


def _name(measured: Measurement) -> str:
    job = measured.job
    what = measured.workload or model_words(job)
    recomputed = "" if job.recipe.recompute == "none" else f", {job.recipe.recompute} recompute"
    return f"{what}, {group_of(job)}, N = {job.mesh.world_size:,}{recomputed}"


def group_of(job: JobSpec) -> str:
    """The engine, its stage, and HSDP if the sharded group has replicas."""
    replicas = " HSDP" if job.mesh.dp_replicate > 1 else ""
    return f"{job.recipe.engine} {job.recipe.zero_stage}{replicas}"

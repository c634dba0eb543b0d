"""How does one GPU's memory fall with the number of GPUs under each ZeRO stage, and on how many does the job fit?"""

from dataclasses import dataclass, replace

from zeroplan.errors import SpecError
from zeroplan.estimator import Verdict, judged
from zeroplan.progress import counted
from zeroplan.remedies import MOST_GPUS
from zeroplan.report.series.parts import Caption, caption
from zeroplan.report.series.stages import STAGES, at_stage, left_behind
from zeroplan.report.words import plural
from zeroplan.spec.job import ENGINE_STAGES, JobSpec, engine_at
from zeroplan.spec.recipe import Stage

_LEAST_SPAN = 1024
"""The axis extends to at least this many GPUs, where the curves of ZeRO's stages separate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The memory of one GPU of ``gpus``: the allocated peak and memory outside the allocator. [bytes]"""

    gpus: int
    needed_bytes: int
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLine:
    """One stage: its points by number of GPUs, and the smallest number that fits.

    Memory need not fall with more GPUs: FSDP2 cannot shard fewer experts than there are ranks.
    """

    stage: Stage
    engine: str
    points: tuple[Point, ...] = ()
    fits_from: Point | None = None
    refusal: str = ""

    @property
    def ceases_at(self) -> Point | None:
        """The first point after ``fits_from`` that does not fit."""
        begins = self.fits_from
        return None if begins is None else next((at for at in self.points if at.gpus > begins.gpus and not _fits(at)), None)

    @property
    def fits_words(self) -> str:
        """The numbers of GPUs on which the job fits, in words."""
        if self.fits_from is None:
            return "does not fit"
        ceases = "" if self.ceases_at is None else f", but not on {self.ceases_at.gpus:,}"
        tightly = " tightly" if self.fits_from.verdict == "tight" else ""
        return f"fits{tightly} from {plural(self.fits_from.gpus, 'GPU')}{ceases}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSeries:
    """All stages by number of GPUs; ``own`` is the job itself, ``capacity_bytes`` the GPU's memory or None."""

    caption: Caption
    lines: tuple[ScalingLine, ...]
    own: Point
    capacity_bytes: int | None


def scaling(job: JobSpec) -> ScalingSeries:
    """Estimate the job on 1, 2, 4 and so on GPUs (with replicas or tensor parallelism on multiples) under stages 0 to 3.

    The batch per GPU is constant, so the global batch grows with the GPUs.

    >>> from zeroplan import job
    >>> found = scaling(job(model="llama-3.1-8b", gpus=8, gpu="h100", seq_len=8192))
    >>> [line.fits_from.gpus for line in found.lines if line.fits_from]
    [64, 7]
    """
    answer = judged(job)
    words = "the batch per GPU stays as it is; needed is the allocated peak with context and communicators"
    return ScalingSeries(
        caption=caption(answer, "Memory of one GPU against the number of GPUs, by ZeRO stage", words, *left_behind(job)),
        lines=tuple(_line(job, stage) for stage in STAGES),
        own=Point(gpus=job.mesh.world_size, needed_bytes=answer.least_bytes, verdict=answer.verdict),
        capacity_bytes=answer.capacity_bytes,
    )


def _line(job: JobSpec, stage: Stage) -> ScalingLine:
    found: list[Point] = []
    refusal = ""
    for multiple in counted(_multiples(job)):
        try:
            found.append(_point(job, stage, multiple))
        except SpecError as error:
            refusal = refusal or str(error)
    if not found:
        return ScalingLine(stage=stage, engine=ENGINE_STAGES[engine_at(stage, job.recipe.engine)][stage], refusal=refusal)
    recipe = at_stage(job, stage).recipe
    return ScalingLine(
        stage=stage,
        engine=ENGINE_STAGES[recipe.engine][recipe.zero_stage],
        points=tuple(found),
        fits_from=_fits_from(job, stage, found),
    )


def _multiples(job: JobSpec) -> list[int]:
    """The numbers of shards: powers of two, up to a multiple of the job's own."""
    unit = job.mesh.dp_replicate * job.mesh.model_ranks
    most = max(min(MOST_GPUS, max(_LEAST_SPAN, 4 * job.mesh.world_size)), job.mesh.world_size)
    return [1 << power for power in range(max(most // unit, 1).bit_length())]


def _point(job: JobSpec, stage: Stage, shards: int) -> Point:
    there = at_stage(replace(job, mesh=replace(job.mesh, dp_shard=shards)), stage)
    answer = judged(there)
    return Point(gpus=there.mesh.world_size, needed_bytes=answer.least_bytes, verdict=answer.verdict)


def _fits(point: Point) -> bool:
    return point.verdict in ("fits", "tight")


def _fits_from(job: JobSpec, stage: Stage, found: list[Point]) -> Point | None:
    """The smallest number of GPUs that fits, searched between powers of two; None if none fits or without a GPU."""
    at = next((at for at, point in enumerate(found) if _fits(point)), None)
    if at is None:
        return None
    unit = job.mesh.dp_replicate * job.mesh.model_ranks
    best, beyond = found[at], found[at - 1].gpus // unit if at else 0
    while best.gpus // unit - beyond > 1 and at:
        middle = (best.gpus // unit + beyond) // 2
        try:
            tried = _point(job, stage, middle)
        except SpecError:  # an option does not allow this number of GPUs
            return best
        best, beyond = (tried, beyond) if _fits(tried) else (best, middle)
    return best

"""What is in one GPU's memory at the peak under each ZeRO stage? Estimates the same job four times."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, Verdict, estimate, judged
from zeroplan.report.series.parts import Caption, Part, caption, parts
from zeroplan.report.words import engine_words
from zeroplan.spec.job import ENGINE_STAGES, JobSpec, engine_at
from zeroplan.spec.recipe import DeepSpeedOptions, Stage

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
_WHOLE = 3
_WITH_REPLICAS = ("fsdp1", "fsdp2", "paper")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageColumn:
    """One stage: memory at its peak, inside and outside the allocator [bytes], or why no engine offers it.

    ``needed_bytes`` is the sum of ``parts``; ``comfortable_bytes`` adds the freed blocks that the allocator caches.
    """

    stage: Stage
    engine: str
    parts: tuple[Part, ...] = ()
    moment: str = ""
    needed_bytes: int = 0
    comfortable_bytes: int = 0
    verdict: Verdict = "unknown"
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesSeries:
    """All stages side by side, and the GPU's capacity [bytes], or None."""

    caption: Caption
    columns: tuple[StageColumn, ...]
    capacity_bytes: int | None


def stages(job: JobSpec, own: Estimate | None = None) -> StagesSeries:
    """Estimate the job under stages 0 to 3. If its engine lacks a stage, use the engine that a PyTorch user would run.

    ``own`` is the job's own estimate, if it exists already; a tight verdict is then as provisional as that estimate's.

    >>> from zeroplan import job
    >>> [column.engine for column in stages(job(model="gpt2", gpus=8, stage=3, seq_len=128)).columns]
    ['DDP', 'DDP + ZeroRedundancyOptimizer', 'FSDP2, reshard_after_forward=False', 'FSDP2']
    """
    answer = own or judged(job)
    return StagesSeries(
        caption=caption(answer, "Memory of one GPU at its peak, by ZeRO stage", *left_behind(job)),
        columns=tuple(_column(job, stage, answer, judged if own is None else estimate) for stage in STAGES),
        capacity_bytes=answer.capacity_bytes,
    )


def at_stage(job: JobSpec, stage: Stage) -> JobSpec:
    """The job under another stage, with the nearest engine; all ranks form one group if that engine has no replicas.

    Raises :class:`~zeroplan.errors.SpecError` if no engine offers it.
    """
    recipe, mesh = job.recipe, job.mesh
    if stage == recipe.zero_stage:
        return job
    engine = engine_at(stage, recipe.engine)
    if engine not in _WITH_REPLICAS:
        mesh = replace(mesh, dp_replicate=1, dp_shard=mesh.dp_replicate * mesh.dp_shard)
    fsdp2 = replace(recipe.fsdp2, reshard_after_forward=None)  # FSDP2's two stages differ in this option
    options = _offered(recipe.deepspeed, stage)
    return replace(job, mesh=mesh, recipe=replace(recipe, engine=engine, zero_stage=stage, fsdp2=fsdp2, deepspeed=options))


def _offered(options: DeepSpeedOptions, stage: Stage) -> DeepSpeedOptions:
    """The options without those that DeepSpeed offers only at higher stages."""
    if stage < _WHOLE:
        options = replace(options, offload_param="none", zero_hpz_partition_size=1)
        options = replace(options, offload_optimizer="none" if options.offload_optimizer == "none" else "cpu")
    return replace(options, offload_optimizer="none") if stage == 0 else options


def left_behind(job: JobSpec) -> tuple[str, ...]:
    """Notes on offloading that the engines of other stages lack."""
    recipe = job.recipe
    if not recipe.offloads:
        return ()
    if recipe.engine != "deepspeed":
        return ("stages 0 and 1 are DDP, which has no offload: everything is on the GPU there",)
    offload = (recipe.deepspeed.offload_optimizer != "none", recipe.deepspeed.offload_param != "none")
    to_nvme = ", to NVMe at stage 3 only," if recipe.deepspeed.offload_optimizer == "nvme" else ""
    only = (f"the optimizer from stage 1 on{to_nvme}", "parameters at stage 3 only")
    return (f"DeepSpeed offloads {' and '.join(what for what, one in zip(only, offload, strict=True) if one)}".rstrip(","),)


def _column(job: JobSpec, stage: Stage, own: Estimate, judge: Callable[[JobSpec], Estimate]) -> StageColumn:
    try:
        there = at_stage(job, stage)
        answer = own if there is job else judge(there)
    except SpecError as error:
        engine = ENGINE_STAGES[engine_at(stage, job.recipe.engine)][stage]
        return StageColumn(stage=stage, engine=engine, refusal=str(error))
    return StageColumn(
        stage=stage,
        engine=engine_words(there),
        parts=parts(answer.peak.lines, outside_bytes=int(answer.outside_band.expected_bytes)),
        moment=answer.peak.name,
        needed_bytes=answer.least_bytes,
        comfortable_bytes=max(answer.comfortable_bytes, answer.least_bytes),
        verdict=answer.verdict,
    )

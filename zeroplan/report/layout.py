"""Describes a layout in words: engine and stage, degrees of parallelism, recomputation, batch."""

from collections.abc import Iterator

from zeroplan.report.words import engine_words, recompute_words, those_that_share
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import DeepSpeedOptions


def layout_words(job: JobSpec) -> str:
    """Return a layout in a line: engine and stage, recomputation, micro-batches."""
    recipe, batch = job.recipe, job.batch
    words = [engine_words(job)]
    words += [f"{job.mesh.dp_replicate} replicas of {job.mesh.dp_shard} shards"] if job.mesh.dp_replicate > 1 else []
    degrees = (("tensor", job.mesh.tp), ("context", job.mesh.cp), ("pipeline", job.mesh.pp), ("expert", job.mesh.ep))
    words += [f"{number}-way {name} parallelism" for name, number in degrees if number > 1]
    words += ["whole sequences"] if _has_whole_sequences(job) else []
    words += [f"schedule {recipe.pipeline_schedule}"] if recipe.pipeline_schedule is not None else []
    ways = recipe.fsdp2.reshard_after_forward
    words += [f"resharded to {ways} after forward"] if recipe.engine == "fsdp2" and type(ways) is int else []
    words += [recompute_words(recipe)]
    words += [f"{recipe.loss} loss"] if recipe.loss != "full" else []
    words += [recipe.optimizer] if recipe.optimizer == "adamw-8bit" else []
    words += ["weights and states in bf16"] if recipe.precision == "bf16" else []
    words += [f"{recipe.optimizer_impl} step"] if recipe.optimizer_impl is not None else []
    words += _deepspeed_words(recipe.deepspeed) if recipe.engine == "deepspeed" else []
    words += ["gradients as bucket views"] if recipe.engine == "ddp" and recipe.ddp.gradient_as_bucket_view else []
    words += ["offload"] if recipe.offloads else []
    return ", ".join(
        [*words, f"{batch.micro_batch_size} x {batch.grad_accum_steps} sequences per {those_that_share(job.mesh)}"]
    )


def layout_code(job: JobSpec) -> str:
    """Return a layout in a few words: engine, stage, degrees, chunks of a pipeline rank, recomputation, batch."""
    recipe, mesh, batch = job.recipe, job.mesh, job.batch
    degrees = [f"{name}{ways}" for name in ("tp", "cp", "pp", "ep") if (ways := getattr(mesh, name)) > 1]
    words = [recipe.engine, f"stage {recipe.zero_stage}", *degrees]
    if recipe.pipeline_schedule == "interleaved-1f1b":
        words.append(f"v{recipe.pipeline_stages_per_rank or 2}")
    elif recipe.pipeline_schedule not in (None, "1f1b"):
        words.append(recipe.pipeline_schedule)
    again = [] if recipe.recompute == "none" else [recompute_words(recipe)]
    return ", ".join([" ".join(words), *again, *_set_apart(job), f"{batch.micro_batch_size} x {batch.grad_accum_steps}"])


def _has_whole_sequences(job: JobSpec) -> bool:
    """Whether Megatron runs tensor parallelism without sequence parallelism."""
    return job.recipe.engine == "megatron" and job.mesh.tp > 1 and not job.recipe.sequence_parallel


def _set_apart(job: JobSpec) -> Iterator[str]:
    """Yield further settings in which two layouts of a plan may differ, so that every name is unique."""
    recipe, mesh = job.recipe, job.mesh
    ways = recipe.fsdp2.reshard_after_forward
    if mesh.dp_replicate > 1:
        yield f"{mesh.dp_replicate} replicas"
    if _has_whole_sequences(job):
        yield "whole sequences"
    if recipe.engine == "fsdp2" and type(ways) is int:
        yield f"resharded to {ways}"
    if recipe.loss != "full":
        yield f"{recipe.loss} loss"
    if recipe.optimizer == "adamw-8bit":
        yield recipe.optimizer
    if recipe.precision == "bf16":
        yield "states in bf16"
    if recipe.engine == "deepspeed":
        yield from _deepspeed_words(recipe.deepspeed)
    if recipe.engine == "ddp" and recipe.ddp.gradient_as_bucket_view:
        yield "bucket views"
    if recipe.offloads:
        offloads = recipe.deepspeed.offload_param == "none" and recipe.engine == "deepspeed"
        yield "offload of the optimizer" if offloads else "offload"


def _deepspeed_words(options: DeepSpeedOptions) -> Iterator[str]:
    default = DeepSpeedOptions()
    if options.zero_hpz_partition_size > 1:
        yield f"a second copy in each node (hpZ {options.zero_hpz_partition_size})"
    if options.reduce_bucket_size != default.reduce_bucket_size:
        yield f"buckets of {options.reduce_bucket_size:,}"
    if options.stage3_prefetch_bucket_size == 0:
        yield "nothing gathered ahead"

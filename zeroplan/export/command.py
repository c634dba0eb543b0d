"""The command line that asks ``zeroplan estimate`` for a job."""

import shlex
from collections.abc import Iterator
from dataclasses import fields

from zeroplan.resolve import Request
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec

_SETTINGS = ("ddp", "fsdp1", "fsdp2", "deepspeed", "megatron")
_OFFLOADS = ("offload_optimizer", "offload_param")


def estimate_command(job: JobSpec, asked: Request, *, from_run: str | None = None) -> str:
    """Return the command; ``asked`` says how the model was named, ``from_run`` the saved run that it comes from.

    A run's own settings replace the defaults, so the command names every setting.

    >>> from zeroplan.resolve import resolve
    >>> asked = Request(model="gpt2", gpus=2, gpu="h100")
    >>> estimate_command(resolve(asked).job, asked)
    'zeroplan estimate --model gpt2 --gpus 2 --gpu h100-sxm-80gb --engine fsdp2 --stage 3 --seq-len 1024'
    """
    if from_run is not None:
        return shlex.join(("zeroplan", "estimate", "--from-run", from_run, *_over_a_run(job), *_options(job.recipe)))
    return shlex.join(("zeroplan", "estimate", *_model(job, asked), *_cluster(job), *_recipe(job.recipe), *_batch(job)))


def _over_a_run(job: JobSpec) -> Iterator[str]:
    recipe, batch, mesh = job.recipe, job.batch, job.mesh
    for flag, value in (
        ("gpus", mesh.world_size), ("gpu", None if job.cluster.gpu is None else job.cluster.gpu.name),
        ("gpus-per-node", job.cluster.gpus_per_node), ("replicas", mesh.dp_replicate), ("engine", recipe.engine),
        ("stage", recipe.zero_stage), ("precision", recipe.precision), ("optimizer", recipe.optimizer),
        ("optimizer-impl", recipe.optimizer_impl), ("recompute", recipe.recompute),
        ("keep-logits", "yes" if recipe.keep_logits else "no"), ("seq-len", batch.seq_len),
        ("micro-batch", batch.micro_batch_size), ("grad-accum", batch.grad_accum_steps),
    ):  # fmt: skip
        if value is not None:
            yield from (f"--{flag}", str(value))


def _model(job: JobSpec, asked: Request) -> Iterator[str]:
    name = asked.model if isinstance(asked.model, str) else None
    name = name if asked.fetched is None else f"hf:{name}"
    for flag, value in (
        ("model", name),
        ("params", asked.params),
        ("config", asked.config),
        ("profile", asked.profile),
        ("treat-as", asked.treat_as),
    ):
        if value is not None:
            yield from (f"--{flag}", str(value))
    adapter = job.model.adapter
    if adapter is not None:
        yield from ("--lora-rank", str(adapter.rank), "--lora-targets", str(adapter.targets))
        if adapter.quantize != "none":
            yield from ("--quantize", adapter.quantize)
    frozen = job.model.frozen
    if frozen is not None:
        yield from ("--freeze", frozen.parts) if frozen.parts else ()
        yield from ("--freeze-layers", str(frozen.layers)) if frozen.layers else ()


def _cluster(job: JobSpec) -> Iterator[str]:
    yield from ("--gpus", str(job.mesh.world_size))
    if job.cluster.gpu is not None:
        yield from ("--gpu", job.cluster.gpu.name)
    for flag, value, default in (
        ("gpus-per-node", job.cluster.gpus_per_node, None),
        ("replicas", job.mesh.dp_replicate, 1),
        ("tensor-parallel", job.mesh.tp, 1),
        ("context-parallel", job.mesh.cp, 1),
        ("pipeline-parallel", job.mesh.pp, 1),
        ("expert-parallel", job.mesh.ep, 1),
    ):
        if value != default:
            yield from (f"--{flag}", str(value))


_NAMED = (
    "precision", "optimizer", "optimizer_impl", "recompute", "recompute_layers", "attention", "loss", "pipeline_schedule",
    "pipeline_stages_per_rank", "pipeline_layers",
)  # fmt: skip


def _recipe(recipe: RecipeSpec) -> Iterator[str]:
    default = RecipeSpec()
    yield from ("--engine", recipe.engine, "--stage", str(recipe.zero_stage))
    for name in _NAMED:
        if getattr(recipe, name) != getattr(default, name):
            yield from ("--" + name.replace("_", "-"), str(getattr(recipe, name)))
    if recipe.keep_logits:
        yield from ("--keep-logits", "fp32" if recipe.keep_logits == "fp32" else "yes")
    if recipe.sequence_parallel:
        yield "--sequence-parallel"
    if not recipe.sync_every_micro_batch:
        yield "--no-sync-every-micro-batch"
    yield from _options(recipe)


def _options(recipe: RecipeSpec) -> Iterator[str]:
    """Of the engine's own options those that are not its defaults; where things are offloaded to has flags."""
    group = getattr(recipe, recipe.engine)
    default = type(group)()
    if recipe.engine == "fsdp2" and recipe.fsdp2.cpu_offload:
        yield from ("--offload-optimizer", "cpu", "--offload-param", "cpu")
    for field in fields(group):
        value = getattr(group, field.name)
        if value == getattr(default, field.name) or field.name == "cpu_offload":
            continue
        if field.name in _OFFLOADS:
            yield from ("--" + field.name.replace("_", "-"), str(value))
        else:
            yield from ("--set", f"{recipe.engine}.{field.name}={str(value).lower()}")


def _batch(job: JobSpec) -> Iterator[str]:
    yield from ("--seq-len", str(job.batch.seq_len))
    for flag, value in (("micro-batch", job.batch.micro_batch_size), ("grad-accum", job.batch.grad_accum_steps)):
        if value > 1:
            yield from (f"--{flag}", str(value))

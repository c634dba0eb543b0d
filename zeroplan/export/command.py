"""Writes a job as a command line of ``zeroplan estimate``."""

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields

from zeroplan.resolve import OPTIONS, Request
from zeroplan.resolve.options import KEEP_LOGITS, Declared, value_of
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.hardware import ClusterSpec, GpuSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.linear_kernels import runs_by_kernels
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec

_SETTINGS = ("ddp", "fsdp1", "fsdp2", "deepspeed", "megatron")
_OFFLOADS = ("offload_optimizer", "offload_param")


def estimate_command(job: JobSpec, request: Request, *, from_run: str | None = None) -> str:
    """Return the command; ``request`` has the user's name of the model, ``from_run`` is the saved run that the job comes from.

    With ``from_run`` the command names every setting, since the run's settings replace the defaults.

    >>> from zeroplan.resolve import resolve
    >>> request = Request(model="gpt2", gpus=2, gpu="h100")
    >>> estimate_command(resolve(request).job, request)
    'zeroplan estimate --model gpt2 --gpus 2 --gpu h100-sxm-80gb --engine fsdp2 --stage 3 --seq-len 1024'
    """
    if from_run is not None:
        return shlex.join(("zeroplan", "estimate", "--from-run", from_run, *_over_a_run(job), *_options(job.recipe)))
    return shlex.join(("zeroplan", "estimate", *_model(job, request), *_cluster(job), *_recipe(job), *_batch(job)))


_OVER_A_RUN = ("gpus", "gpu", "gpus_per_node", "network", "nics_per_node", "replicas", "engine", "stage", "precision", "optimizer",
               "optimizer_impl", "recompute", "keep_logits", "seq_len", "micro_batch", "grad_accum")  # fmt: skip


def _over_a_run(job: JobSpec) -> Iterator[str]:
    for name in _OVER_A_RUN:
        one = OPTIONS[name]
        if (value := value_of(job, one)) is not None:
            yield from _words(one, value)


def _model(job: JobSpec, request: Request) -> Iterator[str]:
    name = request.model if isinstance(request.model, str) else None
    name = name if request.fetched is None else f"hf:{name}"
    for flag, value in (
        ("model", name),
        ("params", request.params),
        ("config", request.config),
        ("profile", request.profile),
        ("treat-as", request.treat_as),
    ):
        if value is not None:
            yield from (f"--{flag}", str(value))
    if job.model.adapter is not None:
        yield from _adapter(job.model.adapter)
    frozen, vision = job.model.frozen, job.model.vision
    parts = (*(() if frozen is None else frozen.names), *(() if vision is None else vision.frozen_names))
    yield from ("--freeze", ",".join(parts)) if parts else ()
    if vision is not None and vision.has_blocks:
        size = () if vision.fixed_size else ("--image-size", f"{vision.image_width}x{vision.image_height}")
        yield from ("--images", str(vision.images), *size)
    if frozen is not None:
        yield from ("--freeze-layers", str(frozen.layers)) if frozen.layers else ()


def _adapter(adapter: AdapterSpec) -> Iterator[str]:
    """Yield the flags of an adapter's fields that differ from their defaults."""
    yield from ("--lora-rank", str(adapter.rank), "--lora-targets", str(adapter.targets))
    for field in fields(AdapterSpec):
        value = getattr(adapter, field.name)
        if field.name not in _FLAGS_OF_ADAPTERS or value == field.default:
            continue
        yield f"--{_FLAGS_OF_ADAPTERS[field.name]}"
        yield from () if value is True else (str(value),)


#: The flags of an adapter's fields, beside its rank and its targets.
_FLAGS_OF_ADAPTERS = {
    "quantize": "quantize", "dropout": "lora-dropout", "modules_to_save": "modules-to-save", "compute": "lora-compute",
    "base": "lora-base", "runs": "lora-runs", "learning": "lora-learning", "looped": "lora-looped", "upcast": "upcast",
    "dora": "dora",
    "quantize_experts": "quantize-experts", "group_size": "group-size", "bitsandbytes": "bitsandbytes",
}  # fmt: skip


def _cluster(job: JobSpec) -> Iterator[str]:
    yield from ("--gpus", str(job.mesh.world_size))
    yield from _set(job, ClusterSpec())
    yield from _set(job, MeshSpec(), leave_out=("gpus",))


def _set(
    job: JobSpec, defaults: ClusterSpec | MeshSpec | RecipeSpec | BatchSpec, leave_out: Collection[str] = ()
) -> Iterator[str]:
    """Yield the flags for the values of one part of a job that differ from its defaults."""
    for one in OPTIONS.values():
        part, _, name = one.option.sets.partition(".")
        if one.help and isinstance(defaults, _PARTS.get(part, ())) and one.field not in leave_out:
            value = value_of(job, one)
            if value != getattr(defaults, name):
                yield from _words(one, value)


_PARTS: Mapping[str, type] = {"cluster": ClusterSpec, "mesh": MeshSpec, "recipe": RecipeSpec, "batch": BatchSpec}


def _words(one: Declared, value: object) -> Iterator[str]:
    """Yield a flag and its value, as a user types them."""
    if one.is_switch:
        yield one.flag if value else f"--no-{one.flag[2:]}"
    elif one.field == "keep_logits":
        yield from (one.flag, next(word for word, kept in KEEP_LOGITS.items() if kept == value))
    else:
        yield from (one.flag, value.name if isinstance(value, GpuSpec) else str(value))


def _recipe(job: JobSpec) -> Iterator[str]:
    yield from ("--engine", job.recipe.engine, "--stage", str(job.recipe.zero_stage))
    by_kernels = job.model.linear is not None and runs_by_kernels(job.model, job.recipe)
    defaults = RecipeSpec(linear_attention="kernels" if by_kernels else "torch")
    yield from _set(job, defaults, leave_out=("engine", "stage"))
    yield from _options(job.recipe)


def _options(recipe: RecipeSpec) -> Iterator[str]:
    """Yield the engine's options that differ from its defaults; offload has its own flags."""
    if recipe.engine not in _SETTINGS:
        return
    group = getattr(recipe, recipe.engine)
    default = type(group)()
    if recipe.engine != "deepspeed" and recipe.offloads_states:
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
    yield from _set(job, BatchSpec(seq_len=job.batch.seq_len))

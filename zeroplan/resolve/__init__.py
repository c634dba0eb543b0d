"""From what a user says (names, files, counts, flags) to a complete job, with a note on everything that was filled in.

A :class:`Request` is what a command line or a job file holds; :func:`resolve` looks names up, reads configurations, infers a
shape where only a parameter count is known, and applies the defaults a PyTorch user would meet.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from zeroplan.catalog.config import read_config_with_notes
from zeroplan.catalog.gpu import gpu as find_gpu
from zeroplan.catalog.hub_names import is_repository, repository_of, way_to_the_hub
from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.catalog.model import model as find_model
from zeroplan.errors import SpecError, UnknownNameError
from zeroplan.resolve.request import Request, SetupRead, request_of
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.base import nearest_fields
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.hardware import ClusterSpec, node_size
from zeroplan.spec.job import DEFAULT_ENGINE, JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DeepSpeedOptions, Engine, Fsdp2Options, RecipeSpec, Stage
from zeroplan.units import parse_count

__all__ = [
    "Request",
    "Resolved",
    "SetupRead",
    "beyond_positions",
    "cluster_of",
    "job",
    "mesh_of",
    "own_folder",
    "recipe_of",
    "request_of",
    "resolve",
    "with_fetched",
    "with_setup",
]

_DEFAULT_SEQ_LEN = 4096


class Resolved(NamedTuple):
    """A complete job, and what was filled in to complete it."""

    job: JobSpec
    notes: tuple[str, ...]


def job(**said: object) -> JobSpec:
    """Build a complete job from what a user would say; the keywords are the fields of :class:`Request`.

    ``model="hf:owner/name"`` has the model's config.json fetched from the Hugging Face Hub, where the catalogue does not know it.

    >>> job(params="7e9", gpus=8, stage=3).recipe.engine
    'fsdp2'
    """
    for name in said:
        if name not in Request.__dataclass_fields__:
            raise TypeError(f"job() takes no {name!r}{nearest_fields(Request, name)}")
    return resolve(with_fetched(Request(**said))).job  # type: ignore[arg-type]  # Request checks every field


def with_fetched(request: Request, *, extra: Path | None = None) -> Request:
    """The request with the config.json of its model, fetched where its name names the Hub and the catalogue does not know it.

    Raises UnknownNameError where the Hub gives none within a while.
    """
    repository = repository_of(request.model) if isinstance(request.model, str) else None
    if repository is None or not is_repository(repository):
        return request
    try:
        find_model(repository, extra=own_folder(extra, "models"))
    except UnknownNameError as unknown:
        from zeroplan.catalog.hub import hub_config  # noqa: PLC0415  few names get here

        return replace(request, model=repository, fetched=str(hub_config(repository, unknown=unknown)))
    return replace(request, model=repository)


def resolve(request: Request, *, extra: Path | None = None, chosen: Sequence[str] = ()) -> Resolved:
    """Complete a request. ``extra`` is a folder of the user's own catalogue entries (``models/*.toml``, ``gpus/*.toml``).

    ``chosen`` names options of DeepSpeed that were asked for one by one, so that a DeepSpeed configuration that says otherwise
    is refused even where the default was asked for.

    Raises :class:`~zeroplan.errors.SpecError` or :class:`~zeroplan.errors.UnknownNameError`, one line each.
    """
    own_folder(extra, "models")  # a catalogue that is none is refused even where nothing is looked up in it
    read = with_setup(request, chosen)
    model, model_notes = _model(read.request, extra)
    model = _partly_frozen(_fine_tuned(model, read.request), read.request)
    request, config_notes = _with_deepspeed_config(read, model, chosen)
    gpus = request.gpus or 1
    stage = _default_stage(request.engine, gpus) if request.stage is None else request.stage
    seq_len, seq_note = _seq_len(request, model)
    cluster = cluster_of(request, extra)
    complete = JobSpec(
        model=model,
        cluster=cluster,
        recipe=_on_nodes(_recipe(request, stage), cluster, chosen),
        mesh=mesh_of(request, gpus),
        batch=BatchSpec(micro_batch_size=request.micro_batch or 1, seq_len=seq_len, grad_accum_steps=request.grad_accum or 1),
    )
    complete, program_notes = _as_its_program(read, complete, chosen)
    notes = (
        *model_notes,
        seq_note,
        *read.notes,
        *program_notes,
        *config_notes,
        beyond_positions(complete),
        *_unheeded(complete.recipe),
    )
    return Resolved(complete, tuple(note for note in notes if note))


def with_setup(request: Request, chosen: Sequence[str] = ()) -> SetupRead:
    """Read the set-up that a request names, if it does, and add what it says; what is said beside it must be the same.

    Raises SpecError in one line where the file is none, says what is not modelled, or contradicts a flag.
    """
    if request.from_file is None:
        return SetupRead(request)
    if not request.from_file:
        raise SpecError("--from '' names no file; give the path of a set-up")
    from zeroplan.resolve.set_up import read_beside  # noqa: PLC0415  only this flag pays for it

    return read_beside(request, Path(request.from_file), chosen)


def _as_its_program(read: SetupRead, complete: JobSpec, chosen: Sequence[str]) -> tuple[JobSpec, tuple[str, ...]]:
    """The job with the modules and units of a set-up's own program, where they are modelled, and notes."""
    if read.own is None and not read.own_units:
        return complete, ()
    from zeroplan.resolve.set_up import by_its_own_modules, by_its_own_units  # noqa: PLC0415  only a set-up pays for it

    complete, modules_notes = by_its_own_modules(read, complete, chosen)
    complete, units_notes = by_its_own_units(read, complete, chosen)
    return complete, (*modules_notes, *units_notes)


def _with_deepspeed_config(found: SetupRead, model: ModelSpec, chosen: Sequence[str]) -> tuple[Request, tuple[str, ...]]:
    """Add what a DeepSpeed configuration says, of its own or of a set-up; what is said beside it must be the same."""
    if found.request.deepspeed_config is None and found.deepspeed is None:
        return found.complete, ()
    if found.request.deepspeed_config == "":
        raise SpecError("--deepspeed-config '' names no file; give the path of a DeepSpeed configuration")
    from zeroplan.resolve.deepspeed import config_beside  # noqa: PLC0415  only this flag pays for it

    return config_beside(found, model, chosen)


def recipe_of(request: Request, *, chosen: Sequence[str] = ()) -> RecipeSpec:
    """The recipe of a request, its set-up and DeepSpeed configuration read, whatever its model is.

    Sizes that DeepSpeed's ``auto`` takes from the model are those of some other model. Raises what :func:`resolve` raises.
    """
    any_model = find_model("llama-2-7b")
    found, _ = _with_deepspeed_config(with_setup(request, chosen), any_model, chosen)
    return _recipe(found, _default_stage(found.engine, found.gpus or 1) if found.stage is None else found.stage)


# The model


def _partly_frozen(model: ModelSpec, request: Request) -> ModelSpec:
    """Freeze what is asked for; a job file's model may have something frozen already."""
    said = {"parts": request.freeze, "layers": request.freeze_layers}
    asked = {name: value for name, value in said.items() if value is not None}
    if not asked or (model.frozen is None and asked == {"layers": 0}):
        return model
    return replace(model, frozen=FrozenSpec(**asked) if model.frozen is None else replace(model.frozen, **asked))  # type: ignore[arg-type]


def _fine_tuned(model: ModelSpec, request: Request) -> ModelSpec:
    """Put adapters into the model where they are asked for; a job file's model may have some already."""
    asked = {"rank": request.lora_rank, "targets": request.lora_targets, "quantize": request.quantize}
    said = {name: value for name, value in asked.items() if value is not None}
    if not said or (model.adapter is None and said == {"quantize": "none"}):
        return model
    if model.adapter is None and request.lora_rank is None:
        flag = f"--lora-targets {request.lora_targets}" if request.quantize is None else f"--quantize {request.quantize}"
        raise SpecError(f"{flag} needs adapters of some rank; add --lora-rank 16, say")
    return replace(model, adapter=AdapterSpec(**said) if model.adapter is None else replace(model.adapter, **said))  # type: ignore[arg-type]


def _model(request: Request, extra: Path | None) -> tuple[ModelSpec, tuple[str, ...]]:
    given = [key for key in WAYS_TO_NAME if getattr(request, key) is not None]
    if len(given) != 1:
        said = "none is given" if not given else f"{' and '.join(f'--{key}' for key in given)} are given"
        raise SpecError(
            f"a job has one model, but {said}; use one of --params 7e9, --model NAME, --config PATH, --profile FILE"
        )
    if request.treat_as is not None and (request.config is None and not isinstance(request.model, str)):
        raise SpecError(f"--treat-as {request.treat_as!r} says how to read a config.json, but none is read; leave it out")
    if request.profile is not None:
        from zeroplan.catalog.profile import read_profile  # noqa: PLC0415  only a profile pays for it

        return read_profile(request.profile), ()
    if request.config == "":
        raise SpecError("--config '' names no file; give the path of a config.json or of its folder")
    if request.config is not None and request.config.startswith(("https://", "http://")):
        raise SpecError(
            f"--config {request.config!r} is an address, and none is fetched; name the model with --model hf:OWNER/NAME"
        )
    if request.config is not None:
        return read_config_with_notes(Path(request.config), treat_as=request.treat_as)
    if isinstance(request.model, ModelSpec):
        return request.model, ()
    if request.fetched is not None and request.model is not None:
        return _fetched_model(request.model, Path(request.fetched), request.treat_as)
    if request.model is not None:
        return _named_model(request.model, request.treat_as, extra)
    from zeroplan.resolve.inferred import infer_model  # noqa: PLC0415  only a bare count pays for it

    found, note = infer_model(_parameters(request.params))
    return found, (note,)


def _fetched_model(name: str, file: Path, treat_as: str | None) -> tuple[ModelSpec, tuple[str, ...]]:
    try:
        return read_config_with_notes(file, treat_as=treat_as, name=name)
    except SpecError as error:
        raise SpecError(f"{name} on the Hub: {error}") from None


def _named_model(name: str, treat_as: str | None, extra: Path | None) -> tuple[ModelSpec, tuple[str, ...]]:
    try:
        found = find_model(repository_of(name) or name, extra=own_folder(extra, "models"))
    except UnknownNameError as unknown:
        raise UnknownNameError(f"{unknown}{way_to_the_hub(name)}") from None
    return found, () if treat_as is None else (f"--treat-as {treat_as} is not needed: the catalogue knows {found.name}",)


def own_folder(extra: Path | None, kind: str) -> Path | None:
    """A sub-folder of the user's catalogue, where there is one."""
    if extra is None:
        return None
    if not _is_folder(extra):
        raise SpecError(f"catalogue {str(extra)!r} is not a folder; give one that holds models/*.toml or gpus/*.toml")
    return extra / kind if (extra / kind).is_dir() else None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _parameters(params: str | float | None) -> int:
    if isinstance(params, float) and params.is_integer():
        return parse_count(str(int(params)), what="--params")
    return parse_count(str(params), what="--params")


# The rest of the job


def cluster_of(request: Request, extra: Path | None) -> ClusterSpec:
    """The GPU that a request names, and how many share a node."""
    gpu = find_gpu(request.gpu, extra=own_folder(extra, "gpus")) if isinstance(request.gpu, str) else request.gpu
    return ClusterSpec(gpu=gpu, gpus_per_node=request.gpus_per_node, shares=request.shares)


def _on_nodes(recipe: RecipeSpec, cluster: ClusterSpec, chosen: Sequence[str]) -> RecipeSpec:
    """Tell DeepSpeed's quantized gradients, which alone ask, how many GPUs share a node, where nobody said it to them."""
    known, options = node_size(cluster), recipe.deepspeed
    said = "gpus_per_node" in chosen or options.gpus_per_node != DeepSpeedOptions().gpus_per_node
    if known is None or said or not options.zero_quantized_gradients:
        return recipe
    return replace(recipe, deepspeed=replace(options, gpus_per_node=known))


def mesh_of(request: Request, gpus: int) -> MeshSpec:
    """How so many GPUs are arranged; raises :class:`~zeroplan.errors.SpecError` where the degrees do not divide them."""
    ways = {
        "--replicas": request.replicas or 1,
        "--tensor-parallel": request.tensor_parallel or 1,
        "--context-parallel": request.context_parallel or 1,
        "--pipeline-parallel": request.pipeline_parallel or 1,
    }
    together = math.prod(ways.values())
    if gpus % together:
        said = " x ".join(f"{flag} {number}" for flag, number in ways.items() if number > 1)
        raise SpecError(f"--gpus {gpus} is not divisible by {said}; every replica has the same number of GPUs")
    replicas, tp, cp, pp = ways.values()
    return MeshSpec(dp_replicate=replicas, dp_shard=gpus // together, tp=tp, cp=cp, pp=pp, ep=request.expert_parallel or 1)


def _default_stage(engine: Engine | None, gpus: int) -> Stage:
    """What is meant where no stage is said: everything sharded, or the plainest that the engine has for so many GPUs.

    >>> _default_stage(None, 8), _default_stage(None, 1), _default_stage("ddp", 8), _default_stage("megatron", 8)
    (3, 0, 0, 1)
    """
    if engine in ("ddp", "fsdp1", "fsdp2"):
        return 0 if engine == "ddp" else 3
    if gpus == 1:
        return 0
    return 1 if engine == "megatron" else 3


def _with_modules(request: Request) -> Request:
    """Say whose modules train among FSDP2's options, where that was asked for by itself."""
    if request.modules is None:
        return request
    options = request.fsdp2 or Fsdp2Options()
    if options.modules not in (Fsdp2Options().modules, request.modules):
        raise SpecError(f"--modules {request.modules} beside fsdp2.modules={options.modules}; leave one of them out")
    return replace(request, fsdp2=replace(options, modules=request.modules))


def _recipe(request: Request, stage: Stage) -> RecipeSpec:
    request = _with_modules(request)
    said: dict[str, object] = {
        "engine": request.engine or DEFAULT_ENGINE[stage],
        "zero_stage": stage,
        "precision": request.precision,
        "optimizer": request.optimizer,
        "optimizer_impl": request.optimizer_impl,
        "recompute": request.recompute,
        "recompute_layers": request.recompute_layers,
        "offload_activations": request.offload_activations,
        "attention": request.attention,
        "activation_model": request.activations,
        "sequence_parallel": request.sequence_parallel,
        "loss": request.loss,
        "keep_logits": request.keep_logits,
        "pipeline_schedule": request.pipeline_schedule,
        "pipeline_stages_per_rank": request.pipeline_stages_per_rank,
        "pipeline_layers": request.pipeline_layers,
        "sync_every_micro_batch": request.sync_every_micro_batch,
        "ddp": request.ddp,
        "fsdp1": request.fsdp1,
        "fsdp2": request.fsdp2,
        "deepspeed": request.deepspeed,
        "megatron": request.megatron,
        "kernels": request.kernels,
    }
    said |= _offload(request, request.engine or DEFAULT_ENGINE[stage])
    return RecipeSpec(**{key: value for key, value in said.items() if value is not None})  # type: ignore[arg-type]  # checked there


def _offload(request: Request, engine: Engine) -> dict[str, object]:
    """The engine's own options for what is offloaded: DeepSpeed takes optimizer and parameters one by one, FSDP2 both or none."""
    asked = {name: value for name in ("offload_optimizer", "offload_param") if (value := getattr(request, name)) is not None}
    if not asked:
        return {}
    if engine == "deepspeed":
        return {"deepspeed": replace(request.deepspeed or DeepSpeedOptions(), **asked)}
    away = set(asked.values())
    if away == {"none"}:
        return {"fsdp2": replace(request.fsdp2 or Fsdp2Options(), cpu_offload=False)}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in asked.items())
    if engine != "fsdp2":
        raise SpecError(f"{flags} with engine {engine!r} is not modelled; use engine 'deepspeed' or 'fsdp2'")
    if away != {"cpu"} or len(asked) < len(("optimizer", "param")):
        raise SpecError(
            f"{flags} with engine 'fsdp2': its CPUOffloadPolicy takes parameters, gradients and optimizer to host memory together; "
            "use --offload-optimizer cpu --offload-param cpu, or engine 'deepspeed'"
        )
    return {"fsdp2": replace(request.fsdp2 or Fsdp2Options(), cpu_offload=True)}


def _unheeded(recipe: RecipeSpec) -> Iterator[str]:
    """Name the options that were set for an engine which does not run this job."""
    defaults = RecipeSpec()
    for group in ("ddp", "fsdp1", "fsdp2", "deepspeed"):
        if group != recipe.engine and getattr(recipe, group) != getattr(defaults, group):
            yield f"the {group} options have no effect: the engine is {recipe.engine}"


def _seq_len(request: Request, model: ModelSpec) -> tuple[int, str]:
    if request.seq_len is not None:
        return request.seq_len, ""
    chosen = min(_DEFAULT_SEQ_LEN, model.max_position_embeddings)
    return chosen, f"sequence length not given: {chosen:,} tokens taken"


def beyond_positions(complete: JobSpec) -> str:
    """Say where a sequence is longer than the model was configured for; empty where it is not."""
    longest, asked = complete.model.max_position_embeddings, complete.batch.seq_len
    if asked <= longest:
        return ""
    return f"sequence length {asked:,} is beyond the {longest:,} positions this model was configured for"

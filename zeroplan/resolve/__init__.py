"""Turns the user's input (names, files, counts, flags) into a complete job, with a note on everything that was filled in.

A :class:`Request` has the values of a command line or a job file. :func:`resolve` looks up names, reads configurations, infers
a shape from a parameter count, and fills in the defaults.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.catalog.config import read_config_with_notes, shape_of_config
from zeroplan.catalog.gpu import gpu as find_gpu
from zeroplan.catalog.hub_names import is_repository, repository_of, way_to_the_hub
from zeroplan.catalog.model import WAYS_TO_NAME, is_listed, tower_beside, tower_left_out
from zeroplan.catalog.model import model as find_model
from zeroplan.catalog.text import is_there, shown
from zeroplan.catalog.traced import traced_config
from zeroplan.errors import SpecError, UnknownNameError
from zeroplan.resolve.images import LOADS_TOWERS, names_in, with_images
from zeroplan.resolve.padding import with_padding
from zeroplan.resolve.request import OPTIONS, Request, SetupRead, fields_set, request_of
from zeroplan.spec.adapter import PEFT_DEFAULT, AdapterSpec
from zeroplan.spec.base import nearest_fields
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.hardware import ClusterSpec, node_size
from zeroplan.spec.job import DEFAULT_ENGINE, JobSpec
from zeroplan.spec.linear_kernels import runs_by_kernels
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec, as_scorer
from zeroplan.spec.pipeline import stages_per_rank
from zeroplan.spec.recipe import (
    GATHERING,
    OF_LIGER,
    ON_PAPER,
    DeepSpeedOptions,
    Engine,
    Fsdp1Options,
    Fsdp2Options,
    RecipeSpec,
    Stage,
)
from zeroplan.spec.releases import loads_in_fp32, release_of
from zeroplan.spec.vision import TEXT_PART, VISION_PARTS
from zeroplan.units import GIB, parse_count

if TYPE_CHECKING:
    from zeroplan.resolve.batching import Varying

__all__ = [
    "OPTIONS",
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
_ONE_GPU = "the file does not say how many GPUs: zeroplan counts one; add --gpus N"
_ONE_NODE = "the file does not say how many GPUs, and FSDP shards nothing on one: zeroplan counts a node of {}; add --gpus N"
_USUAL_NODE = 8


class Resolved(NamedTuple):
    """A complete job, and notes on what was filled in."""

    job: JobSpec
    notes: tuple[str, ...]
    varying: "Varying | None" = None
    """The sequence lengths of ``--lengths``; the job then has the longest micro-batch of a run."""
    loop: Mapping[str, object] = {}
    """The fine-tuning loop that the user's file describes: ``workflow`` and its options. The job is its training step."""
    pairs: bool = False
    """The user's file counts its micro-batch in pairs; the job counts their sequences."""
    keys: Mapping[str, str] = {}
    """The keys of the user's files by the flag that they set and that may not contradict them."""
    padded: bool | None = None
    """What the user said of padding; None if nothing."""
    pads: bool | None = None
    """Whether the program of the user's file pads the sequences of a micro-batch; None without such a file."""


def job(**said: object) -> JobSpec:
    """Return a complete job from a user's input; the keywords are the fields of :class:`Request`.

    ``model="hf:owner/name"`` fetches the model's config.json from the Hugging Face Hub unless the catalogue has it.

    >>> job(params="7e9", gpus=8, stage=3).recipe.engine
    'fsdp2'
    """
    for name in said:
        if name not in Request.__dataclass_fields__:
            raise TypeError(f"job() has no parameter {name!r}{nearest_fields(Request, name)}")
    return resolve(with_fetched(Request(**said))).job  # type: ignore[arg-type]  # Request checks every field


def with_fetched(request: Request, *, extra: Path | None = None) -> Request:
    """Return the request with its model's config.json: that of a well-known model without formulas, or one from the Hub.

    Raises UnknownNameError if the Hub does not answer in time.
    """
    if not isinstance(request.model, str):
        return request
    repository = repository_of(request.model)
    try:
        find_model(repository or request.model, extra=own_folder(extra, "models"))
    except UnknownNameError as unknown:
        if (traced := traced_config(repository or request.model)) is not None:
            return replace(request, model=traced.stem, fetched=str(traced))
        if repository is None or not is_repository(repository):
            return request
        from zeroplan.catalog.hub import hub_config  # noqa: PLC0415  few names get here

        return replace(request, model=repository, fetched=str(hub_config(repository, unknown=unknown)))
    return request if repository is None or not is_repository(repository) else replace(request, model=repository)


def resolve(request: Request, *, extra: Path | None = None, chosen: Sequence[str] = ()) -> Resolved:
    """Return the complete job of a request. ``extra``: a folder of the user's entries (``models/*.toml``, ``gpus/*.toml``).

    ``chosen``: the DeepSpeed options that the user set with ``--set``. A DeepSpeed configuration with another value is then refused
    even if the option equals its default.

    Raises :class:`~zeroplan.errors.SpecError` or :class:`~zeroplan.errors.UnknownNameError`, one line each.
    """
    own_folder(extra, "models")  # raises for an invalid catalogue even if no name is looked up
    read = with_setup(request, chosen)
    model, model_notes = _complete_model(read, extra)
    request, config_notes, config_keys = _with_deepspeed_config(read, model, chosen)
    request, liger_note = (request, "") if read.setup.kind is None else _liger(request, model)
    request, dtype_note = _under_autocast(request, model, read)
    if read.setup.kind == "automodel":
        request = _in_stages(_automodel(request, model), model.num_hidden_layers, *read.setup.layers_per_stage)
    request, imbalance_note = _with_imbalance(request, model)
    request, gpus_note = _with_gpus(request, extra, from_a_file=bool(read.setup.kind))
    gpus = request.gpus or 1
    stage = _default_stage(request.engine, gpus) if request.stage is None else request.stage
    seq_len, seq_note = _seq_len(request, model)
    cluster = cluster_of(request, extra)
    batch, lengths_note, varying = _batch(request, seq_len)
    recipe = _scored(_on_device(_on_nodes(_recipe(request, stage), cluster, chosen), cluster, request), read, seq_len)
    recipe, kernels_note = _by_linear_kernels(recipe, model, request)
    complete = JobSpec(model=model, cluster=cluster, recipe=recipe, mesh=mesh_of(request, gpus), batch=batch)
    complete, padding_note = with_padding(complete, padded=request.padded, varying=varying, trainer_pads=read.setup.pads)
    ignored = tuple(_ignored_options(complete.recipe))  # before the program's own modules change options
    complete, program_notes = _with_program_of_setup(read, complete, chosen)
    notes = (  # first those that may say that the answer is too low
        _loaded_in_fp32(complete, request), *_without_fused_attention(complete), kernels_note, *model_notes, seq_note,
        lengths_note, padding_note, imbalance_note,
        liger_note, dtype_note, *read.notes, *program_notes, *config_notes,
        "" if varying is not None and varying.batching.way != "padded" else beyond_positions(complete),
        *ignored, gpus_note, _wide_adapters(complete.model), _of_stacked(complete.model, read.setup.kind),
    )  # fmt: skip
    setup, given = read.setup, tuple(note for note in notes if note)
    keys = {name: key for name, key in {**setup.keys, **config_keys}.items() if name not in read.filled}
    return Resolved(complete, given, varying, setup.loop, setup.pairs, keys, request.padded, setup.kind and setup.pads)


def with_setup(request: Request, chosen: Sequence[str] = ()) -> SetupRead:
    """Return the request with the values of the configuration file that it names.

    Raises SpecError in one line for an invalid file, for settings that are not modelled, or for a flag that contradicts the file.
    """
    if request.from_file is None:
        return SetupRead(request)
    if not request.from_file:
        raise SpecError("--from '' names no file; give the path of a configuration file")
    from zeroplan.resolve.set_up import read_beside  # noqa: PLC0415  only this flag needs it

    return read_beside(request, Path(request.from_file), chosen)


def _with_program_of_setup(read: SetupRead, complete: JobSpec, chosen: Sequence[str]) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the job with the modules and FSDP2 units of the program that owns the configuration, if modelled, and notes."""
    if read.setup.own is None and not read.setup.own_units:
        return complete, ()
    from zeroplan.resolve.set_up import by_its_own_modules, by_its_own_units  # noqa: PLC0415  only a configuration file pays for it

    complete, modules_notes = by_its_own_modules(read, complete, chosen)
    complete, units_notes = by_its_own_units(read, complete, chosen)
    return complete, (*modules_notes, *units_notes)


def _with_deepspeed_config(
    found: SetupRead, model: ModelSpec, chosen: Sequence[str]
) -> tuple[Request, tuple[str, ...], Mapping[str, str]]:
    """Return the request with the values of its DeepSpeed configuration, notes, and its keys by flag.

    Raises SpecError for a flag that contradicts it.
    """
    if found.request.deepspeed_config is None and found.setup.deepspeed is None:
        return found.complete, (), {}
    if found.request.deepspeed_config == "":
        raise SpecError("--deepspeed-config '' names no file; give the path of a DeepSpeed configuration")
    from zeroplan.resolve.deepspeed import config_beside  # noqa: PLC0415  only this flag pays for it

    return config_beside(found, model, chosen)


def recipe_of(request: Request, *, chosen: Sequence[str] = ()) -> RecipeSpec:
    """Return the recipe of a request and its configuration files, without reading its model.

    DeepSpeed's ``auto`` sizes, which depend on the model, are then those of Llama 2 7B. Raises what :func:`resolve` raises.
    """
    any_model = find_model("llama-2-7b")
    found, *_ = _with_deepspeed_config(with_setup(request, chosen), any_model, chosen)
    return _recipe(found, _default_stage(found.engine, found.gpus or 1) if found.stage is None else found.stage)


# The model


def _complete_model(read: SetupRead, extra: Path | None) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return the model with its adapters, frozen parts, scoring head and images, and notes."""
    asks = read.complete.images is not None or read.complete.image_size is not None
    model, notes = _model(read.request, extra, whole=asks or read.setup.kind in LOADS_TOWERS)
    model = as_scorer(_partly_frozen(_fine_tuned(model, read.complete), read.request), read.setup.head_rows)
    model, image_notes = with_images(model, read.complete, _seq_len(read.request, model)[0], program=read.setup.kind)
    return model, (*notes, *image_notes)


def _partly_frozen(model: ModelSpec, request: Request) -> ModelSpec:
    """Return the model with the requested frozen parts. A job file's model may have some already."""
    others = (*VISION_PARTS, "none", *((TEXT_PART,) if model.cross_layers else ()))
    parts = ",".join(name for name in names_in(request.freeze) if name not in others)
    options = {"parts": parts if parts or request.freeze == "" else None, "layers": request.freeze_layers}
    given = {name: value for name, value in options.items() if value is not None}
    if not given or (model.frozen is None and given == {"layers": 0}):
        return model
    return replace(model, frozen=FrozenSpec(**given) if model.frozen is None else replace(model.frozen, **given))  # type: ignore[arg-type]


def _fine_tuned(model: ModelSpec, request: Request) -> ModelSpec:
    """Return the model with the requested adapters. A job file's model may have some already."""
    options = {
        "rank": request.lora_rank, "targets": request.lora_targets, "quantize": request.quantize,
        "dropout": request.lora_dropout, "compute": request.lora_compute, "upcast": request.upcast,
        "modules_to_save": request.modules_to_save, "bitsandbytes": request.bitsandbytes, "group_size": request.group_size,
        "quantize_experts": request.quantize_experts, "base": request.lora_base,
        "runs": request.lora_runs, "learning": request.lora_learning, "looped": request.lora_looped, "dora": request.dora,
    }  # fmt: skip
    if request.lora_targets == PEFT_DEFAULT:
        if not model.traits.peft_targets:
            raise SpecError(f"peft has no default layers for {model.family}; name them with --lora-targets, such as all-linear")
        options["targets"] = model.traits.peft_targets
    elif request.lora_targets is not None:
        from zeroplan.resolve.targets import plain_targets  # noqa: PLC0415  only adapters pay for it

        options["targets"] = plain_targets(request.lora_targets, model)
    given = {name: value for name, value in options.items() if value is not None}
    if not given or (model.adapter is None and given == {"quantize": "none"}):
        return model
    if model.adapter is None and request.lora_rank is None:
        raise SpecError(f"{_first_flag(request)} needs the adapters' rank; add --lora-rank, for example 16")
    moe = model.moe
    if model.family == "mixtral" and moe is not None and release_of(request.transformers).loops_over_experts:
        moe = replace(moe, separate=True)
    adapter = AdapterSpec(**given) if model.adapter is None else replace(model.adapter, **given)  # type: ignore[arg-type]
    return replace(model, adapter=adapter, moe=moe)


def _first_flag(request: Request) -> str:
    """The first adapter flag of a request that has no rank."""
    for name, value in (
        ("quantize", request.quantize), ("lora-targets", request.lora_targets), ("upcast", request.upcast),
        ("lora-compute", request.lora_compute), ("lora-base", request.lora_base), ("lora-runs", request.lora_runs),
        ("lora-learning", request.lora_learning), ("bitsandbytes", request.bitsandbytes),
        ("group-size", request.group_size), ("modules-to-save", request.modules_to_save),
        ("dora", request.dora),
    ):  # fmt: skip
        if value is not None:
            return f"--{name} {value}"
    for name, said in (
        ("quantize-experts", request.quantize_experts),
        ("lora-dropout", request.lora_dropout),
        ("lora-looped", request.lora_looped),
    ):
        if said is not None:
            return f"--{name}" if said else f"--no-{name}"
    raise AssertionError("no flag of adapters is given")


def _model(request: Request, extra: Path | None, *, whole: bool) -> tuple[ModelSpec, tuple[str, ...]]:
    given = [key for key in WAYS_TO_NAME if getattr(request, key) is not None]
    if len(given) != 1:
        named = "none is given" if not given else f"{' and '.join(f'--{key}' for key in given)} are given"
        raise SpecError(
            f"a job has one model, but {named}; use one of --params 7e9, --model NAME, --config PATH, --profile FILE"
        )
    if request.treat_as is not None and (request.config is None and not isinstance(request.model, str)):
        raise SpecError(f"--treat-as {request.treat_as!r} sets how to read a config.json, but none is read; leave it out")
    if request.profile is not None:
        from zeroplan.catalog.profile import read_profile  # noqa: PLC0415  keeps start-up fast

        return read_profile(request.profile), ()
    if request.config == "":
        raise SpecError("--config '' names no file; give the path of a config.json or of its folder")
    if request.config is not None and request.config.startswith(("https://", "http://")):
        raise SpecError(
            f"--config {request.config!r} is an address, and --config reads only files; name the model with --model hf:OWNER/NAME"
        )
    if request.config is not None:
        return shape_of_config(request.config, treat_as=request.treat_as)
    if isinstance(request.model, ModelSpec):
        return request.model, ()
    if request.fetched is not None and request.model is not None:
        return _fetched_model(request.model, Path(request.fetched), request.treat_as)
    if request.model is not None:
        return _named_model(request.model, request.treat_as, extra, whole=whole)
    from zeroplan.resolve.inferred import infer_model  # noqa: PLC0415  only a bare count pays for it

    found, note = infer_model(_parameters(request.params))
    return found, (note,)


def _fetched_model(name: str, file: Path, treat_as: str | None) -> tuple[ModelSpec, tuple[str, ...]]:
    try:
        return read_config_with_notes(file, treat_as=treat_as, name=name)
    except SpecError as error:
        raise SpecError(f"{name} on the Hub: {error}") from None


def _named_model(
    name: str, treat_as: str | None, extra: Path | None, *, whole: bool
) -> tuple[ModelSpec, tuple[str, ...]]:  # fmt: skip
    """Return a model of the catalogue and notes; with ``whole`` also the vision tower beside a text-only entry."""
    try:
        found = find_model(repository_of(name) or name, extra=own_folder(extra, "models"))
    except UnknownNameError as unknown:
        raise UnknownNameError(f"{unknown}{way_to_the_hub(name)}") from None
    notes = (
        *(() if treat_as is None else (f"--treat-as {treat_as} is not needed: the catalogue knows {found.name}",)),
        *_found_by_last_part(name, found.name, own_folder(extra, "models")),
    )
    if beside := tower_left_out(found.name, extra=own_folder(extra, "models")):
        tower = tower_beside(found.name, extra=own_folder(extra, "models"))
        if tower is not None and whole:
            return replace(found, vision=tower), notes
        way = "--images N counts it" if tower is not None else "--config counts what it can"
        left = f"{beside} of {found.name} is left out, and every figure is too low by it; {way}"
        found = replace(found, name=f"{found.name} (text part)")
        return found, (left, *notes)
    return found, notes


def _found_by_last_part(name: str, found: str, extra: Path | None) -> Iterator[str]:
    if not is_listed(repository_of(name) or name, extra=extra):
        yield f"{shown(name)} is taken for {found} by the last part of its name; --config reads a config.json that differs"


def own_folder(extra: Path | None, kind: str) -> Path | None:
    """Return the ``models`` or ``gpus`` folder of the user's catalogue; None if there is none."""
    if extra is None:
        return None
    if not (is_there(extra) and extra.is_dir()):
        raise SpecError(f"catalogue {str(extra)!r} is not a folder; give one that holds models/*.toml or gpus/*.toml")
    return extra / kind if (extra / kind).is_dir() else None


def _parameters(params: str | float | None) -> int:
    if isinstance(params, float) and params.is_integer():
        return parse_count(str(int(params)), what="--params")
    return parse_count(str(params), what="--params")


# The rest of the job


def cluster_of(request: Request, extra: Path | None) -> ClusterSpec:
    """Return the request's GPU, the number of GPUs per node, and the network between nodes."""
    gpu = find_gpu(request.gpu, extra=own_folder(extra, "gpus")) if isinstance(request.gpu, str) else request.gpu
    return ClusterSpec(
        gpu=gpu, gpus_per_node=request.gpus_per_node, network_gbit_per_s=request.network, nics_per_node=request.nics_per_node,
        shares=request.shares,
    )  # fmt: skip


def _with_gpus(request: Request, extra: Path | None, *, from_a_file: bool) -> tuple[Request, str]:
    """Return the request with the GPUs of a node if a file of FSDP1 does not say how many there are, and a note.

    On one GPU torch turns FSDP1's sharding off (torch 2.13, distributed/fsdp/_init_utils.py, _init_core_state).
    """
    if not from_a_file or request.gpus is not None:
        return request, ""
    if request.engine != "fsdp1":
        return request, _ONE_GPU
    node = node_size(cluster_of(request, extra)) or _USUAL_NODE
    return replace(request, gpus=node), _ONE_NODE.format(node)


def _on_nodes(recipe: RecipeSpec, cluster: ClusterSpec, chosen: Sequence[str]) -> RecipeSpec:
    """Return the recipe with the GPUs per node for DeepSpeed's quantized gradients, unless they are given."""
    known, options = node_size(cluster), recipe.deepspeed
    is_set = "gpus_per_node" in chosen or options.gpus_per_node != DeepSpeedOptions().gpus_per_node
    if known is None or is_set or not options.zero_quantized_gradients:
        return recipe
    return replace(recipe, deepspeed=replace(options, gpus_per_node=known))


def _on_device(recipe: RecipeSpec, cluster: ClusterSpec, request: Request) -> RecipeSpec:
    """Return the recipe with the attention kernels of the GPU, unless a complete job says which kernels it has."""
    if cluster.gpu is None or recipe.engine in (*ON_PAPER, "megatron") or cluster.kernels == "cuda":
        return recipe
    return recipe if request.device_kernels is not None else replace(recipe, kernels=cluster.kernels)


_KERNELS = "{} are assumed to be installed; without them linear attention needs far more: add --linear-attention torch"


def _by_linear_kernels(recipe: RecipeSpec, model: ModelSpec, request: Request) -> tuple[RecipeSpec, str]:
    """Return the recipe with the kernels of linear attention if they are modelled and the request does not decide, and a note.

    A model without linear attention has none to run.
    """
    if model.linear is None and model.profile is None:
        return replace(recipe, linear_attention="torch"), ""
    if request.linear_attention is not None or not runs_by_kernels(model, recipe):
        return recipe, ""
    return replace(recipe, linear_attention="kernels"), _KERNELS.format(model.traits.kernels)


def mesh_of(request: Request, gpus: int) -> MeshSpec:
    """Return the degrees of parallelism; raises :class:`~zeroplan.errors.SpecError` if they do not divide the GPUs."""
    ways = {
        "--replicas": request.replicas or 1,
        "--tensor-parallel": request.tensor_parallel or 1,
        "--context-parallel": request.context_parallel or 1,
        "--pipeline-parallel": request.pipeline_parallel or 1,
    }
    together = math.prod(ways.values())
    if gpus % together:
        degrees = " x ".join(f"{flag} {number}" for flag, number in ways.items() if number > 1)
        raise SpecError(f"--gpus {gpus} is not divisible by {degrees}; every replica has the same number of GPUs")
    replicas, tp, cp, pp = ways.values()
    return MeshSpec(dp_replicate=replicas, dp_shard=gpus // together, tp=tp, cp=cp, pp=pp, ep=request.expert_parallel or 1)


#: TRL's default (1.16, trl/trainer/grpo_config.py, GRPOConfig.max_completion_length).
COMPLETION = 512


def _scored(recipe: RecipeSpec, read: SetupRead, seq_len: int) -> RecipeSpec:
    """Return the recipe with the prompts of a file of GRPO, whose loss reads only completions."""
    if read.setup.loop.get("workflow") != "grpo" or recipe.loss != "log-probs":
        return recipe
    return replace(recipe, prompt_len=max(1, seq_len - int(str(read.setup.loop.get("max_completion_length", COMPLETION)))))


def _default_stage(engine: Engine | None, gpus: int) -> Stage:
    """Return the default stage: 3 on several GPUs, 0 on one and with DDP, 1 with Megatron-Core.

    >>> _default_stage(None, 8), _default_stage(None, 1), _default_stage("ddp", 8), _default_stage("megatron", 8)
    (3, 0, 0, 1)
    """
    if engine in ("ddp", "fsdp1", "fsdp2"):
        return 0 if engine == "ddp" else 3
    if gpus == 1:
        return 0
    return 1 if engine == "megatron" else 3


def _with_modules(request: Request) -> Request:
    """Return the request with ``--modules`` moved into FSDP2's options."""
    if request.modules is None:
        return request
    options = request.fsdp2 or Fsdp2Options()
    if options.modules not in (Fsdp2Options().modules, request.modules):
        raise SpecError(f"--modules {request.modules} beside fsdp2.modules={options.modules}; leave one of them out")
    return replace(request, fsdp2=replace(options, modules=request.modules))


def _recipe(request: Request, stage: Stage) -> RecipeSpec:
    request = _with_modules(request)
    engine = request.engine or DEFAULT_ENGINE[stage]
    given = fields_set(request, "recipe") | {"engine": engine, "zero_stage": stage} | _offload(request, engine)
    return RecipeSpec(**given)  # type: ignore[arg-type]  # checked there


def _offload(request: Request, engine: Engine) -> dict[str, object]:
    """Return the engine's options for the offload flags. FSDP can only offload optimizer and parameters together."""
    offload = {name: value for name in ("offload_optimizer", "offload_param") if (value := getattr(request, name)) is not None}
    if not offload:
        return {}
    if engine == "deepspeed":
        return {"deepspeed": replace(request.deepspeed or DeepSpeedOptions(), **offload)}
    places = set(offload.values())
    options = (request.fsdp1 or Fsdp1Options()) if engine == "fsdp1" else (request.fsdp2 or Fsdp2Options())
    name = "fsdp1" if engine == "fsdp1" else "fsdp2"
    if places == {"none"}:
        return {name: replace(options, cpu_offload=False)}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in offload.items())
    if engine != name:
        raise SpecError(f"{flags} with engine {engine!r} is not modelled; use engine 'deepspeed' or 'fsdp2'")
    if places != {"cpu"} or len(offload) < len(("optimizer", "param")):
        raise SpecError(
            f"{flags} with engine {engine!r}: it offloads parameters, gradients and optimizer together; "
            "use --offload-optimizer cpu --offload-param cpu, or engine 'deepspeed'"
        )
    return {name: replace(options, cpu_offload=True)}


def _ignored_options(recipe: RecipeSpec) -> Iterator[str]:
    """Yield notes on options of other engines than the job's."""
    defaults = RecipeSpec()
    for group in ("ddp", "fsdp1", "fsdp2", "deepspeed"):
        if group != recipe.engine and getattr(recipe, group) != getattr(defaults, group):
            yield f"the {group} options have no effect: the engine is {recipe.engine}"


def _liger(request: Request, model: ModelSpec) -> tuple[Request, str]:
    """Return the request without a file's Liger kernels if they are not modelled for the family, and a note."""
    if "liger-" not in (request.fused_kernels or "") or (model.profile is None and model.has("liger")):
        return request, ""
    note = f"Liger's kernels are not modelled with family {model.family!r}: transformers' own operators are counted"
    others = [one for one in (request.fused_kernels or "").split(",") if one.strip() not in OF_LIGER]
    return replace(request, fused_kernels=",".join(others) or None), note


def _under_autocast(request: Request, model: ModelSpec, read: SetupRead) -> tuple[Request, str]:
    """Return a Trainer's request with weights in fp32 if autocast widens what its weights of 16 bits compute, and a note.

    Autocast runs LayerNorm, a router's sums and parts of linear attention in fp32, which ``--precision bf16`` does not count.
    Models with RMSNorms and gated MLPs have no such parts: dry runs of the Trainer need what ``bf16`` says.
    """
    setting = read.setup.flags.get("precision") if read.setup.kind == "trainer" else None
    plain = model.traits.gated and not (
        model.traits.layer_norms or model.moe or model.linear or model.per_layer or model.vision
    )
    if plain or setting is None or request.precision != "bf16" or "bf16-mixed" not in setting.also:
        return request, ""
    note = (
        f"{setting.key} loads weights in 16 bits; they are counted in fp32, an upper bound: autocast runs parts of this "
        "model in fp32, which --precision bf16 does not count"
    )
    return replace(request, precision="bf16-mixed"), note


def _automodel(request: Request, model: ModelSpec) -> Request:
    """Return the request of a file of NeMo AutoModel with the kernels and checkpoints that its model of the family has.

    With experts on several ranks a checkpoint keeps the router's outputs (components/moe/parallelizer.py, apply_ac). Of
    transformers' own models it recomputes whole blocks, and their norms are transformers' (components/distributed/parallelizer.py).
    """
    parts = [one for one in (request.fused_kernels or "").split(",") if one]
    if not model.has("automodel"):
        parts = [one for one in parts if one != "norm-in-one"]
    if not model.has("automodel") or model.moe is None:  # other models have torch's linear layers
        parts = [one for one in parts if not one.startswith("te-")]
    if model.moe is None or (not model.has("automodel") and (request.expert_parallel or 1) == 1):
        parts = [one for one in parts if one not in GATHERING]
    if (request.expert_parallel or 1) > 1:
        parts = ["router-kept" if one == "inputs-kept" else one for one in parts]
    elif "inputs-kept" in parts and not model.has("automodel blocks"):
        parts.remove("inputs-kept")
        request = replace(request, recompute="full") if request.recompute == "selective" else request
    return replace(request, fused_kernels=",".join(parts) or None)


def _in_stages(request: Request, layers: int, each: int | None, rounded: str) -> Request:
    """Return the request with the layers of each pipeline stage, as AutoModel cuts them: the first stages get those left over.

    Source: components/distributed/pipelining/functional.py, calculate_virtual_stages and generate_hf_model_fqn_per_model_part.
    """
    ranks = request.pipeline_parallel or 1
    if ranks == 1 or request.pipeline_layers is not None or request.pipeline_stages_per_rank is not None:
        return request
    stages = ranks * stages_per_rank(request.pipeline_schedule or "1f1b", None) if each is None else -(-layers // each)
    stages += -stages % ranks if rounded == "up" else -(stages % ranks) if rounded == "down" else 0
    if stages % ranks or not ranks <= stages <= layers:
        raise SpecError(
            f"{each} layers per stage make {stages} stages, which {ranks} pipeline ranks cannot share; use another number"
        )
    cut = ",".join(str(layers // stages + (at < layers % stages)) for at in range(stages))
    return replace(request, pipeline_stages_per_rank=stages // ranks, pipeline_layers=cut)


def _wide_adapters(model: ModelSpec) -> str:
    """Return a note if the adapters' rank is beyond the smaller side of a layer that they adapt, which peft 0.21 accepts."""
    if model.adapter is None:
        return ""
    from zeroplan.resolve.targets import smaller_sides  # noqa: PLC0415  only adapters pay for it

    sides = smaller_sides(model, frozenset(model.adapted_layers))
    if not sides:
        return ""
    name = min(sides, key=lambda one: sides[one])
    if model.adapter.rank <= sides[name]:
        return ""
    return (
        f"rank {model.adapter.rank:,} is more than {sides[name]:,}, the smaller side of {name}: peft accepts it, but its adapter "
        f"can express no more than with rank {sides[name]:,}, and has more parameters than the layer itself"
    )


def _of_stacked(model: ModelSpec, kind: str | None) -> str:
    """Return a note on adapters of all experts: peft refuses dropout in them, and Axolotl has an older peft.

    Axolotl replaces the check of dropout (067b021c, loaders/adapter.py, _patch_peft_param_wrapper_dropout).
    """
    if model.adapter is None or model.moe is None or not any(model.stacked):
        return ""
    if kind == "axolotl":
        whole = 2 * 3 * model.moe.num_experts * model.hidden_size * model.moe.moe_intermediate_size
        return (
            "Axolotl pins peft 0.19, which also writes out what an adapter adds to the weight of all experts; 0.21 is counted: "
            f"the answer may be too low by the experts of one layer, {whole / GIB:.2f} GiB"
        )
    if not model.adapter.dropout:
        return ""
    return (
        "peft 0.21 refuses lora_dropout above 0 in adapters of all experts of a layer; set it to 0. The job is counted with "
        "dropout in the other adapters"
    )


def _loaded_in_fp32(job: JobSpec, request: Request) -> str:
    """Return a note if the user's transformers may have loaded the frozen weights in fp32 and the user did not set their dtype."""
    adapter, recipe = job.model.adapter, job.recipe
    if adapter is None or adapter.quantize != "none" or request.lora_base or recipe.engine not in ("ddp", "fsdp2"):
        return ""
    if not (recipe.precision.endswith("mixed") and loads_in_fp32(recipe.transformers)):
        return ""
    return (
        f"transformers {recipe.transformers} loads a model in fp32 unless its script sets torch_dtype; frozen weights are "
        "counted in 16 bits: if your script does not set it, add --lora-base fp32"
    )


def _without_fused_attention(job: JobSpec) -> Iterator[str]:
    """Yield notes on a GPU before compute capability 8.0: on scores that attention keeps, and on bf16 without tensor cores."""
    gpu, recipe, half = job.cluster.gpu, job.recipe, job.recipe.precision.partition("-")[0]
    if gpu is None or half == "fp32" or "bf16" in gpu.dense_flops_per_s:
        return
    if recipe.attention == "sdpa" and recipe.writes_out_attention(grouped=job.model.has_grouped_heads):
        what = "bf16" if half == "bf16" else "fp16 with grouped heads"
        yield f"torch has no fused attention for {what} on {gpu.full_name}: it keeps the scores of all heads in fp32"
    if half == "bf16":
        yield f"{gpu.full_name} has no tensor cores for bf16: steps are slow; use --precision fp16-mixed"


def _seq_len(request: Request, model: ModelSpec) -> tuple[int, str]:
    if request.seq_len is not None:
        return request.seq_len, ""
    chosen = min(_DEFAULT_SEQ_LEN, model.max_position_embeddings)
    return chosen, f"sequence length not given: zeroplan assumes {chosen:,} tokens"


def _batch(request: Request, seq_len: int) -> "tuple[BatchSpec, str, Varying | None]":
    """Return the batch, a note, and the lengths of ``--lengths``; the batch is then the longest micro-batch."""
    batch = BatchSpec(
        micro_batch_size=request.micro_batch or 1, seq_len=seq_len, grad_accum_steps=request.grad_accum or 1,
        longest_seq_len=request.longest_seq_len,
    )  # fmt: skip
    ways_to_join = {
        "--padding-free": request.padding_free,
        "--packing": request.packing,
        "--token-budget": request.token_budget,
    }
    flags = [flag for flag, value in ways_to_join.items() if value]
    if request.lengths is None:
        if flags:
            raise SpecError(f"{flags[0]} needs --lengths: sequences of one length have no padding")
        return batch, "", None
    if len(flags) > 1:
        raise SpecError(f"{' and '.join(flags)} are two ways of batching; leave one of them out")
    if flags and request.attention != "flash":
        raise SpecError(f"{flags[0]} needs --attention flash: no other kernel keeps joined sequences apart without a mask")
    from zeroplan.resolve.batching import of_varying  # noqa: PLC0415  only this flag pays for it

    mesh = mesh_of(request, request.gpus or 1)
    return of_varying(request.lengths, flags[0] if flags else "", batch, mesh, request.token_budget or 0)


def _with_imbalance(request: Request, model: ModelSpec) -> tuple[Request, str]:
    """Return the request with ``imbalance`` as a number, and a note on the experts' loads."""
    imbalance, ranks = request.imbalance, request.expert_parallel or 1
    if imbalance is None or imbalance == 1:
        return request, ""
    if model.moe is None or ranks == 1:
        raise SpecError(
            f"--imbalance {imbalance} needs experts on several ranks: use --expert-parallel with a model that has experts"
        )
    if model.moe.num_experts % ranks:
        return replace(request, imbalance=None), ""  # JobSpec then refuses the number of ranks
    from zeroplan.resolve.imbalance import imbalance_of  # noqa: PLC0415  only this flag pays for it

    ratio, note = imbalance_of(imbalance, experts=model.moe.num_experts, ranks=ranks)
    return replace(request, imbalance=ratio), note


def beyond_positions(complete: JobSpec) -> str:
    """Return a note if sequences are longer than the model was configured for; else an empty string."""
    longest, seq_len = complete.model.max_position_embeddings, complete.batch.seq_len
    if seq_len <= longest:
        return ""
    return f"sequence length {seq_len:,} is beyond the {longest:,} positions this model was configured for"

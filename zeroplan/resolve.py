"""From what a user says (names, files, counts, flags) to a complete job, with a note on everything that was filled in.

A :class:`Request` is what a command line or a job file holds; :func:`resolve` looks names up, reads configurations, infers a
shape where only a parameter count is known, and applies the defaults a PyTorch user would meet.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from zeroplan.catalog.config import read_config
from zeroplan.catalog.gpu import gpu as find_gpu
from zeroplan.catalog.model import model as find_model
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError, UnknownNameError
from zeroplan.spec.adapter import AdapterSpec, Quantize
from zeroplan.spec.base import Count, CountOrZero, Degree, Spec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.hardware import ClusterSpec, GpuSpec, SharesSpec, node_size
from zeroplan.spec.job import DEFAULT_ENGINE, JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import PipelineSchedule
from zeroplan.spec.recipe import (
    ActivationModel,
    Attention,
    DdpOptions,
    DeepSpeedOptions,
    Engine,
    Fsdp2Options,
    Kernels,
    Loss,
    MegatronOptions,
    OffloadDevice,
    Optimizer,
    OptimizerImpl,
    Precision,
    RecipeSpec,
    Recompute,
    Stage,
)
from zeroplan.transformer.params import parameter_count
from zeroplan.units import parse_count

if TYPE_CHECKING:
    from zeroplan.catalog.setups.told import DeepSpeedPart, Kind, Setup

#: Shapes a bare parameter count is measured against: dense, decoder-only, each the published one nearest to its size.
REFERENCE_MODELS = (
    "smollm2-135m", "smollm2-360m", "tinyllama-1.1b", "smollm2-1.7b", "llama-3.2-3b", "llama-2-7b", "llama-2-13b",
    "mistral-small-24b", "yi-34b", "llama-2-70b", "mistral-large-123b", "llama-3.1-405b",
)  # fmt: skip
_DEFAULT_SEQ_LEN = 4096
#: A repository on the Hub: ``owner/name`` (huggingface_hub, ``validate_repo_id``).
_ON_THE_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
#: Beyond this ratio of sizes a reference shape is scaled in depth and width too, not only in the width of its MLP.
_NEAR = 1.5
_MOST_PARAMETERS = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Spec):
    """What a user says about a job: the command line's flags, and the keys of a job file, one to one."""

    model: str | ModelSpec | None = None
    params: str | int | float | None = None
    config: str | None = None
    profile: str | None = None
    treat_as: str | None = None
    lora_rank: Count | None = None
    lora_targets: str | None = None
    quantize: Quantize | None = None
    freeze: str | None = None
    freeze_layers: CountOrZero | None = None
    gpus: Degree | None = None
    gpu: str | GpuSpec | None = None
    gpus_per_node: Count | None = None
    replicas: Degree | None = None
    tensor_parallel: Degree | None = None
    context_parallel: Degree | None = None
    pipeline_parallel: Degree | None = None
    expert_parallel: Degree | None = None
    pipeline_schedule: PipelineSchedule | None = None
    pipeline_stages_per_rank: Degree | None = None
    stage: Stage | None = None
    engine: Engine | None = None
    precision: Precision | None = None
    optimizer: Optimizer | None = None
    optimizer_impl: OptimizerImpl | None = None
    offload_optimizer: OffloadDevice | None = None
    offload_param: OffloadDevice | None = None
    recompute: Recompute | None = None
    recompute_layers: Count | None = None
    offload_activations: bool | None = None
    attention: Attention | None = None
    activations: ActivationModel | None = None
    sequence_parallel: bool | None = None
    seq_len: Count | None = None
    micro_batch: Count | None = None
    grad_accum: Count | None = None
    loss: Loss | None = None
    keep_logits: bool | Literal["fp32"] | None = None
    sync_every_micro_batch: bool | None = None
    ddp: DdpOptions | None = None
    fsdp2: Fsdp2Options | None = None
    deepspeed: DeepSpeedOptions | None = None
    megatron: MegatronOptions | None = None
    deepspeed_config: str | None = None
    from_file: str | None = None
    kernels: Kernels | None = None
    """Whose kernels compute, as a complete job says it; no flag."""
    shares: SharesSpec | None = None
    """What a measured step reached of the GPU's rates, likewise."""

    def overridden_by(self, other: "Request") -> "Request":
        """Return this request with everything that ``other`` says instead; another model replaces the model as a whole."""
        said = {field.name: value for field in fields(other) if (value := getattr(other, field.name)) is not None}
        base = replace(self, **dict.fromkeys((*_MODEL_KEYS, "treat_as"))) if said.keys() & set(_MODEL_KEYS) else self
        return replace(base, **said)


_MODEL_KEYS = ("model", "params", "config", "profile")


class Resolved(NamedTuple):
    """A complete job, and what was filled in to complete it."""

    job: JobSpec
    notes: tuple[str, ...]


def request_of(complete: JobSpec) -> Request:
    """Say a complete job as a request, so that flags can override any part of it."""
    recipe, mesh, batch = complete.recipe, complete.mesh, complete.batch
    return Request(
        model=complete.model,
        gpus=mesh.world_size,
        gpu=complete.cluster.gpu,
        gpus_per_node=complete.cluster.gpus_per_node,
        replicas=mesh.dp_replicate,
        tensor_parallel=mesh.tp,
        context_parallel=mesh.cp,
        pipeline_parallel=mesh.pp,
        expert_parallel=mesh.ep,
        pipeline_schedule=recipe.pipeline_schedule,
        pipeline_stages_per_rank=recipe.pipeline_stages_per_rank,
        stage=recipe.zero_stage,
        engine=recipe.engine,
        precision=recipe.precision,
        optimizer=recipe.optimizer,
        optimizer_impl=recipe.optimizer_impl,
        recompute=recipe.recompute,
        recompute_layers=recipe.recompute_layers,
        offload_activations=recipe.offload_activations,
        attention=recipe.attention,
        activations=recipe.activation_model,
        sequence_parallel=recipe.sequence_parallel,
        loss=recipe.loss,
        keep_logits=recipe.keep_logits,
        sync_every_micro_batch=recipe.sync_every_micro_batch,
        ddp=recipe.ddp,
        fsdp2=recipe.fsdp2,
        deepspeed=recipe.deepspeed,
        megatron=recipe.megatron,
        seq_len=batch.seq_len,
        micro_batch=batch.micro_batch_size,
        grad_accum=batch.grad_accum_steps,
        kernels=recipe.kernels,
        shares=complete.cluster.shares,
    )


def job(**said: object) -> JobSpec:
    """Build a complete job from what a user would say; the keywords are the fields of :class:`Request`.

    >>> job(params="7e9", gpus=8, stage=3).recipe.engine
    'fsdp2'
    """
    return resolve(Request(**said)).job  # type: ignore[arg-type]  # Request checks every field


def resolve(request: Request, *, extra: Path | None = None, chosen: Sequence[str] = ()) -> Resolved:
    """Complete a request. ``extra`` is a folder of the user's own catalogue entries (``models/*.toml``, ``gpus/*.toml``).

    ``chosen`` names options of DeepSpeed that were asked for one by one, so that a DeepSpeed configuration that says otherwise
    is refused even where the default was asked for.

    Raises :class:`~zeroplan.errors.SpecError` or :class:`~zeroplan.errors.UnknownNameError`, one line each.
    """
    own_folder(extra, "models")  # a catalogue that is none is refused even where nothing is looked up in it
    read = with_setup(request, chosen)
    model, model_note = _model(read.request, extra)
    model = _partly_frozen(_fine_tuned(model, read.request), read.request)
    request, config_notes = _with_deepspeed_config(read, model, chosen)
    gpus = request.gpus or 1
    stage = _default_stage(request.engine, gpus) if request.stage is None else request.stage
    seq_len, seq_note = _seq_len(request, model)
    cluster = cluster_of(request, extra)
    complete = JobSpec(
        model=model,
        cluster=cluster,
        recipe=_on_nodes(_recipe(request, stage), cluster),
        mesh=mesh_of(request, gpus),
        batch=BatchSpec(micro_batch_size=request.micro_batch or 1, seq_len=seq_len, grad_accum_steps=request.grad_accum or 1),
    )
    notes = (model_note, seq_note, *read.notes, *config_notes, _beyond_positions(complete), *_unheeded(complete.recipe))
    return Resolved(complete, tuple(note for note in notes if note))


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


def _model(request: Request, extra: Path | None) -> tuple[ModelSpec, str]:
    given = [key for key in _MODEL_KEYS if getattr(request, key) is not None]
    if len(given) != 1:
        said = "none is given" if not given else f"{' and '.join(f'--{key}' for key in given)} are given"
        raise SpecError(
            f"a job has one model, but {said}; use one of --params 7e9, --model NAME, --config PATH, --profile FILE"
        )
    if request.treat_as is not None and (request.config is None and not isinstance(request.model, str)):
        raise SpecError(f"--treat-as {request.treat_as!r} says how to read a config.json, but none is read; leave it out")
    if request.profile is not None:
        from zeroplan.catalog.profile import read_profile  # noqa: PLC0415  only a profile pays for it

        return read_profile(request.profile), ""
    if request.config == "":
        raise SpecError("--config '' names no file; give the path of a config.json or of its folder")
    if request.config is not None:
        return read_config(Path(request.config), treat_as=request.treat_as), _treated(request.treat_as)
    if isinstance(request.model, ModelSpec):
        return request.model, ""
    if request.model is not None:
        return _named_model(request.model, request.treat_as, extra)
    return infer_model(_parameters(request.params))


def _named_model(name: str, treat_as: str | None, extra: Path | None) -> tuple[ModelSpec, str]:
    try:
        found = find_model(name, extra=own_folder(extra, "models"))
    except UnknownNameError as unknown:
        if not _ON_THE_HUB.fullmatch(name):
            raise
        from zeroplan.catalog.hub import hub_model  # noqa: PLC0415  only a name the catalogue does not know gets here

        return hub_model(name, treat_as=treat_as, unknown=unknown), _treated(treat_as)
    return found, "" if treat_as is None else f"--treat-as {treat_as} is not needed: the catalogue knows {found.name}"


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


def _treated(treat_as: str | None) -> str:
    if treat_as is None:
        return ""
    return f"the configuration is read as a {treat_as} model, as asked; `zeroplan profile --config` gives its own figures"


def _parameters(params: str | float | None) -> int:
    if isinstance(params, float) and params.is_integer():
        return parse_count(str(int(params)), what="--params")
    return parse_count(str(params), what="--params")


def infer_model(parameters: int) -> tuple[ModelSpec, str]:
    """Return a shape with exactly this many parameters, and a sentence on where it comes from.

    The published shape nearest in size lends depth, width, heads and vocabulary; its MLP is widened or narrowed to meet the
    count, and what no whole width can meet is one vector beside the embeddings. Where no published shape is near, depth and
    width are scaled by the cube root of the ratio first.
    """
    if parameters > _MOST_PARAMETERS:
        raise SpecError(f"--params {parameters:,} is beyond {_MOST_PARAMETERS:,}; no transformer of that size can be inferred")
    near = min((find_model(name) for name in REFERENCE_MODELS), key=lambda one: _distance(parameter_count(one), parameters))
    ratio = parameters / parameter_count(near)
    shape = near if 1 / _NEAR <= ratio <= _NEAR else _scaled(near, ratio, parameters)
    shape = _with_mlp_for(shape, parameters)
    changed = [
        f"{words} {after:,} instead of {before:,}"
        for words, before, after in (
            ("layers", near.num_hidden_layers, shape.num_hidden_layers),
            ("hidden size", near.hidden_size, shape.hidden_size),
            ("attention heads", near.num_attention_heads, shape.num_attention_heads),
            ("key/value heads", near.num_key_value_heads, shape.num_key_value_heads),
            ("vocabulary", near.vocab_size, shape.vocab_size),
            ("MLP width", near.intermediate_size, shape.intermediate_size),
        )
        if before != after
    ]
    if shape.unplaced_parameters:
        changed.append(f"{shape.unplaced_parameters:,} parameters left over in one vector")
    return shape, f"shape inferred from {near.name}: {', '.join(changed) or 'unchanged'}, to meet {parameters:,} parameters"


def _distance(a: int, b: int) -> float:
    return abs(math.log(a / b))


def _scaled(near: ModelSpec, ratio: float, parameters: int) -> ModelSpec:
    side = ratio ** (1 / 3)
    wanted, groups = near.num_attention_heads * side, near.num_key_value_heads
    heads = groups * round(wanted / groups) if wanted >= groups else max(1, round(wanted))
    hidden = heads * near.head_dim
    return replace(
        near,
        num_hidden_layers=max(1, round(near.num_hidden_layers * side)),
        num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, groups),
        hidden_size=hidden,
        intermediate_size=max(1, round(near.intermediate_size * side)),
        vocab_size=max(1, min(near.vocab_size, parameters // (8 * hidden))),
    )


def _with_mlp_for(shape: ModelSpec, parameters: int) -> ModelSpec:
    """Widen or narrow the MLP so that the count is met from below, and put what is left into one vector."""
    narrow = replace(shape, name="", intermediate_size=1)
    without = parameter_count(narrow)
    per_unit = parameter_count(replace(narrow, intermediate_size=2)) - without
    width = 1 + (parameters - without) // per_unit
    if width < shape.hidden_size:
        raise SpecError(
            f"--params {parameters:,} is too small for a transformer to be inferred; describe its shape with --config"
        )
    left = parameters - without - (width - 1) * per_unit
    return replace(narrow, name=f"{parameters:,} parameters", intermediate_size=width, unplaced_parameters=left)


# A set-up of another program's


class SetupRead(NamedTuple):
    """A request with what a set-up says of it.

    ``filled`` holds only where DeepSpeed's own configuration, which the set-up may name, does not say otherwise.
    """

    request: Request
    filled: Mapping[str, object] = {}
    notes: tuple[str, ...] = ()
    deepspeed: "DeepSpeedPart | None" = None
    kind: "Kind | None" = None
    keys: Mapping[str, str] = {}
    """Under which key the file has a flag's value."""

    @property
    def complete(self) -> Request:
        """The request with what is filled in."""
        request = self.request
        left = {name: value for name, value in self.filled.items() if getattr(request, name) is None}
        steps = request.grad_accum or left.get("grad_accum")
        if steps in (None, 1):  # the only micro-batch is the last
            left.pop("sync_every_micro_batch", None)
        if request.loss not in (None, "full"):
            left.pop("keep_logits", None)
        return replace(request, **left)  # type: ignore[arg-type]  # Request checks every field


def with_setup(request: Request, chosen: Sequence[str] = ()) -> SetupRead:
    """Read the set-up that a request names, if it does, and add what it says; what is said beside it must be the same.

    Raises SpecError in one line where the file is none, says what is not modelled, or contradicts a flag.
    """
    if request.from_file is None:
        return SetupRead(request)
    if not request.from_file:
        raise SpecError("--from '' names no file; give the path of a set-up")
    from zeroplan.catalog.setups.reading import name_of, read_setup  # noqa: PLC0415  only this flag pays for it
    from zeroplan.catalog.setups.told import taken  # noqa: PLC0415

    path = Path(request.from_file)
    setup = read_setup(path, gpus=request.gpus)
    where = f"{name_of(setup.kind)} {str(path)!r}"
    if setup.deepspeed is not None and request.deepspeed_config is not None:
        raise SpecError(f"--deepspeed-config beside {where}, which brings its own; leave one of them out")
    said = {field.name: value for field in fields(request) if (value := getattr(request, field.name)) is not None}
    found = taken(setup, said, where)
    request = replace(request, from_file=None, **found.flags)  # type: ignore[arg-type]  # Request checks every field
    request = replace(request, **_engine_options(request, setup, where, chosen))  # type: ignore[arg-type]
    notes = tuple(f"{shown(path.name)}: {note}" for note in found.notes)
    keys = {name: told.key for name, told in setup.flags.items()}
    return SetupRead(request, found.filled, notes, setup.deepspeed, setup.kind, keys)


def _engine_options(request: Request, setup: "Setup", where: str, chosen: Sequence[str]) -> dict[str, object]:
    """Options of an engine that the file says, beside those that are asked for."""
    from zeroplan.catalog.setups.told import option_taken  # noqa: PLC0415  see with_setup

    groups: dict[str, object] = {}
    for name, told in setup.options.items():
        group, _, option = name.partition(".")
        default = getattr(RecipeSpec(), group)
        now = groups.get(group, getattr(request, group) or default)
        asked = option if group == "deepspeed" else name  # as they are handed on
        value = option_taken(name, told, getattr(now, option), getattr(default, option), where, chosen=asked in chosen)
        groups[group] = replace(now, **{option: value})  # type: ignore[type-var]  # one of the engines' options
    return groups


# DeepSpeed's own configuration


def _with_deepspeed_config(found: SetupRead, model: ModelSpec, chosen: Sequence[str]) -> tuple[Request, tuple[str, ...]]:
    """Add what a DeepSpeed configuration says; what is said beside it must be the same."""
    request = found.request
    if request.deepspeed_config is None and found.deepspeed is None:
        return found.complete, ()
    if request.deepspeed_config == "":
        raise SpecError("--deepspeed-config '' names no file; give the path of a DeepSpeed configuration")
    from zeroplan.catalog.deepspeed_config import Beside, Stated, config_of, parsed_config  # noqa: PLC0415  only this flag pays

    data, where = found.deepspeed or parsed_config(Path(request.deepspeed_config or ""))
    full = found.complete
    beside = Beside(model.hidden_size, request.gpus or 1, full.precision, full.micro_batch, full.grad_accum)
    config = config_of(data, where, beside)
    for name, stated in config.flags.items():
        if getattr(request, name) not in (None, stated.value):
            raise SpecError(_contradiction(f"--{name.replace('_', '-')} {getattr(request, name)}", where, stated))
    asked = _asked_of_deepspeed(request.deepspeed or DeepSpeedOptions(), chosen)
    for name, value in asked.items():
        stated = config.options.get(name, Stated("", value))
        if stated.value != value and not stated.auto:
            raise SpecError(_contradiction(f"deepspeed.{name}={value}", where, stated))
    taken = {name: stated for name, stated in config.options.items() if name not in asked}
    said: dict[str, object] = {name: stated.value for name, stated in config.flags.items()}
    said["deepspeed"] = DeepSpeedOptions(**asked, **{name: stated.value for name, stated in taken.items()})  # type: ignore[arg-type]
    filled_in = [f"{stated}, filled in for auto" for stated in taken.values() if stated.auto]
    file = shown(Path(request.deepspeed_config or full.from_file or _quoted(where)).name)
    notes = tuple(f"{file}: {note}" for note in (*config.notes, *filled_in))
    return found._replace(request=replace(request, **said)).complete, notes  # type: ignore[arg-type]  # Request checks every field


def _quoted(where: str) -> str:
    """The file in what a configuration is called in an error."""
    return where.partition("'")[2].partition("'")[0]


def _asked_of_deepspeed(options: DeepSpeedOptions, chosen: Sequence[str]) -> dict[str, object]:
    """The options that were asked for beside the file: one by one, or visibly, since they are not the default."""
    default, names = DeepSpeedOptions(), [field.name for field in fields(DeepSpeedOptions)]
    return {name: mine for name in names if (mine := getattr(options, name)) != getattr(default, name) or name in chosen}


def _contradiction(mine: str, where: str, stated: object) -> str:
    return f"{mine} contradicts {where}, where {stated}; leave one of them out"


# The rest of the job


def cluster_of(request: Request, extra: Path | None) -> ClusterSpec:
    """The GPU that a request names, and how many share a node."""
    gpu = find_gpu(request.gpu, extra=own_folder(extra, "gpus")) if isinstance(request.gpu, str) else request.gpu
    return ClusterSpec(gpu=gpu, gpus_per_node=request.gpus_per_node, shares=request.shares)


def _on_nodes(recipe: RecipeSpec, cluster: ClusterSpec) -> RecipeSpec:
    """Tell DeepSpeed's quantized gradients, which alone ask, how many GPUs share a node."""
    known = node_size(cluster)
    if known is None or not recipe.deepspeed.zero_quantized_gradients:
        return recipe
    return replace(recipe, deepspeed=replace(recipe.deepspeed, gpus_per_node=known))


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
    if engine in ("ddp", "fsdp2"):
        return 0 if engine == "ddp" else 3
    if gpus == 1:
        return 0
    return 1 if engine == "megatron" else 3


def _recipe(request: Request, stage: Stage) -> RecipeSpec:
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
        "sync_every_micro_batch": request.sync_every_micro_batch,
        "ddp": request.ddp,
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
    for group in ("ddp", "fsdp2", "deepspeed"):
        if group != recipe.engine and getattr(recipe, group) != getattr(defaults, group):
            yield f"the {group} options have no effect: the engine is {recipe.engine}"


def _seq_len(request: Request, model: ModelSpec) -> tuple[int, str]:
    if request.seq_len is not None:
        return request.seq_len, ""
    chosen = min(_DEFAULT_SEQ_LEN, model.max_position_embeddings)
    return chosen, f"sequence length not given: {chosen:,} tokens taken"


def _beyond_positions(complete: JobSpec) -> str:
    longest, asked = complete.model.max_position_embeddings, complete.batch.seq_len
    if asked <= longest:
        return ""
    return f"sequence length {asked:,} is beyond the {longest:,} positions this model was configured for"

"""What a user says about a job, before anything is filled in: the flags of a command line, the keys of a job file."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.spec.adapter import Quantize
from zeroplan.spec.base import Count, CountOrZero, Degree, Spec
from zeroplan.spec.hardware import GpuSpec, SharesSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import PipelineSchedule
from zeroplan.spec.recipe import (
    ActivationModel,
    Attention,
    DdpOptions,
    DeepSpeedOptions,
    Engine,
    Fsdp1Options,
    Fsdp2Options,
    Kernels,
    Loss,
    MegatronOptions,
    OffloadDevice,
    Optimizer,
    OptimizerImpl,
    Precision,
    Recompute,
    Stage,
    WhoseModules,
)

if TYPE_CHECKING:
    from zeroplan.catalog.setups.told import DeepSpeedPart, Kind, OwnModules


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
    pipeline_layers: str | None = None
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
    modules: WhoseModules | None = None
    sync_every_micro_batch: bool | None = None
    ddp: DdpOptions | None = None
    fsdp1: Fsdp1Options | None = None
    fsdp2: Fsdp2Options | None = None
    deepspeed: DeepSpeedOptions | None = None
    megatron: MegatronOptions | None = None
    deepspeed_config: str | None = None
    from_file: str | None = None
    kernels: Kernels | None = None
    """Whose kernels compute, as a complete job says it; no flag."""
    shares: SharesSpec | None = None
    """What a measured step reached of the GPU's rates, likewise."""
    fetched: str | None = None
    """Where the config.json lies that was fetched for ``model``: the command line and :func:`zeroplan.job` fill it in."""

    def overridden_by(self, other: "Request") -> "Request":
        """Return this request with everything that ``other`` says instead; another model replaces the model as a whole."""
        said = {field.name: value for field in fields(other) if (value := getattr(other, field.name)) is not None}
        base = (
            replace(self, **dict.fromkeys((*WAYS_TO_NAME, "treat_as", "fetched"))) if said.keys() & set(WAYS_TO_NAME) else self
        )
        return replace(base, **said)


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
        pipeline_layers=recipe.pipeline_layers,
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
        fsdp1=recipe.fsdp1,
        fsdp2=recipe.fsdp2,
        deepspeed=recipe.deepspeed,
        megatron=recipe.megatron,
        seq_len=batch.seq_len,
        micro_batch=batch.micro_batch_size,
        grad_accum=batch.grad_accum_steps,
        kernels=recipe.kernels,
        shares=complete.cluster.shares,
    )


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
    own: "OwnModules | None" = None
    """Whose modules the file's program trains, where they are modelled."""
    own_units: str = ""
    """The program that shards embedding and head as FSDP2 units of their own, if the file's does."""

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

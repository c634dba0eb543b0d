"""The user's input for a job: the flags of a command line, the keys of a job file."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.resolve.options import (
    BATCH,
    CLUSTER,
    KEEP_LOGITS,
    MODEL,
    OF_BATCH,
    OF_GPUS,
    OF_MODEL,
    OF_RECIPE,
    OF_SPLIT,
    RECIPE,
    SWITCHES,
    Control,
    Option,
    declared,
    value_of,
)
from zeroplan.spec.adapter import Compute as AdapterCompute
from zeroplan.spec.adapter import Quantize, Upcast
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
    """What a user asks of a job: the command line's flags and the keys of a job file, each declared once, here."""

    # fmt: off
    model: Annotated[str | ModelSpec | None, Option(
        "A model of the catalogue (`zeroplan models`), or hf:OWNER/NAME, from the Hugging Face Hub.", MODEL, "NAME",
        control=Control("Model", OF_MODEL, "llama-3.1-8b", kind="text", listed="models"),
    )] = None
    params: Annotated[str | int | float | None, Option(
        "Parameters, as 7e9, 7b or 350M; zeroplan takes a published shape of that size.", MODEL, "COUNT",
    )] = None
    config: Annotated[str | None, Option(
        "A Hugging Face config.json, or a folder that holds one.", MODEL, "PATH",
    )] = None
    profile: Annotated[str | None, Option(
        "A profile of a module (`zeroplan profile`), for a model without formulas.", MODEL, "FILE",
    )] = None
    treat_as: Annotated[str | None, Option(
        "Read the config of an unknown architecture as this family.", MODEL, "FAMILY",
    )] = None
    lora_rank: Annotated[Count | None, Option(
        "Fine-tune low-rank adapters of this rank, as peft's, everything else frozen.", MODEL, "N",
        control=Control("LoRA rank", OF_MODEL, choices=("", "4", "8", "16", "32", "64", "128", "256"),
                        empty="none: train everything"),
    )] = None
    lora_targets: Annotated[str | None, Option(
        "The linear layers that have adapters: all-linear, attention, mlp, or names as q_proj,v_proj. (default: all-linear)",
        MODEL, "NAMES",
    )] = None
    quantize: Annotated[Quantize | None, Option(
        "Hold the frozen weights of the blocks in 4 bits: none, bitsandbytes' nf4, nf4-double, which quantises their scales too, "
        "or gptq (QLoRA). (default: none)", MODEL, "NAME",
        control=Control("Frozen weights (QLoRA)", OF_MODEL, choices=("", "nf4", "nf4-double", "gptq"), empty="not quantised",
                        hint="in 4 bits, beside a LoRA rank"),
    )] = None
    group_size: Annotated[int | None, Option(
        "With --quantize gptq: weights that share a scale, `group_size` of its quantize_config.json; -1: no groups. (default: 128)",
        MODEL, "N",
    )] = None
    lora_compute: Annotated[AdapterCompute | None, Option(
        "How adapters compute under mixed precision: autocast, or fp32, as in a Trainer without `bf16` whose model was loaded in "
        "16 bits. (default: autocast)", MODEL, "NAME",
    )] = None
    upcast: Annotated[Upcast | None, Option(
        "What QLoRA leaves in fp32 under autocast, where weights are whole: all (embedding, norms and head, as peft's "
        "`prepare_model_for_kbit_training` makes them), norms (TRL's SFTTrainer with bf16 casts the others back), or none. "
        "(default: all)", MODEL, "NAME",
    )] = None
    bitsandbytes: Annotated[str | None, Option(
        "The release of bitsandbytes, as 0.43.1: those before 0.43.2 save the inputs of layers in 4 bits. (default: 0.50)", MODEL,
        "VERSION",
    )] = None
    freeze: Annotated[str | None, Option(
        "Parts that are not trained: embedding, norm (the last) and head, separated by commas.", MODEL, "NAMES",
    )] = None
    freeze_layers: Annotated[CountOrZero | None, Option("The first N blocks are not trained. (default: 0)", MODEL, "N")] = None
    gpu: Annotated[str | GpuSpec | None, Option(
        "The GPU (`zeroplan gpus`), to see whether the job fits.", CLUSTER, "NAME", "cluster.gpu",
        control=Control("GPU", OF_GPUS, "h100-sxm-80gb", kind="choice", choices=("",), listed="gpus", empty="any"),
    )] = None
    gpus: Annotated[Degree | None, Option(
        "GPUs in all. (default: 1)", CLUSTER, "N", "mesh.world_size",
        control=Control("GPUs", OF_GPUS, "8", kind="number", most=4096),
    )] = None
    gpus_per_node: Annotated[Count | None, Option(
        "GPUs that share a node. (default: the GPU's usual server)", CLUSTER, "N", "cluster.gpus_per_node",
    )] = None
    replicas: Annotated[Degree | None, Option(
        "Replicas of the sharded group (HSDP). (default: 1)", CLUSTER, "N", "mesh.dp_replicate", searched=True,
        control=Control("Replicas", OF_GPUS, "1", kind="number", most=512, hint="copies of the sharded group (HSDP)"),
    )] = None
    tensor_parallel: Annotated[Degree | None, Option(
        "Tensor-parallel ranks (engines fsdp2, megatron, paper). (default: 1)", CLUSTER, "N", "mesh.tp", searched=True,
        control=Control("Tensor parallelism", OF_SPLIT, "1", kind="number", most=64),
    )] = None
    context_parallel: Annotated[Degree | None, Option(
        "Context-parallel ranks, which share a sequence. (default: 1)", CLUSTER, "N", "mesh.cp", searched=True,
        control=Control("Context parallelism", OF_SPLIT, "1", kind="number", most=64),
    )] = None
    pipeline_parallel: Annotated[Degree | None, Option(
        "Pipeline-parallel ranks, which split the layers. (default: 1)", CLUSTER, "N", "mesh.pp", searched=True,
        control=Control("Pipeline parallelism", OF_SPLIT, "1", kind="number", most=64),
    )] = None
    expert_parallel: Annotated[Degree | None, Option(
        "Expert-parallel ranks, among those that shard. (default: 1)", CLUSTER, "N", "mesh.ep", searched=True,
        control=Control("Expert parallelism", OF_SPLIT, "1", kind="number", most=64),
    )] = None
    stage: Annotated[Stage | None, Option(
        "ZeRO stage. (default: 3; 0 on one GPU and with ddp; 1 with megatron)", RECIPE, "0..3", "recipe.zero_stage", searched=True,
        control=Control("ZeRO stage", OF_RECIPE, "3"),
    )] = None
    engine: Annotated[Engine | None, Option(
        "paper, ddp, fsdp1, fsdp2, deepspeed or megatron. (default: ddp for stages 0 and 1, fsdp2 for 2 and 3)", RECIPE, "NAME",
        "recipe.engine", searched=True, control=Control("Engine", OF_RECIPE, may_be_empty=True),
    )] = None
    precision: Annotated[Precision | None, Option(
        "bf16-mixed, fp16-mixed, bf16 or fp32. (default: bf16-mixed)", RECIPE, "NAME", "recipe.precision",
        control=Control("Precision", OF_RECIPE, "bf16-mixed"),
    )] = None
    optimizer: Annotated[Optimizer | None, Option(
        "adamw, adam, sgd, sgd-momentum, adagrad, rmsprop, adafactor, lion, muon or adamw-8bit. (default: adamw)", RECIPE, "NAME",
        "recipe.optimizer", control=Control("Optimizer", OF_RECIPE, "adamw"),
    )] = None
    optimizer_impl: Annotated[OptimizerImpl | None, Option(
        "How the optimizer steps: foreach, fused or forloop. (default: the engine's own)", RECIPE, "NAME", "recipe.optimizer_impl",
        searched=True, control=Control("Optimizer step", OF_RECIPE, may_be_empty=True),
    )] = None
    offload_optimizer: Annotated[OffloadDevice | None, Option(
        "Where the optimizer's states are, the CPU taking the step: none, cpu or nvme. (default: none)", RECIPE, "DEVICE",
        searched=True, control=Control("Offload optimizer", OF_RECIPE, "none", choices=("none", "cpu")),
    )] = None
    offload_param: Annotated[OffloadDevice | None, Option(
        "Where this rank's share of the parameters is: none, cpu or nvme. (default: none)", RECIPE, "DEVICE", searched=True,
        control=Control("Offload parameters", OF_RECIPE, "none", choices=("none", "cpu")),
    )] = None
    from_file: Annotated[str | None, Option(
        "An existing set-up: DeepSpeed's configuration, accelerate's YAML, TrainingArguments as JSON, torchtitan's configuration; "
        "flags must not contradict it.", RECIPE, "FILE",
    )] = None
    deepspeed_config: Annotated[str | None, Option(
        'A DeepSpeed configuration (JSON), "auto" as transformers\' Trainer fills it in; flags must not contradict it.', RECIPE,
        "FILE",
    )] = None
    recompute: Annotated[Recompute | None, Option(
        "Activation checkpointing: none, selective or full. (default: none)", RECIPE, "NAME", "recipe.recompute", searched=True,
        control=Control("Recomputation", OF_RECIPE, "none"),
    )] = None
    recompute_layers: Annotated[Count | None, Option(
        "Recompute the first N blocks only. (default: all)", RECIPE, "N", "recipe.recompute_layers", searched=True,
    )] = None
    reentrant: Annotated[bool | None, Option(
        "Checkpoints of recompute full are reentrant, and hold a block's output while it goes backward (engine ddp). (default: as "
        "the release of transformers makes them, reentrant before 5.0)", SWITCHES, sets="recipe.reentrant",
    )] = None
    offload_activations: Annotated[bool | None, Option(
        "Keep what blocks save for their backward in pinned host memory until then (torch's offload_wrapper around every block).",
        SWITCHES, sets="recipe.offload_activations",
    )] = None
    lora_dropout: Annotated[bool | None, Option(
        "Adapters have dropout (`lora_dropout` above 0): each keeps a copy of its input, and a mask.", SWITCHES,
    )] = None
    attention: Annotated[Attention | None, Option(
        "sdpa, flash or eager. (default: sdpa)", RECIPE, "NAME", "recipe.attention",
        control=Control("Attention", OF_RECIPE, "sdpa"),
    )] = None
    loss: Annotated[Loss | None, Option(
        "full (all logits at once), chunked (torchtitan) or fused (Liger). (default: full)", RECIPE, "NAME", "recipe.loss",
        searched=True, control=Control("Loss", OF_RECIPE, "full"),
    )] = None
    pipeline_schedule: Annotated[PipelineSchedule | None, Option(
        "gpipe, 1f1b, interleaved-1f1b, interleaved-zero-bubble or zbv. (default: 1f1b)", RECIPE, "NAME",
        "recipe.pipeline_schedule", searched=True,
    )] = None
    pipeline_stages_per_rank: Annotated[Degree | None, Option(
        "Stages on each pipeline rank. (default: 1, or 2 where the schedule takes several)", RECIPE, "N",
        "recipe.pipeline_stages_per_rank", searched=True,
    )] = None
    pipeline_layers: Annotated[str | None, Option(
        "Layers of each pipeline stage, as 7,9,9,7. (default: as torchtitan cuts them)", RECIPE, "LIST",
        "recipe.pipeline_layers", searched=True,
    )] = None
    fused_kernels: Annotated[str | None, Option(
        "What Unsloth's Triton kernels replace, as fms-acceleration installs them, separated by commas: cross-entropy (written "
        "over the logits), rms-norm, rope, lora (attention's projections of QLoRA). (default: none)", RECIPE, "NAMES",
        "recipe.fused_kernels",
    )] = None
    keep_logits: Annotated[bool | Literal["fp32"] | None, Option(
        "Whether the loop holds the model's output during backward: no, yes, or fp32, upcast as accelerate's does. (default: no)",
        RECIPE, "NAME", "recipe.keep_logits",
        control=Control("Logits in backward", OF_RECIPE, "no", choices=tuple(KEEP_LOGITS),
                        hint="whether the training loop keeps the model's output"),
    )] = None
    modules: Annotated[WhoseModules | None, Option(
        "Whose modules train: transformers, or torchtitan's own Llama 3 (engine fsdp2). (default: transformers, or those of the "
        "program whose file --from reads)", RECIPE, "NAME",
    )] = None
    transformers: Annotated[str | None, Option(
        "The release of transformers whose modules train, as 4.48: older ones hold more (4.39 to 5.23). (default: 5.23)", RECIPE,
        "VERSION", "recipe.transformers",
    )] = None
    activations: Annotated[ActivationModel | None, Option(
        "Count them by the module, or by megatron, its paper's formula (engine paper). (default: module)", RECIPE, "NAME",
        "recipe.activation_model",
    )] = None
    sequence_parallel: Annotated[bool | None, Option(
        "Megatron's formulas: split norms and dropouts over tensor-parallel ranks too.", SWITCHES, sets="recipe.sequence_parallel",
    )] = None
    sync_every_micro_batch: Annotated[bool | None, Option(
        "Reduce gradients after every micro-batch (default), or with --no-sync-every-micro-batch after the last one only "
        "(no_sync).", SWITCHES, sets="recipe.sync_every_micro_batch",
    )] = None
    ddp: Annotated[DdpOptions | None, Option(sets="recipe.ddp")] = None
    fsdp1: Annotated[Fsdp1Options | None, Option(sets="recipe.fsdp1")] = None
    fsdp2: Annotated[Fsdp2Options | None, Option(sets="recipe.fsdp2")] = None
    deepspeed: Annotated[DeepSpeedOptions | None, Option(sets="recipe.deepspeed")] = None
    megatron: Annotated[MegatronOptions | None, Option(sets="recipe.megatron")] = None
    seq_len: Annotated[Count | None, Option(
        "Tokens per sequence. (default: 4096, or the model's longest)", BATCH, "TOKENS", "batch.seq_len",
        control=Control("Tokens per sequence", OF_BATCH, "4096", kind="number", least=128, most=1_048_576),
    )] = None
    micro_batch: Annotated[Count | None, Option(
        "Sequences in one forward pass of a data-parallel rank: a GPU, or those that split a model or a sequence. (default: 1)",
        BATCH, "N", "batch.micro_batch_size", searched=True,
        control=Control("Sequences per micro-batch", OF_BATCH, "1", kind="number", most=256),
    )] = None
    grad_accum: Annotated[Count | None, Option(
        "Micro-batches per optimizer step. (default: 1)", BATCH, "N", "batch.grad_accum_steps", searched=True,
        control=Control("Micro-batches per step", OF_BATCH, "1", kind="number", most=256),
    )] = None
    # fmt: on
    kernels: Annotated[Kernels | None, Option(sets="recipe.kernels")] = None
    """Whose kernels compute, as a complete job says it; no flag."""
    shares: Annotated[SharesSpec | None, Option(sets="cluster.shares")] = None
    """What a measured step reached of the GPU's rates, likewise."""
    fetched: str | None = None
    """The config.json fetched for ``model``; the command line and :func:`zeroplan.job` fill it in."""

    def overridden_by(self, other: "Request") -> "Request":
        """Return this request with the values of ``other`` in place of its own; another model replaces the whole model."""
        said = {field.name: value for field in fields(other) if (value := getattr(other, field.name)) is not None}
        base = (
            replace(self, **dict.fromkeys((*WAYS_TO_NAME, "treat_as", "fetched"))) if said.keys() & set(WAYS_TO_NAME) else self
        )
        return replace(base, **said)


#: Every option of a job, by its name.
OPTIONS = declared(Request)


def fields_set(request: Request, part: str) -> dict[str, object]:
    """Return what a request gives for the fields of one part of a job (``recipe``), by the field's name there."""
    given = ((one.option.sets.partition("."), getattr(request, one.field)) for one in OPTIONS.values())
    return {name: value for (where, _, name), value in given if where == part and value is not None}


def request_of(complete: JobSpec) -> Request:
    """Return a complete job as a request, so that flags can override any part of it."""
    said = {name: value_of(complete, one) for name, one in OPTIONS.items() if one.option.sets}
    return Request(model=complete.model, **said)  # type: ignore[arg-type]  # Request checks every field


class SetupRead(NamedTuple):
    """A request with the values of a set-up.

    ``filled`` holds unless DeepSpeed's own configuration, which the set-up may name, contains another value.
    """

    request: Request
    filled: Mapping[str, object] = {}
    notes: tuple[str, ...] = ()
    deepspeed: "DeepSpeedPart | None" = None
    kind: "Kind | None" = None
    keys: Mapping[str, str] = {}
    """The file's keys for flags' values."""
    own: "OwnModules | None" = None
    """The modules that the file's program trains, if they are modelled."""
    own_units: str = ""
    """The program that makes embedding and head FSDP2 units of their own, if the file's does."""

    @property
    def complete(self) -> Request:
        """The request with the filled-in values."""
        request = self.request
        left = {name: value for name, value in self.filled.items() if getattr(request, name) is None}
        steps = request.grad_accum or left.get("grad_accum")
        if steps in (None, 1):  # the only micro-batch is the last
            left.pop("sync_every_micro_batch", None)
        if request.loss not in (None, "full"):
            left.pop("keep_logits", None)
        return replace(request, **left)  # type: ignore[arg-type]  # Request checks every field

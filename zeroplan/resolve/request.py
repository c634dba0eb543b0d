"""The user's input for a job. Every flag of the command line, which is also a key of a job file, is declared here."""

from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Literal, NamedTuple, get_args

from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.catalog.setups.setup import Setup
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
    SWITCH,
    SWITCHES,
    Control,
    Option,
    declared,
    value_of,
)
from zeroplan.spec.adapter import Base, Dora, Quantize, Upcast
from zeroplan.spec.adapter import Compute as AdapterCompute
from zeroplan.spec.base import Count, CountOrZero, Degree, Spec
from zeroplan.spec.hardware import GpuSpec, Kernels, SharesSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import PipelineSchedule
from zeroplan.spec.recipe import (
    ActivationModel,
    Attention,
    DdpOptions,
    DeepSpeedOptions,
    Engine,
    Float8Recipe,
    Fsdp1Options,
    Fsdp2Options,
    LinearAttention,
    LogProbs,
    Loss,
    MegatronOptions,
    OffloadDevice,
    Optimizer,
    OptimizerImpl,
    Precision,
    Recompute,
    Stage,
    StepKernels,
    WhoseModules,
    kernels_under,
)


class Request(Spec):
    """The values of a job's flags or of a job file's keys; None for those that were not given."""

    # fmt: off
    model: str | ModelSpec | None = field(default=None, metadata={"option": Option(
        "A model of the catalogue (`zeroplan models`), or hf:OWNER/NAME, from the Hugging Face Hub.", MODEL, "NAME",
        control=Control("Model", OF_MODEL, "llama-3.1-8b", kind="text", listed="models"),
    )})
    params: str | int | float | None = field(default=None, metadata={"option": Option(
        "Number of parameters, such as 7e9, 7b or 350M. zeroplan scales a published shape to it.", MODEL, "COUNT",
    )})
    config: str | None = field(default=None, metadata={"option": Option(
        "A Hugging Face config.json, or a folder that contains one; or the content itself, which begins with a brace.",
        MODEL, "PATH",
        control=Control("config.json", OF_MODEL, kind="text",
                        hint="the content of a model's config.json: paste it, or drop the file on the page"),
    )})
    profile: str | None = field(default=None, metadata={"option": Option(
        "A profile of a module (`zeroplan profile`), for an architecture that zeroplan does not know.", MODEL, "FILE",
    )})
    treat_as: str | None = field(default=None, metadata={"option": Option(
        "Count an unknown architecture as this family.", MODEL, "FAMILY",
    )})
    lora_rank: Count | None = field(default=None, metadata={"option": Option(
        "Fine-tune with LoRA adapters of this rank, as peft builds them. All other weights are frozen.", MODEL, "N",
        control=Control("LoRA rank", OF_MODEL, choices=("", "4", "8", "16", "32", "64", "128", "256"),
                        empty="none: train everything"),
    )})
    lora_targets: str | None = field(default=None, metadata={"option": Option(
        "The linear layers that get adapters: all-linear, attention, mlp, or names such as q_proj,v_proj. (default: "
        "all-linear)",
        MODEL, "NAMES",
    )})
    modules_to_save: str | None = field(default=None, metadata={"option": Option(
        "Modules trained whole beside adapters (peft's modules_to_save): embed_tokens, lm_head. (default: none)",
        MODEL, "NAMES",
    )})
    quantize: Quantize | None = field(default=None, metadata={"option": Option(
        "How the frozen weights of the blocks are stored (QLoRA): in 4 bits: nf4 or nf4-double "
        "(bitsandbytes; nf4-double also quantises the scales), nf4-torchao (torchtune), or gptq; or int8 (bitsandbytes' 8 bits). "
        "(default: none)",
        MODEL, "NAME",
        control=Control("Frozen weights (QLoRA)", OF_MODEL, choices=("", "nf4", "nf4-double", "nf4-torchao", "gptq", "int8"),
                        empty="not quantised",
                        hint="in 4 or 8 bits, beside a LoRA rank"),
    )})
    group_size: int | None = field(default=None, metadata={"option": Option(
        "With --quantize gptq: the number of weights that share a scale (`group_size` in quantize_config.json). -1: no "
        "groups. (default: 128)",
        MODEL, "N",
    )})
    lora_compute: AdapterCompute | None = field(default=None, metadata={"option": Option(
        "How adapters compute under mixed precision: autocast (in 16 bits), or fp32, as a Trainer without "
        "`bf16` does in a model loaded in 16 bits. (default: autocast)", MODEL, "NAME",
    )})
    lora_base: Base | None = field(default=None, metadata={"option": Option(
        "The dtype of frozen weights beside adapters, under FSDP2 and DDP: compute (16 bits) or fp32. (default: compute)",
        MODEL, "NAME",
    )})
    lora_runs: int | None = field(default=None, metadata={"option": Option(
        "prime-rl's modules, with this many adapters beside each layer (`max_concurrent_runs`). (default: one adapter, peft's)",
        MODEL, "N",
    )})
    lora_learning: int | None = field(default=None, metadata={"option": Option(
        "With --lora-runs: how many of the adapters have optimizer states. (default: all)", MODEL, "N",
    )})
    lora_looped: bool | None = field(default=None, metadata={"option": Option(
        "With --lora-runs: products run one adapter after the other, as without Hopper before 30 January 2026.",
        SWITCHES,
    )})
    upcast: Upcast | None = field(default=None, metadata={"option": Option(
        "With --quantize under mixed precision: which unquantised weights are converted to fp32. all: "
        "embedding, norms and head (as peft does). norms: only norms (TRL's SFTTrainer with bf16). none. (default: all)",
        MODEL, "NAME",
    )})
    bitsandbytes: str | None = field(default=None, metadata={"option": Option(
        "The release of bitsandbytes, such as 0.43.1. Before 0.43.2, layers in 4 bits save their inputs for the backward; "
        "before 0.47, they compute in fp32 after norms in fp32. (default: 0.50)", MODEL, "VERSION",
    )})
    freeze: str | None = field(default=None, metadata={"option": Option(
        "Parts outside the blocks that are not trained, with commas: embedding, norm (the last one) and head; of a "
        "vision-language model also tower and projector. none: nothing.",
        MODEL, "NAMES",
    )})
    freeze_layers: CountOrZero | None = field(default=None, metadata={"option": Option(
        "The first N blocks are not trained. (default: 0)", MODEL, "N",
    )})
    gpu: str | GpuSpec | None = field(default=None, metadata={"option": Option(
        "The GPU (`zeroplan gpus`), to see whether the job fits.", CLUSTER, "NAME", "cluster.gpu",
        control=Control("GPU", OF_GPUS, "h100-sxm-80gb", kind="choice", choices=("",), listed="gpus", empty="any"),
    )})
    gpus: Degree | None = field(default=None, metadata={"option": Option(
        "Number of GPUs. (default: 1)", CLUSTER, "N", "mesh.world_size",
        control=Control("GPUs", OF_GPUS, "8", kind="number", most=4096),
    )})
    gpus_per_node: Count | None = field(default=None, metadata={"option": Option(
        "GPUs that share a node. (default: the GPU's usual server)", CLUSTER, "N", "cluster.gpus_per_node",
    )})
    network: Count | None = field(default=None, metadata={"option": Option(
        "Gbit/s of a network card between nodes, in each direction. (default: the GPU's usual server)", CLUSTER, "N",
        "cluster.network_gbit_per_s",
    )})
    nics_per_node: Count | None = field(default=None, metadata={"option": Option(
        "Network cards of a node, which its GPUs share. (default: one per GPU)", CLUSTER, "N", "cluster.nics_per_node",
    )})
    replicas: Degree | None = field(default=None, metadata={"option": Option(
        "Replicas of the sharded group (HSDP). (default: 1)", CLUSTER, "N", "mesh.dp_replicate", searched=True,
        control=Control("Replicas", OF_GPUS, "1", kind="number", most=512, hint="copies of the sharded group (HSDP)"),
    )})
    tensor_parallel: Degree | None = field(default=None, metadata={"option": Option(
        "Tensor-parallel ranks (engines fsdp2, megatron, paper). (default: 1)", CLUSTER, "N", "mesh.tp", searched=True,
        control=Control("Tensor parallelism", OF_SPLIT, "1", kind="number", most=64),
    )})
    context_parallel: Degree | None = field(default=None, metadata={"option": Option(
        "Context-parallel ranks, which share a sequence. (default: 1)", CLUSTER, "N", "mesh.cp", searched=True,
        control=Control("Context parallelism", OF_SPLIT, "1", kind="number", most=64),
    )})
    pipeline_parallel: Degree | None = field(default=None, metadata={"option": Option(
        "Pipeline-parallel ranks, which split the layers. (default: 1)", CLUSTER, "N", "mesh.pp", searched=True,
        control=Control("Pipeline parallelism", OF_SPLIT, "1", kind="number", most=64),
    )})
    expert_parallel: Degree | None = field(default=None, metadata={"option": Option(
        "Expert-parallel ranks, which hold different experts. They are among the ranks that shard. (default: 1)",
        CLUSTER, "N", "mesh.ep", searched=True,
        control=Control("Expert parallelism", OF_SPLIT, "1", kind="number", most=64),
    )})
    stage: Stage | None = field(default=None, metadata={"option": Option(
        "ZeRO stage. (default: 3; 0 on one GPU and with ddp; 1 with megatron)", RECIPE, "0..3", "recipe.zero_stage", searched=True,
        control=Control("ZeRO stage", OF_RECIPE, "3"),
    )})
    engine: Engine | None = field(default=None, metadata={"option": Option(
        "paper, ddp, fsdp1, fsdp2, deepspeed or megatron. (default: ddp for stages 0 and 1, fsdp2 for 2 and 3)", RECIPE, "NAME",
        "recipe.engine", searched=True, control=Control("Engine", OF_RECIPE, may_be_empty=True),
    )})
    precision: Precision | None = field(default=None, metadata={"option": Option(
        "bf16-mixed, fp16-mixed, bf16 or fp32. (default: bf16-mixed)", RECIPE, "NAME", "recipe.precision",
        control=Control("Precision", OF_RECIPE, "bf16-mixed"),
    )})
    optimizer: Optimizer | None = field(default=None, metadata={"option": Option(
        f"One of {', '.join(get_args(Optimizer))}. (default: adamw)", RECIPE, "NAME",
        "recipe.optimizer", control=Control("Optimizer", OF_RECIPE, "adamw"),
    )})
    optimizer_impl: OptimizerImpl | None = field(default=None, metadata={"option": Option(
        "How the optimizer steps: foreach, fused or forloop. (default: the engine's own)", RECIPE, "NAME", "recipe.optimizer_impl",
        searched=True, control=Control("Optimizer step", OF_RECIPE, may_be_empty=True),
    )})
    offload_optimizer: OffloadDevice | None = field(default=None, metadata={"option": Option(
        "Where the optimizer's states are kept: none (on the GPU), cpu or nvme. With cpu and nvme the CPU runs the step. "
        "(default: none)", RECIPE, "DEVICE",
        searched=True, control=Control("Offload optimizer", OF_RECIPE, "none", choices=("none", "cpu")),
    )})
    offload_param: OffloadDevice | None = field(default=None, metadata={"option": Option(
        "Where this rank's share of the parameters is kept: none (on the GPU), cpu or nvme. (default: none)",
        RECIPE, "DEVICE", searched=True,
        control=Control("Offload parameters", OF_RECIPE, "none", choices=("none", "cpu")),
    )})
    from_file: str | None = field(default=None, metadata={"option": Option(
        "An existing configuration: DeepSpeed's, accelerate's, TrainingArguments, LLaMA-Factory's, Axolotl's, torchtitan's, "
        "verl's, ms-swift's, OpenRLHF's, torchtune's, NeMo AutoModel's, Megatron-LM's, nanotron's or Lightning's, or a shell "
        "script that runs one. Flags must not contradict it.", RECIPE, "FILE",
    )})
    deepspeed_config: str | None = field(default=None, metadata={"option": Option(
        'A DeepSpeed configuration (JSON). Values "auto" are filled in as transformers\' Trainer does. Flags must not '
        "contradict it.", RECIPE,
        "FILE",
    )})
    recompute: Recompute | None = field(default=None, metadata={"option": Option(
        "Activation checkpointing: none, selective or full. (default: none)", RECIPE, "NAME", "recipe.recompute", searched=True,
        control=Control("Recomputation", OF_RECIPE, "none"),
    )})
    recompute_layers: Count | None = field(default=None, metadata={"option": Option(
        "Recompute the first N blocks only. (default: all)", RECIPE, "N", "recipe.recompute_layers", searched=True,
    )})
    reentrant: bool | None = field(default=None, metadata={"option": Option(
        "With --recompute full and engine ddp: reentrant checkpoints (`use_reentrant`), which hold a block's output "
        "during its backward. (default: as in the release of transformers, reentrant before 5.0)",
        SWITCHES, sets="recipe.reentrant",
    )})
    offload_activations: bool | None = field(default=None, metadata={"option": Option(
        "Keep what blocks save for their backward in pinned host memory until then (torch's offload_wrapper around every block).",
        SWITCHES, sets="recipe.offload_activations",
    )})
    quantize_experts: bool | None = field(default=None, metadata={"option": Option(
        "With --quantize nf4 or nf4-double: the experts are in 4 bits, too (Axolotl's `quantize_moe_experts`).", SWITCHES,
    )})
    lora_dropout: bool | None = field(default=None, metadata={"option": Option(
        "Adapters use dropout (`lora_dropout` above 0). Each then keeps a copy of its input and a mask.", SWITCHES,
    )})
    dora: Dora | None = field(default=None, metadata={"option": Option(
        "DoRA's trained magnitudes beside adapters, as peft (`use_dora`) or torchtune runs them: none, peft or torchtune. "
        "(default: none)", MODEL, "NAME",
    )})
    attention: Attention | None = field(default=None, metadata={"option": Option(
        "The kernel of attention: sdpa, flash or eager. (default: sdpa)", RECIPE, "NAME", "recipe.attention",
        control=Control("Attention", OF_RECIPE, "sdpa"),
    )})
    linear_attention: LinearAttention | None = field(default=None, metadata={"option": Option(
        "What runs linear attention and Mamba-2: kernels (of flash-linear-attention, mamba_ssm and causal-conv1d) or torch "
        "(transformers' own operators). (default: kernels where they are modelled)", RECIPE, "NAME", "recipe.linear_attention",
    )})
    padded: bool | None = field(default=None, metadata={"option": Option(
        "Sequences of a batch end in padding: each block keeps a mask (sdpa) or copies without padding (flash). Padding counts "
        "as tokens.", SWITCHES, sets="recipe.padded",
    )})
    loss: Loss | None = field(default=None, metadata={"option": Option(
        "How the loss is computed: full (all logits at once), chunked (in pieces, as in torchtitan), fused (Liger's "
        "kernel) or log-probs (in tiles, as in TRL's trainers). (default: full)", RECIPE, "NAME", "recipe.loss",
        searched=True, control=Control("Loss", OF_RECIPE, "full"),
    )})
    pipeline_schedule: PipelineSchedule | None = field(default=None, metadata={"option": Option(
        "gpipe, 1f1b, interleaved-1f1b, interleaved-zero-bubble or zbv. (default: 1f1b)", RECIPE, "NAME",
        "recipe.pipeline_schedule", searched=True, control=Control("Pipeline schedule", OF_SPLIT, may_be_empty=True),
    )})
    pipeline_stages_per_rank: Degree | None = field(default=None, metadata={"option": Option(
        "Stages on each pipeline rank. (default: 1, or 2 if the schedule needs several)", RECIPE, "N",
        "recipe.pipeline_stages_per_rank", searched=True,
        control=Control("Stages per pipeline rank", OF_SPLIT, choices=("", *map(str, range(2, 33)))),
    )})
    pipeline_layers: str | None = field(default=None, metadata={"option": Option(
        "Number of layers in each pipeline stage, such as 7,9,9,7. (default: as torchtitan splits them)", RECIPE, "LIST",
        "recipe.pipeline_layers", searched=True,
    )})
    fused_kernels: str | None = field(default=None, metadata={"option": Option(
        "Parts run by other kernels, with commas. Unsloth's: cross-entropy, rms-norm, rope, "
        "lora (QLoRA). Axolotl's: axolotl-lora, axolotl-qat. Liger's: rope, liger-rms-norm, "
        "liger-swiglu. torchtune's: loss-in-pieces, int4-qat. torch.compile's: "
        "compiled-blocks, compiled-loss. prime-rl's: prime-rl-experts. (default: none)", RECIPE, "NAMES",
        "recipe.fused_kernels",
    )})
    float8_recipe: Float8Recipe | None = field(default=None, metadata={"option": Option(
        "torchao's float8 for the linear layers of the blocks: tensorwise or rowwise; on Blackwell also its prototypes mxfp8 and "
        "nvfp4. The head stays in bf16. (default: none)", RECIPE, "NAME", "recipe.float8_recipe",
    )})
    kernels: StepKernels | None = field(default=None, metadata={"option": Option(
        "How norms, rotary positions, gated products and the loss run: eager (operator by operator), fused (one kernel each) "
        "or compiled (torch.compile). Changes only the step time. (default: fused under Megatron-Core, compiled for "
        "compiled-blocks, else eager)", RECIPE, "NAME", "recipe.step_kernels",
    )})
    keep_logits: bool | Literal["fp32"] | None = field(default=None, metadata={"option": Option(
        "Whether the training loop still holds the model's output during the backward: no, yes, or fp32 (converted to "
        "fp32, as by accelerate). (default: no)",
        RECIPE, "NAME", "recipe.keep_logits",
        control=Control("Logits in backward", OF_RECIPE, "no", choices=tuple(KEEP_LOGITS),
                        hint="whether the training loop keeps the model's output"),
    )})
    modules: WhoseModules | None = field(default=None, metadata={"option": Option(
        "Whose implementation of the model is trained: transformers, or torchtitan's own Llama 3 of release 0.2.2 "
        "(torchtitan) or 0.3.0 (torchtitan-0.3), with engine fsdp2. (default: transformers, or the file's)",
        RECIPE, "NAME",
    )})
    transformers: str | None = field(default=None, metadata={"option": Option(
        "The release of transformers, such as 4.48 (4.39 to 5.24). Older ones need more memory. (default: "
        "5.23)", RECIPE,
        "VERSION", "recipe.transformers",
    )})
    activations: ActivationModel | None = field(default=None, metadata={"option": Option(
        "How activations are counted: module (tensor by tensor), or megatron (the formula of Megatron's paper; engine "
        "paper). (default: module)", RECIPE, "NAME",
        "recipe.activation_model",
    )})
    sequence_parallel: bool | None = field(default=None, metadata={"option": Option(
        "With engine megatron, or --activations megatron: tensor-parallel ranks also split norms and dropouts, along the "
        "sequence.", SWITCHES, sets="recipe.sequence_parallel",
        control=Control("Sequence parallelism", OF_SPLIT, "no", choices=SWITCH, hint="with engine megatron"),
    )})
    sync_every_micro_batch: bool | None = field(default=None, metadata={"option": Option(
        "Reduce gradients after every micro-batch (default). --no-sync-every-micro-batch: after the last one only "
        "(no_sync).", SWITCHES, sets="recipe.sync_every_micro_batch",
    )})
    ddp: DdpOptions | None = field(default=None, metadata={"option": Option(sets="recipe.ddp")})
    fsdp1: Fsdp1Options | None = field(default=None, metadata={"option": Option(sets="recipe.fsdp1")})
    fsdp2: Fsdp2Options | None = field(default=None, metadata={"option": Option(sets="recipe.fsdp2")})
    deepspeed: DeepSpeedOptions | None = field(default=None, metadata={"option": Option(sets="recipe.deepspeed")})
    megatron: MegatronOptions | None = field(default=None, metadata={"option": Option(sets="recipe.megatron")})
    seq_len: Count | None = field(default=None, metadata={"option": Option(
        "Tokens per sequence. (default: 4096, or the model's longest)", BATCH, "TOKENS", "batch.seq_len",
        control=Control("Tokens per sequence", OF_BATCH, "4096", kind="number", least=128, most=1_048_576),
    )})
    images: CountOrZero | None = field(default=None, metadata={"option": Option(
        "Images of each sequence, for a vision-language model. (default: 1)", BATCH, "N",
    )})
    image_size: str | None = field(default=None, metadata={"option": Option(
        "Width and height of an image in pixels, such as 1024x768. The model's processor turns them into tokens. (default: "
        "768x768)", BATCH, "WxH",
    )})
    frames: Count | None = field(default=None, metadata={"option": Option(
        "Frames of a video, for a diffusion transformer: 4 n + 1. (default: 81)", BATCH, "N",
    )})
    text_tokens: Count | None = field(default=None, metadata={"option": Option(
        "Tokens of text beside a diffusion transformer's picture. (default: its pipeline's)", BATCH, "N",
    )})
    lengths: str | None = field(default=None, metadata={"option": Option(
        "For sequences of several lengths: a file with a length per line, JSON Lines (length or token ids; FILE:FIELD), or "
        "lognormal(MEAN,SPREAD,SEQUENCES), SPREAD being the logarithm's standard deviation. Estimates the longest "
        "micro-batch of a run, and the peaks of its steps. --seq-len cuts sequences.", BATCH, "FILE",
    )})
    padding_free: bool | None = field(default=None, metadata={"option": Option(
        "With --lengths: join the sequences of a micro-batch instead of padding them (needs --attention flash).", SWITCHES,
    )})
    packing: bool | None = field(default=None, metadata={"option": Option(
        "With --lengths: pack sequences into --seq-len tokens, as TRL's bfd. --micro-batch counts packs (needs "
        "--attention flash).", SWITCHES,
    )})
    token_budget: Count | None = field(default=None, metadata={"option": Option(
        "With --lengths: at most this many tokens in a micro-batch, as verl's `max_token_len_per_gpu`. A rank's step has "
        "--micro-batch x --grad-accum sequences (needs --attention flash).", BATCH, "TOKENS",
    )})
    micro_batch: Count | None = field(default=None, metadata={"option": Option(
        "Sequences in one forward pass of a data-parallel rank. Ranks that split a model or a sequence count as one. "
        "(default: 1)",
        BATCH, "N", "batch.micro_batch_size", searched=True,
        control=Control("Sequences per micro-batch", OF_BATCH, "1", kind="number", most=256),
    )})
    grad_accum: Count | None = field(default=None, metadata={"option": Option(
        "Micro-batches per optimizer step. (default: 1)", BATCH, "N", "batch.grad_accum_steps", searched=True,
        control=Control("Micro-batches per step", OF_BATCH, "1", kind="number", most=256),
    )})
    imbalance: float | str | None = field(default=None, metadata={"option": Option(
        "With --expert-parallel: tokens of the fullest rank as a multiple of the mean, or a file with each expert's load, or "
        "lognormal(SPREAD). (default: 1)", BATCH, "X", "recipe.imbalance",
    )})
    # fmt: on
    device_kernels: Kernels | None = field(default=None, metadata={"option": Option(sets="recipe.kernels")})
    """``kernels`` of a complete job; it has no flag."""
    log_probs: LogProbs | None = field(default=None, metadata={"option": Option(sets="recipe.log_probs")})
    """How a trainer of another program's file gets its log-probabilities; it has no flag."""
    inputs_in_flight: CountOrZero | None = field(default=None, metadata={"option": Option(sets="recipe.inputs_in_flight")})
    """Saved tensors of another program's file that are on their way to the host; it has no flag."""
    prompt_len: Count | None = field(default=None, metadata={"option": Option(sets="recipe.prompt_len")})
    """Tokens that the trainer of another program's file does not score; it has no flag."""
    longest_seq_len: Count | None = field(default=None, metadata={"option": Option(sets="batch.longest_seq_len")})
    """The longest possible sequence of a complete job with drawn lengths; it has no flag."""
    shares: SharesSpec | None = field(default=None, metadata={"option": Option(sets="cluster.shares")})
    """The measured shares of the GPU's rates in a complete job; it has no flag."""
    fetched: str | None = None
    """The config.json fetched for ``model``; the command line and :func:`zeroplan.job` fill it in."""

    def overridden_by(self, other: "Request") -> "Request":
        """Return this request overridden by the values of ``other``. A model in ``other`` replaces all fields of the model."""
        values = {field.name: value for field in fields(other) if (value := getattr(other, field.name)) is not None}
        own = replace(self, longest_seq_len=None) if "seq_len" in values else self  # all lengths are then equal
        base = (
            replace(own, **dict.fromkeys((*WAYS_TO_NAME, "treat_as", "fetched"))) if values.keys() & set(WAYS_TO_NAME) else own
        )
        return replace(base, **values)


#: Every option of a job, by its name.
OPTIONS = declared(Request)


def fields_set(request: Request, part: str) -> dict[str, object]:
    """Return the request's values for one part of a job, such as ``recipe``, by the name of the part's field."""
    given = ((one.option.sets.partition("."), getattr(request, one.field)) for one in OPTIONS.values())
    return {name: value for (where, _, name), value in given if where == part and value is not None}


def request_of(complete: JobSpec) -> Request:
    """Return a complete job as a request, so that flags can override parts of it."""
    values = {name: value_of(complete, one) for name, one in OPTIONS.items() if one.option.sets}
    return Request(model=complete.model, **values)  # type: ignore[arg-type]  # Request checks every field


class SetupRead(NamedTuple):
    """A request with the values of a configuration file.

    ``filled`` has values that DeepSpeed's own configuration, which the file may name, can still override.
    """

    request: Request
    filled: Mapping[str, object] = {}
    notes: tuple[str, ...] = ()
    setup: Setup = Setup()
    """What the file contains."""

    @property
    def complete(self) -> Request:
        """The request with ``filled`` for values that it lacks."""
        request = self.request
        left = {name: value for name, value in self.filled.items() if getattr(request, name) is None}
        steps = request.grad_accum or left.get("grad_accum")
        if steps in (None, 1):  # without accumulation the option has no effect
            left.pop("sync_every_micro_batch", None)
        loss = request.loss or left.get("loss", "full")
        if loss != "full":
            left.pop("keep_logits", None)
        if loss != "log-probs":
            left.pop("log_probs", None)
        if not (request.offload_activations or left.get("offload_activations")):
            left.pop("inputs_in_flight", None)
        engine = request.engine or left.get("engine") or ("ddp" if request.stage in (0, 1) else None)
        if engine != "ddp" or (request.recompute or left.get("recompute")) != "full":
            left.pop("reentrant", None)
        if "fused_kernels" in left:
            left["fused_kernels"] = kernels_under(str(engine), str(left["fused_kernels"]))
        return replace(request, **left)  # type: ignore[arg-type]  # Request checks every field

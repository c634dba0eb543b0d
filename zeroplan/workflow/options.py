"""The workflows, and their options beside the job's flags. Each option has TRL's or verl's name."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from zeroplan.errors import SpecError
from zeroplan.spec.recipe import LogProbs, Loss

Name = Literal["sft", "dpo", "kto", "orpo", "reward", "distill", "grpo", "ppo"]


class Workflow(NamedTuple):
    """The properties of a workflow."""

    says: str
    ran: tuple[str, ...] = ()
    """Engines and stages with which the trainer ran in a dry run, the rows of tests/workflow/trl.json."""
    sequences: int = 1
    """Sequences per example: 2 for pairs of a chosen and a rejected completion."""
    loss: Loss = "log-probs"
    head_rows: int | None = None
    """Outputs of the head; None for the vocabulary."""
    compares: bool = False
    """Whether there is always a reference model."""
    log_probs: LogProbs = "tiles"
    """``divergence``: a teacher model runs a forward in every step."""
    generates: bool = False
    """Whether a rollout comes before the training step."""


# fmt: off
WORKFLOWS: dict[Name, Workflow] = {
    "sft": Workflow("TRL's SFTTrainer: one model; the loss is the log-probabilities of the labels.", ("one GPU", "fsdp2 3")),
    "dpo": Workflow("TRL's DPOTrainer: chosen and rejected completions in one batch, and a reference model.",
                    ("one GPU", "fsdp1 3", "fsdp2 3", "deepspeed 2", "deepspeed 3"), sequences=2, compares=True),
    "kto": Workflow("TRL's KTOTrainer: completions, and a reference model.", ("one GPU",), compares=True),
    "orpo": Workflow("TRL's ORPOTrainer: chosen and rejected completions in one batch, all their logits, no reference model.",
                     ("one GPU", "fsdp2 3", "deepspeed 2", "deepspeed 3"), sequences=2, log_probs="pairs"),
    "reward": Workflow("TRL's RewardTrainer: a model that scores chosen and rejected completions.",
                       ("one GPU", "fsdp2 3", "deepspeed 3"), sequences=2, loss="full", head_rows=1),
    "distill": Workflow("TRL's DistillationTrainer: the student's completions, compared with a teacher's distribution.",
                        ("one GPU", "deepspeed 3"), log_probs="divergence", generates=True),
    "grpo": Workflow("TRL's GRPOTrainer: vLLM generates completions, then the model trains on them.", ("one GPU",), generates=True),
    "ppo": Workflow("verl's PPO: actor, critic, reference model and vLLM share the GPUs. Actor and critic both use --micro-batch."),
}
# fmt: on
"""The workflows that are modelled: trainers of TRL 1.16, and the FSDP workers of verl 0.9.1."""


class Option(NamedTuple):
    """The declaration of an option."""

    of: tuple[Name, ...]
    value: str
    """The help's placeholder: N for a whole number, X for a number, or the choices; empty for a switch."""
    says: str
    in_verl: str = ""
    """verl's flag, if it has another name."""


def _flag(of: tuple[Name, ...], value: str, says: str, in_verl: str = "") -> Any:  # noqa: ANN401  the field's type
    return field(default=None, metadata={"option": Option(of, value, says, in_verl)})


_EVERY: tuple[Name, ...] = tuple(WORKFLOWS)
_VLLM: tuple[Name, ...] = ("distill", "grpo")
_PPO: tuple[Name, ...] = ("ppo",)


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowOptions:
    """A workflow and its options; ``None`` is the trainer's default."""

    workflow: Name
    teacher_model: str | None = _flag(("distill",), "NAME", "The teacher model, from the catalogue (`zeroplan models`).")
    precompute_ref_log_probs: bool | None = _flag(
        ("dpo", "kto"), "", "Score the data once before training. Training then has no reference model.")
    sync_ref_model: bool | None = _flag(
        ("dpo", "grpo"), "", "After some steps, mix the trained model's weights into the reference model's.")
    beta: float | None = _flag(("grpo",), "X", "Weight of the KL term. Above 0 there is a reference model. (default: 0)")
    full_logits: bool | None = _flag(
        ("sft", "dpo", "kto", "grpo"), "",
        "The trainer makes the logits of all tokens at once, as ms-swift's and LLaMA-Factory's do; counted as cross-entropy's.")
    max_completion_length: int | None = _flag(
        ("sft", "dpo", "kto", "distill", "grpo"), "N",
        "Tokens of --seq-len that are scored; the rest is the prompt. (default: all but one; 512 if vLLM generates them)")
    num_generations: int | None = _flag(("grpo",), "N", "Completions per prompt. (default: 8)")
    steps_per_generation: int | None = _flag(("grpo",), "N", "Micro-batches per rollout. (default: --grad-accum)")
    vllm_mode: Literal["colocate", "server"] | None = _flag(
        _VLLM, "colocate|server", "Where vLLM runs: on the training GPUs, or on other GPUs. (default: colocate)")
    vllm_gpu_memory_utilization: float | None = _flag(
        (*_VLLM, *_PPO), "X", "vLLM's share of a GPU's memory. (default: 0.3, ppo: 0.5)", in_verl="--gpu-memory-utilization")
    vllm_tensor_parallel_size: int | None = _flag(
        (*_VLLM, *_PPO), "N", "GPUs that share vLLM's weights. (default: 1, ppo: 2)", in_verl="--tensor-model-parallel-size")
    vllm_enable_sleep_mode: bool | None = _flag(_VLLM, "", "vLLM sleeps while the model trains.")
    vllm_sleep_level: int | None = _flag(
        _VLLM, "N", "What sleeping vLLM does with its weights: 2 drops them, 1 moves them to host memory. (default: 2)")
    free_cache_engine: Literal["true", "false"] | None = _flag(
        _PPO, "true|false", "vLLM sleeps while models train. (default: true)")
    adv_estimator: Literal["gae", "grpo"] | None = _flag(_PPO, "gae|grpo", "gae has a critic, grpo has none. (default: gae)")
    use_kl_loss: bool | None = _flag(_PPO, "", "A reference model, kept in host memory, scores every rollout.")
    param_offload: bool | None = _flag(_PPO, "", "Move actor and critic to host memory outside their own phases.")
    optimizer_offload: bool | None = _flag(_PPO, "", "Move their optimizers to host memory outside their own phases.")
    ppo_max_token_len_per_gpu: int | None = _flag(
        _PPO, "N", "Tokens of a micro-batch (use_dynamic_bsz), instead of --micro-batch and --seq-len.")
    critic_micro_batch_size_per_gpu: int | None = _flag(
        _PPO, "N", "The critic's sequences per micro-batch. (default: --micro-batch)")
    critic_max_token_len_per_gpu: int | None = _flag(
        _PPO, "N", "Tokens of the critic's micro-batch (use_dynamic_bsz). (default: --ppo-max-token-len-per-gpu)")
    critic_recompute: Literal["none", "full"] | None = _flag(
        _PPO, "none|full", "The critic's activation checkpointing. (default: --recompute)")
    log_prob_micro_batch_size_per_gpu: int | None = _flag(
        _PPO, "N", "Sequences per scoring forward. (default: --micro-batch)")
    entropy_from_logits_with_chunking: bool | None = _flag(_PPO, "", "Compute the entropy 2,048 tokens at a time.")
    update_weights_bucket_megabytes: int | None = _flag(_PPO, "N", "Buffer that sends new weights to vLLM. (default: 2048)")
    fsdp_cpu_ram_efficient_loading: bool | None = _flag(_EVERY, "", "One process per node loads the weights for all its processes.")
    full_state_dict: bool | None = _flag(_EVERY, "", "Save a gathered full state dict instead of shards.")
    # fmt: on

    keeps_reference: bool = False
    """A file's program on Megatron-Core keeps a reference model's weights on the GPU, whatever ``beta`` is."""
    by_transformers: bool = False
    """The trainer generates with transformers on the training GPUs, and with no vLLM."""
    scored_by: str | None = None
    """The model of a teacher whose log-probabilities of the rollouts ms-swift's GRPO reads (OPD-RL)."""
    stage_of_teacher: Literal[0, 1, 2, 3] | None = None
    """That teacher's stage of DeepSpeed; None for the trained model's."""
    reward_engine: bool = False
    """verl's reward model runs in a second vLLM on the same GPUs, which sleeps while models train."""
    offloads_between_updates: bool = False
    """It moves the trained model and its optimizer to host memory while vLLM generates."""
    critic_ways: tuple[int, int, int] | None = None
    """Tensor-, pipeline- and context-parallel ranks of verl's critic on Megatron-Core; None without a critic."""
    critic_stays: bool = True
    """That critic and its optimizer stay on the GPU outside their own phases."""

    def __post_init__(self) -> None:
        """Raise SpecError for options of another workflow, and for impossible numbers."""
        if self.workflow not in WORKFLOWS:
            raise SpecError(f"workflow {self.workflow!r} is none of {', '.join(WORKFLOWS)}")
        for name, option in OPTIONS.items():
            value, flag = getattr(self, name), flag_of(name, self.workflow)
            if value is not None and self.workflow not in option.of:
                raise SpecError(f"{flag} is an option of {' and '.join(option.of)}, not of {self.workflow}; leave it out")
            if isinstance(value, str) and "|" in option.value and value not in option.value.split("|"):
                raise SpecError(f"{flag} {value!r} is none of {', '.join(option.value.split('|'))}")
        self._check_numbers()

    @property
    def share(self) -> float:
        """The share of a GPU for vLLM: trl 1.16, trainer/grpo_config.py; verl 0.9.1, trainer/config/rollout/rollout.yaml."""
        default = 0.5 if self.workflow == "ppo" else 0.3
        return default if self.vllm_gpu_memory_utilization is None else self.vllm_gpu_memory_utilization

    @property
    def split(self) -> int:
        """GPUs that share vLLM's weights. Source: as :attr:`share`."""
        return self.vllm_tensor_parallel_size or (2 if self.workflow == "ppo" else 1)

    @property
    def sleeps(self) -> bool:
        """Whether vLLM sleeps while models train."""
        return self.free_cache_engine != "false" if self.workflow == "ppo" else bool(self.vllm_enable_sleep_mode)

    def _check_numbers(self) -> None:
        level, flag = self.vllm_sleep_level, flag_of("vllm_gpu_memory_utilization", self.workflow)
        for wrong, why in (
            (not 0 < self.share <= 1, f"{flag} {self.share:g} is a share of the GPU's memory; use one above 0, at most 1"),
            (level not in (None, 1, 2), f"--vllm-sleep-level {level} is none of vLLM's; use 1 or 2"),
            (level is not None and not self.sleeps,
             "--vllm-sleep-level has no effect unless vLLM sleeps; add --vllm-enable-sleep-mode"),
            (self.sync_ref_model and self.workflow == "grpo" and not self.beta,
             "--sync-ref-model has no reference model to change unless --beta is above 0"),
            (self.sync_ref_model and self.precompute_ref_log_probs,
             "--sync-ref-model and --precompute-ref-log-probs exclude each other in TRL; use one of them"),
            (self.beta is not None and self.beta < 0, f"--beta {self.beta} is a weight of the KL term; use 0 or more"),
            (self.num_generations is not None and self.num_generations < (2 if self.scored_by is None else 1),
             f"--num-generations {self.num_generations} is too few: GRPO compares completions; use 2 or more"),
            (self.vllm_mode == "server" and self.vllm_gpu_memory_utilization is not None,
             f"{flag} is a share of a training GPU, but --vllm-mode server runs on other GPUs; leave it out"),
        ):  # fmt: skip
            if wrong:
                raise SpecError(why)


OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(WorkflowOptions) if "option" in one.metadata}
"""Every option by its field in :class:`WorkflowOptions`."""


def flag_of(name: str, workflow: Name) -> str:
    """Return the flag of an option in a workflow."""
    return (workflow == "ppo" and OPTIONS[name].in_verl) or f"--{name.replace('_', '-')}"

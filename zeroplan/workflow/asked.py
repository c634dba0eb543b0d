"""What a user says of a workflow beside its job: each option once, with the workflows that have it, as TRL or verl names it."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from zeroplan.errors import SpecError
from zeroplan.spec.recipe import LogProbs, Loss

Name = Literal["sft", "dpo", "kto", "reward", "distill", "grpo", "ppo"]


class Workflow(NamedTuple):
    """What tells a workflow from others."""

    says: str
    ran: tuple[str, ...]
    """Where the trainer ran in a dry run, by engine and stage: the rows of tests/workflow/trl.json."""
    sequences: int = 1
    """Sequences of an example in a batch: a chosen and a rejected one in a pair."""
    loss: Loss = "log-probs"
    head_rows: int | None = None
    """Outputs of the head, where they are not the vocabulary's."""
    compares: bool = False
    """A reference model is there, whatever is said."""
    log_probs: LogProbs = "tiles"
    """``divergence``: a teacher runs forward in every step."""
    generates: bool = False
    """Rollouts come before the training step."""


WORKFLOWS: dict[Name, Workflow] = {
    "sft": Workflow("SFTTrainer: one model, its labels' log-probabilities.", ("one GPU", "fsdp2 3")),
    "dpo": Workflow(
        "DPOTrainer: chosen and rejected completions in one batch, beside a reference model.",
        ("one GPU", "fsdp1 3", "fsdp2 3", "deepspeed 2", "deepspeed 3"),
        sequences=2, compares=True,
    ),
    "kto": Workflow("KTOTrainer: completions beside a reference model.", ("one GPU",), compares=True),
    "reward": Workflow("RewardTrainer: a model that scores, on chosen and rejected completions.",
        ("one GPU", "fsdp2 3", "deepspeed 3"), sequences=2, loss="full",
        head_rows=1,
    ),
    "distill": Workflow(
        "DistillationTrainer: completions of the student, compared with a teacher's distribution.",
        ("one GPU", "deepspeed 3"), log_probs="divergence", generates=True,
    ),
    "grpo": Workflow("GRPOTrainer: rollouts of vLLM, then training on them.", ("one GPU",), generates=True),
    "ppo": Workflow("verl's PPO: actor, critic, reference model and vLLM take turns. --micro-batch is that of both.", ()),
}  # fmt: skip
"""The workflows that are modelled: trainers of TRL 1.16, and the FSDP workers of verl 0.9.1."""


class Option(NamedTuple):
    """How an option is said."""

    of: tuple[Name, ...]
    value: str
    """What help shows for a value: N a whole number, X a number, a list of words; empty for a switch."""
    says: str
    flag: str = ""
    """Where it is not the name."""


DEFAULT_SHARE = 0.3
"""trl 1.16, trainer/grpo_config.py, GRPOConfig.vllm_gpu_memory_utilization."""


class Engine(NamedTuple):
    """What is said of vLLM beside a training."""

    share: float
    split: int
    sleeps: bool
    level: int
    share_flag: str
    split_flag: str


def _said(of: tuple[Name, ...], value: str, says: str, flag: str = "") -> Any:  # noqa: ANN401  of the field's own type
    return field(default=None, metadata={"option": Option(of, value, says, flag)})


_EVERY: tuple[Name, ...] = tuple(WORKFLOWS)
_SCORES: tuple[Name, ...] = tuple(name for name, one in WORKFLOWS.items() if one.loss != "full" and name != "ppo")
_COMPARES: tuple[Name, ...] = tuple(name for name, one in WORKFLOWS.items() if one.compares)
_DISTILLS: tuple[Name, ...] = ("distill",)
_GRPO: tuple[Name, ...] = ("grpo",)
_PPO: tuple[Name, ...] = ("ppo",)
_GENERATES: tuple[Name, ...] = tuple(name for name, one in WORKFLOWS.items() if one.generates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A workflow and its options; ``None`` is the trainer's default."""

    workflow: Name
    teacher_model: str | None = _said(_DISTILLS, "NAME", "The teacher, of the catalogue (`zeroplan models`).")
    precompute_ref_log_probs: bool | None = _said(
        _COMPARES, "", "Score the data before training, without a reference model then."
    )
    beta: float | None = _said(_GRPO, "X", "Weight of the KL term; above 0 a reference model is there. (default: 0)")
    max_completion_length: int | None = _said(
        _SCORES,
        "N",
        "Tokens of --seq-len that are scored; the rest is the prompt. (default: all but one, 512 where they are generated)",
    )
    num_generations: int | None = _said(_GRPO, "N", "Completions of a prompt. (default: 8)")
    steps_per_generation: int | None = _said(_GRPO, "N", "Micro-batches of one rollout. (default: as many as are accumulated)")
    vllm_mode: Literal["colocate", "server"] | None = _said(
        _GENERATES, "colocate|server", "vLLM on the training GPUs, or on others. (default: colocate)"
    )
    vllm_gpu_memory_utilization: float | None = _said(
        _GENERATES, "X", "vLLM's share of a training GPU's memory. (default: 0.3)"
    )
    vllm_tensor_parallel_size: int | None = _said(_GENERATES, "N", "GPUs that share vLLM's weights. (default: 1)")
    vllm_enable_sleep_mode: bool | None = _said(_GENERATES, "", "vLLM sleeps while the model trains.")
    vllm_sleep_level: int | None = _said(
        _GENERATES, "N", "2, as TRL sleeps (weights are dropped), or 1 (they go to the host). (default: 2)"
    )
    adv_estimator: Literal["gae", "grpo"] | None = _said(_PPO, "gae|grpo", "gae has a critic, grpo has none. (default: gae)")
    use_kl_loss: bool | None = _said(_PPO, "", "A reference model scores every rollout. It is in host memory.")
    param_offload: bool | None = _said(_PPO, "", "Actor and critic leave the GPU while others work.")
    optimizer_offload: bool | None = _said(_PPO, "", "Their optimizers do.")
    ppo_max_token_len_per_gpu: int | None = _said(
        _PPO, "N", "Tokens of a micro-batch (use_dynamic_bsz), in place of --micro-batch and --seq-len."
    )
    log_prob_micro_batch_size_per_gpu: int | None = _said(
        _PPO, "N", "Sequences of a forward that scores. (default: --micro-batch)"
    )
    entropy_from_logits_with_chunking: bool | None = _said(_PPO, "", "2,048 tokens at a time.")
    gpu_memory_utilization: float | None = _said(_PPO, "X", "vLLM's share of a GPU's memory. (default: 0.5)")
    tensor_model_parallel_size: int | None = _said(_PPO, "N", "GPUs that share vLLM's weights. (default: 2)")
    free_cache_engine: Literal["true", "false"] | None = _said(
        _PPO, "true|false", "vLLM sleeps while models train. (default: true)"
    )
    update_weights_bucket_megabytes: int | None = _said(_PPO, "N", "Buffer in which new weights go to vLLM. (default: 2048)")
    cpu_ram_efficient_loading: bool | None = _said(
        _EVERY, "", "One process of a node loads the weights for all of it.", "--fsdp-cpu-ram-efficient-loading"
    )
    full_state_dict: bool | None = _said(_EVERY, "", "A checkpoint is one full state dict, gathered, rather than shards.")

    def __post_init__(self) -> None:
        """Raise SpecError for a word of another workflow, and for a number that no run can have."""
        if self.workflow not in WORKFLOWS:
            raise SpecError(f"workflow {self.workflow!r} is none of {', '.join(WORKFLOWS)}")
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is not None and self.workflow not in option.of:
                raise SpecError(
                    f"{flag_of(name)} is an option of {' and '.join(option.of)}, not of {self.workflow}; leave it out"
                )
            if isinstance(value, str) and "|" in option.value and value not in option.value.split("|"):
                raise SpecError(f"{flag_of(name)} {value!r} is none of {', '.join(option.value.split('|'))}")
        self._check_numbers()

    @property
    def engine(self) -> Engine:
        """The inference engine, with the defaults of the workflow's program."""
        if self.workflow == "ppo":  # verl 0.9.1, trainer/config/rollout/rollout.yaml
            share = 0.5 if self.gpu_memory_utilization is None else self.gpu_memory_utilization
            split, sleeps = self.tensor_model_parallel_size or 2, self.free_cache_engine != "false"
            return Engine(share, split, sleeps, 2, "--gpu-memory-utilization", "--tensor-model-parallel-size")
        share = DEFAULT_SHARE if self.vllm_gpu_memory_utilization is None else self.vllm_gpu_memory_utilization
        split, sleeps = self.vllm_tensor_parallel_size or 1, bool(self.vllm_enable_sleep_mode)
        flags = "--vllm-gpu-memory-utilization", "--vllm-tensor-parallel-size"
        return Engine(share, split, sleeps, self.vllm_sleep_level or 2, *flags)

    def _check_numbers(self) -> None:
        share, level, (used, flag) = (
            self.vllm_gpu_memory_utilization,
            self.vllm_sleep_level,
            (self.engine.share, self.engine.share_flag),
        )
        for wrong, why in (
            (not 0 < used <= 1, f"{flag} {used:g} is a share of the GPU's memory; use one above 0, at most 1"),
            (level not in (None, 1, 2), f"--vllm-sleep-level {level} is none of vLLM's; use 1 or 2"),
            (level is not None and not self.vllm_enable_sleep_mode,
             "--vllm-sleep-level says how vLLM sleeps, which it does not; add --vllm-enable-sleep-mode"),
            (self.beta is not None and self.beta < 0, f"--beta {self.beta} is a weight of the KL term; use 0 or more"),
            (self.num_generations is not None and self.num_generations < 2,
             f"--num-generations {self.num_generations} is too few: GRPO compares completions; use 2 or more"),
            (self.vllm_mode == "server" and share is not None,
             "--vllm-gpu-memory-utilization is a share of a training GPU, and a server has its own; leave it out"),
        ):  # fmt: skip
            if wrong:
                raise SpecError(why)


OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(Asked) if "option" in one.metadata}
"""Every option by its field in :class:`Asked`."""


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return OPTIONS[name].flag or f"--{name.replace('_', '-')}"

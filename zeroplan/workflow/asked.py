"""What a user says of a workflow beside its job, in the words of TRL and vLLM, and what must not be said of which workflow."""

from dataclasses import dataclass, fields
from typing import Literal

from zeroplan.errors import SpecError

Name = Literal["sft", "dpo", "kto", "grpo"]
VllmMode = Literal["colocate", "server"]

PREFERENCES: tuple[Name, ...] = ("dpo", "kto")
WORKFLOWS: dict[Name, str] = {
    "sft": "SFTTrainer: one model, its labels' log-probabilities",
    "dpo": "DPOTrainer: chosen and rejected completions in one batch, beside a reference model",
    "kto": "KTOTrainer: completions beside a reference model",
    "grpo": "GRPOTrainer: rollouts of vLLM, then training on them",
}
"""The workflows that are modelled, and what each is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A workflow and its options; ``None`` is TRL's default. Names are those of TRL's configurations."""

    workflow: Name
    precompute_ref_log_probs: bool | None = None
    beta: float | None = None
    max_completion_length: int | None = None
    num_generations: int | None = None
    steps_per_generation: int | None = None
    vllm_mode: VllmMode | None = None
    vllm_gpu_memory_utilization: float | None = None
    vllm_tensor_parallel_size: int | None = None
    vllm_enable_sleep_mode: bool | None = None
    vllm_sleep_level: int | None = None
    cpu_ram_efficient_loading: bool | None = None
    full_state_dict: bool | None = None

    def __post_init__(self) -> None:
        """Raise SpecError for a word of another workflow, and for a number that no run can have."""
        if self.workflow not in WORKFLOWS:
            raise SpecError(f"workflow {self.workflow!r} is none of {', '.join(WORKFLOWS)}")
        for name in (one.name for one in fields(self)):
            of, flag = _OF.get(name, tuple(WORKFLOWS)), f"--{name.replace('_', '-')}"
            if getattr(self, name) is not None and self.workflow not in of:
                raise SpecError(f"{flag} is an option of {' and '.join(of)}, not of {self.workflow}; leave it out")
        self._check_numbers()

    def _check_numbers(self) -> None:
        share, level = self.vllm_gpu_memory_utilization, self.vllm_sleep_level
        if share is not None and not 0 < share <= 1:
            raise SpecError(
                f"--vllm-gpu-memory-utilization {share:g} is a share of the GPU's memory; use one above 0, at most 1"
            )
        if level is not None and level not in (1, 2):
            raise SpecError(f"--vllm-sleep-level {level} is none of vLLM's; use 1 or 2")
        if level is not None and not self.vllm_enable_sleep_mode:
            raise SpecError("--vllm-sleep-level says how vLLM sleeps, which it does not; add --vllm-enable-sleep-mode")
        if self.beta is not None and self.beta < 0:
            raise SpecError(f"--beta {self.beta:g} is a weight of the KL term; use 0 or more")
        if self.num_generations is not None and self.num_generations < 2:
            raise SpecError(f"--num-generations {self.num_generations} is too few: GRPO compares completions; use 2 or more")
        if self.vllm_mode == "server" and self.vllm_gpu_memory_utilization is not None:
            raise SpecError(
                "--vllm-gpu-memory-utilization is a share of a training GPU, and a server has its own; leave it out"
            )


_OF: dict[str, tuple[Name, ...]] = {
    "precompute_ref_log_probs": PREFERENCES,
    **dict.fromkeys(
        (
            "beta", "num_generations", "steps_per_generation", "vllm_mode", "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_sleep_level",
        ),
        ("grpo",),
    ),
}  # fmt: skip
"""Of which workflows an option is, where not of all. In DPO and KTO ``beta`` takes no memory, and is no option here."""

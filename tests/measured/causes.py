"""Why the estimate of some jobs is off by more than the goal, in the order of this list."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.measured.errors import EVERY, Held

if TYPE_CHECKING:
    from collections.abc import Callable

    from zeroplan.spec.job import JobSpec


class Cause(NamedTuple):
    """Why the estimate of some jobs is off, which they are, and how far it is off at most today. [fractions of the peak]"""

    why: str
    jobs: Callable[[JobSpec], bool]
    below: float
    above: float = EVERY


def _joint_projection_in_32_bits(job: JobSpec) -> bool:
    return job.recipe.engine in ("ddp", "deepspeed") and job.recipe.precision == "fp32" and job.model.family == "phi3"


def _gathered_experts(job: JobSpec) -> bool:
    return job.recipe.engine == "deepspeed" and job.recipe.zero_stage == 3 and job.model.family == "qwen3_moe"


def _experts_in_32_bits(job: JobSpec) -> bool:
    return job.recipe.engine == "deepspeed" and job.recipe.zero_stage == 2 and _with_experts_in_fp32(job)


def _with_experts_in_fp32(job: JobSpec) -> bool:
    return job.recipe.precision == "fp32" and job.model.moe is not None


CAUSES: tuple[Cause, ...] = (
    # One record of DeepSeek-V3, 1.01 % low; what else is alive while the gradients of its experts are reduced is not known yet.
    Cause("stage 2 of DeepSpeed with experts in 32 bits", _experts_in_32_bits, 0.0102),
    # One record of phi-3-mini; what a CPU's kernel keeps of the joint projection there is not understood yet.
    Cause("a joint projection in 32 bits on a CPU's kernels", _joint_projection_in_32_bits, 0.02),
    # One record, many ranks and few tokens; what is gathered then, and why, is not understood yet.
    Cause("stage 3 of DeepSpeed with experts: more is gathered at the backward's peak than is said", _gathered_experts, 0.09),
)


def cause_of(one: Held) -> Cause | None:
    """The first that applies; a record may be of several."""
    return next((cause for cause in CAUSES if cause.jobs(one.measured.job)), None)

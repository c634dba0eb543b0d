"""Formulas that people use instead of an estimator, for the same jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tests.published_estimators import zero2_estimate, zero3_estimate
from zeroplan import estimate
from zeroplan.errors import SpecError
from zeroplan.transformer.params import layout, parameter_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from zeroplan.spec.job import JobSpec


class Formula(NamedTuple):
    """A formula: its name, and its answer for a job, if any. [bytes]"""

    name: str
    answer: Callable[[JobSpec], int | None]


def _states(job: JobSpec) -> int:
    """Return 2Ψ + 2Ψ + 12Ψ, divided by the ranks that the stage shards over. Source: arXiv:1910.02054, section 5."""
    psi, ranks, stage = parameter_count(job.model), job.mesh.dp_shard, job.recipe.zero_stage
    return sum(bytes_each * psi // (ranks if stage >= first else 1) for bytes_each, first in ((2, 3), (2, 2), (12, 1)))


def _with_activations(job: JobSpec) -> int | None:
    """Return the same plus the activations of Megatron's layers. Source: Korthikanti et al. 2022, arXiv:2205.05198, table 2."""
    recipe = replace(job.recipe, engine="paper", activation_model="megatron", kernels="cuda")
    try:
        return estimate(replace(job, recipe=recipe)).peak_bytes
    except SpecError:
        return None


def _deepspeed(job: JobSpec) -> int | None:
    if job.recipe.engine != "deepspeed" or job.recipe.zero_stage < 2:
        return None
    psi, ranks = parameter_count(job.model), job.mesh.dp_shard
    if job.recipe.zero_stage == 2:
        return int(zero2_estimate(psi, n_gpus=ranks))
    return int(zero3_estimate(psi, _largest_layer(job), n_gpus=ranks))


def _largest_layer(job: JobSpec) -> int:
    """Return the parameters of the module that owns most."""
    parts = layout(job.model)
    modules: dict[tuple[int, str], int] = {}
    groups = (parts.embeddings, parts.tail, *(run.parameters for run in parts.runs))
    for number, parameters in enumerate(groups):
        for one in parameters:
            place = (number, one.name.rpartition(".")[0])
            modules[place] = modules.get(place, 0) + one.numel
    return max(modules.values())


FORMULAS = (
    Formula("ZeRO's model states alone: 2Ψ + 2Ψ + 12Ψ by stage", _states),
    Formula("the same, and activations by Korthikanti et al. 2022", _with_activations),
    Formula("DeepSpeed 0.19.8's own estimators for stages 2 and 3", _deepspeed),
)

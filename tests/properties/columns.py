"""Evaluates several layouts of one structure at once, with ranks and batches as NumPy columns."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import numpy as np

from zeroplan import BatchSpec, JobSpec, RecipeSpec
from zeroplan.engines.account import Account
from zeroplan.errors import SpecError
from zeroplan.estimator import engine_module


@dataclass(frozen=True)
class Columns:
    """A mesh or a batch with columns for some of its numbers."""

    numbers: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.numbers[name]


def points_of(job: JobSpec, draw: Random) -> list[tuple[JobSpec, tuple[Account, ...]]]:
    """Return the job and up to two others of the same structure, with other ranks and batches, each with its accounts."""
    found = [(job, accounts_of(job, job.mesh, job.batch))]
    for _ in range(draw.randint(1, 2)):
        ranks = max(1, job.mesh.dp_shard * draw.choice((1, 2, 3, 8)) // draw.choice((1, 1, 2, 4)))
        if _gathers_differ_by_ranks(job.recipe):
            ranks = job.mesh.dp_shard
        batch = BatchSpec(
            micro_batch_size=job.batch.micro_batch_size if job.model.profile else draw.randint(1, 16),
            seq_len=max(1, job.batch.seq_len * draw.choice((1, 2, 3)) // draw.choice((1, 1, 2))),
            grad_accum_steps=job.batch.grad_accum_steps if job.mesh.pp > 1 else draw.randint(1, 4),
        )
        try:
            other = replace(job, mesh=replace(job.mesh, dp_shard=ranks), batch=batch)
            accounts = accounts_of(other, other.mesh, other.batch)
        except SpecError:
            continue
        if is_beyond_the_window(other) == is_beyond_the_window(job):
            found.append((other, accounts))
    return found


def _gathers_differ_by_ranks(recipe: RecipeSpec) -> bool:
    """Whether DeepSpeed's order of all-gathers depends on the number of ranks, so that columns of ranks are refused."""
    options = recipe.deepspeed
    return recipe.engine == "deepspeed" and (options.zero_quantized_weights or options.offload_param != "none")


def is_beyond_the_window(job: JobSpec) -> bool:
    """Whether sequences are as long as the sliding window or longer.

    Torch then runs other kernels. A column with sequences on both sides of the window has the higher of the two everywhere.
    """
    return job.model.sliding_window is not None and job.batch.seq_len >= job.model.sliding_window


def accounts_of(job: JobSpec, mesh: Any, batch: Any) -> tuple[Account, ...]:
    """Return the accounts of a job with this mesh and batch: one, or one for each rank of a pipeline."""
    if job.mesh.pp > 1:
        name = "pipeline" if job.recipe.engine == "fsdp2" else job.recipe.engine
        return engine_module(name).accounts(job.model, job.recipe, mesh, batch)  # type: ignore[arg-type, attr-defined, no-any-return]
    return (engine_module(job.recipe.engine).account(job.model, job.recipe, mesh, batch),)


def grid_of(points: Sequence[JobSpec]) -> tuple[Account, ...]:
    """Return the accounts of all points in one evaluation; their numbers may be columns."""
    job = points[0]
    names = ("micro_batch_size", "seq_len", *(("grad_accum_steps",) if job.mesh.pp == 1 else ()))
    batch = {name: np.array([getattr(one.batch, name) for one in points], dtype=np.int64) for name in names}
    ranks = np.array([one.mesh.dp_shard for one in points], dtype=np.int64)
    mesh = {**asdict(job.mesh), "dp_shard": ranks, "dp_replicate": ranks * 0 + job.mesh.dp_replicate}
    return accounts_of(job, Columns(mesh), Columns({**asdict(job.batch), **batch}))


def at_place(value: Any, at: int) -> int:
    """Return the number at this place of a column, or the number itself if it is no column."""
    return value if isinstance(value, int) else int(value.reshape(-1)[at if value.size > 1 else 0])

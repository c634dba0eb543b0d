"""Several layouts of one structure in one evaluation: their ranks and batches as NumPy columns."""

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
class _Columns:
    """A mesh, or a batch, some of whose numbers are columns."""

    numbers: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.numbers[name]


def points_of(job: JobSpec, draw: Random) -> list[tuple[JobSpec, tuple[Account, ...]]]:
    """The job and one or two others of the same structure, with other ranks and batches, and the accounts of each."""
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
    """DeepSpeed's order of gathers is then found for each number of ranks by itself, which a column refuses."""
    options = recipe.deepspeed
    return recipe.engine == "deepspeed" and (options.zero_quantized_weights or options.offload_param != "none")


def is_beyond_the_window(job: JobSpec) -> bool:
    """Sequences on both sides of a window run two programs, and a column of both has at every place the higher of the two."""
    return job.model.sliding_window is not None and job.batch.seq_len >= job.model.sliding_window


def accounts_of(job: JobSpec, mesh: Any, batch: Any) -> tuple[Account, ...]:
    """The accounts of a job on this mesh and with this batch: one, or one for each rank of a pipeline."""
    if job.mesh.pp > 1:
        name = "pipeline" if job.recipe.engine == "fsdp2" else job.recipe.engine
        return engine_module(name).accounts(job.model, job.recipe, mesh, batch)  # type: ignore[arg-type, attr-defined, no-any-return]
    return (engine_module(job.recipe.engine).account(job.model, job.recipe, mesh, batch),)


def grid_of(points: Sequence[JobSpec]) -> tuple[Account, ...]:
    """The accounts of all points at once: every number of theirs may be a column."""
    job = points[0]
    names = ("micro_batch_size", "seq_len", *(("grad_accum_steps",) if job.mesh.pp == 1 else ()))
    batch = {name: np.array([getattr(one.batch, name) for one in points], dtype=np.int64) for name in names}
    ranks = np.array([one.mesh.dp_shard for one in points], dtype=np.int64)
    mesh = {**asdict(job.mesh), "dp_shard": ranks, "dp_replicate": ranks * 0 + job.mesh.dp_replicate}
    return accounts_of(job, _Columns(mesh), _Columns({**asdict(job.batch), **batch}))


def at_place(value: Any, at: int) -> int:
    """The number at this place of a column; a number is the same everywhere."""
    return value if isinstance(value, int) else int(value.reshape(-1)[at if value.size > 1 else 0])

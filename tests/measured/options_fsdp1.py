"""Draws jobs of FSDP1 over its options, every optimizer, few ranks and many: the same sample on every machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from tests.measured.options_torch import Dice, different, job_of
from zeroplan import MeshSpec
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.recipe import Fsdp1Options

if TYPE_CHECKING:
    from zeroplan import JobSpec

SEED = 20_267


def drawn(count: int) -> list[JobSpec]:
    """Return the first ``count`` jobs. If the estimate refuses a job, another is drawn.

    >>> drawn(9)[:6] == drawn(6)
    True
    """
    return list(islice(different(_fsdp1, SEED), count))


def _fsdp1(dice: Dice) -> JobSpec:
    shard, replicas = dice.any(*((n, r) for n in (2, 3, 4) for r in (1, 1, 2)), (6, 1), (8, 1), (8, 2), (64, 1), (512, 1))
    options = Fsdp1Options(
        use_orig_params=dice.any(False, True),
        backward_prefetch=dice.any("backward_pre", "backward_pre", "backward_post", "no_prefetch"),  # type: ignore[arg-type]
        forward_prefetch=dice.any(False, False, True),
        limit_all_gathers=dice.any(True, False),
        reduce_dtype=dice.any("param", "fp32"),  # type: ignore[arg-type]
    )
    said = {"engine": "fsdp1", "zero_stage": dice.any(2, 3, 3), "fsdp1": options}
    adapter = dice.any(None, None, None, None, AdapterSpec(rank=16))
    if adapter is not None:  # views keep their fp32 dtype, so that every step is like the first
        said["fsdp1"] = replace(options, use_orig_params=True, forward_prefetch=False)
    job = job_of(dice, said, MeshSpec(dp_shard=shard, dp_replicate=replicas))
    return replace(job, model=replace(job.model, adapter=adapter))

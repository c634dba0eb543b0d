"""Draws jobs of DeepSpeed's stage 3 whose predicted peak is in the first micro-batches: a random sample.

Small models, or large ones with few layers. The sample is the same on every machine, while the estimate stays the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.measured.options import distinct
from tests.measured.options_deepspeed import _Dice
from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec, estimate
from zeroplan.catalog.model import model
from zeroplan.errors import SpecError
from zeroplan.ledger import Phase
from zeroplan.spec.recipe import DeepSpeedOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20_267

#: Models, and how many of their layers are run.
MODELS = (
    ("gpt2", 3), ("opt-125m", 3), ("bloom-560m", 2), ("pythia-160m", 3), ("qwen2.5-0.5b", 2), ("qwen3-0.6b", 2),
    ("gemma-3-1b", 2), ("olmo-2-1b", 2), ("llama-3.2-1b", 2), ("falcon-7b", 1), ("phi-3-mini", 2), ("mixtral-8x7b", 1),
    ("qwen3-30b-a3b", 2), ("gpt-oss-20b", 2), ("olmoe-1b-7b", 2), ("qwen1.5-moe-a2.7b", 1), ("granite-3.1-3b-a800m", 2),
)  # fmt: skip


def drawn(count: int) -> list[JobSpec]:
    """Return the first ``count`` jobs.

    >>> drawn(2)[:1] == drawn(1)
    True
    """
    return distinct(_jobs(_Dice(SEED)), count)


def _jobs(dice: _Dice) -> Iterator[JobSpec]:
    while True:
        job = _job(dice)
        try:
            found = estimate(job)
        except SpecError:
            continue
        if found.peak.phase is Phase.FIRST:
            yield job


def _job(dice: _Dice) -> JobSpec:
    name, layers = dice.any(*MODELS)
    one = model(name)
    moe = one.moe
    if moe is not None and moe.num_dense_layers >= layers:
        one = replace(one, moe=replace(moe, num_dense_layers=layers - 1))
    kept_on = dice.any("gpu", "gpu", "host", "zero++")
    return JobSpec(
        model=replace(one, num_hidden_layers=layers),
        recipe=RecipeSpec(
            engine="deepspeed",
            zero_stage=3,
            precision=dice.any("bf16-mixed", "bf16"),  # type: ignore[arg-type]
            optimizer="adamw" if kept_on == "host" else dice.any("adamw", "sgd", "adagrad"),
            recompute=dice.any("none", "full"),  # type: ignore[arg-type]
            deepspeed=_options(dice, kept_on),
        ),
        mesh=MeshSpec(dp_shard=dice.any(8, 64, 512)),
        batch=BatchSpec(micro_batch_size=1, seq_len=dice.any(64, 256), grad_accum_steps=dice.any(1, 1, 2)),
    )


def _options(dice: _Dice, kept_on: str) -> DeepSpeedOptions:
    on_host = kept_on == "host"
    return DeepSpeedOptions(
        reduce_bucket_size=dice.any(1_000_000, 20_000_000, 200_000_000),
        contiguous_gradients=dice.any(True, True, False),
        reduce_scatter=dice.any(True, True, False),
        memory_efficient_linear=dice.any(True, False),
        stage3_max_live_parameters=dice.any(0, 20_000_000, 1_000_000_000),
        stage3_max_reuse_distance=dice.any(0, 20_000_000, 1_000_000_000),
        stage3_prefetch_bucket_size=dice.any(0, 5_000_000, 50_000_000),
        stage3_param_persistence_threshold=dice.any(0, 100_000, 5_000_000),
        zero_hpz_partition_size=dice.any(1, 2, 8) if kept_on == "zero++" else 1,
        zero_quantized_weights=kept_on == "zero++" and dice.any(True, False),
        offload_optimizer="cpu" if on_host else "none",
        offload_param=dice.any("none", "cpu") if on_host else "none",  # type: ignore[arg-type]
    )

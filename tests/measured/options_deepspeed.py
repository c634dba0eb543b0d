"""Draws jobs of DeepSpeed over its options, optimizers and steps: a random sample, the same on every machine.

Small models, or large ones with few layers: what the options change does not depend on how many layers there are.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tests.measured.options import distinct
from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec, estimate
from zeroplan.catalog.model import model
from zeroplan.errors import SpecError
from zeroplan.spec.recipe import DeepSpeedOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zeroplan.spec.model import ModelSpec
    from zeroplan.spec.recipe import Optimizer, OptimizerImpl

SEED = 20_264
T = TypeVar("T")

#: Models, and how many of their layers are run.
MODELS = (
    ("smollm2-135m", 4), ("qwen2.5-0.5b", 3), ("qwen3-0.6b", 3), ("gpt2", 4), ("pythia-160m", 4), ("gemma-3-1b", 3),
    ("llama-3.2-1b", 3), ("llama-3.1-8b", 2), ("phi-3-mini", 2), ("mixtral-8x7b", 1), ("qwen3-30b-a3b", 2),
)  # fmt: skip
#: Optimizers that fake tensors go through, and their implementations.
OPTIMIZERS: tuple[tuple[Optimizer, OptimizerImpl | None], ...] = (
    ("adamw", None), ("adamw", None), ("adamw", "fused"), ("adamw", "foreach"), ("adamw", "forloop"), ("adam", None),
    ("sgd", "foreach"), ("sgd-momentum", "foreach"), ("adagrad", "foreach"), ("adagrad", "forloop"), ("rmsprop", "foreach"),
    ("rmsprop", "forloop"),
)  # fmt: skip


class _Dice:
    """Draws with ``random()`` alone, the only method of a generator that is promised never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random  # noqa: S311  a sample, not a secret

    def any(self, *things: T) -> T:
        """One of the things."""
        return things[int(self._random() * len(things))]


def drawn(count: int, *, seed: int = SEED) -> list[JobSpec]:
    """Return the first ``count`` jobs; stages 0 to 3 alternate. If the estimate refuses a job, another is drawn.

    >>> drawn(8)[:4] == drawn(4)
    True
    """
    return distinct(_jobs(_Dice(seed)), count)


def _jobs(dice: _Dice) -> Iterator[JobSpec]:
    while True:
        for stage in (1, 2, 3, 1, 2, 0):
            yield _accepted(dice, stage)


def _accepted(dice: _Dice, stage: int) -> JobSpec:
    while True:
        try:
            job = _job(dice, stage)
            estimate(job)
        except SpecError:
            continue
        return job


def _job(dice: _Dice, stage: int) -> JobSpec:
    optimizer, impl = dice.any(*OPTIMIZERS)
    micro_batch, seq_len = dice.any((1, 64), (1, 512), (2, 512), (3, 1000), (4, 1024), (1, 2048))
    return JobSpec(
        model=_few_layers(*dice.any(*MODELS)),
        recipe=RecipeSpec(
            engine="deepspeed",
            zero_stage=stage,  # type: ignore[arg-type]
            precision=dice.any("bf16-mixed", "bf16-mixed", "bf16", "fp32"),  # type: ignore[arg-type]
            optimizer=optimizer,
            optimizer_impl=impl,
            recompute=dice.any("none", "none", "selective", "full"),  # type: ignore[arg-type]
            keep_logits=dice.any(False, False, True),
            deepspeed=replace(
                _sharded_options(dice) if stage == 3 else _options(dice, stage), torch_adam=dice.any(False, True)
            ),
        ),
        mesh=MeshSpec(dp_shard=dice.any(1, 2, 3, 8)),
        batch=BatchSpec(micro_batch_size=micro_batch, seq_len=seq_len, grad_accum_steps=dice.any(1, 1, 2, 3)),
    )


def _few_layers(name: str, layers: int) -> ModelSpec:
    return replace(model(name), num_hidden_layers=layers)


def _options(dice: _Dice, stage: int) -> DeepSpeedOptions:
    return DeepSpeedOptions(
        reduce_bucket_size=dice.any(1_000_000, 5_000_000, 50_000_000, 200_000_000, 500_000_000),
        overlap_comm=dice.any(None, None, True),
        contiguous_gradients=dice.any(True, True, False),
        reduce_scatter=dice.any(True, True, False),
        compute_grad_norm=dice.any(True, True, False) or stage == 0,  # where DeepSpeed refuses False
        grad_accum_dtype=dice.any("param", "param", "fp32"),  # type: ignore[arg-type]
    )


def _sharded_options(dice: _Dice) -> DeepSpeedOptions:
    """Draw the options of stage 3: also what is gathered, for how long, and which parameters stay."""
    return DeepSpeedOptions(
        reduce_bucket_size=dice.any(1_000_000, 5_000_000, 50_000_000, 200_000_000, 500_000_000),
        overlap_comm=dice.any(None, None, False),
        contiguous_gradients=dice.any(True, True, False),
        reduce_scatter=dice.any(True, True, False),
        grad_accum_dtype=dice.any("param", "param", "fp32"),  # type: ignore[arg-type]
        sub_group_size=dice.any(10_000_000, 1_000_000_000),
        stage3_max_live_parameters=dice.any(0, 20_000_000, 200_000_000, 1_000_000_000),
        stage3_max_reuse_distance=dice.any(0, 20_000_000, 1_000_000_000),
        stage3_prefetch_bucket_size=dice.any(0, 5_000_000, 50_000_000),
        stage3_param_persistence_threshold=dice.any(0, 10_000, 100_000, 2_000_000),
        stage3_allgather_sequential=dice.any(False, False, True),
    )

"""Draws jobs of DDP and FSDP2 over their options, every optimizer and few ranks: the same sample on every machine.

The matrix takes torch's defaults and AdamW on four ranks or more; here nothing but the model is kept to what is usual.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from tests.measured.drawn import as_ran
from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec, estimate
from zeroplan.catalog.model import model
from zeroplan.errors import SpecError
from zeroplan.spec.recipe import DdpOptions, Fsdp2Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zeroplan.spec.model import ModelSpec
    from zeroplan.spec.recipe import Optimizer, OptimizerImpl

FSDP2_SEED, DDP_SEED = 20_265, 20_266
T = TypeVar("T")

#: Models whose layers are alike, so that a few stand for all of them, and what is left of the largest.
MODELS = (
    ("smollm2-135m", 30), ("llama-3.2-1b", 16), ("llama-3.1-8b", 32), ("qwen2.5-0.5b", 24), ("qwen3-0.6b", 28), ("gpt2", 12),
    ("gemma-3-1b", 26), ("pythia-1.4b", 24), ("phi-3-mini", 32), ("mixtral-8x7b", 4), ("qwen3-30b-a3b", 6), ("deepseek-v3", 4),
)  # fmt: skip
#: What fake tensors go through; None is torch's own choice.
OPTIMIZERS: tuple[tuple[Optimizer, OptimizerImpl | None], ...] = (
    ("adamw", None), ("adamw", "foreach"), ("adamw", "fused"), ("adamw", "forloop"), ("adam", "foreach"), ("adam", "fused"),
    ("adam", "forloop"), ("sgd", "foreach"), ("sgd", "fused"), ("sgd", "forloop"), ("sgd-momentum", "foreach"),
    ("sgd-momentum", "fused"), ("sgd-momentum", "forloop"), ("adagrad", "foreach"), ("adagrad", "fused"), ("adagrad", "forloop"),
    ("rmsprop", "foreach"), ("rmsprop", "forloop"), ("adafactor", "foreach"), ("adafactor", "forloop"),
)  # fmt: skip
#: Where every layer is run, in every micro-batch, more of them take minutes and show nothing new.
_LAYERS_RUN = 12


class Dice:
    """Draws with ``random()`` alone, the only method of a generator that is promised never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random  # noqa: S311  a sample, not a secret

    def any(self, *things: T) -> T:
        """One of the things."""
        return things[int(self._random() * len(things))]


def drawn(count: int) -> list[JobSpec]:
    """Return the first ``count`` jobs: two of FSDP2, then one of DDP. If the estimate refuses a job, another is drawn.

    >>> drawn(9)[:6] == drawn(6)
    True
    """
    fsdp2, ddp = different(_fsdp2, FSDP2_SEED), different(_ddp, DDP_SEED)
    both = (next(ddp) if at % 3 == 2 else next(fsdp2) for at in range(count))
    return list(islice(both, count))


def different(make: Callable[[Dice], JobSpec], seed: int) -> Iterator[JobSpec]:
    """Yield different jobs that the estimate accepts."""
    dice, met = Dice(seed), set[JobSpec]()
    while True:
        try:
            job = make(dice)
            estimate(job)
        except SpecError:
            continue
        if job not in met:
            met.add(job)
            yield job


def _fsdp2(dice: Dice) -> JobSpec:
    shard, replicas = dice.any(*((n, r) for n in (1, 2, 3) for r in (1, 1, 2)), (4, 1), (6, 1), (8, 1), (8, 2))
    options = Fsdp2Options(
        reshard_after_forward=dice.any(None, True, False, *(ways for ways in (2, 3, 4) if shard % ways == 0)),
        reduce_dtype=dice.any("fp32", "fp32", "param"),  # type: ignore[arg-type]
        cpu_offload=dice.any(False, False, False, False, True),
    )
    said = {"engine": "fsdp2", "zero_stage": dice.any(2, 3, 3), "fsdp2": options}
    said["loss"] = dice.any("full", "full", "full", "chunked")
    return job_of(dice, said, MeshSpec(dp_shard=shard, dp_replicate=replicas))


def _ddp(dice: Dice) -> JobSpec:
    options = DdpOptions(
        gradient_as_bucket_view=dice.any(False, True),
        bucket_cap_mb=dice.any(None, None, 1, 100),
        find_unused_parameters=dice.any(False, False, True),
        static_graph=dice.any(False, False, True),
        wrap_one_rank=dice.any(False, True),
    )
    said = {"engine": "ddp", "zero_stage": dice.any(0, 0, 1), "ddp": options}
    return job_of(dice, said, MeshSpec(dp_shard=dice.any(1, 1, 2, 2, 3, 8)))


def job_of(dice: Dice, said: dict[str, object], mesh: MeshSpec) -> JobSpec:
    """Draw the other fields of a job with this engine and these ranks."""
    optimizer, impl = dice.any(*OPTIMIZERS)
    whole, layers = dice.any(*MODELS)
    recompute = dice.any("none", "none", "selective", "full")
    accumulated = dice.any(1, 1, 2, 3)
    some = dice.any(None, None, None, layers // 2) if recompute != "none" else None
    micro_batch, seq_len = dice.any((1, 64), (1, 512), (2, 512), (3, 1000), (4, 1024), (1, 2048))
    recipe = RecipeSpec(
        precision=dice.any("bf16-mixed", "bf16-mixed", "fp16-mixed", "bf16", "fp32"),  # type: ignore[arg-type]
        optimizer=optimizer,
        optimizer_impl=impl,
        recompute=recompute,  # type: ignore[arg-type]
        attention=dice.any("sdpa", "sdpa", "sdpa", "eager"),  # type: ignore[arg-type]
        keep_logits=dice.any(False, False, True, "fp32") if said.get("loss", "full") == "full" else False,  # type: ignore[arg-type]
        sync_every_micro_batch=dice.any(True, False),
        **said,  # type: ignore[arg-type]
    )
    runs_all = (said["engine"], said["zero_stage"]) == ("ddp", 1) or some is not None
    few = min(layers, _LAYERS_RUN // accumulated) if runs_all else layers
    recipe = recipe if some is None else replace(recipe, recompute_layers=min(some, few))
    cut = _cut(whole, few)
    return JobSpec(
        model=cut,
        recipe=as_ran(recipe, cut),
        mesh=mesh,
        batch=BatchSpec(micro_batch_size=micro_batch, seq_len=seq_len, grad_accum_steps=accumulated),
    )


def _cut(name: str, layers: int) -> ModelSpec:
    """Return the model with this many layers. If it has experts, at least one of the layers has them."""
    whole = model(name)
    moe = whole.moe
    if moe is not None and moe.num_dense_layers >= layers:
        moe = replace(moe, num_dense_layers=layers - 1)
    return replace(whole, num_hidden_layers=layers, moe=moe)

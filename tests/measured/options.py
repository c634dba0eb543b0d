"""Draws jobs with features outside the matrix: fine-tuning, offload, ZeRO++.

What the estimate refuses is not in it: another job is drawn in its place.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tests.engines_that_run import STAGES
from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec, estimate
from zeroplan.catalog.model import model
from zeroplan.errors import SpecError
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.recipe import DeepSpeedOptions, Fsdp2Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SEED = 20_262
T = TypeVar("T")

TUNED = ("llama-3.2-1b", "llama-3.1-8b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-8b", "mistral-7b")
WHOLE = (*TUNED, "gpt2", "gpt2-xl", "pythia-1.4b", "phi-3-mini", "gemma-3-4b")
_ENGINES = (
    ("deepspeed", 0), ("ddp", 0), ("ddp", 1), ("fsdp2", 2), ("fsdp2", 3), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3),
)  # fmt: skip
_MOST_LAYERS = 12
"""Where every layer is run, more of them take minutes and show nothing new."""


class _Dice:
    """Draws with ``random()`` alone, the only method of a generator that is promised never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random  # noqa: S311  a sample, not a secret

    def any(self, *things: T) -> T:
        """One of the things."""
        return things[int(self._random() * len(things))]


def drawn(count: int) -> list[JobSpec]:
    """Return the first ``count`` jobs. Kinds alternate, so that each has as many.

    >>> drawn(22)[:11] == drawn(11)
    True
    """
    return distinct(_jobs(_Dice(SEED)), count)


def distinct(jobs: Iterator[JobSpec], count: int) -> list[JobSpec]:
    """Return the first ``count`` distinct jobs."""
    found: dict[JobSpec, None] = {}
    while len(found) < count:
        found.setdefault(next(jobs))
    return list(found)


def _jobs(dice: _Dice) -> Iterator[JobSpec]:
    while True:
        for kind in KINDS:
            yield _offered(kind, dice)


def _offered(kind: Callable[[_Dice], JobSpec], dice: _Dice) -> JobSpec:
    while True:
        try:
            job = kind(dice)
            estimate(job)
        except SpecError:
            continue
        return job


def _lora(dice: _Dice) -> JobSpec:
    engine, stage = dice.any(
        ("ddp", 0), ("ddp", 1), ("fsdp2", 2), ("fsdp2", 3), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)
    )
    return _tuned(_job(dice, TUNED, engine, stage), _adapter(dice))


def _qlora(dice: _Dice) -> JobSpec:
    engine, stage = dice.any(("ddp", 0), ("ddp", 0), ("ddp", 1), ("fsdp2", 2), ("fsdp2", 3))
    return _tuned(_job(dice, TUNED, engine, stage), _adapter(dice, dice.any("nf4", "nf4-double")))


def _adapter(dice: _Dice, quantize: str = "none") -> AdapterSpec:
    targets = dice.any("all-linear", "attention", "mlp", "q_proj,v_proj")
    return AdapterSpec(rank=dice.any(8, 16, 64), targets=targets, quantize=quantize)  # type: ignore[arg-type]


def _tuned(job: JobSpec, adapter: AdapterSpec) -> JobSpec:
    return replace(job, model=replace(job.model, adapter=adapter))


def _frozen(dice: _Dice) -> JobSpec:
    job = _job(dice, TUNED, *dice.any(("ddp", 0), ("ddp", 1), ("fsdp2", 2), ("fsdp2", 3)))
    parts = dice.any("embedding", "embedding,head", "norm,head", "embedding,norm", "")
    layers = dice.any(0, job.model.num_hidden_layers // 2, job.model.num_hidden_layers - 1)
    return replace(job, model=replace(job.model, frozen=FrozenSpec(parts=parts, layers=layers)))


def _fsdp2_on_the_host(dice: _Dice) -> JobSpec:
    return _with(_job(dice, WHOLE, "fsdp2", dice.any(2, 3)), fsdp2=Fsdp2Options(cpu_offload=True))


def _activations_away(dice: _Dice) -> JobSpec:
    return _with(_job(dice, WHOLE, *dice.any(*STAGES)), offload_activations=True, recompute=dice.any("full", "selective"))


def _deepspeed(stages: Sequence[int], **said: Sequence[object]) -> Callable[[_Dice], JobSpec]:
    """Draw a DeepSpeed job with one of the given values for each of these options."""

    def job(dice: _Dice) -> JobSpec:
        stage = dice.any(*stages)
        options = {name: dice.any(*values) for name, values in said.items()}
        return _with(_job(dice, WHOLE, "deepspeed", stage), deepspeed=DeepSpeedOptions(**options))  # type: ignore[arg-type]

    return job


KINDS: tuple[Callable[[_Dice], JobSpec], ...] = (
    _lora,
    _qlora,
    _frozen,
    _activations_away,
    _fsdp2_on_the_host,
    _deepspeed((1, 2), offload_optimizer=("cpu",)),
    _deepspeed((3,), offload_optimizer=("cpu", "none"), offload_param=("cpu",)),
    _deepspeed((3,), offload_optimizer=("nvme", "cpu"), offload_param=("none", "cpu", "nvme")),
    _deepspeed((3,), zero_hpz_partition_size=(2, 4)),
    _deepspeed((3,), zero_quantized_weights=(True,), zero_hpz_partition_size=(1, 4)),
    _deepspeed((3,), zero_quantized_gradients=(True,), zero_quantized_weights=(True, False), gpus_per_node=(4,)),
)


def name_of(job: JobSpec) -> str:
    """Return which of the options a job has."""
    recipe, zero = job.recipe, job.recipe.deepspeed
    if job.model.adapter is not None:
        return "LoRA" if job.model.adapter.quantize == "none" else "QLoRA"
    named = {
        "frozen parts": job.model.frozen is not None,
        "activation offload": recipe.offload_activations,
        "FSDP2's CPU offload": recipe.fsdp2.cpu_offload,
        "ZeRO-Infinity, NVMe": "nvme" in (zero.offload_optimizer, zero.offload_param),
        "ZeRO-Offload, CPU": zero.offloads,
        "ZeRO++, quantized gradients": zero.zero_quantized_gradients,
        "ZeRO++, quantized weights": zero.zero_quantized_weights,
        "ZeRO++, hierarchical partitioning": zero.zero_hpz_partition_size > 1,
    }
    return next((name for name, has in named.items() if has), "none of them")


def _with(job: JobSpec, **recipe: object) -> JobSpec:
    return replace(job, recipe=replace(job.recipe, **recipe))  # type: ignore[arg-type]  # each is a field of it


def _job(dice: _Dice, names: Sequence[str], engine: str, stage: int) -> JobSpec:
    whole = model(dice.any(*names))
    layers = whole.num_hidden_layers if engine == "fsdp2" else min(whole.num_hidden_layers, _MOST_LAYERS)
    micro_batch, seq_len = dice.any((1, 512), (4, 1024), (3, 1000), (1, 4096), (2, 2048))
    return JobSpec(
        model=replace(whole, num_hidden_layers=layers),
        recipe=RecipeSpec(
            engine=engine,  # type: ignore[arg-type]
            zero_stage=stage,  # type: ignore[arg-type]
            precision=dice.any("bf16-mixed", "bf16-mixed", "bf16", "fp32"),  # type: ignore[arg-type]
            recompute=dice.any("none", "selective", "full"),  # type: ignore[arg-type]
            optimizer_impl=dice.any("fused", "foreach", None),  # type: ignore[arg-type]
        ),
        mesh=MeshSpec(dp_shard=dice.any(1, 4, 8, 16) if engine == "ddp" else dice.any(4, 8, 16, 64)),
        batch=BatchSpec(
            micro_batch_size=micro_batch,
            seq_len=min(seq_len, whole.max_position_embeddings),
            grad_accum_steps=dice.any(1, 1, 2),
        ),
    )

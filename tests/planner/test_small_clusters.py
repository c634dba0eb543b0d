"""On small clusters a plan finds a layout if and only if one of all layouts fits, whatever is trained and on which GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from operator import itemgetter
from typing import Any

import pytest

from tests.combined import BY_NIGHT
from zeroplan import JobSpec, MeshSpec, SpecError, estimate, job
from zeroplan.estimator import replayed_if_tight
from zeroplan.planner import Fixed, plan
from zeroplan.planner.degrees import SPLITTING
from zeroplan.spec.job import ENGINE_STAGES
from zeroplan.spec.recipe import SMALL_BUCKET, DdpOptions, Engine, RecipeSpec

GPUS = 4
DEGREES = (1, 2, 4)


def every_layout(base: JobSpec, engine: Engine) -> Iterator[JobSpec]:
    """Every way to split a model over four GPUs and to recompute, four sequences a step, one at a time."""
    ways = DEGREES if engine in SPLITTING else (1,)
    for tp, cp, pp, ep in product(ways, repeat=4):
        shared = tp * cp * pp
        if GPUS % shared or (GPUS // pp) % ep:
            continue
        mesh = MeshSpec(dp_shard=GPUS // shared, tp=tp, cp=cp, pp=pp, ep=ep)
        batch = replace(base.batch, micro_batch_size=1, grad_accum_steps=shared)
        for recipe in every_recipe(base.recipe, engine, tp):
            with suppress(SpecError):
                yield replace(base, recipe=recipe, mesh=mesh, batch=batch)


def every_recipe(recipe: RecipeSpec, engine: Engine, tp: int) -> Iterator[RecipeSpec]:
    """Every stage, recomputation and option of an engine that takes memory, as docs/plan.md says what is searched."""
    step = None if engine in ("deepspeed", "megatron") else "fused"
    losses = ("full", "chunked") if engine == "fsdp2" else ("full",)
    for stage, recompute, loss in product(ENGINE_STAGES[engine], ("none", "selective", "full"), losses):
        said = {"engine": engine, "zero_stage": stage, "recompute": recompute, "loss": loss, "optimizer_impl": step}
        for options in every_option(recipe, engine, stage, tp):
            with suppress(SpecError):
                yield replace(recipe, **said, **options)


def every_option(recipe: RecipeSpec, engine: Engine, stage: int, tp: int) -> Iterator[dict[str, Any]]:
    if engine == "ddp":
        yield from ({"ddp": DdpOptions(gradient_as_bucket_view=view)} for view in (False, True))
    elif engine == "deepspeed":
        own = replace(recipe.deepspeed, overlap_comm=True) if stage in (1, 2) else recipe.deepspeed
        small = replace(own, reduce_bucket_size=SMALL_BUCKET)
        yield from ({"deepspeed": one} for one in (own, small, replace(small, stage3_prefetch_bucket_size=0)))
    elif engine == "megatron" and stage < 2:  # Megatron-FSDP is not searched
        whole = replace(recipe.megatron, expert_tensor_parallel_size=1)
        own = replace(whole, overlap_grad_reduce=True, overlap_param_gather=stage > 0)
        yield from ({"megatron": own, "sequence_parallel": split} for split in ((False, True) if tp > 1 else (False,)))
    elif engine == "fsdp2":
        yield {}


def modelled(base: JobSpec, engine: Engine) -> Iterator[JobSpec]:
    for one in every_layout(base, engine):
        with suppress(SpecError):
            estimate(one)
            yield one


def with_room(base: JobSpec, n_bytes: float) -> JobSpec:
    gpu = base.cluster.gpu
    assert gpu is not None
    small = replace(gpu, memory_bytes=replace(gpu.memory_bytes, value=int(n_bytes), check=None))
    return replace(base, cluster=replace(base.cluster, gpu=small))


CASES: dict[str, tuple[Engine, dict[str, Any]]] = {
    "experts, FSDP2": ("fsdp2", {"model": "olmoe-1b-7b"}),
    "experts, Megatron": ("megatron", {"model": "mixtral-8x7b"}),
    "experts, DeepSpeed": ("deepspeed", {"model": "qwen1.5-moe-a2.7b"}),
    "MLA, FSDP2": ("fsdp2", {"model": "moonlight-16b-a3b"}),
    "MLA, Megatron": ("megatron", {"model": "moonlight-16b-a3b"}),
    "MLA, DeepSpeed": ("deepspeed", {"model": "moonlight-16b-a3b"}),
    "LoRA, FSDP2": ("fsdp2", {"model": "llama-3.2-1b", "lora_rank": 16}),
    "LoRA, DDP": ("ddp", {"model": "llama-3.2-1b", "lora_rank": 16}),
    "LoRA, DeepSpeed": ("deepspeed", {"model": "llama-3.2-1b", "lora_rank": 16}),
    "four bits, FSDP2": ("fsdp2", {"model": "llama-3.2-1b", "lora_rank": 16, "quantize": "nf4"}),
    "padded, FSDP2": ("fsdp2", {"model": "smollm2-360m", "padded": True}),
    "padded, DDP": ("ddp", {"model": "smollm2-360m", "padded": True}),
    "padded, DeepSpeed": ("deepspeed", {"model": "smollm2-360m", "padded": True}),
    "T4, FSDP2": ("fsdp2", {"model": "gpt2-medium", "gpu": "t4-16gb", "precision": "fp16-mixed", "seq_len": 1024}),
    "T4, DDP": ("ddp", {"model": "gpt2-medium", "gpu": "t4-16gb", "precision": "fp16-mixed", "seq_len": 1024}),
    "V100, DeepSpeed": ("deepspeed", {"model": "qwen2.5-0.5b", "gpu": "v100-sxm2-16gb", "precision": "fp16-mixed"}),
    "V100, Megatron": ("megatron", {"model": "qwen2.5-0.5b", "gpu": "v100-sxm2-16gb", "precision": "fp16-mixed"}),
    "images, FSDP2": ("fsdp2", {"model": "llava-1.5-7b"}),
    "images, DDP": ("ddp", {"model": "internvl3-8b", "freeze": "tower"}),
    "images, DeepSpeed": ("deepspeed", {"model": "internvl3-8b"}),
    "linear attention, FSDP2": ("fsdp2", {"model": "qwen3.5-9b"}),
}
#: Cases of which every engine has one, and that take a second or two each; the others run at night.
BY_DAY = ("images, DDP", "padded, DDP", "T4, DDP", "V100, DeepSpeed", "V100, Megatron", "images, FSDP2", "experts, Megatron")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DAY else BY_NIGHT) for name in CASES])
def test_a_plan_fits_where_one_of_all_layouts_does(name: str):
    """At the size of the smallest layout and a little beside it, where a replay decides."""
    engine, said = CASES[name]
    base = job(**{"gpu": "h100", "gpus": GPUS, "seq_len": 2048, "engine": engine, **said})
    layouts = sorted(((estimate(one).least_bytes, one) for one in modelled(base, engine)), key=itemgetter(0))
    fixed = Fixed(engine=engine, global_batch_size=GPUS, offload_optimizer="none", offload_param="none")
    for share in (0.999, 1.0, 1.03):
        small = with_room(base, share * layouts[0][0])
        smaller = (replace(one, cluster=small.cluster) for least, one in layouts if least <= share * layouts[0][0])
        fits = any(replayed_if_tight(estimate(one)).fits for one in smaller)
        assert (plan(small, fixed).best is not None) == fits, share

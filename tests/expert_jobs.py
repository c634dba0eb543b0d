"""Small jobs with expert parallelism: every variant of blocks, groups and passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from tests.transformer.tiny_configs import TINY, tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.family import DISPATCHED_FAMILIES
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.spec.recipe import RecipeSpec


def expert_model(family: str = "mixtral", *, width: int = 96, layers: int = 4, dense: int = 0) -> ModelSpec:
    """A model of eight experts, two per token."""
    return ModelSpec(
        family=family,
        hidden_size=64,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        moe=MoeSpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=width, num_dense_layers=dense),
    )


def tiny_model(case: str) -> ModelSpec:
    """The tiny model of a case, with eight experts and wider matrices, so that a missing tensor shows."""
    config = tiny_config(case)
    counts = {key: 8 for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts") if config.get(key)}
    widths = {key: 4 * size for key, size in config.items() if key.endswith("intermediate_size") and isinstance(size, int)}
    return model_from_config(
        {**config, **counts, **widths, "hidden_size": 64, "vocab_size": 256, "max_position_embeddings": 256}
    )


def expert_job(
    *, model: ModelSpec | None = None, dp_shard: int = 8, ep: int = 4, dp_replicate: int = 1, cp: int = 1, tp: int = 1,
    batch: tuple[int, int, int] = (2, 64, 1), **recipe: object,
) -> JobSpec:  # fmt: skip
    """A job; ``batch`` has micro-batch, sequence length and micro-batches per step."""
    size, seq_len, steps = batch
    return JobSpec(
        model=model or expert_model(),
        mesh=MeshSpec(dp_shard=dp_shard, ep=ep, dp_replicate=dp_replicate, cp=cp, tp=tp),
        batch=BatchSpec(micro_batch_size=size, seq_len=seq_len, grad_accum_steps=steps),
        recipe=RecipeSpec(**recipe),
    )


_GPT_OSS = replace(expert_model("gpt_oss"), attention_bias=True, sliding_window=128)
_QWEN3, _WIDE, _SHORT = expert_model("qwen3_moe", layers=5, dense=1), expert_model(width=256), (1, 8, 1)
JOBS: dict[str, JobSpec] = {
    "mixtral": expert_job(),
    "mixtral, selective": expert_job(recompute="selective"),
    "mixtral, stage 2, fp32": expert_job(zero_stage=2, precision="fp32"),
    "mixtral, no one has the same experts, recomputed": expert_job(model=_WIDE, ep=8, batch=_SHORT, recompute="full"),
    "mixtral, fewer experts than ranks, whole gradients accumulated": expert_job(
        model=_WIDE, dp_shard=32, batch=(1, 8, 3), sync_every_micro_batch=False
    ),
    "mixtral, fewer experts than ranks, replicas, accumulated": expert_job(
        model=_WIDE, dp_shard=32, dp_replicate=2, batch=(1, 8, 2), recompute="full"
    ),
    "mixtral, two ranks have the same experts, accumulated": expert_job(model=_WIDE, batch=(1, 8, 2), zero_stage=2),
    "gpt-oss, selective": expert_job(model=_GPT_OSS, recompute="selective"),
    "gpt-oss, fewer experts than ranks, recomputed": expert_job(
        model=_GPT_OSS, dp_shard=16, ep=2, batch=_SHORT, recompute="full"
    ),
    "qwen3 with a dense layer, recomputed": expert_job(model=_QWEN3, recompute="full"),
    "qwen3 with a dense layer, bf16, no one has the same experts": expert_job(model=_QWEN3, ep=8, precision="bf16"),
    "mixtral, sequences shared by more ranks than experts, selective": expert_job(
        dp_shard=2, cp=4, ep=8, batch=(2, 256, 1), recompute="selective"
    ),
    "qwen3 with a dense layer, shared sequences, replicas, recomputed": expert_job(
        model=_QWEN3, dp_shard=2, dp_replicate=2, cp=2, batch=(1, 128, 2), recompute="full"
    ),
    "mixtral, tensor-parallel ranks, selective": expert_job(dp_shard=2, tp=2, recompute="selective"),
    "mixtral, tensor-parallel ranks, more ranks than experts, accumulated": expert_job(
        model=_WIDE, dp_shard=16, tp=2, batch=(1, 8, 2), recompute="full"
    ),
    "mixtral, tensor-parallel ranks with all experts among them, replicas, stage 2, fp32": expert_job(
        dp_shard=4, tp=2, ep=2, dp_replicate=2, zero_stage=2, precision="fp32"
    ),
    "qwen3 with a dense layer, tensor-parallel ranks": expert_job(model=_QWEN3, dp_shard=4, tp=2, ep=8, batch=(1, 64, 2)),
    "mixtral, experts that are visited more often": expert_job(imbalance=1.5),
    "mixtral, experts that are visited more often, recomputed, accumulated": expert_job(
        imbalance=1.377, batch=(1, 64, 2), recompute="full"
    ),
    "gpt-oss, experts that are visited more often, selective": expert_job(model=_GPT_OSS, imbalance=2.5, recompute="selective"),
    "qwen3 with a dense layer, experts that are visited more often, tensor-parallel ranks": expert_job(
        model=_QWEN3, imbalance=1.25, dp_shard=4, tp=2, ep=8, batch=(1, 64, 2)
    ),
    "mixtral, experts that are visited more often, bf16, shared sequences": expert_job(
        imbalance=3, dp_shard=2, cp=4, ep=8, batch=(2, 256, 1), precision="bf16"
    ),
    "qwen3 with a dense layer, tensor-parallel ranks, shared sequences, recomputed": expert_job(
        model=_QWEN3, dp_shard=2, tp=2, cp=2, batch=(2, 256, 1), recompute="full"
    ),
}  # fmt: skip
_OTHERS = ("ernie4_5_moe", "qwen2_moe", "glm_moe_dsa")
"""Families whose estimate differs a little on a single rank as well: a frozen bias is reduced, logits of a router live on, and keys
that no layer picked count for the first one."""
_WAYS: dict[str, dict[str, object]] = {
    "selective": {"recompute": "selective"},
    "fewer experts than ranks, replicas, accumulated": {"ep": 2, "dp_shard": 16, "dp_replicate": 2, "batch": (1, 16, 2)},
    "recomputed, accumulated": {"recompute": "full", "batch": (1, 64, 2)},
    "experts that are visited more often, stage 2": {"imbalance": 1.5, "zero_stage": 2},
    "no one has the same experts": {"ep": 8},
}
_ROUTED = [case for case in TINY if case.partition(",")[0] in {*DISPATCHED_FAMILIES} - {*_OTHERS} and tiny_model(case).moe]
_CASES = {case.partition(",")[0]: case for case in reversed(_ROUTED)}
_DRAWN = [*zip(_CASES.values(), cycle(_WAYS)), *(("nemotron_h, experts", words) for words in _WAYS)]  # its layers alternate
JOBS |= {f"{case}: {words}": expert_job(model=tiny_model(case), **_WAYS[words]) for case, words in _DRAWN}
_ADAPTED = replace(expert_model("qwen3_moe", layers=5, dense=1), adapter=AdapterSpec(rank=4, targets="q_proj,o_proj"))
JOBS |= {
    f"qwen3 with frozen experts, {words}": expert_job(model=_ADAPTED, **how)
    for words, how in {
        "recomputed": {"recompute": "full"},
        "stage 2, no one has the same experts": {"zero_stage": 2, "ep": 8},
        "fewer experts than ranks, accumulated": {"dp_shard": 16, "ep": 2, "batch": (1, 16, 2)},
    }.items()
}

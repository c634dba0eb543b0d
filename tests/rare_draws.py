"""Options that few jobs have: a random job now and then gets one that the specs accept."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

from zeroplan import JobSpec
from zeroplan.errors import SpecError
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.job import ENGINE_STAGES

_Fields = dict[str, Any]
_LATER = {"recompute": "none", "zero_stage": 1, "attention": "sdpa"}
#: What prime-rl's adapters of several runs need.
_OF_RUNS = {"fsdp2": {}, "sync_every_micro_batch": True}
_BARE = {"targets": "all-linear", "quantize": "none"}
#: Fields that are set together; an inner table is a section that the job must have, an engine's for jobs of that engine.
_RARE: tuple[_Fields, ...] = (
    {"recipe": {"padded": True}},
    {"recipe": {"offload_activations": True, "inputs_in_flight": 5}},
    {"recipe": {"ddp": {"compiled": True}}},
    {"recipe": {"ddp": {"step_in_backward": True}}, "mesh": {"dp_shard": 1}, "batch": {"grad_accum_steps": 1}},
    {"recipe": {"fsdp1": {"cpu_offload": True}}},
    {"recipe": {"fsdp2": {"sequence_parallel": False}}},
    {"recipe": {"fsdp2": {"float8_all_gather": True}, "float8_recipe": "tensorwise"}},
    {
        "recipe": {
            "fsdp2": {"modules": "torchtitan-0.3", "float8_layers": 1},
            "float8_recipe": "mxfp8",
            "fused_kernels": "compiled-blocks",
            "recompute": "selective",
            "loss": "chunked",
        },
        "model": {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        "mesh": {"dp_shard": 8},
        "batch": {"seq_len": 512, "longest_seq_len": None},
    },
    {"recipe": {"fsdp2": {"keeps_last": True}}},
    {"recipe": {"fsdp2": {"forward_prefetch": 2}}},
    {"recipe": {"fsdp2": {"forward_prefetch": 1, "backward_prefetch": 3, "keeps_last": True}}},
    {"recipe": {"fsdp2": {"backward_prefetch": 2}}},
    {"recipe": {"megatron": {"fp8_format": "hybrid"}}},
    {
        "recipe": {
            "megatron": {"fp8_format": "e4m3", "fp8_recipe": "tensorwise", "fp8_param_gather": True, "fp8_transposes": False}
        }
    },
    {"recipe": {"megatron": {"mtp_num_layers": 1}}},
    {"recipe": {"optimizer": "muon", "megatron": {"use_layer_wise_param_layout": False}}},
    {"recipe": {"megatron": {"main_weights": False}}},
    {"recipe": {"megatron": {"main_weights": False, "gradients_beside": 1}}},
    {"recipe": {"megatron": {"tp_comm_overlap": True}}},
    {"recipe": {"megatron": {"tp_comm_overlap": True, "tp_comm_overlap_cfg": True}}},
    {"recipe": {"megatron": {"last_tokens": "embedding"}}},
    {"recipe": {"megatron": {"last_tokens": "reranker"}}},
    {"recipe": {"megatron": {"use_precision_aware_optimizer": True, "optimizer_offload_fraction": 0.5}}},
    {"recipe": {"megatron": {"moe_router_num_groups": 2, "moe_router_group_topk": 2}}, "model": {"moe": {}}},
    {
        "recipe": {"megatron": {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}},
        "model": {"moe": {}},
    },
    {
        "recipe": {
            **_LATER,
            "megatron": {
                "hybrid_layer_pattern": "M*",
                "mamba_state_dim": 64,
                "mamba_head_dim": 32,
                "mamba_num_groups": 4,
                "mamba_num_heads": 16,
            },
        },
        "model": {"num_hidden_layers": 2, "moe": None},
    },
    {"model": {"moe": {"latent_size": 64}}},
    {"model": {"moe": {"num_groups": 2}}},
    {"model": {"adapter": {"modules_to_save": "lm_head"}}},
    {"model": {"adapter": {"modules_to_save": "embed_tokens,lm_head"}}},
    {"model": {"vision": {"follows_pixels": True}}},
    {"model": {"vision": {"freeze_text": True}}},
    {"model": {"adapter": {"automodel": True}}},
    {"recipe": {"fsdp2": {}}, "model": {"adapter": {"base": "fp32"}}},
    {"recipe": {"precision": "bf16", **_OF_RUNS}, "model": {"adapter": {"runs": 4, "looped": True, **_BARE}}},
    {
        "recipe": {"precision": "bf16-mixed", **_OF_RUNS},
        "model": {"adapter": {"runs": 2, "learning": 1, "base": "fp32", "looped": True, **_BARE}},
    },
    {"recipe": {"precision": "bf16", **_OF_RUNS}, "model": {"adapter": {"runs": 3, "learning": 0, "rank": 16, **_BARE}}},
    {"model": {"adapter": {"dora": "peft"}}},
    {"model": {"adapter": {"dora": "torchtune", "quantize": "nf4-torchao"}}},
    {
        "recipe": {"fsdp2": {}, "precision": "bf16", "fused_kernels": "grouped-experts", "imbalance": 1.0},
        "model": {"moe": {}, "adapter": AdapterSpec(rank=8, targets="attention", automodel=True, experts_rank=8)},
        "mesh": {"dp_shard": 1, "ep": 1},
    },
    {"model": {"moe": {}, "adapter": AdapterSpec(rank=8, targets="attention", quantize="nf4", quantize_experts=True)}},
    {
        "recipe": {"transformers": "4.45"},
        "model": {"moe": {"separate": True}, "adapter": AdapterSpec(rank=8, targets="attention")},
    },
)


def with_one_more(made: JobSpec) -> JobSpec:
    """Return the job with one of these options in one of four draws, or the job itself if the specs refuse all of them."""
    apart = Random(f"{made.mesh} {made.batch} {made.recipe}")  # noqa: S311  so that other draws stay as they are
    for fields in apart.sample(_RARE, len(_RARE)) if not apart.randint(0, 3) else ():
        if _fits(made, made.recipe.engine, fields):
            with suppress(SpecError):
                return _with(made, fields)
    return made


def _fits(spec: Any, engine: str, fields: _Fields) -> bool:
    """Whether the job has every section that the fields name."""
    inner = {name: part for name, part in fields.items() if isinstance(part, Mapping)}
    return all(
        (name not in ENGINE_STAGES or name == engine)
        and (there := getattr(spec, name)) is not None
        and _fits(there, engine, part)
        for name, part in inner.items()
    )


def _with(spec: Any, fields: _Fields) -> Any:
    """Return the spec with these fields."""
    return replace(
        spec, **{name: _with(getattr(spec, name), new) if isinstance(new, Mapping) else new for name, new in fields.items()}
    )

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
#: Fields that are set together; an inner table is a section that the job must have, an engine's for jobs of that engine.
_RARE: tuple[_Fields, ...] = (
    {"recipe": {"padded": True}},
    {"recipe": {"offload_activations": True, "inputs_in_flight": 5}},
    {"recipe": {"ddp": {"compiled": True}}},
    {"recipe": {"ddp": {"step_in_backward": True}}, "mesh": {"dp_shard": 1}, "batch": {"grad_accum_steps": 1}},
    {"recipe": {"fsdp1": {"cpu_offload": True}}},
    {"recipe": {"fsdp2": {"sequence_parallel": False}}},
    {"recipe": {"fsdp2": {"float8_all_gather": True}, "float8_recipe": "tensorwise"}},
    {"recipe": {"megatron": {"fp8_format": "hybrid"}}},
    {
        "recipe": {
            "megatron": {"fp8_format": "e4m3", "fp8_recipe": "tensorwise", "fp8_param_gather": True, "fp8_transposes": False}
        }
    },
    {"recipe": {"megatron": {"mtp_num_layers": 1}}},
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
    {"model": {"adapter": {"modules_to_save": "lm_head"}}},
    {"model": {"adapter": {"modules_to_save": "embed_tokens,lm_head"}}},
    {"model": {"vision": {"follows_pixels": True}}},
    {"model": {"vision": {"freeze_text": True}}},
    {"model": {"adapter": {"automodel": True}}},
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

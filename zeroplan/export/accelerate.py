"""Writes a job as YAML for ``accelerate launch`` (accelerate 1.15, commands/config/config_args.py, ClusterConfig)."""

from collections.abc import Iterator
from dataclasses import replace

from zeroplan.errors import SpecError
from zeroplan.export.fsdp2 import reshards
from zeroplan.resolve import Request
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import Fsdp2Options

_MIXED = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}


def accelerate_yaml(job: JobSpec, *, nodes: int, deepspeed_file: str) -> str:
    """Return the YAML of a DDP, FSDP1, FSDP2 or DeepSpeed layout. It refers to DeepSpeed's own file, ``deepspeed_file``."""
    return "".join(f"{line}\n" for line in _lines(job, nodes, deepspeed_file))


def as_accelerate_has_it(request: Request) -> Request:
    """Return the request with accelerate's behaviour: the model returns fp32 logits, which the training loop holds by default.

    Its FSDP2 reduces gradients in the compute dtype (accelerate 1.15, utils/dataclasses.py, ``set_mixed_precision``).
    """
    if request.precision == "fp32":
        return request
    held = "fp32" if request.keep_logits is None else request.keep_logits
    return replace(request, keep_logits=held, fsdp2=request.fsdp2 or Fsdp2Options(reduce_dtype="param"))


def _lines(job: JobSpec, nodes: int, deepspeed_file: str) -> Iterator[str]:
    recipe = job.recipe
    kind = {"ddp": "MULTI_GPU", "fsdp1": "FSDP", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}[recipe.engine]
    yield "compute_environment: LOCAL_MACHINE"
    alone = recipe.engine == "ddp" and job.mesh.world_size == 1
    yield "distributed_type: 'NO'" if alone else f"distributed_type: {kind}"
    yield f"num_machines: {nodes}"
    yield f"num_processes: {job.mesh.world_size}"
    yield "machine_rank: 0"
    yield "rdzv_backend: c10d" if nodes > 1 else "rdzv_backend: static"
    yield "same_network: true"
    yield "main_training_function: main"
    if recipe.engine == "deepspeed":
        yield "deepspeed_config:"
        yield f"  deepspeed_config_file: {deepspeed_file}"
        yield f"  zero3_init_flag: {_word(recipe.zero_stage == 3)}"
        return
    yield f"mixed_precision: '{_MIXED.get(recipe.precision, 'no')}'"
    if recipe.engine == "fsdp2":
        yield from _fsdp(job)
    if recipe.engine == "fsdp1":
        yield from _fsdp1(job, nodes)


def _fsdp1(job: JobSpec, nodes: int) -> Iterator[str]:
    recipe, replicas = job.recipe, job.mesh.dp_replicate
    if replicas not in (1, nodes):
        raise SpecError(
            f"accelerate's FSDP1 has a replica on each of {nodes} nodes, not {replicas}; use --replicas {nodes}, or 1"
        )
    strategy = {
        (3, False): "FULL_SHARD",
        (2, False): "SHARD_GRAD_OP",
        (3, True): "HYBRID_SHARD",
        (2, True): "HYBRID_SHARD_ZERO2",
    }
    yield "fsdp_config:"
    yield "  fsdp_version: 1"
    yield f"  fsdp_sharding_strategy: {strategy[recipe.zero_stage, replicas > 1]}"
    yield f"  fsdp_backward_prefetch: {recipe.fsdp1.backward_prefetch.upper()}"
    yield f"  fsdp_forward_prefetch: {_word(recipe.fsdp1.forward_prefetch)}"
    yield f"  fsdp_use_orig_params: {_word(recipe.fsdp1.use_orig_params)}"
    yield f"  fsdp_offload_params: {_word(recipe.offloads_states)}"
    yield "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    yield "  fsdp_state_dict_type: SHARDED_STATE_DICT"
    yield "  fsdp_sync_module_states: true"
    yield "  fsdp_cpu_ram_efficient_loading: true"
    yield f"  fsdp_activation_checkpointing: {_word(recipe.recompute == 'full')}"


def _fsdp(job: JobSpec) -> Iterator[str]:
    recipe = job.recipe
    yield "fsdp_config:"
    yield "  fsdp_version: 2"
    yield f"  fsdp_reshard_after_forward: {_word(reshards(recipe))}"
    yield f"  fsdp_offload_params: {_word(recipe.offloads_states)}"
    yield "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    yield "  fsdp_state_dict_type: SHARDED_STATE_DICT"
    yield "  fsdp_cpu_ram_efficient_loading: true"
    yield f"  fsdp_activation_checkpointing: {_word(recipe.recompute == 'full')}"
    if job.mesh.dp_replicate > 1:
        yield "parallelism_config:"
        yield f"  parallelism_config_dp_replicate_size: {job.mesh.dp_replicate}"
        yield f"  parallelism_config_dp_shard_size: {job.mesh.dp_shard}"


def _word(value: bool) -> str:  # noqa: FBT001  one value
    return "true" if value else "false"

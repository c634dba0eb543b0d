"""Reads a job from the YAML of ``accelerate launch``.

Keys are accelerate 1.15's (commands/config/config_args.py, commands/launch.py), with its defaults for keys left out. The training
script sets batch, optimizer and model.
"""

from pathlib import Path

from zeroplan.catalog.setups.reading import deepspeed_beside
from zeroplan.catalog.setups.settings import Reading, Table, own_tensor_parallelism
from zeroplan.catalog.setups.setup import DeepSpeedPart, Setting, Setup
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError

_PRECISION = {"no": "fp32", "fp16": "fp16-mixed", "bf16": "bf16-mixed"}
_KEPT = "accelerate returns logits in fp32, and the loops of its examples keep them, so they are counted"
_NAMED = "the loops of accelerate's examples hold the model's output: its logits are counted"


def accelerate_setup(table: Table, folder: Path, _: int | None = None) -> Setup:
    """Return the job in the file; raises SpecError for CPU or cloud jobs, or for settings that are not modelled."""
    reading = Reading(table, folder)
    reading.own_units = "accelerate"
    if table.text("compute_environment") not in (None, "LOCAL_MACHINE"):
        raise SpecError(f"{table.where}: compute_environment={shown(table.data['compute_environment'])} is not modelled")
    if table.switch("use_cpu"):
        raise SpecError(f"{table.where}: use_cpu is true, but zeroplan estimates GPU memory")
    kind = table.get("distributed_type")
    readers = {"FSDP": _fsdp, "DEEPSPEED": _deepspeed, "MULTI_GPU": _ddp, "NO": _ddp, False: _ddp, None: _ddp}
    if isinstance(kind, (list, dict)) or kind not in readers:
        raise SpecError(f"{table.where}: distributed_type={shown(kind)} is not modelled; MULTI_GPU, FSDP, DEEPSPEED and NO are")
    _ranks(reading, alone=kind in ("NO", False, None))
    readers[kind](reading)
    _others(reading)
    return reading.setup("accelerate")


def _ranks(reading: Reading, *, alone: bool) -> None:
    table = reading.table
    ranks, nodes = table.count("num_processes", least=-1), table.count("num_machines")
    if alone:
        reading.set("gpus", "distributed_type NO", 1)
    elif ranks is not None and ranks > 0:
        reading.set("gpus", "num_processes", ranks)
        if nodes is not None and nodes > 1:
            if ranks % nodes:
                raise SpecError(f"{table.where}: num_processes={ranks} is not divisible by num_machines={nodes}")
            reading.set("gpus_per_node", "num_processes / num_machines", ranks // nodes)


def _precision(reading: Reading) -> str:
    precision = reading.table.get("mixed_precision")
    word = "no" if precision in (None, False) else str(precision).lower()
    if precision is None and reading.table.switch("fp16"):
        word = "fp16"
    if word not in _PRECISION:
        raise reading.table.refused("mixed_precision", "use bf16, fp16 or no")
    also = {"bf16": ("bf16",), "no": ("bf16",)}.get(word, ())  # a script may have made its weights bf16 itself
    reading.set("precision", "mixed_precision", _PRECISION[word], also=also)
    if word == "no":
        reading.set("keep_logits", "outputs", value=True, filled=True, note=_NAMED)
    else:
        reading.set("keep_logits", "mixed_precision", "fp32", filled=True, note=_KEPT)
    return word


def _ddp(reading: Reading) -> None:
    _precision(reading)
    reading.set("engine", "distributed_type", "ddp")
    reading.set("stage", "distributed_type", 0)
    reading.set("sync_every_micro_batch", "accumulate()", value=False, filled=True)


def _fsdp(reading: Reading) -> None:
    table = reading.table.table("fsdp_config")
    word = _precision(reading)
    version = table.count("fsdp_version") or 1
    if version == 1:
        reading.set("engine", "fsdp_version", "fsdp1", also=("fsdp2",))
        reading.flags["stage"] = _fsdp1_stage(table)
        _fsdp1_options(reading, table)
    else:
        reading.set("engine", "distributed_type and fsdp_version", "fsdp2")
        keeps = table.switch("fsdp_reshard_after_forward") is False
        reading.set("stage", "fsdp_config.fsdp_reshard_after_forward", 2 if keeps else 3)
    if word == "bf16" and version == 2:  # set_mixed_precision reduces in the compute dtype
        reading.options["fsdp2.reduce_dtype"] = Setting("mixed_precision", "param")
    reading.set("sync_every_micro_batch", "accumulate()", value=False, filled=True)
    _fsdp_memory(reading, table)
    _replicas(reading)
    reading.notes += table.unknown()


def _fsdp1_stage(table: Table) -> Setting:
    words = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "TRUE": 3, "FALSE": 2}
    key = next((key for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward") if table.get(key) is not None), "")
    word = str(table.data[key]).upper() if key else "FULL_SHARD"
    if word not in words:
        raise table.refused(key, "use FULL_SHARD or SHARD_GRAD_OP")
    return Setting(f"fsdp_config.{key or 'fsdp_sharding_strategy'}", words[word])


def _fsdp1_options(reading: Reading, table: Table) -> None:
    """Read FSDP1's switches, with accelerate's defaults (1.15, utils/dataclasses.py, FullyShardedDataParallelPlugin)."""
    key, words = "fsdp_backward_prefetch", ("backward_pre", "backward_post", "no_prefetch")
    word = str(table.get(key) or "NO_PREFETCH").lower()
    if word not in words:
        raise table.refused(key, "use BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH")
    reading.options["fsdp1.backward_prefetch"] = Setting(f"fsdp_config.{key}", word, key not in table.data)
    for name in ("forward_prefetch", "use_orig_params"):
        value = bool(table.switch(f"fsdp_{name}"))
        reading.options[f"fsdp1.{name}"] = Setting(f"fsdp_config.fsdp_{name}", value, f"fsdp_{name}" not in table.data)


def _fsdp_memory(reading: Reading, table: Table) -> None:
    policy = str(table.get("fsdp_auto_wrap_policy") or "NO_WRAP").upper()
    if policy != "TRANSFORMER_BASED_WRAP":
        raise SpecError(
            f"{table.where}: fsdp_auto_wrap_policy={policy} does not shard block by block, which is what is modelled; use "
            "TRANSFORMER_BASED_WRAP"
        )
    if table.switch("fsdp_offload_params"):
        reading.set_offload("fsdp_config.fsdp_offload_params")
    recomputes = bool(table.switch("fsdp_activation_checkpointing"))
    key = "fsdp_config.fsdp_activation_checkpointing"
    reading.set("recompute", key, "full" if recomputes else "none", filled=not recomputes)
    if table.switch("fsdp_activation_checkpointing_offload"):
        reading.set("offload_activations", "fsdp_config.fsdp_activation_checkpointing_offload", value=True)
    if table.switch("fsdp_forward_prefetch") and (table.count("fsdp_version") or 1) != 1:
        raise table.refused("fsdp_forward_prefetch", "FSDP2 has no such switch; leave it out")
    table.judge("accelerate-fsdp")


def _replicas(reading: Reading) -> None:
    """Read ``parallelism_config``, whose keys may leave out the prefix ``parallelism_config_``."""
    table = reading.table.table("parallelism_config")
    degrees = {}
    for short in ("dp_replicate_size", "tp_size", "cp_size", "dp_shard_size", "sp_size"):
        long = f"parallelism_config_{short}"
        degrees[short] = table.count(long if long in table.data else short) or 1
        table.leave((long, short))
    if degrees["tp_size"] > 1:
        reading.asks["tensor_parallel"] = own_tensor_parallelism("parallelism_config_tp_size", degrees["tp_size"])
    for short, flag in (("dp_replicate_size", "replicas"), ("cp_size", "context_parallel")):
        if degrees[short] > 1:
            reading.set(flag, f"parallelism_config_{short}", degrees[short])
    if degrees["cp_size"] > 1:
        table.refuse({"parallelism_config_cp_comm_strategy": ("allgather",), "cp_comm_strategy": ("allgather",)})
    if degrees["sp_size"] > 1:
        raise SpecError(f"{table.where}: parallelism_config_sp_size={degrees['sp_size']} is not modelled; leave it out")
    ranks, product = reading.flags.get("gpus"), 1
    for degree in degrees.values():
        product *= degree
    if ranks is not None and degrees["dp_shard_size"] > 1 and ranks.value != product:
        raise SpecError(f"{table.where}: num_processes={ranks.value} is not the {product} ranks of its parallelism_config")
    table.judge("accelerate-parallelism")
    reading.notes += table.unknown()


def _deepspeed(reading: Reading) -> None:
    table = reading.table.table("deepspeed_config")
    named = table.text("deepspeed_config_file")
    if named is not None:
        reading.deepspeed = deepspeed_beside(named, reading.folder, reading.table.where)
    else:
        reading.deepspeed = _inline(reading, table)
    zero = reading.deepspeed.data.get("zero_optimization")
    third = isinstance(zero, dict) and zero.get("stage") == 3
    if table.switch("zero3_init_flag") is False and third:
        reading.options["deepspeed.zero_init"] = Setting("deepspeed_config.zero3_init_flag", value=False)
    table.judge("accelerate-deepspeed")
    reading.notes += table.unknown()
    reading.table.leave(("mixed_precision",))
    reading.set("keep_logits", "outputs", value=True, filled=True, note=_NAMED)  # DeepSpeed returns the model's output


def _inline(reading: Reading, table: Table) -> DeepSpeedPart:
    """Return the DeepSpeed configuration that accelerate makes from its own keys (utils/dataclasses.py, DeepSpeedPlugin)."""
    stage = table.count("zero_stage", least=0)
    steps, word = table.get("gradient_accumulation_steps"), str(reading.table.get("mixed_precision") or "no").lower()
    offload = {name: table.text(f"{name}_device") for name in ("offload_optimizer", "offload_param")}
    zero: dict[str, object] = {"stage": 2 if stage is None else stage}
    zero |= {name: {"device": device.lower()} for name, device in offload.items() if device is not None}
    table.get("gradient_clipping")
    if word not in _PRECISION:
        raise reading.table.refused("mixed_precision", "use bf16, fp16 or no")
    data: dict[str, object] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": steps if steps is not None else "auto",
        "zero_optimization": zero,
    }
    if isinstance(steps, str) and steps.isdigit():
        data["gradient_accumulation_steps"] = int(steps)
    if word != "no":
        data[word] = {"enabled": True}
    return DeepSpeedPart(data, f"{reading.table.where}: deepspeed_config")


def _others(reading: Reading) -> None:
    table = reading.table
    dynamo = table.table("dynamo_config")
    for one in (dynamo, table):
        if str(one.get("dynamo_backend") or "no").lower() != "no":
            reading.set_compiled(one, "dynamo_backend", whole=not dynamo.switch("dynamo_use_regional_compilation"))
    dynamo.leave(("dynamo_mode", "dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation"))
    reading.notes += dynamo.unknown()
    table.judge("accelerate")
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        if table.data.get(section) in (None, {}):
            table.leave((section,))

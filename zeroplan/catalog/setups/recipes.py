"""Reads a job from YAML recipes of torchtune, nanotron and Lightning; what these and NeMo AutoModel's have in common.

Keys and defaults are those of the programs' code at the commits that docs/from-a-file.md lists: torchtune's recipes/ and
training/precision.py, nanotron's config/, and litgpt's finetune/ and pretrain.py.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zeroplan.catalog.setups.settings import NO_GPUS, FlatTable, Reading, Table
from zeroplan.catalog.setups.setup import DeepSpeedPart, Setting, Setup
from zeroplan.errors import SpecError

NO_LENGTH = "sequences are as long as the data's: the length is that of --seq-len, or its default"
_OPTIMIZERS = {
    "AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "AdamW8bit": "adamw-8bit", "PagedAdamW8bit": "adamw-8bit",
    "PagedAdamW": "adamw", "FusedAdam": "adamw", "Adafactor": "adafactor", "adamW": "adamw", "FlashAdamW": "flash-adamw",
}  # fmt: skip
#: Under DDP, or without it, bitsandbytes itself moves these states between host and GPU.
_IN_PAGES = {"PagedAdamW8bit": "paged-adamw-8bit", "PagedAdamW": "paged-adamw-32bit"}
_PAGED = "a paged optimizer may move its states to the host; they are counted on the GPU"


def begun(whole: Table, folder: Path) -> Reading:
    """Return the reading of a recipe, whose keys carry the names of their tables."""
    return Reading(FlatTable(whole.data, whole.where), folder)


def flat(reading: Reading) -> FlatTable:
    """Return a reading's table with flat keys."""
    return reading.table if isinstance(reading.table, FlatTable) else FlatTable(reading.table.data, reading.table.where)


def set_optimizer(reading: Reading, key: str) -> None:
    """Set the optimizer from the name of its class; AdamW if the recipe names none."""
    name = flat(reading).last(key) or "AdamW"
    if name not in _OPTIMIZERS:
        raise reading.table.refused(key, f"use one of {', '.join(_OPTIMIZERS)}")
    if name in _IN_PAGES and reading.flags.get("engine", Setting("", "")).value == "ddp":
        reading.set("optimizer", key, _IN_PAGES[name])
    else:
        reading.set("optimizer", key, _OPTIMIZERS[name], note=_PAGED if name.startswith("Paged") else "")
    fused = reading.table.data.get(f"{key.rpartition('.')[0]}.fused")
    if fused is not None and _OPTIMIZERS[name] in ("adamw", "adam"):
        reading.set("optimizer_impl", key, "fused" if str(fused).lower() == "true" else "foreach")


def set_sharded(reading: Reading, engine: str, gpus: int | None, *, key: str, ways: int = 1, stage: int = 3) -> None:
    """Read GPUs, engine and stage: ``engine`` on several GPUs, or DDP on one."""
    if gpus is not None:
        reading.set("gpus", key, gpus)
    elif ways > 1:
        reading.set("gpus", key, ways, filled=True, note=NO_GPUS.format(ways))
    alone = (gpus or ways) == 1
    reading.set("engine", key, "ddp" if alone else engine, filled=alone)
    reading.set("stage", key, 0 if alone else stage, filled=alone)


_DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")


def set_degrees(reading: Reading, before: str, *keys: str) -> tuple[int, ...]:
    """Read the degrees of tensor, context, pipeline and expert parallelism from their keys, in this order."""
    return tuple(reading.degree(flag, f"{before}{key}") for flag, key in zip(_DEGREES, keys, strict=True))


NOT_THEIR_MODULES = "{}'s own modules are not modelled: transformers' of the same shape are counted"


# torchtune


def torchtune_setup(whole: Table, folder: Path, gpus: int | None) -> Setup:
    """Return the job in a recipe of torchtune; raises SpecError if it trains nothing, or for unmodelled settings."""
    reading = begun(whole, folder)
    table = flat(reading)
    if table.get("optimizer._component_") is None or table.get("batch_size") is None:
        raise SpecError(f"{table.where}: a recipe without optimizer and batch_size trains nothing; give one that trains")
    saved = table.text("checkpointer.checkpoint_dir")
    if saved and not saved.startswith("${"):
        reading.set_model("checkpointer.checkpoint_dir", saved)
    _tune_model(reading)
    _tune_shards(reading, table.count("launched_gpus") or gpus)
    # training/precision.py, get_dtype: float32 by default
    reading.set("precision", "dtype", "fp32" if table.text("dtype") in (None, "fp32", "float32") else "bf16")
    reading.number("micro_batch", "batch_size")
    reading.number("grad_accum", "gradient_accumulation_steps", default=1)
    if reading.number("seq_len", "tokenizer.max_seq_len") is None:
        reading.notes.append(NO_LENGTH)
    again = table.switch("enable_activation_checkpointing")
    reading.set("recompute", "enable_activation_checkpointing", "full" if again else "none")
    _tune_offload(reading)
    set_optimizer(reading, "optimizer._component_")
    reading.set("loss", "loss._component_", "full", filled=True)
    _tune_adapter(reading, table.last("model._component_"))
    if table.switch("compile"):
        reading.set_compiled(table, "compile")
    reading.notes.append(NOT_THEIR_MODULES.format("torchtune"))
    _tune_step(reading)
    _tune_loss(reading)
    _tune_quantizer(reading)
    table.judge("torchtune")
    _tune_fusion(reading)
    if "int4-qat" in str(reading.flags.get("fused_kernels", Setting("", "")).value):
        table.matters.pop("quantizer._component_")
    _tune_teacher(reading)
    if table.last("loss._component_") == "DPOLoss":  # recipes/*_dpo_*.py: chosen and rejected in one batch
        reading.set_pairs()
        reading.set_loop("loss._component_", "dpo", full_logits=True)
        table.matters.pop("ref_checkpointer._component_", None)
    return reading.setup("torchtune")


def _tune_model(reading: Reading) -> None:
    """Read the model from its builder, as ``torchtune.models.llama3_2.lora_llama3_2_3b``, if the checkpoint's folder names none."""
    family, _, builder = (reading.table.text("model._component_") or "").rpartition(".")
    family = family.rpartition(".")[2]
    if builder.removeprefix("lora_") == family and _tune_shape(reading, family):
        return
    if reading.known_model() is not None or "config" in reading.flags or f"{family}_" not in builder:
        return
    before = reading.flags.get("model")
    name = f"{family.replace('_', '.')}-{builder.rpartition(f'{family}_')[2].replace('_', '-')}"
    reading.set("model", "model._component_", name)
    if reading.known_model() is None:
        reading.flags.pop("model")
        reading.flags |= {} if before is None else {"model": before}


#: torchtune's builders of Llama's layers from sizes, whose keys are alike (models/llama2/_component_builders.py).
_BUILT = ("llama2", "llama3", "mistral")


def _tune_shape(reading: Reading, family: str) -> bool:
    """Read a model from the sizes that its builder takes; returns whether they are there."""
    from zeroplan.catalog.config import model_from_config  # noqa: PLC0415  few files pay for it

    table = Table(
        {key.removeprefix("model."): one for key, one in reading.table.data.items()}, reading.table.where, "model."
    )  # fmt: skip
    keys = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
            "hidden_size": "embed_dim", "vocab_size": "vocab_size", "max_position_embeddings": "max_seq_len"}  # fmt: skip
    sizes = {theirs: table.count(own) for theirs, own in keys.items()}
    wide = table.count("intermediate_dim")
    if family not in _BUILT or None in sizes.values():
        return False
    # modules/common_utils.py, scale_hidden_dim_for_mlp: two thirds of four times the width, up to a multiple of 256
    wide = wide or -(-4 * (2 * int(str(sizes["hidden_size"])) // 3) // 256) * 256
    config = {"model_type": "llama", "intermediate_size": wide, "tie_word_embeddings": False, **sizes}
    reading.set("model", "model._component_", model_from_config(config, name="the file's model"))
    reading.table.leave([*(f"model.{key}" for key in keys.values()), "model.intermediate_dim"])
    return True


def _tune_shards(reading: Reading, gpus: int | None) -> None:
    """Read the degrees of parallelism, and FSDP2's units and offload."""
    table = flat(reading)
    ways = reading.degree("tensor_parallel", "tensor_parallel_dim") * reading.degree("context_parallel", "context_parallel_dim")
    replicas = reading.degree("replicas", "data_parallel_replicate_dim")
    keeps = table.switch("fsdp_reshard_after_forward") is False
    table.get("data_parallel_shard_dim")
    set_sharded(reading, "fsdp2", gpus, key="nproc_per_node", ways=ways * replicas, stage=2 if keeps else 3)
    if reading.flags["engine"].value != "fsdp2":
        table.leave(("fsdp_cpu_offload", "fsdp.cpu_offload"))
        return
    apart = table.data.get("custom_sharded_layers")
    if isinstance(apart, list) and "output" in apart:
        reading.options["fsdp2.ends_apart"] = Setting("custom_sharded_layers", value=True)
    if table.switch("fsdp_cpu_offload") or table.switch("fsdp.cpu_offload"):
        reading.set_offload("fsdp_cpu_offload")


def _tune_offload(reading: Reading) -> None:
    """Read offloaded activations, whose streams keep five tensors (training/_activation_offloading.py, max_fwd_stash_size)."""
    if reading.table.switch("enable_activation_offloading"):
        reading.set("offload_activations", "enable_activation_offloading", value=True)
        if reading.table.switch("activation_offloading_use_streams") is not False:
            reading.set("inputs_in_flight", "activation_offloading_use_streams", 5, filled=True)


def _tune_loss(reading: Reading) -> None:
    """LinearCrossEntropyLoss runs pieces of logits, whose graphs wait for the backward (modules/loss/cross_entropy_loss.py)."""
    table, flags = flat(reading), reading.flags
    if table.last("loss._component_") == "CEWithChunkedOutputLoss" and not (
        "tensor_parallel" in flags or "kd_loss._component_" in table.data
    ):
        _tune_pieces(reading)
    if table.last("loss._component_") not in ("LinearCrossEntropyLoss", "SFTLoss"):
        return
    alone = not {"tensor_parallel", "context_parallel"} & flags.keys()
    alone = alone and ("offload_activations" not in flags or flags["recompute"].value == "full")
    if flags["precision"].value == "bf16" and alone:
        reading.set("fused_kernels", "loss._component_", "loss-in-pieces", filled=True)
    else:
        table.matters["loss._component_"] = "the loss is counted with all logits at once, which takes more than in pieces"
        table.saves.add("loss._component_")


_IN_EIGHTHS = (
    "the loss is counted with the gradient of all logits at once, of which torchtune makes an eighth at a time: the answer is too "
    "high by up to 2 bytes per logit"
)


def _tune_pieces(reading: Reading) -> None:
    """Read the older loss of eight pieces of logits, which the model makes all before it (modules/loss/ce_chunked_output_loss.py).

    Only its cast and cross-entropy are compiled (training/_compile.py, compile_loss). Without the compiler it is counted as all
    logits at once, which takes more.
    """
    table, flags = flat(reading), reading.flags
    if table.switch("compile") and flags["precision"].value == "bf16":
        reading.set("fused_kernels", "loss._component_", "compiled-loss", filled=True)
        reading.notes.append(_IN_EIGHTHS)
    else:
        table.matters["loss._component_"] = "the loss is counted with all logits at once, which takes more than in pieces"
        table.saves.add("loss._component_")


def _tune_teacher(reading: Reading) -> None:
    """Read knowledge distillation (recipes/knowledge_distillation_*.py); a sharded teacher counts as whole, the most it takes."""
    table, flags = flat(reading), reading.flags
    teacher, losses = (
        table.text("teacher_model._component_"),
        (table.last("loss._component_"), table.last("kd_loss._component_")),
    )
    if losses != ("CEWithChunkedOutputLoss", "ForwardKLWithChunkedOutputLoss") or flags["precision"].value != "bf16":
        return
    named = table.text("teacher_checkpointer.checkpoint_dir")
    if teacher is None or not named:
        return
    reading.set_log_probs("kd_loss._component_", how="kd")
    reading.set_loop("kd_loss._component_", "distill", teacher_model=named.rstrip("/").rpartition("/")[2], vllm_mode="server")
    table.matters.pop("teacher_model._component_", None)


_ROUNDED = (
    "quantisation-aware training rounds the head once for each piece of the loss, if the head is not the embedding: all pieces are "
    "counted together until the backward ends, the most they take"
)


def _tune_quantizer(reading: Reading) -> None:
    """Read torchao's 8-bit inputs and 4-bit weights (recipes/qat_*.py), which are modelled for data-parallel ranks."""
    table, flags = flat(reading), reading.flags
    model = reading.known_model()
    name, group = table.last("quantizer._component_"), table.count("quantizer.groupsize")
    plain = not {"tensor_parallel", "context_parallel", "offload_activations", "quantize"} & flags.keys()
    if name != "Int8DynActInt4WeightQATQuantizer" or group not in (None, 256) or not plain:
        return
    if model is not None and not model.has("rounded weights"):
        return
    others = str(flags["fused_kernels"].value) if "fused_kernels" in flags else ""
    both = ",".join(filter(None, (others, "int4-qat")))
    reading.set("fused_kernels", "quantizer._component_", both, note="" if "lora_rank" in flags else _ROUNDED)


def _tune_step(reading: Reading) -> None:
    """Read the step in backward (training/memory.py, OptimizerInBackwardWrapper), modelled for AdamW under DDP and FSDP2."""
    table, flags = reading.table, reading.flags
    engine, optimizer = flags["engine"].value, flags["optimizer"].value
    beside = {
        "tensor_parallel",
        "context_parallel",
        "replicas",
        "offload_optimizer",
        "offload_param",
        "lora_rank",
    } & flags.keys()
    steps_alone = optimizer == "adamw" or (optimizer in ("adamw-8bit", *_IN_PAGES.values()) and engine == "ddp")
    is_modelled = (engine == "ddp" or not beside) and steps_alone and flags["grad_accum"].value == 1
    if is_modelled and table.switch("optimizer_in_bwd"):
        reading.options[f"{engine}.step_in_backward"] = Setting("optimizer_in_bwd", value=True)
    else:
        reading.unmodelled(saves="optimizer_in_bwd")


_QUERY_AND_VALUE = ("q_proj", "v_proj")
_JOINT = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", "query_key_value")), "o_proj": ("dense",)}


def _in_every_family(names: list[str]) -> list[str]:
    """Return attention's layers with the names that they have in Phi, Phi-3, GPT-NeoX and Falcon; a family leaves out others.

    torchtune and litgpt build such models from their own layers. Where transformers joins projections, one adapter of the joint
    layer is counted for all of theirs. It has one first matrix where theirs have one each, which is some 10 KB less per layer.
    """
    return list(dict.fromkeys([*names, *(other for one in names for other in _JOINT.get(one, ()))]))


def _tune_adapter(reading: Reading, component: str) -> None:
    table = reading.table
    rank, modules = table.count("model.lora_rank"), table.get("model.lora_attn_modules")
    names = modules if isinstance(modules, list) else None
    is_adapted = "lora" in component
    for key in ("model.apply_lora_to_mlp", "model.lora_dropout", "model.quantize_base"):
        table.get(key)
    if not is_adapted:
        return
    targets = _in_every_family([str(one).replace("output_proj", "o_proj") for one in names or _QUERY_AND_VALUE])
    if table.switch("model.apply_lora_to_mlp"):
        targets.append("mlp")
    if table.switch("model.apply_lora_to_output"):
        targets.append("lm_head")
    reading.set("lora_rank", "model.lora_rank", rank or 8, filled=rank is None)
    reading.set("lora_targets", "model.lora_attn_modules", ",".join(targets))
    reading.set("lora_dropout", "model.lora_dropout", str(table.get("model.lora_dropout") or "0").strip("0.") != "")
    if component.startswith("qlora") or table.switch("model.quantize_base"):
        reading.set("quantize", "model._component_", "nf4-torchao")
    if table.switch("model.use_dora"):  # modules/peft/dora.py
        reading.set("dora", "model.use_dora", "torchtune")


def _tune_fusion(reading: Reading) -> None:
    """Read which parts of a Llama 3.2 Vision are trained (modules/model_fusion/_deep_fusion.py, DeepFusionModel.__init__).

    The fusion's parameters are layers that attend to images, and the projection head, which is the tower's second stack.
    """
    table, model = flat(reading), reading.known_model()
    parts = {part: f"model.{part}_trainable" for part in ("encoder", "decoder", "fusion")}
    usual = {"encoder": True, "decoder": False, "fusion": True}
    fused = {part: str(table.data.get(key, usual[part])).lower() for part, key in parts.items()}
    adapted = "lora" in table.last("model._component_")
    on = "lora" if adapted else "true"
    if model is None or not model.cross_layers or fused["fusion"] != on or fused["encoder"] not in (on, "false", "frozen"):
        return
    if fused["decoder"] not in (on, "false", "frozen"):
        return
    for key in parts.values():
        table.get(key)
        table.matters.pop(key, None)
    words = [word for word, part in (("tower", "encoder"), ("text", "decoder")) if fused[part] != on]
    reading.set("freeze", parts["decoder"], ",".join(words) or "none")


# nanotron

_OWN_LAYERS = "nanotron's own layers are not modelled: Megatron-Core's, with the same degrees, are counted"


def nanotron_setup(whole: Table, folder: Path, __: int | None) -> Setup:
    """Return the job in a configuration of nanotron; raises SpecError for settings that are not modelled."""
    from zeroplan.catalog.config import model_from_config  # noqa: PLC0415  only this file pays for it

    reading = begun(whole, folder)
    table = flat(reading)
    tp, cp, pp, _ = set_degrees(reading, "parallelism.", "tp", "context_parallel_size", "pp", "expert_parallel_size")
    reading.set("gpus", "parallelism", (table.count("parallelism.dp") or 1) * tp * pp * cp)
    reading.set("engine", "parallelism", "megatron")
    reading.set("stage", "optimizer.zero_stage", 1 if table.count("optimizer.zero_stage", least=0) else 0)
    word = table.text("model.dtype") or "bfloat16"
    reading.set("precision", "model.dtype", "bf16-mixed" if word == "bfloat16" else "fp32")
    _nano_gradients(reading, cp, narrow=word == "bfloat16")
    mode, schedule = (str(table.get(f"parallelism.{key}") or "") for key in ("tp_mode", "pp_engine"))
    reading.set("sequence_parallel", "parallelism.tp_mode", tp > 1 and mode.upper() == "REDUCE_SCATTER")
    if pp > 1 and schedule != "1f1b":  # config/parallelism_config.py: all forwards before all backwards
        reading.set("pipeline_schedule", "parallelism.pp_engine", "gpipe", filled=not schedule)
    if table.switch("parallelism.tp_recompute_allgather") is False:
        table.matters["tp_recompute_allgather"] = (
            "inputs gathered for tensor parallelism are kept, which is not counted: the answer is too low"
        )
    reading.set("recompute", "parallelism.recompute_layer", "full" if table.switch("parallelism.recompute_layer") else "none")
    for flag, key in (
        ("micro_batch", "micro_batch_size"),
        ("seq_len", "sequence_length"),
        ("grad_accum", "batch_accumulation_per_replica"),
    ):
        reading.number(flag, f"tokens.{key}")
    table.leave(("model.ddp_bucket_cap_mb",))
    reading.notes.append(_OWN_LAYERS)
    config = _nanotron_config(whole.table("model").table("model_config").data)
    reading.set("model", "model.model_config", model_from_config(config, name="nanotron's model_config"))
    table.like("model.model_config.* optimizer.optimizer_factory.name")
    return reading.setup("nanotron")


def _nano_gradients(reading: Reading, cp: int, *, narrow: bool) -> None:
    """Read in which dtype gradients are added up, and the buckets beside them; ``narrow``: weights have 16 bits."""
    table = flat(reading)
    wide, stage = table.switch("optimizer.accumulate_grad_in_fp32") is not False, table.count("optimizer.zero_stage", least=0)
    buckets = (table.count("parallelism.dp") or 1) > 1 or (cp > 1 and not (wide and stage))
    beside = wide + buckets if narrow else 0
    reading.options["megatron.gradients_beside"] = Setting("optimizer.accumulate_grad_in_fp32", beside)
    if narrow and not wide:  # helpers.py, init_optimizer_and_grad_accumulator: torch's AdamW of the weights themselves
        reading.options["megatron.main_weights"] = Setting("optimizer.accumulate_grad_in_fp32", value=False)


def _nanotron_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return ``model_config`` as a ``config.json``: Llama's, or with experts Mixtral's or Qwen 3's."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "max_position_embeddings", "tie_word_embeddings")  # fmt: skip
    shape = {key: config[key] for key in keys if key in config}
    experts = config.get("moe_config")
    if isinstance(experts, dict):
        width = experts.get("moe_intermediate_size") or config.get("intermediate_size")
        return {**shape, "model_type": "qwen3_moe", "num_experts": experts.get("num_experts"), "mlp_only_layers": [],
                "num_experts_per_tok": experts.get("top_k"), "norm_topk_prob": True, "moe_intermediate_size": width,
                "decoder_sparse_step": 1}  # fmt: skip
    if "moe_num_experts" in config:
        picks = {"num_local_experts": config["moe_num_experts"], "num_experts_per_tok": config.get("num_experts_per_tok")}
        return {**shape, **picks, "model_type": "mixtral"}
    return {**shape, "model_type": "llama"}


# Lightning: litgpt's own keys, and those of LightningCLI's Trainer

#: Lightning's defaults for DeepSpeed's keys.
_GIVEN = {
    "sub_group_size": 10**12, "contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True,
    "allgather_bucket_size": 200_000_000, "reduce_bucket_size": 200_000_000,
}  # fmt: skip
_WHOLE = (
    "strategy fsdp has no auto_wrap_policy: blocks are counted as units, but a module that does not wrap them itself is one unit, "
    "gathered as a whole: the answer may be too low"
)
_IN_FP32 = (
    "FSDP2 gathers fp32 weights under autocast, and they are counted in 16 bits: the answer is too low by up to two blocks"
)
_STRATEGIES = {
    "fsdp": ("fsdp1", 3),
    "FSDPStrategy": ("fsdp1", 3),
    "ModelParallelStrategy": ("fsdp2", 3),
    "DDPStrategy": ("ddp", 0),
}


def lightning_setup(whole: Table, folder: Path, gpus: int | None) -> Setup:
    """Return the job in a file of litgpt or LightningCLI; raises SpecError for settings that are not modelled."""
    reading = begun(whole, folder)
    table = flat(reading)
    is_lit = "train.micro_batch_size" in table.data
    before = "" if is_lit else "trainer."
    devices = table.data.get(f"{before}devices")
    each = len(devices) if isinstance(devices, list) else devices if isinstance(devices, int) and devices > 0 else None
    gpus = each * (table.count(f"{before}num_nodes") or 1) if each else gpus
    strategy = (
        table.last(f"{before}strategy")
        or table.last(f"{before}strategy.class_path")
        or (_lit_strategy(table) if is_lit else "ddp")
    )
    engine, stage = _STRATEGIES.get(strategy, ("fsdp1" if "fsdp" in strategy else "ddp", 3 if "fsdp" in strategy else 0))
    if strategy.lower().startswith("deepspeed"):
        engine, stage = "deepspeed", _lightning_deepspeed(reading, strategy, f"{before}strategy.init_args.")
    elif "fsdp" in strategy.lower() and not is_lit:
        _lightning_fsdp(reading, strategy, f"{before}strategy.init_args.")
    set_sharded(reading, engine, gpus, key=f"{before}strategy", stage=stage)
    # litgpt's default is mixed precision: litgpt/utils.py
    word = str(table.get(f"{before}precision") or ("bf16-mixed" if is_lit else "32-true"))
    kinds = {"bf16-mixed": "bf16-mixed", "bf16": "bf16-mixed", "bf16-true": "bf16", "16-mixed": "fp16-mixed", "16": "fp16-mixed",
             "32": "fp32", "32-true": "fp32"}  # fmt: skip
    if word not in kinds:
        raise table.refused(f"{before}precision", f"use one of {', '.join(kinds)}")
    kind = "bf16-mixed" if engine == "deepspeed" and word == "bf16-true" else kinds[word]  # DeepSpeed's bf16 has fp32 copies
    reading.set("precision", f"{before}precision", kind, filled=table.data.get(f"{before}precision") is None)
    if engine == "fsdp2" and kinds[word].endswith("mixed"):
        table.matters["precision"] = _IN_FP32
    if is_lit:
        reading.notes.append(NOT_THEIR_MODULES.format("litgpt"))
        _lit(reading, gpus or 1)
        _lit_tied(reading)
    else:
        _lightning_batch(reading)
    table.like("model.* data.* model_config* slurm*")
    return reading.setup("lightning")


def _lightning_fsdp(reading: Reading, strategy: str, before: str) -> None:
    """Read the FSDP strategy. Without a wrap policy Lightning makes the whole model one unit (pytorch/strategies/fsdp.py)."""
    table = reading.table
    if strategy == "fsdp_cpu_offload" or table.get(f"{before}cpu_offload") is True:
        reading.set_offload(f"{before}cpu_offload")
    if not table.like(f"{before}auto_wrap_policy*"):
        table.matters["auto_wrap_policy"] = _WHOLE
    if table.like(f"{before}activation_checkpointing_policy*"):
        reading.set("recompute", f"{before}activation_checkpointing_policy", "full")


def _lightning_deepspeed(reading: Reading, strategy: str, before: str) -> int:
    """Read Lightning's DeepSpeed configuration (pytorch/strategies/deepspeed.py, _create_default_config); returns the stage."""
    table = reading.table
    found, its_stage = re.search(r"stage_(\d)", strategy), table.count(f"{before}stage", least=0)
    stage = int(found[1]) if found else 2 if its_stage is None else its_stage
    zero: dict[str, object] = {"stage": stage}
    for key, default in _GIVEN.items():
        value = table.get(f"{before}{key}")
        zero[key] = default if value is None else value
    device = "nvme" if strategy.endswith("nvme") else "cpu"
    for key, section in (("offload_optimizer", "offload_optimizer"), ("offload_parameters", "offload_param")):
        if table.switch(f"{before}{key}") or ("_offload" in strategy and (stage == 3 or key == "offload_optimizer")):
            zero[section] = {"device": device, "pin_memory": bool(table.switch(f"{before}pin_memory"))}
    auto = {"enabled": "auto"}
    reading.deepspeed = DeepSpeedPart({"zero_optimization": zero, "bf16": auto, "fp16": auto}, f"{table.where}: {before}")
    return stage


def _lightning_batch(reading: Reading) -> None:
    table = reading.table
    reading.number("grad_accum", "trainer.accumulate_grad_batches", default=1)
    size = next(
        (key for key in table.data if key.rpartition(".")[2] in ("batch_size", "train_batch_size", "micro_batch_size")), None
    )
    if size is not None:
        reading.number("micro_batch", size)
    named = next((key for key in table.data if key.startswith("model") and key.rpartition(".")[2] in (
        "model_name", "model_name_or_path", "pretrained_model_name_or_path", "model_id") and table.text(key)), None)  # fmt: skip
    if named is not None:
        reading.set_model(named, str(table.data[named]))


_HYBRID = "litgpt shards within a node (FSDP1's HYBRID_SHARD): FSDP2's replicas of the same layout are counted"


def _lit_strategy(table: FlatTable) -> str:
    """Return litgpt's strategy: FSDP1, or FSDP2 for adapters (finetune/lora.py)."""
    return "fsdp" if table.data.get("lora_r") is None else "ModelParallelStrategy"


def _lit_tied(reading: Reading) -> None:
    """Read whether embedding and head are one tensor in a model of the catalogue (pretrain.py, main)."""
    table, model = reading.table, reading.known_model()
    if model is None or not table.switch("train.tie_embeddings"):
        reading.unmodelled(saves="train.tie_embeddings")
    elif not model.tie_word_embeddings:
        reading.set("model", "train.tie_embeddings", replace(model, tie_word_embeddings=True))


def _lit(reading: Reading, gpus: int) -> None:
    """Read the keys of litgpt's scripts (finetune/, pretrain.py), which recompute every block in fine-tuning under FSDP."""
    table = reading.table
    named = next((key for key in ("checkpoint_dir", "model_name") if table.text(key)), None)
    if named is not None:
        reading.set_model(named, str(table.data[named]).removeprefix("checkpoints/"))
    size = reading.number("micro_batch", "train.micro_batch_size") or 1
    total = table.count("train.global_batch_size") or (16 if named == "checkpoint_dir" else 512)
    reading.set_steps("train.global_batch_size", total, size * gpus)
    nodes = table.count("num_nodes") or 1
    if named == "model_name" and nodes > 1 and gpus % nodes == 0:  # pretrain.py: HYBRID_SHARD, whole within a node
        reading.set("replicas", "num_nodes", nodes)
        reading.set("engine", "num_nodes", "fsdp2", also=("fsdp1",), note=_HYBRID)
    if reading.number("seq_len", "train.max_seq_length") is None:
        reading.notes.append(NO_LENGTH)
    reading.set("recompute", "FSDPStrategy", "full" if gpus > 1 and named == "checkpoint_dir" else "none", filled=True)
    set_optimizer(reading, "optimizer.class_path")
    rank = table.count("lora_r")
    if rank is None:
        return
    of_attention = {"lora_query": "q_proj", "lora_key": "k_proj", "lora_value": "v_proj", "lora_projection": "o_proj"}
    targets = _in_every_family([name for key, name in of_attention.items() if table.switch(key)])
    targets += [name for key, name in (("lora_mlp", "mlp"), ("lora_head", "lm_head")) if table.switch(key)]
    reading.set("lora_rank", "lora_r", rank)
    reading.set("lora_targets", "lora_query", ",".join(targets or _in_every_family([*_QUERY_AND_VALUE])))
    reading.set("lora_dropout", "lora_dropout", str(table.get("lora_dropout") or "0").strip("0.") != "")
    kind = table.text("quantize")
    if kind:
        words = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-double"}
        if kind not in words:
            raise table.refused("quantize", "use bnb.nf4 or bnb.nf4-dq")
        reading.set("quantize", "quantize", words[kind])

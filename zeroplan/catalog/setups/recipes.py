"""Reads a job from YAML recipes of torchtune, NeMo AutoModel, nanotron and Lightning.

Keys and defaults are those of the programs' code at the commits that docs/from-a-file.md lists: torchtune's recipes/ and
training/precision.py, AutoModel's components (in part), nanotron's config/, and litgpt's finetune/ and pretrain.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from zeroplan.catalog.setups.told import NO_GPUS, DeepSpeedPart, FlatTable, Reading, Setup, Table, Told
from zeroplan.errors import SpecError
from zeroplan.spec.recipe import AUTOMODEL_NORMS, ROUNDED_FAMILIES

_NO_LENGTH = "sequences are as long as the data's: the length is that of --seq-len, or its default"
_OPTIMIZERS = {
    "AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "AdamW8bit": "adamw-8bit", "PagedAdamW8bit": "adamw-8bit",
    "PagedAdamW": "adamw", "FusedAdam": "adamw", "Adafactor": "adafactor", "adamW": "adamw",
}  # fmt: skip
_PAGED = "a paged optimizer may move its states to the host; they are counted on the GPU"


def _begun(whole: Table, folder: Path) -> Reading:
    return Reading(FlatTable(whole.data, whole.where), folder)


def _flat(reading: Reading) -> FlatTable:
    return reading.table if isinstance(reading.table, FlatTable) else FlatTable(reading.table.data, reading.table.where)


def _optimizer(reading: Reading, key: str) -> None:
    name = _flat(reading).last(key) or "AdamW"
    if name not in _OPTIMIZERS:
        raise reading.table.refused(key, f"use one of {', '.join(_OPTIMIZERS)}")
    reading.tell("optimizer", key, _OPTIMIZERS[name], note=_PAGED if name.startswith("Paged") else "")
    fused = reading.table.data.get(f"{key.rpartition('.')[0]}.fused")
    if fused is not None and _OPTIMIZERS[name] in ("adamw", "adam"):
        reading.tell("optimizer_impl", key, "fused" if str(fused).lower() == "true" else "foreach")


def _sharded(reading: Reading, engine: str, gpus: int | None, *, key: str, ways: int = 1, stage: int = 3) -> None:
    """Read GPUs, engine and stage: ``engine`` on several GPUs, or DDP on one."""
    if gpus is not None:
        reading.tell("gpus", key, gpus)
    elif ways > 1:
        reading.tell("gpus", key, ways, filled=True, note=NO_GPUS.format(ways))
    alone = (gpus or ways) == 1
    reading.tell("engine", key, "ddp" if alone else engine, filled=alone)
    reading.tell("stage", key, 0 if alone else stage, filled=alone)


_DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")


def _degrees(reading: Reading, before: str, *keys: str) -> tuple[int, ...]:
    """Read the degrees of tensor, context, pipeline and expert parallelism from their keys, in this order."""
    return tuple(reading.degree(flag, f"{before}{key}") for flag, key in zip(_DEGREES, keys, strict=True))


_NOT_THEIR_MODULES = "{}'s own modules are not modelled: transformers' of the same shape are counted"


# torchtune

_TUNE_ADDS = """
    teacher_model._component_ ref_checkpointer._component_ ref_policy_checkpointer._component_
    reward_and_value_model._component_ model.use_dora quantizer._component_
    model.encoder_trainable model.fusion_trainable value_checkpointer._component_ cudnn_deterministic_mode
"""


def torchtune_setup(whole: Table, folder: Path, gpus: int | None) -> Setup:
    """Return the job in a recipe of torchtune; raises SpecError if it trains nothing, or for unmodelled settings."""
    reading = _begun(whole, folder)
    table = _flat(reading)
    if table.get("optimizer._component_") is None or table.get("batch_size") is None:
        raise SpecError(f"{table.where}: a recipe without optimizer and batch_size trains nothing; give one that trains")
    component = table.last("model._component_")
    saved = table.text("checkpointer.checkpoint_dir")
    if saved and not saved.startswith("${"):
        reading.tell_model("checkpointer.checkpoint_dir", saved)
    gpus = table.count("launched_gpus") or gpus
    ways = reading.degree("tensor_parallel", "tensor_parallel_dim") * reading.degree("context_parallel", "context_parallel_dim")
    replicas = reading.degree("replicas", "data_parallel_replicate_dim")
    keeps = table.switch("fsdp_reshard_after_forward") is False
    table.get("data_parallel_shard_dim")
    _sharded(reading, "fsdp2", gpus, key="nproc_per_node", ways=ways * replicas, stage=2 if keeps else 3)
    apart = table.data.get("custom_sharded_layers")
    if isinstance(apart, list) and "output" in apart and reading.flags["engine"].value == "fsdp2":
        reading.options["fsdp2.ends_apart"] = Told("custom_sharded_layers", value=True)
    if (table.switch("fsdp_cpu_offload") or table.switch("fsdp.cpu_offload")) and reading.flags["engine"].value == "fsdp2":
        reading.tell_offload("fsdp_cpu_offload")
    # training/precision.py, get_dtype: float32 by default
    reading.tell("precision", "dtype", "fp32" if table.text("dtype") in (None, "fp32", "float32") else "bf16")
    reading.number("micro_batch", "batch_size")
    reading.number("grad_accum", "gradient_accumulation_steps", default=1)
    if reading.number("seq_len", "tokenizer.max_seq_len") is None:
        reading.notes.append(_NO_LENGTH)
    again = table.switch("enable_activation_checkpointing")
    reading.tell("recompute", "enable_activation_checkpointing", "full" if again else "none")
    _tune_offload(reading)
    _optimizer(reading, "optimizer._component_")
    reading.tell("loss", "loss._component_", "full", filled=True)
    _tune_adapter(reading, component)
    if table.switch("compile"):
        reading.tell_compiled(table, "compile")
    reading.notes.append(_NOT_THEIR_MODULES.format("torchtune"))
    _tune_step(reading)
    _tune_loss(reading)
    _tune_quantizer(reading)
    reading.unmodelled(saves="*ac_mode", adds=_TUNE_ADDS)
    if "int4-qat" in str(reading.flags.get("fused_kernels", Told("", "")).value):
        table.matters.pop("quantizer._component_")
    _tune_teacher(reading)
    if table.last("loss._component_") == "DPOLoss":  # recipes/*_dpo_*.py: chosen and rejected in one batch
        reading.tell_pairs()
        reading.tell_loop("loss._component_", "dpo", full_logits=True)
        table.matters.pop("ref_checkpointer._component_", None)
    return reading.setup("torchtune")


def _tune_offload(reading: Reading) -> None:
    """Read offloaded activations, whose streams keep five tensors (training/_activation_offloading.py, max_fwd_stash_size)."""
    if reading.table.switch("enable_activation_offloading"):
        reading.tell("offload_activations", "enable_activation_offloading", value=True)
        if reading.table.switch("activation_offloading_use_streams") is not False:
            reading.tell("inputs_in_flight", "activation_offloading_use_streams", 5, filled=True)


def _tune_loss(reading: Reading) -> None:
    """LinearCrossEntropyLoss runs pieces of logits, whose graphs wait for the backward (modules/loss/cross_entropy_loss.py)."""
    table, flags = _flat(reading), reading.flags
    if table.last("loss._component_") not in ("LinearCrossEntropyLoss", "SFTLoss"):
        return
    alone = not {"tensor_parallel", "context_parallel"} & flags.keys()
    alone = alone and ("offload_activations" not in flags or flags["recompute"].value == "full")
    alone = alone and not table.switch("model.apply_lora_to_output")
    if flags["precision"].value == "bf16" and alone:
        reading.tell("fused_kernels", "loss._component_", "loss-in-pieces", filled=True)
    else:
        table.matters["loss._component_"] = "the loss is counted with all logits at once, which takes more than in pieces"
        table.saves.add("loss._component_")


def _tune_teacher(reading: Reading) -> None:
    """Read knowledge distillation (recipes/knowledge_distillation_*.py); a sharded teacher counts as whole, the most it takes."""
    table, flags = _flat(reading), reading.flags
    teacher, losses = (
        table.text("teacher_model._component_"),
        (table.last("loss._component_"), table.last("kd_loss._component_")),
    )
    if losses != ("CEWithChunkedOutputLoss", "ForwardKLWithChunkedOutputLoss") or flags["precision"].value != "bf16":
        return
    named = table.text("teacher_checkpointer.checkpoint_dir")
    if teacher is None or not named:
        return
    reading.tell_log_probs("kd_loss._component_", how="kd")
    reading.tell_loop("kd_loss._component_", "distill", teacher_model=named.rstrip("/").rpartition("/")[2], vllm_mode="server")
    table.matters.pop("teacher_model._component_", None)


_ROUNDED = (
    "quantisation-aware training rounds the head once for each piece of the loss, if the head is not the embedding: all pieces are "
    "counted together until the backward ends, the most they take"
)


def _tune_quantizer(reading: Reading) -> None:
    """Read torchao's 8-bit inputs and 4-bit weights (recipes/qat_*.py), which are modelled for data-parallel ranks."""
    table, flags = _flat(reading), reading.flags
    model = reading.known_model()
    name, group = table.last("quantizer._component_"), table.count("quantizer.groupsize")
    plain = not {"tensor_parallel", "context_parallel", "offload_activations", "quantize"} & flags.keys()
    if name != "Int8DynActInt4WeightQATQuantizer" or group not in (None, 256) or not plain:
        return
    if model is not None and model.family not in ROUNDED_FAMILIES:
        return
    others = str(flags["fused_kernels"].value) if "fused_kernels" in flags else ""
    both = ",".join(filter(None, (others, "int4-qat")))
    reading.tell("fused_kernels", "quantizer._component_", both, note="" if "lora_rank" in flags else _ROUNDED)


def _tune_step(reading: Reading) -> None:
    """Read the optimizer step in backward (training/memory.py, OptimizerInBackwardWrapper), modelled for AdamW on one GPU."""
    table, flags = reading.table, reading.flags
    steps_alone = flags["optimizer"].value in ("adamw", "adamw-8bit")
    is_modelled = flags["engine"].value == "ddp" and steps_alone and flags["grad_accum"].value == 1
    if is_modelled and table.switch("optimizer_in_bwd"):
        reading.options["ddp.step_in_backward"] = Told("optimizer_in_bwd", value=True)
    else:
        reading.unmodelled(saves="optimizer_in_bwd")


def _tune_adapter(reading: Reading, component: str) -> None:
    table = reading.table
    rank, names = table.count("model.lora_rank"), table.get("model.lora_attn_modules")
    is_adapted = "lora" in component
    for key in ("model.apply_lora_to_mlp", "model.lora_dropout", "model.quantize_base"):
        table.get(key)
    if not is_adapted:
        return
    words = {"output_proj": "o_proj"}
    targets = [words.get(str(one), str(one)) for one in names] if isinstance(names, list) else ["q_proj", "v_proj"]
    if table.switch("model.apply_lora_to_mlp"):
        targets += ["gate_proj", "up_proj", "down_proj"]
    if table.switch("model.apply_lora_to_output"):
        targets.append("lm_head")
    reading.tell("lora_rank", "model.lora_rank", rank or 8, filled=rank is None)
    reading.tell("lora_targets", "model.lora_attn_modules", ",".join(targets))
    reading.tell("lora_dropout", "model.lora_dropout", str(table.get("model.lora_dropout") or "0").strip("0.") != "")
    if component.startswith("qlora") or table.switch("model.quantize_base"):
        reading.tell("quantize", "model._component_", "nf4-double")


# NeMo AutoModel

_AUTO_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved-1f1b",
    "zerobubble": "interleaved-zero-bubble",
}
_AUTO_ADDS = """
    quantization.load_in_8bit *num_nextn_predict_layers
    peft.use_dora qat.* teacher_model.* kd_ratio distributed.autocast_dtype longalign.*
    model.sparse* embedding_row_repair.* model.lm_head* distributed.mp_policy.reduce_dtype distributed.enable_fsdp2_prefetch
    distributed.moe.lm_head_precision distributed.bucket_cap_mb
"""
#: Values of AutoModel's backends (components/models/common/utils.py, BackendConfig) that are counted: attention kernels that save
#: what FlashAttention saves, linear layers that save their input, norms that save theirs and a number per row, and grouped products
#: that save theirs. Rotary positions save small tables; their fusion is switched off, whatever the file says. Empty: all values.
_AUTO_BACKENDS: dict[str, tuple[object, ...]] = {
    "attn": ("te", "sdpa"), "linear": ("te", "torch", "quack"), "rms_norm": ("te", "torch", "torch_fp32", "quack"),
    "rope": ("torch", "quack"),
    "experts": ("gmm", "torch_mm", "te"), "dispatcher": ("deepep", "hybridep"), "rope_fusion": (), "dispatcher_num_sms": (),
    "dispatcher_share_token_dispatcher": (True,), "dispatcher_async_dispatch": (False,), "fake_balanced_gate": (),
    "fake_gate_noise": (),
    "gate_precision": ("float32", "torch.float32"),
}  # fmt: skip
#: Of these, what chooses the kernels of experts and their router alone (components/moe/layers.py, MoE.__init__).
_AUTO_OF_EXPERTS = ("experts", "dispatcher", "dispatcher_num_sms", "dispatcher_share_token_dispatcher", "dispatcher_async_dispatch",
                    "fake_balanced_gate", "fake_gate_noise", "gate_precision")  # fmt: skip
_AUTO_BACKEND = "{}={}: what this part of AutoModel's own takes is not counted, and the answer may be too low"
#: AutoModel's experts weight what they compute between their products, so they keep neither outputs nor halves of the gate.
_AUTO_ALONE = "{}={}: transformers' experts are counted, which keep more than AutoModel's"
_AUTO_SAVES = """
    distributed.offload_policy* freeze_config.*
    peft.use_memory_efficient_lora
    model.backend.compile_attn
"""


def automodel_setup(whole: Table, folder: Path, gpus: int | None) -> Setup:
    """Return the job in a recipe of NeMo AutoModel; raises SpecError for settings that are not modelled."""
    reading = _begun(whole, folder)
    table = _flat(reading)
    names = [f"model.{key}" for key in ("pretrained_model_name_or_path", "config.pretrained_model_name_or_path",
                                        "config.name_or_path", "config")]  # fmt: skip
    named = next((key for key in names if isinstance(table.get(key), str)), None)
    if named is not None:
        reading.tell_model(named, str(table.data[named]))
    ranks = _auto_degrees(reading, gpus)
    word = str(table.get("model.torch_dtype") or table.get("model.config.torch_dtype") or "auto").rpartition(".")[2]
    # weights keep the checkpoint's 16 bits unless torch_dtype says fp32 (_transformers/auto_model.py)
    reading.tell(
        "precision", "model.torch_dtype", "bf16-mixed" if word in ("float32", "fp32") else "bf16", also=("bf16-mixed",)
    )
    each = _auto_pipeline(reading) or reading.number("micro_batch", "step_scheduler.local_batch_size", default=1) or 1
    key = "step_scheduler.global_batch_size"
    reading.tell_steps(key, table.count(key), each * ranks)
    packed = table.count("packed_sequence.packed_sequence_size", least=0)
    if packed:
        reading.tell("seq_len", "packed_sequence.packed_sequence_size", packed)
    elif reading.number("seq_len", "dataset.seq_length", "dataset.seq_len", "dataset.max_length") is None:
        reading.notes.append(_NO_LENGTH)
    own = "full" if table.data.get("parallelizer.activation_checkpointing") is True else None
    again = own or str(table.get("distributed.activation_checkpointing") or "false").lower()
    kinds = {"false": "none"}
    reading.tell("recompute", "distributed.activation_checkpointing", kinds.get(again, "selective"), also=("full",))
    flash = table.get("model.attn_implementation") == "flash_attention_2"
    reading.tell("attention", "model.attn_implementation", "flash" if flash else "sdpa", filled=True)
    _optimizer(reading, "optimizer._target_")
    _auto_te_adam(reading)
    if table.last("loss_fn._target_") == "FusedLinearCrossEntropy":
        reading.tell_cut_loss("loss_fn._target_")
    _auto_adapter(reading)
    reading.notes.append(_NOT_THEIR_MODULES.format("AutoModel"))
    reading.unmodelled(saves=_AUTO_SAVES, adds=_AUTO_ADDS, either="model.backend.te_fp8.recipe model.backend.cuda_graph.*")
    _auto_float8(reading)
    for key in ("compile.enabled", "distributed.enable_compile"):
        if table.switch(key):
            reading.tell_compiled(table, key)
    _auto_backend(reading, spread="expert_parallel" in reading.flags, again=again not in ("false", "selective"))
    if not _auto_keeps_inputs(reading, again=again not in ("false", "selective")):
        reading.unmodelled(adds="*output_hidden_states")
    # NEFTune's noise is there while the embedding runs alone (components/training/neftune.py)
    table.like("ci.* benchmark.* _* *output_hidden_states neftune.*")
    return reading.setup("automodel")


_TE_ADAM = (
    "optimizer._target_: Transformer Engine's FusedAdam keeps fp32 states of weights in 16 bits; fp32 weights and gradients are "
    "counted, which take as much or more"
)
_TE_MASTERS = "optimizer.master_weights: whole fp32 weights beside those in 16 bits are not counted: the answer may be too low"


def _auto_te_adam(reading: Reading) -> None:
    """Read Transformer Engine's Adam, whose states have 32 bits by default (d0067d0, pytorch/optimizers/fused_adam.py, FusedAdam).

    With ``store_param_remainders`` master weights are what 16-bit weights lack of fp32, two bytes each. fp32 weights have none.
    """
    table = reading.table
    if not re.fullmatch(r"transformer_engine\.[\w.]*FusedAdam", str(table.data.get("optimizer._target_"))):
        return
    masters, remainders = (table.switch(f"optimizer.{key}") for key in ("master_weights", "store_param_remainders"))
    table.leave(f"optimizer.{key}" for key in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    if reading.flags["precision"].value == "bf16-mixed":
        return
    reading.tell("precision", "optimizer._target_", "bf16-mixed", filled=True, note=_TE_ADAM)
    table.matters["optimizer._target_"] = _TE_ADAM
    table.saves.add("optimizer._target_")
    if masters and not remainders:
        table.matters["optimizer.master_weights"] = _TE_MASTERS


def _auto_keeps_inputs(reading: Reading, *, again: bool) -> bool:
    """Whether every block's input is kept anyway, and its being held until the backward ends cannot raise the peak.

    The training loop holds ``out.hidden_states`` during the backward (recipes/llm/train_ft.py, _forward_backward_step).
    Checkpoints keep the inputs, and so do the norms of AutoModel's own models if all weights are trained. With several
    micro-batches the last backward begins with as many gradients as it ends with.
    """
    model, steps = reading.known_model(), reading.flags.get("grad_accum", Told("", 1)).value
    own = model is not None and model.family in AUTOMODEL_NORMS and "lora_rank" not in reading.flags
    return (again or own) and int(str(steps)) > 1


def _auto_degrees(reading: Reading, gpus: int | None) -> int:
    """Read degrees, GPUs and engine; returns the data-parallel ranks."""
    table = _flat(reading)
    tp, cp, pp, ep = _degrees(reading, "distributed.", "tp_size", "cp_size", "pp_size", "ep_size")
    replicas = reading.degree("replicas", "distributed.dp_replicate_size")
    split, dp = tp * cp * pp, table.data.get("distributed.dp_size")
    said = dp * split if isinstance(dp, int) and not isinstance(dp, bool) and dp > 0 else None
    nodes = table.count("benchmark.num_nodes") or table.count("ci.nodes") or (1 if "ci.nproc_per_node" in table.data else None)
    gpus = said or table.count("launched_gpus") or gpus or (nodes * (table.count("ci.nproc_per_node") or 8) if nodes else None)
    other = "megatron_fsdp" if "Megatron" in table.last("distributed._target_") else "fsdp2"
    strategy = table.text("distributed.strategy") or other
    if strategy not in ("fsdp2", "ddp"):
        raise table.refused("distributed.strategy", "fsdp2 and ddp are modelled")
    # blocks of a pipeline, and of experts on their own ranks, stay gathered unless asked (distributed/config.py)
    said = table.switch("distributed.moe.reshard_after_forward" if ep > 1 else "distributed.reshard_after_forward")
    stage = 0 if strategy == "ddp" else 2 if said is False or (said is None and (pp > 1 or ep > 1)) else 3
    _sharded(reading, strategy, gpus, key="distributed.dp_size", ways=max(split * replicas, ep * pp), stage=stage)
    return max(1, (gpus or split) // split)


def _auto_pipeline(reading: Reading) -> int | None:
    """Say schedule and micro-batches of a pipeline, which splits the local batch (pipelining/autopipeline.py); returns their size.

    Several runs of the pipeline per step are counted as one.
    """
    table = reading.table
    before = "autopipeline." if table.like("autopipeline.*") else "distributed.pipeline."  # its older name
    keys = [f"{before}{key}" for key in ("pp_schedule", "pp_microbatch_size", "layers_per_stage", "dtype", "pp_seq_len")]
    word = str(table.get(keys[0]) or "1f1b").lower().replace("_", "")
    table.leave((*keys[1:], f"{before}round_virtual_stages_to_pp_multiple"))
    if "pipeline_parallel" not in reading.flags:
        return None
    if word not in _AUTO_SCHEDULES:
        raise table.refused(keys[0], f"use one of {', '.join(_AUTO_SCHEDULES)}")
    reading.tell("pipeline_schedule", keys[0], _AUTO_SCHEDULES[word], filled=keys[0] not in table.data)
    reading.layers_per_stage = table.count(keys[2]), str(table.get(f"{before}round_virtual_stages_to_pp_multiple") or "")
    table.get("step_scheduler.local_batch_size")
    return reading.number("micro_batch", keys[1], default=1)


def _auto_float8(reading: Reading) -> None:
    """Read torchao's float8 (components/quantization/fp8.py); rowwise_with_gw_hp makes one product of three in 16 bits."""
    table = reading.table
    if table.switch("fp8.enabled") and reading.flags["engine"].value != "fsdp2":
        reading.unmodelled(either="fp8.enabled")
    if not table.switch("fp8.enabled") or table.matters.get("fp8.enabled"):
        return
    name = str(table.get("fp8.recipe_name") or "tensorwise")
    reading.tell("float8_recipe", "fp8.enabled", "rowwise" if name.startswith("rowwise") else "tensorwise")
    table.get("fp8.filter_fqns")
    reading.notes.append("float8 is counted for all linear layers of the blocks; filter_fqns is ignored")
    if table.switch("fp8.enable_fsdp_float8_all_gather"):
        reading.unmodelled(saves="fp8.enable_fsdp_float8_all_gather")


def _auto_backend(reading: Reading, *, spread: bool, again: bool) -> None:
    """Read the kernels that ``model.backend`` chooses, and what AutoModel's checkpoints keep (:func:`zeroplan.resolve.resolve`).

    ``spread``: experts are on several ranks; ``again``: blocks are recomputed, except what their checkpoints keep.
    """
    table, parts = _flat(reading), ["norm-in-one"]
    chosen = {key.rpartition(".")[2]: table.data[key] for key in table.like("model.backend.*") if key.count(".") == 2}
    chosen = {key: one for key, one in chosen.items() if key[:1] != "_" and not key.startswith("enable_") and one is not None}
    model = reading.known_model()
    none_routed = model is not None and model.moe is None
    chosen = {key: one for key, one in chosen.items() if not (none_routed and key in _AUTO_OF_EXPERTS)}
    for key, one in chosen.items():
        counted = _AUTO_BACKENDS.get(key)
        if counted is None or (counted and one not in counted):
            whole = f"model.backend.{key}"
            alone = key in ("experts", "dispatcher") and not spread
            table.matters[whole] = (_AUTO_ALONE if alone else _AUTO_BACKEND).format(whole, one)
            table.saves.update([whole] * alone)
    if spread and (sender := str(chosen.get("dispatcher") or "deepep")) in ("deepep", "hybridep"):
        parts.append(sender)
    parts += ["inputs-kept"] * again + ["output-copied"] * (spread and chosen.get("attn") == "sdpa")
    parts += ["te-linear"] * (chosen.get("linear", "te") == "te") + ["te-experts"] * (spread and chosen.get("experts") == "te")
    parts += ["router-in-fp32"] * ("gate_precision" in chosen)
    reading.tell("fused_kernels", "model.backend", ",".join(parts), filled=True)


def _auto_adapter(reading: Reading) -> None:
    table = reading.table
    rank, targets, dropout = table.count("peft.dim"), table.get("peft.target_modules"), table.get("peft.dropout")
    if rank is None:
        if table.data.get("peft._target_") is None:
            return
        rank = 8
    names = [targets] if isinstance(targets, str) else targets if isinstance(targets, list) else []
    plain = [re.sub(r"^\*\.?", "", str(one)) for one in names]
    wide = not plain or any("*" in one or one in ("_proj", "proj", "") for one in plain)
    model = reading.known_model()
    if model is not None and model.moe is None:
        table.leave(("peft.moe_rank_scaling",))  # the rank of experts' adapters (_peft/lora.py)
    reading.tell("lora_rank", "peft.dim", rank)
    reading.tell("lora_targets", "peft.target_modules", "all-linear" if wide else ",".join(plain))
    reading.tell("lora_dropout", "peft.dropout", str(dropout or "0").strip("0.") != "")
    if table.switch("quantization.load_in_4bit"):
        double = table.switch("quantization.bnb_4bit_use_double_quant")
        reading.tell("quantize", "quantization.load_in_4bit", "nf4-double" if double else "nf4")


# nanotron

_NARROW = "accumulate_grad_in_fp32 is false: gradients are counted in fp32, which is the most they take"
_OWN_LAYERS = "nanotron's own layers are not modelled: Megatron-Core's, with the same degrees and fp32 gradients, are counted"


def nanotron_setup(whole: Table, folder: Path, __: int | None) -> Setup:
    """Return the job in a configuration of nanotron; raises SpecError for settings that are not modelled."""
    from zeroplan.catalog.config import model_from_config  # noqa: PLC0415  only this file pays for it

    reading = _begun(whole, folder)
    table = _flat(reading)
    tp, cp, pp, _ = _degrees(reading, "parallelism.", "tp", "context_parallel_size", "pp", "expert_parallel_size")
    reading.tell("gpus", "parallelism", (table.count("parallelism.dp") or 1) * tp * pp * cp)
    reading.tell("engine", "parallelism", "megatron")
    reading.tell("stage", "optimizer.zero_stage", 1 if table.count("optimizer.zero_stage", least=0) else 0)
    word = table.text("model.dtype") or "bfloat16"
    reading.tell("precision", "model.dtype", "bf16-mixed" if word == "bfloat16" else "fp32")
    wide = table.switch("optimizer.accumulate_grad_in_fp32") is not False
    buckets = (table.count("parallelism.dp") or 1) > 1 or (
        cp > 1 and not (wide and table.count("optimizer.zero_stage", least=0))
    )
    beside = wide + buckets if word == "bfloat16" else 0
    reading.options["megatron.gradients_beside"] = Told("optimizer.accumulate_grad_in_fp32", beside)
    if not wide:
        table.matters["accumulate_grad_in_fp32"] = _NARROW
        table.saves.add("accumulate_grad_in_fp32")
    mode, schedule = (str(table.get(f"parallelism.{key}") or "") for key in ("tp_mode", "pp_engine"))
    reading.tell("sequence_parallel", "parallelism.tp_mode", tp > 1 and mode.upper() == "REDUCE_SCATTER")
    if pp > 1 and schedule != "1f1b":  # config/parallelism_config.py: all forwards before all backwards
        reading.tell("pipeline_schedule", "parallelism.pp_engine", "gpipe", filled=not schedule)
    if table.switch("parallelism.tp_recompute_allgather") is False:
        table.matters["tp_recompute_allgather"] = (
            "inputs gathered for tensor parallelism are kept, which is not counted: the answer is too low"
        )
    reading.tell("recompute", "parallelism.recompute_layer", "full" if table.switch("parallelism.recompute_layer") else "none")
    for flag, key in (
        ("micro_batch", "micro_batch_size"),
        ("seq_len", "sequence_length"),
        ("grad_accum", "batch_accumulation_per_replica"),
    ):
        reading.number(flag, f"tokens.{key}")
    table.leave(("model.ddp_bucket_cap_mb",))
    reading.notes.append(_OWN_LAYERS)
    config = _nanotron_config(whole.table("model").table("model_config").data)
    reading.tell("model", "model.model_config", model_from_config(config, name="nanotron's model_config"))
    table.like("model.model_config.* optimizer.optimizer_factory.name")
    return reading.setup("nanotron")


def _nanotron_config(said: Mapping[str, object]) -> dict[str, object]:
    """Return ``model_config`` as a ``config.json``: Llama's, or with experts Mixtral's or Qwen 3's."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "max_position_embeddings", "tie_word_embeddings")  # fmt: skip
    shape = {key: said[key] for key in keys if key in said}
    experts = said.get("moe_config")
    if isinstance(experts, dict):
        width = experts.get("moe_intermediate_size") or said.get("intermediate_size")
        return {**shape, "model_type": "qwen3_moe", "num_experts": experts.get("num_experts"), "mlp_only_layers": [],
                "num_experts_per_tok": experts.get("top_k"), "norm_topk_prob": True, "moe_intermediate_size": width,
                "decoder_sparse_step": 1}  # fmt: skip
    if "moe_num_experts" in said:
        picks = {"num_local_experts": said["moe_num_experts"], "num_experts_per_tok": said.get("num_experts_per_tok")}
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
    reading = _begun(whole, folder)
    table = _flat(reading)
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
    _sharded(reading, engine, gpus, key=f"{before}strategy", stage=stage)
    # litgpt's default is mixed precision: litgpt/utils.py
    word = str(table.get(f"{before}precision") or ("bf16-mixed" if is_lit else "32-true"))
    kinds = {"bf16-mixed": "bf16-mixed", "bf16": "bf16-mixed", "bf16-true": "bf16", "16-mixed": "fp16-mixed", "16": "fp16-mixed",
             "32": "fp32", "32-true": "fp32"}  # fmt: skip
    if word not in kinds:
        raise table.refused(f"{before}precision", f"use one of {', '.join(kinds)}")
    kind = "bf16-mixed" if engine == "deepspeed" and word == "bf16-true" else kinds[word]  # DeepSpeed's bf16 has fp32 copies
    reading.tell("precision", f"{before}precision", kind, filled=table.data.get(f"{before}precision") is None)
    if engine == "fsdp2" and kinds[word].endswith("mixed"):
        table.matters["precision"] = _IN_FP32
    if is_lit:
        reading.notes.append(_NOT_THEIR_MODULES.format("litgpt"))
        reading.unmodelled(saves="train.tie_embeddings")  # pretrain.py: one tensor, where two are counted
        _lit(reading, gpus or 1)
    else:
        _lightning_batch(reading)
    table.like("model.* data.* model_config* slurm*")
    return reading.setup("lightning")


def _lightning_fsdp(reading: Reading, strategy: str, before: str) -> None:
    """Read the FSDP strategy. Without a wrap policy Lightning makes the whole model one unit (pytorch/strategies/fsdp.py)."""
    table = reading.table
    if strategy == "fsdp_cpu_offload" or table.get(f"{before}cpu_offload") is True:
        reading.tell_offload(f"{before}cpu_offload")
    if not table.like(f"{before}auto_wrap_policy*"):
        table.matters["auto_wrap_policy"] = _WHOLE
    if table.like(f"{before}activation_checkpointing_policy*"):
        reading.tell("recompute", f"{before}activation_checkpointing_policy", "full")


def _lightning_deepspeed(reading: Reading, strategy: str, before: str) -> int:
    """Read Lightning's DeepSpeed configuration (pytorch/strategies/deepspeed.py, _create_default_config); returns the stage."""
    table = reading.table
    found, said = re.search(r"stage_(\d)", strategy), table.count(f"{before}stage", least=0)
    stage = int(found[1]) if found else 2 if said is None else said
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
        reading.tell_model(named, str(table.data[named]))


_HYBRID = "litgpt shards within a node (FSDP1's HYBRID_SHARD): FSDP2's replicas of the same layout are counted"


def _lit_strategy(table: FlatTable) -> str:
    """Return litgpt's strategy: FSDP1, or FSDP2 for adapters (finetune/lora.py)."""
    return "fsdp" if table.data.get("lora_r") is None else "ModelParallelStrategy"


def _lit(reading: Reading, gpus: int) -> None:
    """Read the keys of litgpt's scripts (finetune/, pretrain.py), which recompute every block in fine-tuning under FSDP."""
    table = reading.table
    named = next((key for key in ("checkpoint_dir", "model_name") if table.text(key)), None)
    if named is not None:
        reading.tell_model(named, str(table.data[named]).removeprefix("checkpoints/"))
    size = reading.number("micro_batch", "train.micro_batch_size") or 1
    total = table.count("train.global_batch_size") or (16 if named == "checkpoint_dir" else 512)
    reading.tell_steps("train.global_batch_size", total, size * gpus)
    nodes = table.count("num_nodes") or 1
    if named == "model_name" and nodes > 1 and gpus % nodes == 0:  # pretrain.py: HYBRID_SHARD, whole within a node
        reading.tell("replicas", "num_nodes", nodes)
        reading.tell("engine", "num_nodes", "fsdp2", also=("fsdp1",), note=_HYBRID)
    if reading.number("seq_len", "train.max_seq_length") is None:
        reading.notes.append(_NO_LENGTH)
    reading.tell("recompute", "FSDPStrategy", "full" if gpus > 1 and named == "checkpoint_dir" else "none", filled=True)
    _optimizer(reading, "optimizer.class_path")
    rank = table.count("lora_r")
    if rank is None:
        return
    pairs = {"lora_query": "q_proj", "lora_key": "k_proj", "lora_value": "v_proj", "lora_projection": "o_proj",
             "lora_mlp": "gate_proj,up_proj,down_proj", "lora_head": "lm_head"}  # fmt: skip
    reading.tell("lora_rank", "lora_r", rank)
    reading.tell(
        "lora_targets", "lora_query", ",".join(names for key, names in pairs.items() if table.switch(key)) or "q_proj,v_proj"
    )
    reading.tell("lora_dropout", "lora_dropout", str(table.get("lora_dropout") or "0").strip("0.") != "")
    kind = table.text("quantize")
    if kind:
        words = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-double"}
        if kind not in words:
            raise table.refused("quantize", "use bnb.nf4 or bnb.nf4-dq")
        reading.tell("quantize", "quantize", words[kind])

"""Reads a job from LLaMA-Factory's YAML.

LLaMA-Factory's own keys are those of 0.9.5 (hparams/), with its defaults; trainer.py reads all others as TrainingArguments.
LLaMA-Factory's version 1 has its own trainer and keys.
"""

from pathlib import Path

from zeroplan.catalog.setups.keys import keys_of
from zeroplan.catalog.setups.reading import deepspeed_beside
from zeroplan.catalog.setups.settings import LIGER, ULYSSES, Reading, Table, TranslatedTable, known_keys, number_of
from zeroplan.catalog.setups.setup import Setting, Setup
from zeroplan.catalog.setups.trainer import arguments_read, set_dora
from zeroplan.errors import SpecError
from zeroplan.spec.adapter import OF_LINEAR

#: Defaults in hparams/model_args.py and finetuning_args.py.
_DEFAULT_RANK, _DEFAULT_LENGTH, _DEFAULT_DROPOUT = 8, 2048, 0.0
_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}

_TWICE = "pref_loss={} reads the logits a second time, which is not counted: the answer is too low by that"
_VALUES = (
    "a reward model's loss reads a value head, not the logits beside it: a loss of all logits is counted, which takes more"
)


def llama_factory_setup(whole: Table, folder: Path, gpus: int | None = None) -> Setup:
    """Return the job in the file; raises SpecError if it trains nothing, or for settings that are not modelled."""
    if {"model_class", "dist_config"} & whole.data.keys():
        return _v1_setup(whole, folder, gpus)
    return (_megatrons_setup if _ON_MEGATRON & whole.data.keys() else _trainers_setup)(whole, folder, gpus)


def _trainers_setup(whole: Table, folder: Path, _: int | None) -> Setup:
    """Return the job of its trainers on transformers' Trainer."""
    _refuse(whole)
    adapted = _has_adapters(whole)
    made = {**_recomputation(whole), **_attention(whole), **_adapter(whole, adapted=adapted)}
    if adapted and whole.data.get("ddp_find_unused_parameters") is None:
        made["ddp_find_unused_parameters"] = False  # hparams/parser.py, get_train_args
    table = TranslatedTable(whole, keys_of("llama-factory").instead, made)
    reading = arguments_read(table, folder)
    _precision(reading, whole, adapted=adapted)
    if (stage := whole.text("stage")) in ("dpo", "rm"):
        reading.set_pairs()
    loses = str(whole.get("pref_loss") or "sigmoid")
    if stage == "kto" or (stage == "dpo" and loses not in ("orpo", "simpo")):
        reading.set_loop("stage", stage, full_logits=True)
        reading.set("keep_logits", "stage", "fp32", filled=True)  # a dictionary has them while the reference model runs
    elif stage in ("dpo", "rm"):
        reading.table.matters["stage"] = _TWICE.format(loses) if stage == "dpo" else _VALUES
        reading.table.saves.update(
            ["stage"] * (stage == "rm")
        )  # train/rm/trainer.py; trl's head is a vector of the hidden size
    if whole.get("ref_model") is not None:
        whole.matters["ref_model"] = "ref_model: a reference model of the trained model's own size is counted"
    _token_losses(reading, whole)
    _tower(reading, whole)
    reading.set_largest_image(whole, pixels="image_max_pixels")
    _adam_mini(reading)
    whole.leave(("use_dft_loss",))  # weights of each token's loss: a few numbers per token (train/trainer_utils.py)
    if whole.switch("enable_liger_kernel"):  # model/model_utils/liger_kernel.py: other losses need logits
        reading.set_liger(*LIGER, key="enable_liger_kernel", loss=stage in (None, "pt", "sft"))
    if adapted and "quantize" in reading.flags:  # model/model_utils/checkpointing.py, instead of peft's preparation
        upcast = "norms" if whole.switch("upcast_layernorm") else "none"
        reading.set("upcast", "upcast_layernorm", upcast, filled=upcast == "none")
    set_dora(reading)
    if (workers := whole.count("ray_num_workers")) is not None and workers > 1:
        reading.set("gpus", "ray_num_workers", workers, filled=True)
    return reading.setup("llama-factory")


def _token_losses(reading: Reading, whole: Table) -> None:
    """Read the losses that copy the logits, or compare them with those of a second model of the same size (train/sft/trainer.py).

    accelerate returns the logits in fp32 under DDP and FSDP1; in 16 bits they were measured under DeepSpeed's.
    """
    if whole.text("stage") not in (None, "sft") or whole.switch("enable_liger_kernel"):
        return
    by_deepspeed, named = reading.deepspeed is not None, reading.flags.get("model", Setting("", None)).value
    engine = reading.flags.get("engine", Setting("", "")).value
    full = "lora_rank" not in reading.flags and whole.get("ref_model") is None
    if whole.switch("use_asft_loss") and by_deepspeed and full and isinstance(named, str):
        reading.set_log_probs("use_asft_loss", how="asft")
        # nothing is generated
        reading.set_loop("use_asft_loss", "distill", teacher_model=named, vllm_mode="server", max_completion_length=1)
        whole.matters.pop("use_asft_loss", None)
    elif whole.switch("use_eaft_loss") and not by_deepspeed and engine in ("ddp", "fsdp1") and not whole.switch("use_dft_loss"):
        reading.set_log_probs("use_eaft_loss", how="eaft")
        whole.matters.pop("use_eaft_loss", None)


def _adam_mini(reading: Reading) -> None:
    if reading.table.switch("use_adam_mini"):  # train/trainer_utils.py, _create_adam_mini_optimizer
        reading.set("optimizer", "use_adam_mini", "adam-mini")
        reading.flags.pop("optimizer_impl", None)


def _refuse(whole: Table) -> None:
    if not whole.switch("do_train"):
        raise SpecError(f"{whole.where}: do_train is not true, so that nothing is trained; give the file that trains")
    if whole.text("stage") not in (None, "pt", "sft", "dpo", "kto", "rm"):
        raise whole.refused("stage", "sft, pt, dpo, kto and rm are modelled")
    whole.judge("llama-factory")
    if whole.switch("upcast_layernorm") and whole.get("quantization_bit") is None:
        raise whole.refused("upcast_layernorm", "it is modelled beside quantization_bit: 4")


def _has_adapters(whole: Table) -> bool:
    kind = whole.text("finetuning_type")
    if kind not in (None, "lora", "full"):
        raise whole.refused("finetuning_type", "lora and full are modelled")
    return kind != "full"


def _recomputation(whole: Table) -> dict[str, object]:
    """Return activation checkpointing, which is on by default (model/model_utils/checkpointing.py, prepare_model_for_training)."""
    on = not whole.switch("disable_gradient_checkpointing") or bool(whole.switch("gradient_checkpointing"))
    return {
        "gradient_checkpointing": on,
        "gradient_checkpointing_kwargs": {"use_reentrant": whole.switch("use_reentrant_gc") is not False},
    }


def _attention(whole: Table) -> dict[str, object]:
    word = whole.text("flash_attn") or "auto"
    if word not in _ATTENTION:
        raise whole.refused("flash_attn", f"use one of {', '.join(_ATTENTION)}")
    return {"attn_implementation": _ATTENTION[word], "cutoff_len": whole.count("cutoff_len") or _DEFAULT_LENGTH}


def _adapter(whole: Table, *, adapted: bool) -> dict[str, object]:
    bits, method = whole.count("quantization_bit"), whole.get("quantization_method")
    if bits not in (None, 4, 8):
        raise whole.refused("quantization_bit", "four bits and eight are modelled")
    if bits is not None and method not in (None, "bnb", "bitsandbytes"):
        raise whole.refused("quantization_method", "use bnb")
    if not adapted:
        return {"load_in_4bit": bits is not None}
    dropout, targets = whole.get("lora_dropout"), whole.get("lora_target") or "all"
    names = [one.strip() for one in targets.split(",")] if isinstance(targets, str) else targets
    return {
        "use_peft": True,
        "lora_r": whole.count("lora_rank") or _DEFAULT_RANK,
        "lora_target_modules": OF_LINEAR if names == ["all"] else names,
        "lora_dropout": _DEFAULT_DROPOUT if dropout is None else dropout,
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "use_bnb_nested_quant": whole.switch("double_quantization") is not False,
        "bnb_4bit_quant_type": whole.text("quantization_type"),
    }


def _tower(reading: Reading, whole: Table) -> None:
    """Read whether vision tower and projector are frozen, as by default (hparams/finetuning_args.py, FreezeArguments)."""
    keys = {"tower": "freeze_vision_tower", "projector": "freeze_multi_modal_projector"}
    frozen = [part for part, key in keys.items() if whole.switch(key) is not False]
    if len(frozen) < len(keys):
        reading.set("freeze", next(key for part, key in keys.items() if part not in frozen), ",".join(frozen) or "none")


def _precision(reading: Reading, whole: Table, *, adapted: bool) -> None:
    """Read the precision. Weights load in 16 bits; trained ones become fp32 without pure_bf16 (model/adapter.py, init_adapter)."""
    mixed = any(whole.switch(key) for key in ("bf16", "fp16"))
    if whole.switch("pure_bf16"):
        if mixed or adapted:
            raise whole.refused("pure_bf16", "it is modelled with finetuning_type: full, and without bf16 and fp16")
        reading.set("precision", "pure_bf16", "bf16")
    elif adapted and not mixed:
        reading.asks["precision"] = (
            "neither bf16 nor fp16 is on, and the frozen weights get the dtype of the model's files; set --precision"
        )


# On Megatron-Core

#: Degrees that only its trainers on Megatron-Core read: those of mcore_adapter (USE_MCA) and Megatron Bridge (USE_MEGATRON_BRIDGE).
_ON_MEGATRON = frozenset(f"{what}_model_parallel_size" for what in ("tensor", "pipeline", "expert"))
#: Keys of Megatron Bridge alone (hparams/megatron_bridge_args.py).
_OF_BRIDGE = frozenset({"mixed_precision", "use_packed_sequences", "export_hf_on_finish", "megatron_pretrained_checkpoint"})
#: Defaults of mcore_adapter that Megatron-LM does not have (alibaba/ROLL, mcore_adapter/training_args.py).
_OF_ADAPTER = {"expert_tensor_parallel_size": 1, "apply_rope_fusion": False}
_TRAINERS_BATCH = 8


def _megatrons_setup(whole: Table, folder: Path, gpus: int | None) -> Setup:
    """Return the job of LLaMA-Factory's trainers on Megatron-Core, whose arguments have Megatron-LM's names (train/mca/)."""
    from zeroplan.catalog.setups.megatron_arguments import megatron_setup  # noqa: PLC0415  only these trainers pay for it

    if not whole.switch("do_train"):
        raise SpecError(f"{whole.where}: do_train is not true, so that nothing is trained; give the file that trains")
    own = known_keys("llama-factory") | {*_MEGATRONS_KEYS.values(), "gradient_accumulation_steps", *_OF_BRIDGE}
    theirs = {key: value for key, value in whole.data.items() if key not in own and not key.startswith("lora_")}
    filled = {"use_distributed_optimizer": True} if _OF_BRIDGE & whole.data.keys() else _OF_ADAPTER
    made: dict[str, object] = {
        **filled, **theirs, "hf_path": whole.text("model_name_or_path"), "seq_length": whole.count("cutoff_len") or _DEFAULT_LENGTH,
        "micro_batch_size": whole.count("per_device_train_batch_size") or _TRAINERS_BATCH,
        "recompute_granularity": whole.text("recompute_granularity") or "none",
    }  # fmt: skip
    if _has_adapters(whole):
        made |= {"tuner_type": "lora", "lora_rank": whole.count("lora_rank") or _DEFAULT_RANK, "target_modules": "all-linear"}
    found = megatron_setup(Table(made, whole.where), folder, gpus)
    steps = whole.count("gradient_accumulation_steps")
    flags = {flag: setting._replace(key=_MEGATRONS_KEYS.get(flag, setting.key)) for flag, setting in found.flags.items()}
    flags["grad_accum"] = Setting("gradient_accumulation_steps", steps or 1, filled=steps is None)
    matters = {**found.matters, **({"finetuning_type": _ADAPTERS} if _has_adapters(whole) else {})}
    return found._replace(kind="llama-factory", flags=flags, matters=matters)


_ADAPTERS = "adapters are counted as ms-swift's on Megatron-Core; mcore_adapter's code is not read"


_MEGATRONS_KEYS = {"model": "model_name_or_path", "seq_len": "cutoff_len", "micro_batch": "per_device_train_batch_size"}

# Version 1

_COPIED = "v1's loss holds fp32 logits beside their shifted copy (core/base_trainer.py, compute_log_probs): --keep-logits fp32"
_BATCHED = "batching_strategy={}: a batch has at most micro_batch_size x cutoff_len tokens, which are counted"
_IN_16_BITS = "bf16 is false: {} are computed in fp32, and what is frozen keeps the dtype of the model's files; set --precision"


def _v1_setup(whole: Table, folder: Path, gpus: int | None) -> Setup:
    """Return the job in v1's arguments (v1/config/); raises SpecError if they train nothing, or for unmodelled settings."""
    if whole.get("train_dataset") is None:
        raise SpecError(f"{whole.where}: it has no train_dataset, so that nothing is trained; give the file that trains")
    reading = Reading(whole, folder)
    reading.set_model("model", whole.text("model") or "Qwen/Qwen3-4B-Instruct-2507")
    engine = _v1_engine(reading)
    adapted = _v1_adapter(reading)
    mixed = whole.switch("bf16") is not False
    if engine != "deepspeed":  # full tuning is in fp32; only FSDP2 computes in 16 bits (core/model_engine.py)
        reading.set("precision", "bf16", "bf16-mixed" if mixed and engine == "fsdp2" else "fp32", filled=engine == "ddp")
    if adapted and not (mixed and engine == "fsdp2"):
        reading.asks["precision"] = _IN_16_BITS.format("adapters")
    ways = whole.count("cp_size") or 1
    each = reading.number("micro_batch", "micro_batch_size", default=1) or 1
    length = whole.count("cutoff_len") or _DEFAULT_LENGTH
    reading.set("seq_len", "cutoff_len", -(-length // ways), note=ULYSSES if ways > 1 else "")
    reading.set_steps("global_batch_size", whole.count("global_batch_size"), each * max(1, (gpus or 1) // ways))
    again = whole.switch("enable_activation_checkpointing") is not False
    reading.set("recompute", "enable_activation_checkpointing", "full" if again else "none")
    reading.set("attention", "flash_attn", {"flash_attention_2": "flash"}.get(str(whole.get("flash_attn")), "sdpa"))
    reading.set("keep_logits", "loss", "fp32", filled=True, note=_COPIED)
    reading.set("optimizer", "optim_config", "adamw", filled=True)
    if whole.table("optim_config").text("name") not in (None, "adamw"):
        raise whole.refused("optim_config", "leave it out, which is AdamW")
    if whole.table("kernel_config").text("name") == "liger_kernel":
        reading.set_liger(*LIGER, key="kernel_config", loss=False)
    if (strategy := whole.text("batching_strategy")) not in (None, "normal"):
        reading.notes.append(_BATCHED.format(strategy))
    whole.judge("llama-factory-v1")
    return reading.setup("llama-factory")


def _v1_engine(reading: Reading) -> str:
    """Return the engine: FSDP2, DeepSpeed with its own file, or by default DDP (v1/plugins/trainer_plugins/distributed/)."""
    dist = reading.table.table("dist_config")
    name = dist.text("name")
    if name == "deepspeed":
        reading.deepspeed = deepspeed_beside(dist.text("config_file") or "", reading.folder, reading.table.where)
        return "deepspeed"
    if name not in (None, "fsdp2"):
        raise dist.refused("name", "use fsdp2 or deepspeed")
    reading.set("engine", "dist_config.name", name or "ddp", filled=name is None)
    keeps = dist.switch("reshard_after_forward") is False
    reading.set("stage", "dist_config.name", 0 if name is None else 2 if keeps else 3, filled=name is None)
    if dist.switch("offload_params"):
        reading.set_offload("dist_config.offload_params")
    return name or "ddp"


def _v1_adapter(reading: Reading) -> bool:
    """Read LoRA and QLoRA (v1/plugins/model_plugins/peft.py, quantization.py); returns whether there are adapters."""
    peft, quant = reading.table.table("peft_config"), reading.table.table("quant_config")
    if (kind := peft.text("name")) is None:
        return False
    if kind != "lora":
        raise peft.refused("name", "lora is modelled")
    targets = peft.get("target_modules") or "all"
    names = ",".join(map(str, targets)) if isinstance(targets, list) else str(targets)
    reading.set("lora_rank", "peft_config.r", peft.count("r") or _DEFAULT_RANK)
    reading.set("lora_targets", "peft_config.target_modules", OF_LINEAR if names == "all" else names)
    reading.set("lora_dropout", "peft_config.lora_dropout", number_of(peft.get("lora_dropout"), 0.05) > 0)
    if quant.text("name") is not None:
        if quant.count("quantization_bit") not in (None, 4):
            raise quant.refused("quantization_bit", "four bits are modelled")
        double = quant.switch("double_quantization") is not False
        reading.set("quantize", "quant_config", "nf4-double" if double else "nf4")
    return True

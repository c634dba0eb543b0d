"""What does LLaMA-Factory's YAML say of a job?

Its own keys are those of LLaMA-Factory 0.9.5 (hparams/), with its defaults; all others are those of TrainingArguments, and are
read as such.
"""

from pathlib import Path

from zeroplan.catalog.setups.told import Reading, Setup, Table, TranslatedTable
from zeroplan.catalog.setups.trainer import arguments_read
from zeroplan.errors import SpecError

#: Its keys by those of TrainingArguments and of TRL.
_INSTEAD = {
    "gradient_checkpointing": "disable_gradient_checkpointing", "gradient_checkpointing_kwargs": "use_reentrant_gc",
    "use_peft": "finetuning_type", "lora_r": "lora_rank", "lora_target_modules": "lora_target", "lora_dropout": "lora_dropout",
    "load_in_4bit": "quantization_bit", "use_bnb_nested_quant": "double_quantization",
    "bnb_4bit_quant_type": "quantization_type", "attn_implementation": "flash_attn", "cutoff_len": "cutoff_len",
}  # fmt: skip
#: hparams/model_args.py and finetuning_args.py.
_DEFAULT_RANK, _DEFAULT_LENGTH, _DEFAULT_DROPOUT = 8, 2048, 0.0
_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}

#: What is no training as it is modelled.
_REFUSED: dict[str, tuple[object, ...]] = dict.fromkeys(("use_kt", "use_mca", "use_megatron_bridge", "use_hyper_parallel"), ())
#: What changes memory and has no words in a job.
_SAVES = """
    use_unsloth use_unsloth_gc enable_liger_kernel shift_attn use_galore use_apollo use_badam use_adam_mini use_muon
    freeze_language_model neat_packing
"""
_ADDS = """
    mixture_of_depths use_llama_pro use_dft_loss use_asft_loss use_eaft_loss upcast_lmhead_output resize_vocab
    additional_target add_tokens add_special_tokens new_special_tokens_config moe_aux_loss_coef adapter_name_or_path
"""
_EITHER = """
    fp8 fp8_enable_fsdp_float8_all_gather use_v1_kernels block_diag_attn tensor_model_parallel_size
    pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
"""
_PAIRS = "pairs are counted as two sequences; the reference model is not counted (`zeroplan workflow dpo`)"
_ONE_EACH = "training on preferences or rewards is counted as fine-tuning: reference models and value heads are not counted"


def llama_factory_setup(whole: Table, folder: Path, _: int | None = None) -> Setup:
    """Read the file's keys; raises SpecError where it trains nothing, or says what is not modelled."""
    _refuse(whole)
    adapted = _has_adapters(whole)
    made = {**_recomputation(whole), **_attention(whole), **_adapter(whole, adapted=adapted)}
    if adapted and whole.data.get("ddp_find_unused_parameters") is None:
        made["ddp_find_unused_parameters"] = False  # hparams/parser.py, get_train_args
    table = TranslatedTable(whole, _INSTEAD, made)
    reading = arguments_read(table, folder)
    _precision(reading, whole, adapted=adapted)
    if (stage := whole.text("stage")) in ("dpo", "rm"):
        reading.tell_pairs()
    if stage in ("dpo", "rm", "kto"):
        reading.table.matters["stage"] = _PAIRS if stage == "dpo" else _ONE_EACH
    _tower(reading, whole)
    if adapted and "quantize" in reading.flags:  # model/model_utils/checkpointing.py; peft's preparation is not called
        upcast = "norms" if whole.switch("upcast_layernorm") else "none"
        reading.tell("upcast", "upcast_layernorm", upcast, filled=upcast == "none")
    if (workers := whole.count("ray_num_workers")) is not None and workers > 1:
        reading.tell("gpus", "ray_num_workers", workers, filled=True)
    return reading.setup("llama-factory")


def _refuse(whole: Table) -> None:
    if not whole.switch("do_train"):
        raise SpecError(f"{whole.where}: do_train is not true, so that nothing is trained; give the file that trains")
    if whole.text("stage") not in (None, "pt", "sft", "dpo", "kto", "rm"):
        raise whole.refused("stage", "sft, pt, dpo, kto and rm are modelled")
    whole.refuse(_REFUSED)
    whole.unmodelled(saves=_SAVES, adds=_ADDS, either=_EITHER)
    if whole.switch("upcast_layernorm") and whole.get("quantization_bit") is None:
        raise whole.refused("upcast_layernorm", "it is modelled beside quantization_bit: 4")


def _has_adapters(whole: Table) -> bool:
    kind = whole.text("finetuning_type")
    if kind not in (None, "lora", "full"):
        raise whole.refused("finetuning_type", "lora and full are modelled")
    return kind != "full"


def _recomputation(whole: Table) -> dict[str, object]:
    """On unless it is switched off (model/model_utils/checkpointing.py, prepare_model_for_training)."""
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
    if bits not in (None, 4):
        raise whole.refused("quantization_bit", "four bits are modelled")
    if bits is not None and method not in (None, "bnb", "bitsandbytes"):
        raise whole.refused("quantization_method", "use bnb")
    if not adapted:
        return {"load_in_4bit": bits is not None}
    dropout, targets = whole.get("lora_dropout"), whole.get("lora_target") or "all"
    names = [one.strip() for one in targets.split(",")] if isinstance(targets, str) else targets
    return {
        "use_peft": True,
        "lora_r": whole.count("lora_rank") or _DEFAULT_RANK,
        "lora_target_modules": "all-linear" if names == ["all"] else names,
        "lora_dropout": _DEFAULT_DROPOUT if dropout is None else dropout,
        "load_in_4bit": bits is not None,
        "use_bnb_nested_quant": whole.switch("double_quantization") is not False,
        "bnb_4bit_quant_type": whole.text("quantization_type"),
    }


def _tower(reading: Reading, whole: Table) -> None:
    """Both are frozen unless the file says otherwise (hparams/finetuning_args.py, FreezeArguments)."""
    keys = {"tower": "freeze_vision_tower", "projector": "freeze_multi_modal_projector"}
    frozen = [part for part, key in keys.items() if whole.switch(key) is not False]
    if len(frozen) < len(keys):
        reading.tell("freeze", next(key for part, key in keys.items() if part not in frozen), ",".join(frozen) or "none")


def _precision(reading: Reading, whole: Table, *, adapted: bool) -> None:
    """The model is loaded in 16 bits; what is trained becomes fp32, unless pure_bf16 is on (model/adapter.py, init_adapter)."""
    mixed = any(whole.switch(key) for key in ("bf16", "fp16"))
    if whole.switch("pure_bf16"):
        if mixed or adapted:
            raise whole.refused("pure_bf16", "it is modelled with finetuning_type: full, and without bf16 and fp16")
        reading.tell("precision", "pure_bf16", "bf16")
    elif adapted and not mixed:
        reading.asks["precision"] = (
            "neither bf16 nor fp16 is on, and the frozen weights get the dtype of the model's files; set --precision"
        )

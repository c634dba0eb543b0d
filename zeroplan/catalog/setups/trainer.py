"""Reads a job from TrainingArguments as JSON or YAML.

Keys are those of transformers 5.23 (training_args.py) and of releases since 4.30, with 5.23's defaults for keys left out. Model,
sequence length and adapters have the keys of transformers' and TRL's example scripts. None of them gives the number of GPUs.
"""

from pathlib import Path

from zeroplan.catalog.setups.parsing import parsed
from zeroplan.catalog.setups.reading import deepspeed_beside, named_file
from zeroplan.catalog.setups.settings import LIGER, Reading, Table, TranslatedTable, number_of, own_tensor_parallelism
from zeroplan.catalog.setups.setup import DeepSpeedPart, Setting, Setup
from zeroplan.catalog.text import read_text, shown
from zeroplan.errors import SpecError
from zeroplan.spec.adapter import PEFT_DEFAULT, TRAINED_MODULES

#: zeroplan's optimizer and implementation for each ``optim`` (trainer_optimizer.py); ``None`` leaves the choice to torch.
_OPTIMIZERS: dict[str, tuple[str, str | None]] = {
    "adamw_torch": ("adamw", None), "adamw_torch_fused": ("adamw", "fused"), "adamw_hf": ("adamw", None),
    "adamw_bnb_8bit": ("adamw-8bit", None), "adamw_8bit": ("adamw-8bit", None), "adafactor": ("adafactor", None),
    "sgd": ("sgd", None), "adagrad": ("adagrad", None), "rmsprop": ("rmsprop", None),
    "paged_adamw": ("paged-adamw-32bit", None), "paged_adamw_32bit": ("paged-adamw-32bit", None),
    "paged_adamw_8bit": ("paged-adamw-8bit", None), "lion_8bit": ("lion-8bit", None), "lion_32bit": ("lion-32bit", None),
    "paged_lion_8bit": ("paged-lion-8bit", None), "paged_lion_32bit": ("paged-lion-32bit", None),
    "adamw_torch_8bit": ("torchao-adamw-8bit", None), "adamw_torch_4bit": ("torchao-adamw-4bit", None),
    "ademamix": ("ademamix-32bit", None), "ademamix_8bit": ("ademamix-8bit", None),
    "paged_ademamix_32bit": ("paged-ademamix-32bit", None), "paged_ademamix_8bit": ("paged-ademamix-8bit", None),
    "rmsprop_bnb": ("rmsprop-32bit", None), "rmsprop_bnb_32bit": ("rmsprop-32bit", None),
    "rmsprop_bnb_8bit": ("rmsprop-8bit", None), "schedule_free_adamw": ("schedule-free-adamw", None),
    "schedule_free_radam": ("schedule-free-adamw", None), "schedule_free_sgd": ("schedule-free-sgd", None),
    "stable_adamw": ("stable-adamw", None), "galore_adamw": ("galore", None), "apollo_adamw": ("apollo", None),
    "grokadamw": ("grokadamw", None), "lomo": ("lomo", None), "adalomo": ("adalomo", None),
}  # fmt: skip
_DEFAULT_OPTIM = "adamw_torch_fused"
#: bitsandbytes' paged optimizers, whose states the driver moves between GPU and host, and the same optimizer without paging.
_PAGED = {
    "paged_adamw_8bit": "adamw-8bit", "paged_adamw": "adamw", "paged_adamw_32bit": "adamw", "paged_lion_8bit": "lion-8bit",
    "paged_lion_32bit": "lion-32bit", "paged_ademamix_8bit": "ademamix-8bit", "paged_ademamix_32bit": "ademamix-32bit",
}  # fmt: skip
_DEFAULT_BATCH = 8
_BEYOND = (
    "columns of inputs beyond bitsandbytes' threshold are kept in 16 bits, too, and are not counted: one in a thousand in "
    "the paper on LLM.int8() (arXiv 2208.07339)"
)
_HELD = "use_reentrant is on: the block's output that each checkpoint holds during its backward is not counted with this engine"
_UNUSED = "ddp_find_unused_parameters"

_LENGTHS = ("max_length", "max_seq_length", "max_seq_len", "block_size", "model_max_length", "cutoff_len")


def trainer_setup(table: Table, folder: Path, _: int | None = None) -> Setup:
    """Return the job in the file; raises SpecError for settings that are not modelled."""
    reading = arguments_read(table, folder)
    set_dora(reading)
    if reading.loop:
        reading.set_log_probs(_key_of_dpo(table) or "beta")
    elif table.data.get("num_generations") is not None or table.switch("use_vllm"):
        _grpo(reading)
    elif (key := _key_of_sft(table)) is not None:
        reading.set_log_probs(key, note=f"{key} is of {_SFT_LOSS}")
        reading.set_loop(key, "sft", alone=True)
    return reading.setup("trainer")


def arguments_read(table: Table, folder: Path) -> Reading:
    """Return the settings read from a file, also for programs that run on transformers' Trainer; raises SpecError as above."""
    reading = Reading(table, folder)
    reading.own_units = "accelerate, which the Trainer runs on,"
    table.judge("trainer")
    for read in (_deepspeed, _engine, _precision, _batch, _recomputation, _ddp, _optimizer, _model, _adapter, _accelerators):
        read(reading)
    if (key := _key_of_dpo(table)) is not None:
        reading.set_pairs()
        once = table.switch("precompute_ref_log_probs")
        mixed = table.switch("sync_ref_model") or None
        reading.set_loop(key, "dpo", precompute_ref_log_probs=once or None, sync_ref_model=mixed)
        for key in ("beta", "precompute_ref_log_probs"):
            table.matters.pop(key, None)
    _liger(reading)
    _compiled(table, reading)
    _in_eight_bits(reading)
    return reading


def set_dora(reading: Reading) -> None:
    """Read peft's DoRA with engines for which it is modelled. Under autocast, four bits are counted with norms in fp32."""
    table, flags = reading.table, reading.flags
    engine = "deepspeed" if reading.deepspeed else flags["engine"].value if "engine" in flags else ""
    if "lora_rank" not in flags or engine not in ("ddp", "fsdp2") or not table.switch("use_dora"):
        return
    reading.set("dora", "use_dora", "peft")
    table.matters.pop("use_dora", None)
    narrow = "upcast" in flags and flags["upcast"].value == "none" and str(flags["precision"].value).endswith("mixed")
    if narrow and engine == "ddp" and "quantize" in flags:
        reading.set("upcast", "use_dora", "norms", filled=True, note=_WIDENED)


_WIDENED = "DoRA beside four bits returns fp32 under autocast: it is counted with norms in fp32, which take as much"


def _in_eight_bits(reading: Reading) -> None:
    """Eight bits beside adapters under DDP; a layer keeps its input through checkpoints that are not reentrant."""
    table, flags = reading.table, reading.flags
    if not table.switch("load_in_8bit"):
        return
    reentrant = flags["recompute"].value == "none" or ("reentrant" in flags and flags["reentrant"].value)
    if "lora_rank" in flags and "engine" in flags and flags["engine"].value == "ddp" and reentrant:
        reading.set("quantize", "load_in_8bit", "int8", note=_BEYOND)
    else:
        table.unmodelled(saves="load_in_8bit" if reentrant else "", either="" if reentrant else "load_in_8bit")


def _grpo(reading: Reading) -> None:
    """Read the loop of TRL's GRPOTrainer (1.16, trl/trainer/grpo_config.py); without vLLM only the training step is judged."""
    table = reading.table
    key, alone = ("use_vllm", False) if table.switch("use_vllm") else ("num_generations", True)
    generations, completion = table.count("num_generations"), table.data.get("max_completion_length")
    prompt, beta, memory = (table.get(key) for key in ("max_prompt_length", "beta", "vllm_gpu_memory_utilization"))
    here = table.text("vllm_mode") != "server"
    reading.set_log_probs(key)
    reading.set_loop(
        key, "grpo", alone=alone, beta=number_of(beta, 0.0), num_generations=generations,
        max_completion_length=table.count("max_completion_length"), steps_per_generation=table.count("steps_per_generation"),
        vllm_mode=table.text("vllm_mode"), vllm_gpu_memory_utilization=number_of(memory, 0.3) if here else None,
        vllm_tensor_parallel_size=table.count("vllm_tensor_parallel_size"),
        vllm_enable_sleep_mode=table.switch("vllm_enable_sleep_mode") or None,
        sync_ref_model=(table.switch("sync_ref_model") and number_of(beta, 0.0) > 0) or None,
    )  # fmt: skip
    if prompt is not None and completion is not None and "seq_len" not in reading.flags:
        tokens = (table.count("max_prompt_length") or 0) + (table.count("max_completion_length") or 0)
        reading.set("seq_len", "max_prompt_length and max_completion_length", tokens, filled=True)
    for key in () if alone else ("beta", "num_generations", "max_completion_length"):
        table.matters.pop(key, None)


#: Keys and losses that only TRL's DPOConfig has (TRL 1.16, trl/trainer/dpo_config.py).
_OF_DPO = ("precompute_ref_log_probs", "precompute_ref_batch_size", "rpo_alpha")
_DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "aot_pair",
    "discopop", "apo_zero", "apo_down", "sigmoid_norm",
)  # fmt: skip


def _key_of_dpo(table: Table) -> str | None:
    """Return the key that identifies a file of TRL's DPOTrainer; None for others. GRPO has ``beta`` with ``num_generations``."""
    if table.data.get("num_generations") is not None:
        return None
    own = ("beta" if "beta" in table.matters else None, *(key for key in _OF_DPO if table.data.get(key) is not None))
    loss = "loss_type" if set(_losses(table)) & set(_DPO_LOSSES) else None
    return next((key for key in (*own, loss) if key is not None), None)


def _losses(table: Table) -> list[str]:
    """Return the names under ``loss_type``, which DPOTrainer also takes as a list."""
    loss = table.data.get("loss_type")
    return [str(one) for one in loss] if isinstance(loss, (list, tuple)) else str(loss or "").replace(",", " ").split()


#: Keys of TRL's SFTConfig (1.16, trl/trainer/sft_config.py) that neither its other trainers nor transformers' scripts have.
_OF_SFT = ("packing", "packing_strategy", "eval_packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field")
_SFT_LOSS = (
    "TRL's SFTTrainer, whose loss is counted as in TRL 1.16: from log-probabilities, without the logits of all tokens; releases "
    "that make them all need --loss full"
)


def _key_of_sft(table: Table) -> str | None:
    """Return the key by which a file is one of TRL's SFTTrainer."""
    found = next((key for key in _OF_SFT if table.data.get(key) is not None), None)
    return found or ("loss_type" if set(_losses(table)) & {"nll", "chunked_nll", "dft"} else None)


#: Keys that only TRL's ModelConfig and its trainers' arguments have (TRL 1.10, trl/trainer/model_config.py).
_OF_TRL = ("use_peft", "lora_r", "lora_target_modules", "num_generations", "use_vllm", "max_completion_length")
_TRLS_BF16 = "bf16 is left out: it is on in TRL since 0.19; add bf16: false for earlier releases"
_TRLS_RECOMPUTATION = (
    "gradient_checkpointing is left out: it is on in TRL since 0.22; add gradient_checkpointing: false for earlier releases"
)


def _is_of_trl(table: Table) -> bool:
    """Return whether the arguments are TRL's, whose defaults differ from transformers' (TRL 1.10, trl/trainer/base_config.py)."""
    if isinstance(table, TranslatedTable):
        return False
    own = any(table.data.get(key) is not None for key in _OF_TRL)
    return own or _key_of_dpo(table) is not None or _key_of_sft(table) is not None


def _compiled(table: Table, reading: Reading) -> None:
    """Read torch.compile, which any of three keys turns on (training_args.py, __post_init__); some modes capture CUDA graphs."""
    keys = ("torch_compile", "torch_compile_mode", "torch_compile_backend")
    given = {key: value for key in keys if (value := table.get(key)) and str(value).lower() not in ("auto", "false")}
    if not given:
        return
    key, mode, backend = next(iter(given)), given.get("torch_compile_mode"), given.get("torch_compile_backend")
    if mode in ("reduce-overhead", "max-autotune") or backend == "cudagraphs":
        table.unmodelled(adds="torch_compile_mode torch_compile_backend")
    else:
        reading.set_compiled(table, key, whole=True)


def _liger(reading: Reading) -> None:
    """Read Liger's kernels: by default all except plain cross-entropy (transformers 5.23, integrations/liger.py)."""
    table = reading.table
    kernels = table.get("liger_kernel_config")
    if not table.switch("use_liger_kernel"):
        return
    if reading.loop or table.data.get("num_generations") is not None:  # in TRL's trainers it means another loss
        table.unmodelled(saves="use_liger_kernel")
        return
    config = kernels if isinstance(kernels, dict) else {}
    names = {"rope": "rope", "liger-rms-norm": "rms_norm", "liger-swiglu": "swiglu"}
    parts = [part for part in LIGER if config.get(names[part], True)]
    fuses = bool(config.get("fused_linear_cross_entropy", True)) and _key_of_sft(table) is None  # SFTTrainer has its own loss
    reading.set_liger(*parts, key="use_liger_kernel", loss=fuses)


def _deepspeed(reading: Reading) -> None:
    value = reading.table.get("deepspeed")
    if isinstance(value, dict):
        reading.deepspeed = DeepSpeedPart(value, f"{reading.table.where}: deepspeed")
    elif value not in (None, "", False):
        named = reading.table.text("deepspeed") or ""
        reading.deepspeed = deepspeed_beside(named, reading.folder, reading.table.where)


def _engine(reading: Reading) -> None:
    fsdp = reading.table.get("fsdp")
    items = fsdp.split() if isinstance(fsdp, str) else list(fsdp) if isinstance(fsdp, (list, tuple)) else []
    config = _fsdp_config(reading)
    if fsdp in (None, False, "", []) or [item.lower() for item in map(str, items)] == ["false"]:
        if reading.deepspeed is None:
            reading.set("engine", "fsdp and deepspeed (left out)", "ddp", filled=True)
            reading.set("stage", "fsdp and deepspeed (left out)", 0, filled=True)
        return
    if reading.deepspeed is not None:
        raise SpecError(f"{reading.table.where} has both fsdp and deepspeed, and the Trainer takes one; leave one of them out")
    _fsdp(reading, config, [str(item).lower() for item in items])


def _fsdp_config(reading: Reading) -> Table:
    """Return ``fsdp_config``, a table or the path of a JSON file, with the prefix ``fsdp_`` removed from its keys."""
    value, where = reading.table.get("fsdp_config"), reading.table.where
    if isinstance(value, str) and value:
        path = named_file(value, reading.folder, where)
        where = f"FSDP configuration {str(path)!r}"
        value = parsed(read_text(path, what="FSDP configuration"), path, where)
    if value in (None, ""):
        value = {}
    if not isinstance(value, dict):
        raise reading.table.wrong("fsdp_config", "a table of keys and values, or the path of one")
    return Table({str(key).removeprefix("fsdp_"): one for key, one in value.items()}, where, "fsdp_config.")


def _fsdp(reading: Reading, config: Table, items: list[str]) -> None:
    """Read FSDP as ``_process_fsdp_args`` does; version 2 is the default."""
    words = [item for item in items if item not in ("true", "offload", "auto_wrap")]
    unknown = [
        word for word in words if word not in ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard", "hybrid_shard_zero2")
    ]
    if unknown:
        raise reading.table.wrong("fsdp", "true, or full_shard, shard_grad_op, offload, auto_wrap")
    if any(word not in ("full_shard", "shard_grad_op") for word in words):
        raise reading.table.refused("fsdp", "use full_shard or shard_grad_op")
    version = config.count("version")
    if version == 1:
        reading.set("engine", "fsdp_config.version", "fsdp1", also=("fsdp2",))
        _fsdp1_options(reading, config)
    else:
        reading.set("engine", "fsdp", "fsdp2")
    if version is None:
        reading.notes.append(
            "fsdp_config has no version: zeroplan assumes FSDP2, as in transformers 5; earlier releases use FSDP1 (--engine fsdp1)"
        )
    _fsdp_stage(reading, config, words)
    if config.switch("cpu_offload") or "offload" in items:
        reading.set_offload("fsdp_config.cpu_offload")
    if config.switch("activation_checkpointing"):
        reading.set("recompute", "fsdp_config.activation_checkpointing", "full")
    if str(config.get("auto_wrap_policy") or "TRANSFORMER_BASED_WRAP").upper() != "TRANSFORMER_BASED_WRAP":
        raise config.refused("auto_wrap_policy", "use TRANSFORMER_BASED_WRAP")
    config.judge("trainer-fsdp")
    reading.notes += config.unknown()


def _fsdp1_options(reading: Reading, config: Table) -> None:
    """Read FSDP1's switches, with accelerate's defaults."""
    word = str(config.get("backward_prefetch") or "NO_PREFETCH").lower()
    if word not in ("backward_pre", "backward_post", "no_prefetch"):
        raise config.refused("backward_prefetch", "use backward_pre, backward_post or no_prefetch")
    reading.options["fsdp1.backward_prefetch"] = Setting("fsdp_config.backward_prefetch", word)
    for name in ("forward_prefetch", "use_orig_params"):
        reading.options[f"fsdp1.{name}"] = Setting(f"fsdp_config.{name}", bool(config.switch(name)))


def _fsdp_stage(reading: Reading, config: Table, words: list[str]) -> None:
    value = config.get("reshard_after_forward")
    strategies = {"full_shard": True, "shard_grad_op": False, "true": True, "false": False}
    if isinstance(value, str):
        if value.lower() not in strategies:
            raise config.refused("reshard_after_forward", "use true or false")
        value = strategies[value.lower()]
    if value is None:
        value = "shard_grad_op" not in words
    if not isinstance(value, bool):
        raise config.wrong("reshard_after_forward", "true or false")
    reading.set(
        "stage", "fsdp_config.reshard_after_forward" if "reshard_after_forward" in config.data else "fsdp", 3 if value else 2
    )


def _precision(reading: Reading) -> None:
    on = [name for name in ("bf16", "fp16") if reading.table.switch(name)]
    if len(on) > 1:
        raise SpecError(f"{reading.table.where} has both bf16 and fp16; the Trainer takes one of them")
    if on:
        reading.set("precision", on[0], f"{on[0]}-mixed", also=("bf16",) if on == ["bf16"] else ())
    elif reading.table.switch("bf16") is None and _is_of_trl(reading.table):
        on = ["bf16"]
        reading.set("precision", "bf16", "bf16-mixed", filled=True, note=_TRLS_BF16)
    else:
        reading.set("precision", "neither bf16 nor fp16", "fp32", filled=True)
    reading.set("keep_logits", "compute_loss", value=False, filled=True)
    if on and reading.flags.get("engine", Setting("", "")).value == "fsdp2":
        reading.options["fsdp2.reduce_dtype"] = Setting(on[0], "param")
    _loaded_weights(reading)


def _loaded_weights(reading: Reading) -> None:
    """Read the dtype in which the model is loaded. The Trainer keeps it: weights of 16 bits are trained so, if nothing shards them.

    FSDP casts trained weights to fp32, DeepSpeed has copies in fp32. fp16 cannot be trained so. Weights beside adapters are frozen.
    """
    table, flags, dtype = reading.table, reading.flags, _dtype_of(reading.table)
    loaded = table.get("torch_dtype") or table.get("dtype")
    for key in ("torch_dtype", "dtype"):
        table.leave((key,))
    engine, precision = flags.get("engine", Setting("", "")).value, flags["precision"].value
    own = not isinstance(table, TranslatedTable) and not _has_adapters(table)
    if own and engine == "ddp" and precision == "bf16-mixed" and (dtype == "auto" or not (dtype or _is_of_trl(table))):
        reading.notes.append(_AS_STORED)
    if dtype in ("", "float32", "auto") or (engine == "fsdp2" and precision != "fp32"):
        return
    if own and engine == "ddp" and dtype == "bfloat16" and precision != "fp16-mixed":
        key = "torch_dtype" if table.data.get("torch_dtype") is not None else "dtype"
        reading.set("precision", key, "bf16", also=() if precision == "fp32" else ("bf16-mixed",))
        return
    reading.notes.append(
        f"weights are loaded as {shown(loaded)}; they are counted in fp32, as training with bf16 or fp16 needs them; set "
        "--precision bf16 if they stay in 16 bits"
    )


_AS_STORED = (
    "transformers 5 loads the model in the dtype of its files, and weights are counted in fp32: add --precision bf16 if the files "
    "are in 16 bits"
)


def _batch(reading: Reading) -> None:
    table = reading.table
    key = (
        "per_gpu_train_batch_size" if table.data.get("per_gpu_train_batch_size") is not None else "per_device_train_batch_size"
    )
    size, steps = table.count(key), table.count("gradient_accumulation_steps")
    table.leave(("per_gpu_train_batch_size", "per_device_train_batch_size"))
    left_out = f"{key} is left out, which is {_DEFAULT_BATCH} to transformers" if size is None else ""
    reading.set("micro_batch", key, size or _DEFAULT_BATCH, filled=size is None, note=left_out)
    reading.set("grad_accum", "gradient_accumulation_steps", steps or 1, filled=steps is None)
    if table.switch("auto_find_batch_size"):
        reading.notes.append("auto_find_batch_size makes batches smaller until they fit; the one that is asked for is counted")
    lengths = {name: found for name in _LENGTHS if (found := table.count(name)) is not None}
    if len(set(lengths.values())) > 1:
        pairs = " and ".join(f"{name}={value}" for name, value in lengths.items())
        raise SpecError(f"{table.where} has {pairs}; keep the one that your script reads")
    for name, value in lengths.items():
        reading.set("seq_len", name, value)


def _recomputation(reading: Reading) -> None:
    keys = ("gradient_checkpointing", "activation_checkpointing")
    given = [key for key in keys if reading.table.switch(key) is not None]
    on = [key for key in given if reading.table.switch(key)]
    if "recompute" in reading.flags:
        return
    if on:
        reading.set("recompute", on[0], "full")
        reentrant = reading.table.table(f"{on[0]}_kwargs").switch("use_reentrant")
        if reentrant is not None and reading.flags.get("engine", Setting("", "")).value == "ddp":
            reading.set("reentrant", f"{on[0]}_kwargs", reentrant, filled=True)
        elif reentrant:
            reading.notes.append(_HELD)
    elif not given and _is_of_trl(reading.table):
        reading.set("recompute", keys[0], "full", filled=True, note=_TRLS_RECOMPUTATION)
    else:
        reading.set("recompute", given[0] if given else keys[0], "none", filled=not given)


def _ddp(reading: Reading) -> None:
    """Read DDP's options (``_build_accelerator_args``). Without recomputation the Trainer looks for unused parameters."""
    table, recomputed = reading.table, reading.flags["recompute"]
    unused, static, cap = table.switch(_UNUSED), table.switch("ddp_static_graph"), table.count("ddp_bucket_cap_mb")
    if reading.flags.get("engine", Setting("", "")).value != "ddp":
        return
    if unused is None and recomputed.value == "none":
        reading.options["ddp.find_unused_parameters"] = Setting(_UNUSED, value=True, filled=True)
    elif unused:
        reading.options["ddp.find_unused_parameters"] = Setting(_UNUSED, value=True)
    if static:
        reading.options["ddp.static_graph"] = Setting("ddp_static_graph", value=True)
    if cap:
        reading.options["ddp.bucket_cap_mb"] = Setting("ddp_bucket_cap_mb", cap)


def _optimizer(reading: Reading) -> None:
    name = reading.table.text("optim")
    if name in _PAGED and ("engine" not in reading.flags or reading.flags["engine"].value != "ddp"):
        note = f"{reading.table.name('optim')} is {name}, whose states may move to the host: they are counted on the GPU"
        reading.set("optimizer", "optim", _PAGED[name], note=note)
        return
    if (name or _DEFAULT_OPTIM) not in _OPTIMIZERS:
        raise reading.table.refused("optim", f"use one of {', '.join(_OPTIMIZERS)}")
    optimizer, impl = _OPTIMIZERS[name or _DEFAULT_OPTIM]
    args = _optim_args(reading.table)
    momentum = args.get("momentum", "").strip("0.") != ""  # a momentum of 0.0 has no states
    if args.get("centered", "").lower() in ("true", "1", "yes") or (momentum and name != "sgd"):
        raise reading.table.refused("optim_args")
    if momentum:
        optimizer = "sgd-momentum"
    if optimizer in ("galore", "apollo"):
        _check_low_rank(reading.table, args)
    else:
        reading.unmodelled(saves="optim_target_modules")
    filled = name is None or reading.deepspeed is not None  # DeepSpeed's own section has priority
    reading.set("optimizer", "optim", optimizer, filled=filled, also=(_PAGED[name],) if name in _PAGED else ())
    if optimizer == "torchao-adamw-4bit":
        reading.notes.append(
            "the Trainer's 4-bit AdamW has a scale for 256 elements, where torchao's own default, 128, is counted"
        )
    if impl is not None:
        reading.set("optimizer_impl", "optim", impl, filled=filled)
    if optimizer == "adamw" and reading.deepspeed is not None and not reading.deepspeed.data.get("optimizer"):
        reading.options["deepspeed.torch_adam"] = Setting(
            "optim", value=True, filled=filled
        )  # the Trainer passes torch's AdamW to DeepSpeed


def _check_low_rank(table: Table, args: dict[str, str]) -> None:
    """Raise SpecError unless GaLore or APOLLO project all matrices of the blocks to rank 128, as modelled."""
    targets = table.get("optim_target_modules")
    named = str(targets) if isinstance(targets, (list, str)) else ""
    if not ("attn" in named and "mlp" in named):
        raise table.refused("optim_target_modules", "name attn and mlp, whose matrices are those of the blocks")
    if args.get("rank", "128") != "128" or args.get("proj_type", "std") != "std":
        raise table.refused("optim_args", "use rank=128, the default")


def _optim_args(table: Table) -> dict[str, str]:
    """Return ``optim_args``, parsed as in transformers (trainer_optimizer.py, ``_parse_optim_args``)."""
    text = (table.text("optim_args") or "").replace(" ", "")
    return {key: value for key, _, value in (one.partition("=") for one in text.split(","))}


#: transformers' names of FlashAttention, whose forward keeps its output and a number per head and token. flash-attn 4 is assumed to
#: keep the same: its code was not read.
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def _model(reading: Reading) -> None:
    name = reading.table.text("model_name_or_path")
    config = reading.table.text("config_name")
    reading.table.leave(("config_overrides",) if not reading.table.data.get("config_overrides") else ())
    named = name or config
    if named:
        reading.set_model("model_name_or_path", named)
    words = {**dict.fromkeys(_FLASH, "flash"), "sdpa": "sdpa", "eager": "eager"}
    attention = reading.table.text("attn_implementation")
    if attention is not None:
        if attention not in words:
            raise reading.table.refused("attn_implementation", f"use one of {', '.join(words)}")
        reading.set("attention", "attn_implementation", words[attention])


def _has_adapters(table: Table) -> bool:
    uses = table.switch("use_peft")
    return bool(uses) or (uses is None and table.count("lora_r") is not None)


def _adapter(reading: Reading) -> None:
    """Read LoRA and QLoRA, under the keys of TRL's ModelConfig."""
    table = reading.table
    rank, targets = table.count("lora_r"), table.get("lora_target_modules")
    four, kind, double = table.switch("load_in_4bit"), table.text("bnb_4bit_quant_type"), table.switch("use_bnb_nested_quant")
    if not _has_adapters(table):
        if four:
            raise table.refused("load_in_4bit", "weights in four bits are modelled under adapters: add use_peft")
        return
    reading.set("lora_rank", "lora_r", rank or 16, filled=rank is None)  # TRL's default
    if targets is not None:
        names = [targets] if isinstance(targets, str) else targets
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise table.wrong("lora_target_modules", "a list of names")
        reading.set("lora_targets", "lora_target_modules", ",".join(names))
    elif isinstance(table, TranslatedTable):  # not TRL, which hands None to peft
        raise SpecError(
            f"{table.where}: lora_target_modules is left out, and peft's default depends on the model; "
            "name the layers, or write all-linear"
        )
    else:
        left_out = "lora_target_modules is left out: the layers that peft adapts by default are counted"
        reading.set("lora_targets", "lora_target_modules", PEFT_DEFAULT, filled=True, note=left_out)
    dropout = table.get("lora_dropout")
    if not (dropout is None or (isinstance(dropout, int | float) and not isinstance(dropout, bool))):
        raise table.wrong("lora_dropout", "a number")
    reading.set("lora_dropout", "lora_dropout", dropout is None or dropout > 0, filled=dropout is None)  # TRL's default is 0.05
    _whole_modules(reading)
    if four:
        if kind not in (None, "nf4"):
            raise table.refused("bnb_4bit_quant_type", "use nf4")
        reading.set("quantize", "load_in_4bit", "nf4-double" if double else "nf4")
    _frozen_weights(reading)


def _dtype_of(table: Table) -> str:
    """Return the dtype in which the file says that the model is loaded; empty if it says nothing."""
    return str(table.data.get("dtype") or table.data.get("torch_dtype") or "").rpartition(".")[2]


def _frozen_weights(reading: Reading) -> None:
    """Read whether frozen weights stay in fp32, TRL's default. DeepSpeed casts them, and other programs load them in 16 bits."""
    table, flags, dtype = reading.table, reading.flags, _dtype_of(reading.table)
    own = not isinstance(table, TranslatedTable) and reading.deepspeed is None and not table.switch("load_in_8bit")
    if not own or "quantize" in flags or dtype not in ("", "float32") or not str(flags["precision"].value).endswith("mixed"):
        return
    if flags["engine"].value not in ("ddp", "fsdp2") or table.switch("use_dora"):
        reading.notes.append(_IN_16_BITS)
        return
    key = "torch_dtype" if table.data.get("torch_dtype") is not None else "dtype"
    reading.set("lora_base", key, "fp32", filled=not dtype, note="" if dtype else _TRLS_DTYPE)


_TRLS_DTYPE = "dtype is left out: TRL loads the model in fp32, and frozen weights keep it; with dtype: bfloat16 they take half"
_IN_16_BITS = "TRL loads this model in fp32, but frozen weights are counted in 16 bits, too low; dtype: bfloat16 loads them so"


def _whole_modules(reading: Reading) -> None:
    """Read the modules that peft trains whole, with engines for which they are modelled; they are noted with others.

    Under DDP a copy has the dtype of the loaded weights: 16 bits in Axolotl and ms-swift, in others if the file asks for it.
    """
    table = reading.table
    key = next((one for one in ("lora_modules_to_save", "modules_to_save") if one in table.matters), None)
    engine = "deepspeed" if reading.deepspeed else reading.flags["engine"].value
    narrow = isinstance(table, TranslatedTable) or reading.flags["precision"].value == "fp32"
    narrow = narrow or _dtype_of(table) in ("bfloat16", "float16")
    if key is None or engine not in ("fsdp2", "deepspeed", *(["ddp"] if narrow else [])):
        return
    modules = table.data[key]
    names = modules.replace(",", " ").split() if isinstance(modules, str) else modules if isinstance(modules, list) else []
    plain = [str(one).rpartition(".")[2] for one in names]
    if plain and set(plain) <= set(TRAINED_MODULES):
        reading.set("modules_to_save", key, ",".join(plain))
        del table.matters[key]


def _accelerators(reading: Reading) -> None:
    value = reading.table.get("accelerator_config")
    config = Table(value if isinstance(value, dict) else {}, reading.table.where, "accelerator_config.")
    if isinstance(value, str):
        reading.notes.append(f"accelerator_config is a file of its own, {shown(value)}, which is left out")
    config.refuse({"split_batches": ()})
    each = config.table("gradient_accumulation_kwargs").switch("sync_each_batch")
    if reading.deepspeed is None:
        key = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
        reading.set("sync_every_micro_batch", key, bool(each), filled=each is None)
    degrees = reading.table.table("parallelism_config")
    if (ways := degrees.count("tp_size")) is not None and ways > 1:
        reading.asks["tensor_parallel"] = own_tensor_parallelism("parallelism_config.tp_size", ways)
    for key, flag in (("dp_replicate_size", "replicas"), ("cp_size", "context_parallel")):
        if (degree := degrees.count(key)) is not None and degree > 1:
            reading.set(flag, f"parallelism_config.{key}", degree)
    degrees.refuse({"sp_size": (1,)})
    degrees.leave(("dp_shard_size", "cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler"))
    reading.notes += degrees.unknown()

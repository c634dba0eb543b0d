"""Reads a job from Axolotl's YAML.

Keys are those of Axolotl 0.17 (utils/schemas/), with its defaults for keys left out. Axolotl runs on transformers' Trainer:
its keys are translated to TrainingArguments, and trainer.py reads these.
"""

import re
from pathlib import Path

from zeroplan.catalog.setups.keys import keys_of
from zeroplan.catalog.setups.reading import named_file
from zeroplan.catalog.setups.settings import LIGER, Reading, Table, TranslatedTable, own_tensor_parallelism
from zeroplan.catalog.setups.setup import Setting, Setup
from zeroplan.catalog.setups.trainer import arguments_read
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError
from zeroplan.spec.adapter import FIRST, OF_LINEAR, SECOND, STACKED, WIDENED

_LEGACY_ATTENTION = {
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
    "xformers_attention": "xformers", "flex_attention": "flex_attention", "sage_attention": "sage",
}  # fmt: skip
#: Plugins that change no memory, or whose keys are read.
_PLUGINS = ("SwanLabPlugin", "LigerPlugin", "CutCrossEntropyPlugin")
_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_PACKED = "sample_packing fills one row with micro_batch_size x sequence_len tokens: as many full sequences are counted"
_IN_FP16 = "float16 without fp16 trains in 16 bits without autocast, which is counted as bf16: the same widths"
_MASK = "sample_packing without FlashAttention makes a mask of all pairs of tokens, not counted: the answer is too low by that"
_OWN_KERNELS = (
    "adapters run in Axolotl's own kernels (lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel), which are modelled together, with "
    "DDP and in families like Llama: peft's layers are counted in their place, which take more"
)
#: DeepSpeed files that Axolotl ships (`axolotl fetch deepspeed_configs`), by the number in their name.
_SHIPPED: dict[str, dict[str, object]] = {
    "1": {"stage": 1, "overlap_comm": True},
    "2": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "max_live_parameters": 0,
          "max_reuse_distance": 0, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
          "stage3_param_persistence_threshold": "auto"},
}  # fmt: skip
_IS_SHIPPED = re.compile(
    r"(?:\.?/)?deepspeed_configs/zero(?P<stage>[123])(?P<bf16>_bf16)?(?:_cpuoffload_(?P<off>all|params))?\.json"
)

_POLICIES = {"dpo": 2, "ipo": 2, "orpo": 2, "simpo": 2, "kto": 1, "gdpo": 1, "grpo": 1}
#: Keys that act on experts alone, and how their plugins are named. Source: loaders/model.py, integrations/kernels/args.py,
#: integrations/expert_parallel/, monkeypatch/moe_quant.py (parameters with three axes and "expert" in their name).
_OF_EXPERTS = (
    "quantize_moe_experts", "lora_target_parameters", "use_scattermoe", "use_sonicmoe", "experts_implementation",
    "expert_parallel_size", "llama4_linearized_experts", "plugins: KernelsPlugin", "plugins: ExpertParallelPlugin",
)  # fmt: skip
#: Keys that act on layers of some families alone: Gemma 4's attention. Source: loaders/patch_manager.py.
_OF_FAMILIES = ("gemma4_hybrid_attn_impl",)
_GONE = "Axolotl 0.17 refuses {}: the job is counted without it"
_ON_GPU = "what moves to the host is counted on the GPU, which is the most it takes"
_NOT_MOVED = (
    "it replaces recomputation, and TRL moves a saved tensor once and keeps it on the GPU if an operator saves it again at once "
    "(models/activation_offloading.py): recomputation is counted instead, and the answer may be too low"
)
_UNNAMED = (
    "unfrozen_parameters matches names from their beginning, and those of adapters begin with base_model: Axolotl freezes them, "
    "too, and trains nothing; they are counted as trained"
)
#: monkeypatch/accelerate/fsdp2.py, fsdp2_prepare_model, which replaces accelerate's and leaves out its cast of trained weights.
_STAYS = (
    "Axolotl's FSDP2 keeps the weights in the 16 bits in which it loads them, and so gradients and moments: it has no fp32 copy"
)
_BESIDE = "{}: of experts, or of layers of some families, which this model does not have"
_RL = "preferences and rewards are counted as {} of the batch; reference model and generation are not counted (`zeroplan workflow`)"


def axolotl_setup(whole: Table, folder: Path, _: int | None = None) -> Setup:
    """Return the job in the file; raises SpecError for settings that are not modelled."""
    whole.judge("axolotl")
    if (method := whole.text("rl")) and method not in _POLICIES:
        raise whole.refused("rl", f"use one of {', '.join(_POLICIES)}")
    if whole.switch("peft_autocast_adapter_dtype") is False:
        raise whole.refused("peft_autocast_adapter_dtype", "peft's fp32 adapters are modelled")
    sharded = any(whole.get(key) not in (None, "", [], {}) for key in ("fsdp", "fsdp_config"))
    made: dict[str, object] = {
        "model_name_or_path": whole.get("base_model"), "optim": whole.get("optimizer"),
        "deepspeed": _deepspeed(whole.get("deepspeed"), folder),
        **_batch(whole), **_attention(whole), **_precision(whole, sharded=sharded), **_recomputation(whole), **_adapter(whole),
        **_fsdp(whole, sharded=sharded),
    }  # fmt: skip
    degrees = {"dp_shard_size": "dp_shard_size", "dp_replicate_size": "dp_replicate_size", "tensor_parallel_size": "tp_size"}
    made["parallelism_config"] = {theirs: whole.count(own) for own, theirs in degrees.items()}
    reading = arguments_read(TranslatedTable(whole, keys_of("axolotl").instead, made), folder)
    plain = next((key for key in ("bfloat16", "float16") if whole.switch(key)), None)
    if plain and not (made["bf16"] or made["fp16"]):
        if made["use_peft"]:
            raise whole.refused(plain, "use bf16 or fp16 beside adapters")
        reading.set("precision", plain, "bf16", note=_IN_FP16 if plain == "float16" else "")
    if made["bf16"] and not made["use_peft"] and reading.flags.get("engine", Setting("", "")).value == "fsdp2":
        reading.set("precision", "fsdp_version", "bf16", also=("bf16-mixed",), note=_STAYS)
    if "quantize" in reading.flags:  # loaders/model.py, _configure_embedding_dtypes: all else is 16 bits
        _upcast(reading)
    if "tensor_parallel" in reading.asks:
        ways = whole.count("tensor_parallel_size") or 1
        reading.asks["tensor_parallel"] = own_tensor_parallelism("tensor_parallel_size", ways)
    reading.notes += [_PACKED] * bool(whole.switch("sample_packing"))
    for read in (_loss, _offloaded, _in_two_ways, _packed, _rounded, _float8, _without_effect):
        read(reading, whole)
    if made["use_peft"]:
        _kernels(reading, whole)
        _beside_experts(reading, whole)
        _experts(reading, whole)
    _tower(reading, whole, adapted=bool(made["use_peft"]))
    _goal(reading, whole)
    reading.table.leave((*_LEGACY_ATTENTION, *_KERNELS))
    return reading.setup("axolotl")


def _upcast(reading: Reading) -> None:
    """Read which weights beside four bits are fp32: none. An fp32 activation widens a block as fp32 norms do."""
    model, is_ddp = reading.known_model(), reading.flags.get("engine", Setting("", "")).value == "ddp"
    dense = model is not None and model.linear is None and not model.has_experts
    if model is not None and dense and is_ddp and model.activation in WIDENED:
        reading.set("upcast", "adapter", "norms", filled=True, note=_WIDENED.format(model.activation))
    else:
        reading.set("upcast", "adapter", "none", filled=True)


_WIDENED = "autocast computes {} in fp32, which layers in four bits hand on: counted as with norms in fp32, which take as much"


def _without_effect(reading: Reading, whole: Table) -> None:
    """Note keys that Axolotl or torchao refuses, that act on another family, or whose kernel keeps what FlashAttention does.

    Source: utils/quantization.py (NVFP4WeightOnlyConfig, which torchao 0.18 refuses: run; 0.17: read); xformers 0.0.35,
    ops/fmha/dispatch.py.
    """
    model, qat = reading.known_model(), whole.data.get("qat")
    named = str(whole.data.get("cls_model_config")).removesuffix("Config").lower()
    if model is not None and named == model.family.replace("_", ""):  # the class that transformers takes for the model anyway
        whole.matters.pop("cls_model_config", None)
    reading.notes += [_GONE.format(key) for key in ("flash_attn_rms_norm", "s2_attention") if whole.switch(key)]
    reading.notes += [note for key, note in _WITHOUT_A_PACKAGE.items() if whole.switch(key)]
    if isinstance(qat, dict) and qat.get("weight_dtype") == "nvfp4" and whole.matters.pop("qat", ""):
        reading.notes.append(_NO_NVFP4)
    for key, families in _ACTS_IN.items():
        if model is not None and model.family not in families and whole.matters.pop(key, ""):
            whole.saves.discard(key)
            reading.notes.append(_OTHER_FAMILY.format(key, " and ".join(families)))
    if model is None or "xformers" not in str(whole.matters.get("attn_implementation")):
        return
    if model.family in _OWN_ATTENTION or model.num_key_value_heads == model.num_attention_heads:
        reading.notes.append(_NO_XFORMERS if model.family in _OWN_ATTENTION else _XFORMERS)
        del whole.matters["attn_implementation"]


def _rounded(reading: Reading, whole: Table) -> None:
    """Read quantisation-aware training with inputs in 8 bits and weights in 4 (utils/quantization.py), where it is modelled.

    Not where all layers but the head are: without a fused loss, a head that is the embedding would be rounded, too.
    """
    model, flags, qat = reading.known_model(), reading.flags, whole.data.get("qat")
    table = Table(qat if isinstance(qat, dict) else {}, whole.where, "qat.")
    kinds, group = (table.text("activation_dtype"), table.text("weight_dtype")), table.count("group_size")
    if kinds != ("int8", "int4") or (group or 32) < 32 or table.switch("quantize_embedding"):
        return
    apart = {"lora_rank", "tensor_parallel", "context_parallel", "offload_activations"} & flags.keys()
    head = flags.get("loss", Setting("", "full")).value == "full"
    if apart or model is None or not model.has("rounded weights") or (head and model.tie_word_embeddings):
        return
    if flags.get("engine", Setting("", "")).value == "fsdp2" and "tensor_parallel" not in reading.asks:
        others = flags.get("fused_kernels", Setting("", ""))
        both = ",".join(filter(None, (str(others.value), "axolotl-qat")))
        reading.set("fused_kernels", "qat", both, note=" ".join(filter(None, (others.note, _ROUNDED))))
        whole.matters.pop("qat", None)


def _float8(reading: Reading, whole: Table) -> None:
    """Read accelerate's float8 (torchao's, with a scale per tensor; accelerate 1.15, utils/ao.py), where it is modelled."""
    model, flags = reading.known_model(), reading.flags
    if not whole.switch("fp8") or model is None or not model.has("float8"):
        return
    apart = {"lora_rank", "context_parallel", "offload_activations"} & flags.keys() or "tensor_parallel" in reading.asks
    if apart or flags["precision"].value not in ("bf16", "bf16-mixed") or flags.get("engine", Setting("", "")).value != "fsdp2":
        return
    reading.set("float8_recipe", "fp8", "tensorwise", note=_IN_FLOAT8)
    del whole.matters["fp8"]
    if whole.matters.pop("fp8_enable_fsdp_float8_all_gather", ""):
        whole.unmodelled(saves="fp8_enable_fsdp_float8_all_gather")


_IN_FLOAT8 = "float8 is counted for all linear layers of the blocks; accelerate leaves out the first one"
_ROUNDED = (
    "qat: scales of 32 weights each are counted, which larger groups take less of; from fake_quant_after_n_steps on the step "
    "takes what is counted"
)
_NO_NVFP4 = (
    "qat: torchao refuses Axolotl's configuration for nvfp4, so this file does not train: the job is counted without qat"
)
#: Keys that act on the blocks of some families alone. Gemma 4's attention is fused with this key and without it. Source:
#: loaders/patch_manager.py, _apply_llama_flash_attn_patches, _apply_model_specific_patches; integrations/liger/plugin.py.
_ACTS_IN = {
    "fused_attn_kernel": ("qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text"),
    "liger_rms_norm_gated": ("qwen3_5_text", "qwen3_5_moe_text"),
}
_OTHER_FAMILY = "{} acts in families {} alone, and changes nothing in this model"
#: Keys whose package Axolotl 0.17 cannot have. Source: pyproject.toml (torch from 2.11 on, transformers 5.14, optimum 1.16.2);
#: xformers 0.0.34, which removed ``swiglu_packedw`` before torch 2.11, and monkeypatch/llama_attn_hijack_flash.py, which then
#: leaves the model as it is; optimum 1.16.2, utils/input_generators.py, whose import fails beside transformers 5 (run).
_WITHOUT_A_PACKAGE = {
    "flash_attn_fuse_mlp": "flash_attn_fuse_mlp changes nothing: xformers has no fused SwiGLU since release 0.0.34",
    "flash_optimum": (
        "flash_optimum: optimum 1.16.2 cannot be imported beside transformers 5, so this file does not train: the job is counted "
        "without it"
    ),
}
#: Families whose models choose attention from a list of their own (transformers 5.23, FALCON_ATTENTION_CLASSES).
_OWN_ATTENTION = ("falcon",)
_NO_XFORMERS = (
    "transformers has no attention by xformers for this model, so this file does not train: FlashAttention is counted instead"
)
_XFORMERS = "xformers runs FlashAttention's kernels for this model, which keep the same tensors (read, not run)"


def _kernels(reading: Reading, whole: Table) -> None:
    """Read Axolotl's functions for adapters, which are on unless the file says otherwise (utils/schemas/config.py).

    Source: check_auto_enable_lora_kernels. They are modelled under DDP in families like Llama, if they run all projections.
    """
    kernels = [key for key in _KERNELS if whole.switch(key)]
    off = whole.text("rl") or whole.switch("nvfp4_merge_aware") or whole.switch("trust_remote_code")
    eight = whole.text("adapter") == "lora" and whole.switch("load_in_8bit")
    by_default = not (off or eight or any(whole.data.get(key) is not None for key in _KERNELS))
    if not (kernels or by_default):
        return
    flags, model = reading.flags, reading.known_model()
    ours = (model is None or (model.has("adapters everywhere") and not model.cross_layers)) and not eight
    if ours and (by_default or set(_KERNELS[:3]) <= set(kernels)) and flags.get("engine", Setting("", "")).value == "ddp":
        fused = flags.get("fused_kernels", Setting("", ""))
        both = ",".join(filter(None, (str(fused.value), "axolotl-lora")))
        reading.set("fused_kernels", kernels[0] if kernels else "adapter", both, filled=True, note=fused.note)
    elif by_default:
        reading.notes.append(_OWN_KERNELS)
    else:  # they make again what peft's layers keep (kernels/lora.py)
        whole.matters[kernels[0]] = _OWN_KERNELS
        whole.saves.add(kernels[0])


def _tower(reading: Reading, whole: Table, *, adapted: bool) -> None:
    """Read whether the vision tower is frozen: by its own switch, or because only the language model's parameters train.

    Beside adapters it is frozen already. Patterns match the beginning of a name (utils/freeze.py, LayerNamePattern).
    """
    whole.leave(("freeze_mm_modules", "pretrain_multipack_attn"))  # the latter: positions of packed rows (data/streaming.py)
    trained = whole.data.get("unfrozen_parameters")
    names = [str(one).removeprefix("^") for one in trained] if isinstance(trained, list) else []
    if not adapted:
        reading.set_frozen_tower("freeze_mm_modules")
    if not names or not all(one.startswith(_OF_TEXT) for one in names):
        return
    if adapted:
        reading.notes.append(_UNNAMED)
    elif "model.language_model.*" in names:
        reading.set_frozen_tower("unfrozen_parameters")
    if adapted or "model.language_model.*" in names:
        whole.matters.pop("unfrozen_parameters", None)
        whole.saves.discard("unfrozen_parameters")


_OF_TEXT = ("model.language_model.", "lm_head", "embed_tokens")


def _beside_experts(reading: Reading, whole: Table) -> None:
    """Note keys of experts and of some families once if the file's model has no such parts."""
    model = reading.known_model()
    if model is None or not model.has("adapters everywhere"):
        return
    keys = [key for key in (*_OF_EXPERTS, *_OF_FAMILIES) if whole.matters.pop(key, "")]
    if {"use_scattermoe", "use_sonicmoe"} & set(keys) and whole.matters.pop("use_kernels", ""):
        keys.append("use_kernels")  # which the plugin for these two sets (integrations/kernels/args.py, check_use_kernels)
    reading.notes += [_BESIDE.format(", ".join(keys))] if keys else []


#: Entries of ``lora_target_parameters`` by the parameter's own name.
_STACKED = {"gate_up_proj": FIRST, "down_proj": SECOND}
_LEFT = (
    "{}: bitsandbytes 0.49, which Axolotl pins, never frees weights that it wrote out before a checkpoint that is not reentrant "
    "stopped: experts are counted in 16 bits, and the answer is too low by their four bits"
)


def _experts(reading: Reading, whole: Table) -> None:
    """Read adapters of all experts, and experts in four bits (monkeypatch/moe_quant.py), where these are modelled.

    A checkpoint that is not reentrant stops in the experts' forward, unless shared experts come after them. bitsandbytes before
    0.50 then keeps its cache (nn/parametrize.py, _disable_parametrization_cache).
    """
    flags, model, key = reading.flags, reading.known_model(), "quantize_moe_experts"
    if model is None or model.moe is None or model.family not in STACKED:
        return
    parameters, targets = whole.data.get("lora_target_parameters") or [], str(flags.get("lora_targets", Setting("", "")).value)
    names = [str(one).rpartition(".")[2] for one in (parameters if isinstance(parameters, list) else [parameters])]
    quantised = whole.switch(key) and str(flags.get("quantize", Setting("", "")).value).startswith("nf4")
    if names and not quantised and set(names) <= _STACKED.keys():
        reading.set("lora_targets", "lora_target_parameters", ",".join((targets, *(_STACKED[one] for one in names))))
        whole.matters.pop("lora_target_parameters", None)
    bare = not names and not {one.rpartition(".")[2] for one in targets.split(",")} & set(model.traits.converted)
    engine = flags.get("engine", Setting("", "")).value
    if not (quantised and bare and engine in ("ddp", "fsdp2")):
        return
    whole.saves.discard(key)
    ends_early = flags["recompute"].value != "none" and not flags.get("reentrant", Setting("", engine == "ddp")).value
    if not ends_early or model.moe.num_shared_experts:
        reading.set("quantize_experts", key, value=True)
        whole.matters.pop(key, None)
    else:
        whole.matters[key] = _LEFT.format(whole.name(key))


def _goal(reading: Reading, whole: Table) -> None:
    """Read reward models and preference methods, and note stored quantised weights that training does not dequantise."""
    if not whole.table("model_quantization_config_kwargs").switch("dequantize"):
        whole.unmodelled(saves="model_quantization_config")
    whole.leave(("model_quantization_config", "lora_target_linear"))
    if set(whole.table("model_config").data) - {"output_router_logits"}:  # a few numbers of a token and expert
        whole.matters["model_config"] = "model_config changes the model's shape or parts, which is not counted"
    if whole.switch("reward_model"):
        reading.set_pairs()
        reading.head_rows = 1
    if method := whole.text("rl"):
        reading.set_pairs() if _POLICIES[method] > 1 else None
        if method in ("dpo", "ipo", "kto"):
            reading.set_loop("rl", "kto" if method == "kto" else "dpo", full_logits=True)
        else:
            whole.matters["rl"] = f"rl={method}: {_RL.format('sequences twice' if _POLICIES[method] > 1 else 'the sequences')}"


def _deepspeed(named: object, folder: Path) -> object:
    """Return the content of a DeepSpeed file that Axolotl ships, if it is missing here; else ``named`` unchanged."""
    found = _IS_SHIPPED.fullmatch(named) if isinstance(named, str) else None
    if found is None or named_file(str(named), folder, "it").exists():
        return named
    away = {"device": "cpu", "pin_memory": True}
    offloads = {"all": {"offload_optimizer": away, "offload_param": away}, "params": {"offload_param": away}}
    half = {"bf16": {"enabled": True}} if found["bf16"] else {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    return {"zero_optimization": _SHIPPED[found["stage"]] | offloads.get(found["off"] or "", {}), **half}


def _batch(whole: Table) -> dict[str, object]:
    """Return batch and length; an older key ``batch_size`` is per step and GPU (utils/config/__init__.py, normalize_config)."""
    each, total = whole.count("micro_batch_size") or 1, whole.count("batch_size")
    steps = whole.count("gradient_accumulation_steps") or (None if total is None else max(1, total // each))
    length = whole.count("sequence_len")
    return {"max_length": length, "per_device_train_batch_size": each, "gradient_accumulation_steps": steps}


def _attention(whole: Table) -> dict[str, object]:
    older = [name for key, name in _LEGACY_ATTENTION.items() if whole.switch(key)]
    word = whole.text("attn_implementation") or (older[0] if older else None)
    if word and "/" in word and "flash" in word:  # a kernel from the Hub
        word = "flash_attention_2"
    if whole.switch("sample_packing") and not str(word).startswith(("flash_attention", "flex_attention", "xformers")):
        whole.matters["sample_packing"] = _MASK
    if word == "flex_attention":  # its mask takes a few bytes per 128 x 128 pairs
        return {"attn_implementation": "flash_attention_2"}
    if word in ("xformers", "sage"):
        whole.matters["attn_implementation"] = f"attention with {word} is not modelled: FlashAttention is counted in its place"
        word = "flash_attention_2"
    return {"attn_implementation": word}


def _in_two_ways(reading: Reading, whole: Table) -> None:
    """Read Gemma 4's ``gemma4_hybrid_attn_impl``: FlashAttention in layers with a window, torch's attention in wider heads.

    Source: loaders/patch_manager.py, _apply_gemma_hybrid_attention; monkeypatch/gemma4_hybrid_mask.py.
    """
    model = reading.known_model()
    if not whole.switch("gemma4_hybrid_attn_impl") or model is None or model.global_head_dim <= _VARLEN_MOST:
        return
    reading.set("attention", "gemma4_hybrid_attn_impl", "sdpa", note=_HYBRID)
    del whole.matters["gemma4_hybrid_attn_impl"]
    if whole.switch("sample_packing"):
        whole.matters["sample_packing"] = _MASK


def _packed(reading: Reading, whole: Table) -> None:
    """Read rows of several sequences with torch's attention, whose mask or lengths keep them apart (loaders/patch_manager.py).

    With ``sdpa`` torch's attention for rows of several lengths runs, unless a model has windows or heads wider than 256. Otherwise
    a row has the mask of one padded sequence of its length.
    """
    word = whole.data.get("attn_implementation") or ("sdpa" if whole.switch("sdp_attention") else None)
    model = reading.known_model()
    attention = reading.flags.get("attention", Setting("", "")).value
    if "sample_packing" not in whole.matters or (word not in (None, "sdpa") and attention != "sdpa"):
        return
    plain = model is not None and model.sliding_window is None and model.head_dim <= _VARLEN_MOST
    if word == "sdpa" and plain and whole.data.get("sdpa_varlen") is not False:
        reading.set("attention", "attn_implementation", "flash", note=_VARLEN)
    else:
        reading.set("padded", "sample_packing", value=True)
        if (rows := whole.count("micro_batch_size") or 1) > 1 and (length := whole.count("sequence_len")):
            reading.set("micro_batch", "sample_packing", 1, note=_ONE_ROW)
            reading.set("seq_len", "sample_packing", rows * length)
    del whole.matters["sample_packing"]


_HYBRID = (
    "gemma4_hybrid_attn_impl runs FlashAttention in layers with a window; torch's attention is counted in all layers, which keeps "
    "more; read from axolotl's code, not run"
)
_ONE_ROW = (
    "sample_packing joins a micro-batch into one row, whose mask has all pairs of its tokens: one sequence of all is counted"
)
_VARLEN_MOST = 256
_VARLEN = "sample_packing with sdpa runs torch's varlen_attn, which is FlashAttention and needs no mask"


def _precision(whole: Table, *, sharded: bool) -> dict[str, object]:
    """Return the dtypes: ``auto`` is bf16 on a GPU with it, and weights load in it (utils/config/__init__.py, resolve_dtype)."""
    fp16 = bool(whole.switch("fp16"))
    bf16 = not fp16 if whole.data.get("bf16", "auto") == "auto" else bool(whole.switch("bf16"))
    loaded = "bfloat16" if bf16 else "float16" if fp16 else None
    kept = not (sharded or whole.get("deepspeed") or whole.get("adapter"))
    return {"bf16": bf16, "fp16": fp16 and not bf16, "dtype": loaded if kept else None}


def _recomputation(whole: Table) -> dict[str, object]:
    kwargs = whole.get("gradient_checkpointing_kwargs")
    if _offloads(whole):  # its checkpoints are torch's wrappers (core/trainers/mixins/activation_checkpointing.py)
        return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return {"gradient_checkpointing_kwargs": {"use_reentrant": True} if kwargs is None else kwargs}


def _offloads(whole: Table) -> object:
    """Return how activations are offloaded: true, ``legacy``, ``disk`` or ``hidden_states``; falsy for not at all.

    ``gradient_checkpointing: offload`` is an older word (utils/schemas/validation.py, check_gradient_checkpointing_w_offload).
    """
    older = {"offload": True, "offload_disk": "disk"}.get(str(whole.get("gradient_checkpointing")))
    return older or whole.get("activation_offloading")


def _offloaded(reading: Reading, whole: Table) -> None:
    """Read offloaded activations (core/trainers/mixins/activation_checkpointing.py).

    Without adapters the inputs of blocks move to the host. With adapters everything that is saved moves, without recomputation.
    """
    how, flags = _offloads(whole), reading.flags
    if not how:
        return
    key = "activation_offloading" if whole.get("activation_offloading") else "gradient_checkpointing"
    whole.matters.pop(key, None)
    whole.saves.discard(key)
    moves_all = "lora_rank" in flags and how != "hidden_states"
    if moves_all or how not in (True, "legacy", "disk") or flags.get("engine", Setting("", "")).value not in ("ddp", "fsdp2"):
        whole.matters[key] = f"{whole.name(key)}={how}: {_NOT_MOVED if moves_all else _ON_GPU}"
        whole.saves.update([] if moves_all else [key])
        return
    reading.set("offload_activations", key, value=True)
    if how != "legacy":
        reading.set("inputs_in_flight", key, 5, filled=True)


def _adapter(whole: Table) -> dict[str, object]:
    adapter, rank, dropout = whole.text("adapter"), whole.count("lora_r"), whole.get("lora_dropout")
    if adapter not in (None, "", "lora", "qlora"):
        raise whole.refused("adapter", "lora and qlora are modelled")
    if not adapter:
        return {"use_peft": False, "load_in_4bit": whole.get("load_in_4bit")}
    if rank is None:
        raise SpecError(f"{whole.where}: adapter is {adapter}, and lora_r is left out; give a rank")
    targets = whole.get("lora_target_modules")
    names = [targets] if isinstance(targets, str) else targets
    return {
        "use_peft": True,
        "lora_target_modules": [OF_LINEAR, *(names if isinstance(names, list) else [])]
        if whole.switch("lora_target_linear")
        else names,
        "lora_dropout": 0.0 if dropout is None else dropout,
        "load_in_4bit": whole.get("load_in_4bit"),
        "use_bnb_nested_quant": True,
    }


def _fsdp(whole: Table, *, sharded: bool) -> dict[str, object]:
    """Return FSDP's keys; version 1 is the default (utils/schemas/validation.py, check_fsdp_version_in_fsdp_config)."""
    if not sharded:
        return {"fsdp": None, "fsdp_config": None}
    config = {key.removeprefix("fsdp_"): value for key, value in whole.table("fsdp_config").data.items()}
    strategy = str(config.pop("sharding_strategy", None) or "FULL_SHARD").lower()
    config["version"] = whole.get("fsdp_version") or config.get("version") or 1
    if "offload_params" in config:
        config["cpu_offload"] = config.pop("offload_params")
    return {"fsdp": whole.get("fsdp") or [strategy], "fsdp_config": config}


def _loss(reading: Reading, whole: Table) -> None:
    """Read the plugins, and how they and their keys compute the loss."""
    plugins = whole.get("plugins") or []
    names = plugins if isinstance(plugins, list) else [plugins]
    for name in names:
        if (last := str(name).rpartition(".")[2]) not in _PLUGINS:
            whole.matters[f"plugins: {last}"] = f"what the plugin {shown(last)} does to memory is not modelled, and left out"
    cut = whole.switch("cut_cross_entropy")
    if cut or (cut is None and any("CutCrossEntropy" in str(name) for name in names)):
        reading.set_cut_loss("cut_cross_entropy")
    if whole.switch("liger_fused_linear_cross_entropy"):
        reading.set("loss", "liger_fused_linear_cross_entropy", "fused")
    gated = "liger_glu_activation" if "liger_glu_activation" in whole.data else "liger_swiglu"
    keys = dict(zip(LIGER, ("liger_rope", "liger_rms_norm", gated), strict=True))
    if parts := [part for part, key in keys.items() if whole.switch(key)]:
        reading.set_liger(*parts, key=keys[parts[0]], loss=False)
    whole.leave(("liger_layer_norm", "liger_use_token_scaling"))  # vision towers: the same memory; numerics only
    _weighted_tokens(reading, whole)


def _weighted_tokens(reading: Reading, whole: Table) -> None:
    """Read the loss that weights tokens by their entropy (monkeypatch/loss/eaft.py), of one sequence at a time.

    accelerate returns the logits in fp32 under DDP and FSDP1. Of several sequences the shifted logits are a copy more.
    """
    by_deepspeed, engine = reading.deepspeed is not None, reading.flags.get("engine", Setting("", "")).value
    alone = not by_deepspeed and engine in ("ddp", "fsdp1") and (whole.count("micro_batch_size") or 1) == 1
    if whole.switch("use_eaft") and alone and reading.flags.get("loss", Setting("", "full")).value == "full":
        reading.set_log_probs("use_eaft", how="eaft")
        whole.matters.pop("use_eaft", None)

"""Reads a job from ms-swift's arguments: YAML, JSON, or the command line of ``swift sft``.

ms-swift's own keys and defaults are those of its code at the commit that docs/from-a-file.md lists (arguments/). It runs on
transformers' Trainer, so trainer.py reads its other keys. megatron_arguments.py reads those of ``megatron sft``.
"""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from zeroplan.catalog.setups.keys import keys_of
from zeroplan.catalog.setups.reading import named_file
from zeroplan.catalog.setups.settings import LIGER, ULYSSES, FlatTable, Reading, Table, TranslatedTable, number_of
from zeroplan.catalog.setups.setup import Setup
from zeroplan.catalog.setups.trainer import arguments_read
from zeroplan.catalog.text import read_text, strict_json
from zeroplan.errors import SpecError
from zeroplan.numeric import round_up
from zeroplan.spec.adapter import OF_LINEAR

#: The offload section of the DeepSpeed files that ms-swift ships (config/, such as zero2.json).
_OFFLOAD = {"device": "cpu", "pin_memory": True}
#: Methods that train on pairs, and methods that train on a prompt with its completion (arguments/rlhf_args.py).
_PAIRED, _COMPLETED = ("dpo", "orpo", "simpo", "cpo", "rm"), ("grpo", "ppo", "gkd")
#: Methods without a reference model whose losses read the logits of pairs once or twice (TRL, experimental/orpo/ and cpo/).
_ODDS = ("orpo", "cpo", "simpo")
_READ_TWICE = (
    "the loss reads the logits of pairs in 16 bits, twice for chosen answers: "
    "cross-entropy's fp32 copy is counted, which takes more"
)
_PADDING = "padding_free puts a batch into one row: as many full sequences are counted"


def ms_swift_setup(whole: Table, folder: Path, gpus: int | None) -> Setup:
    """Return the job in the arguments; raises SpecError for settings that are not modelled."""
    if "tensor_model_parallel_size" in whole.data or "micro_batch_size" in whole.data:
        from zeroplan.catalog.setups.megatron_arguments import megatron_setup  # noqa: PLC0415  only `megatron sft` pays for it

        return megatron_setup(whole, folder, gpus)
    table = FlatTable(whole.data, whole.where)
    own = keys_of("ms-swift")
    patterns = f"{own.saves} {own.adds} {own.known}"
    theirs = Table({key: one for key, one in whole.data.items() if not _is_like(key, patterns)}, whole.where)
    whole.judge("ms-swift")
    theirs.matters, theirs.saves = whole.matters, whole.saves
    reading = arguments_read(TranslatedTable(theirs, own.instead, {**_made(whole), **_fsdp_file(whole, folder)}), folder)
    _task(reading, whole)
    _loop(reading, whole)
    read_tower(reading, whole)
    _more_words(reading, whole)
    _galore(reading, whole)
    if (launched := table.count("launched_gpus")) is not None:
        reading.set("gpus", "NPROC_PER_NODE", launched)
    if table.count("gradient_accumulation_steps") is None:
        each = table.count("per_device_train_batch_size") or 1
        steps = 1 if whole.data.get("rlhf_type") == "grpo" else max(1, -(-16 // (each * (launched or gpus or 1))))
        reading.set("grad_accum", "gradient_accumulation_steps", steps, filled=True)
    reading.table.leave((*own.instead, *own.instead.values(), "launched_gpus", "train_type", "quant_method"))
    return reading.setup("ms-swift")


_MORE_ROWS = (
    "new_special_tokens: {:,} rows of the embedding and the head are counted, the most that {} new tokens may need; the "
    "embedding grows only if its spare rows do not suffice"
)


def _more_words(reading: Reading, whole: Table) -> None:
    """Read new tokens, written out or in text files, of a model without a tower (model/register.py, _add_new_special_tokens)."""
    tokens, model = whole.get("new_special_tokens"), reading.known_model()
    names = tokens.split() if isinstance(tokens, str) else [str(one) for one in tokens] if isinstance(tokens, list) else []
    if not names or model is None or model.vision is not None:
        return
    words: list[str] = []
    for name in names:
        path = named_file(name, reading.folder, whole.where) if name.endswith(".txt") else None
        if path is not None and not path.is_file():
            return
        words += [name] if path is None else read_text(path, what="file of tokens").split()
    rows = round_up(model.vocab_size + len(words), 128)
    note = _MORE_ROWS.format(rows, len(words))
    reading.set("model", reading.flags["model"].key, replace(model, vocab_size=rows), note=note)
    whole.matters.pop("new_special_tokens", None)


#: Settings of ms-swift's GaLore (optimizers/galore/utils.py) with which it is that of the Trainer, in other steps.
_OF_GALORE: dict[str, tuple[object, ...]] = {
    "galore_rank": (None, 128, "128"), "galore_target_modules": (None,), "galore_proj_type": (None, "std"),
    "galore_with_embedding": (None, False, "false"), "galore_quantization": (None, False, "false"),
    "optim": (None, "adamw_torch", "adamw_torch_fused"),
}  # fmt: skip


def _galore(reading: Reading, whole: Table) -> None:
    """Read GaLore in full training on one GPU and under DDP; one optimizer per parameter takes no other memory."""
    alone = "engine" in reading.flags and reading.flags["engine"].value == "ddp" and "lora_rank" not in reading.flags
    if whole.switch("use_galore") and alone and all(whole.get(key) in fits for key, fits in _OF_GALORE.items()):
        reading.set("optimizer", "use_galore", "galore")
        reading.flags.pop("optimizer_impl", None)
        whole.matters.pop("use_galore")
        whole.saves.discard("use_galore")


def _task(reading: Reading, whole: Table) -> None:
    """Read the length and number of sequences, and the head's outputs."""
    kind, task, length = whole.text("rlhf_type"), whole.text("task_type"), whole.count("max_length")
    if kind in _COMPLETED and length is not None:
        completion = next((found for key in ("response_length", "max_new_tokens", "max_completion_length")
                           if (found := whole.count(key))), 512)  # fmt: skip
        reading.set("seq_len", "max_length and max_completion_length", length + completion)
    elif length is not None:
        reading.set("seq_len", "max_length", length)
    if (ways := whole.count("sequence_parallel_size") or 1) > 1 and "seq_len" in reading.flags:
        seq_len = reading.flags["seq_len"]
        reading.flags["seq_len"] = seq_len._replace(value=-(-int(str(seq_len.value)) // ways), note=ULYSSES)
    if kind in _PAIRED:
        reading.set_pairs()
    if kind == "rm" or task == "seq_cls":
        reading.head_rows = 1 if kind == "rm" else whole.count("num_labels") or 2
    elif task not in (None, "causal_lm"):
        from zeroplan.catalog.setups.megatron_arguments import read_task  # noqa: PLC0415  few files have another task

        read_task(reading, whole)
    if whole.switch("vit_gradient_checkpointing") is (whole.switch("gradient_checkpointing") is not False):
        reading.table.leave(("vit_gradient_checkpointing",))  # its default (arguments/sft_args.py)
    if whole.switch("padding_free"):
        reading.notes.append(_PADDING)


def read_tower(reading: Reading, whole: Table) -> None:
    """Read the largest image, and which parts of the vision tower are frozen, as by default (arguments/tuner_args.py)."""
    pixels = "max_pixels" if whole.get("max_pixels") is not None else "MAX_PIXELS"
    reading.set_largest_image(whole, pixels=pixels, tokens="IMAGE_MAX_TOKEN_NUM")
    parts = {"tower": "freeze_vit", "projector": "freeze_aligner"}
    frozen = [part for part, key in parts.items() if whole.switch(key) is not False]
    if len(frozen) < len(parts):
        reading.set("freeze", next(key for part, key in parts.items() if part not in frozen), ",".join(frozen) or "none")


def _loop(reading: Reading, whole: Table) -> None:
    """Read the loop of DPO, KTO, GRPO or GKD (rlhf_trainers/, arguments/rlhf_args.py)."""
    kind, reference = whole.text("rlhf_type"), whole.text("ref_model")
    if kind in ("dpo", "kto"):
        reading.set_loop("rlhf_type", kind, full_logits=True)
    elif kind == "grpo":
        _compares_rollouts(reading, whole)
    elif kind == "gkd":
        _distils(reading, whole)
    elif kind in _ODDS and reading.deepspeed is not None:
        del whole.matters["rlhf_type"]
        reading.notes.append(_READ_TWICE)
    _liger(reading, whole, kind)
    _wide_logits(reading)
    if reading.loop or kind == "rm":
        for key in ("rlhf_type", "num_generations"):
            whole.matters.pop(key, None)
    if reference not in (None, whole.data.get("model")):
        whole.matters["ref_model"] = f"ref_model={reference}: a reference model of the trained model's own size is counted"


def _liger(reading: Reading, whole: Table, kind: str | None) -> None:
    """Read Liger's kernels beside a loss of the loop's own; in loops other than DPO's, Liger has another loss for it."""
    if kind == "dpo" and whole.switch("use_liger_kernel"):
        reading.flags.pop("loss", None)  # the model gets no labels, so that Liger's loss does not run (dpo_trainer.py)
        reading.set_liger(*LIGER, key="use_liger_kernel", loss=False)
        whole.matters.pop("use_liger_kernel", None)
        whole.saves.discard("use_liger_kernel")
    elif kind is not None and "fused_kernels" in reading.flags:
        for flag in ("fused_kernels", "loss"):
            reading.flags.pop(flag, None)
        whole.unmodelled(saves="use_liger_kernel")


def _wide_logits(reading: Reading) -> None:
    """Count the fp32 logits that accelerate returns under mixed precision (accelerate 1.15, ConvertOutputsToFp32).

    log-sum-exp (TRL's selective_log_softmax) keeps them until its backward, which takes 16 bytes of a logit (measured on a CPU):
    as much as cross-entropy's 12 with fp32 logits that stay.
    """
    scores = reading.loop.get("workflow") in ("dpo", "kto", "grpo") and reading.deepspeed is None
    if scores and str(reading.flags["precision"].value).endswith("mixed"):
        reading.set("keep_logits", "rlhf_type", "fp32", filled=True)


def _compares_rollouts(reading: Reading, whole: Table) -> None:
    """Read GRPO with vLLM, or beside DDP or DeepSpeed with transformers' own generation (infer_engine/, max_batch_size 0)."""
    from zeroplan.catalog.setups.megatron_arguments import rolls_out  # noqa: PLC0415  few files roll out

    vllm = whole.switch("use_vllm")
    if not vllm and reading.deepspeed is None and reading.flags["engine"].value != "ddp":
        return
    rolls_out(reading, whole, whole.count("max_completion_length"))
    if reading.deepspeed is not None:  # entropies of 16-bit logits take less than the cross-entropy that counts
        for key in ("log_entropy", "top_entropy_quantile"):
            whole.matters.pop(key, None)
    if not vllm:
        reading.loop["by_transformers"] = True
    _scored_by_a_teacher(reading, whole)


def _scored_by_a_teacher(reading: Reading, whole: Table) -> None:
    """Read OPD-RL: a teacher on the GPUs scores the rollouts (rlhf_trainers/rollout_mixin.py, _setup_teacher)."""
    teacher, deepspeed = whole.text("teacher_model"), str(whole.get("teacher_deepspeed") or "")
    stage = re.fullmatch(r"zero([0-3])(_offload)?", deepspeed)
    if teacher is None or (deepspeed and stage is None):
        return
    reading.loop |= {"scored_by": teacher, **({"stage_of_teacher": int(stage[1])} if stage else {})}
    for key in ("teacher_model", "offload_teacher_model"):  # a teacher moved to the host is counted on the GPU
        whole.matters.pop(key, None)


def _distils(reading: Reading, whole: Table) -> None:
    """Read GKD with a teacher on the GPUs, and completions from the data or from vLLM; the whole batch counts as scored.

    A plugin may give the teacher longer prompts, which the same limit cuts (rlhf_trainers/gkd_helpers.py, encode_gkd_samples).
    The loss is counted in the compute dtype, which logits have with DeepSpeed (rlhf_trainers/gkd_trainer.py, gkd_loss.py).
    """
    teacher, vllm = whole.text("teacher_model"), bool(whole.switch("use_vllm"))
    generates = number_of(whole.get("lmbda"), 0.5) > 0
    same = str(whole.get("teacher_deepspeed") or "")[:5] in ("", str(whole.get("deepspeed") or "")[:5])
    others = ("teacher_model_server", "sequence_parallel_size")
    beyond = any(str(whole.get(key) or "0") not in ("0", "1", "0.0") for key in others)
    if teacher is None or reading.deepspeed is None or not same or beyond:
        return
    here = vllm and whole.text("vllm_mode") != "server"
    share = number_of(whole.get("vllm_gpu_memory_utilization"), 0.9) if here else None
    beside = number_of(whole.get("sft_alpha"), 0.0) > 0  # the model computes cross-entropy, too
    reading.set_log_probs("rlhf_type", how="jsd and sft" if beside else "jsd")
    reading.set_loop(
        "rlhf_type", "distill", teacher_model=teacher, vllm_mode="colocate" if here else "server",
        vllm_gpu_memory_utilization=share, vllm_tensor_parallel_size=whole.count("vllm_tensor_parallel_size") if here else None,
        vllm_enable_sleep_mode=(here and whole.count("sleep_level", least=0) not in (None, 0)) or None,
        by_transformers=(generates and not vllm) or None, max_completion_length=whole.count("max_completion_length"),
    )  # fmt: skip
    for key in ("rlhf_type", "teacher_model", "offload_teacher_model"):  # a teacher moved to the host is counted on the GPU
        whole.matters.pop(key, None)


def _is_like(key: str, patterns: str) -> bool:
    return any(fnmatchcase(key, one) for one in patterns.split())


def _made(whole: Table) -> dict[str, object]:
    """Return the TrainingArguments that ms-swift's own keys translate to."""
    tuner = whole.text("tuner_type") or whole.text("train_type") or "lora"
    if tuner not in ("full", "lora"):
        raise whole.refused("tuner_type" if "tuner_type" in whole.data else "train_type", "lora and full are modelled")
    word = whole.text("torch_dtype") or "bfloat16"
    attention = {"flash_attn": "flash_attention_2", "flash_attention_2": "flash_attention_2",
                 "flash_attention_3": "flash_attention_3", "flash_attention_4": "flash_attention_4",
                 "sdpa": "sdpa", "eager": "eager"}  # fmt: skip
    named = whole.text("attn_impl") or whole.text("attn_implementation")
    bits, method = whole.count("quant_bits"), whole.text("quant_method")
    if bits not in (None, 4):
        raise SpecError(f"{whole.where}: quant_bits={bits} is not modelled; four bits are")
    if bits is not None and method not in (None, "bnb"):
        whole.matters["quant_method"] = f"quant_method={method}: bitsandbytes' four bits are counted in its place"
    targets = whole.get("target_modules") or "all-linear"
    value = whole.get("modules_to_save") or []
    whole_modules = value.split() if isinstance(value, str) else value
    adapters = {
        "lora_modules_to_save": whole_modules,
        "use_peft": True, "lora_r": whole.count("lora_rank") or 8, "load_in_4bit": bits == 4,
        "lora_target_modules": OF_LINEAR if targets in ("all-linear", ["all-linear"]) else targets,
        "lora_dropout": number_of(whole.get("lora_dropout"), 0.05),
    }  # fmt: skip
    mixed = whole.switch("bf16") is not False and word == "bfloat16"
    return {
        "model_name_or_path": _named(whole), "attn_implementation": attention.get(named or ""),
        "bf16": mixed, "fp16": not mixed and word == "float16", "dtype": None if tuner == "lora" else word,
        "per_device_train_batch_size": whole.count("per_device_train_batch_size") or 1,
        "gradient_checkpointing": whole.switch("gradient_checkpointing") is not False,
        "deepspeed": _deepspeed(whole.get("deepspeed"), whole.count("zero_hpz_partition_size")),
        "gradient_checkpointing_kwargs": _of_text(whole.get("gradient_checkpointing_kwargs"), whole.where),
        "optim": whole.text("optim"), **(adapters if tuner == "lora" else {"use_peft": False}),
    }  # fmt: skip


def _fsdp_file(whole: Table, folder: Path) -> dict[str, object]:
    """Return ``fsdp`` and ``fsdp_config`` from the JSON file that ``--fsdp`` names (arguments/sft_args.py, _init_fsdp)."""
    value = whole.get("fsdp")
    if not isinstance(value, str) or not value.endswith(".json"):
        return {}
    path = named_file(value, folder, whole.where)
    where = f"FSDP configuration {str(path)!r}"
    found = strict_json(read_text(path, what="FSDP configuration"), where)
    if not isinstance(found, dict):
        raise SpecError(f"{where} is not a table of keys and values")
    return {key: found.get(key) for key in ("fsdp", "fsdp_config")}


def _named(whole: Table) -> str | None:
    """Return the model's name; of Qwen2.5-Omni, the model with its talker, which is built unless a variable says no."""
    named, makes_audio = whole.text("model"), whole.get("ENABLE_AUDIO_OUTPUT")
    whole_model = str(makes_audio).lower() not in ("0", "false")
    return f"{named}-whole" if named is not None and "Qwen2.5-Omni" in named and whole_model else named


def _of_text(value: object, where: str) -> object:
    """Return a table that a command gives as JSON."""
    return strict_json(value, where) if isinstance(value, str) else value


def _deepspeed(value: object, secondary: int | None) -> object:
    """Return the content of a file that ms-swift ships, such as ``zero2_offload``; else the path or configuration unchanged."""
    if not isinstance(value, str) or not value.startswith("zero") or not value[4:5].isdigit():
        return value
    stage, offloads = int(value[4]), value.endswith("_offload")
    zero: dict[str, object] = {
        "stage": stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
    }
    if stage < 3:
        zero |= {"reduce_bucket_size": int(2e8), "allgather_bucket_size": int(2e8)}
    if secondary is not None:
        zero["zero_hpz_partition_size"] = secondary
    if offloads:
        zero |= {"offload_optimizer": _OFFLOAD, **({"offload_param": _OFFLOAD} if stage == 3 else {})}
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}

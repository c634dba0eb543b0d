"""Translates other programs' names of flags, keys and values to zeroplan's, for error messages.

Users type the words of the program that they know. zeroplan does not accept them as aliases, since two names for one option must
be kept the same for ever; its error names the right one.
"""

#: zeroplan's name (with a value if the other program has a switch), and the names in transformers, accelerate, DeepSpeed,
#: Megatron-LM, torchtitan, Lightning and other calculators.
_ELSEWHERE = {
    "model": "model_name model_name_or_path model_id model_path hf_model",
    "params": "model_size num_params n_params num_parameters parameters size",
    "gpus": "num_gpus n_gpus ngpus gpu_count num_processes nproc_per_node world_size dp dp_shard data_parallel data_parallel_size",
    "gpu": "gpu_memory gpu_mem vram memory gpu_type gpu_name device hardware accelerator",
    "gpus_per_node": "num_gpus_per_node n_gpus_per_node local_world_size",
    "network": "bandwidth internode_bandwidth inter_node_bandwidth interconnect",
    "nics_per_node": "nics num_nics hcas",
    "replicas": "dp_replicate hybrid_shard data_parallel_replicate_degree",
    "tensor_parallel": "tp tp_size tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree",
    "context_parallel": "cp cp_size context_parallel_size context_parallel_degree",
    "pipeline_parallel": "pp pp_size pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree",
    "expert_parallel": "ep ep_size expert_parallel_size expert_model_parallel_size expert_parallel_degree",
    "stage": "zero zero_stage",
    "engine": "strategy framework",
    "engine=fsdp1": "fully_sharded_data_parallel",
    "engine=fsdp2": "fsdp",
    "precision": "dtype torch_dtype mixed_precision",
    "precision=bf16-mixed": "bf16",
    "precision=fp16-mixed": "fp16",
    "optimizer": "optim opt",
    "recompute=full": "gradient_checkpointing activation_checkpointing checkpoint_activations recompute_granularity",
    "offload_optimizer=cpu": "offload cpu_offload optimizer_offload",
    "attention": "attn attn_implementation flash_attention flash_attn use_flash_attn",
    "lora_rank": "lora lora_r",
    "quantize=nf4": "qlora load_in_4bit",
    "deepspeed_config": "deepspeed ds_config deepspeed_config_file",
    "seq_len": "seq seq_length sequence_length max_seq_len max_seq_length max_length model_max_length context_length "
    "block_size cutoff_len",
    "micro_batch": "batch batch_size micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu "
    "local_batch_size mbs",
    "grad_accum": "gradient_accumulation_steps grad_accum_steps gradient_accumulation accumulate_grad_batches",
    "global_batch": "global_batch_size train_batch_size gbs",
    "price_per_gpu_hour": "price cost gpu_price",
    "json": "format output_format",
    "explain": "verbose details",
}
_OURS = {theirs: ours for ours, names in _ELSEWHERE.items() for theirs in names.split()}


def ours_for(name: str) -> str:
    """The name in zeroplan for another program's flag or key, ``name`` or ``name=value``; empty if unknown.

    >>> ours_for("--batch-size"), ours_for("gradient_checkpointing"), ours_for("colour")
    ('micro_batch', 'recompute=full', '')
    """
    return _OURS.get(name.strip("-").lower().replace("-", "_"), "")


def meant(value: str, choices: list[str]) -> str:
    """The choice that a mistyped value probably means: its first or last words, or the nearest spelling; empty if none.

    >>> optimizers = ["adamw", "adam", "adamw-8bit"]
    >>> [meant(value, optimizers) for value in ("AdamW", "adamw_torch", "paged_adamw_8bit", "adamw8bit", "prodigy")]
    ['adamw', 'adamw', 'adamw-8bit', 'adamw-8bit', '']
    >>> meant("zero3", ["0", "1", "2", "3"]), meant("flash_attention_2", ["sdpa", "flash", "eager"])
    ('3', 'flash')
    >>> meant("4bit", ["none", "nf4", "nf4-double", "gptq"])
    'nf4'
    """
    import difflib  # noqa: PLC0415  only an error pays for it

    folded = value.lower().replace("_", "-")
    folded = {"4bit": "nf4", "4-bit": "nf4", "int4": "nf4", "qlora": "nf4"}.get(folded, folded)
    words = [one for one in choices if f"{folded}-".startswith(f"{one}-") or f"-{folded}".endswith(f"-{one}")]
    near = [max(words, key=len)] if words else difflib.get_close_matches(folded, choices, n=1, cutoff=0.6)
    return next(iter(near or [choice for choice in choices if folded.endswith(choice)]), "")

"""Keys of ``config.json`` in any family that are no sizes of tensors. Which of them matter for memory, and why?

A family's own keys are in its file (``zeroplan/transformer/families``). A test compares both with every key of every class.
"""

#: Keys with the only values that the formulas cover, in all families; absent or null means the class's default.
ONLY: dict[str, tuple[object, ...]] = {
    "output_hidden_states": (False,),
    "output_attentions": (False,),
    "per_layer_config": ({},),
}

#: Keys that change no tensor of a training step in any family, by reason.
HARMLESS: dict[str, tuple[str, ...]] = {
    "names, versions and code": (
        "model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "auto_map", "custom_pipelines",
        "finetuning_task", "language", "license", "revision", "unsloth_version", "unsloth_fixed", "transformers.js_config",
        "quantization", "tokenizer_class", "task_specific_params", "prefix", "text_config_dict", "vision_config_dict",
    ),
    "the recipe sets the dtype of trained weights": ("dtype", "torch_dtype", "use_bfloat16", "bf16", "fp16", "fp32"),
    "--attention and the engine decide how it computes": (
        "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
        "experts_implementation", "_experts_implementation", "use_flash_attn", "use_flash_attention_2", "torchscript",
        "attn_config", "compile", "gradient_checkpointing",
    ),
    "numbers in a formula, which change no tensor": (
        "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "initializer_range", "init_std", "embedding_multiplier",
        "rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base", "rotary_base", "rope_local_base_freq",
        "original_max_position_embeddings", "initial_context_length", "rope_type",
    ),
    "special tokens": (
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "cls_token_id", "mask_token_id",
        "decoder_start_token_id", "word_embed_pad_token_id", "eot_token_id", "bos_token", "eos_token", "pad_token",
    ),
    "for generating text": (
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens", "diversity_penalty",
        "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
        "min_length", "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
        "cache_implementation", "max_new_tokens", "penalty_alpha",
    ),
    "the Trainer switches the cache off for training (transformers 5.23, trainer.py)": ("use_cache",),
    "for models with another head": (
        "id2label", "label2id", "num_labels", "problem_type", "classifier_dropout", "classifier_bias", "classifier_activation",
    ),
    "how a model returns its outputs": ("return_dict", "use_return_dict"),
    "read by no decoder of these families": (
        "chunk_size_feed_forward", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "cross_attention_hidden_size",
        "pruned_heads", "tf_legacy_loss", "pretraining_tp", "ep_size", "seq_length", "use_parallel_embedding",
        "use_cache_quantization",
        "use_cache_kernel", "use_dynamic_ntk", "use_logn_attn", "softmax_in_fp32",
    ),
    "named by a note of its own": ("architectures", "quantization_config", "compression_config"),
}  # fmt: skip

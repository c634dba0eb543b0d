"""What do the keys of a ``config.json`` mean that size no tensor: which matter, which do not, and why?

Source of every row: ``models/<family>/configuration_<family>.py`` and ``modeling_<family>.py`` of transformers 5.23, and the
``config.json`` of published models. A test holds these tables against every key of every family's class.
"""

_DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
#: Rates of dropout that each family's class reads, with its default.
DROPOUT: dict[str, dict[str, float]] = {
    **{family: {"attention_dropout": 0.0} for family in _DECODERS},
    "phi3": {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "opt": {"dropout": 0.1, "attention_dropout": 0.0, "layerdrop": 0.0},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
}
#: Keys with which every family's formulas hold for these values alone; a key that is absent or null has the class's default.
ONLY: dict[str, tuple[object, ...]] = {
    "output_hidden_states": (False,),
    "output_attentions": (False,),
    "per_layer_config": ({},),
}
#: The same for a family's own keys.
ONLY_IN: dict[str, dict[str, tuple[object, ...]]] = {
    "gpt2": {"reorder_and_upcast_attn": (False,)},
    "bloom": {"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,)},
    "gemma2": {"use_bidirectional_attention": (False,)},
    "gemma3_text": {
        "use_bidirectional_attention": (False,), "final_logit_softcapping": (), "attn_logit_softcapping": (),
        "sliding_window_pattern": (6,), "_sliding_window_pattern": (6,),
    },
    "gpt_neox": {"rotary_pct": (0.25,), "partial_rotary_factor": (0.25,)},
    "deepseek_v3": {
        "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "rope_interleave": (True,), "norm_topk_prob": (True,),
    },
}  # fmt: skip
#: Keys that may be absent, but not null.
NOT_NULL: dict[str, tuple[str, ...]] = {"gemma2": ("final_logit_softcapping", "attn_logit_softcapping")}
#: How many layers it takes until the kinds of attention come again, all but the last of which see a window.
WINDOW_PATTERN = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
#: Keys whose other values leave small tensors uncounted: the value that is counted, and what another one does.
COUNTED_AS: dict[str, dict[str, tuple[object, str]]] = {
    "mixtral": {
        "router_jitter_noise": (0.0, "the noise takes up to 1 % of a block more"),
        "output_router_logits": (False, "the loss of the router and its logits take some bytes per token and expert more"),
    },
    "qwen3_moe": {
        "norm_topk_prob": (True, "without the division the router takes some bytes per token less"),
        "output_router_logits": (False, "the loss of the router and its logits take some bytes per token and expert more"),
    },
    "deepseek_v3": {"output_router_logits": (False, "the router's logits take some bytes per token and expert more")},
    "gpt_oss": {
        "output_router_logits": (False, "the loss of the router and its logits take some bytes per token and expert more"),
    },
    "phi3": {"partial_rotary_factor": (1.0, "rotary positions of a part of each head take less")},
}  # fmt: skip
#: Of a key of ``COUNTED_AS`` that is absent: what the class assumes, where that is not what is counted.
ASSUMED: dict[str, dict[str, object]] = {"qwen3_moe": {"norm_topk_prob": False}}

#: Keys that change no tensor of a training step, by the reason, in every family.
HARMLESS: dict[str, tuple[str, ...]] = {
    "names, versions and code": (
        "model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "auto_map", "custom_pipelines",
        "finetuning_task", "language", "license", "revision", "unsloth_version", "unsloth_fixed", "transformers.js_config",
        "quantization", "tokenizer_class", "task_specific_params", "prefix", "text_config_dict", "vision_config_dict",
    ),
    "the recipe says in which dtype weights are trained": ("dtype", "torch_dtype", "use_bfloat16", "bf16", "fp16", "fp32"),
    "--attention and the engine say how it is computed": (
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
#: The same for a family's own keys.
HARMLESS_IN: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "a scale is a number, which is multiplied with whatever it is": (
            "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
        ),
        "for models with another head": (
            "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        ),
        "read by no decoder of these families": ("n_ctx", "n_special", "predict_special_tokens", "afn", "gradient_checkpointing"),
    },
    "gpt_neox": {"for models with another head": ("classifier_dropout",)},
    "bloom": {
        "read by no decoder of these families": (
            "attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion", "unk_token_id", "offset_alibi",
            "skip_bias_add", "skip_bias_add_qkv", "n_positions",
        ),
    },
    "gemma2": {
        "numbers in a formula, which change no tensor": ("query_pre_attn_scalar",), "not read by the class": ("hidden_act",),
    },
    "gemma3_text": {
        "numbers in a formula, which change no tensor": ("query_pre_attn_scalar",), "not read by the class": ("hidden_act",),
    },
    "mixtral": {"the loss of the router, which output_router_logits switches on": ("router_aux_loss_coef",)},
    "qwen3_moe": {
        "the loss of the router, which output_router_logits switches on": ("router_aux_loss_coef",),
        "read by no decoder of these families": ("max_window_layers",),
    },
    "deepseek_v3": {
        "numbers in a formula, which change no tensor": ("routed_scaling_factor",),
        "groups of experts, which mask scores of some bytes per token": ("n_group", "topk_group"),
        "made of other keys": ("qk_head_dim", "head_dim"),
        "multi-token prediction, which transformers does not build": ("num_nextn_predict_layers", "num_mtp_layers"),
        "of DeepSeek's own code": ("aux_loss_alpha", "seq_aux", "moe_layer_freq", "router_aux_loss_coef"),
    },
    "gpt_oss": {
        "numbers in a formula, which change no tensor": ("swiglu_alpha", "swiglu_limit"),
        "the loss of the router, which output_router_logits switches on": ("router_aux_loss_coef",),
        "its experts have an activation of their own": ("hidden_act",),
        "another name of num_experts_per_tok": ("experts_per_token",),
    },
}  # fmt: skip

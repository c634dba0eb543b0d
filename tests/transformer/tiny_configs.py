"""One small config.json per family. Each optional part of its architecture is switched on or off in turn."""

from __future__ import annotations

_LLAMA = {
    "vocab_size": 11, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT = {"vocab_size": 11, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DEEPSEEK = _LLAMA | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 12, "n_group": 2, "topk_group": 1,
}  # fmt: skip

_KIMI = {key: value for key, value in _DEEPSEEK.items() if key not in ("n_routed_experts", "n_shared_experts", "q_lora_rank")} | {
    "num_hidden_layers": 5, "num_experts": 8, "num_shared_experts": 2, "n_group": 1, "mla_use_nope": True,
    "linear_attn_config": {
        "head_dim": 8, "num_heads": 3, "short_conv_kernel_size": 4, "full_attn_layers": [2, 5], "kda_layers": [1, 3, 4],
    },
}  # fmt: skip
_NEXT = _LLAMA | {
    "num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16,
    "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}  # fmt: skip

_GEMMA_4 = _LLAMA | {
    "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": 16,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA_4_E = {key: value for key, value in _GEMMA_4.items() if key != "num_global_key_value_heads"} | {
    "num_hidden_layers": 12, "num_key_value_heads": 1, "attention_k_eq_v": False, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 13, "num_kv_shared_layers": 6, "use_double_wide_mlp": True,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 4,
}  # fmt: skip
_V2 = {key: value for key, value in _DEEPSEEK.items() if key not in ("n_group", "topk_group")}
_YOUTU = _LLAMA | {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_chunk_size": 32,
}  # fmt: skip
_LLAMA_4 = _LLAMA | {
    "num_hidden_layers": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "intermediate_size_mlp": 48,
    "head_dim": 16, "attention_chunk_size": 16,
}  # fmt: skip
_GRANITE_4 = _LLAMA | _MAMBA | {
    "num_hidden_layers": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
    "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
}  # fmt: skip
_NEMOTRON = _LLAMA | {
    "num_hidden_layers": 5, "hybrid_override_pattern": "M-*-M", "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 12,
    "n_groups": 2, "ssm_state_size": 10, "conv_kernel": 3, "chunk_size": 32,
}  # fmt: skip
_DENSE_NEXT = {key: value for key, value in _NEXT.items() if "expert" not in key and key != "moe_intermediate_size"}
_GLM = _LLAMA | {
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
_QWEN2_MOE = _LLAMA | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48,
}  # fmt: skip
_HUNYUAN = _LLAMA | {
    "num_experts": 8, "num_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
}  # fmt: skip
_EXAONE_MOE = _LLAMA | {
    "num_hidden_layers": 5, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "sliding_window": 16,
}  # fmt: skip
_LFM2_MOE = _LLAMA | {
    "num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 2,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
}  # fmt: skip
_FLASH = {key: value for key, value in _DEEPSEEK.items() if key not in ("first_k_dense_replace", "n_group", "topk_group")}

_LIGHTNING = _LLAMA | {
    "num_hidden_layers": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "block_size": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip

TINY: dict[str, dict[str, object]] = {
    "llama": _LLAMA,
    "llama, biases": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama, tied, wide heads": _LLAMA | {"tie_word_embeddings": True, "head_dim": 16},
    "mistral": _LLAMA,
    "mistral, wide heads": _LLAMA | {"head_dim": 16},
    "ministral3": _LLAMA | {"head_dim": 16},
    "ministral3, a window, tied": _LLAMA | {"head_dim": 8, "sliding_window": 16, "tie_word_embeddings": True},
    "qwen2": _LLAMA,
    "qwen2, tied": _LLAMA | {"tie_word_embeddings": True},
    "qwen2, a window in some layers": _LLAMA | {
        "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "num_hidden_layers": 5,
    },
    "qwen3": _LLAMA | {"head_dim": 16},
    "qwen3, a window in all layers": _LLAMA | {
        "head_dim": 16, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "tie_word_embeddings": True,
    },
    "qwen3, biases": _LLAMA | {"attention_bias": True},
    "seed_oss": _LLAMA | {"head_dim": 16},
    "seed_oss, no biases, tied": _LLAMA | {"attention_bias": False, "tie_word_embeddings": True},
    "smollm3": _LLAMA | {"num_hidden_layers": 5},
    "smollm3, biases, untied, three layers": _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "hunyuan_v1_dense": _LLAMA | {"head_dim": 16},
    "hunyuan_v1_dense, biases, tied": _LLAMA | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    "arcee": _LLAMA | {"head_dim": 16},
    "arcee, biases, tied": _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "cwm": _LLAMA | {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 16},
    "cwm, biases, tied": _LLAMA | {"head_dim": 8, "mlp_bias": True, "tie_word_embeddings": True},
    "jais2": _LLAMA,
    "jais2, no biases, tied": _LLAMA | {
        "head_dim": 16, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    },
    "helium": _LLAMA | {"head_dim": 8},
    "helium, biases, tied": _LLAMA | {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "stablelm": _LLAMA,
    "stablelm, biases, tied": _LLAMA | {"use_qkv_bias": True, "tie_word_embeddings": True},
    "gemma": _LLAMA | {"head_dim": 16},
    "gemma, untied, biases": _LLAMA | {"tie_word_embeddings": False, "attention_bias": True},
    "gemma2": _LLAMA | {"head_dim": 16},
    "hyperclovax": _LLAMA | {"head_dim": 16},
    "hyperclovax, biases, tied": _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gemma2, untied, biases": _LLAMA | {"tie_word_embeddings": False, "attention_bias": True},
    "gemma3_text": _LLAMA | {"head_dim": 16},
    "gemma3_text, biases": _LLAMA | {"attention_bias": True},
    "gemma4_text": _GEMMA_4,
    "gemma4_text, biases, untied, wide heads": _GEMMA_4 | {
        "attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 12, "global_head_dim": 264,
    },
    "gemma4_text, embeddings of each layer, shared keys": _GEMMA_4_E,
    "gemma4_text, embeddings of each layer": _GEMMA_4_E | {
        "num_hidden_layers": 6, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "layer_types": None,
        "tie_word_embeddings": False, "attention_bias": True,
    },
    "gemma4_text, experts": _GEMMA_4 | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
    },
    "phi3": _LLAMA,
    "phi3, tied": _LLAMA | {"tie_word_embeddings": True},
    "olmo2": _LLAMA,
    "olmo2, biases, wide heads": _LLAMA | {"attention_bias": True, "head_dim": 16},
    "olmo3": _LLAMA,
    "olmo3, biases, more layers": _LLAMA | {"attention_bias": True, "num_hidden_layers": 5},
    "exaone4": _LLAMA | {"num_hidden_layers": 5, "sliding_window": 16},
    "exaone4, no window, tied": _LLAMA | {
        "sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True,
    },
    "granite": _LLAMA,
    "granite, biases, tied": _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "ernie4_5": _LLAMA | {"head_dim": 16},
    "ernie4_5, untied, narrow heads": _LLAMA | {"head_dim": 8, "tie_word_embeddings": False},
    "glm": _LLAMA | {"head_dim": 16},
    "cohere": _LLAMA,
    "cohere, untied, biases": _LLAMA | {"tie_word_embeddings": False, "attention_bias": True},
    "cohere, norms of heads": _LLAMA | {"use_qk_norm": True},
    "cohere2": _LLAMA | {"num_hidden_layers": 5, "sliding_window": 16},
    "starcoder2": _LLAMA,
    "starcoder2, untied": _LLAMA | {"tie_word_embeddings": False},
    "glm4": _LLAMA | {"head_dim": 16},
    "glm4, no biases, tied": _LLAMA | {"attention_bias": False, "tie_word_embeddings": True, "head_dim": 8},
    "gpt2": _GPT | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt2, untied, narrow": _GPT | {
        "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 48, "tie_word_embeddings": False,
    },
    "gpt_neox": _GPT | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gpt_neox, no bias, tied": _GPT | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "attention_bias": False, "tie_word_embeddings": True,
    },
    "phi": _GPT | {
        "hidden_size": 96, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "partial_rotary_factor": 2 / 3,
    },
    "phi, tied": _GPT | {
        "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "tie_word_embeddings": True,
    },
    "opt": _GPT | {
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64,
    },
    "opt, untied": _GPT | {
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
    "bloom": _GPT | {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "bloom, untied": _GPT | {"hidden_size": 32, "n_layer": 3, "n_head": 4, "tie_word_embeddings": False},
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe, biases, tied": _LLAMA | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "tie_word_embeddings": True,
    },
    "olmoe": _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2},
    "olmoe, biases, tied": _LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "tie_word_embeddings": True,
    },
    "minimax_m2": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    "minimax": _LIGHTNING,
    "minimax, tied, one chunk": _LIGHTNING | {"block_size": 256, "tie_word_embeddings": True},
    "hunyuan_v1_moe": _LLAMA | {"num_experts": 4, "moe_topk": [2, 2, 2], "head_dim": 16},
    "hunyuan_v1_moe, biases, tied": _LLAMA | {
        "num_experts": 4, "moe_topk": 2, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True,
    },
    "ernie4_5_moe": _LLAMA | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "head_dim": 16},
    "ernie4_5_moe, no shared experts, two dense layers, untied": _LLAMA | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 0, "moe_layer_start_index": 2,
        "tie_word_embeddings": False,
    },
    "qwen2_moe": _QWEN2_MOE,
    "qwen2_moe, no biases, tied": _QWEN2_MOE | {"qkv_bias": False, "tie_word_embeddings": True},
    "qwen3_moe": _LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16, "mlp_only_layers": [0],
    },
    "qwen3_moe, biases, no dense layer": _LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "attention_bias": True,
    },
    "qwen3_next": _NEXT,
    "qwen3_next, biases, one key head for each": _NEXT | {"attention_bias": True, "linear_num_value_heads": 2},
    "qwen3_5_text": _DENSE_NEXT,
    "qwen3_5_text, biases, tied": _DENSE_NEXT | {
        "attention_bias": True, "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": {key: value for key, value in _NEXT.items() if key != "intermediate_size"},
    "llama4_text": _LLAMA_4,
    "llama4_text, every second layer, no norms, biases": _LLAMA_4 | {
        "interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True,
    },
    "granitemoehybrid": _GRANITE_4,
    "granitemoehybrid, no experts, positions, tied": _GRANITE_4 | {
        "num_local_experts": 0, "position_embedding_type": "rope", "layer_types": ["attention"] * 5, "tie_word_embeddings": True,
    },
    "nemotron_h": _NEMOTRON,
    "nemotron_h, experts": _NEMOTRON | {
        "hybrid_override_pattern": "ME*EM", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 48,
    },
    "nemotron_h, experts with a latent": _NEMOTRON | {
        "hybrid_override_pattern": "ME*EM", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 20,
    },
    "falcon_h1": _LLAMA | _MAMBA | {"mamba_d_ssm": 48, "head_dim": 16},
    "falcon_h1, a norm, biases, tied": _LLAMA | _MAMBA | {
        "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "bamba": _LLAMA | _MAMBA | {"num_hidden_layers": 5, "attn_layer_indices": [1, 4]},
    "bamba, biases, tied": _LLAMA | _MAMBA | {
        "attn_layer_indices": [0, 1, 2], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
    "deepseek_v2": _V2 | {"q_lora_rank": None},
    "deepseek_v2, compressed queries, biases": _V2 | {"attention_bias": True},
    "mistral4": _V2,
    "mistral4, whole queries, biases, no dense layer": _V2 | {
        "q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0,
    },
    "kimi_linear": _KIMI,
    "kimi_linear, compressed queries, keys of transformers": {
        **{key: value for key, value in _KIMI.items() if key != "linear_attn_config"}, "q_lora_rank": 20, "linear_num_heads": 2,
        "linear_head_dim": 8, "linear_conv_kernel_dim": 3, "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"],
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v3, whole queries, biases": _DEEPSEEK | {"q_lora_rank": None, "attention_bias": True},
    "deepseek_v3, biases, no dense layer": _DEEPSEEK | {"attention_bias": True, "first_k_dense_replace": 0},
    "glm4_moe_lite": _FLASH,
    "glm4_moe_lite, whole queries, biases": _FLASH | {"q_lora_rank": None, "attention_bias": True},
    "glm4_moe": _GLM | {"head_dim": 16},
    "glm4_moe, biases, norms of heads": _GLM | {"attention_bias": True, "use_qk_norm": True, "head_dim": 8},
    "dots1": _GLM | {"norm_topk_prob": True},
    "dots1, biases, no dense layer": _GLM | {"attention_bias": True, "first_k_dense_replace": 0, "norm_topk_prob": True},
    "solar_open": {key: value for key, value in _GLM.items() if key not in ("intermediate_size", "first_k_dense_replace")},
    "solar_open, biases, tied": {
        **{key: value for key, value in _GLM.items() if key not in ("intermediate_size", "first_k_dense_replace")},
        "attention_bias": True, "tie_word_embeddings": True, "head_dim": 16,
    },
    "deepseek_v32": _DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 12, "index_topk": 16},
    "deepseek_v32, biases, no dense layer, tied": _DEEPSEEK | {
        "index_n_heads": 3, "index_head_dim": 8, "index_topk": 64, "attention_bias": True, "first_k_dense_replace": 0,
        "tie_word_embeddings": True,
    },
    "deepseek_v2, groups of experts": _V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "glm_moe_dsa": _DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 12, "index_topk": 16},
    "glm_moe_dsa, picked keys of several layers": _DEEPSEEK | {
        "index_n_heads": 2, "index_head_dim": 12, "index_topk": 16, "num_hidden_layers": 7, "index_topk_freq": 4,
        "index_skip_topk_offset": 1,
    },
    "apertus": _LLAMA | {"head_dim": 16},
    "apertus, biases, tied": _LLAMA | {"attention_bias": True, "tie_word_embeddings": True},
    "internlm3": _LLAMA | {"head_dim": 8},
    "internlm3, biases, tied": _LLAMA | {"head_dim": 16, "qkv_bias": True, "bias": True, "tie_word_embeddings": True},
    "youtu": _YOUTU,
    "youtu, whole queries, biases, untied": _YOUTU | {"q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": False},
    "olmo_hybrid": _LLAMA | {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "olmo_hybrid, positions, biases, several heads for a key, tied": _LLAMA | {
        "num_hidden_layers": 5, "attention_bias": True, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_key_head_dim": 10, "linear_value_head_dim": 14, "tie_word_embeddings": True,
    },
    "falcon": _GPT | {"hidden_size": 32, "ffn_hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    "falcon, several key/value heads, untied": _GPT | {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True,
        "tie_word_embeddings": False,
    },
    "lfm2": _LLAMA | {"num_hidden_layers": 5, "layer_types": _LFM2_MOE["layer_types"], "block_multiple_of": 8},
    "lfm2, untied, all attention": _LLAMA | {
        "tie_word_embeddings": False, "full_attn_idxs": [0, 1, 2], "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": _LFM2_MOE,
    "exaone_moe": _EXAONE_MOE,
    "exaone_moe, no dense layer, tied": _EXAONE_MOE | {
        "head_dim": 16, "first_k_dense_replace": 0, "num_shared_experts": 2, "tie_word_embeddings": True,
    },
    "lfm2_moe, no dense layer, untied": _LFM2_MOE | {"num_dense_layers": 0, "tie_word_embeddings": False},
    "hy_v3": _HUNYUAN,
    "hy_v3, biases, no dense layer, tied": _HUNYUAN | {
        "attention_bias": True, "mlp_layer_types": ["sparse"] * 3, "tie_word_embeddings": True,
    },
    "gpt_oss": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "gpt_oss, no bias": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "attention_bias": False},
}  # fmt: skip


def tiny_config(case: str) -> dict[str, object]:
    """Return the config.json of a case; its ``model_type`` is the case's first word."""
    return {"model_type": case.partition(",")[0], **TINY[case]}

"""Under which keys does each family's config.json hold its sizes, and what does its class assume where a key is absent?

Source of every row: ``models/<family>/configuration_<family>.py`` and ``modeling_<family>.py`` of transformers 5.23.
"""

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok")
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
#: Fields a config must state, where that is not ``SIZES``.
REQUIRED: dict[str, tuple[str, ...]] = {
    "gpt2": ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"),
    "bloom": ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "opt": (*SIZES, "max_position_embeddings"),
    "gemma3_text": ("hidden_size", "intermediate_size", "num_hidden_layers"),
    "mixtral": (*SIZES, *_EXPERT_SIZES),
    "gpt_oss": (*SIZES, *_EXPERT_SIZES),
    "qwen3_moe": (*SIZES, *_EXPERT_SIZES, "moe_intermediate_size"),
    "deepseek_v3": (
        *SIZES, *_EXPERT_SIZES, *_LATENT_SIZES, "moe_intermediate_size", "num_shared_experts", "num_dense_layers",
    ),
}  # fmt: skip
#: The keys under which a family's config.json holds a field, where that is not the field's own name; the first is its own.
KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "hidden_size": ("n_embd", "hidden_size"),
        "intermediate_size": ("n_inner",),
        "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "max_position_embeddings": ("n_positions", "max_position_embeddings"),
    },
    "bloom": {
        "hidden_size": ("hidden_size", "n_embed"),
        "intermediate_size": ("n_inner",),
        "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "max_position_embeddings": ("seq_length",),
    },
    "opt": {"intermediate_size": ("ffn_dim",)},
    "mixtral": {"num_experts": ("num_local_experts", "num_experts")},
    "gpt_oss": {"num_experts": ("num_local_experts", "num_experts")},
    "qwen3_moe": {"num_experts": ("num_experts", "num_local_experts")},
    "deepseek_v3": {
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "num_shared_experts": ("n_shared_experts",),
        "num_dense_layers": ("first_k_dense_replace",),
    },
}
#: What a class assumes where a config is silent. Not here: key/value heads = heads, head_dim = hidden / heads, no window.
DEFAULTS: dict[str, dict[str, int | bool]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    "gemma2": {
        "max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262208, "sliding_window": 4096, "tie_word_embeddings": True,
    },
    "phi3": {"max_position_embeddings": 4096},
    "gpt2": {"tie_word_embeddings": True},
    "gpt_neox": {"max_position_embeddings": 2048, "attention_bias": True},
    "opt": {"tie_word_embeddings": True},
    "bloom": {"max_position_embeddings": 2048, "tie_word_embeddings": True},
    "mixtral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen3_moe": {"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    "deepseek_v3": {"max_position_embeddings": 4096, "num_key_value_heads": 128},
    "gpt_oss": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "attention_bias": True,
    },
}  # fmt: skip
#: What a family's class has fixed: a config that says otherwise describes another architecture.
FIXED: dict[str, dict[str, bool | int]] = {
    "llama": {},
    "mistral": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"attention_bias": True, "mlp_bias": False},
    "qwen3": {"mlp_bias": False},
    "gemma2": {"mlp_bias": False},
    "gemma3_text": {"mlp_bias": False},
    "phi3": {"attention_bias": False, "mlp_bias": False},
    "gpt2": {"add_cross_attention": False, "attention_bias": True, "mlp_bias": True},
    "gpt_neox": {"mlp_bias": True},
    "opt": {
        "enable_bias": True, "layer_norm_elementwise_affine": True, "do_layer_norm_before": True,
        "_remove_final_layer_norm": False, "attention_bias": True, "mlp_bias": True,
    },
    "bloom": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"attention_bias": False, "mlp_bias": False},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_bias": False},
    "deepseek_v3": {"moe_layer_freq": 1, "mlp_bias": False},
    "gpt_oss": {"mlp_bias": True},
}  # fmt: skip
#: Families whose class derives the head width from the model's width and has as many key/value heads as heads.
PLAIN_HEADS = ("gpt2", "gpt_neox", "opt", "bloom")
#: The key of the MLP's activation function, where it is not ``hidden_act``; BLOOM has none.
ACTIVATION_KEY = {
    "gpt2": "activation_function", "opt": "activation_function", "gemma2": "hidden_activation",
    "gemma3_text": "hidden_activation",
}  # fmt: skip
#: Families whose window counts only where ``use_sliding_window`` says so.
OPTIONAL_WINDOW = ("qwen2", "qwen3", "qwen3_moe")
#: The same classes under other names.
SAME_AS = {"kimi_k2": "deepseek_v3"}
OTHER_KINDS: dict[str, tuple[str, ...]] = {
    "an encoder-decoder model": (
        "t5", "mt5", "umt5", "longt5", "t5gemma", "switch_transformers", "bart", "mbart", "plbart", "pegasus", "marian",
        "m2m_100", "nllb-moe", "led", "blenderbot", "whisper", "speech_to_text", "encoder-decoder", "vision-encoder-decoder",
    ),
    "an encoder": (
        "bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "camembert", "mpnet",
        "modernbert", "longformer", "esm",
    ),
    "a vision model": (
        "vit", "deit", "beit", "swin", "dinov2", "clip", "clip_vision_model", "siglip", "siglip_vision_model", "resnet",
        "convnext", "detr", "sam", "vit_mae",
    ),
    "a speech model": ("wav2vec2", "hubert", "wavlm", "encodec", "speecht5"),
    "a state-space model": ("mamba", "mamba2", "falcon_mamba", "rwkv"),
}  # fmt: skip

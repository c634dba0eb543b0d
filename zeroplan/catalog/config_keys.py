"""Values of ``model_type`` beyond the families: aliases, and kinds of models that are not decoder-only."""

#: Other names of a family, and text parts with the same blocks and parameters as a family. Source: transformers 5.23,
#: ``models/qwen3_vl/modeling_qwen3_vl.py``, ``Qwen3VLTextDecoderLayer``, and the same classes of the other models.
SAME_AS = {
    "kimi_k2": "deepseek_v3", "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe", "gemma4_unified_text": "gemma4_text", "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe", "iquestcoder": "llama", "exaone": "llama",
}  # fmt: skip
#: EXAONE 3's names of keys, and defaults that differ from Llama's. Source: transformers 5.24,
#: ``models/exaone/configuration_exaone.py``; its model is ``LlamaForCausalLM``.
EXAONE_NAMES = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"}
EXAONE_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 4096}
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

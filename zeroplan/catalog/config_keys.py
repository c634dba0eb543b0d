"""The kinds of models that are known by their ``model_type`` alone."""

#: Other names of the same classes.
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

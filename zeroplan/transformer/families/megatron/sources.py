"""Sources of a Megatron-Core layer that several of its modules name."""

CORE = "Megatron-LM 2026-08, megatron/core"
LATENT = f"{CORE}/transformer/multi_latent_attention.py, MLASelfAttention.get_query_key_value_tensors"

"""Trains a small Llama in a plain loop with FlashAttention 2; each sequence ends in one token of padding."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, vocab_size=128,
    use_cache=False,
)  # fmt: skip
model = LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2", dtype=torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    tokens = torch.randint(0, 128, (4, 512), device="cuda")
    mask = torch.ones(4, 512, dtype=torch.int64, device="cuda")
    mask[:, -1] = 0
    model(input_ids=tokens, labels=tokens, attention_mask=mask).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
